"""Steps per second with all rows on the device, and with the same rows read from the host.

python -m benchmarks.streamed
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import bilevax as bx


def main(blocks: int = 200, rows: int = 500, size: int = 50, steps: int = 20_000) -> None:
    """Logistic regressions around a common prior, I = 10 and B = 32."""
    random = np.random.default_rng(0)
    X = random.normal(size=(blocks, rows, size)).astype(np.float32)
    y = (random.random((blocks, rows)) < 0.5).astype(np.float32)

    def loss(w: jnp.ndarray, batch: dict[str, jnp.ndarray]) -> jnp.ndarray:
        out = batch["X"] @ w
        return jnp.mean(jnp.logaddexp(0, out) - batch["y"] * out)

    def fetch(step: int, chosen: np.ndarray, count: int) -> dict[str, np.ndarray]:
        places = np.random.default_rng(step).integers(0, rows, (len(chosen), count))
        return {"X": X[chosen[:, None], places], "y": y[chosen[:, None], places]}

    held = bx.PerBlock({"X": X.reshape(-1, size), "y": y.reshape(-1)}, np.arange(blocks + 1) * rows)
    streamed = bx.Streamed(fetch, {"X": np.zeros(size, np.float32), "y": np.zeros((), np.float32)})
    for turn in range(2):
        for name, source in (("on the device", held), ("from the host", streamed)):
            problem = bx.Problem(
                lambda x, y, block, batch: loss(y, batch),
                lambda x, y, block, batch: loss(y, batch) + 0.5 * jnp.sum((y - x) ** 2),
                blocks,
                source,
                source,
            )
            result = bx.minimize(
                problem, jnp.zeros(size), jnp.zeros((blocks, size)), solver=bx.MMBO(0.01, lower_step=0.1),
                steps=steps, sampling=bx.Sampling(10, 32, initial_batch_size=0), progress=None,
                stop=bx.Stop(verify=False),
            )  # fmt: skip
            print(f"{turn}: {name}: {result.steps_per_second:,.0f} steps/s")


if __name__ == "__main__":
    main()
