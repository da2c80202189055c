"""On a CPU no call factorises more than one matrix.

A batched call of LAPACK waits, inside a worker thread, for other workers to do its parts. On a machine with
two cores two such calls at once wait for each other for ever.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

PROGRAM = Path(__file__).parent / "factorising_program.py"
CALL = re.compile(r"= \(?\w+\[([\d,]*)\].*custom_call_target=\"(lapack_\w+)\"")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="accelerators factorise batches of matrices")
def test_no_call_factorises_several_matrices_on_a_cpu(tmp_path):
    dumped = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dumped}"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # what comes from a cache is not dumped
    subprocess.run([sys.executable, str(PROGRAM)], env=environment, check=True)
    calls = [
        (function, [int(size) for size in shape.split(",") if size])
        for file in tmp_path.glob("*after_optimizations.txt")
        for shape, function in CALL.findall(file.read_text())
    ]
    assert {"potrf" in function for function, _ in calls} == {True, False}  # the pattern fits
    assert [call for call in calls if len(call[1]) > 2 and any(size > 1 for size in call[1][:-2])] == []
