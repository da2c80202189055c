"""What several test files share."""

import jax
import pytest


@pytest.fixture
def x64():
    """Double precision, for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def steps_alone(monkeypatch):
    """Runs end with their last step, for tests of what steps do: exact ones would hide it."""
    monkeypatch.setattr("bilevax._run.ending._finishes", lambda *given: False)
