"""Peers of `benchmarks.peers` in PyTorch: implicit differentiation with TorchOpt, and unrolling.

The problem and the timing are the same. A step takes 10 blocks, side by side in one matrix:

- "torch-blocks": lower problems by warm-started L-BFGS on all rows; F is differentiated through the solutions
  by TorchOpt's `custom_root`, which solves the linear system by conjugate gradients;
- "torch-mini-batch": the same with 2,048 training rows and 512 validation rows, and looser tolerances;
- "torch-unrolled": 10 steps of TorchOpt's SGD with momentum on all rows; F is differentiated through them.

TorchOpt's Adam updates x. Every run uses one thread or all, whichever is faster in its first steps: on a busy
machine all can be much slower than one. betty is missing because its releases either have metadata that pip
rejects (`torch>=1.6.*`) or need a Python before 3.11.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import hyperopt
from benchmarks.track import Clock, Track, follow

try:
    import torch  # pyright: ignore[reportMissingImports]
    import torchopt  # pyright: ignore[reportMissingImports]
    from torch import Tensor  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import softplus  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError('the PyTorch peers need torch and torchopt: pip install "bilevax[torch]"') from error

warnings.filterwarnings("ignore", "We've integrated functorch", FutureWarning)  # TorchOpt uses its old name

BLOCKS_PER_STEP = 10
THREADS = torch.get_num_threads()
ADAM_STEPS = ((0.1,), (0.3,), (1.0,), (3.0,))


class Data(NamedTuple):
    """The problem's arrays, as tensors."""

    row: Tensor
    label: Tensor
    held_row: Tensor
    held_label: Tensor
    temperature: Tensor


class Sample(NamedTuple):
    """The data of a step: temperatures, training rows and their indices in x, validation rows."""

    temperature: Tensor
    row: Tensor
    label: Tensor
    places: Tensor | slice
    held_row: Tensor
    held_label: Tensor


class Peer(NamedTuple):
    """A peer: rows per step (None: all), the settings to try, and the lower solver."""

    rows: int | None
    held_rows: int | None
    settings: tuple[tuple[float, ...], ...]
    solve: Callable[..., Tensor]


def tensors(split: hyperopt.SparseSplit, blocks: int) -> Data:
    arrays = (split.train.toarray(), split.labels, split.held.toarray(), split.held_labels)
    return Data._make(torch.from_numpy(array) for array in (*arrays, hyperopt.temperatures(blocks)))


def lower(y: Tensor, x: Tensor, temperature: Tensor, row: Tensor, label: Tensor) -> Tensor:
    """The sum of the lower functions of some blocks; x holds the entries of the given rows."""
    loss = softplus(-label * (y @ row.T) / temperature[:, None])
    decay = 0.5 * hyperopt.REGULARIZATION * torch.sum(y * y)
    return torch.sum(torch.mean(torch.sigmoid(x) * loss, 1)) + decay


def upper(y: Tensor, sample: Sample) -> Tensor:
    """The mean of the blocks' upper functions."""
    return torch.mean(softplus(-sample.held_label * (y @ sample.held_row.T) / sample.temperature[:, None]))


