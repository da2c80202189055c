"""The problem: an upper objective over the solutions of many lower problems."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bilevax._problem.bounds import Box, Set
from bilevax._problem.levels import Argmin, Level, argmin, mean
from bilevax._problem.lookups import Index, LooksUp, as_tables
from bilevax._problem.own import maximum, minimum
from bilevax._problem.random_functions import Random, check_key
from bilevax._problem.reading import check_reads, in_order
from bilevax._problem.risk import Risk
from bilevax._problem.rows import Batch, Rows
from bilevax._problem.saddle import saddle
from bilevax._problem.stream import Stream
from bilevax._util import checks

PyTree = Any

_MAKERS = (argmin, mean, minimum, maximum, saddle)  # of levels; not levels themselves

UNNAMED = "lower"
UPPER = "upper"  # the data source of f, if it has its own


class Seen(eqx.Module):
    """The value of a problem's `through`, already evaluated."""

    value: PyTree


@dataclasses.dataclass(frozen=True)
class Through:
    """A function f or g that receives s(x, block, batch) in place of x."""

    function: Callable[..., Any]
    through: Callable[..., PyTree]

    def __call__(self, x: PyTree, *rest: PyTree) -> Any:
        block, batch = rest[-2:]
        seen = x.value if isinstance(x, Seen) else self.through(x, block, batch)
        return self.function(seen, *rest)


