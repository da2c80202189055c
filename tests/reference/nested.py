"""Blocks whose levels read those before them, and the methods on them, naively in float64 NumPy.

A block has up to three levels: a, m, which reads a, and b, which reads both.

    pull_a = mean of e B_i sin(x) + w_a        pull_m = mean of e D_i tanh(a) + P_i x + w_m
    pull_b = mean of C_i sin(a) + e S_i m + Q_i x + w_b                                  over rows (e, h, w)
    f_i = mean of 1/2 |b - c|^2 + sin(k'x) a'K_i b + 1/2 |m - a|^2 + 1/2 |x|^2           over rows (c, k)

A level y is the mean of its pull, or the argmin of h/2 y'H_i y - y'pull; a may be confined to bounds. In both
cases the multiplier v of y adds (d pull)'v to the gradient of whatever the pull reads.
"""

import copy
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from reference.algorithms import clip_eigenvalues, coefficients_at, mean, moving_average, msvr, storm
from reference.finite_sums import Stored
from reference.kinds import step_within
from reference.problems import Blocks

READS = {"a": (), "m": ("a",), "b": ("a", "m")}


class Nested(Blocks):
    """The problem, in closed form and as a user writes it; `kinds` says of each level what it is."""

    def __init__(self, kinds, box=(-np.inf, np.inf), m=5, dx=3, d=3, rows=6, seed=0):
        super().__init__(m, dx, d, rows, seed, ragged=True)
        self.kinds, self.box = kinds, box
        self.names = [name for name in READS if name in kinds]
        self.curved = [name for name in self.names if kinds[name] == "argmin"]
        self.reads = {name: [n for n in READS[name] if n in kinds] for name in self.names}
        sizes = {"B": dx, "P": dx, "Q": dx, "C": d, "D": d, "S": d, "K": d}
        self.blocks = {name: self.normal(m, d, size, scale=0.5) for name, size in sizes.items()}
        self.blocks |= {f"H_{name}": self.positive_definite() for name in self.curved}
        self.upper_rows = {"c": self.normal(self.upper_count, d), "k": self.normal(self.upper_count, dx)}
        self.lower_rows = {
            "e": 1 + self.normal(self.lower_count, scale=0.3),
            "h": 1 + self.rng.uniform(-0.3, 0.3, size=self.lower_count),
        } | {f"w_{name}": self.normal(self.lower_count, d) for name in self.names}

    # As a user writes it.

    def jax_pull(self, name, x, y, block, batch):
        e, shift = jnp.mean(batch["e"]), jnp.mean(batch[f"w_{name}"], 0)
        if name == "a":
            return e * block["B"] @ jnp.sin(x) + shift
        if name == "m":
            return e * block["D"] @ jnp.tanh(y["a"]) + block["P"] @ x + shift
        of_m = e * block["S"] @ y["m"] if "m" in self.names else 0.0
        return block["C"] @ jnp.sin(y["a"]) + of_m + block["Q"] @ x + shift

    def function(self, name):
        """g of an argmin level, c of a mean level."""
        if self.kinds[name] == "mean":
            if not self.reads[name]:
                return lambda x, block, batch: self.jax_pull(name, x, None, block, batch)
            return lambda x, y, block, batch: self.jax_pull(name, x, y, block, batch)

        def g(x, y, block, batch):
            own = y[name] if self.reads[name] else y
            curved = 0.5 * jnp.mean(batch["h"]) * own @ block[f"H_{name}"] @ own
            return curved - own @ self.jax_pull(name, x, y, block, batch)

        return g

    def upper(self, x, y, block, batch):
        wave = jnp.mean(jnp.sin(batch["k"] @ x)) * (y["a"] @ block["K"] @ y["b"])
        own = 0.5 * jnp.sum((y["m"] - y["a"]) ** 2) if "m" in y else 0.5 * jnp.sum(y["a"] ** 2)
        return 0.5 * jnp.mean(jnp.sum((y["b"] - batch["c"]) ** 2, 1)) + wave + own + 0.5 * x @ x

    # In closed form, of block i at the point (x, y by level).

    def pull(self, name, i, x, y, rows):
        block, e = self.block(i), self.lower_rows["e"][rows].mean()
        shift = self.lower_rows[f"w_{name}"][rows].mean(0)
        if name == "a":
            return e * block["B"] @ np.sin(x) + shift
        if name == "m":
            return e * block["D"] @ np.tanh(y["a"][i]) + block["P"] @ x + shift
        of_m = e * block["S"] @ y["m"][i] if "m" in self.names else 0.0
        return block["C"] @ np.sin(y["a"][i]) + of_m + block["Q"] @ x + shift

    def pull_by(self, name, of, i, x, y, rows):
        """The derivative of a pull by x or by a level that it reads."""
        block, e = self.block(i), self.lower_rows["e"][rows].mean()
        if of == "x":
            return {"a": e * block["B"] * np.cos(x), "m": block["P"], "b": block["Q"]}[name]
        if (name, of) == ("m", "a"):
            return e * block["D"] / np.cosh(y["a"][i]) ** 2
        return block["C"] * np.cos(y["a"][i]) if of == "a" else e * block["S"]

    def hessian(self, name, i, rows):
        return self.lower_rows["h"][rows].mean() * self.blocks[f"H_{name}"][i]

    def f_x(self, i, x, y, rows):
        k = self.upper_rows["k"][rows]
        return (np.cos(k @ x) @ k / len(rows)) * (y["a"][i] @ self.blocks["K"][i] @ y["b"][i]) + x

    def f_y(self, name, i, x, y, rows):
        K, wave = self.blocks["K"][i], np.sin(self.upper_rows["k"][rows] @ x).mean()
        if name == "b":
            return y["b"][i] - self.upper_rows["c"][rows].mean(0) + wave * K.T @ y["a"][i]
        if name == "m":
            return y["m"][i] - y["a"][i]
        return (y["a"][i] - y["m"][i] if "m" in self.names else y["a"][i]) + wave * K @ y["b"][i]

    # Multipliers.

    def free(self, name, y):
        """Which entries no bound holds, as zeros and ones."""
        if name != "a":
            return np.ones_like(y)
        return ((y > self.box[0]) & (y < self.box[1])).astype(float)

    def solve(self, name, hessian, right, y):
        """v from a Hessian: zero where a bound holds y."""
        v, free = np.zeros_like(right), self.free(name, y) > 0
        v[free] = np.linalg.solve(hessian[np.ix_(free, free)], right[free])
        return v

    def from_readers(self, name, i, x, y, rows, v):
        """What the levels that read one add to its slope."""
        readers = [n for n in self.names if name in self.reads[n]]
        return sum((self.pull_by(n, name, i, x, y, rows).T @ v[n] for n in readers), np.zeros(self.dy))

    def by_x(self, i, x, y, rows, v):
        """What the terms of all levels add to the slope of x."""
        return sum(self.pull_by(n, "x", i, x, y, rows).T @ v[n] for n in self.names)

    def bounded(self, state):
        state.y["a"] = np.clip(state.y["a"], *self.box)


