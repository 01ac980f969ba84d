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
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences the profiler, before it is loaded
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

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


def bench_time(job: train_dmd.Job, world: World, rounds: int) -> None:
    run = train_dmd.build_run(job, world, logging.getLogger("bench"))
    sides, best = [straight(job), lambda: train_dmd.train_cycle(run)], [[], []]
    for _ in range(rounds + 1):
        for side, seconds in zip(sides, best):
            started = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - started)
    plain_s, ours_s = (min(seconds[1:]) for seconds in best)
    ratios = sorted(ours / plain for plain, ours in zip(*(seconds[1:] for seconds in best)))
    print(f"one cycle, {sum(p.numel() for p in run.roles['student'].module.parameters()) / 1e6:.1f}M parameters, batch "
          f"{BATCH}, 1:{RATIO}, {STEPS} steps")
    print(f"  time            {ours_s / plain_s:6.3f} x   [median of pairs {ratios[len(ratios) // 2]:.3f}]   "
          f"{ours_s:.3f} s / {plain_s:.3f} s   (reach 1.05)")


def peak_bytes(job: train_dmd.Job, world: World) -> int:
    """Highest sum of live CPU allocations over building the roles and a cycle."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run = train_dmd.build_run(job, world, logging.getLogger("bench"))
        train_dmd.train_cycle(run)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def bench_memory(folder: Path, hidden: int, depth: int, world: World) -> None:
    small = ("dmd.student_micro_batch_size_per_gpu=4", "dmd.fake_score_micro_batch_size_per_gpu=4",
             "dmd.activation_checkpointing=true")
    four = peak_bytes(write_job(folder, hidden, depth, *small), world)
    one = peak_bytes(write_job(folder, hidden, depth, *small, "dmd.role_storage=shared_base_adapters", "lora.rank=16"),
                     world)
    print("one cycle, peak memory: shared base with three adapters of rank 16 against student, teacher, fake and EMA")
    print(f"  memory          {one / four:6.3f} x   {one / 1e6:.0f} MB / {four / 1e6:.0f} MB   (reach 0.45)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as place:
        bench_world = start(plan_ranks(1, 1, []), torch.device("cpu"), 60)
        bench_time(write_job(Path(place), args.hidden, args.depth), bench_world, args.rounds)
        bench_memory(Path(place), args.hidden, args.depth, bench_world)
