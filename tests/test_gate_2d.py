# SPDX-License-Identifier: Apache-2.0
"""The 2-D gate: train_dmd distils a teacher of eight Gaussians into a student that must draw them, and the same job
with one thing wrong must not get through.

Runs of the job's own code on one rank, two at a time in processes of their own; figures of 10,000 samples of the
averaged student. What they cannot see: backward simulation and cadence (test_train_dmd counts those).
"""
from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo  # noqa: F401  (FSDP2 needs it: once here instead of in each process)
from eight_gaussians import NUM_MODES, Figures, measure

import train_dmd
from distill_core import config as cfg
from distill_core.flow import shift_time
from distill_core.topology import plan_ranks, start, stop

TEACHER = Path(__file__).parent / "gmm8"


def misses(figures: Figures, *, hq: float, tv: float, swd: float = math.inf, mmd2: float = math.inf,
           std: float = 0.0) -> list[str]:
    """Figures that do not reach the gate. NaN reaches nothing."""
    reached = {"hq": figures.hq >= hq, "modes": figures.modes == NUM_MODES, "tv": figures.tv <= tv,
               "swd": figures.swd <= swd, "mmd2": figures.mmd2 <= mmd2, "std": figures.std >= std}
    return [name for name, good in reached.items() if not good]


# ---------------------------------------------------------------------------------------------------------------------
# What can be wrong

Sabotage = Callable[[pytest.MonkeyPatch, train_dmd.Run], None]


def replace(patch: pytest.MonkeyPatch, name: str, change: Callable) -> None:
    """train_dmd.NAME(*arguments) becomes change(NAME, *arguments)."""
    original = getattr(train_dmd, name)
    patch.setattr(train_dmd, name, lambda *arguments: change(original, *arguments))


def wrong_sign(patch, run):
    def negated(dmd_gradient, *arguments):
        gradient = dmd_gradient(*arguments)
        return gradient._replace(g=-gradient.g)

    replace(patch, "dmd_gradient", negated)


def swapped_roles(patch, run):
    replace(patch, "dmd_gradient", lambda dmd_gradient, x, real, fake, *rest: dmd_gradient(x, fake, real, *rest))


def fake_never_trained(patch, run):
    run.roles["fake_score"].lr = lambda step: 0.0


def fake_target_noise(patch, run):
    replace(patch, "fake_score_loss_per_sample",
            lambda loss, v, x0, noise: loss(v, torch.zeros_like(x0), noise))


def mistimed_fake(patch, run):
    """The fake score is told the noise level 3 s / (1 + 2 s) of samples that have s."""
    def mistimed(fake_losses, *arguments):
        with pytest.MonkeyPatch.context() as inner:
            replace(inner, "add_noise", lambda add_noise, x0, noise, told: add_noise(x0, noise, shift_time(told, 1 / 3)))
            return fake_losses(*arguments)

    replace(patch, "fake_losses", mistimed)


# ---------------------------------------------------------------------------------------------------------------------
# Runs

class Case(NamedTuple):
    cycles: tuple[int, ...]  # at which to measure
    steps: int = 1
    rollout: str = "sde"
    seed: int = 0
    sabotage: Sabotage | None = None


def distil(case: Case, folder: Path) -> dict[int, Figures]:
    """Figures of the averaged student by cycle."""
    job = train_dmd.prepare(config_of(case, folder), world_size=1)
    world = start(plan_ranks(1, 1, []), torch.device("cpu"), timeout_s=60)
    run = train_dmd.build_run(job, world, logging.getLogger("gate"))
    figures = {}
    with pytest.MonkeyPatch.context() as patch:
        if case.sabotage is not None:
            case.sabotage(patch, run)
        while run.cycle < case.cycles[-1]:
            train_dmd.train_cycle(run)
            if run.cycle in case.cycles:
                figures[run.cycle] = measure(samples_of(run))
    stop(world)
    return figures


