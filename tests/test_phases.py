# SPDX-License-Identifier: Apache-2.0
"""The order of training phases against a loop that writes it out (schedules of the learning rate: test_role.py)."""
from __future__ import annotations

import random
from itertools import count, islice

import pytest

from distill_core.phases import Phase, phase_at


def brute_force(ratio: int, warmup_cycles: int):
    """Phases in order, one cycle after the other."""
    for cycle in count():
        roles = ["fake_score"] * ratio if cycle < warmup_cycles else ["student"] + ["fake_score"] * ratio
        for index, role in enumerate(roles):
            yield role, cycle, index


@pytest.mark.parametrize("ratio", [1, 2, 5, 7])
@pytest.mark.parametrize("warmup_cycles", [0, 1, 3, 50])
def test_thousands_of_attempts_equal_the_loop(ratio, warmup_cycles):
    """An off-by-one at the end of a cycle or of the warm-up, which a handful of attempts does not reach."""
    expected = list(islice(brute_force(ratio, warmup_cycles), 5000))
    assert [phase_at(attempt, ratio, warmup_cycles) for attempt in range(5000)] == expected


def test_a_cycle_is_one_student_attempt_first_then_the_fakes():
    """1:K read as 1:K - 1 (a cadence of "every K-th, else"), or a student that follows its fakes."""
    roles = ["student", "fake_score", "fake_score"]
    assert [phase_at(n, 2) for n in range(6)] == [Phase(roles[n % 3], n // 3, n % 3) for n in range(6)]


@pytest.mark.parametrize("ratio, warmup_cycles", [(1, 0), (3, 0), (3, 4)])
def test_counts_per_cycle(ratio, warmup_cycles):
    """The printed 1:K: every full cycle has exactly one student attempt and K fakes, a warm-up cycle K fakes only."""
    phases = [phase_at(n, ratio, warmup_cycles) for n in range(40 * (ratio + 1))]
    for cycle in range(phases[-1].cycle):
        roles = [phase.role for phase in phases if phase.cycle == cycle]
        assert roles == ["student"] * (cycle >= warmup_cycles) + ["fake_score"] * ratio


def test_is_a_pure_function():
    """Hidden state: the answer must not depend on which attempts were asked for before (resume asks for one alone)."""
    straight = [phase_at(n, 3, 2) for n in range(500)]
    order = random.Random(0).sample(range(500), 500)
    assert {n: phase_at(n, 3, 2) for n in order} == dict(enumerate(straight))
    assert phase_at(10 ** 15, 4) == ("student", 2 * 10 ** 14, 0)  # no loop over the past, no float


@pytest.mark.parametrize("arguments", [(-1, 2), (0, 0), (0, -1), (0, 2, -1)])
def test_refuses(arguments):
    """Negative counters, which divmod would turn into plausible phases."""
    with pytest.raises(ValueError, match="fake_update_ratio at least 1"):
        phase_at(*arguments)
