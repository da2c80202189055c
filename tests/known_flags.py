"""Prints those of its arguments that the installed XLA knows as flags: it ends a process that has others."""

import os
import subprocess
import sys

START = "import jax; jax.devices()"


def known(flag):
    env = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    started = subprocess.run([sys.executable, "-c", START], env=env, capture_output=True, check=False)
    return started.returncode == 0


if __name__ == "__main__":
    print(*filter(known, sys.argv[1:]))
