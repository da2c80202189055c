from benchmark_utils.bilevax_solver import BilevaxSolver
from benchopt import safe_import_context

with safe_import_context() as import_ctx:
    import bilevax as bx


class Solver(BilevaxSolver):
    """BSVRB v1: as v2, with a tracked lower Hessian, for at most some tens of lower variables.

    Hu et al., "Blockwise Stochastic Variance-Reduced Methods with Parallel Speedup for Multi-Block
    Bilevel Optimization", ICML 2023.
    """

    name = "bilevax-BSVRBv1"
    parameters = {**BilevaxSolver.parameters}

    def method(self):
        return bx.BSVRBv1(self.upper_step, lower_step=self.lower_step)
