"""Small test problems, each written twice: closed-form NumPy pieces, and a user's JAX functions.

The NumPy pieces (`f_x`, `g_yy`, ...) are those `algorithms.py` asks for; their `rows` are indices
into the flat arrays of `upper_rows` and `lower_rows`. The JAX functions `upper`, `lower` and
`inner` take one block's constants and one batch of rows. f, g and c are means over the rows of a
batch. Rows are shared by all blocks (`upper_offsets is None`) or, with `ragged=True`, block i owns
the rows offsets[i] to offsets[i+1].
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


class Blocks:
    """What all problems share: the sizes, the seed, and which rows belong to which block."""

    blocks: dict[str, np.ndarray]
    upper_rows: dict[str, np.ndarray]
    lower_rows: dict[str, np.ndarray]

    def __init__(self, m, dx, dy, rows, seed, ragged):
        self.m, self.dx, self.dy = m, dx, dy
        self.rng = np.random.default_rng(seed)
        self.upper_offsets = self.draw_offsets(rows) if ragged else None
        self.lower_offsets = self.draw_offsets(rows) if ragged else None
        self.upper_count = int(self.upper_offsets[-1]) if ragged else rows
        self.lower_count = int(self.lower_offsets[-1]) if ragged else rows

    def draw_offsets(self, rows):
        """Blocks of 1 to 2 * rows - 1 rows."""
        lengths = self.rng.integers(1, 2 * rows, size=self.m)
        return np.concatenate([[0], np.cumsum(lengths)])

    def normal(self, *shape, scale=1.0):
        return scale * self.rng.normal(size=shape)

    def positive_definite(self):
        """m matrices with eigenvalues of at least 1."""
        root = self.normal(self.m, self.dy, self.dy) / np.sqrt(self.dy)
        return np.eye(self.dy) + root @ root.transpose(0, 2, 1)

    def upper_of(self, i):
        """All upper rows of block i."""
        if self.upper_offsets is None:
            return np.arange(self.upper_count)
        return np.arange(self.upper_offsets[i], self.upper_offsets[i + 1])

    def lower_of(self, i):
        """All lower rows of block i."""
        if self.lower_offsets is None:
            return np.arange(self.lower_count)
        return np.arange(self.lower_offsets[i], self.lower_offsets[i + 1])

    def block(self, i):
        """The `block` the user's functions see."""
        return {name: array[i] for name, array in self.blocks.items()}

    def upper_batch(self, rows):
        """The `batch` the user's `upper` sees."""
        return {name: array[rows] for name, array in self.upper_rows.items()}

    def lower_batch(self, rows):
        """The `batch` the user's `lower` and `inner` see."""
        return {name: array[rows] for name, array in self.lower_rows.items()}


class QuadraticBlocks(Blocks):
    """Quadratic in x and y, with noise in every piece, also in the Hessian and the Jacobian.

    g_i = mean of 1/2 y'A_i y + 1/2 (a'y)^2 - e y'B_i x - b'y      over rows (a, b, e)
    f_i = mean of 1/2 |y - c|^2 + h'x + x'D_i y + rho/2 |x|^2      over rows (c, h)
    """

    rho = 1.0

    def __init__(self, m=5, dx=3, dy=2, rows=6, seed=0, ragged=False):
        super().__init__(m, dx, dy, rows, seed, ragged)
        self.blocks = {
            "A": self.positive_definite(),
            "B": self.normal(m, dy, dx),
            "D": self.normal(m, dx, dy, scale=0.3),
        }
        self.upper_rows = {
            "c": self.normal(self.upper_count, dy),
            "h": self.normal(self.upper_count, dx),
        }
        self.lower_rows = {
            "a": self.normal(self.lower_count, dy, scale=0.5),
            "b": self.normal(self.lower_count, dy),
            "e": 1 + self.normal(self.lower_count, scale=0.3),
        }

    def upper(self, x, y, block, batch):
        distance = 0.5 * jnp.sum((y - batch["c"]) ** 2, axis=1)
        coupling = x @ block["D"] @ y + 0.5 * self.rho * x @ x
        return jnp.mean(distance + batch["h"] @ x) + coupling

    def lower(self, x, y, block, batch):
        noise = 0.5 * (batch["a"] @ y) ** 2 - batch["b"] @ y
        return 0.5 * y @ block["A"] @ y + jnp.mean(noise - batch["e"] * (y @ block["B"] @ x))

    def f(self, i, x, y, rows):
        distance = 0.5 * np.sum((y - self.upper_rows["c"][rows]) ** 2, axis=1).mean()
        coupling = x @ self.blocks["D"][i] @ y + 0.5 * self.rho * x @ x
        return distance + self.upper_rows["h"][rows].mean(axis=0) @ x + coupling

    def f_x(self, i, x, y, rows):
        return self.upper_rows["h"][rows].mean(axis=0) + self.blocks["D"][i] @ y + self.rho * x

    def f_y(self, i, x, y, rows):
        return y - self.upper_rows["c"][rows].mean(axis=0) + self.blocks["D"][i].T @ x

    def g_y(self, i, x, y, rows):
        b = self.lower_rows["b"][rows].mean(axis=0)
        e = self.lower_rows["e"][rows].mean()
        return self.g_yy(i, x, y, rows) @ y - e * (self.blocks["B"][i] @ x) - b

    def g_yy(self, i, x, y, rows):
        a = self.lower_rows["a"][rows]
        return self.blocks["A"][i] + a.T @ a / len(rows)

    def g_xy(self, i, x, y, rows):
        return -self.lower_rows["e"][rows].mean() * self.blocks["B"][i].T

    def g_x(self, i, x, y, rows):
        return self.g_xy(i, x, y, rows) @ y


