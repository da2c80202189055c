"""A short run of `make fuzz`: whatever the input of a parser, its only error is `DataError`."""

import parsers
import pytest


@pytest.mark.parametrize("name", parsers.TARGETS)
def test_parser_accepts_an_input_or_raises_data_error(name):
    outcome = parsers.fuzz(name, 200)
    assert outcome.total() >= 200
    # If a parser refused everything, or all inputs were valid, the test would prove nothing.
    assert outcome["accepted"] > 0
    assert outcome["refused"] > 0