@torch.no_grad()
def samples_of(run: train_dmd.Run) -> torch.Tensor:
    return train_dmd.draw_samples(run, lambda batch: train_dmd.rollout(run, "student_ema", batch, len(run.job.grid) - 2))


def config_of(case: Case, folder: Path) -> cfg.DMDConfig:
    conditions = folder / "conditions.npz"
    np.savez(conditions, labels=np.zeros(4096, dtype=np.int64))
    path = folder / "gate.yaml"
    path.write_text(f"""\
job: dmd
name: gate
run_root: {folder}
seed: {case.seed}
max_cycles: {case.cycles[-1]}
device: cpu
teacher: {{path: {TEACHER}}}
data: {{conditions: {conditions}}}
dmd:
  fake_update_ratio: 2
  student_batch_size: 256
  fake_score_batch_size: 256
  student_micro_batch_size_per_gpu: 256
  fake_score_micro_batch_size_per_gpu: 256
  student_steps: {case.steps}
  rollout: {case.rollout}
  normalization_epsilon: 0.05
  student_optim: {{lr: 2e-4}}
  fake_score_optim: {{lr: 5e-4}}
  ema_decay: 0.99
eval: {{num_samples: 10000}}
""")
    return cfg.load(path, job="dmd")


# ---------------------------------------------------------------------------------------------------------------------
# The gate. Healthy runs of seeds 0 to 4 (this teacher, torch 2.13 CPU):
#   1 step, 300 cycles: hq .715-.739  TV <= .044  SWD <= .129  MMD^2 <= .0077
#   1 step, 500 cycles: hq .820-.844  TV <= .025  SWD <= .090  MMD^2 <= .0031
#   4 steps (ode), 500: hq .960-.967  TV <= .021  std .081-.116; the teacher's 100 steps: hq .952
# At the default floor of 1e-6 seed 1 settled at hq .55, as single seeds of the published loop do too: there are two
# basins. Without any normaliser seeds end at .55 to .75, too near to healthy ones to be a control.

EARLY = {"hq": 0.64, "tv": 0.07, "swd": 0.18, "mmd2": 0.012}  # what a healthy run reaches at 300 cycles
FINAL = {"hq": 0.76, "tv": 0.05, "swd": 0.13, "mmd2": 0.006}  # and at 500
SABOTAGES = (wrong_sign, swapped_roles, fake_never_trained, fake_target_noise, mistimed_fake)
TEACHER_HQ = 0.952  # of 100 Euler steps: gmm8/README.md


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, dict[int, Figures]]:
    """All runs, two at a time."""
    cases = {"one": Case((300, 500)), "four": Case((500,), steps=4, rollout="ode")}
    cases |= {sabotage.__name__: Case((300,), sabotage=sabotage) for sabotage in SABOTAGES}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(distil_alone, case, tmp_path_factory.mktemp(name)) for name, case in cases.items()}
        return {name: future.result(timeout=600) for name, future in running.items()}


def distil_alone(case: Case, folder: Path) -> dict[int, Figures]:
    torch.set_num_threads(1)
    return distil(case, folder)


def test_a_1_step_student_draws_the_eight_gaussians(figures):
    """Catches whatever keeps distribution matching from working as a whole."""
    assert misses(figures["one"][300], **EARLY) == [], figures["one"]
    assert misses(figures["one"][500], **FINAL) == [], figures["one"]


def test_a_4_step_student_is_at_least_as_clean_as_the_teacher(figures):
    """Catches a broken rollout; std: within a mode, where many steps narrow the law (arXiv 2311.18828 is mode seeking)."""
    assert misses(figures["four"][500], hq=TEACHER_HQ, tv=0.05, std=0.07) == [], figures["four"]


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.__name__)
def test_a_broken_run_fails_the_same_gate(figures, sabotage):
    """Negative controls: each would be a plausible bug, and none gets where a healthy run is by then."""
    missed = misses(figures[sabotage.__name__][300], **EARLY)
    assert len(missed) >= 2 and "hq" in missed, figures[sabotage.__name__]
