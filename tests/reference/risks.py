"""Risks over blocks, naively in float64 NumPy: every weight from the values of all blocks; see `algorithms`.

A risk is called as `risk(h, threshold, tied)` with the tracked values of all blocks, and returns its value
and the weights of the blocks, m times its gradient. Only the CVaR has a threshold, which is found from all
values every ⌈m/I⌉ steps.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np

from reference.algorithms import (
    clip_eigenvalues,
    coefficients_at,
    correction,
    hyper_mean,
    hyper_penalty,
    mean,
    moving_average,
    msvr,
    penalised_w,
    sampled_blocks,
    storm,
    take,
)
from reference.finite_sums import Stored

MOST_GAMMA = 1.0


class Cvar:
    """The threshold is half-way between the last block in the tail and the first one outside."""

    def __init__(self, share):
        self.share = share

    def threshold(self, h):
        falling, k = sorted(h, reverse=True), self.share * len(h)
        if abs(k - round(k)) > 1e-9:
            return falling[math.floor(k)]
        k = round(k)
        outside = falling[k] if k < len(h) else 2 * falling[-1] - falling[0]
        return (falling[k - 1] + outside) / 2

    def tied(self, h):
        """The weight of blocks at the threshold, when it is found."""
        c = self.threshold(h)
        return min(max((self.share * len(h) - np.sum(h > c)) / max(np.sum(h == c), 1), 0), 1)

    def __call__(self, h, c, tied):
        value = c + np.mean(np.maximum(h - c, 0)) / self.share
        return value, ((h > c) + tied * (h == c)) / self.share


class SoftMaximum:
    def __init__(self, temperature):
        self.temperature = temperature

    def __call__(self, h, *_):
        powers = np.exp((h - h.max()) / self.temperature)
        return h.max() + self.temperature * np.log(powers.mean()), powers / powers.mean()


class WorstGroup:
    def __init__(self, groups, temperature=None):
        self.groups, self.temperature = np.asarray(groups), temperature

    def __call__(self, h, *_):
        k = self.groups.max() + 1
        means = np.array([h[self.groups == one].mean() for one in range(k)])
        if self.temperature is None:
            value, parts = means.max(), (means == means.max()).astype(float)
            parts = parts / parts.sum()
        else:
            value, _ = SoftMaximum(self.temperature)(means)
            parts = np.exp((means - means.max()) / self.temperature)
            parts = parts / parts.sum()
        sizes = np.array([np.sum(self.groups == one) for one in range(k)])
        return value, (parts / sizes)[self.groups] * len(h)


def steps_of(problem, samples, start, coefficients, *, risk, alpha, corrected, curvature, lam=None):
    """The states after every step, each with `objective`; blocks move if all are corrected, or if sampled.

    `curvature` is "H" (version 1 and K-SONG), "v" (version 2, MMBO and BlockPAGE, which refreshes where a
    sample says so), "w" (F2SA and F3SA), "N" (BlockNewton) or None (MSVR and SONG, whose y is the mean
    itself). `alpha` is a function of t.
    """
    names = {"H": ["s", "H"], "N": ["s", "u", "v", "H"], None: []}.get(curvature, ["s", "u", "v"])
    now = old = take(start, "x", "y", "z", "h", *names)
    finds = isinstance(risk, Cvar)
    known = (risk.threshold(now.h), risk.tied(now.h)) if finds else (None, None)
    found, states = 0, []
    for t, sample in enumerate(samples):
        count = len(sample.blocks)
        if finds and t - found >= math.ceil(problem.m / count):
            known, found = (risk.threshold(now.h), risk.tied(now.h)), t
        k = coefficients_at(coefficients, t, problem.m, count)
        value, weights = risk(now.h, *known)
        new, terms, terms_old, seen = copy.deepcopy(now), [], [], []
        for i, upper, lower in sampled_blocks(sample):
            looks = [look(problem, i, state, upper, lower, curvature, k) for state in (now, old)]
            fresh, before = looks
            terms.append(weights[i] * fresh.G)
            terms_old.append(weights[i] * before.G)
            seen.append(weights[i] * (fresh.f - now.h[i]))
            for name, a, gamma in (
                ("y" if curvature is None else "s", k.alpha, k.gamma),
                ("u", k.alpha_bar, k.gamma_bar),
                ("H", k.alpha_bar, k.gamma_bar),
                ("h", alpha(t), min(correction(alpha(t), problem.m, count), MOST_GAMMA)),
            ):
                if not hasattr(now, name):
                    continue
                at, one, other = getattr(now, name)[i], getattr(fresh, name), getattr(before, name)
                if curvature == "N":
                    a = {"s": 1.0, "u": 1.0, "H": k.alpha}.get(name, a)
                moved = msvr(at, one, other, a, gamma) if corrected else moving_average(at, one, a)
                getattr(new, name)[i] = clip_eigenvalues(moved, lam) if name == "H" and lam else moved
        G, G_old = mean(terms), mean(terms_old)
        new.z = storm(now.z, G, G_old, k.beta) if corrected else moving_average(now.z, G, k.beta)
        if getattr(sample, "refresh", False):
            rows = [(i, problem.upper_of(i), problem.lower_of(i)) for i in range(problem.m)]
            whole = [look(problem, i, now, upper, lower, curvature, k) for i, upper, lower in rows]
            new.s, new.u = np.array([one.s for one in whole]), np.array([one.u for one in whole])
            new.z = mean([weight * one.G for weight, one in zip(weights, whole, strict=True)])
        for i in range(problem.m) if corrected else sample.blocks:
            if curvature is None:
                break
            if curvature == "N":
                new.y[i] = now.y[i] - k.alpha * np.linalg.solve(new.H[i], new.s[i])
                new.v[i] = now.v[i] - k.alpha * np.linalg.solve(new.H[i], new.u[i])
                continue
            new.y[i] = now.y[i] - k.tau * new.s[i]
            if curvature != "H":
                new.v[i] = now.v[i] - k.tau_bar * new.u[i]
        new.x = now.x - k.eta * new.z
        new.objective = value + np.mean(seen)
        old, now = now, new
        states.append(now)
    return states


def look(problem, i, state, upper, lower, curvature, k):
    """What a step sees of one block; v belongs to f without its weight."""
    at = (i, state.x, state.y[i])
    if curvature is None:
        f, G = problem.f(*at, upper), hyper_mean(problem, i, state, upper, lower)
        return SimpleNamespace(f=f, h=f, y=problem.c(i, state.x, lower), G=G)
    if curvature == "w":
        there = (i, state.x, state.v[i])
        f, slope = problem.f(*there, upper), penalised_w(problem, i, state, upper, lower, k.penalty)
        G = hyper_penalty(problem, i, state, upper, lower, k.penalty)
        return SimpleNamespace(f=f, h=f, s=problem.g_y(*at, lower), u=slope, G=G)
    f_y, H = problem.f_y(*at, upper), problem.g_yy(*at, lower)
    v = np.linalg.solve(state.H[i], f_y) if curvature == "H" else state.v[i]
    f = problem.f(*at, upper)
    G = problem.f_x(*at, upper) - problem.g_xy(*at, lower) @ v
    return SimpleNamespace(f=f, h=f, s=problem.g_y(*at, lower), u=H @ v - f_y, H=H, G=G)


def saga_steps_of(problem, samples, start, coefficients, *, risk, alpha, size):
    """BlockSAGA under a risk: the stored gradients by x are those of weighed blocks."""
    now = take(start, "x", "y", "s", "z", "h", "u", "v")
    finds, found, states = isinstance(risk, Cvar), 0, []
    known = (risk.threshold(now.h), risk.tied(now.h)) if finds else (None, None)
    pieces = {
        "f_x": lambda i, at, rows: problem.f_x(i, at.x, at.y[i], rows),
        "f_y": lambda i, at, rows: problem.f_y(i, at.x, at.y[i], rows),
        "g_y": lambda i, at, rows: problem.g_y(i, at.x, at.y[i], rows),
        "g_yy_v": lambda i, at, rows: problem.g_yy(i, at.x, at.y[i], rows) @ at.v[i],
        "g_xy_v": lambda i, at, rows: problem.g_xy(i, at.x, at.y[i], rows) @ at.v[i],
    }
    signs = {"f_x": 1, "g_xy_v": -1}
    zero, stored = copy.deepcopy(now), {}
    zero.v[:] = 0

    def piece(name, i, at, rows, weights):
        return (weights[i] if name in signs else 1) * pieces[name](i, at, rows)

    weights = risk(now.h, *known)[1]
    for name in pieces:
        stored[name] = Stored(problem.upper_of if name[0] == "f" else problem.lower_of, size, problem.m)
        stored[name].fill(lambda i, rows, name=name, w=weights: piece(name, i, zero, rows, w))
    for t, sample in enumerate(samples):
        count = len(sample.blocks)
        if finds and t - found >= math.ceil(problem.m / count):
            known, found = (risk.threshold(now.h), risk.tied(now.h)), t
        k = coefficients_at(coefficients, t, problem.m, count)
        value, weights = risk(now.h, *known)
        new, seen = copy.deepcopy(now), []
        new.z = sum(
            sign * np.mean([stored[name].mean(i) for i in range(problem.m)], axis=0)
            for name, sign in signs.items()
        )
        for i, upper, lower in sampled_blocks(sample):
            reduced = {}
            for name, table in stored.items():
                average, rows = table.mean(i), upper if name[0] == "f" else lower
                change = table.update(i, rows, piece(name, i, now, rows, weights))
                reduced[name] = average + change
                if name in signs:
                    new.z = new.z + signs[name] * change / count
            f = problem.f(i, now.x, now.y[i], upper)
            seen.append(weights[i] * (f - now.h[i]))
            new.h[i] = moving_average(now.h[i], f, alpha(t))
            new.s[i], new.u[i] = reduced["g_y"], reduced["g_yy_v"] - reduced["f_y"]
            new.y[i] = now.y[i] - k.tau * new.s[i]
            new.v[i] = now.v[i] - k.tau_bar * new.u[i]
        new.x = now.x - k.eta * new.z
        new.objective = value + np.mean(seen)
        now = new
        states.append(now)
    return states
