"""A prior for up to 10⁶ groups: seconds by phase, peak memory, and the error beside the truth.

`python -m benchmarks.grouped --groups 1_000_000` generates groups of 5 to 50 rows with 20 features, whose
coefficients are correlated normal variables, fits `GroupedRegressor` with nothing tuned, and predicts fresh
rows. `--loss logistic` fits `GroupedClassifier` to the sign of the targets, `--em` runs EM beside it.

`--seconds` compares a fit of a table of ratings with EM instead, in seconds of the processor: the first fit
of the process, which compiles its programs or reads them from the cache of earlier processes, later fits
(also with `max_iter=0`: all but the learning), EM to four and to six digits, in NumPy and with the systems of
groups solved as the library solves them, and the sums of squares of all groups alone, which everybody needs.
With `--loss logistic` it is Laplace-EM, and fits whose prior is learnt from some of the groups.

`--join` makes tables of results that were written with `--out`, on one machine or several, in the folder that
`--tables` names.

"above the truth" is the squared error of the predictors against those of the true coefficients, per unit of
noise variance, or by how much the expected log-loss is above theirs: 0 for a model that knows them. That of
the true prior, with every group's own rows, is the least that a fit can reach.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.applications.grouped import GroupedClassifier, GroupedRegressor, block_systems
from bilevax.applications.grouped.closed_form import Evidence
from bilevax.applications.grouped.priors import Prior
from bilevax.data import load_interactions
from bilevax.experiments import grouped_panels as panels
from bilevax.experiments.grouped_baselines import Sums, laplace_em
from bilevax.experiments.report import Report

FEATURES = 20
_MANY = (
    "peak memory: the host's, with the rows; above the truth: squared error of the predictors of fresh rows, "
    "per unit of noise variance."
)


class Phases:
    """Seconds by phase, wall clock and processor."""

    def __init__(self):
        self.seconds: dict[str, tuple[float, float]] = {}
        self.last = time.perf_counter(), time.process_time()

    def end(self, name: str) -> None:
        """Ends the phase that began with the last end."""
        now = time.perf_counter(), time.process_time()
        self.seconds[name] = now[0] - self.last[0], now[1] - self.last[1]
        self.last = now
        print(
            f"{name:22} {self.seconds[name][0]:8.1f} s, processor {self.seconds[name][1]:8.1f} s", flush=True
        )


class Truth:
    """Generated groups.

    Args:
      groups: how many.
      seed: of everything.
    """

    def __init__(self, groups: int, seed: int):
        self.random = np.random.default_rng(seed)
        size = FEATURES + 1
        self.mean = self.random.normal(size=size).astype(np.float32)
        mix = 0.3 * self.random.normal(size=(size, size)) / size**0.5 + np.diag(np.linspace(0.1, 0.5, size))
        self.covariance = mix @ mix.T
        drawn = self.random.standard_normal((groups, size), np.float32)
        self.beta = self.mean + drawn @ mix.T.astype(np.float32)

    def rows(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """X in single precision, the predictors of the true coefficients, and the groups."""
        group = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        X = self.random.standard_normal((len(group), FEATURES), np.float32)
        eta = np.empty(len(group), np.float32)
        for first in range(0, len(group), 2**18):  # a row's coefficients take as much memory as the row
            part = slice(first, first + 2**18)
            beta = self.beta[group[part]]
            eta[part] = np.einsum("nd,nd->n", X[part], beta[:, 1:]) + beta[:, 0]
        return X, eta, group


def peak() -> float:
    """The most memory that the process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def known_prior(truth: Truth, X: np.ndarray, y: np.ndarray, offsets: np.ndarray, few: int) -> np.ndarray:
    """The posterior means of the first groups under the prior that they were drawn from (noise 1)."""
    P, out = np.linalg.inv(truth.covariance), np.zeros((few, FEATURES + 1))
    for i in range(few):
        rows = np.concatenate([np.ones((offsets[i + 1] - offsets[i], 1)), X[offsets[i] : offsets[i + 1]]], 1)
        right = rows.T @ y[offsets[i] : offsets[i + 1]] + P @ truth.mean
        out[i] = np.linalg.solve(rows.T @ rows + P, right)
    return out


def em(X: np.ndarray, y: np.ndarray, offsets: np.ndarray, most: int = 200, tolerance: float = 1e-4) -> int:
    """EM for the random-effects model on all groups, as `bilevax reproduce grouped` has it; its steps."""
    d, m = FEATURES + 1, len(offsets) - 1
    A, b = np.zeros((m, d, d)), np.zeros((m, d))
    for i in range(m):
        rows = np.concatenate([np.ones((offsets[i + 1] - offsets[i], 1)), X[offsets[i] : offsets[i + 1]]], 1)
        A[i], b[i] = rows.T @ rows, rows.T @ y[offsets[i] : offsets[i + 1]]
    c, n = float((y.astype(float) ** 2).sum()), len(y)
    mean, covariance, noise = np.zeros(d), 0.1 * np.eye(d), 1.0
    for step in range(most):
        precision = np.linalg.inv(covariance)
        V = np.linalg.inv(A / noise + precision)
        beta = np.einsum("mde,me->md", V, b / noise + precision @ mean)
        mean, off, before = beta.mean(0), beta - beta.mean(0), covariance
        covariance = (V.sum(0) + off.T @ off) / m
        fitted = np.einsum("md,mde,me->", beta, A, beta) - 2 * (beta * b).sum() + (A * V).sum()
        noise = float(c + fitted) / n
        if np.abs(covariance - before).max() <= tolerance * np.abs(covariance).max():
            return step + 1
    return most


