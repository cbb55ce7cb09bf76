"""Foreign input that no person would type: every parser takes it or refuses it in words (fuzzing.py)."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing import TARGETS

pytestmark = pytest.mark.long

ALL_CHECKS = list(HealthCheck)
FEW = settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=ALL_CHECKS)


@pytest.mark.parametrize("name", TARGETS)
def test_random_input_is_taken_or_refused_in_words(name):
    target, taken = TARGETS[name], {True: 0, False: 0}

    @FEW
    @given(target.strategy)
    def read(value):
        taken[target.is_taken(value)] += 1

    read()
    assert all(taken.values()), f"{name}: a test that only ever sees one answer sees nothing: {taken}"
