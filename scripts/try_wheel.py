"""Tries an installed wheel: imports every public name, then runs the quick start of the README.

Run it by the interpreter of an environment that holds nothing but the wheel and its core dependencies, with
`-I`, so that the checkout is not on the import path:

    build/wheel/venv/bin/python -I scripts/try_wheel.py
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"

# One module of each extra: with any of them installed, the test would miss an import that needs it.
EXTRAS = ("lineax", "matplotlib", "optimistix", "orbax", "pandas", "pyarrow", "rich", "sklearn", "typer")


def quick_start(readme: str) -> str:
    """The first Python example of the README that imports bilevax."""
    for example in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        if re.search(r"\bimport\b.*\bbilevax\b", example):
            return example
    raise ValueError("README.md has no Python example that imports bilevax")


def main() -> int:
    """Raises where the wheel falls short; returns the exit status otherwise."""
    present = [name for name in EXTRAS if importlib.util.find_spec(name)]
    if present:
        print(f"expected an environment without extras, got one with {', '.join(present)}", file=sys.stderr)
        return 1
    import bilevax

    place = Path(bilevax.__file__).resolve()
    if not place.is_relative_to(Path(sys.prefix).resolve()):
        print(f"expected bilevax from {sys.prefix}, got {place}", file=sys.stderr)
        return 1
    for name in bilevax.__all__:
        getattr(bilevax, name)
    print(
        f"bilevax {bilevax.__version__}: {len(bilevax.__all__)} public names; the quick start prints",
        flush=True,
    )
    exec(
        compile(quick_start(README.read_text(encoding="utf-8")), "README.md", "exec"),
        {"__name__": "__main__"},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
