from benchmark_utils.bilevax_solver import BilevaxSolver
from benchopt import safe_import_context

with safe_import_context() as import_ctx:
    import bilevax as bx


class Solver(BilevaxSolver):
    """BlockPAGE: as BSVRB v2, corrected by changes and sometimes recomputed from all rows.

    Li et al., "PAGE: A Simple and Optimal Probabilistic Gradient Estimator for Nonconvex Optimization",
    ICML 2021, for the estimator.
    """

    name = "bilevax-BlockPAGE"
    parameters = {**BilevaxSolver.parameters}

    def method(self):
        return bx.BlockPAGE(self.upper_step, lower_step=self.lower_step)
