"""What is known of groups, as numbers: columns of a table, standardised or one-hot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from bilevax.applications.grouped.group_index import is_missing


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How a metadata table becomes numbers.

    Attributes:
      columns: for each column its name, and [mean, deviation] of numbers or a list of categories.
    """

    columns: list[tuple[Any, str, list[Any]]]

    @classmethod
    def of(cls, table: Any, groups: list[Any]) -> Encoder:
        """An encoder made for the groups of a fit."""
        columns = []
        for name, values in _columns(table, groups, "fit").items():
            _require_values(name, values, groups)
            if _numeric(values):
                numbers = np.asarray(values, float)
                deviation = float(numbers.std())
                columns.append((name, "number", [float(numbers.mean()), deviation if deviation > 0 else 1.0]))
            else:
                columns.append((name, "category", sorted({str(one) for one in values})))
        return cls(columns)

    @property
    def size(self) -> int:
        """The number of numbers per group."""
        return sum(1 if kind == "number" else len(known) for _, kind, known in self.columns)

    def encode(self, table: Any, groups: list[Any]) -> np.ndarray:
        """One row of numbers per group; zeros, the mean, for groups that the table does not have."""
        out = np.zeros((len(groups), self.size))
        have = [place for place, group in enumerate(groups) if _has(table, group)]
        if not have:
            return out
        values = _columns(table, [groups[place] for place in have], "use")
        first = 0
        for name, kind, known in self.columns:
            if name not in values:
                raise ValueError(f"metadata must have the column {name!r} of the fit, got {list(values)}")
            _require_values(name, values[name], [groups[place] for place in have])
            if kind == "number":
                if not _numeric(values[name]):
                    wrong = next(one for one in values[name] if not _numeric([one]))
                    raise ValueError(f"metadata must have numbers as {name!r}, as in the fit, got {wrong!r}")
                out[have, first] = (np.asarray(values[name], float) - known[0]) / known[1]
                first += 1
                continue
            place = {category: first + one for one, category in enumerate(known)}
            for row, value in zip(have, values[name], strict=True):
                if str(value) in place:
                    out[row, place[str(value)]] = 1.0
            first += len(known)
        return out


def _has(table: Any, group: Any) -> bool:
    return group in (table.index if hasattr(table, "index") and hasattr(table, "columns") else table)


def _columns(table: Any, groups: list[Any], use: str) -> dict[Any, list[Any]]:
    """The columns of the table for some groups."""
    frame: Any = table if hasattr(table, "loc") and hasattr(table, "columns") else None
    if frame is None and not isinstance(table, Mapping):
        raise TypeError(
            "metadata must be a pandas frame indexed by group, or a dict from groups to numbers, got "
            f"{type(table).__name__}"
        )
    missing = [group for group in groups if not _has(table, group)]
    if missing:
        raise ValueError(f"metadata must have an entry for every group to {use}, got none for {missing[0]!r}")
    if frame is not None:
        if not frame.index.is_unique:
            raise ValueError("metadata must have one row per group, got an index with duplicates")
        part = frame.loc[list(groups)]
        return {name: part[name].tolist() for name in part.columns}
    rows = [np.atleast_1d(np.asarray(table[group], object)).tolist() for group in groups]
    if len({len(row) for row in rows}) > 1:
        raise ValueError("metadata must have equally many entries for every group")
    return {number: list(column) for number, column in enumerate(zip(*rows, strict=True))}


def _require_values(name: Any, values: list[Any], groups: list[Any]) -> None:
    for value, group in zip(values, groups, strict=True):
        infinite = isinstance(value, (float, np.floating)) and not np.isfinite(value)
        if is_missing(value) or infinite:
            raise ValueError(
                f"metadata must be there and finite, got {value!r} as {name!r} of group {group!r}"
            )


def _numeric(values: list[Any]) -> bool:
    return all(
        isinstance(one, (int, float, np.number)) and not isinstance(one, (bool, np.bool_)) for one in values
    )
