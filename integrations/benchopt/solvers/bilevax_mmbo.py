from benchmark_utils.bilevax_solver import BilevaxSolver
from benchopt import safe_import_context

with safe_import_context() as import_ctx:
    import bilevax as bx


class Solver(BilevaxSolver):
    """MMBO: moving averages of the lower gradient, of v and of the hyper-gradient.

    Hu et al., "Multi-block Min-max Bilevel Optimization with Applications in Multi-task Deep AUC
    Maximization", NeurIPS 2022.
    """

    name = "bilevax-MMBO"
    parameters = {**BilevaxSolver.parameters}

    def method(self):
        return bx.MMBO(self.upper_step, lower_step=self.lower_step)
