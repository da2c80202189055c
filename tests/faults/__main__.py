"""`make faults`: injects random faults into runs, and counts what comes of them.

After any fault a run either resumes with the same bits as one that was never stopped, or is refused with a
reason. No good checkpoint is lost, and nothing is silently wrong. The exit status is 1 otherwise.
"""

import argparse
import sys
import time

from faults import suite

if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="faults", description=__doc__)
    options.add_argument("--count", type=int, default=1000, help="how many faults")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument(
        "--kind", choices=suite.KINDS, help="inject one fault of this kind here, to debug it"
    )
    options.add_argument("--number", type=int, default=0, help="which fault of the kind")
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.serve:
        suite.serve(given.seed)
    elif given.kind:
        from faults.runs import observed

        with observed():
            print(suite.inject(given.kind, given.number, given.seed))
    else:
        began = time.monotonic()
        longest = 600  # seconds, on a slow machine too
        found = suite.run(
            given.count, given.seed, given.workers, longest, lambda text: print(text, flush=True)
        )
        lines, failures = suite.table(found)
        print(*lines, f"{time.monotonic() - began:.0f} s", sep="\n")
        sys.exit(failures > 0)
