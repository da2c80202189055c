"""A short run of `make fuzz`: whatever a parser is fed, its only error is `DataError`."""

import parsers
import pytest


@pytest.mark.parametrize("name", parsers.TARGETS)
def test_parser_accepts_or_refuses_whatever_it_is_fed(name):
    outcome = parsers.fuzz(name, 200)
    assert outcome.total() >= 200
    # Neither a parser that refuses everything nor inputs that are all good would prove anything.
    assert outcome["accepted"] > 0
    assert outcome["refused"] > 0
