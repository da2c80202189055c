"""Partial AUC, average precision and AUC of many tasks: scores that rank the rows of a rare class first."""

from bilevax.applications.auc.classifiers import AveragePrecisionClassifier, PartialAUCClassifier
from bilevax.applications.auc.multi_task import TaskRows, centres, multi_task_auc
from bilevax.applications.auc.objectives import average_precision, partial_auc, thresholds

__all__ = [
    "AveragePrecisionClassifier",
    "PartialAUCClassifier",
    "TaskRows",
    "average_precision",
    "centres",
    "multi_task_auc",
    "partial_auc",
    "thresholds",
]
