# SPDX-License-Identifier: Apache-2.0
"""Schedules as pure functions of a counter, so that a resumed run continues where it stopped without any state.

    lr = lr_at(step, lr=1e-6, schedule="cosine", warmup_steps=10, max_steps=1000, min_lr_frac=0.1)
"""
from __future__ import annotations

import math


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
