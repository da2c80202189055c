"""Levels that read the variables of levels before them, and the orders that follow from it.

Lower solutions are found from the first level to the last: g_2(x, {y_1}, y_2) needs y_1. Multipliers are
found from the last to the first: that of y_1 contains how y_2 moves with it. A problem that has been through
a `jax.jit` has its levels sorted by name, so both orders are made from what the levels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bilevax._problem.levels import Level

PyTree = Any


def as_names(reads: Any) -> tuple[str, ...]:
    """The names that a user gave for the levels that a level reads: one, or several."""
    names = (reads,) if isinstance(reads, str) else reads
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"reads must be the name of a level or a tuple of names, got {reads!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"reads must name every level once, got {reads!r}")
    return tuple(names)


def check_reads(levels: Mapping[str, Level], named: bool) -> None:
    """Raises unless every level reads levels before it, in the order in which a user gave them."""
    names = list(levels)
    for place, (name, level) in enumerate(levels.items()):
        for read in level.reads:
            if read not in levels:
                known = f"one of {sorted(levels)}" if named else "named levels, as lower is not a dict"
                raise ValueError(f"lower level {name!r} reads {read!r}, expected {known}")
            if read == name:
                raise ValueError(f"lower level {name!r} reads itself: its own variable is given to it anyway")
            if levels[read].own:
                raise ValueError(
                    f"lower level {name!r} reads {read!r}, a {levels[read].kind} level, whose variables "
                    "optimise f: they follow the lower solutions, and no lower solution can follow them"
                )
            if names.index(read) > place:
                way = _way(levels, read, name)
                if way:
                    shown = " → ".join(map(repr, [name, *way]))
                    raise ValueError(f"lower levels read each other in a circle: {shown}")
                raise ValueError(
                    f"lower level {name!r} reads {read!r}, which comes after it: a level may read those "
                    f"before it, so put {read!r} first"
                )


def _way(levels: Mapping[str, Level], start: str, end: str) -> list[str]:
    """From one level to another through what they read; nothing if there is no way."""
    ways, seen = [[start]], {start}
    while ways:
        way = ways.pop(0)
        if way[-1] == end:
            return way
        fresh = [read for read in levels[way[-1]].reads if read in levels and read not in seen]
        seen |= set(fresh)
        ways += [[*way, read] for read in fresh]
    return []


def in_order(levels: Mapping[str, Level]) -> tuple[str, ...]:
    """The names of the levels, each after those that it reads."""
    out: list[str] = []

    def put(name: str) -> None:
        for read in levels[name].reads:
            put(read)
        if name not in out:
            out.append(name)

    for name in levels:
        put(name)
    return tuple(out)


def readers(levels: Mapping[str, Level], name: str) -> list[str]:
    """The levels that read one."""
    return [other for other, level in levels.items() if name in level.reads]


def from_the_last(levels: Mapping[str, Level]) -> list[list[str]]:
    """The levels in layers: first those that no level reads, then those that only these read, and so on."""
    out: list[list[str]] = []
    left = list(levels)
    while left:
        layer = [name for name in left if not any(other in left for other in readers(levels, name))]
        out.append(layer)
        left = [name for name in left if name not in layer]
    return out
