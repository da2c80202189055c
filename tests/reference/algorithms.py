"""Naive float64 NumPy transcriptions of the methods, to be used as ground truth.

Everything is eager: plain loops over all m blocks, and whole copies of the state at times t-1
(`old`), t (`now`) and t+1 (`new`), so that x_{t-1}, y_{i,t-1}, H_{i,t-1} and v_{i,t-1} are simply
read off `old`. At the first step `old` is `now`. Equation labels are those of `bsvrb.tex`.

A method is called as `method(problem, samples, start, coefficients, ...)` and returns the final
state.

- `problem`: `m`, and for block i on the sampled `rows` `f_x, f_y, g_x, g_y, g_yy, g_xy(i, x, y, rows)`,
  and for a mean block `c, c_x(i, x, rows)`. `g_xy` and `c_x` (the transposed Jacobian) have shape
  (dx, dy).
- `samples`: one entry per step, with `blocks` (I_t), `upper[k]` and `lower[k]` (the rows of the
  k-th sampled block), and for RSVRB `second` (J_t).
- `start`: a namespace of arrays: x, y of shape (m, dy), and those of s, H, u, v, z the method has.
- `coefficients`: a namespace of functions of the 0-based step t; see `constant` and `restarted`.
"""

import copy
from types import SimpleNamespace

import numpy as np

STEPS = ("eta", "tau", "tau_bar")
WEIGHTS = ("alpha", "alpha_bar", "beta")
CORRECTIONS = ("gamma", "gamma_bar")


# --- coefficients -------------------------------------------------------------


def constant(**values):
    """Coefficients that do not depend on t; a gamma left out or None follows its formula."""
    return SimpleNamespace(
        **{name: None if value is None else (lambda t, value=value: value) for name, value in values.items()}
    )


def stage_of(t, first, stages):
    """The 0-based stage of step t: stage k has first * 2**k steps, the last one has no end."""
    stage, end = 0, first
    while t >= end and stage < stages - 1:
        stage += 1
        end += first * 2**stage
    return stage


def restarted(coefficients, first, stages):
    """RE- (Algorithm 3, Theorem 2): stages of doubling length, from a namespace of plain numbers.

    In stage k alpha, alpha_bar and beta are multiplied by 2**-k, and eta, tau and tau_bar by
    2**(-k/2).
    """

    def shrinking(value, power):
        return lambda t: value * 2.0 ** (-power * stage_of(t, first, stages))

    staged = {}
    for name, value in vars(coefficients).items():
        if value is None:
            staged[name] = None
        else:
            power = 1.0 if name in WEIGHTS else 0.5 if name in STEPS else 0.0
            staged[name] = shrinking(value, power)
    return SimpleNamespace(**staged)


def restarting(method, lengths):
    """RE- as printed (Algorithm 3): a method whose stage k is a run of its own, of lengths[k] steps.

    It starts from the variables and estimators that stage k-1 returned, with x_0 = x_1, y_0 = y_1 and
    v_0 = v_1. The coefficients are plain numbers, and shrink as in `restarted`.
    """

    def run(problem, samples, start, coefficients, **given):
        for k, length in enumerate(lengths):
            shrunk = {
                name: value * 2.0 ** (-k * (1.0 if name in WEIGHTS else 0.5 if name in STEPS else 0.0))
                for name, value in vars(coefficients).items()
            }
            start = method(problem, samples[:length], start, constant(**shrunk), **given)
            samples = samples[length:]
        return start

    return run


def correction(alpha, m, sampled):
    """MSVR's gamma = (m-I)/(I(1-alpha)) + (1-alpha)."""
    if sampled == m:
        return 1.0 - alpha
    if alpha == 1.0:
        return np.inf  # undefined; harmless where the method has no correction
    return (m - sampled) / (sampled * (1.0 - alpha)) + (1.0 - alpha)


def coefficients_at(coefficients, t, m, sampled):
    """The numbers of step t, with the missing gammas filled in."""
    given = {name: at_t for name, at_t in vars(coefficients).items() if at_t is not None}
    values = {name: at_t(t) for name, at_t in given.items()}
    for gamma, alpha in zip(CORRECTIONS, ("alpha", "alpha_bar"), strict=True):
        if gamma not in values and alpha in values:
            values[gamma] = correction(values[alpha], m, sampled)
    return SimpleNamespace(**values)


# --- pieces -------------------------------------------------------------------


