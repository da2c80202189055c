"""Tuned settings: the defaults of `TopKRecommender` and of the experiment on MovieLens."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


def tuned(data: str, method: str) -> dict[str, Any]:
    """The settings that `bilevax tune` found for a method on a data set; for unknown data, those of ML-1M.

    Example:
      >>> from bilevax.applications.ranking.presets import tuned
      >>> tuned("ml-1m", "k-song")["surrogate"]
      'logistic'
    """
    known = _known()
    return dict(known.get(data, {}).get(method) or known["ml-1m"].get(method, {}))


@functools.cache
def _known() -> dict[str, dict[str, dict[str, Any]]]:
    found = json.loads(
        resources.files("bilevax.applications.ranking").joinpath("tuned.json").read_text("utf-8")
    )
    return {name: methods for name, methods in found.items() if name != "about"}
