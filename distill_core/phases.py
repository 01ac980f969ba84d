# SPDX-License-Identifier: Apache-2.0
"""Who trains at which attempt, and at which rate: pure functions of counters, so that a resumed run continues where it
stopped without any state.

    role, cycle, index = phase_at(attempt, fake_update_ratio=2)      # student, fake_score, fake_score, student, ...
    step = exit_step_at(cycle, num_steps=4, rule="uniform", seed=0, stream="student")
    lr = lr_at(step, lr=1e-6, schedule="cosine", warmup_steps=10, max_steps=1000, min_lr_frac=0.1)
"""
from __future__ import annotations

import math
import random
from typing import NamedTuple


class Phase(NamedTuple):
    role: str  # student | fake_score
    cycle: int  # from 0, warm-up cycles included
    index: int  # place in the cycle, from 0


def phase_at(attempt: int, fake_update_ratio: int, warmup_cycles: int = 0) -> Phase:
    """The phase of the attempt-th attempt to train, from 0.

    A cycle is one student attempt, then `fake_update_ratio` fake-score attempts; in the first `warmup_cycles` cycles
    the student's is left out. Attempts count whether or not their step was applied, so a run of skipped steps ends too.
    ValueError for a negative attempt or number of warm-up cycles, or a ratio below 1.
    """
    if attempt < 0 or warmup_cycles < 0 or fake_update_ratio < 1:
        raise ValueError(f"attempt and warmup_cycles must be at least 0 and fake_update_ratio at least 1, got "
                         f"{attempt}, {warmup_cycles} and {fake_update_ratio}")
    past_warmup = attempt - warmup_cycles * fake_update_ratio
    if past_warmup < 0:
        return Phase("fake_score", *divmod(attempt, fake_update_ratio))
    cycle, index = divmod(past_warmup, 1 + fake_update_ratio)
    return Phase("student" if index == 0 else "fake_score", warmup_cycles + cycle, index)


def attempts_of(cycle: int, fake_update_ratio: int, warmup_cycles: int = 0) -> range:
    """The attempts that make up a cycle, for `phase_at`."""
    first = cycle * fake_update_ratio + max(0, cycle - warmup_cycles)
    return range(first, first + fake_update_ratio + (cycle >= warmup_cycles))


def exit_step_at(turn: int, *, num_steps: int, rule: str, seed: int, stream: str) -> int:
    """The step of a few-step rollout that the turn-th attempt of a role trains, 0 ... num_steps - 1.

    uniform: drawn, equal on every rank since it depends on the arguments only (others draw it on one rank and broadcast
    it); `stream`, the role's name, keeps two roles apart. last. round_robin: one after the other.
    """
    if num_steps < 1 or turn < 0:
        raise ValueError(f"num_steps must be at least 1 and turn at least 0, got {num_steps} and {turn}")
    if rule == "uniform":
        return random.Random(f"exit step {stream} {seed} {turn}").randrange(num_steps)
    if rule == "last":
        return num_steps - 1
    if rule == "round_robin":
        return turn % num_steps
    raise ValueError(f"exit step rule {rule!r}: choose uniform, last or round_robin")


def lr_at(step: int, *, lr: float, schedule: str, warmup_steps: int, max_steps: int, min_lr_frac: float) -> float:
    """Learning rate of the update that follows `step` applied updates.

    Linear warm-up from lr / warmup_steps, then `constant`, `linear` or `cosine` down to lr * min_lr_frac at max_steps.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    if schedule == "constant":
        return lr
    if schedule == "linear":
        return lr * (1.0 - (1.0 - min_lr_frac) * done)
    if schedule == "cosine":
        return lr * (min_lr_frac + (1.0 - min_lr_frac) * 0.5 * (1.0 + math.cos(math.pi * done)))
    raise ValueError(f"schedule {schedule!r}: choose constant, linear or cosine")
