"""Top-K NDCG ranking: models trained through thresholds and ranks, which are lower levels."""

from bilevax.applications.ranking.discounts import Discount, Logarithmic, Power
from bilevax.applications.ranking.evaluation import evaluate, evaluate_parts, summarize
from bilevax.applications.ranking.fresh import FreshBSVRBv1, FreshKSONG, FreshSONG
from bilevax.applications.ranking.held_out import Held, hold_out
from bilevax.applications.ranking.lists import List, Lists
from bilevax.applications.ranking.losses import LOSSES, make_list_problem
from bilevax.applications.ranking.methods import BILEVEL, METHODS, TrainingSettings, make_method
from bilevax.applications.ranking.models import MF, Model, NeuMF
from bilevax.applications.ranking.objective import SmoothedNDCG, make_problem
from bilevax.applications.ranking.popularity import Popularity
from bilevax.applications.ranking.ratings import Ratings
from bilevax.applications.ranking.recommender import TopKRecommender
from bilevax.applications.ranking.side_by_side import Trainings, train_many
from bilevax.applications.ranking.start import start_levels
from bilevax.applications.ranking.surrogates import Logistic, Sigmoid, SquaredHinge, Surrogate
from bilevax.applications.ranking.training import Trained, train

__all__ = [
    "BILEVEL",
    "LOSSES",
    "METHODS",
    "MF",
    "Discount",
    "FreshBSVRBv1",
    "FreshKSONG",
    "FreshSONG",
    "Held",
    "List",
    "Lists",
    "Logarithmic",
    "Logistic",
    "Model",
    "NeuMF",
    "Popularity",
    "Power",
    "Ratings",
    "Sigmoid",
    "SmoothedNDCG",
    "SquaredHinge",
    "Surrogate",
    "TopKRecommender",
    "Trained",
    "TrainingSettings",
    "Trainings",
    "evaluate",
    "evaluate_parts",
    "hold_out",
    "make_list_problem",
    "make_method",
    "make_problem",
    "start_levels",
    "summarize",
    "train",
    "train_many",
]
