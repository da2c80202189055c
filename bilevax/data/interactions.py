"""Tables of interactions: which user rated which item, how and when. Ids become codes from 0."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy as np

from bilevax.data.arguments import whole_number
from bilevax.data.errors import DataError, printable
from bilevax.data.user_rows import UserRows

Duplicates = Literal["error", "first", "last"]


class Columns(NamedTuple):
    """The columns of a table as a file has them, with its own ids."""

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class Interactions:
    """A table of interactions, one entry per pair of user and item; `make_interactions` builds one.

    Attributes:
      user: code of the user, from 0, int32.
      item: code of the item, from 0, int32.
      rating: float32.
      time: int64, in any unit (seconds, in the known data sets).
      user_ids: the original id of each code, ascending.
      item_ids: likewise.
    """

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.user)

    def __repr__(self) -> str:
        return f"Interactions({len(self):,} ratings of {self.items:,} items by {self.users:,} users)"

    @property
    def users(self) -> int:
        """The number of users."""
        return len(self.user_ids)

    @property
    def items(self) -> int:
        """The number of items."""
        return len(self.item_ids)

    def csr(self) -> UserRows:
        """The interactions by user, each user's in order of time; ties keep the order of the table."""
        lowest = int(self.time.min())
        span = int(self.time.max()) - lowest + 1
        if span * self.users < 2**63:
            order = np.argsort(self.user * np.int64(span) + (self.time - lowest), kind="stable")
        else:
            order = np.lexsort((self.time, self.user))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.user, minlength=self.users))])
        return UserRows(offsets, self.item[order], self.rating[order], self.time[order], self.items)

    def at_least(self, count: int) -> Interactions:
        """Only the users with at least `count` interactions, and their items; codes start at 0 again.

        Raises:
          DataError: no user has so many.
        """
        count = whole_number("count", count, 0)
        enough = np.bincount(self.user, minlength=self.users) >= count
        keep = enough[self.user]
        if not keep.any():
            raise DataError(f"no user has at least {count} interactions")
        user_code, user = _compact(self.user[keep])
        item_code, item = _compact(self.item[keep])
        ids = self.user_ids[user_code], self.item_ids[item_code]
        return Interactions(user, item, self.rating[keep], self.time[keep], *ids)


def make_interactions(
    user: Any,
    item: Any,
    rating: Any = None,
    time: Any = None,
    *,
    duplicates: Duplicates = "error",
    rating_range: tuple[float, float] | None = None,
    path: str | PathLike[str] | None = None,
) -> Interactions:
    """A table of interactions from its columns.

    Args:
      user: ids of users: whole numbers, with gaps or not, or strings.
      item: ids of items, likewise.
      rating: finite numbers; all 1 by default.
      time: whole numbers; all 0 by default, so that the order of the table is the order of time.
      duplicates: what to do if a pair of user and item occurs again: "error", or keep the "first" or the
        "last" of them in order of time (ties by order of the table).
      rating_range: smallest and largest valid rating.
      path: the file that errors name.

    Returns:
      The table, in the order of the columns.

    Raises:
      DataError: columns are empty or differ in length, ids are of another kind, ratings are not finite or out
        of range, times do not fit into 64 bits, or a pair occurs twice.

    Example:
      >>> from bilevax.data import make_interactions
      >>> table = make_interactions(["bo", "al", "bo"], [70, 3, 3], rating=[5, 4, 1])
      >>> table.user.tolist(), table.item.tolist(), table.user_ids.tolist()
      ([1, 0, 1], [1, 0, 0], ['al', 'bo'])
    """
    if duplicates not in ("error", "first", "last"):
        raise ValueError(f"duplicates must be 'error', 'first' or 'last', got {duplicates!r}")
    columns = {"user": _array("user", user, path), "item": _array("item", item, path)}
    count = len(columns["user"]) if columns["user"].ndim else 0
    columns["rating"] = np.ones(count, np.float32) if rating is None else _array("rating", rating, path)
    columns["time"] = np.zeros(count, np.int64) if time is None else _array("time", time, path)
    for name, column in columns.items():
        if column.shape != (count,) or count == 0:
            raise DataError(
                f"needs columns of one length, at least 1: {name} has shape {column.shape}", path=path
            )
    if columns["rating"].dtype.kind not in "fiub" or columns["time"].dtype.kind not in "iu":
        kinds = f"{columns['rating'].dtype} and {columns['time'].dtype}"
        raise DataError(f"needs numbers as ratings and whole numbers as times, got {kinds}", path=path)
    _check_64_bits("time", columns["time"], path)
    with np.errstate(over="ignore"):
        ratings = columns["rating"].astype(np.float32)
    check_ratings(ratings, rating_range, path)
    user_ids, user_code = _coded("user", columns["user"], path)
    item_ids, item_code = _coded("item", columns["item"], path)
    table = Interactions(user_code, item_code, ratings, columns["time"].astype(np.int64), user_ids, item_ids)
    return _without_duplicates(table, duplicates, path)