def msvr(h, now, old, alpha, gamma):
    """h <- (1-alpha) h + alpha h(e_t) + gamma (h(e_t) - h(e_{t-1}))."""
    return (1 - alpha) * h + alpha * now + gamma * (now - old)


def moving_average(h, now, weight):
    """h <- (1-weight) h + weight h(e_t)."""
    return (1 - weight) * h + weight * now


def storm(z, now, old, beta):
    """z <- (1-beta)(z - G_{t-1}) + G_t."""
    return (1 - beta) * (z - old) + now


def clip_eigenvalues(matrix, lam):
    """S_lam: the nearest symmetric matrix with no eigenvalue below lam."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.maximum(values, lam)) @ vectors.T


def project(v, radius):
    """The nearest point in the ball of this radius around 0."""
    norm = np.linalg.norm(v)
    return v if norm <= radius else v * (radius / norm)


def along_z(t, k, sample, now, new):
    """x_{t+1} = x_t - eta z_{t+1}, and the x before it, which is x_t."""
    return now.x - k.eta * new.z, now.x


def sampled_blocks(sample):
    """(i, rows of the upper level, rows of the lower level) for every i in I_t."""
    return list(zip(sample.blocks, sample.upper, sample.lower, strict=True))


def take(start, *names):
    """Float64 copies of the named arrays of the start."""
    arrays = {name: np.array(getattr(start, name), dtype=np.float64) for name in names}
    return SimpleNamespace(**arrays)


def mean(terms):
    return np.mean(list(terms), axis=0)


def phi_v(problem, i, state, upper, lower):
    """grad_v phi_i = g_yy v - f_y (v_problem)."""
    x, y, v = state.x, state.y[i], state.v[i]
    return problem.g_yy(i, x, y, lower) @ v - problem.f_y(i, x, y, upper)


def hyper_v1(problem, i, state, upper, lower):
    """Block i's term of (G_v1), with the state's own H."""
    x, y = state.x, state.y[i]
    inverse = np.linalg.inv(state.H[i]) @ problem.f_y(i, x, y, upper)
    return problem.f_x(i, x, y, upper) - problem.g_xy(i, x, y, lower) @ inverse


def hyper_v2(problem, i, state, upper, lower):
    """Block i's term of (G_v2), with the state's own v."""
    x, y, v = state.x, state.y[i], state.v[i]
    return problem.f_x(i, x, y, upper) - problem.g_xy(i, x, y, lower) @ v


def hyper_mean(problem, i, state, upper, lower):
    """Block i's term for y_i(x) = E[c_i(x)]: f_x + c_x f_y."""
    x, y = state.x, state.y[i]
    return problem.f_x(i, x, y, upper) + problem.c_x(i, x, lower) @ problem.f_y(i, x, y, upper)


def average(hyper, problem, state, sample):
    """G: the mean of a term over the sampled blocks."""
    return mean(hyper(problem, i, state, *rows) for i, *rows in sampled_blocks(sample))


# --- the paper's methods ------------------------------------------------------


