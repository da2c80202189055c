"""f, g and c must be means over the rows of a batch: whatever is not is refused, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax._problem import row_means

OFFSETS = np.array([0, 3, 10, 30, 31])
random = np.random.default_rng(0)
FEATURES = random.normal(size=(31, 4)).astype(np.float32)
TARGETS = random.normal(size=31).astype(np.float32)
ROWS = {"row": FEATURES, "y": TARGETS, "index": np.arange(31)}
RAGGED = bx.PerBlock(ROWS, OFFSETS)
X0, Y0 = jnp.zeros(4), jnp.zeros((4, 4))


def errors(y, batch):
    return batch["row"] @ y - batch["y"]


def square(x, y, block, batch):
    return jnp.mean(errors(y, batch) ** 2)


def ridge(x, y, block, batch):
    return square(x, y, block, batch) + jnp.exp(x) @ y**2


def checked(upper=square, lower=ridge, upper_data=RAGGED, lower_data=RAGGED, x0=X0, y0=Y0, blocks=4, **more):
    problem = bx.Problem(upper, lower, blocks, upper_data, lower_data, **more)
    row_means.check_row_means(problem, x0, y0)
    return problem


NOT_MEANS = {
    "a sum": (lambda e, y: jnp.sum(e**2), "sum over the rows: use jnp.mean"),
    "a sum and a regulariser": (lambda e, y: jnp.sum(e**2) + 3 * y @ y, "sum over the rows: use jnp.mean"),
    "a sum over a fixed number": (lambda e, y: jnp.sum(e**2) / 32 + y @ y, "sum over the rows"),
    "an RMSE": (lambda e, y: jnp.sqrt(jnp.mean(e**2)), "root of a mean"),
    "an RMSE and a regulariser": (lambda e, y: jnp.sqrt(jnp.mean(e**2)) + y @ y, "root of a mean"),
    "a norm": (lambda e, y: jnp.linalg.norm(e), "root of a sum"),
    "a standard deviation": (lambda e, y: jnp.mean(e**2) + jnp.std(e), "batch as a whole"),
    "normalised errors": (lambda e, y: jnp.mean(((e - e.mean()) / (0.1 + e.std())) ** 4), "batch as a whole"),
    "pairs of rows": (lambda e, y: jnp.mean(jax.nn.softplus(e[:, None] - e[None])), "batch as a whole"),
    "a maximum": (lambda e, y: jnp.max(e**2), "batch as a whole"),
    "a log of a mean": (lambda e, y: jnp.log(jnp.mean(jnp.exp(e))), "batch as a whole"),
    "a variance with n − 1": (lambda e, y: jnp.var(e, ddof=1), "not finite on some of them alone"),
    "weights that sum to one": (lambda e, y: jax.nn.softmax(e) @ e**2, "batch as a whole"),
}


@pytest.mark.parametrize("kind", NOT_MEANS)
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_a_function_that_is_no_mean_is_refused_with_what_it_looks_like(kind, level):
    function, looks = NOT_MEANS[kind]

    def wrong(x, y, block, batch):
        return function(errors(y, batch), y)

    with pytest.raises(ValueError, match=looks) as caught:
        checked(**{level: wrong})
    assert str(caught.value).startswith("upper must" if level == "upper" else "lower level 'lower' must")


def test_a_mean_level_that_is_a_sum_is_refused_by_its_name():
    lower = {"fit": bx.argmin(ridge), "size": bx.mean(lambda x, block, batch: jnp.sum(batch["row"] ** 2, 0))}
    with pytest.raises(ValueError, match="lower level 'size' must be a mean"):
        checked(lambda x, y, block, batch: jnp.sum(y["size"]), lower, None, y0={"fit": Y0, "size": None})


def test_a_sum_that_shows_only_away_from_the_start_is_refused():
    def wrong(x, y, block, batch):  # zero for all rows at y = 0
        return jnp.sum((batch["row"] @ y) ** 2) + y @ y

    with pytest.raises(ValueError, match="sum over the rows"):
        checked(lower=wrong)


MEANS = {
    "a mean and a regulariser": ridge,
    "a weight per row": lambda x, y, block, batch: jnp.mean(
        jax.nn.sigmoid(jnp.resize(x, 31)[batch["index"]]) * errors(y, batch) ** 2
    ),
    "a quadratic with a large constant": lambda x, y, block, batch: (
        y @ (batch["row"].T @ batch["row"] / len(batch["y"])) @ y + 1e3
    ),
    "no rows in use": lambda x, y, block, batch: jnp.sum((y - x) ** 2),
    "a batch of a fixed length": lambda x, y, block, batch: jnp.mean(errors(y, batch).reshape(4, 2) ** 2),
    "random numbers": lambda x, y, block, batch: jnp.mean(
        errors(y, batch) ** 2 * jax.random.bernoulli(jax.random.key(0), 0.5, batch["y"].shape)
    ),
    "no value away from the start": lambda x, y, block, batch: jnp.mean(
        jnp.where(jnp.any(y != 0), jnp.nan, errors(y, batch))
    ),
    "overflow": lambda x, y, block, batch: jnp.mean(jnp.exp(100 + 50 * errors(y, batch))),
}


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_a_mean_passes(kind, level):
    checked(**{level: MEANS[kind]})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounding_is_no_reason_to_refuse(dtype):
    rows = bx.Shared({"row": jnp.asarray(FEATURES, dtype), "y": jnp.asarray(TARGETS, dtype)})
    checked(upper_data=rows, lower_data=rows, x0=X0.astype(dtype), y0=Y0.astype(dtype))
    with pytest.raises(ValueError, match="sum over the rows"):
        checked(
            lambda x, y, block, batch: jnp.sum(errors(y, batch) ** 2),
            upper_data=rows,
            lower_data=rows,
            x0=X0.astype(dtype),
            y0=Y0.astype(dtype),
        )


def test_rows_stored_as_bits_are_compared_as_they_were_given():
    bits = bx.Shared((random.random((20_000, 16)) < 0.5).astype(np.float32))
    assert bits.packed.forms[0].bits
    y0 = jnp.zeros((4, 16))

    def mean(x, y, block, batch):
        return jnp.mean((batch @ y - 1) ** 2) + x[0] ** 2 * y @ y

    checked(mean, mean, bits, bits, y0=y0)
    with pytest.raises(ValueError, match="sum over the rows"):
        checked(lambda x, y, block, batch: jnp.sum((batch @ y - 1) ** 2), mean, bits, bits, y0=y0)


def test_nothing_is_compared_without_two_rows():
    def total(x, y, block, batch):
        return jnp.sum(errors(y, batch) ** 2) + y @ y

    single = bx.PerBlock({"row": FEATURES[:4], "y": TARGETS[:4]}, np.arange(5))
    checked(total, total, single, single)
    checked(lambda x, y, block, batch: y @ y, lambda x, y, block, batch: (y - x) @ (y - x), None, None)


def needs_two_rows(x, y, block, batch):
    if batch["y"].shape[0] < 2:
        raise TypeError("two rows at least")
    return ridge(x, y, block, batch)


def noisy(x, y, block, batch):
    return ridge(x, y, block, batch) + jax.random.normal(jax.random.key(0)) ** 2


@pytest.mark.parametrize("other", [needs_two_rows, noisy])
def test_a_function_that_cannot_be_looked_at_hides_no_other(other):
    checked(square, other)
    with pytest.raises(ValueError, match=r"upper must be a mean.*sum over the rows"):
        checked(total, other)


def test_all_functions_are_looked_at_in_one_program(monkeypatch):
    looks, begun = [], row_means._begun
    monkeypatch.setattr(row_means, "_begun", lambda *given: looks.append(given) or begun(*given))
    checked(lambda *given: square(*given), lambda *given: ridge(*given))
    assert len(looks) == 1


def test_levels_with_slots_of_their_own_are_left_out():
    slots = bx.mean(
        lambda x, block, batch: batch["y"] * x[0], slots=lambda block, batch: batch["index"], count=31
    )
    checked(lambda x, y, block, batch: jnp.sum(y), slots, "lower", y0=jnp.zeros(31))


def test_a_problem_is_checked_once(monkeypatch):
    problem = checked()

    def fail(*_):
        raise AssertionError("checked again")

    monkeypatch.setattr(row_means, "_check", fail)
    row_means.check_row_means(problem, X0, Y0)
    with pytest.raises(AssertionError):
        row_means.check_row_means(problem, {"other": X0}, Y0)


def total(x, y, block, batch):
    return jnp.sum(errors(y, batch) ** 2)


def test_every_way_into_a_problem_checks_it():
    problem = bx.Problem(total, ridge, 4, RAGGED, RAGGED)
    common = {"blocks_per_step": 2, "batch_size": 4, "progress": None, "steps": 2}
    with pytest.raises(ValueError, match="upper must be a mean"):
        bx.minimize(problem, X0, Y0, solver=bx.BSVRBv2(upper_step=0.1), key=jax.random.key(0), **common)
    keys = jax.random.split(jax.random.key(0), 1)
    with pytest.raises(ValueError, match="upper must be a mean"):
        bx.sweep(problem, X0, Y0, solver=bx.BSVRBv2, settings={"upper_step": [0.1]}, keys=keys, **common)
    for look in (bx.objective, bx.hypergradient, bx.value_and_hypergradient, bx.solve_lower):
        with pytest.raises(ValueError, match="upper must be a mean"):
            look(problem, X0, Y0)


def test_the_check_can_be_switched_off_and_then_ragged_blocks_need_a_batch_size():
    problem = bx.Problem(total, ridge, 4, RAGGED, RAGGED, means_over_rows=False)
    solver, key = bx.BSVRBv2(upper_step=1e-3), jax.random.key(0)
    result = bx.minimize(problem, X0, Y0, solver=solver, steps=2, key=key, batch_size=4, progress=None)
    assert result.outcome is bx.Outcome.FINISHED
    with pytest.raises(ValueError, match="give batch_size"):
        bx.minimize(problem, X0, Y0, solver=solver, steps=2, key=key, progress=None)
    with pytest.raises(TypeError, match="means_over_rows must be True or False"):
        bx.Problem(total, ridge, 4, means_over_rows=None)


@pytest.mark.parametrize("which", ["upper", "lower"])
def test_a_vector_in_place_of_a_number_is_named(which):
    rows = bx.Shared(jnp.arange(12.0).reshape(6, 2))

    def loss(name):
        def one(x, y, block, batch):
            errors = (batch @ y - 1) ** 2 + x * y @ y
            return errors if name == which else jnp.mean(errors)

        return one

    problem = bx.Problem(loss("upper"), loss("lower"), 3, upper_data=rows, lower_data=rows)
    with pytest.raises(ValueError, match=f"{which}.* must return"):
        bx.minimize(problem, jnp.ones(()), jnp.zeros((3, 2)), steps=5, progress=None)


def test_a_lower_level_that_is_not_a_number_is_named():
    rows = bx.Shared(-1.0 - jnp.arange(6.0))
    problem = bx.Problem(
        upper=lambda x, y, block, batch: jnp.sum(y**2),
        lower=lambda x, y, block, batch: jnp.sum((y - x) ** 2) + jnp.mean(jnp.log(batch)),
        blocks=3,
        lower_data=rows,
    )
    with pytest.raises(ValueError, match="lower level 'lower' is nan at x0 and y0"):
        bx.minimize(problem, jnp.ones(2), jnp.zeros((3, 2)), steps=5, progress=None)
