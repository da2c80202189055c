"""Naive float64 NumPy transcriptions of the methods for finite sums; see `algorithms` for the conventions.

Both take blocks with an argmin level a and a mean level b, f_i(x, y_a, y_b). Blocks with one of the two have
an empty vector for the other (`Levels`), so that each method is written once.

- BlockPAGE's samples have `refresh`, whether the step refreshes.
- BlockSAGA's samples have all rows of a row group as `upper[k]`, `lower[k]` and `inner[k]` (those of b).
"""

import copy
from types import SimpleNamespace

import numpy as np

from reference.algorithms import coefficients_at, project

LEVELS = {"argmin": ("a",), "mean": ("b",), "mixed": ("a", "b")}


class Levels:
    """A problem of any kind with both levels; the pieces take a state and read block i of it."""

    def __init__(self, problem):
        self.problem, self.m = problem, problem.m
        kind = "mixed" if hasattr(problem, "db") else "argmin" if hasattr(problem, "g_y") else "mean"
        self.has_a, self.has_b = ("a" in LEVELS[kind]), ("b" in LEVELS[kind])

    def start(self, given):
        """The state of a method, from the names that the problem's kind has."""
        given = vars(given)
        empty = np.zeros((self.m, 0))
        state = {"x": given["x"], "z": given["z"]}
        state["y_a"] = given["y_a" if self.has_b else "y"] if self.has_a else empty
        state["y_b"] = given["y_b" if self.has_a else "y"] if self.has_b else empty
        state |= {name: given[name] if self.has_a else empty for name in ("s", "u", "v")}
        return SimpleNamespace(**copy.deepcopy(state))

    def end(self, state):
        """The inverse of `start`."""
        out = {"x": state.x, "z": state.z}
        if self.has_a:
            out |= {"s": state.s, "u": state.u, "v": state.v}
            out["y_a" if self.has_b else "y"] = state.y_a
        if self.has_b:
            out["y_b" if self.has_a else "y"] = state.y_b
        return SimpleNamespace(**out)

    def _f(self, piece, i, state, rows):
        y = [one[i] for one, there in ((state.y_a, self.has_a), (state.y_b, self.has_b)) if there]
        return piece(i, state.x, *y, rows)

    def f_x(self, i, state, rows):
        return self._f(self.problem.f_x, i, state, rows)

    def f_a(self, i, state, rows):
        if not self.has_a:
            return np.zeros(0)
        return self._f(self.problem.f_a if self.has_b else self.problem.f_y, i, state, rows)

    def f_b(self, i, state, rows):
        if not self.has_b:
            return np.zeros(0)
        return self._f(self.problem.f_b if self.has_a else self.problem.f_y, i, state, rows)

    def g_y(self, i, state, rows):
        return self.problem.g_y(i, state.x, state.y_a[i], rows) if self.has_a else np.zeros(0)

    def g_yy_v(self, i, state, rows):
        if not self.has_a:
            return np.zeros(0)
        return self.problem.g_yy(i, state.x, state.y_a[i], rows) @ state.v[i]

    def g_xy_v(self, i, state, rows):
        if not self.has_a:
            return np.zeros_like(state.x)
        return self.problem.g_xy(i, state.x, state.y_a[i], rows) @ state.v[i]

    def c(self, i, state, rows):
        return self.problem.c(i, state.x, rows) if self.has_b else np.zeros(0)

    def c_x_times(self, i, state, rows, w):
        return self.problem.c_x(i, state.x, rows) @ w if self.has_b else np.zeros_like(state.x)

    def phi_v(self, i, state, upper, lower):
        return self.g_yy_v(i, state, lower) - self.f_a(i, state, upper)

    def hyper(self, i, state, upper, lower, inner):
        """Block i's term of G: f_x - g_xy v + c_x f_b."""
        mean_term = self.c_x_times(i, state, inner, self.f_b(i, state, upper))
        return self.f_x(i, state, upper) - self.g_xy_v(i, state, lower) + mean_term


def batches(sample):
    """(block, upper rows, rows of level a, rows of level b) of the sampled blocks."""
    return list(
        zip(sample.blocks, sample.upper, sample.lower, getattr(sample, "inner", sample.lower), strict=True)
    )


