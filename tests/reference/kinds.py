"""Blocks with levels of every kind, and the methods on them, naively in float64 NumPy; see `algorithms`.

A block has a level a, an argmin or a saddle point of g, and variables of its own: p minimises f, and q
maximises it, both within bounds. The saddle point minimises over the first half of a, and maximises over the
second. The argmin may be confined to bounds, too: then v is zero where a is on one of them.

    g_i = mean of h/2 a'H_i a - e a'B_i sin(x) - b'a                                  over rows (h, e, b)
    f_i = mean of 1/2 |a - c|^2 + sin(k'x) a'K_i p + 1/2 |p - w|^2                    over rows (c, k, w)
          + q'(P_i x + M_i p) - 3/4 |q|^2 + 1/2 |x|^2
"""

import copy
import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from reference.algorithms import clip_eigenvalues, coefficients_at, mean, moving_average, msvr, storm
from reference.finite_sums import Stored
from reference.problems import Blocks

LEAST, MOST = -0.2, 0.05  # of p, and of q
BOX = (-0.15, 0.1)  # of a, where it is confined
OWN = ("p", "q")


class Kinds(Blocks):
    """The problem, in closed form and as a user writes it."""

    def __init__(self, saddle, box=(-np.inf, np.inf), m=5, dx=3, da=4, rows=6, seed=0):
        super().__init__(m, dx, da, rows, seed, ragged=True)
        self.box = box
        dp, dq, half = 2, 3, da // 2
        self.sign = np.ones(da)
        hessian = self.positive_definite()
        if saddle:
            self.sign[half:] = -1
            between = np.sign(
                self.sign[:, None] * self.sign
            )  # -1 where a minimising entry meets a maximising
            hessian = np.where(between < 0, 0.6 * hessian, self.sign[:, None] * hessian)
        self.blocks = {
            "H": (hessian + hessian.transpose(0, 2, 1)) / 2,
            "B": self.normal(m, da, dx),
            "K": self.normal(m, da, dp, scale=0.3),
            "P": self.normal(m, dq, dx, scale=0.5),
            "M": self.normal(m, dq, dp, scale=0.4),
        }
        self.upper_rows = {
            "c": self.normal(self.upper_count, da),
            "k": self.normal(self.upper_count, dx),
            "w": self.normal(self.upper_count, dp),
        }
        self.lower_rows = {
            "h": 1 + self.rng.uniform(-0.3, 0.3, size=self.lower_count),
            "e": 1 + self.normal(self.lower_count, scale=0.3),
            "b": self.normal(self.lower_count, da),
        }

    def upper(self, x, y, block, batch):
        a, p, q = y["a"], y["p"], y["q"]
        a = jnp.concatenate(a) if isinstance(a, tuple) else a
        fit = 0.5 * jnp.sum((a - batch["c"]) ** 2, 1) + 0.5 * jnp.sum((p - batch["w"]) ** 2, 1)
        own = q @ (block["P"] @ x + block["M"] @ p) - 0.75 * q @ q
        return jnp.mean(fit + jnp.sin(batch["k"] @ x) * (a @ block["K"] @ p)) + own + 0.5 * x @ x

    def lower(self, x, a, block, batch):
        a = jnp.concatenate(a) if isinstance(a, tuple) else a
        curved = 0.5 * jnp.mean(batch["h"]) * (a @ block["H"] @ a)
        return curved - jnp.mean(batch["e"]) * (a @ block["B"] @ jnp.sin(x)) - jnp.mean(batch["b"] @ a)

    def of_upper(self, name, rows):
        return self.upper_rows[name][rows]

    def f_x(self, i, s, rows):
        k, block = self.of_upper("k", rows), self.block(i)
        product = s.a[i] @ block["K"] @ s.p[i]
        return (np.cos(k @ s.x) @ k / len(rows)) * product + block["P"].T @ s.q[i] + s.x

    def wave(self, s, rows):
        return np.sin(self.of_upper("k", rows) @ s.x).mean()

    def f_a(self, i, s, rows):
        return s.a[i] - self.of_upper("c", rows).mean(0) + self.wave(s, rows) * self.block(i)["K"] @ s.p[i]

    def f_p(self, i, s, rows):
        block = self.block(i)
        fit = s.p[i] - self.of_upper("w", rows).mean(0)
        return fit + self.wave(s, rows) * (block["K"].T @ s.a[i]) + block["M"].T @ s.q[i]

    def f_q(self, i, s, rows):
        block = self.block(i)
        return block["P"] @ s.x + block["M"] @ s.p[i] - 1.5 * s.q[i]

    def free(self, a):
        """Which entries of a no bound holds, as zeros and ones."""
        return ((a > self.box[0]) & (a < self.box[1])).astype(float)

    def multiplier(self, hessian, f_a, a):
        """v from a Hessian: zero where a bound holds a."""
        v, free = np.zeros_like(f_a), self.free(a) > 0
        v[free] = np.linalg.solve(hessian[np.ix_(free, free)], f_a[free])
        return v

    def bounded(self, s):
        s.p, s.q = np.maximum(s.p, LEAST), np.minimum(s.q, MOST)
        if hasattr(s, "a"):
            s.a = np.clip(s.a, *self.box)

    def g_x(self, i, s, rows):
        return -self.lower_rows["e"][rows].mean() * np.cos(s.x) * (self.blocks["B"][i].T @ s.a[i])

    def g_a(self, i, s, rows):
        pull = self.lower_rows["e"][rows].mean() * self.blocks["B"][i] @ np.sin(s.x)
        return self.g_aa(i, s, rows) @ s.a[i] - pull - self.lower_rows["b"][rows].mean(0)

    def g_aa(self, i, s, rows):
        return self.lower_rows["h"][rows].mean() * self.blocks["H"][i]

    def g_xa(self, i, s, rows):
        return -self.lower_rows["e"][rows].mean() * np.cos(s.x)[:, None] * self.blocks["B"][i].T