class Look:
    """What a method asks of one block at a state: by level the slope or the mean, u and h; and G."""

    def __init__(self, problem, i, state, upper, lower, curvature, penalty):
        x, y, v = state.x, state.y, {}
        self.s, self.u, self.H = {}, {}, {}
        if curvature == "w":
            self.penalty(problem, i, state, upper, lower, penalty)
            return
        for name in reversed(problem.names):
            rest = problem.f_y(name, i, x, y, upper) + problem.from_readers(name, i, x, y, lower, v)
            pull = problem.pull(name, i, x, y, lower)
            if problem.kinds[name] == "mean":
                v[name], self.s[name] = rest, pull
                continue
            h, free = problem.hessian(name, i, lower), problem.free(name, y[name][i])
            if curvature == "H":
                v[name] = problem.solve(name, state.H[name][i], rest, y[name][i])
            else:
                v[name] = free * state.v[name][i]
            self.s[name], self.H[name], self.u[name] = h @ y[name][i] - pull, h, free * (h @ v[name] - rest)
        self.G = problem.f_x(i, x, y, upper) + problem.by_x(i, x, y, lower, v)

    def penalty(self, problem, i, state, upper, lower, rho):
        """f(w) + rho sum of g(w) - g(y), both with the w that they read; w is stored as v."""
        x, y, w = state.x, state.y, state.v
        gap = {name: rho * (y[name][i] - w[name][i]) for name in problem.names}
        for name in problem.names:
            h, pull = problem.hessian(name, i, lower), problem.pull(name, i, x, w, lower)
            self.s[name] = h @ y[name][i] - pull
            of_readers = problem.from_readers(name, i, x, w, lower, gap)
            self.u[name] = (problem.f_y(name, i, x, w, upper) + of_readers) / rho + h @ w[name][i] - pull
        self.G = problem.f_x(i, x, w, upper) + problem.by_x(i, x, w, lower, gap)


