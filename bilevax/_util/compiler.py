"""Compilers that are known to compute something wrong."""

from __future__ import annotations

import warnings

import jaxlib.version

# Sums of products over 2^15 numbers and more lose terms on a CPU: jax-ml/jax#39103.
WRONG_SUMS = frozenset({"0.10.2"})


def warn_of_wrong_sums(version: str = jaxlib.version.__version__) -> None:
    """Warns if the installed jaxlib is one that an installer would not have taken for this library."""
    if version in WRONG_SUMS:
        warnings.warn(
            f"jaxlib {version} computes wrong sums on CPUs (https://github.com/jax-ml/jax/issues/39103), and "
            f"answers may be wrong: install another version (pip install 'jaxlib!={version}')",
            RuntimeWarning,
            stacklevel=3,
        )
