# SPDX-License-Identifier: Apache-2.0
"""A DMD cycle against the same cycle in straight torch, and the memory of one shared base against four models.

    python tests/bench/bench_dmd.py                # about 2 minutes on two cores
    python tests/bench/bench_dmd.py --hidden 64    # a small model, where the runtime's own cost shows

Time: `train_dmd.train_cycle` on one rank (FSDP2, ownership guard, counter-based noise, metrics, averages) and a loop of
plain modules, torch.randn and torch's own clip that does the same forwards, backwards and updates. Cycles of the two
alternate and the fastest of each counts. Memory: the CPU allocator's peak over building the roles and one cycle.
"""
from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timing import Row, peak_extra_bytes, print_rows, turns_s  # before torch: silences the profiler

import numpy as np
import torch
import torch.nn.functional as F

import train_dmd
from distill_core import config as cfg
from distill_core.build import load_flow
from distill_core.models.dit import DiT, DiTConfig
from distill_core.safetensors_io import write_folder
from distill_core.topology import World, plan_ranks, start

BATCH, MICRO, STEPS, RATIO = 16, 8, 4, 2


def write_job(folder: Path, hidden: int, depth: int, *overrides: str) -> train_dmd.Job:
    """A DiT on latents of 4 x 16 x 16 with random weights, and a job that distils it."""
    if not (folder / "teacher").exists():
        size = DiTConfig(hidden, depth, hidden // 32, 16, 2, 4, 10)
        torch.manual_seed(0)
        model = DiT(size)
        with torch.no_grad():
            for parameter in model.parameters():  # DiT's own initial output is 0: nothing would be non-trivial
                parameter.add_(0.02 * torch.randn_like(parameter))
        write_folder(folder / "teacher", [(name, p.detach()) for name, p in model.named_parameters()])
        (folder / "teacher/config.json").write_text(json.dumps({"model_type": "dit", **vars(size)}))
        np.savez(folder / "labels.npz", labels=np.arange(1000) % 10)
    tree = {"job": "dmd", "name": "bench", "run_root": str(folder / "runs"), "max_cycles": 1000, "device": "cpu",
            "teacher": {"path": str(folder / "teacher")}, "data": {"conditions": str(folder / "labels.npz")},
            "dmd": {"student_steps": STEPS, "exit_step": "last", "fake_update_ratio": RATIO,
                    "student_batch_size": BATCH, "fake_score_batch_size": BATCH,
                    "student_micro_batch_size_per_gpu": MICRO,
                    "fake_score_micro_batch_size_per_gpu": MICRO, "ema_decay": 0.99}}
    (folder / "config.yaml").write_text(json.dumps(tree))
    return train_dmd.prepare(cfg.load(folder / "config.yaml", overrides, job="dmd"), 1)


def straight(job: train_dmd.Job) -> Callable[[], None]:
    """One cycle of the same computation, as a script would have it."""
    dmd, grid, generator = job.config.dmd, job.grid, torch.Generator().manual_seed(0)
    student, fake, teacher = (load_flow(job.config.teacher.path, job.adapter).train() for _ in range(3))
    teacher.eval().requires_grad_(False)
    ema = copy.deepcopy(student).requires_grad_(False)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=2e-6, betas=(0.0, 0.999), weight_decay=0.01)
                  for module in (student, fake)]

    def draw() -> torch.Tensor:
        return torch.randn(MICRO, *job.adapter.latent_shape, generator=generator)

    def sample(labels: torch.Tensor, with_grad: bool) -> torch.Tensor:
        x = draw()
        for k, level in enumerate(grid[:-1]):
            s = torch.full((MICRO,), level)
            with torch.set_grad_enabled(with_grad and k == STEPS - 1):
                x0 = x - level * student(x, s, labels)
            if k < STEPS - 1:
                x = (1 - grid[k + 1]) * x0 + grid[k + 1] * draw()
        return x0

    def times() -> torch.Tensor:
        return (torch.randint(1000, (MICRO,), generator=generator) / 1000).clamp(0.02, 0.98)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def cycle() -> None:
        for _ in range(BATCH // MICRO):
            labels = torch.randint(10, (MICRO,), generator=generator)
            x, s = sample(labels, True), times()
            with torch.no_grad():
                x_s = torch.lerp(x, draw(), s.view(-1, 1, 1, 1))
                real, fakes = (x_s - s.view(-1, 1, 1, 1) * net(x_s, s, labels) for net in (teacher, fake))
                g = (fakes - real) / (x - real).abs().mean((1, 2, 3), keepdim=True).clamp_min(1e-6)
            (0.5 * F.mse_loss(x, (x - g).detach()) * MICRO / BATCH).backward()
        step(student, optimizers[0], dmd.student_optim.max_grad_norm)
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(student.parameters()), 0.01)
        for _ in range(RATIO):
            for _ in range(BATCH // MICRO):
                labels = torch.randint(10, (MICRO,), generator=generator)
                x, s, noise = sample(labels, False), times(), draw()
                x_s = torch.lerp(x, noise, s.view(-1, 1, 1, 1))
                (F.mse_loss(fake(x_s, s, labels), noise - x) * MICRO / BATCH).backward()
            step(fake, optimizers[1], dmd.fake_score_optim.max_grad_norm)

    return cycle


def bench_time(job: train_dmd.Job, world: World, rounds: int) -> list[Row]:
    run = train_dmd.build_run(job, world, logging.getLogger("bench"))
    plain, ours = turns_s([straight(job), lambda: train_dmd.train_cycle(run)], rounds)
    pairs = sorted(second / first for first, second in zip(plain, ours))
    size = sum(p.numel() for p in run.roles["student"].module.parameters()) / 1e6
    return [Row(f"DMD cycle: time, {size:.1f}M parameters, batch {BATCH}, 1:{RATIO}, {STEPS} steps",
                "straight torch without the runtime", min(ours) / min(plain),
                f"{min(ours):.3f} s / {min(plain):.3f} s; median of pairs {pairs[len(pairs) // 2]:.3f}", "<= 1.05")]


def build_and_cycle(job: train_dmd.Job, world: World) -> train_dmd.Run:
    run = train_dmd.build_run(job, world, logging.getLogger("bench"))
    train_dmd.train_cycle(run)
    return run


def bench_memory(folder: Path, hidden: int, depth: int, world: World) -> list[Row]:
    small = ("dmd.student_micro_batch_size_per_gpu=4", "dmd.fake_score_micro_batch_size_per_gpu=4",
             "dmd.activation_checkpointing=true")
    shared = ("dmd.role_storage=shared_base_adapters", "lora.rank=16")
    four, one = (peak_extra_bytes(lambda: build_and_cycle(write_job(folder, hidden, depth, *overrides), world))
                 for overrides in (small, small + shared))
    return [Row("DMD cycle: peak memory, one base with three adapters of rank 16", "student, teacher, fake and EMA",
                one / four, f"{one / 1e6:.0f} MB / {four / 1e6:.0f} MB", "<= 0.45")]


def bench(hidden: int, depth: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        world = start(plan_ranks(1, 1, []), torch.device("cpu"), 60)
        return (bench_time(write_job(Path(place), hidden, depth), world, rounds)
                + bench_memory(Path(place), hidden, depth, world))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print_rows(bench(args.hidden, args.depth, args.rounds))
