"""Draws the drawings of docs/concepts.md: `python -m scripts.drawings` writes docs/drawings/*.svg."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "drawings"
INK, SOFT, PAPER = "#1f2937", "#868e9b", "#ffffff"
UPPER, LOWER, ROWS = "#c7d2fe", "#fde68a", "#bbf7d0"
PALE = "#f3f4f6"


class Drawing:
    """A few shapes on a white ground, so that it can be read on a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="15" '
            f'fill="{INK}">\n<title>{escape(title)}</title>\n<defs><marker id="head" viewBox="0 0 8 8" '
            f'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
            f'fill="{INK}"/></marker></defs>\n<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
        )
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = INK) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self, x: float, y: float, what: str, anchor: str = "middle", size: int = 15, colour: str = INK
    ) -> None:
        """A line of text, by default centred at x; `_{…}` is a subscript."""
        marked = ""
        for k, part in enumerate(what.split("_{")):
            if k == 0:
                marked += escape(part)
                continue
            below, _, rest = part.partition("}")
            marked += f'<tspan dy="4" font-size="{size * 0.72:.0f}">{escape(below)}</tspan>'
            marked += f'<tspan dy="-4">{escape(rest) or "&#8203;"}</tspan>'
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{marked}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its end."""
        self.parts.append(
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{INK}" stroke-width="1.4" fill="none" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([self.head, *self.parts, "</svg>"]) + "\n"


def blocks() -> Drawing:
    """x, m blocks of which a step visits I, and B rows of each."""
    drawing = Drawing(760, 390, "One step visits a few blocks, and sees a few rows of each")
    drawing.box(280, 20, 200, 44, UPPER)
    drawing.text(380, 47, "x, shared by all blocks")
    visited, width = (1, 4, 6), 80
    for k in range(8):
        left = 30 + 88 * k
        inside = k in visited
        drawing.box(left, 130, width, 90, LOWER if inside else PALE, INK if inside else SOFT)
        colour = INK if inside else SOFT
        number = "m" if k == 7 else str(k + 1)
        drawing.text(left + 40, 152, f"block {number}", size=14, colour=colour)
        drawing.text(left + 40, 180, f"f_{{{number}}}(x, y_{{{number}}})", colour=colour)
        drawing.text(left + 40, 206, f"y_{{{number}}} from g_{{{number}}}", colour=colour, size=14)
        seen = {1: (0, 2, 5), 4: (1, 3, 4), 6: (0, 3, 6)}.get(k, ())
        for row in range(7):
            drawing.box(
                left + 12, 240 + 13 * row, 56, 9, ROWS if row in seen else PALE, INK if row in seen else SOFT
            )
        if inside:
            top = 312 + 60 * visited.index(k)
            drawing.arrow(top, 66, left + 32, 126)
            drawing.arrow(left + 48, 128, top + 16, 68)
    drawing.text(30, 47, "f and g are written for one", "start", 14)
    drawing.text(30, 66, "block and one batch", "start", 14)
    drawing.text(730, 47, "only visited blocks (yellow)", "end", 14)
    drawing.text(730, 66, "cost anything", "end", 14)
    drawing.text(380, 360, "A step: I = 3 of the m blocks, and a batch of B = 3 rows (green) of each.")
    drawing.text(380, 380, "What it costs depends on I and B, and not on m.", size=14)
    return drawing


def scalar() -> Drawing:
    """The one scalar of a block, and its three gradients."""
    drawing = Drawing(760, 300, "One scalar per block, and its three gradients")
    drawing.box(150, 24, 460, 52, UPPER)
    drawing.text(380, 56, "ℓ_{i} = f_{i}(x, y; ξ) − ⟨v, ∇_{y} g_{i}(x, y; ζ)⟩", size=20)
    columns = [
        (130, "∂ℓ/∂x", ("the block's part of ∇F,", "if v is right"), "z tracks it,", "x moves against z"),
        (
            380,
            "−∂ℓ/∂y",
            ("∇²_{yy}g · v − ∇_{y}f:", "zero where v is right"),
            "u tracks it,",
            "v moves against u",
        ),
        (630, "−∂ℓ/∂v", ("∇_{y}g: zero where y", "is the minimiser"), "s tracks it,", "y moves against s"),
    ]
    for centre, name, what, *use in columns:
        drawing.arrow(380 + (centre - 380) * 0.5, 78, centre, 118)
        drawing.box(centre - 105, 122, 210, 92, LOWER)
        drawing.text(centre, 148, name, size=19)
        for k, line in enumerate(what):
            drawing.text(centre, 176 + 20 * k, line, size=14)
        for k, line in enumerate(use):
            drawing.text(centre, 240 + 19 * k, line, size=14)
    drawing.text(380, 290, "One reverse pass over the visited blocks gives all three.", size=14)
    return drawing


def slots() -> Drawing:
    """The memory: a row per slot, of which a step reads and writes those that it visits."""
    drawing = Drawing(760, 330, "A slot holds a block's variables; a step reads and writes the visited slots")
    names, widths = ("y", "s", "v", "u", "last visit"), (70, 70, 70, 70, 90)
    visited = {1: "block 2", 4: "block 5", 6: "block 7"}
    for row in range(8):
        left, top = 130.0, 60 + 26 * row
        inside = row in visited
        number = "m" if row == 7 else str(row + 1)
        drawing.text(118, top + 16, f"slot {number}", "end", 14, INK if inside else SOFT)
        for name, width in zip(names, widths, strict=True):
            if row == 0:
                drawing.text(left + width / 2, 48, name, size=15)
            drawing.box(left, top, width - 4, 20, LOWER if inside else PALE, INK if inside else SOFT)
            left += width
        if inside:
            drawing.arrow(506, top + 7, 566, top + 7)
            drawing.arrow(566, top + 14, 506, top + 14)
    drawing.box(570, 76, 160, 164, UPPER)
    for k, line in enumerate(("the step", "", "gather, catch up,", "ℓ-gradients,", "track, scatter")):
        drawing.text(650, 112 + 24 * k, line, size=14 if k else 16)
    drawing.text(
        380,
        294,
        "Grey slots cost nothing: a lazy method moves them along s and u when they are next visited,",
    )
    drawing.text(
        380, 314, "by all steps that they have missed at once. Other methods leave them where they are."
    )
    return drawing


DRAWINGS = {"blocks": blocks, "scalar": scalar, "slots": slots}


def main() -> None:
    """Writes all drawings."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
