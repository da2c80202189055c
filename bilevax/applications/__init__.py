"""Applications of bilevax, built on its public names only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bilevax.applications.classifier import ReweightedClassifier

__all__ = ["ReweightedClassifier"]


def __getattr__(name: str) -> Any:
    # scikit-learn is optional and slow to import, so it is imported only for the estimator.
    if name == "ReweightedClassifier":
        from bilevax.applications.classifier import ReweightedClassifier

        return ReweightedClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
