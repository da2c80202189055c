"""Rows that are read from the host while a run goes on: the same run as with all of them on the device."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_checkpoint import same_bits, saved_steps

import bilevax as bx
from bilevax._problem.sampling import ROWS
from bilevax._problem.stream import Stream
from bilevax._run import feeding

M, D, KEY = 6, 3, 5
random = np.random.default_rng(0)
OFFSETS = np.array([0, 4, 9, 15, 17, 26, 30])
VALUES = random.normal(size=(30, D))
HELD = bx.PerBlock({"c": VALUES.astype(np.float32), "n": np.arange(30)}, OFFSETS)
ROW = {"c": np.zeros(D, np.float32), "n": np.zeros((), np.int32)}
X0, Y0 = jnp.ones(D), jnp.zeros((M, D))
METHODS = {
    "BSVRBv2": bx.BSVRBv2(0.05, lower_step=0.05),
    "MMBO": bx.MMBO(0.05, lower_step=0.1),
    "KSONG": bx.KSONG(0.05, lower_step=0.1, floor=0.1),
    "F2SA": bx.F2SA(0.05, lower_step=0.1),
    "F3SA": bx.F3SA(0.05, lower_step=0.05),
    "SOBA": bx.SOBA(0.05, lower_step=optax.adam(0.05), inverse_step=0.1),
    "MASOBA": bx.MASOBA(0.05, lower_step=0.1),
    "RSVRB": bx.RSVRB(0.05, lower_step=0.05, floor=0.1),
    "BSVRBv1": bx.Restart(bx.BSVRBv1(0.05, lower_step=0.05, floor=0.1), first=20, stages=2),
    "BlockNewton": bx.BlockNewton(0.05, alpha=0.3),
    "MSVR": bx.MSVR(0.05),
    "SONG": bx.SONG(0.05),
}


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(feeding, "_MOST", 7)


def upper(x, y, block, batch):
    return jnp.mean(jnp.sum((y - batch["c"]) ** 2, 1)) + 0.1 * x @ x


def lower(x, y, block, batch):
    return jnp.mean(jnp.sum((y - x * batch["c"]) ** 2, 1)) + jnp.sum(y**2)


def inner(x, block, batch):
    return jnp.mean(jnp.tanh(x * batch["c"]), 0)


def problem(above, below, level=lower, **given):
    return bx.Problem(upper, level, M, above, below, **given)


class Drawn:
    """The rows that `PerBlock` would draw, by a fetch; counts what it is asked for."""

    def __init__(self, place, held=HELD):
        self.place, self.held, self.asked, self.threads = place, held, [], set()
        self.random = Stream.start(jax.random.key(KEY)).at(ROWS)

    def __call__(self, step, blocks, size):
        self.asked.append(step)
        self.threads.add(threading.current_thread())
        drawn = self.held.draw(self.random.at(step).at(self.place), jnp.asarray(blocks), size)
        return jax.tree.map(np.asarray, drawn.rows)


def streamed(above=None, below=None, level=lower):
    """The problem with both levels streamed: f draws first, g second."""
    return problem(bx.Streamed(above or Drawn(0), ROW), bx.Streamed(below or Drawn(1), ROW), level)


def run(given, solver=METHODS["MMBO"], **options):
    options = {"steps": 60, "every": 7, "progress": None, "key": jax.random.key(KEY)} | options
    plan = bx.Sampling(2, 3, initial_batch_size=options.pop("initial", 0))
    options = {"stop": bx.Stop(verify=False), "sampling": plan} | options
    return bx.minimize(given, options.pop("x0", X0), options.pop("y0", Y0), solver=solver, **options)


def double():
    """The rows in double precision, on the device and as the host sends them."""
    held, row = bx.PerBlock({"c": VALUES, "n": np.arange(30)}, OFFSETS), {"c": np.zeros(D), "n": np.int64(0)}
    return (held, held), tuple(bx.Streamed(Drawn(place, held), row) for place in range(2))


def agree(here, there):
    """All of two states, and what was seen on the way: they are computed by different programs."""
    pairs = zip(jax.tree.leaves(here.state), jax.tree.leaves(there.state), strict=True)
    for a, b in (*pairs, (here.history["objective"], there.history["objective"])):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", METHODS)
def test_a_streamed_run_is_that_with_all_rows_on_the_device(method):
    level = bx.mean(inner) if method in ("MSVR", "SONG") else lower
    start = {"x0": np.ones(D), "y0": np.zeros((M, D))}
    agree(*(run(problem(*pair, level), METHODS[method], **start) for pair in double()))


def every_kind(above, below):
    """A mean that reads a lower solution within bounds, and a variable of its own that minimises f."""

    def read(x, y, block, batch):
        return jnp.mean(jnp.tanh(batch["c"] * y["argmin"]), 0)

    def f(x, y, block, batch):
        return upper(x, y["argmin"], block, batch) + jnp.sum((y["own"] - y["mean"] - x) ** 2)

    levels = {"argmin": bx.argmin(lower, project=(-0.1, 0.1)), "mean": bx.mean(read, reads="argmin")}
    return bx.Problem(f, levels | {"own": bx.minimum()}, M, above, below)


@pytest.mark.usefixtures("x64")
def test_levels_of_every_kind_may_be_streamed():
    y0 = {name: np.zeros((M, D)) for name in ("argmin", "mean", "own")}
    options = {
        "steps": 40,
        "sampling": bx.Sampling(2, 3, initial_batch_size=0),
        "key": jax.random.key(KEY),
        "progress": None,
    }
    options |= {"solver": METHODS["BSVRBv2"], "stop": bx.Stop(verify=False)}
    agree(*(bx.minimize(every_kind(*pair), np.ones(D), y0, **options) for pair in double()))


def test_every_step_is_read_once_in_order_by_another_thread_and_none_after_the_last():
    above = Drawn(0)
    run(streamed(above))
    assert above.asked == list(range(60))
    assert threading.main_thread() not in above.threads


def test_left_out_steps_and_offsets_come_from_the_rows_of_step_zero():
    result = run(streamed(), bx.MMBO(0.05), initial=None, steps=200)
    assert np.isfinite(result.history["objective"]).all()
    assert result.settings.solver.lower_step is not None


def test_a_mean_that_is_not_given_starts_where_step_zero_sees_it():
    """Under a logarithm zero would be no start."""
    seen = []

    def fetch(step, blocks, size):
        seen.append((np.asarray(blocks), Drawn(0)(step, blocks, size)["c"]))
        return {"c": seen[-1][1], "n": np.zeros((len(blocks), size), np.int32)}

    given = bx.Problem(
        lambda x, y, block, batch: jnp.sum(jnp.log(y)) + x @ x,
        bx.mean(lambda x, block, batch: jnp.mean(jnp.exp(x * batch["c"]), 0)),
        M,
        lower_data=bx.Streamed(fetch, ROW),
    )
    found = run(given, METHODS["SONG"], y0=None)
    assert np.isfinite(found.history["objective"]).all()
    (visited, rows), *_ = seen
    others = np.setdiff1d(np.arange(M), visited)
    first = run(given, METHODS["SONG"], y0=None, steps=1).y[others]
    np.testing.assert_allclose(first, np.tile(np.exp(rows).mean((0, 1)), (len(others), 1)), rtol=1e-5)


@pytest.mark.parametrize("cut", [14, 35])
def test_a_resumed_run_has_the_same_bits_and_reads_on_where_it_was(cut, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    whole = run(streamed())
    run(streamed(), steps=cut, checkpoint=tmp_path)
    above = Drawn(0)
    resumed = run(streamed(above), checkpoint=bx.Checkpoint(tmp_path, resume=True))
    same_bits(whole, resumed)
    assert set(above.asked) == {*range(7), *range(cut // 7 * 7, 60)}  # the first window starts the run


class Batches:
    """A loader in the manner of grain: its iterators can tell and take up where they are."""

    def __init__(self, count=60, stateful=True):
        self.count, self.kind, self.read = count, _Stateful if stateful else _Plain, []

    def __iter__(self):
        return self.kind(self)


class _Plain:
    def __init__(self, loader):
        self.loader, self.at = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= self.loader.count:
            raise StopIteration
        self.loader.read.append(self.at)
        self.at += 1
        rng = np.random.default_rng(self.at)
        return {"c": rng.normal(size=(2, 3, D)).astype(np.float32), "n": np.zeros((2, 3), np.int32)}


class _Stateful(_Plain):
    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state)


def loading(batches):
    rows = bx.Streamed(batches=batches, row=ROW)
    return problem(rows, HELD)


@pytest.mark.parametrize("stateful", [True, False])
def test_a_loader_is_taken_up_by_its_state_or_by_reading_it_again(stateful, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    whole = run(loading(Batches(stateful=stateful)))
    run(loading(Batches(stateful=stateful)), steps=21, checkpoint=tmp_path)
    again = Batches(stateful=stateful)
    resumed = run(loading(again), checkpoint=bx.Checkpoint(tmp_path, resume=True))
    same_bits(whole, resumed)
    before = [] if stateful else list(range(21))
    assert again.read == [*range(7), *before, *range(21, 60)]


class Places:
    """A source for grain: which rows of the blocks make up an element."""

    def __repr__(self):  # by which a loader's state knows its source
        return "Places()"

    def __len__(self):
        return 40

    def __getitem__(self, place):
        rng = np.random.default_rng(place)
        return {"c": rng.normal(size=(2, D)).astype(np.float32), "n": np.zeros(2, np.int32)}


def blocks_first(batch):
    return {name: np.swapaxes(rows, 0, 1) for name, rows in batch.items()}


@pytest.mark.parametrize("kind", ["dataset", "DataLoader"])
def test_a_grain_loader_is_taken_up_where_it_was(kind, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    grain = pytest.importorskip("grain")
    read = []

    class First(grain.transforms.Map):
        def map(self, batch):
            read.append(1)
            return blocks_first(batch)

    def loader():
        if kind == "dataset":
            drawn = grain.MapDataset.source(Places()).shuffle(seed=1).repeat().batch(3)
            return drawn.map(First()).to_iter_dataset(grain.ReadOptions(0, 0))
        sampler = grain.samplers.IndexSampler(
            40, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=1
        )
        return grain.DataLoader(
            data_source=Places(), sampler=sampler, operations=[grain.transforms.Batch(3), First()]
        )

    whole = run(loading(loader()))
    run(loading(loader()), steps=21, checkpoint=tmp_path)
    read.clear()
    resumed = run(loading(loader()), checkpoint=bx.Checkpoint(tmp_path, resume=True))
    same_bits(whole, resumed)
    assert len(read) < 60


@pytest.mark.filterwarnings("ignore::bilevax.RecoveryWarning")
def test_a_run_that_goes_back_reads_its_batches_again():
    options = {"steps": 300, "stop": bx.Stop(verify=False, recover=True)}
    result = run(streamed(), bx.MMBO(50.0, lower_step=0.1), **options)
    held = run(problem(HELD, HELD), bx.MMBO(50.0, lower_step=0.1), **options)
    assert result.recoveries
    assert result.recoveries == held.recoveries
    np.testing.assert_allclose(result.x, held.x, rtol=1e-4, atol=1e-5)


def failing(at, error):
    drawn = Drawn(0)

    def fetch(step, blocks, size):
        if step == at:
            raise error
        return drawn(step, blocks, size)

    return fetch


def test_an_error_in_a_source_names_the_step_and_keeps_what_was_reached(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    with pytest.raises(
        RuntimeError, match=r"upper_data .*batch of step 23: OSError: no such shard"
    ) as raised:
        run(streamed(failing(23, OSError("no such shard"))), checkpoint=tmp_path)
    assert int(raised.value.result.state.step) == 23
    assert saved_steps(tmp_path) == [23]
    resumed = run(streamed(), checkpoint=bx.Checkpoint(tmp_path, resume=True))
    same_bits(run(streamed()), resumed)


def test_a_loader_that_ends_early_says_after_how_many_batches():
    with pytest.raises(
        RuntimeError, match=r"upper_data \(Streamed\) ended after 40: there is none for step 40"
    ):
        run(loading(Batches(count=40)))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda b: b | {"c": b["c"].astype(np.float64)}, TypeError, r"\['c'\] must be float32\[2, 3, 3\]"),
        (
            lambda b: b | {"c": b["c"][:, :2]},
            ValueError,
            r"\['c'\] .* 2 blocks of 3 rows, got float32\[2, 2, 3\]",
        ),
        (lambda b: {"c": b["c"]}, TypeError, r"must have the structure of a row"),
    ],
    ids=["dtype", "shape", "structure"],
)
def test_batches_of_other_shapes_are_refused_by_name(change, error, match):
    drawn = Drawn(0)

    def fetch(step, blocks, size):
        batch = drawn(step, blocks, size)
        return change(batch) if step == 11 else batch

    with pytest.raises(error, match=r"the batch of step 11 that upper_data \(Streamed\).*" + match):
        run(streamed(fetch))


def test_what_cannot_be_streamed_is_refused_by_name():
    for options, match in (
        ({"sampling": bx.Sampling(2)}, "batch_size must be given for Streamed"),
        ({"initial": "all"}, "initial_batch_size must be 0 for Streamed"),
        ({"sampling": bx.Sampling(2, 3, strata=2)}, "strata must be left out for Streamed"),
        ({"solver": bx.BlockPAGE(0.1)}, "Streamed rows.* cannot all be read"),
        ({"stop": bx.Stop(verify=True)}, "Streamed rows.* cannot all be read"),
    ):
        with pytest.raises(ValueError, match=match):
            run(streamed(), **options)
    with pytest.raises(ValueError, match=r"BlockSAGA returns to all rows, and Streamed rows cannot"):
        run(streamed(), bx.BlockSAGA(0.1))
    with pytest.raises(ValueError, match=r"risk does not go with Streamed rows.* got Cvar"):
        run(problem(bx.Streamed(Drawn(0), ROW), HELD, risk=bx.cvar(0.5)))
    with pytest.raises(ValueError, match=r"Streamed rows.* cannot all be read"):
        bx.objective(streamed(), X0)
    solver, plan = bx.MMBO(0.1, lower_step=0.1), bx.Sampling(2, 3)
    with pytest.raises(ValueError, match=r"read by bilevax.minimize.*sweep"):
        bx.sweep(
            streamed(), X0, Y0, solver=bx.MMBO, settings={"upper_step": [0.1]}, steps=3, sampling=plan,
            keys=jax.random.split(jax.random.key(0), 1), progress=None,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"read by bilevax.minimize.*advance"):
        solver.init(streamed(), X0, Y0, key=jax.random.key(0), sampling=plan)
    with pytest.raises(TypeError, match="Streamed does not say how its rows are shared"):
        run(streamed(), mesh=jax.make_mesh((1,), ("blocks",)))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="either fetch or batches, got none"):
        bx.Streamed(row=ROW)
    with pytest.raises(TypeError, match="fetch must be a function"):
        bx.Streamed([1, 2], ROW)
    with pytest.raises(TypeError, match="can be begun again"):
        bx.Streamed(batches=iter([]), row=ROW)
    with pytest.raises(ValueError, match="row must hold"):
        bx.Streamed(Drawn(0))
    with pytest.raises(TypeError, match="such as float32, got float64"):
        bx.Streamed(Drawn(0), np.zeros(3))


def test_the_memory_estimate_counts_a_window():
    given = bx.memory_estimate(streamed(), X0, Y0, solver=METHODS["MMBO"], sampling=bx.Sampling(2, 3))
    assert given.data >= 2 * 7 * 2 * 3 * (D + 1) * 4


def test_a_batch_that_is_not_finite_is_named_with_its_step():
    class Broken(Drawn):
        def __call__(self, step, blocks, size):
            batch = super().__call__(step, blocks, size)
            return batch | {"c": np.where(step == 17, np.nan, batch["c"]).astype(np.float32)}

    words = r"batch that was read for step 17 is not finite: \['c'\] of row 0, for the block at place 0"
    with pytest.raises(bx.DivergedError, match=words):
        run(streamed(below=Broken(1)))