class LogisticHyper(Blocks):
    """Reweighted logistic regression at a temperature per block; x has one weight per lower row.

    g_i = mean of sigmoid(x[index]) softplus(-label row'y / temperature_i) + reg/2 |y|^2
    f_i = mean of softplus(-label row'y / temperature_i)
    """

    def __init__(self, m=5, dy=3, rows=6, seed=0, ragged=False, reg=0.1):
        super().__init__(m, None, dy, rows, seed, ragged)
        self.dx = self.lower_count
        self.reg = reg
        self.blocks = {"temperature": self.rng.uniform(0.5, 2.0, size=m)}
        self.upper_rows = self.labelled_rows(self.upper_count)
        self.lower_rows = self.labelled_rows(self.lower_count)
        self.lower_rows["index"] = np.arange(self.lower_count)

    def labelled_rows(self, count):
        label = np.where(self.rng.random(count) < 0.5, -1.0, 1.0)
        return {"row": self.normal(count, self.dy), "label": label}

    def upper(self, x, y, block, batch):
        return jnp.mean(jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block["temperature"]))

    def lower(self, x, y, block, batch):
        return self.weighted(x[batch["index"]], y, block, batch)

    def weighted(self, found, y, block, batch):
        """`lower`, where x is a table of which the rows that the batch looks up were found."""
        loss = jax.nn.softplus(-batch["label"] * (batch["row"] @ y) / block["temperature"])
        return jnp.mean(jax.nn.sigmoid(found) * loss) + 0.5 * self.reg * y @ y

    def loss_y(self, i, y, data, rows):
        """Every row's gradient in y of softplus(-label row'y / temperature)."""
        slope = -data["label"][rows] / self.blocks["temperature"][i]
        return (slope * sigmoid(slope * (data["row"][rows] @ y)))[:, None] * data["row"][rows]

    def f_x(self, i, x, y, rows):
        return np.zeros(self.dx)

    def f_y(self, i, x, y, rows):
        return self.loss_y(i, y, self.upper_rows, rows).mean(axis=0)

    def g_y(self, i, x, y, rows):
        weight = sigmoid(x[self.lower_rows["index"][rows]])
        return weight @ self.loss_y(i, y, self.lower_rows, rows) / len(rows) + self.reg * y

    def g_yy(self, i, x, y, rows):
        row = self.lower_rows["row"][rows]
        slope = -self.lower_rows["label"][rows] / self.blocks["temperature"][i]
        p = sigmoid(slope * (row @ y))
        weight = sigmoid(x[self.lower_rows["index"][rows]]) * slope**2 * p * (1 - p)
        return (row.T * weight) @ row / len(rows) + self.reg * np.eye(self.dy)

    def g_xy(self, i, x, y, rows):
        index = self.lower_rows["index"][rows]
        p = sigmoid(x[index])
        term = (p * (1 - p))[:, None] * self.loss_y(i, y, self.lower_rows, rows) / len(rows)
        jacobian = np.zeros((self.dx, self.dy))
        np.add.at(jacobian, index, term)  # a row may be drawn twice
        return jacobian


def tanh_inner(x, block, batch):
    """c_i(x) = mean of tanh(P_i (r * x) + q) over rows (r, q), in JAX."""
    return jnp.mean(jnp.tanh((batch["r"] * x) @ block["P"].T + batch["q"]), axis=0)


def tanh_mean(x, P, r, q):
    """c_i(x) of `tanh_inner` in NumPy."""
    return np.tanh((r * x) @ P.T + q).mean(axis=0)


def tanh_mean_x(x, P, r, q):
    """The transposed Jacobian of `tanh_mean`, of shape (dx, dy)."""
    slope = 1 - np.tanh((r * x) @ P.T + q) ** 2
    return np.einsum("nj,kj,nk->jk", r, P, slope) / len(r)