class Look:
    """What a method asks of one block at a state: the slopes of a, p and q, of v, and of x."""

    def __init__(self, problem, i, state, upper, lower, curvature, penalty):
        if curvature is None:  # a is given
            self.G = problem.f_x(i, state, upper)
            self.s_p, self.s_q = problem.f_p(i, state, upper), -problem.f_q(i, state, upper)
            return
        if curvature == "w":  # the second variable of a penalty method, stored as v
            at_w = SimpleNamespace(**{**vars(state), "a": state.v})
            self.u = problem.f_a(i, at_w, upper) / penalty + problem.g_a(i, at_w, lower)
            gap = problem.g_x(i, at_w, lower) - problem.g_x(i, state, lower)
            self.G = problem.f_x(i, at_w, upper) + penalty * gap
            of_f = at_w
        else:
            f_a = problem.f_a(i, state, upper)
            self.H = problem.g_aa(i, state, lower)
            free = problem.free(state.a[i])
            v = problem.multiplier(state.H[i], f_a, state.a[i]) if curvature == "H" else free * state.v[i]
            self.u = problem.sign * free * (self.H @ v - f_a)
            self.G = problem.f_x(i, state, upper) - problem.g_xa(i, state, lower) @ v
            of_f = state
        self.s_a = problem.sign * problem.g_a(i, state, lower)
        self.s_p, self.s_q = problem.f_p(i, of_f, upper), -problem.f_q(i, of_f, upper)


class Adam:
    """Adam with a state of its own for every block: m, n and t count the visits of that block alone."""

    def __init__(self, step, b1=0.9, b2=0.99, eps=1e-3):
        self.step, self.b1, self.b2, self.eps, self.state = step, b1, b2, eps, {}

    def __call__(self, i, slope):
        m, n, t = self.state.get(i, (0 * slope, 0 * slope, 0))
        m, n, t = self.b1 * m + (1 - self.b1) * slope, self.b2 * n + (1 - self.b2) * slope**2, t + 1
        self.state[i] = m, n, t
        return -self.step * (m / (1 - self.b1**t)) / (np.sqrt(n / (1 - self.b2**t)) + self.eps)