def block_page(problem, samples, start, coefficients, *, radius=np.inf, projection="every step"):
    """BlockPAGE: s, u and y_b corrected by m/I times what changed, z by G_t - G_{t-1}; or all computed anew.

    `projection` is that of `algorithms.bsvrb_v2`; a refresh visits all blocks.
    """
    levels = Levels(problem)
    now = old = levels.start(start)
    unprojected = now.v.copy()
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        if sample.refresh:
            visited = range(problem.m)
            new.z = np.zeros_like(now.z)
            for i in visited:
                upper, lower = problem.upper_of(i), problem.lower_of(i)
                new.s[i] = levels.g_y(i, now, lower)
                new.u[i] = levels.phi_v(i, now, upper, lower)
                new.y_b[i] = levels.c(i, now, lower)
                new.z += levels.hyper(i, now, upper, lower, lower) / problem.m
        else:
            visited, ratio = sample.blocks, problem.m / len(sample.blocks)
            for i, upper, lower, inner in batches(sample):
                new.s[i] += ratio * (levels.g_y(i, now, lower) - levels.g_y(i, old, lower))
                new.u[i] += ratio * (levels.phi_v(i, now, upper, lower) - levels.phi_v(i, old, upper, lower))
                new.y_b[i] += ratio * (levels.c(i, now, inner) - levels.c(i, old, inner))
                change = levels.hyper(i, now, upper, lower, inner) - levels.hyper(i, old, upper, lower, inner)
                new.z += change / len(sample.blocks)
        for i in range(problem.m):
            new.y_a[i] = now.y_a[i] - k.tau * new.s[i]
            if projection == "every step" or i in visited:
                unprojected[i] = now.v[i]
            unprojected[i] = unprojected[i] - k.tau_bar * new.u[i]
            new.v[i] = project(unprojected[i], radius)
        new.x = now.x - k.eta * new.z
        old, now = now, new
    return levels.end(now)


class Stored:
    """The newest value of one piece for every block and row group."""

    def __init__(self, rows_of, size, m):
        self.groups = []
        for i in range(m):
            rows = np.asarray(rows_of(i))
            self.groups.append([rows[first : first + size] for first in range(0, len(rows), size)])
        self.values = [[None] * len(groups) for groups in self.groups]

    def fill(self, piece):
        for i, groups in enumerate(self.groups):
            for k, rows in enumerate(groups):
                self.values[i][k] = piece(i, rows)

    def mean(self, i):
        """Of all rows of block i."""
        count = sum(len(rows) for rows in self.groups[i])
        return sum(len(rows) / count * v for rows, v in zip(self.groups[i], self.values[i], strict=True))

    def update(self, i, rows, fresh):
        """Stores a fresh value; returns K w (fresh - stored)."""
        (k,) = [k for k, own in enumerate(self.groups[i]) if set(own) == set(rows)]
        share = len(rows) / sum(len(own) for own in self.groups[i])
        change = len(self.groups[i]) * share * (fresh - self.values[i][k])
        self.values[i][k] = fresh
        return change


def block_saga(problem, samples, start, coefficients, *, size, radius=np.inf):
    """BlockSAGA: SOBA of the sampled blocks with SAGA's estimate of every piece; groups of `size` rows.

    The table is filled at the start with v = 0 (not the v the run starts from).
    """
    levels, m = Levels(problem), problem.m
    now = levels.start(start)
    zero = copy.deepcopy(now)
    zero.v[:] = 0
    upper = {name: Stored(problem.upper_of, size, m) for name in ("f_x", "f_a", "f_b")}
    lower = {name: Stored(problem.lower_of, size, m) for name in ("g_y", "g_yy_v", "g_xy_v", "c", "c_x_f_b")}
    for name, table in (upper | lower).items():
        if name != "c_x_f_b":
            table.fill(lambda i, rows, name=name: getattr(levels, name)(i, zero, rows))
    means = [upper["f_b"].mean(i) for i in range(m)]
    lower["c_x_f_b"].fill(lambda i, rows: levels.c_x_times(i, zero, rows, means[i]))
    by_x = [upper["f_x"], lower["g_xy_v"], lower["c_x_f_b"]]
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, m, len(sample.blocks))
        new = copy.deepcopy(now)
        f_x, g_xy_v, c_x_f_b = [np.mean([table.mean(i) for i in range(m)], axis=0) for table in by_x]
        new.z = f_x - g_xy_v + c_x_f_b
        for i, of_f, of_a, of_b in batches(sample):

            def reduced(table, name, rows, i=i, now=now):
                fresh = getattr(levels, name)(i, now, rows)
                return table[name].mean(i) + table[name].update(i, rows, fresh)

            f_b = reduced(upper, "f_b", of_f)
            new.s[i] = reduced(lower, "g_y", of_a)
            new.u[i] = reduced(lower, "g_yy_v", of_a) - reduced(upper, "f_a", of_f)
            new.y_b[i] = reduced(lower, "c", of_b)
            change = upper["f_x"].update(i, of_f, levels.f_x(i, now, of_f))
            change = change - lower["g_xy_v"].update(i, of_a, levels.g_xy_v(i, now, of_a))
            change = change + lower["c_x_f_b"].update(i, of_b, levels.c_x_times(i, now, of_b, f_b))
            new.z = new.z + change / len(sample.blocks)
            new.y_a[i] = now.y_a[i] - k.tau * new.s[i]
            new.v[i] = project(now.v[i] - k.tau_bar * new.u[i], radius)
        new.x = now.x - k.eta * new.z
        now = new
    return levels.end(now)
