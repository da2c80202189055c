"""Partial AUC, average precision and AUC of many tasks: scores that rank the rows of a rare class first."""

from bilevax.applications.auc.classifiers import AveragePrecisionClassifier, PartialAUCClassifier
from bilevax.applications.auc.objectives import average_precision, partial_auc, thresholds

__all__ = [
    "AveragePrecisionClassifier",
    "PartialAUCClassifier",
    "average_precision",
    "partial_auc",
    "thresholds",
]