def _array(name: str, values: Any, path: str | PathLike[str] | None) -> np.ndarray:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"needs a column of numbers or strings as {name}: {error}", path=path) from error


def _check_64_bits(name: str, values: np.ndarray, path: str | PathLike[str] | None) -> None:
    if int(values.max()) >= 2**63:
        raise DataError(f"has the {name} {values.max()}, expected less than 2^63", path=path)


def check_ratings(
    ratings: np.ndarray,
    rating_range: tuple[float, float] | None,
    path: str | PathLike[str] | None,
    lines: np.ndarray | None = None,
) -> None:
    """Raise `DataError` for the first rating that is not finite or out of range."""
    low, high = rating_range or (-np.inf, np.inf)
    bad = ~np.isfinite(ratings) | (ratings < low) | (ratings > high)
    if bad.any():
        row = int(np.argmax(bad))
        wanted = "a finite number" if rating_range is None else f"{low:g} to {high:g}"
        where = f" (entry {row + 1})" if lines is None else ""
        line = None if lines is None else int(lines[row])
        raise DataError(f"got the rating {ratings[row]:g}{where}, expected {wanted}", path=path, line=line)


def _coded(name: str, ids: np.ndarray, path: str | PathLike[str] | None) -> tuple[np.ndarray, np.ndarray]:
    if ids.dtype.kind in "iu":
        _check_64_bits(f"{name} id", ids, path)
        distinct, code = _compact(ids.astype(np.int64))
    elif ids.dtype.kind == "U" or (ids.dtype.kind == "O" and all(isinstance(one, str) for one in ids)):
        # By a dictionary: an array of strings is as wide as the longest, and slow to sort.
        words = ids.tolist()
        names = sorted(set(words))
        cut = next((word for word in names if word.endswith("\0")), None)
        if cut is not None:  # NumPy would drop the NUL, and make two ids of one name
            raise DataError(f"has the {name} id {printable(cut)}, which ends in a NUL character", path=path)
        place = {name: i for i, name in enumerate(names)}
        distinct, code = np.array(names, str), np.fromiter(map(place.__getitem__, words), np.int32)
    else:
        raise DataError(f"needs whole numbers or strings as {name} ids, got {ids.dtype}", path=path)
    if len(distinct) >= 2**31:
        raise DataError(f"has {len(distinct):,} different {name} ids, expected less than 2^31", path=path)
    return distinct, code.astype(np.int32)


def _compact(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids in ascending order, and the index of each entry among them."""
    low, high = int(ids.min()), int(ids.max())
    if high - low > 4 * len(ids) + 1_000_000:
        distinct, code = np.unique(ids, return_inverse=True)
        return distinct, code.astype(np.int32)
    # The ids are dense: a table with an entry for every possible id is far faster than sorting.
    shifted = ids - low
    seen = np.zeros(high - low + 1, bool)
    seen[shifted] = True
    code = (np.cumsum(seen) - 1).astype(np.int32)
    return np.flatnonzero(seen) + low, code[shifted]


def _without_duplicates(
    table: Interactions, duplicates: Duplicates, path: str | PathLike[str] | None
) -> Interactions:
    pair = table.user * np.int64(table.items) + table.item
    ordered = np.sort(pair)
    again = ordered[1:] == ordered[:-1]
    if not again.any():
        return table
    if duplicates == "error":
        user, item = divmod(int(ordered[1:][again][0]), table.items)
        rows = np.flatnonzero(pair == ordered[1:][again][0])[:2] + 1
        raise DataError(
            f"{int(again.sum())} entries repeat a pair of user and item, the first of them user "
            f"{table.user_ids[user]} and item {table.item_ids[item]} (entries {rows[0]} and {rows[1]}); "
            "duplicates='last' or 'first' keeps one of each",
            path=path,
        )
    order = np.lexsort((table.time, pair))
    fresh = np.concatenate([[True], np.diff(pair[order]) != 0])
    chosen = fresh if duplicates == "first" else np.concatenate([fresh[1:], [True]])
    keep = np.sort(order[chosen])
    user, item, rating, time = table.user[keep], table.item[keep], table.rating[keep], table.time[keep]
    return Interactions(user, item, rating, time, table.user_ids, table.item_ids)