def steps_of(
    problem, samples, start, coefficients, *, corrected, everyone, curvature, lam=None, refresh=False
):
    """The states after every step of a method that tracks slopes; see `kinds.steps_of`."""
    now = old = copy.deepcopy(start)
    states = []
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        rows = list(zip(sample.blocks, sample.upper, sample.lower, strict=True))
        whole = refresh and sample.refresh
        if whole:
            rows = [(i, problem.upper_of(i), problem.lower_of(i)) for i in range(problem.m)]
        penalty = getattr(k, "penalty", None)
        seen = {i: Look(problem, i, now, *of_i, curvature, penalty) for i, *of_i in rows}
        seen_old = {i: Look(problem, i, old, *of_i, curvature, penalty) for i, *of_i in rows}
        new = copy.deepcopy(now)

        def tracked(at, fresh, before, alpha, gamma, whole=whole):
            if whole:
                return fresh
            return msvr(at, fresh, before, alpha, gamma) if corrected else moving_average(at, fresh, alpha)

        for i, name in ((i, name) for i in seen for name in problem.names):
            fresh, before = seen[i].s[name], seen_old[i].s[name]
            store = new.y if problem.kinds[name] == "mean" else new.s
            of = now.y if problem.kinds[name] == "mean" else now.s
            store[name][i] = tracked(of[name][i], fresh, before, k.alpha, k.gamma)
            if name not in problem.curved:
                continue
            if curvature == "v":
                new.v[name][i] = problem.free(name, now.y[name][i]) * now.v[name][i]
            letter = "H" if curvature == "H" else "u"
            fresh, before = getattr(seen[i], letter)[name], getattr(seen_old[i], letter)[name]
            value = tracked(getattr(now, letter)[name][i], fresh, before, k.alpha_bar, k.gamma_bar)
            getattr(new, letter)[name][i] = clip_eigenvalues(value, lam) if letter == "H" else value
        G, G_old = mean(one.G for one in seen.values()), mean(one.G for one in seen_old.values())
        if whole:
            new.z = G
        else:
            new.z = storm(now.z, G, G_old, k.beta) if corrected else moving_average(now.z, G, k.beta)
        for i, name in ((i, n) for i in (range(problem.m) if everyone else seen) for n in problem.curved):
            new.y[name][i] = now.y[name][i] - k.tau * new.s[name][i]
            if curvature in ("v", "w"):
                new.v[name][i] = new.v[name][i] - k.tau_bar * new.u[name][i]
        problem.bounded(new)
        if curvature == "v" and not everyone:
            for name in problem.curved:
                new.v[name] = problem.free(name, new.y[name]) * new.v[name]
        if curvature == "w":
            new.v["a"] = np.clip(new.v["a"], *problem.box)
        new.x = now.x - k.eta * new.z
        old, now = now, new
        states.append(now)
    return states


def newton_steps_of(problem, samples, start, coefficients):
    """BlockNewton: Newton steps of the argmin levels and their v; means are averaged."""
    now, states = copy.deepcopy(start), []
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new, terms = copy.deepcopy(now), []
        for i, upper, lower in zip(sample.blocks, sample.upper, sample.lower, strict=True):
            seen = Look(problem, i, now, upper, lower, "v", None)
            terms.append(seen.G)
            for name in problem.names:
                y = now.y[name][i]
                if problem.kinds[name] == "mean":
                    new.y[name][i] = moving_average(y, seen.s[name], k.alpha)
                    continue
                H = new.H[name][i] = moving_average(now.H[name][i], seen.H[name], k.alpha)
                if name == "a" and np.isfinite(problem.box).all():
                    low, high = (end - y for end in problem.box)
                    moved = y + step_within(H, k.alpha * seen.s[name], low, high)
                    for end in problem.box:
                        moved = np.where(np.abs(moved - end) < 1e-14, end, moved)
                    new.y[name][i] = moved
                else:
                    new.y[name][i] = y - k.alpha * np.linalg.solve(H, seen.s[name])
                v = now.v[name][i] - k.alpha * problem.solve(name, H, seen.u[name], y)
                new.v[name][i] = problem.free(name, new.y[name][i]) * v
        new.z = moving_average(now.z, mean(terms), k.beta)
        new.x = now.x - k.eta * new.z
        now = new
        states.append(now)
    return states


