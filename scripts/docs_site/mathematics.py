"""Mathematics of the site as MathML, made when the site is built: browsers draw it without a script.

`pymdownx.arithmatex` finds the formulas and marks them; `rendered` turns the marked ones into MathML.
"""

from __future__ import annotations

import html
import re

_MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]]\s*</(?P=tag)>',
    re.DOTALL,
)
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)


def rendered(page: str) -> str:
    """A page's HTML with its formulas as MathML; raises `ValueError` for one that cannot be read."""
    done = _MARKED.sub(lambda found: to_mathml(html.unescape(found["latex"]), found["kind"] == "["), page)
    if 'class="arithmatex"' in done:
        raise ValueError(f"a formula is left: {done.split('arithmatex')[1][:200]}")
    return done


def to_mathml(latex: str, display: bool) -> str:
    r"""A formula as MathML; lines that `\\` ends are aligned at `&`."""
    # Only the site needs it; whoever imports this module for something else does not.
    from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    text = " ".join(latex.split())
    # `\Big(` and its like only choose a size, which MathML finds by itself.
    text = re.sub(r"\\[Bb]igg?[lr]?(?![A-Za-z])", "", text)
    text = text.replace(r"\arg\min", r"\operatorname{argmin}").replace("{aligned}", "{split}")
    outside = _ENVIRONMENT.sub("", text)
    if r"\\" in outside or "&" in outside:
        text = rf"\begin{{split}}{text}\end{{split}}"
    try:
        made = str(convert(text, display="block" if display else "inline"))
    except Exception as error:
        raise ValueError(f"the formula {text!r} cannot be read: {error!r}") from error
    unknown = re.findall(r"<m[io]>(\\\w+|&(?:amp;)?)</m[io]>", made)
    if unknown:
        raise ValueError(f"the formula {text!r} has commands that are not known: {', '.join(unknown)}")
    return f'<div class="formula">{made}</div>' if display else made