class MeanBlocks(Blocks):
    """Compositional blocks y_i(x) = c_i(x), nonlinear in x and y.

    c_i = mean of tanh(P_i (r * x) + q)                                          over rows (r, q)
    f_i = mean of log(1 + |y - w|^2) + sin(k'x) d_i'y + rho/2 |x|^2              over rows (w, k)
    """

    rho = 1.0

    def __init__(self, m=5, dx=3, dy=2, rows=6, seed=0, ragged=False):
        super().__init__(m, dx, dy, rows, seed, ragged)
        self.blocks = {"P": self.normal(m, dy, dx), "d": self.normal(m, dy, scale=0.5)}
        self.upper_rows = {
            "w": self.normal(self.upper_count, dy),
            "k": self.normal(self.upper_count, dx),
        }
        self.lower_rows = {
            "r": 1 + self.normal(self.lower_count, dx, scale=0.3),
            "q": self.normal(self.lower_count, dy),
        }

    def upper(self, x, y, block, batch):
        distance = jnp.log1p(jnp.sum((y - batch["w"]) ** 2, axis=1))
        coupling = jnp.sin(batch["k"] @ x) * (block["d"] @ y)
        return jnp.mean(distance + coupling) + 0.5 * self.rho * x @ x

    def inner(self, x, block, batch):
        return tanh_inner(x, block, batch)

    def f(self, i, x, y, rows):
        w, k = self.upper_rows["w"][rows], self.upper_rows["k"][rows]
        coupling = np.sin(k @ x) * (self.blocks["d"][i] @ y)
        return np.mean(np.log1p(np.sum((y - w) ** 2, axis=1)) + coupling) + 0.5 * self.rho * x @ x

    def f_x(self, i, x, y, rows):
        k = self.upper_rows["k"][rows]
        return (np.cos(k @ x) @ k / len(rows)) * (self.blocks["d"][i] @ y) + self.rho * x

    def f_y(self, i, x, y, rows):
        gap = y - self.upper_rows["w"][rows]
        distance_y = (2 * gap / (1 + np.sum(gap**2, axis=1, keepdims=True))).mean(axis=0)
        return distance_y + np.sin(self.upper_rows["k"][rows] @ x).mean() * self.blocks["d"][i]

    def c(self, i, x, rows):
        r, q = self.lower_rows["r"][rows], self.lower_rows["q"][rows]
        return tanh_mean(x, self.blocks["P"][i], r, q)

    def c_x(self, i, x, rows):
        r, q = self.lower_rows["r"][rows], self.lower_rows["q"][rows]
        return tanh_mean_x(x, self.blocks["P"][i], r, q)


