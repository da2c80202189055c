"""Every method with all that it takes: on a mesh as on one device, and resumed as in one go.

`python tests/every_mesh.py` takes some ten minutes; names of methods choose some. It ends with 1 if a run
on four devices differs from that on one by more than rounding, or a resumed one in any bit.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

from devices import several_devices

if __name__ == "__main__" and "FOUR_DEVICES" not in os.environ:
    os.execvpe(sys.executable, [sys.executable, *sys.argv], several_devices(4) | {"FOUR_DEVICES": "yes"})

import jax
import numpy as np
from every_kind import BATCH, KINDS, METHODS, PER_STEP, every_kind, takes

import bilevax as bx

STEPS, SAVED, STRATA, TOLERANCE = 24, 16, 8, 2e-5


def arrays(result):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((result.x, result.y, result.state))]


def difference(one, other):
    """The largest one, as a share of the largest entry of an array, or of one."""
    pairs = zip(arrays(one), arrays(other), strict=True)
    return max(float(np.max(np.abs(a - b), initial=0) / max(1, np.abs(a).max(initial=0))) for a, b in pairs)


def run(method, **given):
    problem, x0, y0, solver = every_kind(method)
    mesh = given.pop("mesh", None)
    plan = bx.Sampling(PER_STEP, BATCH, strata=STRATA)
    options = {"steps": STEPS, "sampling": plan, "key": jax.random.key(0), "progress": None, "every": 8}
    options |= {"stop": bx.Stop(verify=False, recover=False), "mesh": mesh} | given
    return bx.minimize(problem, x0, y0, solver=solver, **options)


def main() -> int:
    mesh, failed = jax.make_mesh((4,), ("blocks",)), 0
    for method in sys.argv[1:] or METHODS:
        began = time.monotonic()
        kinds = ", ".join(kind for kind in KINDS if takes(method, kind))
        alone = run(method)
        with tempfile.TemporaryDirectory() as folder:
            run(method, steps=SAVED, checkpoint=folder)
            resumed = run(method, checkpoint=bx.Checkpoint(folder, resume=True))
        same = all(np.array_equal(a, b) for a, b in zip(arrays(alone), arrays(resumed), strict=True))
        words = "the same bits" if same else "DIFFERENT BITS"
        if METHODS[method].distributed:
            off = difference(alone, run(method, mesh=mesh))
            failed += off > TOLERANCE
            words = f"{off:.1e}{'' if off <= TOLERANCE else ' TOO FAR'} off on four devices, {words}"
        failed += not same
        print(f"{method}: {words} when resumed ({time.monotonic() - began:.0f} s): {kinds}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
