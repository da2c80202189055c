"""Groups of any hashable type, as codes from 0."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import numpy as np

_DATES = (datetime.datetime, datetime.date)


class GroupIndex:
    """The known groups.

    Args:
      ids: the groups, each once.

    Example:
      >>> index = GroupIndex.of(["b", "a", "b"], 3)
      >>> index.ids.tolist(), index.codes(["a", "c"], 2).tolist()
      (['a', 'b'], [0, -1])
    """

    def __init__(self, ids: list[Any]):
        self.place = {one: code for code, one in enumerate(ids)}
        self.ids = as_array(ids)

    @classmethod
    def of(cls, groups: Any, count: int) -> GroupIndex:
        """The index of the groups of so many rows, in ascending order where they have one."""
        groups = checked(groups, count)
        if isinstance(groups, np.ndarray):
            return cls(_distinct(groups).tolist())
        ids = list(dict.fromkeys(groups))
        with contextlib.suppress(TypeError):  # groups of several types stay in the order of the rows
            ids = sorted(ids)
        return cls(ids)

    def codes(self, groups: Any, count: int) -> np.ndarray:
        """The code of every row's group; −1 where it is not known."""
        groups, place = checked(groups, count), self.place
        if not isinstance(groups, np.ndarray):
            return np.fromiter((place.get(one, -1) for one in groups), np.int64, count)
        # Millions of rows have few groups: each is looked up once, and rows are matched with them as arrays.
        distinct = _distinct(groups)
        known = np.fromiter((place.get(one, -1) for one in distinct.tolist()), np.int64, len(distinct))
        if _ascending(groups):
            return np.repeat(known, np.diff(np.flatnonzero(_firsts(groups)), append=count))
        return known[np.searchsorted(distinct, groups)]


def _distinct(groups: np.ndarray) -> np.ndarray:
    """The distinct entries, ascending."""
    return groups[_firsts(groups)] if _ascending(groups) else np.unique(groups)


def _ascending(groups: np.ndarray) -> bool:
    return bool(len(groups)) and bool((groups[1:] >= groups[:-1]).all())


def _firsts(groups: np.ndarray) -> np.ndarray:
    """Where a group begins, of rows that are sorted by group."""
    return np.concatenate([[True], groups[1:] != groups[:-1]])


def checked(groups: Any, count: int) -> list[Any] | np.ndarray:
    """The group of every row: an array of numbers or strings, or a list of anything.

    Raises:
      ValueError, TypeError: there are not so many, one is missing, or one cannot be hashed.
    """
    if isinstance(groups, (str, bytes)) or not hasattr(groups, "__len__"):
        raise TypeError(f"groups must hold one group per row, got {type(groups).__name__}")
    out: Any = groups
    if hasattr(groups, "tolist") or hasattr(groups, "to_numpy"):  # frames have the latter alone
        out = np.asarray(groups) if not hasattr(groups, "to_numpy") else groups.to_numpy()
        if out.ndim != 1:
            raise ValueError(f"groups must be one-dimensional, got shape {out.shape}")
        if out.dtype.kind in "mM":  # as Python has them: nanoseconds would become whole numbers
            missing = np.isnat(out)
            if missing.any():
                raise ValueError(f"groups must not be missing, got NaT in row {int(np.argmax(missing))}")
            out = out.astype(f"{out.dtype.kind}8[us]").tolist()
        elif out.dtype.kind not in "biufU":
            out = out.tolist()
    else:
        out = list(groups)
    if len(out) != count:
        raise ValueError(f"groups must have one entry for each of the {count} rows of X, got {len(out)}")
    if isinstance(out, np.ndarray):
        if out.dtype.kind == "f" and np.isnan(out).any():
            raise ValueError(f"groups must not be missing, got nan in row {int(np.argmax(np.isnan(out)))}")
        return out
    try:
        distinct = set(out)
    except TypeError as error:
        raise TypeError(f"groups must be hashable, such as numbers, strings or tuples: {error}") from error
    if any(map(is_missing, distinct)):
        row = next(row for row, group in enumerate(out) if is_missing(group))
        raise ValueError(f"groups must not be missing, got {out[row]!r} in row {row}")
    return out


def is_missing(one: Any) -> bool:
    """Whether an entry is None, NaN, or what pandas has for these."""
    if isinstance(one, (float, np.floating)):
        return bool(np.isnan(one))
    return one is None or type(one).__name__ in ("NAType", "NaTType")


def as_array(ids: list[Any]) -> np.ndarray:
    """Groups as an array: of numbers or strings where all are of one type, else of objects."""
    if ids and all(type(one) is type(ids[0]) for one in ids) and isinstance(ids[0], (int, float, str)):
        return np.asarray(ids)
    out = np.empty(len(ids), object)
    out[:] = ids
    return out


class NewGroup:
    """The name of a group that was adapted without one."""

    def __repr__(self) -> str:
        return "<a new group>"


def to_json(one: Any) -> Any:
    """A group as JSON can hold it; what is no number or string is marked."""
    if isinstance(one, tuple):
        return {"tuple": [to_json(part) for part in one]}
    if isinstance(one, NewGroup):
        return {"new": []}
    for kind in _DATES:  # a datetime is a date too
        if isinstance(one, kind):
            return {kind.__name__: one.isoformat()}
    if isinstance(one, (np.bool_, np.integer, np.floating)):
        one = one.item()
    if isinstance(one, (str, int, float, bool)):
        return one
    raise TypeError(f"groups must be numbers, strings, dates or tuples of them to be saved, got {one!r}")


def from_json(one: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(one, dict) and list(one) == ["tuple"] and isinstance(one["tuple"], list):
        return tuple(from_json(part) for part in one["tuple"])
    if one == {"new": []}:
        return NewGroup()
    for kind in _DATES:
        if isinstance(one, dict) and list(one) == [kind.__name__]:
            return kind.fromisoformat(one[kind.__name__])
    if isinstance(one, (str, int, float, bool)):
        return one
    raise ValueError(f"expected a group, got {one!r}")
