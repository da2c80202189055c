"""The default settings of a method for a table: those of the search on MovieLens 1M, adapted to its size.

The rules come from `benchmarks/recommenders.py` and the searches in docs/ranking.md. With fewer pairs per
user, stronger weight decay is better for the bilevel methods; with fewer users, fewer users per step, so that
an epoch has as many steps as on MovieLens 1M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bilevax.applications.ranking.methods import BILEVEL, TrainingSettings
from bilevax.applications.ranking.presets import tuned
from bilevax.applications.ranking.ratings import Ratings

WARM_UP = 20  # epochs before a bilevel method, as in the search
_STEPS_PER_EPOCH, _LEAST_USERS = 24, 32
_PAIRS_PER_USER = 155.6  # of the search
_POWER, _MOST_DECAY = 0.8, 8.0


def method_settings(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the search, and in place of them those that are given.

    The settings of the search belong to its surrogate and its discount: with others they mean something else,
    and the defaults of `TrainingSettings` apply.
    """
    return dict(given) if _other_form(given) else tuned("ml-1m", method) | dict(given)


def table_settings(method: str, given: Mapping[str, Any], ratings: Ratings) -> TrainingSettings:
    """The settings of a method for the pairs of a table; those that are given stay as they are."""
    settings = TrainingSettings().replace(**method_settings(method, given))
    users, changes = ratings.users, {}
    if "cutoff" not in given:
        changes["cutoff"] = min(settings.cutoff, max(1, ratings.item_count // 2))
    per_step = settings.users_per_step
    if "users_per_step" not in given:
        per_step = min(per_step, max(users // _STEPS_PER_EPOCH, _LEAST_USERS))
    changes["users_per_step"] = min(per_step, users)
    if method in BILEVEL and "weight_decay" not in given and not _other_form(given):
        more = (_PAIRS_PER_USER * users / ratings.pairs) ** _POWER
        changes["weight_decay"] = min(settings.weight_decay * max(more, 1.0), _MOST_DECAY)
    return settings.replace(**changes)


def _other_form(given: Mapping[str, Any]) -> bool:
    return "surrogate" in given or "discount" in given