def descend(iterations: int, y: Tensor, *arguments: Tensor) -> Tensor:
    """Lower solutions by L-BFGS on the sum over blocks."""
    y = y.detach().clone().requires_grad_()
    constants = [argument.detach() for argument in arguments]
    optimizer = torch.optim.LBFGS(
        [y], max_iter=iterations, tolerance_grad=1e-7, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        value = lower(y, *constants)
        (y.grad,) = torch.autograd.grad(value, y)
        return value

    optimizer.step(closure)
    return y.detach()


def implicit(y: Tensor, x: Tensor, sample: Sample, iterations: int, tolerance: float) -> Tensor:
    """Lower solutions, differentiable by the implicit function theorem."""

    def found(y: Tensor, x: Tensor, temperature: Tensor, row: Tensor, label: Tensor) -> Tensor:
        return descend(iterations, y, x, temperature, row, label)

    solve = torchopt.linear_solve.solve_cg(rtol=tolerance, maxiter=200)
    found = torchopt.diff.implicit.custom_root(torch.func.grad(lower), argnums=1, solve=solve)(found)
    return found(y, x[sample.places], sample.temperature, sample.row, sample.label)


def unrolled(y: Tensor, x: Tensor, sample: Sample, rate: float, steps: int) -> Tensor:
    """Some steps towards the lower solutions, differentiable by the chain rule."""
    arguments = (x[sample.places], sample.temperature, sample.row, sample.label)
    optimizer = torchopt.sgd(rate, momentum=0.9)
    y = y.detach().requires_grad_()
    state = optimizer.init((y,))
    for _ in range(steps):
        slope = torch.autograd.grad(lower(y, *arguments), y, create_graph=True)
        updates, state = optimizer.update(slope, state, inplace=False)
        (y,) = torchopt.apply_updates((y,), updates, inplace=False)
    return y


PEERS = {
    "torch-blocks": Peer(None, None, ADAM_STEPS, functools.partial(implicit, iterations=10, tolerance=1e-2)),
    "torch-mini-batch": Peer(
        2048, 512, ADAM_STEPS, functools.partial(implicit, iterations=5, tolerance=1e-1)
    ),
    "torch-unrolled": Peer(
        None, None, ((0.3, 1.0), (1.0, 1.0), (0.3, 2.0), (1.0, 2.0)), functools.partial(unrolled, steps=10)
    ),
}


def gradient(solve: Callable[..., Tensor], x: Tensor, y: Tensor, sample: Sample) -> tuple[Tensor, Tensor]:
    """The gradient of the blocks' mean upper function, and their lower solutions."""
    x = x.detach().requires_grad_()
    found = solve(y, x, sample)
    (slope,) = torch.autograd.grad(upper(found, sample), x)
    return slope, found.detach()


def exact_gradient(split: hyperopt.SparseSplit, x: np.ndarray, count: int) -> np.ndarray:
    """∇F at x for the first `count` blocks on all rows, with accurate lower and linear solves."""
    data = tensors(split, count)
    sample = Sample(data.temperature, data.row, data.label, slice(None), data.held_row, data.held_label)
    solve = functools.partial(implicit, iterations=300, tolerance=1e-6)
    return gradient(solve, torch.from_numpy(x), torch.zeros(count, data.row.shape[1]), sample)[0].numpy()


def draw(data: Data, peer: Peer, seed: int) -> tuple[Tensor, Sample]:
    """The blocks and the data of a step."""
    dice = torch.Generator().manual_seed(seed)

    def some(total: int, size: int | None) -> Tensor | slice:
        return slice(None) if size is None else torch.randint(total, (size,), generator=dice)

    blocks = torch.randperm(len(data.temperature), generator=dice)[:BLOCKS_PER_STEP]
    places, held = some(len(data.label), peer.rows), some(len(data.held_label), peer.held_rows)
    rows = (data.row[places], data.label[places], places, data.held_row[held], data.held_label[held])
    return blocks, Sample(data.temperature[blocks], *rows)


def use_best_threads(start: Callable[[], Any], step: Callable[[Any, int], Any], steps: int = 5) -> int:
    """Sets one thread or all, whichever takes some steps faster; returns the number of threads."""
    seconds = {}
    for threads in (1, THREADS):
        torch.set_num_threads(threads)
        state = step(start(), 0)
        began = time.perf_counter()
        for seed in range(steps):
            state = step(state, seed)
        seconds[threads] = time.perf_counter() - began
    best = min(seconds, key=lambda threads: seconds[threads])
    torch.set_num_threads(best)
    return best


def run(
    split: hyperopt.SparseSplit,
    count: int,
    name: str,
    rates: tuple[float, ...],
    budget: float,
    clock: Clock = time.perf_counter,
) -> Track:
    """Runs a peer with a rate for Adam and, if it is unrolled, one for SGD."""
    data, peer = tensors(split, count), PEERS[name]
    rate, *rest = rates
    solve = functools.partial(peer.solve, rate=rest[0]) if rest else peer.solve
    optimizer = torchopt.adam(rate)

    def start() -> tuple[Tensor, Tensor, Any]:
        n, width = data.row.shape
        x = torch.zeros(n)
        return x, torch.zeros(count, width), optimizer.init((x,))

    def step(state: tuple[Tensor, Tensor, Any], seed: int) -> tuple[Tensor, Tensor, Any]:
        x, y, moments = state
        blocks, sample = draw(data, peer, seed)
        slope, found = gradient(solve, x, y[blocks], sample)
        updates, moments = optimizer.update((slope,), moments, inplace=False)
        (x,) = torchopt.apply_updates((x,), updates, inplace=False)
        return x, y.index_copy(0, blocks, found), moments

    threads = use_best_threads(start, step)
    named = ", ".join(f"{what} {value:g}" for what, value in zip(("Adam", "SGD"), rates, strict=False))
    return follow(name, f"{named}; threads: {threads}", start, step, range(100_000), budget, clock)
