"""What the solvers of bilevax share in the harness of benchmark_bilevel: one lower problem is one block.

The harness gives f_inner and f_outer as functions of (inner_var, outer_var, start, batch_size), which
are means over the rows start, …, start + batch_size − 1. A slice of that many rows is what bilevax
draws, as if it were one row, so that a step reads as many rows as one of the harness's own solvers, and
in the same way.
"""

from abc import ABC, abstractmethod

from benchopt import BaseSolver, safe_import_context
from benchopt.stopping_criterion import SufficientProgressCriterion

with safe_import_context() as import_ctx:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from benchmark_utils import constants

    import bilevax as bx


class BilevaxSolver(BaseSolver, ABC):
    """A method of bilevax; a file in `solvers/` says which.

    Steps that are None are chosen by bilevax. `batch_size` is a number of rows or "full".
    """

    requirements = ["pip::bilevax"]
    stopping_criterion = SufficientProgressCriterion(patience=constants.PATIENCE, strategy="callback")
    parameters = {
        "batch_size": [64],
        "lower_step": [None],
        "upper_step": [None],
        "eval_freq": [128],
        "random_state": [1],
    }

    @abstractmethod
    def method(self):
        """The bilevax solver with the parameters of this one."""

    @staticmethod
    def get_next(stop_val):
        return stop_val + 1

    def set_objective(
        self, f_inner, f_outer, n_inner_samples, n_outer_samples, inner_var0, outer_var0, **full_batch
    ):
        """Makes the problem, its first state, and the compiled function of `eval_freq` steps."""

        def level(function, samples):
            rows = samples if self.batch_size == "full" else min(self.batch_size, samples)
            # The last slice begins earlier if the rows cannot be divided, as in the harness's own sampler.
            starts = np.minimum(np.arange(0, samples, rows), samples - rows)

            def mean(x, y, block, batch):
                return jnp.mean(jax.vmap(lambda start: function(y, x, start, batch_size=rows))(batch))

            return mean, bx.Shared(jnp.asarray(starts, jnp.int32))

        (upper, upper_data), (lower, lower_data) = (
            level(f_outer, n_outer_samples),
            level(f_inner, n_inner_samples),
        )
        problem = bx.Problem(upper, lower, blocks=1, upper_data=upper_data, lower_data=lower_data)
        solver = self.method()
        self.first = solver.init(
            problem,
            jnp.asarray(outer_var0),
            jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], inner_var0),
            key=jax.random.key(self.random_state),
            blocks_per_step=1,
            batch_size=1,
        )
        self.advance = jax.jit(lambda state: bx.advance(problem, solver, state, self.eval_freq))
        self.run_once(2)  # compiles, so that no curve counts it

    def run(self, callback):
        """Takes `eval_freq` steps between two calls of the callback."""
        self.state = self.first
        while callback():
            self.state = jax.block_until_ready(self.advance(self.state))

    def get_result(self):
        return {
            "inner_var": jax.tree.map(lambda leaf: leaf[0], self.state.y),
            "outer_var": self.state.x,
        }
