"""Problems with one kind of level, of risk or of rows each, and for every method one with all that it takes.

What a method takes is asked of the method: it refuses the rest by name, before anything is compiled.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevax as bx

M, D_X, D_Y, PER_STEP, BATCH = 16, 3, 2, 8, 2
WRAPPERS = {"AbstractSolver", "Recipe", "Restart"}
METHODS = {
    name: one
    for name, one in vars(bx).items()
    if name not in WRAPPERS and inspect.isclass(one) and issubclass(one, bx.AbstractSolver)
}


def nest(y):
    """Variables as a tree: whoever takes a level takes trees."""
    return {"own": [(), y]}


def flat(y):
    return y["own"][1]


def g(x, y, block, batch):
    """Strongly convex in y."""
    own = flat(y)
    gap = own - block["B"] @ x
    return 0.5 * gap @ gap + 0.25 * jnp.mean((batch @ own) ** 2 - batch @ own)


def c(x, block, batch):
    return nest(jnp.mean(jnp.tanh(batch + block["B"] @ x), 0))


def game(x, y, block, batch):
    return g(x, y[0], block, batch) + flat(y[0]) @ flat(y[1]) - g(x, y[1], block, batch)


def reading(name, other):
    """g whose own variable is pulled to what it reads."""

    def function(x, y, block, batch):
        return g(x, y[name], block, batch) - 0.3 * jnp.tanh(flat(y[other])) @ flat(y[name])

    return function


def mean_reading(other):
    def function(x, y, block, batch):
        return nest(jnp.mean(jnp.tanh(batch * flat(y[other])), 0))

    return function


def f(x, y, block, batch):
    """Convex in what minimises it (p), concave in what maximises it (q), curved in all others."""
    total = 0.5 * x @ x
    for name, value in y.items():
        for one in map(flat, value if isinstance(value, tuple) else (value,)):
            if name == "q":
                total += one @ (0.3 * x[:D_Y] + jnp.mean(batch, 0)) - one @ one
            else:
                total += 0.5 * jnp.mean(jnp.sum((one - batch) ** 2, -1)) + 0.1 * x[:D_Y] @ jnp.sin(one)
    return total


def keyed(function):
    """The function with a slope by x that a key draws."""

    def wrapped(x, *given):
        *rest, key = given
        noise = 0.1 * jax.random.normal(key, x.shape, x.dtype) @ x
        return jax.tree.map(lambda value: value + noise, function(x, *rest))

    return wrapped


def rows(seed=0, count=5 * M):
    return np.random.default_rng(seed).standard_normal((count, D_Y)).astype(np.float32)


def per_block(seed=0):
    """Ragged: blocks have from two to eight rows."""
    offsets = np.r_[0, np.cumsum(2 + np.arange(M) % 7)]
    return bx.PerBlock(rows(seed, offsets[-1]), offsets)


def constants():
    return {"B": np.random.default_rng(1).standard_normal((M, D_Y, D_X)).astype(np.float32)}


def build(levels, *, source=None, random=False, **given):
    """The problem of levels by name, with a start."""
    above, below = source or per_block(0), source or per_block(1)
    if random:
        levels = {name: keyed_level(level) for name, level in levels.items()}
    upper = keyed(f) if random else f
    problem = bx.Problem(upper, levels, constants(), above, below, random=random, **given)
    return problem, jnp.ones(D_X, jnp.float32), {name: start(level) for name, level in levels.items()}


def keyed_level(level):
    """The level with a function that takes a key; what has no function stays."""
    return level if level.own else type(level)(**vars(level) | {"function": keyed(level.function)})


def start(level):
    zeros = nest(jnp.zeros((M, D_Y), jnp.float32))
    return (zeros, zeros) if level.kind == "saddle" else zeros


def base(method, **given):
    """The level that a method is for."""
    return bx.argmin(g, **given) if METHODS[method] not in (bx.MSVR, bx.SONG) else bx.mean(c)


def nested(method):
    first = base(method)
    second = bx.mean(mean_reading("a"), reads="a") if first.kind == "mean" else None
    return {"a": first, "b": second or bx.argmin(reading("b", "a"), reads="a")}


def fetched(step, blocks, size):
    return np.random.default_rng(step).standard_normal((len(blocks), size, D_Y)).astype(np.float32)


def clip(y):
    return jax.tree.map(lambda leaf: jnp.clip(leaf, -0.2, 0.2), y)


# What a problem has, by name: a function of a method's name.
KINDS = {
    "argmin": lambda method: build({"a": bx.argmin(g)}),
    "argmin, bounds": lambda method: build({"a": bx.argmin(g, project=(-0.2, 0.2))}),
    "argmin, set": lambda method: build({"a": bx.argmin(g, project=clip)}),
    "saddle": lambda method: build({"a": bx.saddle(game)}),
    "mean": lambda method: build({"a": bx.mean(c)}),
    "minimum": lambda method: build({"p": bx.minimum(project=(-0.1, None))}),
    "maximum": lambda method: build({"q": bx.maximum(project=(None, 0.1))}),
    "reads": lambda method: build(nested(method)),
    "risk": lambda method: build({"a": base(method)}, risk=bx.cvar(0.3)),
    "keys": lambda method: build({"a": base(method)}, random=True),
    "common rows": lambda method: build({"a": base(method)}, source=bx.Shared(rows(), common=True)),
    "streamed rows": lambda method: build(
        {"a": base(method)}, source=bx.Streamed(fetched, np.zeros(D_Y, np.float32))
    ),
    "optax below": lambda method: build({"p": bx.minimum()}),
}


def solver_of(method, kind=None):
    """The solver, with an optax transformation for lower variables where that is the kind."""
    given = {"lower_step": optax.adam(0.05)} if kind == "optax below" else {}
    return METHODS[method](0.05, **given)


@functools.cache
def refusal(method, kind):
    """Why a method does not take a kind; None if it does. Nothing is computed, not even shapes."""
    try:
        problem, _, _ = KINDS[kind](method)
        plan = bx.Sampling(PER_STEP, BATCH).sampler(problem, jax.random.key(0))
        solver_of(method, kind).check(problem, plan)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def takes(method, kind):
    return refusal(method, kind) is None


def every_kind(method):
    """A problem with all levels that a method takes, under a risk and with keys if it takes them.

    Sets and bounds are there, and an optax transformation for one of the levels.

    Returns:
      The problem, x0, y0, and the solver.
    """
    levels = {}
    bounds = (-0.2, 0.2) if takes(method, "argmin, bounds") else None
    if takes(method, "argmin"):
        levels["a"] = bx.argmin(g, project=clip if takes(method, "argmin, set") else bounds)
    if takes(method, "saddle"):
        levels["s"] = bx.saddle(game)
    if takes(method, "mean"):
        levels["m"] = bx.mean(c)
    if takes(method, "reads"):
        other = "a" if "a" in levels else "m"
        if takes(method, "mean") and method != "BlockSAGA":
            levels["n"] = bx.mean(mean_reading(other), reads=other)
        else:
            levels["n"] = bx.argmin(reading("n", other), reads=other, project=bounds)
    if takes(method, "minimum"):
        levels["p"] = bx.minimum(project=(-0.1, None))
    if takes(method, "maximum"):
        levels["q"] = bx.maximum(project=(None, 0.1))
    risk = bx.cvar(0.3) if takes(method, "risk") else None
    problem, x0, y0 = build(levels, random=takes(method, "keys"), risk=risk)
    given = {"lower_step": {"p": optax.adam(0.05)}} if takes(method, "optax below") else {}
    return problem, x0, y0, METHODS[method](0.01, **given)