def steps_of(
    problem,
    samples,
    start,
    coefficients,
    *,
    corrected,
    everyone,
    curvature,
    lam=None,
    refresh=False,
    moves=None,
):
    """The states after every step of a method that tracks slopes; `everyone`: all blocks move.

    curvature: "v" tracks the multiplier, "H" the Hessian, "w" is a penalty; None if a is given. refresh: the
    samples say when all is computed anew, and the estimators forget nothing otherwise (BlockPAGE). moves: by
    variable, how its blocks move along their slopes, if not by plain steps (such as `Adam`).
    """
    moves = moves or {}
    now = old = SimpleNamespace(**copy.deepcopy(start))
    tracked = ["s_p", "s_q"] + ([] if curvature is None else ["s_a", "H" if curvature == "H" else "u"])
    states = []
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        weights = {name: (k.alpha, k.gamma) for name in ("s_a", "s_p", "s_q")}
        weights |= {name: (k.alpha_bar, k.gamma_bar) for name in ("u", "H")}
        if not refresh:  # across a kink of f, what a gradient changes by is noise
            weights |= {name: (k.alpha, min(k.gamma, 1.0)) for name in ("s_p", "s_q")}
        rows = list(zip(sample.blocks, sample.upper, sample.lower, strict=True))
        whole = refresh and sample.refresh
        if whole:
            rows = [(i, problem.upper_of(i), problem.lower_of(i)) for i in range(problem.m)]
        penalty = getattr(k, "penalty", None)
        seen = {i: Look(problem, i, now, *of_i, curvature, penalty) for i, *of_i in rows}
        seen_old = {i: Look(problem, i, old, *of_i, curvature, penalty) for i, *of_i in rows}
        new = copy.deepcopy(now)
        for i in seen:
            if curvature == "v":  # what v was where a bound held a is forgotten when the block is visited
                new.v[i] = problem.free(now.a[i]) * now.v[i]
            for name in tracked:
                fresh, before, at = getattr(seen[i], name), getattr(seen_old[i], name), getattr(now, name)[i]
                alpha, gamma = weights[name]
                if whole:
                    value = fresh
                elif corrected:
                    value = msvr(at, fresh, before, alpha, gamma)
                else:
                    value = moving_average(at, fresh, alpha)
                getattr(new, name)[i] = clip_eigenvalues(value, lam) if name == "H" else value
        G, G_old = mean(one.G for one in seen.values()), mean(one.G for one in seen_old.values())
        if whole:
            new.z = G
        else:
            new.z = storm(now.z, G, G_old, k.beta) if corrected else moving_average(now.z, G, k.beta)
        for i in range(problem.m) if everyone else seen:
            for name in ("p", "q") if curvature is None else ("p", "q", "a"):
                slope = getattr(new, f"s_{name}")[i]
                move = moves[name](i, slope) if name in moves else -k.tau * slope
                getattr(new, name)[i] = getattr(now, name)[i] + move
            if curvature in ("v", "w"):
                move = moves["v"](i, new.u[i]) if "v" in moves else -k.tau_bar * new.u[i]
                new.v[i] = new.v[i] + move
        problem.bounded(new)
        for i in seen:
            if curvature == "v" and not everyone:
                new.v[i] = problem.free(new.a[i]) * new.v[i]
        if curvature == "w":
            new.v = np.clip(new.v, *problem.box)
        new.x = now.x - k.eta * new.z
        old, now = now, new
        states.append(now)
    return states


def step_within(hessian, slope, low, high):
    """The minimum of slope'd + 1/2 d'hessian d over low <= d <= high: the best of all choices of bounds."""
    best, least = None, np.inf
    for choice in itertools.product((0, 1, 2), repeat=len(slope)):
        choice = np.array(choice)
        d = np.where(choice == 1, low, np.where(choice == 2, high, 0.0))
        free = choice == 0
        if not np.isfinite(d).all():
            continue
        if free.any():
            right = slope[free] + hessian[np.ix_(free, ~free)] @ d[~free]
            d[free] = -np.linalg.solve(hessian[np.ix_(free, free)], right)
        value = slope @ d + 0.5 * d @ hessian @ d
        if value < least and np.all(d >= low - 1e-12) and np.all(d <= high + 1e-12):
            best, least = d, value
    return best


def newton_steps_of(problem, samples, start, coefficients):
    """BlockNewton: Newton steps of a and v; p and q move along their slopes, over their curvatures."""
    now, states = SimpleNamespace(**copy.deepcopy(start)), []
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new, terms = copy.deepcopy(now), []
        for i, upper, lower in zip(sample.blocks, sample.upper, sample.lower, strict=True):
            seen = Look(problem, i, now, upper, lower, "v", None)
            new.H[i] = moving_average(now.H[i], seen.H, k.alpha)
            slope, low, high = k.alpha * problem.sign * seen.s_a, *(end - now.a[i] for end in problem.box)
            if np.isfinite(problem.box).all():
                new.a[i] = now.a[i] + step_within(new.H[i], slope, low, high)
                new.a[i] = np.where(np.abs(new.a[i] - problem.box[0]) < 1e-14, problem.box[0], new.a[i])
                new.a[i] = np.where(np.abs(new.a[i] - problem.box[1]) < 1e-14, problem.box[1], new.a[i])
            else:
                new.a[i] = now.a[i] - np.linalg.solve(new.H[i], slope)
            new.v[i] = now.v[i] - k.alpha * problem.multiplier(new.H[i], problem.sign * seen.u, now.a[i])
            new.v[i] = problem.free(new.a[i]) * new.v[i]
            new.s_p[i], new.s_q[i] = seen.s_p, seen.s_q / 1.5
            new.p[i] = now.p[i] - k.alpha * new.s_p[i]
            new.q[i] = now.q[i] - k.alpha * new.s_q[i]
            terms.append(seen.G)
        problem.bounded(new)
        new.z = moving_average(now.z, mean(terms), k.beta)
        new.x = now.x - k.eta * new.z
        now = new
        states.append(now)
    return states