class Problem(eqx.Module):
    r"""A multi-block bilevel problem.

    .. math:: \min_x F(x) = \frac1m \sum_i f_i(x, y_i(x)), \quad y_i(x) = \arg\min_y g_i(x, y)

    `upper` and `lower` are written for one block and one batch of rows; no vmap, gather or Hessian.

    Args:
      upper: f(x, y, block, batch), a scalar. With named lower levels, y is a dict.
      lower: g(x, y, block, batch) for `argmin`; a level made by `argmin`, `saddle`, `mean`, `minimum` or
        `maximum`; or a dict of them. One may read the variables of those before it (`reads=…`).
      blocks: per-block constants, a pytree with leading axis m; or m itself, and then `block` is the
        block's index.
      upper_data: `Shared`, `PerBlock` or another `Rows`; None if f needs no rows; or the name of a lower
        level, whose batch f then sees: for an f that needs the rows whose slots a step touches.
      lower_data: the same for the lower level; or a dict by level, if they draw different rows. Levels
        without a function, such as `minimum`, need none.
      through: optional s(x, block, batch), if f and every g depend on x through its value alone (the scores
        of the batch's items, say). They then receive that value in place of x, and a step evaluates and
        differentiates s once for all of them. f and all levels must see the same batch: one `lower_data`,
        and `upper_data` the name of a level.
      means_over_rows: f, g and c are means over the rows of their batch; this is checked on a few rows when
        a run starts. False skips the check, for functions of the whole batch such as batch normalisation.
        A run then minimises the mean of f over *batches* of its `batch_size`, ragged blocks cannot be used
        with all rows, and `BlockPAGE`, `BlockSAGA` and the diagnostics solve the problem of all rows at
        once, which is another one.
      risk: what is minimised in place of the mean over the blocks: `cvar`, `soft_maximum` or `worst_group`.
      random: f, g and c take one more argument, a key for `jax.random`: for dropout, say, or augmentation. It
        is another one for each step, block and function; a corrected method sees the same one at t and t−1.
        Outside of steps, as in the diagnostics, every block has fixed keys of its own, one per function, and
        so has each of its rows where rows are passed one by one: F is then a mean over the keys of blocks and
        rows, the same in each call. Whether f, g and c are means over rows is not checked.
      tables: parts of x that a batch looks up by index, such as embeddings or a weight per row: a dict that
        has index(block, batch) for each of these keys of x; or that function itself, if all of x is a table.
        The index is an array of row numbers, or None for a batch that looks nothing up. f, g, c and `through`
        then receive `x[key][index(block, batch)]` in place of `x[key]`. Steps with a plain `upper_step` read
        and move only the rows that they look up, and those are where they would be if all had moved in every
        step (see docs/scaling.md); so do steps by `lazy_adam`, a method of its own. Others move all rows.

    Example:
      >>> import bilevax as bx, jax.numpy as jnp
      >>> problem = bx.Problem(
      ...     upper=lambda x, y, block, batch: jnp.sum((y - block) ** 2),
      ...     lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2),
      ...     blocks=jnp.ones((4, 2)),
      ... )
      >>> problem.count
      4
    """

    upper: Callable[..., Array] = eqx.field(static=True)
    levels: dict[str, Level]
    blocks: PyTree
    upper_data: Rows | None
    lower_data: tuple[Rows | None, ...]
    source_of: tuple[tuple[str, int], ...] = eqx.field(static=True)
    count: int = eqx.field(static=True)
    named: bool = eqx.field(static=True)
    upper_shares: str | None = eqx.field(static=True)
    through: Callable[..., PyTree] | None = eqx.field(static=True)
    means_over_rows: bool = eqx.field(static=True)
    risk: Risk | None
    random: bool = eqx.field(static=True)
    tables: tuple[tuple[str, Index], ...] = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)  # of the mesh, on a device that holds a share of the blocks

    def __init__(
        self,
        upper: Callable[..., Array],
        lower: Callable[..., Any] | Level | Mapping[str, Callable[..., Any] | Level],
        blocks: PyTree,
        upper_data: Rows | str | None = None,
        lower_data: Rows | Mapping[str, Rows | None] | None = None,
        through: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None,
        means_over_rows: bool = True,
        risk: Risk | None = None,
        random: bool = False,
        tables: Mapping[str, Index] | Index | None = None,
    ):
        if not callable(upper):
            raise TypeError(f"upper must be a function f(x, y, block, batch), got {type(upper).__name__}")
        if not isinstance(means_over_rows, bool):
            raise TypeError(f"means_over_rows must be True or False, got {means_over_rows!r}")
        self.upper, self.axis, self.means_over_rows = upper, None, means_over_rows
        self.named = isinstance(lower, Mapping)
        self.levels = {name: _as_level(name, one) for name, one in _by_name(lower).items()}
        if not self.levels:
            raise ValueError(
                "lower must name at least one level, got an empty dict. For a loss that depends on x alone, "
                "or a risk of it over blocks, track the loss itself: lower=bx.mean(loss), with "
                "loss(x, block, batch), and upper=lambda x, y, block, batch: y"
            )
        check_reads(self.levels, self.named)
        checks.flag("random", random)
        if random and through is not None:
            raise ValueError("through does not go with random=True: s(x, block, batch) takes no key")
        self.random = random
        check_key("upper", upper, "x, y, block, batch", random)
        for name, level in self.levels.items():
            if not level.own:
                alone = level.is_value and not level.reads
                arguments = "x, block, batch" if alone else "x, y, block, batch"
                check_key(f"lower level {name!r}", level.function, arguments, random)
        if random:
            self.upper = Random(upper, 0)
            self.levels = {
                name: level.seen_through(functools.partial(Random, place=place))
                for place, (name, level) in enumerate(self.levels.items(), 1)
            }
        if isinstance(blocks, (int, np.integer)) and not isinstance(blocks, bool):
            self.count = checks.whole_number("blocks", blocks, 1)
            self.blocks = jnp.arange(self.count)
        else:
            self.count = checks.leading_axis("blocks", blocks)
            self.blocks = jax.tree.map(jnp.asarray, blocks)
        if risk is not None:
            if not isinstance(risk, Risk):
                raise TypeError(
                    "risk must be bilevax.cvar(…), soft_maximum(…), worst_group(…) or None, got "
                    f"{type(risk).__name__}"
                )
            risk.check(self.count)
        self.risk = risk
        self.upper_shares = upper_data if isinstance(upper_data, str) else None
        if self.upper_shares is not None and self.upper_shares not in self.levels:
            raise ValueError(
                f"upper_data must be rows or the name of a lower level, one of {sorted(self.levels)}, "
                f"got {upper_data!r}"
            )
        self.upper_data = _as_rows("upper_data", None if self.upper_shares else upper_data, self.count)
        if isinstance(lower_data, Mapping):
            needed = {name for name, level in self.levels.items() if not level.own or level.slots is not None}
            if not self.named or not needed <= set(lower_data) <= set(self.levels):
                raise ValueError(
                    f"lower_data names the levels {sorted(lower_data)}, expected "
                    f"{sorted(needed) if self.named else 'one data source, as lower is not a dict'}"
                )
            sources = {name: lower_data.get(name) for name in self.levels}
        else:
            sources = dict.fromkeys(self.levels, lower_data)
        distinct = list({id(source): source for source in sources.values()}.values())
        self.lower_data = tuple(_as_rows("lower_data", source, self.count) for source in distinct)
        places = {id(source): place for place, source in enumerate(distinct)}
        self.source_of = tuple((name, places[id(source)]) for name, source in sources.items())
        self.through = through
        if through is not None:
            if not callable(through):
                got = type(through).__name__
                raise TypeError(f"through must be a function s(x, block, batch), got {got}")
            if self.upper_shares is None or len(self.lower_data) != 1:
                raise ValueError(
                    "through needs one batch for all: one lower_data, upper_data the name of a level, got "
                    f"{len(self.lower_data)} sources and upper_data = {upper_data!r}"
                )
        self.tables = as_tables(tables)
        if self.tables:
            self._look_up()
        if self.through is not None:
            self.upper = Through(self.upper, self.through)
            wrap = functools.partial(Through, through=self.through)
            self.levels = {name: level.seen_through(wrap) for name, level in self.levels.items()}

    def _look_up(self) -> None:
        """Gives rows of tables to the functions, where they take x itself."""
        centred = [name for name, level in self.levels.items() if level.centre is not None]
        if centred:
            raise ValueError(
                "tables do not go with around=…, which is a function of all of x, got both, the latter for "
                f"the lower level {centred[0]!r}"
            )
        sources = {name: str(place) for name, place in self.source_of}
        own = UPPER if self.upper_shares is None else sources[self.upper_shares]
        if self.through is not None:
            self.through = LooksUp(self.through, self.tables, own)
            return
        self.upper = LooksUp(self.upper, self.tables, own)
        self.levels = {
            name: level.seen_through(functools.partial(LooksUp, tables=self.tables, source=sources[name]))
            for name, level in self.levels.items()
        }

    def by_source(self, upper: PyTree, lower: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Batches, or what belongs to them, by data source: those that several functions see are one."""
        found = {str(place): lower[name] for name, place in self.source_of}
        return found if self.upper_shares is not None else found | {UPPER: upper}

    def slots_of(self, name: str) -> int:
        """How many slots a lower level has."""
        return self.levels[name].count or self.count

    @property
    def order(self) -> tuple[str, ...]:
        """The levels, each after those that it reads."""
        return in_order(self.levels)

    def read_by(self, name: str, y: dict[str, PyTree]) -> dict[str, PyTree]:
        """The variables of other levels that a level reads, from those of all."""
        return {other: y[other] for other in self.levels[name].reads}

    def view(self, by_level: dict[str, PyTree]) -> PyTree:
        """A per-level dict as the user sees it: plain when the lower level has no name."""
        return by_level if self.named else by_level[UNNAMED]

    def split(self, name: str, tree: PyTree) -> dict[str, PyTree]:
        """The inverse of `view`, for an argument of that name."""
        if not self.named:
            return {UNNAMED: tree}
        if not isinstance(tree, Mapping) or set(tree) != set(self.levels):
            got = sorted(tree) if isinstance(tree, Mapping) else checks.kind_of(tree)
            means = [other for other in sorted(self.levels) if self.levels[other].is_value]
            hint = f" (None will do for the means {means})" if name == "y0" and means else ""
            raise ValueError(
                f"{name} must be a dict with the lower levels {sorted(self.levels)}{hint}, got {got}"
            )
        return {level: tree[level] for level in self.levels}

    def centres(self, x: PyTree) -> dict[str, PyTree]:
        """a(x) of every level whose variables are stored as offsets from it."""
        return {name: centre(x) for name, centre in self.centre_functions}

    def offsets(self, x: PyTree, y: dict[str, PyTree]) -> dict[str, PyTree]:
        """What is stored of the variables y of all levels."""
        centres = self.centres(x)
        return {n: moved(one, centres[n], -1) if n in centres else one for n, one in y.items()}

    def without_centres(self) -> Problem:
        """The same problem, with y itself stored."""
        return self.with_centres(())

    def with_centres(self, centres: Iterable[tuple[str, Callable[[PyTree], PyTree]]]) -> Problem:
        """The same problem, with y stored as offsets from a(x) for these levels and no others."""
        wanted = dict(centres)
        changed = {
            name: dataclasses.replace(level, around=wanted.get(name, False))
            for name, level in self.levels.items()
            if level.centre is not wanted.get(name)
        }
        if not changed:
            return self
        out = object.__new__(Problem)
        for field in dataclasses.fields(self):
            object.__setattr__(out, field.name, getattr(self, field.name))
        object.__setattr__(out, "levels", self.levels | changed)
        return out

    @property
    def assumptions(self) -> str:
        """What f, g and c must be for the lower variables to be known, in the words of messages."""
        return "; ".join(dict.fromkeys(level.assumption for level in self.levels.values()))

    @property
    def centre_functions(self) -> tuple[tuple[str, Callable[[PyTree], PyTree]], ...]:
        """The levels whose variables are stored as offsets, each with its a(x)."""
        return tuple((name, level.centre) for name, level in self.levels.items() if level.centre is not None)

    @property
    def domains(self) -> tuple[tuple[str, Box | Set], ...]:
        """The levels whose variables descend within a set, each with its projection."""
        return tuple((name, level.domain) for name, level in self.levels.items() if level.domain is not None)

    def with_rows(self, change: Callable[[Rows], Rows]) -> Problem:
        """The same problem, with every source of rows changed."""
        sources = [one for one in (self.upper_data, *self.lower_data) if one is not None]
        new = [change(one) for one in sources]
        if all(a is b for a, b in zip(sources, new, strict=True)):
            return self
        return eqx.tree_at(
            lambda problem: [one for one in (problem.upper_data, *problem.lower_data) if one is not None],
            self,
            new,
            is_leaf=lambda leaf: isinstance(leaf, Rows),
        )

    def see(self, x: PyTree, block: PyTree, lower: dict[str, Batch]) -> PyTree:
        """What f and g receive as x on a batch: the value of `through`, or x itself without one."""
        if self.through is None or self.upper_shares is None:
            return x
        batch = lower[self.upper_shares]
        # Padded rows are passed one by one, and `through` is evaluated for each of them.
        return x if batch.weight is not None else Seen(self.through(x, block, batch.rows))

    def upper_value(self, x: PyTree, y: dict[str, PyTree], block: PyTree, batch: Batch) -> Array:
        """f_i(x, y; ξ)."""
        return batch.average(lambda rows: self.upper(x, self.view(y), block, rows))

    def draw_upper(
        self, random: Stream, blocks: Array, size: int | None, lower: dict[str, Batch], common: Stream
    ) -> Batch:
        """The upper level's batch: its own, or that of the lower level whose batch it shares."""
        if self.upper_shares is not None:
            return lower[self.upper_shares]
        return draw(self.upper_data, random.at(0), blocks, size, lambda: common.at(0))

    def draw_lower(self, random: Stream, blocks: Array, size: int | None, common: Stream) -> dict[str, Batch]:
        """One batch per level; levels with the same data source share it."""
        batches = [
            draw(source, random.at(1 + place), blocks, size, lambda place=place: common.at(1 + place))
            for place, source in enumerate(self.lower_data)
        ]
        return {name: batches[place] for name, place in self.source_of}


def moved(y: PyTree, centre: PyTree, sign: int = 1) -> PyTree:
    """y + sign · centre in the dtype of y; leading axes of y count slots."""
    return jax.tree.map(lambda a, b: a + sign * b.astype(a.dtype), y, centre)


def draw(
    source: Rows | None, random: Stream, blocks: Array, size: int | None, common: Callable[[], Stream]
) -> Batch:
    """The rows of a source for the sampled blocks; an empty batch (None) without a source."""
    if source is None:
        return Batch(None, shared=True)
    return source.draw(common() if source.common else random, blocks, size)


def _by_name(lower: Any) -> Mapping[str, Any]:
    return lower if isinstance(lower, Mapping) else {UNNAMED: lower}


def _as_level(name: str, lower: Any) -> Level:
    if not isinstance(name, str):
        raise TypeError(f"the names of lower levels must be strings, got {name!r}")
    if isinstance(lower, Level):
        return lower
    if any(lower is maker for maker in _MAKERS):
        raise TypeError(f"lower level {name!r} must be a level, got bilevax.{lower.__name__} itself: call it")
    if callable(lower):
        return Argmin(lower)
    raise TypeError(
        f"lower level {name!r} must be a function, bilevax.argmin(…), bilevax.mean(…) or another level, "
        f"got {type(lower).__name__}"
    )


def _as_rows(name: str, source: Any, blocks: int) -> Rows | None:
    if source is None:
        return None
    if not isinstance(source, Rows):
        raise TypeError(
            f"{name} must be bilevax.Shared(…), bilevax.PerBlock(…) or None, got {type(source).__name__}"
        )
    source.check(name, blocks)
    return source