def above(loss: str, found: np.ndarray, truth: np.ndarray) -> float:
    """What predictors lose by not being the true ones, in units of the noise variance or of the log-loss."""
    if loss == "squared":
        return float(np.mean((found - truth) ** 2))
    chance = 1 / (1 + np.exp(-truth.astype(float)))
    return float(np.mean(np.logaddexp(0, found) - np.logaddexp(0, truth) - chance * (found - truth)))


def run(groups: int, loss: str, seed: int, *, with_em: bool) -> dict[str, Any]:
    """Generates, fits and predicts; returns what was measured."""
    phases = Phases()
    truth = Truth(groups, seed)
    lengths = truth.random.integers(5, 51, groups)
    X, eta, group = truth.rows(lengths)
    y = eta + truth.random.standard_normal(len(eta), np.float32)
    if loss == "logistic":
        y = (truth.random.random(len(eta), np.float32) < 1 / (1 + np.exp(-eta))).astype(np.int8)
    phases.end("generate")
    before = peak()
    kind = GroupedClassifier if loss == "logistic" else GroupedRegressor
    model: Any = kind(random_state=seed).fit(X, y, groups=group)
    phases.end("fit")
    of_fit = peak()
    X_test, eta_test, group_test = truth.rows(np.full(groups, 2))
    found = model.predict(X_test, groups=group_test) if loss == "squared" else model.decision_function(
        X_test, groups=group_test
    )  # fmt: skip
    phases.end("predict 2 rows each")
    out: dict[str, Any] = {
        "groups": groups,
        "rows": len(y),
        "features": FEATURES,
        "loss": loss,
        "device": jax.devices()[0].device_kind,
        "prior": model.prior_.form,
        "steps": model.n_iter_,
        "memory before the fit, GiB": round(before, 2),
        "peak memory, GiB": round(of_fit, 2),
        "above the truth": round(above(loss, found, eta_test), 4),
        "deviation, largest error": round(
            float(np.abs(model.prior_.deviation - np.sqrt(np.diag(truth.covariance))[1:]).max()), 4
        ),
    }
    if loss == "squared":
        few = min(groups, 20_000)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        best = known_prior(truth, X, y, offsets, few)
        rows = np.concatenate([np.ones((2 * few, 1)), X_test[: 2 * few]], 1)
        error = (rows * best.repeat(2, 0)).sum(1) - eta_test[: 2 * few]
        out["above the truth, true prior"] = round(float(np.mean(error**2)), 4)
        phases.end("the true prior")
        if with_em:
            out["steps of EM"] = em(X, y, offsets)
            phases.end("EM")
    out["seconds"] = {name: [round(one, 1) for one in pair] for name, pair in phases.seconds.items()}
    return out


def tuned_em(sums: Sums, tolerance: float, most: int = 500) -> tuple[np.ndarray, np.ndarray, float]:
    """EM as `Sums` has it, with the inverses of all groups by the library's own program.

    That returns the sums of μ − β, of its squares, of (A + P)⁻¹ and of what is left, all that a step needs.
    """
    m, d = sums.groups, sums.size
    total = np.zeros((m, d + 1, d + 1))
    total[:, :d, :d], total[:, :d, d], total[:, d, d] = sums.A[:, 0], sums.b[:, 0], sums.c[:, 0]
    evidence = Evidence(Prior("full", d), total, np.zeros((m, 0)), 1.0)
    mean, covariance, noise, weight = sums.pooled(), 0.1 * np.eye(d), 1.0, sums.counts.sum()
    for _ in range(most):
        P = noise * np.linalg.inv(covariance)
        with jax.enable_x64(True):
            parts = [block_systems.explained(*one, P, mean, np.zeros((0, d))) for one in evidence.chunks]
        left, _, off, inverse, pull, _ = (
            sum(map(np.asarray, part)) for part in zip(*parts, strict=True)
        )  # fmt: skip
        move = np.linalg.solve(P, pull) / m  # the mean of μ − β
        before, covariance = covariance, (noise * inverse + off) / m - np.outer(move, move)
        noise = float(left - (P * off).sum() + noise * (m * d - (P * inverse).sum())) / weight
        mean = mean - move
        if np.abs(covariance - before).max() <= tolerance * np.abs(covariance).max():
            break
    return mean, covariance, noise


