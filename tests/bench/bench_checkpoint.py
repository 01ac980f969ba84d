# SPDX-License-Identifier: Apache-2.0
"""How long training stands still for a checkpoint: saved in the background, and saved while it waits.

    python tests/bench/bench_checkpoint.py                       # 512 MB on one rank, then on two: 2 minutes
    python tests/bench/bench_checkpoint.py --megabytes 2000 --folder /scratch

A loop of matrix products, as long as a background save needs, stands for training. Background: the time inside
`Saver.start` and in all `poll`s until nothing is in flight. Synchronous: `start` and `finish`. Rounds of the two
alternate and the median of each counts; `unchecked` is a synchronous save that does not read its file again.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from distill_core import checkpoint
from distill_core.checkpoint import Saver

GOAL = 0.2


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def make_state(megabytes: int, world_size: int) -> dict[str, Tensor]:
    """Weights and two moments of layers of 4 MB, sharded over the ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    rows = 1024 // world_size
    return {f"{kind}.{index}": DTensor.from_local(torch.randn(rows, 1024), mesh, (Shard(0),), run_check=False)
            for index in range(megabytes // 12) for kind in ("weight", "exp_avg", "exp_avg_sq")}


def train_step(a: Tensor) -> None:
    for _ in range(4):
        a @ a
    dist.all_reduce(torch.zeros(1))  # as the gradients' reduction: no rank is ahead of the others at the boundary


def background(saver: Saver, step: int, state: dict[str, Tensor], a: Tensor) -> dict[str, float]:
    """Seconds in start and polls, the longest poll, and a step of training meanwhile."""
    start_s = seconds(lambda: saver.start(step, state, {"step": step}))
    polls, steps, in_flight = [], [], True
    while in_flight:
        steps.append(seconds(lambda: train_step(a)))
        began = time.perf_counter()
        in_flight = saver.poll()
        polls.append(time.perf_counter() - began)
    return {"start": start_s, "polls": sum(polls), "stall": start_s + sum(polls),
            "step while saving": statistics.median(steps), "lasts": sum(steps) + sum(polls)}


def synchronous(saver: Saver, step: int, state: dict[str, Tensor]) -> float:
    return seconds(lambda: (saver.start(step, state, {"step": step}), saver.finish()))


def unchecked(saver: Saver, step: int, state: dict[str, Tensor]) -> float:
    check, checkpoint._check_file = checkpoint._check_file, lambda path, **record: None
    try:
        return synchronous(saver, step, state)
    finally:
        checkpoint._check_file = check


def bench(rank: int, world_size: int, root: Path, megabytes: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds, in seconds; the first round, whose copy is made of new memory, does not count."""
    torch.manual_seed(0)
    state, a = make_state(megabytes, world_size), torch.randn(512, 512)
    saver = Saver(root, group=dist.group.WORLD, keep_last=1)
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        values = background(saver, 3 * turn + 1, state, a)
        values["synchronous"] = synchronous(saver, 3 * turn + 2, state)
        values["synchronous, unchecked"] = unchecked(saver, 3 * turn + 3, state)
        values["step alone"] = statistics.median(seconds(lambda: train_step(a)) for _ in range(10))
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values[1:]) for name, values in found.items()} | {"bytes": saver.snapshot_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=516, help="size of the whole state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write (default: the folder for temporary files)")
    args = parser.parse_args()
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            values = run_ranks(lambda rank: bench(rank, world_size, Path(folder), args.megabytes, args.rounds),
                               world_size, timeout_s=600)[0]
        print(f"\n{world_size} rank(s), {values.pop('bytes') / 1e6:.0f} MB copied on each, {args.rounds} rounds")
        for name, value in values.items():
            print(f"  {name:24} {1000 * value:8.1f} ms")
        ratio, other = (values["stall"] / values[name] for name in ("synchronous", "synchronous, unchecked"))
        print(f"  stall / synchronous = {ratio:.3f} (goal <= {GOAL}: {'reached' if ratio <= GOAL else 'MISSED'}); "
              f"against an unchecked one {other:.3f}")


if __name__ == "__main__":
    main()
