# SPDX-License-Identifier: Apache-2.0
"""How time and memory of one default training step grow with K, V, T and the number of ranks.

    python tests/bench/bench_growth.py                # 1 to 2 minutes
    python tests/bench/bench_growth.py --scale 8      # vocabularies and answers divided by 8, for a look

Small random models, one thread a rank, the teacher inline; everything of `train_opd.train_step` counts: teacher,
forward, loss, backward, clipping, AdamW, the copy to the sampler. Memory is the peak of what a step allocates. With V
only what has the head's own size [V, D] may grow - gradients, the optimizer's pass over the weights, the copy -, so
that a dense head is measured beside it: logits, log_softmax, gather, backward.
"""
from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from timing import Row, fastest_s, peak_extra_bytes, print_rows

import torch
from ranks import run_ranks
from tiny import write_lm, write_prompts

import train_opd
from distill_core import config as cfg
from distill_core.metrics import Metrics
from distill_core.topology import make_groups

WIDTH, NUM_SAMPLES = 64, 8


@dataclass(frozen=True)
class Size:
    K: int = 16
    V: int = 16_384
    T: int = 128  # new tokens of each answer
    ranks: int = 1


class Cost(NamedTuple):
    """Of one step on one rank, the largest over the ranks."""

    seconds: float
    peak_bytes: int


def write_job(folder: Path, size: Size) -> Path:
    for seed, name in enumerate(("student", "teacher")):
        write_lm(folder / name, seed=seed, scale=0.02, vocab_size=size.V, hidden_size=WIDTH, intermediate_size=256,
                 max_position_embeddings=4096)
    write_prompts(folder / "prompts.jsonl", NUM_SAMPLES)
    tree = {"job": "opd", "name": "bench", "run_root": str(folder / "runs"), "max_steps": 1000, "device": "cpu",
            "student": {"path": str(folder / "student")}, "teacher": {"path": str(folder / "teacher")},
            "topology": {"teacher_ranks": 0, "timeout_s": 120}, "loss": {"top_k": size.K},
            "data": {"train": str(folder / "prompts.jsonl"), "tokenizer": "byte"},
            "rollout": {"max_new_tokens": size.T, "stop_ids": []}, "eval": {"every": 0}, "metrics": {"mass_every": 0},
            "train": {"prompts_per_step": NUM_SAMPLES, "micro_batch_tokens": 1 << 20}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


def measure(rank: int, path: Path, size: Size, rounds: int) -> Cost:
    """The same micro-batch is trained on again and again: an inline teacher answers each time."""
    job = train_opd.prepare(cfg.load(path), size.ranks, size.ranks)
    world = make_groups(job.plan, torch.device("cpu"), job.config.topology.timeout_s)
    run = train_opd.build_student(job, world, logging.getLogger("bench"))
    run.teachers = train_opd.connect_teachers(job, world, probing=False)
    batches = train_opd.roll(run).batches[0]

    def step() -> None:
        train_opd.train_step(run, batches, Metrics())

    [seconds] = fastest_s([step], rounds)
    return Cost(seconds, peak_extra_bytes(step))


def cost_of(size: Size, rounds: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(Path(folder), size)
        costs = run_ranks(partial(measure, path=path, size=size, rounds=rounds), size.ranks, timeout_s=120)
    return Cost(*map(max, zip(*costs)))


def dense_head(size: Size, rounds: int) -> Cost:
    """What the head alone costs where [N, V] exists."""
    hidden_ND = torch.randn(NUM_SAMPLES * size.T, WIDTH, requires_grad=True)
    weight_VD = torch.randn(size.V, WIDTH, requires_grad=True)
    ids_NK = torch.randint(size.V, (NUM_SAMPLES * size.T, size.K))

    def step() -> None:
        torch.log_softmax(hidden_ND @ weight_VD.t(), dim=-1).gather(-1, ids_NK).sum().backward()
        hidden_ND.grad = weight_VD.grad = None

    [seconds] = fastest_s([step], rounds)
    return Cost(seconds, peak_extra_bytes(step))


def growth(name: str, values: Sequence[int], rounds: int, base: Size) -> Row:
    """The ratio is of the times at the last and the first value."""
    sizes = [replace(base, **{name: value}) for value in values]
    costs = [cost_of(size, rounds) for size in sizes]
    measured = listing(costs)
    if name == "V":
        measured += "; a dense head alone " + listing([dense_head(size, rounds) for size in sizes])
        measured += f"; one [V, D] {' / '.join(f'{4e-6 * WIDTH * size.V:.0f}' for size in sizes)} MB"
    return Row(f"training step, time at {name} = {' / '.join(map(str, values))}", f"{name} = {values[0]}",
               costs[-1].seconds / costs[0].seconds, measured)


def listing(costs: Sequence[Cost]) -> str:
    return (f"{' / '.join(f'{cost.seconds:.3f}' for cost in costs)} s, "
            f"{' / '.join(f'{cost.peak_bytes / 1e6:.0f}' for cost in costs)} MB")


def bench(rounds: int, scale: int) -> list[Row]:
    torch.set_num_threads(1)  # as the ranks have: the dense head is measured in this process
    base = Size(V=16_384 // scale, T=128 // scale)
    return [growth("V", [v // scale for v in (8_192, 32_768, 131_072)], rounds, base),
            growth("T", [t // scale for t in (64, 128, 256, 512)], rounds, base),
            growth("K", [4, 16, 64], rounds, base),
            growth("ranks", [1, 2, 4], rounds, replace(base, T=1024 // scale))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="divide vocabularies and answers by this")
    args = parser.parse_args()
    print_rows(bench(args.rounds, args.scale))