def squared_methods(split: panels.Split, seed: int) -> dict[str, Callable[[], Any]]:
    """Fits with the squared loss, each of which returns predictors of the test rows."""
    train, test = split.train, split.test
    X, group = np.ascontiguousarray(train.X[:, 1:]), train.group

    def ours(most: int = 200) -> np.ndarray:
        model = GroupedRegressor(random_state=seed, max_iter=most).fit(X, train.y, groups=group)
        return model.predict(test.X[:, 1:], groups=test.group)

    def em(tolerance: float) -> np.ndarray:
        sums = Sums.whole(train)
        beta = sums.posterior(*sums.expectation_maximisation(tolerance=tolerance))
        return (test.X * beta[test.group]).sum(1)

    def tuned(tolerance: float) -> np.ndarray:
        sums = Sums.whole(train)
        beta = sums.posterior(*tuned_em(sums, tolerance))
        return (test.X * beta[test.group]).sum(1)

    return {
        "first fit": ours,
        "later fits": ours,
        "later fits without a step": lambda: ours(0),
        "EM, four digits": lambda: em(1e-4),
        "EM, six digits": lambda: em(1e-6),
        "tuned EM, four digits": lambda: tuned(1e-4),
        "tuned EM, six digits": lambda: tuned(1e-6),
        "sums alone": lambda: Sums.whole(train).A.sum() and None,
    }


def logistic_methods(split: panels.Split, seed: int) -> dict[str, Callable[[], Any]]:
    """Fits with the logistic loss, likewise."""
    train, test = split.train, split.test
    X = np.ascontiguousarray(train.X[:, 1:])

    def ours(**given: Any) -> np.ndarray:
        model = GroupedClassifier(random_state=seed, **given).fit(X, train.y, groups=train.group)
        return model.decision_function(test.X[:, 1:], groups=test.group)

    def em() -> np.ndarray:
        return (test.X * laplace_em(train)[0][test.group]).sum(1)

    return {
        "first fit": ours,
        "later fits": ours,
        "later fits without a step": lambda: ours(max_iter=0),
        "later fits, prior of 1,540 groups": lambda: ours(prior_groups=1_540),
        "later fits, prior of 770 groups": lambda: ours(prior_groups=770),
        "Laplace-EM": em,
    }


def seconds(data: str, loss: str, seed: int, times: int = 3) -> dict[str, Any]:
    """Seconds of the processor on the panel of a table of ratings, the least of some runs."""
    logistic = loss == "logistic"
    split = panels.movielens(load_interactions(data), None, 10, seed, logistic=logistic)
    train, test = split.train, split.test
    methods = logistic_methods(split, seed) if logistic else squared_methods(split, seed)
    out: dict[str, Any] = {
        "data": data,
        "of": loss,
        "groups": train.groups,
        "rows": len(train.y),
        "seconds": {},
    }
    for name, method in methods.items():
        taken, found = [], None
        for _ in range(1 if name == "first fit" else times + name.startswith("tuned")):
            began = time.process_time()
            found = method()
            taken.append(time.process_time() - began)
        out["seconds"][name] = round(min(taken), 2)
        if found is not None:
            errors = np.logaddexp(0, found) - test.y * found if logistic else (found - test.y) ** 2
            by_group = np.add.reduceat(errors, test.offsets[:-1]) / np.diff(test.offsets)
            out.setdefault("loss", {})[name] = round(float(by_group.mean()), 4)
        print(f"{name:22} {out['seconds'][name]:8.2f} s of the processor", flush=True)
    return out


def tables(files: list[Path], folder: Path) -> None:
    """Writes tables of results: of many groups, a line per run, and of seconds beside EM."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    report = Report(folder, {"files": [path.name for path in files]})
    many = [one for one in found if "data" not in one]
    if many:
        rows = [
            {
                "device": one["device"],
                "loss": one["loss"],
                "groups": one["groups"],
                "rows": one["rows"],
                "fit, s": one["seconds"]["fit"][0],
                "of the processor, s": one["seconds"]["fit"][1],
                "peak memory, GiB": one["peak memory, GiB"],
                "above the truth": one["above the truth"] if one["loss"] == "squared" else "",
                "true prior": one.get("above the truth, true prior", ""),
            }
            for one in many
        ]
        report.table("grouped_many", rows, "Many groups of 5 to 50 rows with 20 features", _MANY)
    for one in found:
        if "data" in one:
            rows = [
                {"what": name, "seconds": taken, "loss": one["loss"].get(name, "")}
                for name, taken in one["seconds"].items()
            ]
            of = one.get("of", "squared")
            name = "grouped_seconds" if of == "squared" else f"grouped_seconds_{of}"
            report.table(
                name, rows, f"Seconds of the processor, {of} loss, {one['groups']} users of {one['data']}"
            )
    report.finish()


def main() -> None:
    """Reads the arguments, runs, and prints the results as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--loss", choices=["squared", "logistic"], default="squared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--em", action="store_true", help="EM on all groups too (squared loss)")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--seconds", metavar="DATA", help="seconds beside EM on ratings, such as ml-1m")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="make tables of these results")
    parser.add_argument("--tables", type=Path, default=Path("results/grouped-many"), help="where tables go")
    args = parser.parse_args()
    if args.join:
        tables(args.join, args.tables)
        return
    if args.seconds:
        found = seconds(args.seconds, args.loss, args.seed)
    else:
        found = run(args.groups, args.loss, args.seed, with_em=args.em)
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
