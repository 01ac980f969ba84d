# SPDX-License-Identifier: Apache-2.0
"""The order of training phases against a loop that writes it out (schedules of the learning rate: test_role.py)."""
from __future__ import annotations

import random
from collections import Counter
from itertools import count, islice
from operator import eq

import pytest

from distill_core.phases import Phase, attempts_of, exit_step_at, phase_at


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


@pytest.mark.parametrize("ratio, warmup_cycles", [(1, 0), (3, 0), (3, 4)])
def test_the_attempts_of_a_cycle_are_those_whose_phase_says_so(ratio, warmup_cycles):
    """A cycle that begins or ends an attempt too early, above all the first one after the warm-up."""
    phases = [phase_at(n, ratio, warmup_cycles) for n in range(200)]
    for cycle in range(20):
        assert list(attempts_of(cycle, ratio, warmup_cycles)) == [n for n, p in enumerate(phases) if p.cycle == cycle]


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


# --- which step of a rollout is trained -----------------------------------------------------------------------------

def steps(count: int = 400, **changes) -> list[int]:
    settings = {"num_steps": 4, "rule": "uniform", "seed": 0, "stream": "student", **changes}
    return [exit_step_at(turn, **settings) for turn in range(count)]


def test_exit_steps_by_rule():
    """A step that is never trained, or a rotation that skips one."""
    assert steps(6, rule="last") == [3] * 6
    assert steps(6, rule="round_robin") == [0, 1, 2, 3, 0, 1]
    assert {rule: set(steps(9, rule=rule, num_steps=1)) for rule in ("last", "round_robin", "uniform")} == {
        "last": {0}, "round_robin": {0}, "uniform": {0}}


def test_uniform_exit_steps_are_uniform_and_independent():
    """A draw that favours a step, repeats itself from turn to turn, or is one for two roles or seeds."""
    counts = Counter(steps(4000))
    assert sorted(counts) == [0, 1, 2, 3] and all(abs(count - 1000) < 5 * 27.4 for count in counts.values())  # 5 sigma
    straight = steps(4000)
    for other in (straight[1:] + straight[:1], steps(4000, stream="fake_score"), steps(4000, seed=1)):
        assert abs(sum(map(eq, straight, other)) - 1000) < 5 * 27.4


def test_uniform_exit_steps_are_a_pure_function():
    """Another draw in another version or after a resume: these numbers are what older runs trained."""
    assert steps(12) == [1, 2, 2, 1, 2, 3, 2, 3, 1, 2, 1, 0]
    assert exit_step_at(10 ** 12, num_steps=4, rule="uniform", seed=0, stream="student") in range(4)
    random.seed(0)
    before = random.getstate()
    steps()
    assert random.getstate() == before, "the global generator is left alone"


@pytest.mark.parametrize("arguments, message", [({"rule": "first"}, "uniform, last or round_robin"),
                                                ({"num_steps": 0}, "num_steps must be at least 1")])
def test_exit_step_refuses(arguments, message):
    """A typo taken for another rule."""
    with pytest.raises(ValueError, match=message):
        steps(1, **arguments)