def bsvrb_v1(problem, samples, start, coefficients, *, lam, refreshed=True):
    """BSVRB v1 (Algorithm 1): MSVR of g_y and g_yy (sH_compute), STORM of (G_v1), all y_i move.

    `refreshed=False` is line 8 as printed, y_{t+1} = y_t - tau_t s_t; else they move along s_{t+1}.
    """
    now = old = take(start, "x", "y", "s", "H", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, _, lower in sampled_blocks(sample):
            g_now = problem.g_y(i, now.x, now.y[i], lower)
            g_old = problem.g_y(i, old.x, old.y[i], lower)
            new.s[i] = msvr(now.s[i], g_now, g_old, k.alpha, k.gamma)
            H_now = problem.g_yy(i, now.x, now.y[i], lower)
            H_old = problem.g_yy(i, old.x, old.y[i], lower)
            H = msvr(now.H[i], H_now, H_old, k.alpha_bar, k.gamma_bar)
            new.H[i] = clip_eigenvalues(H, lam)
        G_now = average(hyper_v1, problem, now, sample)
        G_old = average(hyper_v1, problem, old, sample)
        new.z = storm(now.z, G_now, G_old, k.beta)
        for i in range(problem.m):
            new.y[i] = now.y[i] - k.tau * (new.s[i] if refreshed else now.s[i])
        new.x = now.x - k.eta * new.z
        old, now = now, new
    return now


def bsvrb_v2(
    problem,
    samples,
    start,
    coefficients,
    *,
    radius=np.inf,
    projection="every step",
    refreshed=True,
    move=along_z,
):
    """BSVRB v2 (Algorithm 2): MSVR of g_y and grad_v phi (u_update), STORM of (G_v2), all move.

    `projection="every step"` is v_{i,t+1} = Pi_V[v_{i,t} - tau_bar_t u_{i,t+1}] for all i and t.
    `projection="once"` is the lazy variant, Pi_V[v_{i,t0} - sum of tau_bar u] with t0 the last
    visit of block i: the steps between two visits are summed before they are projected. The two
    agree while Pi_V is inactive.

    `refreshed=False` is lines 8 and 9 as printed, along s_t and u_t; else along s_{t+1} and u_{t+1}.

    `move(t, coefficients, sample, now, new)` is another way to move x than along z; it returns x_{t+1},
    and the x_t that the next step sees as the one before.
    """
    now = old = take(start, "x", "y", "s", "u", "v", "z")
    unprojected = now.v.copy()
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            g_now = problem.g_y(i, now.x, now.y[i], lower)
            g_old = problem.g_y(i, old.x, old.y[i], lower)
            new.s[i] = msvr(now.s[i], g_now, g_old, k.alpha, k.gamma)
            phi_now = phi_v(problem, i, now, upper, lower)
            phi_old = phi_v(problem, i, old, upper, lower)
            new.u[i] = msvr(now.u[i], phi_now, phi_old, k.alpha_bar, k.gamma_bar)
        G_now = average(hyper_v2, problem, now, sample)
        G_old = average(hyper_v2, problem, old, sample)
        new.z = storm(now.z, G_now, G_old, k.beta)
        for i in range(problem.m):
            new.y[i] = now.y[i] - k.tau * (new.s[i] if refreshed else now.s[i])
            if projection == "every step" or i in sample.blocks:
                unprojected[i] = now.v[i]
            unprojected[i] = unprojected[i] - k.tau_bar * (new.u[i] if refreshed else now.u[i])
            new.v[i] = project(unprojected[i], radius)
        new.x, before = move(t, k, sample, now, new)
        old, now = SimpleNamespace(**vars(now) | {"x": before}), new
    return now


def bsvrb_mixed(problem, samples, start, coefficients, *, version, lam=0.0, radius=np.inf):
    """BSVRB v1 or v2 with an argmin level a and a mean level b per block: f_i(x, y_a, y_b).

    The problem has `f_x, f_a, f_b(i, x, y_a, y_b, rows)`, `g_y, g_yy, g_xy(i, x, y_a, rows)` and
    `c, c_x(i, x, rows)`; the state has y_a and y_b. Level a is tracked as in `bsvrb_v1` or
    `bsvrb_v2`, level b as in `msvr_v2` with the same alpha and gamma. A block's term of G is
    f_x - g_xy v + c_x f_b, where v is H^{-1} f_a (version 1) or tracked (version 2). Both levels
    see the rows `lower`, unless the sample has rows `inner` for level b.
    """

    def f_of(piece, i, state, upper):
        return piece(i, state.x, state.y_a[i], state.y_b[i], upper)

    def phi(i, state, upper, lower):
        Hv = problem.g_yy(i, state.x, state.y_a[i], lower) @ state.v[i]
        return Hv - f_of(problem.f_a, i, state, upper)

    def hyper(i, state, upper, lower, inner):
        v = np.linalg.inv(state.H[i]) @ f_of(problem.f_a, i, state, upper) if version == 1 else state.v[i]
        argmin_term = problem.g_xy(i, state.x, state.y_a[i], lower) @ v
        mean_term = problem.c_x(i, state.x, inner) @ f_of(problem.f_b, i, state, upper)
        return f_of(problem.f_x, i, state, upper) - argmin_term + mean_term

    curvature = ("H",) if version == 1 else ("u", "v")
    now = old = take(start, "x", "y_a", "y_b", "s", "z", *curvature)
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        inner_rows = getattr(sample, "inner", sample.lower)
        rows = list(zip(sample.blocks, sample.upper, sample.lower, inner_rows, strict=True))
        for i, upper, lower, inner in rows:
            g_now = problem.g_y(i, now.x, now.y_a[i], lower)
            g_old = problem.g_y(i, old.x, old.y_a[i], lower)
            new.s[i] = msvr(now.s[i], g_now, g_old, k.alpha, k.gamma)
            c_now = problem.c(i, now.x, inner)
            c_old = problem.c(i, old.x, inner)
            new.y_b[i] = msvr(now.y_b[i], c_now, c_old, k.alpha, k.gamma)
            if version == 1:
                H_now = problem.g_yy(i, now.x, now.y_a[i], lower)
                H_old = problem.g_yy(i, old.x, old.y_a[i], lower)
                H = msvr(now.H[i], H_now, H_old, k.alpha_bar, k.gamma_bar)
                new.H[i] = clip_eigenvalues(H, lam)
            else:
                phi_now = phi(i, now, upper, lower)
                phi_old = phi(i, old, upper, lower)
                new.u[i] = msvr(now.u[i], phi_now, phi_old, k.alpha_bar, k.gamma_bar)
        G_now = mean(hyper(i, now, *batches) for i, *batches in rows)
        G_old = mean(hyper(i, old, *batches) for i, *batches in rows)
        new.z = storm(now.z, G_now, G_old, k.beta)
        for i in range(problem.m):
            new.y_a[i] = now.y_a[i] - k.tau * new.s[i]
            if version == 2:
                new.v[i] = project(now.v[i] - k.tau_bar * new.u[i], radius)
        new.x = now.x - k.eta * new.z
        old, now = now, new
    return now


# --- the methods it is compared with ------------------------------------------


def ksong(problem, samples, start, coefficients, *, lam):
    """K-SONG: moving averages of g_y, g_yy and of (G_v1); only the sampled y_i move."""
    now = take(start, "x", "y", "s", "H", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, _, lower in sampled_blocks(sample):
            new.s[i] = moving_average(now.s[i], problem.g_y(i, now.x, now.y[i], lower), k.alpha)
            hessian = problem.g_yy(i, now.x, now.y[i], lower)
            new.H[i] = clip_eigenvalues(moving_average(now.H[i], hessian, k.alpha_bar), lam)
            new.y[i] = now.y[i] - k.tau * new.s[i]
        new.z = moving_average(now.z, average(hyper_v1, problem, now, sample), k.beta)
        new.x = now.x - k.eta * new.z
        now = new
    return now


def block_newton(problem, samples, start, coefficients):
    """Newton steps in the sampled y_i and v_i with an averaged H_i; a moving average of (G_v2)."""
    now = take(start, "x", "y", "s", "u", "v", "H", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            new.s[i] = problem.g_y(i, now.x, now.y[i], lower)
            new.u[i] = phi_v(problem, i, now, upper, lower)
            new.H[i] = moving_average(now.H[i], problem.g_yy(i, now.x, now.y[i], lower), k.alpha)
            new.y[i] = now.y[i] - k.alpha * np.linalg.solve(new.H[i], new.s[i])
            new.v[i] = now.v[i] - k.alpha * np.linalg.solve(new.H[i], new.u[i])
        new.z = moving_average(now.z, average(hyper_v2, problem, now, sample), k.beta)
        new.x = now.x - k.eta * new.z
        now = new
    return now


def mmbo(problem, samples, start, coefficients, *, radius=np.inf):
    """MMBO-v2: moving averages of g_y, grad_v phi and of (G_v2); only the sampled y_i, v_i move."""
    now = take(start, "x", "y", "s", "u", "v", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            new.s[i] = moving_average(now.s[i], problem.g_y(i, now.x, now.y[i], lower), k.alpha)
            new.u[i] = moving_average(now.u[i], phi_v(problem, i, now, upper, lower), k.alpha_bar)
            new.y[i] = now.y[i] - k.tau * new.s[i]
            new.v[i] = project(now.v[i] - k.tau_bar * new.u[i], radius)
        new.z = moving_average(now.z, average(hyper_v2, problem, now, sample), k.beta)
        new.x = now.x - k.eta * new.z
        now = new
    return now


def soba(problem, samples, start, coefficients, *, radius=np.inf):
    """SOBA per block: plain SGD in the sampled y_i, v_i and in x; the returned z is the last G."""
    now = take(start, "x", "y", "v")
    now.z = np.zeros_like(now.x)
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            new.y[i] = now.y[i] - k.tau * problem.g_y(i, now.x, now.y[i], lower)
            moved = now.v[i] - k.tau_bar * phi_v(problem, i, now, upper, lower)
            new.v[i] = project(moved, radius)
        new.z = average(hyper_v2, problem, now, sample)
        new.x = now.x - k.eta * new.z
        now = new
    return now


def ma_soba(problem, samples, start, coefficients, *, radius=np.inf, move=along_z):
    """MA-SOBA per block: as `soba`, but x moves along a moving average of G."""
    now = take(start, "x", "y", "v", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            new.y[i] = now.y[i] - k.tau * problem.g_y(i, now.x, now.y[i], lower)
            moved = now.v[i] - k.tau_bar * phi_v(problem, i, now, upper, lower)
            new.v[i] = project(moved, radius)
        new.z = moving_average(now.z, average(hyper_v2, problem, now, sample), k.beta)
        new.x, _ = move(t, k, sample, now, new)
        now = new
    return now


def penalised_w(problem, i, state, upper, lower, penalty):
    """The gradient of f/penalty + g in the second variable w, which is stored as v."""
    x, w = state.x, state.v[i]
    return problem.f_y(i, x, w, upper) / penalty + problem.g_y(i, x, w, lower)


def hyper_penalty(problem, i, state, upper, lower, penalty):
    """Block i's gradient in x of f(x, w) + penalty (g(x, w) - g(x, y))."""
    x, y, w = state.x, state.y[i], state.v[i]
    gap = problem.g_x(i, x, w, lower) - problem.g_x(i, x, y, lower)
    return problem.f_x(i, x, w, upper) + penalty * gap


def f2sa(problem, samples, start, coefficients):
    """F2SA per block: plain SGD in the sampled y_i and w_i (stored as v) and in x."""
    now = take(start, "x", "y", "v")
    now.z = np.zeros_like(now.x)
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            new.y[i] = now.y[i] - k.tau * problem.g_y(i, now.x, now.y[i], lower)
            new.v[i] = now.v[i] - k.tau_bar * penalised_w(problem, i, now, upper, lower, k.penalty)
        terms = [hyper_penalty(problem, i, now, *rows, k.penalty) for i, *rows in sampled_blocks(sample)]
        new.z = mean(terms)
        new.x = now.x - k.eta * new.z
        now = new
    return now


def f3sa(problem, samples, start, coefficients):
    """F3SA: MSVR of the gradients that y_i and w_i descend along, STORM of that in x, all blocks move."""
    now = old = take(start, "x", "y", "s", "u", "v", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, upper, lower in sampled_blocks(sample):
            g_now = problem.g_y(i, now.x, now.y[i], lower)
            g_old = problem.g_y(i, old.x, old.y[i], lower)
            new.s[i] = msvr(now.s[i], g_now, g_old, k.alpha, k.gamma)
            w_now = penalised_w(problem, i, now, upper, lower, k.penalty)
            w_old = penalised_w(problem, i, old, upper, lower, k.penalty)
            new.u[i] = msvr(now.u[i], w_now, w_old, k.alpha_bar, k.gamma_bar)
        blocks = sampled_blocks(sample)
        G_now = mean(hyper_penalty(problem, i, now, *rows, k.penalty) for i, *rows in blocks)
        G_old = mean(hyper_penalty(problem, i, old, *rows, k.penalty) for i, *rows in blocks)
        new.z = storm(now.z, G_now, G_old, k.beta)
        for i in range(problem.m):
            new.y[i] = now.y[i] - k.tau * new.s[i]
            new.v[i] = now.v[i] - k.tau_bar * new.u[i]
        new.x = now.x - k.eta * new.z
        old, now = now, new
    return now


def msvr_v2(problem, samples, start, coefficients):
    """MSVR-v2 (mean blocks): y_i is itself the MSVR tracker of c_i(x); STORM of f_x + c_x f_y."""
    now = old = take(start, "x", "y", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, _, lower in sampled_blocks(sample):
            c_now = problem.c(i, now.x, lower)
            c_old = problem.c(i, old.x, lower)
            new.y[i] = msvr(now.y[i], c_now, c_old, k.alpha, k.gamma)
        G_now = average(hyper_mean, problem, now, sample)
        G_old = average(hyper_mean, problem, old, sample)
        new.z = storm(now.z, G_now, G_old, k.beta)
        new.x = now.x - k.eta * new.z
        old, now = now, new
    return now


def song(problem, samples, start, coefficients):
    """SONG / SOX (mean blocks): moving averages of c_i(x) and of f_x + c_x f_y."""
    now = take(start, "x", "y", "z")
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        new = copy.deepcopy(now)
        for i, _, lower in sampled_blocks(sample):
            new.y[i] = moving_average(now.y[i], problem.c(i, now.x, lower), k.alpha)
        new.z = moving_average(now.z, average(hyper_mean, problem, now, sample), k.beta)
        new.x = now.x - k.eta * new.z
        now = new
    return now


def rsvrb(problem, samples, start, coefficients, *, lam, radius=np.inf):
    """RSVRB: randomized-coordinate STORM of f_x, f_y, g_y (s), g_yy (H) and g_xy of every block.

    p_i <- (1-beta)(p_i - (m/I) p_i(t-1)) + (m/I) p_i(t) for a sampled i, (1-beta) p_i for others.

    The state has these pieces as f_x (m, dx), f_y (m, dy), s (m, dy), H (m, dy, dy) and g_xy
    (m, dx, dy); H is clipped after every update. z is STORM of the mean over J_t of
    f_x - g_xy S_lam[H]^{-1} f_y, with the pieces at t+1 and at t. All y_i move, inside a ball.
    """
    pieces = ("f_x", "f_y", "s", "H", "g_xy")

    def evaluate(i, state, upper, lower):
        x, y = state.x, state.y[i]
        return {
            "f_x": problem.f_x(i, x, y, upper),
            "f_y": problem.f_y(i, x, y, upper),
            "s": problem.g_y(i, x, y, lower),
            "H": problem.g_yy(i, x, y, lower),
            "g_xy": problem.g_xy(i, x, y, lower),
        }

    def hyper(j, state):
        inverse = np.linalg.inv(clip_eigenvalues(state.H[j], lam)) @ state.f_y[j]
        return state.f_x[j] - state.g_xy[j] @ inverse

    now = old = take(start, "x", "y", "z", *pieces)
    for t, sample in enumerate(samples):
        k = coefficients_at(coefficients, t, problem.m, len(sample.blocks))
        scale = problem.m / len(sample.blocks)
        new = copy.deepcopy(now)
        for name in pieces:
            setattr(new, name, (1 - k.beta) * getattr(now, name))
        for i, upper, lower in sampled_blocks(sample):
            at_now = evaluate(i, now, upper, lower)
            at_old = evaluate(i, old, upper, lower)
            for name in pieces:
                piece = storm(getattr(now, name)[i], scale * at_now[name], scale * at_old[name], k.beta)
                getattr(new, name)[i] = piece
        for i in range(problem.m):
            new.H[i] = clip_eigenvalues(new.H[i], lam)
        G_now = mean(hyper(j, new) for j in sample.second)
        G_old = mean(hyper(j, now) for j in sample.second)
        new.z = storm(now.z, G_now, G_old, k.beta)
        for i in range(problem.m):
            new.y[i] = project(now.y[i] - k.tau * new.s[i], radius)
        new.x = now.x - k.eta * new.z
        old, now = now, new
    return now


# --- truth --------------------------------------------------------------------


def solve_lower(problem, x, y, steps=50):
    """y_i(x) for all blocks, on all rows, by `steps` of Newton's method from y."""
    y = np.array(y, dtype=np.float64)
    for i in range(problem.m):
        rows = problem.lower_of(i)
        for _ in range(steps):
            hessian = problem.g_yy(i, x, y[i], rows)
            y[i] = y[i] - np.linalg.solve(hessian, problem.g_y(i, x, y[i], rows))
    return y


def hypergradient(problem, x, y):
    """grad F(x) of Proposition 1 on all rows, with y_i(x) found from y."""
    y = solve_lower(problem, x, y)
    terms = []
    for i in range(problem.m):
        upper, lower = problem.upper_of(i), problem.lower_of(i)
        hessian = problem.g_yy(i, x, y[i], lower)
        state = SimpleNamespace(x=x, y={i: y[i]}, H={i: hessian})
        terms.append(hyper_v1(problem, i, state, upper, lower))
    return mean(terms)


def hypergradient_mean(problem, x):
    """grad F(x) on all rows for mean blocks, y_i(x) = c_i(x)."""
    terms = []
    for i in range(problem.m):
        upper, lower = problem.upper_of(i), problem.lower_of(i)
        state = SimpleNamespace(x=x, y={i: problem.c(i, x, lower)})
        terms.append(hyper_mean(problem, i, state, upper, lower))
    return mean(terms)
