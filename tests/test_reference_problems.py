"""The ground truth is itself checked: closed forms against autodiff, methods by what they imply."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import algorithms, problems
from reference.algorithms import constant, restarted

ARGMIN = [problems.QuadraticBlocks, problems.LogisticHyper]


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def close(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def points(problem, i):
    """A random point and rows of block i, some of them drawn twice."""
    start = problems.random_start(problem, seed=i)
    rng = np.random.default_rng(i)
    upper, lower = (rng.choice(of(i), size=7) for of in (problem.upper_of, problem.lower_of))
    return start, upper, lower


# --- closed forms -----------------------------------------------------------


def derivatives(problem):
    """Compiled once for all blocks: of f by x and by y; of g by y, twice by y, and by x and y."""
    by_y = jax.grad(problem.lower, 1)
    upper = jax.jit(jax.grad(problem.upper, (0, 1)))
    lower = jax.jit(lambda *g: (by_y(*g), jax.hessian(problem.lower, 1)(*g), jax.jacobian(by_y, 0)(*g).T))
    return upper, lower


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", ARGMIN)
def test_argmin_pieces_are_the_derivatives_of_the_jax_functions(family, ragged):
    problem = family(ragged=ragged)
    of_upper, of_lower = derivatives(problem)
    for i in range(problem.m):
        start, upper, lower = points(problem, i)
        x, y = start.x, start.y[i]
        f = (jnp.asarray(x), jnp.asarray(y), problem.block(i), problem.upper_batch(upper))
        g = (jnp.asarray(x), jnp.asarray(y), problem.block(i), problem.lower_batch(lower))
        (f_x, f_y), (g_y, g_yy, g_xy) = of_upper(*f), of_lower(*g)
        close(problem.f_x(i, x, y, upper), f_x)
        close(problem.f_y(i, x, y, upper), f_y)
        close(problem.g_y(i, x, y, lower), g_y)
        close(problem.g_yy(i, x, y, lower), g_yy)
        close(problem.g_xy(i, x, y, lower), g_xy)


@pytest.mark.parametrize("ragged", [False, True])
def test_mean_pieces_are_the_derivatives_of_the_jax_functions(ragged):
    problem = problems.MeanBlocks(ragged=ragged)
    for i in range(problem.m):
        start, upper, lower = points(problem, i)
        x, y = start.x, start.y[i]
        f = (jnp.asarray(x), jnp.asarray(y), problem.block(i), problem.upper_batch(upper))
        c = (jnp.asarray(x), problem.block(i), problem.lower_batch(lower))
        close(problem.f_x(i, x, y, upper), jax.grad(problem.upper, 0)(*f))
        close(problem.f_y(i, x, y, upper), jax.grad(problem.upper, 1)(*f))
        close(problem.c(i, x, lower), problem.inner(*c))
        close(problem.c_x(i, x, lower), jax.jacobian(problem.inner)(*c).T)


@pytest.mark.parametrize("ragged", [False, True])
def test_mixed_pieces_are_the_derivatives_of_the_jax_functions(ragged):
    problem = problems.Mixed(ragged=ragged)
    of_upper, of_lower = derivatives(problem)
    for i in range(problem.m):
        start, upper, lower = points(problem, i)
        x, y_a, y_b = start.x, start.y_a[i], start.y_b[i]
        y = {"a": jnp.asarray(y_a), "b": jnp.asarray(y_b)}
        f = (jnp.asarray(x), y, problem.block(i), problem.upper_batch(upper))
        g = (jnp.asarray(x), y["a"], problem.block(i), problem.lower_batch(lower))
        c = (jnp.asarray(x), problem.block(i), problem.lower_batch(lower))
        (f_x, f_y), (g_y, g_yy, g_xy) = of_upper(*f), of_lower(*g)
        close(problem.f_x(i, x, y_a, y_b, upper), f_x)
        close(problem.f_a(i, x, y_a, y_b, upper), f_y["a"])
        close(problem.f_b(i, x, y_a, y_b, upper), f_y["b"])
        close(problem.g_x(i, x, y_a, lower), jax.grad(problem.lower)(*g))
        close(problem.g_y(i, x, y_a, lower), g_y)
        close(problem.g_yy(i, x, y_a, lower), g_yy)
        close(problem.g_xy(i, x, y_a, lower), g_xy)
        close(problem.c(i, x, lower), problem.inner(*c))
        close(problem.c_x(i, x, lower), jax.jacobian(problem.inner)(*c).T)


@pytest.mark.parametrize("family", ARGMIN)
def test_hypergradient_is_the_slope_of_the_objective(family):
    problem = family(ragged=True)
    start = problems.random_start(problem)

    def objective(x):
        y = algorithms.solve_lower(problem, x, start.y)
        rows = [problem.upper_batch(problem.upper_of(i)) for i in range(problem.m)]
        values = [problem.upper(x, y[i], problem.block(i), rows[i]) for i in range(problem.m)]
        return float(np.mean(values))

    direction = np.random.default_rng(1).normal(size=problem.dx)
    step = 1e-5 * direction
    slope = (objective(start.x + step) - objective(start.x - step)) / 2e-5
    close(algorithms.hypergradient(problem, start.x, start.y) @ direction, slope, 1e-7)


# --- methods ----------------------------------------------------------------

SMALL = {"eta": 0.05, "tau": 0.2, "tau_bar": 0.2, "alpha": 0.3, "alpha_bar": 0.4, "beta": 0.4}


METHODS = pytest.mark.parametrize(
    ("method", "options"),
    [
        (algorithms.bsvrb_v1, {"lam": 0.5}),
        (algorithms.bsvrb_v2, {}),
        (algorithms.ksong, {"lam": 0.5}),
        (algorithms.mmbo, {}),
        (algorithms.soba, {}),
        (algorithms.rsvrb, {"lam": 0.5}),
    ],
)


@METHODS
@pytest.mark.parametrize("ragged", [False, True])
def test_all_blocks_and_rows_reach_a_stationary_point(method, options, ragged):
    problem = problems.QuadraticBlocks(ragged=ragged)
    start = problems.random_start(problem)
    samples = problems.full_samples(problem, 600)
    end = method(problem, samples, start, constant(**SMALL), **options)
    close(algorithms.hypergradient(problem, end.x, end.y), 0, 1e-8)
    close(end.y, algorithms.solve_lower(problem, end.x, end.y), 1e-8)


@pytest.mark.parametrize("method", [algorithms.msvr_v2, algorithms.song])
def test_all_blocks_and_rows_reach_a_stationary_point_of_mean_blocks(method):
    problem = problems.MeanBlocks(ragged=True)
    start = problems.random_start(problem)
    end = method(problem, problems.full_samples(problem, 600), start, constant(**SMALL))
    close(algorithms.hypergradient_mean(problem, end.x), 0, 1e-8)


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_reaches_a_stationary_point(version):
    problem = problems.Mixed(ragged=True)
    start = problems.random_start(problem)
    samples = problems.full_samples(problem, 1000)
    end = algorithms.bsvrb_mixed(problem, samples, start, constant(**SMALL), version=version, lam=0.1)
    terms = []
    for i in range(problem.m):
        upper, lower, x, y_a = problem.upper_of(i), problem.lower_of(i), end.x, end.y_a[i]
        close(problem.g_y(i, x, y_a, lower), 0, 1e-8)
        y_b = problem.c(i, x, lower)
        f = (i, x, y_a, y_b, upper)
        v = np.linalg.solve(problem.g_yy(i, x, y_a, lower), problem.f_a(*f))
        argmin_term = problem.g_xy(i, x, y_a, lower) @ v
        terms.append(problem.f_x(*f) - argmin_term + problem.c_x(i, x, lower) @ problem.f_b(*f))
    close(np.mean(terms, axis=0), 0, 1e-8)


@METHODS
def test_sampled_blocks_and_rows_come_near_a_stationary_point(method, options):
    problem = problems.QuadraticBlocks(m=10, rows=20)
    start = problems.random_start(problem)
    samples = problems.draw_samples(problem, 3000, 5, 4)
    coefficients = constant(eta=0.005, tau=0.05, tau_bar=0.05, alpha=0.1, alpha_bar=0.1, beta=0.1)
    end = method(problem, samples, start, coefficients, **options)
    before, after = (np.linalg.norm(algorithms.hypergradient(problem, x, start.y)) for x in (start.x, end.x))
    assert after < 0.1 * before


def exact_start(problem):
    """A start whose estimators are exact at (x, y)."""
    start = problems.random_start(problem)
    for i in range(problem.m):
        upper, lower = problem.upper_of(i), problem.lower_of(i)
        at = (i, start.x, start.y[i])
        start.s[i] = problem.g_y(*at, lower)
        start.H[i] = problem.g_yy(*at, lower)
        start.u[i] = algorithms.phi_v(problem, i, start, upper, lower)
    return start


def test_bsvrb_with_all_blocks_and_rows_is_gradient_descent():
    problem = problems.LogisticHyper()
    start = exact_start(problem)
    (sample,) = problems.full_samples(problem, 1)
    for version in (1, 2):
        hyper = algorithms.hyper_v1 if version == 1 else algorithms.hyper_v2
        start.z = algorithms.average(hyper, problem, start, sample)
        x, y, v, H = start.x, start.y, start.v, start.H
        for _ in range(5):
            state = SimpleNamespace(x=x, y=y, v=v, H=H)
            G = algorithms.average(hyper, problem, state, sample)
            rows = [(problem.upper_of(i), problem.lower_of(i)) for i in range(problem.m)]
            H = np.array([problem.g_yy(i, x, y[i], rows[i][1]) for i in range(problem.m)])
            s = np.array([problem.g_y(i, x, y[i], rows[i][1]) for i in range(problem.m)])
            u = np.array([algorithms.phi_v(problem, i, state, *rows[i]) for i in range(problem.m)])
            x, y, v = x - 0.05 * G, y - 0.2 * s, v - 0.2 * u
        if version == 1:
            method, options = algorithms.bsvrb_v1, {"lam": 0.01}
        else:
            method, options = algorithms.bsvrb_v2, {}
        end = method(problem, [sample] * 5, start, constant(**SMALL), **options)
        close(end.x, x)
        close(end.y, y)
        close(end.H if version == 1 else end.v, H if version == 1 else v)


def test_weights_of_one_turn_mmbo_into_soba():
    problem = problems.LogisticHyper(ragged=True)
    start = problems.random_start(problem)
    samples = problems.draw_samples(problem, 20, 2, 3)
    ones = constant(eta=0.1, tau=0.2, tau_bar=0.3, alpha=1.0, alpha_bar=1.0, beta=1.0)
    first = algorithms.mmbo(problem, samples, start, ones, radius=0.6)
    second = algorithms.soba(problem, samples, start, ones, radius=0.6)
    for name in ("x", "y", "v", "z"):
        close(getattr(first, name), getattr(second, name))


def lazy_bsvrb_v2(problem, samples, start, coefficients, radius):
    """(delay_update): a block is caught up to t-1 and to t when visited, and not touched else."""
    x, x_old, z = start.x, start.x, start.z
    y, v, s, u = (np.array(getattr(start, name)) for name in ("y", "v", "s", "u"))
    visited = np.zeros(problem.m, dtype=int)

    def caught_up(i, x, t):
        owed = range(visited[i], t)
        y_t = y[i] - sum(coefficients.tau(j) for j in owed) * s[i]
        v_t = v[i] - sum(coefficients.tau_bar(j) for j in owed) * u[i]
        return SimpleNamespace(x=x, y={i: y_t}, v={i: algorithms.project(v_t, radius)})

    for t, sample in enumerate(samples):
        k = algorithms.coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        terms, old_terms = [], []
        for i, upper, lower in algorithms.sampled_blocks(sample):
            now, old = caught_up(i, x, t), caught_up(i, x_old, t - 1)
            terms.append(algorithms.hyper_v2(problem, i, now, upper, lower))
            old_terms.append(algorithms.hyper_v2(problem, i, old, upper, lower))
            g_now, g_old = (problem.g_y(i, at.x, at.y[i], lower) for at in (now, old))
            phi, phi_old = (algorithms.phi_v(problem, i, at, upper, lower) for at in (now, old))
            s[i] = algorithms.msvr(s[i], g_now, g_old, k.alpha, k.gamma)
            u[i] = algorithms.msvr(u[i], phi, phi_old, k.alpha_bar, k.gamma_bar)
            y[i], v[i], visited[i] = now.y[i], now.v[i], t
        z = algorithms.storm(z, np.mean(terms, axis=0), np.mean(old_terms, axis=0), k.beta)
        x, x_old = x - k.eta * z, x
    ends = [caught_up(i, x, len(samples)) for i in range(problem.m)]
    return (
        x,
        np.array([e.y[i] for i, e in enumerate(ends)]),
        np.array([e.v[i] for i, e in enumerate(ends)]),
    )


@pytest.mark.parametrize(("radius", "projection"), [(np.inf, "every step"), (0.5, "once")])
def test_eager_bsvrb_v2_is_the_delayed_update(radius, projection):
    problem = problems.QuadraticBlocks(m=6)
    start = problems.random_start(problem)
    start.v = np.array([algorithms.project(v, radius) for v in start.v])
    samples = problems.draw_samples(problem, 30, 2, 3)
    plain = {"eta": 0.05, "tau": 0.05, "tau_bar": 0.2, "alpha": 0.3, "alpha_bar": 0.3, "beta": 0.3}
    coefficients = restarted(SimpleNamespace(**plain), first=5, stages=3)
    end = algorithms.bsvrb_v2(problem, samples, start, coefficients, radius=radius, projection=projection)
    x, y, v = lazy_bsvrb_v2(problem, samples, start, coefficients, radius)
    close(end.x, x)
    close(end.y, y)
    close(end.v, v)


def test_projecting_once_differs_from_projecting_every_step():
    problem = problems.QuadraticBlocks(m=6)
    start = problems.random_start(problem)
    samples = problems.draw_samples(problem, 30, 2, 3)
    plain = {"eta": 0.05, "tau": 0.05, "tau_bar": 0.2, "alpha": 0.3, "alpha_bar": 0.3, "beta": 0.3}
    every, once = (
        algorithms.bsvrb_v2(problem, samples, start, constant(**plain), radius=0.5, projection=projection)
        for projection in ("every step", "once")
    )
    assert np.abs(every.x - once.x).max() > 1e-3


class OnlyArgmin(problems.QuadraticBlocks):
    """A mixed problem whose upper level ignores y_b."""

    db = 2

    def f_x(self, i, x, y_a, *rest):
        return super().f_x(i, x, y_a, rest[-1])

    def f_a(self, i, x, y_a, y_b, rows):
        return self.f_y(i, x, y_a, rows)

    def f_b(self, i, x, y_a, y_b, rows):
        return np.zeros(self.db)

    def c(self, i, x, rows):
        return x[: self.db]

    def c_x(self, i, x, rows):
        return np.eye(self.dx, self.db)


class OnlyMean(problems.MeanBlocks):
    """A mixed problem whose upper level ignores y_a."""

    db = 2

    def f_x(self, i, x, *rest):
        return super().f_x(i, x, rest[-2], rest[-1])

    def f_a(self, i, x, y_a, y_b, rows):
        return np.zeros(self.dy)

    def f_b(self, i, x, y_a, y_b, rows):
        return self.f_y(i, x, y_b, rows)

    def g_y(self, i, x, y, rows):
        return y

    def g_yy(self, i, x, y, rows):
        return np.eye(self.dy)

    def g_xy(self, i, x, y, rows):
        return np.zeros((self.dx, self.dy))


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_without_one_level_is_the_method_of_the_other(version):
    coefficients = constant(**SMALL)
    problem = OnlyArgmin()
    start = problems.random_start(problem)
    samples = problems.draw_samples(problem, 10, 2, 3)
    options = {"lam": 0.8} if version == 1 else {"radius": 0.9}
    mixed = algorithms.bsvrb_mixed(problem, samples, start, coefficients, version=version, **options)
    method = algorithms.bsvrb_v1 if version == 1 else algorithms.bsvrb_v2
    single = method(problem, samples, start, coefficients, **options)
    close(mixed.x, single.x)
    close(mixed.y_a, single.y)

    problem = OnlyMean()
    start = problems.random_start(problem)
    mixed = algorithms.bsvrb_mixed(problem, samples, start, coefficients, version=version, **options)
    start.y = start.y_b
    single = algorithms.msvr_v2(problem, samples, start, coefficients)
    close(mixed.x, single.x)
    close(mixed.y_b, single.y)


def test_restarted_coefficients_shrink_by_stages():
    plain = SimpleNamespace(eta=1.0, tau=2.0, tau_bar=3.0, alpha=0.4, beta=0.8, gamma=None,
                            gamma_bar=7.0)  # fmt: skip
    staged = restarted(plain, first=3, stages=3)
    assert staged.gamma is None
    assert [staged.gamma_bar(t) for t in (0, 100)] == [7.0, 7.0]
    assert [staged.alpha(t) for t in (0, 2, 3, 8, 9, 1000)] == [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]
    close([staged.tau(t) for t in (2, 3, 9)], [2.0, 2.0 / np.sqrt(2), 1.0])
    at = algorithms.coefficients_at(staged, 3, m=10, sampled=2)
    close(at.gamma, 8 / (2 * 0.8) + 0.8)


def test_clipped_eigenvalues_are_those_of_the_symmetric_part():
    matrix = np.array([[1.0, 4.0], [0.0, -1.0]])
    clipped = algorithms.clip_eigenvalues(matrix, 0.5)
    close(clipped, clipped.T)
    close(np.linalg.eigvalsh(clipped), [0.5, np.sqrt(5)])


def test_the_first_step_of_rsvrb_by_hand():
    problem = problems.QuadraticBlocks(m=4)
    start = problems.random_start(problem)
    (sample,) = problems.draw_samples(problem, 1, 2, 3)
    beta, lam, radius = 0.2, 0.9, 0.5
    coefficients = constant(eta=0.1, tau=0.2, beta=beta)
    end = algorithms.rsvrb(problem, [sample], start, coefficients, lam=lam, radius=radius)
    s = (1 - beta) * start.s
    for i, lower in zip(sample.blocks, sample.lower, strict=True):
        s[i] += beta * 2 * problem.g_y(i, start.x, start.y[i], lower)
    close(end.s, s)
    assert np.linalg.eigvalsh(end.H).min() >= lam - 1e-12
    assert np.linalg.norm(end.y, axis=1).max() <= radius + 1e-12
    close(end.x, start.x - 0.1 * end.z)