def saga_steps_of(problem, samples, start, coefficients, *, size, moves=None):
    """BlockSAGA: plain steps of the sampled blocks, with a stored gradient of every piece and row group."""
    m, now, states, moves = problem.m, SimpleNamespace(**copy.deepcopy(start)), [], moves or {}

    def piece(name, i, s, rows):
        if name in ("g_aa_v", "g_xa_v"):
            return getattr(problem, name[:-2])(i, s, rows) @ s.v[i]
        return getattr(problem, name)(i, s, rows)

    zero = copy.deepcopy(now)
    zero.v[:] = 0
    stored = {}
    for name in ("f_x", "f_a", "f_p", "f_q", "g_a", "g_aa_v", "g_xa_v"):
        stored[name] = Stored(problem.upper_of if name[0] == "f" else problem.lower_of, size, m)
        stored[name].fill(lambda i, rows, name=name: piece(name, i, zero, rows))
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, m, len(sample.blocks))
        new = copy.deepcopy(now)
        new.z = np.mean([stored["f_x"].mean(i) - stored["g_xa_v"].mean(i) for i in range(m)], axis=0)
        for i, upper, lower in zip(sample.blocks, sample.upper, sample.lower, strict=True):
            seen = {}
            for name, table in stored.items():
                average, rows = table.mean(i), upper if name[0] == "f" else lower
                change = table.update(i, rows, piece(name, i, now, rows))
                seen[name] = average + change
                if name in ("f_x", "g_xa_v"):
                    new.z = new.z + (1 if name == "f_x" else -1) * change / len(sample.blocks)
            new.s_a[i] = problem.sign * seen["g_a"]
            new.u[i] = problem.free(now.a[i]) * problem.sign * (seen["g_aa_v"] - seen["f_a"])
            new.s_p[i], new.s_q[i] = seen["f_p"], -seen["f_q"]
            for name in "apq":
                slope = getattr(new, f"s_{name}")[i]
                move = moves[name](i, slope) if name in moves else -k.tau * slope
                getattr(new, name)[i] = getattr(now, name)[i] + move
            new.v[i] = now.v[i] - k.tau_bar * new.u[i]
        problem.bounded(new)
        new.v = problem.free(new.a) * new.v
        new.x = now.x - k.eta * new.z
        now = new
        states.append(now)
    return states


def lower_solution(problem, x, turns=4000):
    """a(x), and the saddle point of f in (p, q) within bounds, by slow and sure steps on all rows."""
    m = problem.m
    state = SimpleNamespace(x=x, a=np.zeros((m, problem.dy)), p=np.zeros((m, 2)), q=np.zeros((m, 3)))
    for i in range(m):
        upper, lower = problem.upper_of(i), problem.lower_of(i)
        state.a[i] = -np.linalg.solve(problem.g_aa(i, state, lower), problem.g_a(i, state, lower))
        for _ in range(turns):
            p, q = (
                state.p[i] - 0.2 * problem.f_p(i, state, upper),
                state.q[i] + 0.2 * problem.f_q(i, state, upper),
            )
            state.p[i], state.q[i] = np.maximum(p, LEAST), np.minimum(q, MOST)
    return state


def hypergradient(problem, x):
    """The gradient of F on all rows: p and q need no multiplier."""
    state, terms = lower_solution(problem, x), []
    for i in range(problem.m):
        upper, lower = problem.upper_of(i), problem.lower_of(i)
        v = np.linalg.solve(problem.g_aa(i, state, lower), problem.f_a(i, state, upper))
        terms.append(problem.f_x(i, state, upper) - problem.g_xa(i, state, lower) @ v)
    return mean(terms)
