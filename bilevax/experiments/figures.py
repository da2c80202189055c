"""One style for all figures: a colour and a marker per method, bands, panel letters, widths of a paper.

A method has the same colour and marker in every figure. Figures are as wide as a column or a page, with text
of 7 and 8 points, and legends stand below their panels, never over curves. Values of a size, stages and
variants have shades instead (`shades`).
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

COLUMN, PAGE = 3.25, 6.75  # inches
RC: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # text stays text
}
_MARKERS = "osD^vPX<>hp8*d"
_BAND = 0.18  # how opaque a band is
_SEEN = 8  # markers on a line
_LEGEND: Any = {"frameon": False, "handlelength": 1.8, "columnspacing": 1.0}

P = ParamSpec("P")
T = TypeVar("T")


class Style(NamedTuple):
    """How a line or a bar looks."""

    colour: Any
    marker: str


# No two methods that meet in a figure have the same colour; no two at all the same colour and marker.
STYLES: dict[str, Style] = {
    "bsvrb v1": Style("#0072B2", "o"),
    "re bsvrb v1": Style("#56B4E9", "D"),
    "bsvrb v2": Style("#D55E00", "s"),
    "re bsvrb v2": Style("#E69F00", "D"),
    "rsvrb": Style("#009E73", "^"),
    "song": Style("#CC79A7", "v"),
    "k song": Style("#882255", "P"),
    "msvr v2": Style("#332288", "X"),
    "mmbo v2": Style("#DDAA33", "<"),
    "soba": Style("#44AA99", ">"),
    "ma soba": Style("#117733", "h"),
    "f2sa": Style("#AA4499", "p"),
    "f3sa": Style("#EE6677", "p"),
    "block page": Style("#661100", "8"),
    "block saga": Style("#999933", "*"),
    "block newton": Style("#000000", "d"),
    # Plain losses of rankings: they meet the first four and both SONGs only.
    "lambdarank": Style("#000000", "s"),
    "listnet": Style("#E69F00", "^"),
    "listmle": Style("#8C6D1F", "<"),
    "ranknet": Style("#44AA99", "h"),
    "approx ndcg": Style("#AA4499", "X"),
    "neural ndcg": Style("#661100", "p"),
    "softmax": Style("#888888", "8"),
    "gain softmax": Style("#117733", "*"),
    "sl@k": Style("#999933", "d"),
    "bpr": Style("#EE6677", ">"),
    # Noisy labels.
    "logistic regression": Style("#888888", "v"),
    "m = 1": Style("#A6CEE3", "P"),
    "m = 100": Style("#0072B2", "X"),
    "m = 100, v2": Style("#D55E00", "<"),
    "noisy rows": Style("#888888", "o"),
    "clean rows": Style("#44AA99", "s"),
    "both": Style("#DDAA33", "D"),
    "cleanlearning": Style("#AA4499", "^"),
    "reweightedclassifier": Style("#0072B2", "v"),
}
_OTHER_NAMES = {"mmbo": "mmbo v2", "msvr": "msvr v2"}


def spread_caption(text: str, count: int, runs: str = "seeds") -> str:
    """A caption that says what bands and bars are.

    Example:
      >>> spread_caption("Validation loss.", 4, "trials")
      'Validation loss. Means of 4 trials; bands and error bars: ± one standard deviation (n = 4).'
      >>> spread_caption("Validation loss.", 1)
      'Validation loss. One run (n = 1), without a band.'
    """
    if count == 1:
        return f"{text} One run (n = 1), without a band."
    return f"{text} Means of {count} {runs}; bands and error bars: ± one standard deviation (n = {count})."


def style_of(method: str) -> Style:
    """The style of a method, however its name is spelt: "BSVRBv1", "BSVRB v1" and "bsvrb v1 (fresh)" are one.

    Raises:
      KeyError: the method has none.

    Example:
      >>> style_of("BSVRBv1") == style_of("bsvrb v1 (fresh)")
      True
    """
    return STYLES[_plain_name(method)]


def _plain_name(method: str) -> str:
    name = method.removesuffix(" (fresh)")
    if name.lower() in STYLES:
        return name.lower()
    name = re.sub(r"(?<=[a-zA-Z])v(?=\d)", " v", name)  # BSVRBv1
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)  # BlockPAGE
    name = re.sub(r"[\s-]+", " ", name).lower()
    name = {"ksong": "k song", "masoba": "ma soba"}.get(name, name)
    return _OTHER_NAMES.get(name, name)


def styles_of(methods: Sequence[str]) -> dict[str, Style]:
    """The styles of methods that meet in a figure; those without one of their own get a free colour."""
    known = {name: STYLES[_plain_name(name)] for name in methods if _plain_name(name) in STYLES}
    taken = {style.colour for style in known.values()}
    spare = (style for style in STYLES.values() if style.colour not in taken)
    for name in methods:
        if name not in known:
            known[name] = style = next(spare)
            taken.add(style.colour)
    return known


def shades(count: int) -> list[Style]:
    """Styles of ordered values, from dark to light."""
    from matplotlib import colormaps

    places = np.linspace(0.0, 0.85, count) if count > 1 else [0.3]
    return [
        Style(colormaps["viridis"](place), marker)
        for place, marker in zip(places, itertools.cycle(_MARKERS), strict=False)
    ]


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Gives a function that draws a figure the sizes of text and lines of this module."""

    @functools.wraps(draw)
    def drawn(*arguments: P.args, **named: P.kwargs) -> T:
        import matplotlib as mpl

        with mpl.rc_context(RC):
            return draw(*arguments, **named)

    return drawn