def saga_steps_of(problem, samples, start, coefficients, *, size):
    """BlockSAGA: plain steps of the sampled blocks; every piece of a row group is stored."""
    m, now, states = problem.m, copy.deepcopy(start), []

    def pieces(i, s, rows, upper):
        v = {name: s.v[name][i] for name in problem.names}
        if upper:
            of_f = {f"f_{name}": problem.f_y(name, i, s.x, s.y, rows) for name in problem.names}
            return of_f | {"f_x": problem.f_x(i, s.x, s.y, rows)}
        out = {"g_x": problem.by_x(i, s.x, s.y, rows, v)}
        for name in problem.names:
            h = problem.hessian(name, i, rows)
            out[f"s_{name}"] = h @ s.y[name][i] - problem.pull(name, i, s.x, s.y, rows)
            out[f"g_{name}"] = h @ v[name] - problem.from_readers(name, i, s.x, s.y, rows, v)
        return out

    zero = copy.deepcopy(now)
    zero.v = {name: np.zeros_like(v) for name, v in now.v.items()}
    stored = {}
    for upper, rows_of in ((True, problem.upper_of), (False, problem.lower_of)):
        for name in pieces(0, zero, rows_of(0), upper):
            stored[name] = Stored(rows_of, size, m)
            stored[name].fill(lambda i, rows, name=name, upper=upper: pieces(i, zero, rows, upper)[name])
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, m, len(sample.blocks))
        new = copy.deepcopy(now)
        new.z = np.mean([stored["f_x"].mean(i) + stored["g_x"].mean(i) for i in range(m)], axis=0)
        for i, upper, lower in zip(sample.blocks, sample.upper, sample.lower, strict=True):
            seen = {}
            for name, fresh in (pieces(i, now, upper, True) | pieces(i, now, lower, False)).items():
                average = stored[name].mean(i)
                change = stored[name].update(i, upper if name[0] == "f" else lower, fresh)
                seen[name] = average + change
                if name in ("f_x", "g_x"):
                    new.z = new.z + change / len(sample.blocks)
            for name in problem.names:
                free = problem.free(name, now.y[name][i])
                new.s[name][i] = seen[f"s_{name}"]
                new.u[name][i] = free * (seen[f"g_{name}"] - seen[f"f_{name}"])
                new.y[name][i] = now.y[name][i] - k.tau * new.s[name][i]
                new.v[name][i] = now.v[name][i] - k.tau_bar * new.u[name][i]
        problem.bounded(new)
        new.v = {name: problem.free(name, new.y[name]) * v for name, v in new.v.items()}
        new.x = now.x - k.eta * new.z
        now = new
        states.append(now)
    return states


def hypergradient(problem, x):
    """y(x) by level, and the gradient of F on all rows; without bounds."""
    y = {name: np.zeros((problem.m, problem.dy)) for name in problem.names}
    terms = []
    for i in range(problem.m):
        upper, lower, v = problem.upper_of(i), problem.lower_of(i), {}
        for name in problem.names:
            pull, argmin = problem.pull(name, i, x, y, lower), name in problem.curved
            y[name][i] = np.linalg.solve(problem.hessian(name, i, lower), pull) if argmin else pull
        for name in reversed(problem.names):
            rest = problem.f_y(name, i, x, y, upper) + problem.from_readers(name, i, x, y, lower, v)
            v[name] = (
                np.linalg.solve(problem.hessian(name, i, lower), rest) if name in problem.curved else rest
            )
        terms.append(problem.f_x(i, x, y, upper) + problem.by_x(i, x, y, lower, v))
    return y, mean(terms)


def namespace(flat):
    """A state from a dict by names such as "s.a"."""
    out = {"x": flat["x"], "z": flat["z"]} | {letter: {} for letter in ("y", "s", "u", "v", "H")}
    for name, value in flat.items():
        letter, _, level = name.partition(".")
        if level:
            out[letter][level] = value.copy()
    return SimpleNamespace(**out)
