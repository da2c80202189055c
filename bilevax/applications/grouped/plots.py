"""Plots of a learnt prior, and of how much groups are their own."""

from __future__ import annotations

from typing import Any

import numpy as np


def plot_prior(prior: Any, names: Any, ax: Any = None) -> Any:
    """The mean of every coefficient between groups, with bars of one standard deviation."""
    ax = _axes(ax)
    coef = np.atleast_2d(prior.coef)
    places = np.arange(coef.shape[1])
    for number, one in enumerate(coef):
        shifted = places + 0.1 * (number - (len(coef) - 1) / 2)
        ax.errorbar(shifted, one, prior.deviation, fmt="o", capsize=3)
    ax.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)
    ax.set_xticks(places, [str(place) for place in places] if names is None else names)
    ax.set_xlabel("feature")
    ax.set_ylabel("coefficient: mean ± deviation between groups")
    return ax


def plot_shrinkage(share: np.ndarray, ax: Any = None) -> Any:
    """A histogram of the groups' shares of their own."""
    ax = _axes(ax)
    ax.hist(share, bins=np.linspace(0, 1, 41))
    ax.set_xlabel("how much a group is its own (0: the prior, 1: its rows)")
    ax.set_ylabel("groups")
    return ax


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'bilevax[experiments]'") from error
    return Figure(layout="constrained").add_subplot()
