"""A short run of `make faults`: after any fault a run resumes with the same bits or refuses with a reason."""

from collections import Counter

import pytest
from faults import suite

pytest.importorskip("orbax.checkpoint")


def test_no_fault_loses_a_checkpoint_or_goes_unnoticed():
    found = suite.run(60, seed=1, workers=1)
    lines, failures = suite.table(found)
    assert failures == 0, "\n".join([*lines, *(str(dict(answers)) for answers in found.values())])
    assert sum(answers.total() for answers in found.values()) == 60
    # A machine may not let a test mount a small disk.
    assert {kind for kind, answers in found.items() if not answers} <= {suite.SMALL_DISK}


def test_a_failure_is_counted():
    lines, failures = suite.table({"one": Counter({"resumed": 2, "the state has other bits": 1})})
    assert failures == 1
    assert lines[1].split() == ["one", "3", "2", "0", "1"]
