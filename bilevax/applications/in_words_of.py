"""Warnings of a run in the words of an estimator that hides it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def in_words_of(**names: str) -> Iterator[None]:
    """Warnings that advise an argument of the run name the one of the estimator: `steps="max_iter"`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        text = str(one.message)
        for name, own in names.items():
            text = text.replace(f"{name}=", f"{own}=")
        warnings.warn(text, one.category, stacklevel=4)
