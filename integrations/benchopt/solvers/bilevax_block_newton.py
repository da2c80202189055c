from benchmark_utils.bilevax_solver import BilevaxSolver
from benchopt import safe_import_context

with safe_import_context() as import_ctx:
    import bilevax as bx


class Solver(BilevaxSolver):
    """BlockNewton: Newton steps of y and v with an averaged lower Hessian.

    bilevax, docs/choosing.md.
    """

    name = "bilevax-BlockNewton"
    parameters = {name: values for name, values in BilevaxSolver.parameters.items() if name != "lower_step"}

    def method(self):
        return bx.BlockNewton(self.upper_step)
