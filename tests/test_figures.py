"""The style of figures: a method has one colour and one marker everywhere, and bands are what they say."""

import itertools
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb

from bilevax import solvers
from bilevax.applications.ranking import METHODS
from bilevax.experiments import figures, noise, noise_paper, validation
from bilevax.experiments.theorems import scalings

FIGURES = {  # methods that meet in one figure
    "ranking": METHODS,
    "hyperopt": tuple(validation.METHODS),
    "rates": tuple(scalings.METHODS),
    "noise": (noise.PLAIN, "m = 1", "m = 100"),
    "noise, few clean rows": (*noise.BASELINES, noise.OURS),
    "noise by the paper": (noise.PLAIN, *noise_paper.BILEVEL),
}


@pytest.mark.parametrize("methods", FIGURES.values(), ids=FIGURES)
def test_no_two_lines_of_a_figure_look_alike(methods):
    styles = [figures.style_of(name) for name in methods]  # none is left to chance
    colours = [to_rgb(style.colour) for style in styles]
    for one, other in itertools.combinations(colours, 2):
        assert np.abs(np.subtract(one, other)).sum() > 0.2
    assert len({style.marker for style in styles}) == len(styles)


def test_no_two_methods_share_colour_and_marker():
    assert len(set(figures.STYLES.values())) == len(figures.STYLES)


@pytest.mark.parametrize(
    "name", [name for name in solvers.__all__ if name not in ("AbstractSolver", "Recipe", "Restart")]
)
def test_solvers_have_a_style_of_their_own(name):
    assert figures.style_of(name) in figures.STYLES.values()


def test_spellings_of_a_method_have_one_style():
    for spellings in (
        ("BSVRBv1", "BSVRB v1", "bsvrb v1", "bsvrb v1 (fresh)"),
        ("KSONG", "K-SONG", "k-song (fresh)"),
        ("BlockPAGE", "block page"),
        ("MMBO", "MMBO-v2"),
    ):
        assert len({figures.style_of(name) for name in spellings}) == 1


def test_methods_without_a_style_get_a_free_colour():
    styles = figures.styles_of(["BSVRB v1", "mine", "yours"])
    assert len({style.colour for style in styles.values()}) == 3


def test_bands_are_one_standard_deviation_with_ddof_1():
    runs = np.array([[1.0, 2.0, 4.0], [3.0, 2.0, 8.0]])
    figure, ((axis,),) = figures.panels(1, 1)
    figures.curve(axis, [1, 2, 3], runs, figures.style_of("SONG"), "song")
    (line,) = axis.lines
    assert line.get_ydata().tolist() == [2.0, 2.0, 6.0]
    edges = axis.collections[0].get_paths()[0].vertices
    assert {round(y, 6) for x, y in edges if x == 1} == {round(2 - 2**0.5, 6), round(2 + 2**0.5, 6)}
    assert figure.get_figwidth() == figures.COLUMN


def test_a_band_on_a_logarithmic_axis_stays_positive():
    _, ((axis,),) = figures.panels(1, 1)
    axis.set_yscale("log")
    figures.curve(axis, [1, 2], [[1.0, 1.0], [9.0, 1.0]], figures.style_of("SONG"))
    assert (axis.collections[0].get_paths()[0].vertices[:, 1] > 0).all()


def test_figures_are_written_as_pdf_and_png_with_letters_and_no_legend_over_curves(tmp_path):
    @figures.styled
    def draw():
        figure, axes = figures.panels(1, 2)
        for axis, style in zip(axes[0], figures.shades(2), strict=True):
            figures.curve(axis, [0, 1], [[0.0, 1.0], [1.0, 0.0]], style, "one")
            axis.set(xlabel="x", title="a title")
            figures.legend_below(axis)
        return figure

    figure = draw()
    figures.save(figure, tmp_path / "both")
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title("left") for axis in figure.axes] == ["a", "b"]
    for axis in figure.axes:
        assert axis.get_legend().get_window_extent().y1 < axis.xaxis.label.get_window_extent().y1
        assert axis.title.get_fontsize() == figures.RC["axes.titlesize"]


def test_bars_stand_beside_each_other_with_their_deviation():
    _, ((axis,),) = figures.panels(1, 1)
    series = {
        "SONG": [np.array([1.0, 3.0]), np.array([2.0])],
        "K-SONG": [np.array([4.0, 4.0]), np.array([5.0])],
    }
    places = figures.bars(axis, ["a", "b"], series, figures.styles_of(list(series)))
    assert [bar.get_height() for bar in axis.patches] == [2.0, 2.0, 4.0, 5.0]
    assert places["SONG"][0] < 0 < places["K-SONG"][0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b"]


def test_every_figure_of_the_experiments_has_the_style():
    """No experiment makes a figure of its own, so that none can leave the style."""
    folder = Path(figures.__file__).parent
    own = [path.name for path in folder.rglob("*.py") if "import Figure" in path.read_text(encoding="utf-8")]
    assert own == ["figures.py"]
