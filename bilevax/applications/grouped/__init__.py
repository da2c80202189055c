"""Models of many groups that share what they have in common, in scikit-learn's form."""

from bilevax.applications.grouped.base import FittedPrior
from bilevax.applications.grouped.classifier import GroupedClassifier
from bilevax.applications.grouped.problem import make_problem
from bilevax.applications.grouped.regressor import GroupedRegressor

__all__ = ["FittedPrior", "GroupedClassifier", "GroupedRegressor", "make_problem"]