class Mixed(Blocks):
    """One argmin level a (in R^dy) and one mean level b (in R^db) per block, all nonlinear.

    g_i = mean of 1/2 y_a'A_i y_a - y_a'B_i x + softplus(a'y_a + p'x)            over rows (a, p)
    c_i = mean of tanh(P_i (r * x) + q)                                          over rows (r, q)
    f_i = mean of 1/2 |y_a - c|^2 + log(1 + |y_b - w|^2) + sin(k'x) y_a'K_i y_b + rho/2 |x|^2

    `upper` takes y = {"a": y_a, "b": y_b}; `lower` takes y_a alone. Both levels draw from
    `lower_rows`.
    """

    rho = 1.0

    def __init__(self, m=5, dx=3, dy=2, db=4, rows=6, seed=0, ragged=False):
        super().__init__(m, dx, dy, rows, seed, ragged)
        self.db = db
        self.blocks = {
            "A": self.positive_definite(),
            "B": self.normal(m, dy, dx),
            "P": self.normal(m, db, dx),
            "K": self.normal(m, dy, db, scale=0.3),
        }
        self.upper_rows = {
            "c": self.normal(self.upper_count, dy),
            "w": self.normal(self.upper_count, db),
            "k": self.normal(self.upper_count, dx),
        }
        self.lower_rows = {
            "a": self.normal(self.lower_count, dy),
            "p": self.normal(self.lower_count, dx),
            "r": 1 + self.normal(self.lower_count, dx, scale=0.3),
            "q": self.normal(self.lower_count, db),
        }

    def upper(self, x, y, block, batch):
        distance_a = 0.5 * jnp.sum((y["a"] - batch["c"]) ** 2, axis=1)
        distance_b = jnp.log1p(jnp.sum((y["b"] - batch["w"]) ** 2, axis=1))
        coupling = jnp.sin(batch["k"] @ x) * (y["a"] @ block["K"] @ y["b"])
        return jnp.mean(distance_a + distance_b + coupling) + 0.5 * self.rho * x @ x

    def lower(self, x, y, block, batch):
        quadratic = 0.5 * y @ block["A"] @ y - y @ block["B"] @ x
        return quadratic + jnp.mean(jax.nn.softplus(batch["a"] @ y + batch["p"] @ x))

    def inner(self, x, block, batch):
        return tanh_inner(x, block, batch)

    def f_x(self, i, x, y_a, y_b, rows):
        k = self.upper_rows["k"][rows]
        product = y_a @ self.blocks["K"][i] @ y_b
        return (np.cos(k @ x) @ k / len(rows)) * product + self.rho * x

    def f_a(self, i, x, y_a, y_b, rows):
        wave = np.sin(self.upper_rows["k"][rows] @ x).mean()
        return y_a - self.upper_rows["c"][rows].mean(axis=0) + wave * (self.blocks["K"][i] @ y_b)

    def f_b(self, i, x, y_a, y_b, rows):
        gap = y_b - self.upper_rows["w"][rows]
        distance_b = (2 * gap / (1 + np.sum(gap**2, axis=1, keepdims=True))).mean(axis=0)
        wave = np.sin(self.upper_rows["k"][rows] @ x).mean()
        return distance_b + wave * (self.blocks["K"][i].T @ y_a)

    def activation(self, x, y, rows):
        return sigmoid(self.lower_rows["a"][rows] @ y + self.lower_rows["p"][rows] @ x)

    def g_x(self, i, x, y, rows):
        noise = self.activation(x, y, rows) @ self.lower_rows["p"][rows] / len(rows)
        return noise - self.blocks["B"][i].T @ y

    def g_y(self, i, x, y, rows):
        noise = self.activation(x, y, rows) @ self.lower_rows["a"][rows] / len(rows)
        return self.blocks["A"][i] @ y - self.blocks["B"][i] @ x + noise

    def g_yy(self, i, x, y, rows):
        a, p = self.lower_rows["a"][rows], self.activation(x, y, rows)
        return self.blocks["A"][i] + (a.T * (p * (1 - p))) @ a / len(rows)

    def g_xy(self, i, x, y, rows):
        a, p = self.lower_rows["a"][rows], self.activation(x, y, rows)
        noise = (self.lower_rows["p"][rows].T * (p * (1 - p))) @ a / len(rows)
        return noise - self.blocks["B"][i].T

    def c(self, i, x, rows):
        r, q = self.lower_rows["r"][rows], self.lower_rows["q"][rows]
        return tanh_mean(x, self.blocks["P"][i], r, q)

    def c_x(self, i, x, rows):
        r, q = self.lower_rows["r"][rows], self.lower_rows["q"][rows]
        return tanh_mean_x(x, self.blocks["P"][i], r, q)


def draw_samples(problem, steps, blocks_per_step, batch_size, seed=0):
    """Random samples: blocks without, rows with replacement; J_t as large as I_t."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(steps):
        blocks = rng.choice(problem.m, size=blocks_per_step, replace=False)
        samples.append(
            SimpleNamespace(
                blocks=blocks,
                upper=[rng.choice(problem.upper_of(i), size=batch_size) for i in blocks],
                lower=[rng.choice(problem.lower_of(i), size=batch_size) for i in blocks],
                second=rng.choice(problem.m, size=blocks_per_step, replace=False),
            )
        )
    return samples


def full_samples(problem, steps):
    """All blocks and all rows at every step."""
    blocks = np.arange(problem.m)
    sample = SimpleNamespace(
        blocks=blocks,
        upper=[problem.upper_of(i) for i in blocks],
        lower=[problem.lower_of(i) for i in blocks],
        second=blocks,
    )
    return [sample] * steps


def random_start(problem, seed=0):
    """A random x and y, and a random value of every estimator of every method (H >= 1)."""
    rng = np.random.default_rng(seed)
    m, dx, dy = problem.m, problem.dx, problem.dy
    root = 0.3 * rng.normal(size=(m, dy, dy))
    start = SimpleNamespace(
        x=0.5 * rng.normal(size=dx),
        y=0.5 * rng.normal(size=(m, dy)),
        s=0.1 * rng.normal(size=(m, dy)),
        u=0.1 * rng.normal(size=(m, dy)),
        v=0.5 * rng.normal(size=(m, dy)),
        z=0.1 * rng.normal(size=dx),
        H=np.eye(dy) + root @ root.transpose(0, 2, 1),
        f_x=0.1 * rng.normal(size=(m, dx)),
        f_y=0.1 * rng.normal(size=(m, dy)),
        g_xy=0.1 * rng.normal(size=(m, dx, dy)),
    )
    if hasattr(problem, "db"):
        start.y_a, start.y_b = start.y, 0.5 * rng.normal(size=(m, problem.db))
    return start