def use_style() -> None:
    """Gives all figures of a program the sizes of text and lines of this module."""
    import matplotlib as mpl

    mpl.rcParams.update(RC)


def panels(
    rows: int, columns: int, *, height: float = 2.2, width: float | None = None, **shared: Any
) -> tuple[Any, Any]:
    """A figure with (rows, columns) panels, with letters if there are several.

    Args:
      rows: number of rows.
      columns: number of columns; with one, the figure is as wide as a column, else as a page.
      height: inches of a row.
      width: inches of the figure, in place of those.
      shared: `sharex` and `sharey` of the panels.
    """
    from matplotlib.figure import Figure

    wide = width or (COLUMN if columns == 1 else PAGE)
    figure = Figure(figsize=(wide, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    if rows * columns > 1:
        for axis, letter in zip(axes.flat, string.ascii_lowercase, strict=False):
            axis.set_title(letter, loc="left", fontweight="bold")
    return figure, axes


def curve(
    axis: Any, at: Any, runs: Any, style: Style, label: str | None = None, *, line: str = "-", **looks: Any
) -> None:
    """Draws the mean of runs, (runs, points), with a band of one standard deviation (ddof = 1)."""
    at, runs = np.asarray(at, float), np.atleast_2d(np.asarray(runs, float))
    band(axis, at, runs.mean(0), deviation(runs), style, label, line=line, **looks)


def band(
    axis: Any,
    at: Any,
    mean: Any,
    sd: Any,
    style: Style,
    label: str | None = None,
    *,
    line: str = "-",
    **looks: Any,
) -> None:
    """Draws a mean and a band of one standard deviation; on a logarithmic axis the band stays positive."""
    at, mean, sd = (np.asarray(values, float) for values in (at, mean, sd))
    every = max(1, len(at) // _SEEN)
    axis.plot(at, mean, line, color=style.colour, marker=style.marker, markevery=every, label=label, **looks)
    low = mean - sd
    if axis.get_yscale() == "log":
        low = np.maximum(low, np.nanmin(np.where(mean > 0, mean, np.nan)) / 2)
    axis.fill_between(at, low, mean + sd, color=style.colour, alpha=_BAND, linewidth=0)


def deviation(runs: Any) -> np.ndarray:
    """The standard deviation over the first axis, ddof = 1; zero for a single run."""
    runs = np.asarray(runs, float)
    return runs.std(0, ddof=1) if len(runs) > 1 else np.zeros(runs.shape[1:])


def bars(
    axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[Any]], styles: Mapping[str, Style]
) -> dict[str, np.ndarray]:
    """Draws bars in groups, one colour by name, with error bars of one standard deviation over runs.

    Args:
      axis: of a panel.
      groups: the label of every group.
      series: by name, for every group the values of its runs.
      styles: by name.

    Returns:
      The places of the bars, by name.
    """
    width = 0.8 / len(series)
    places = {}
    for number, (name, runs) in enumerate(series.items()):
        at = np.arange(len(groups)) + width * (number - (len(series) - 1) / 2)
        mean = [np.mean(values) for values in runs]
        sd = [float(deviation(np.asarray(values))) for values in runs]
        error = {"elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7}
        axis.bar(at, mean, width, yerr=sd, color=styles[name].colour, label=name, error_kw=error)
        places[name] = at
    axis.set_xticks(range(len(groups)), groups)
    return places


def mark(axis: Any, values: Sequence[float]) -> None:
    """Labels the values of a logarithmic x axis, and nothing else."""
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)


def legend_below(axis: Any, columns: int = 2, drop: float = 0.36) -> None:
    """A legend of a panel's own lines, some inches below it."""
    from matplotlib.transforms import ScaledTranslation

    below = axis.transAxes + ScaledTranslation(0, -drop, axis.figure.dpi_scale_trans)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncols=columns, **_LEGEND)


def legend_of_all(figure: Any, columns: int = 4) -> None:
    """One legend below all panels, with every label once; two side by side in a narrow figure."""
    columns = min(columns, 2) if figure.get_figwidth() <= COLUMN else columns
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, **_LEGEND)


def save(figure: Any, path: Any) -> None:
    """Writes a figure as PDF and as PNG, beside each other."""
    import matplotlib as mpl

    with mpl.rc_context(RC):
        figure.savefig(path.with_suffix(".pdf"))
        figure.savefig(path.with_suffix(".png"), dpi=300)
