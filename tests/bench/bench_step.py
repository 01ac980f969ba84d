# SPDX-License-Identifier: Apache-2.0
"""Samples/s of a whole OPD step (sampling, teacher, loss, backward, AdamW) against TRL's DistillationTrainer.

    python tests/bench/bench_step.py .cache/smollm2 --trl-python OTHER_VENV/bin/python          # 2 to 3 minutes
    python tests/bench/bench_step.py .cache/smollm2 --prompts 4 --new-tokens 12 --rounds 1       # for a look

Both sides sample from the same student at temperature 1, get the same chat prompts in every step, with responses of the
same lengths (from 8 to --new-tokens evenly; --equal: all the longest), compute in fp32, use all cores, and take turns
step by step; the fastest step of each counts.
Ours is one process with the teacher inline or, with --ranks 2, a student and a teacher rank that share the threads.
One step in ten looks at the teacher's whole vocabulary (metrics.mass_every by default): both kinds are measured, and
weighted so.
TRL's settings: trl_steps.py. The losses differ as the two programs do: ours looks at 16 ids, TRL's at the vocabulary.
"""
from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from timing import Row, print_rows, seconds_of

import torch
from ranks import run_ranks

import train_opd
from distill_core import config as cfg
from distill_core.generate import Engine
from distill_core.topology import make_groups

PROMPTS = HERE.parent / "real_model/prompts_train.jsonl"
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # of our job, not of the peer's


class Peer:
    """TRL in a process of its own, which makes one step when asked to."""

    def __init__(self, python: str, arguments: list[str], threads: int) -> None:
        alone = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, str(HERE / "trl_steps.py"), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self.errors, env=alone | {"OMP_NUM_THREADS": str(threads)})

    def step(self) -> tuple[float, int]:
        """Seconds, and tokens of all its steps so far."""
        print(file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().split()
        if not answer:
            self.errors.seek(0)
            raise RuntimeError(f"TRL has ended: {self.errors.read()[-2000:]}")
        return float(answer[0]), int(answer[1])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def write_job(folder: Path, models: Path, *, num_prompts: int, new_tokens: int, num_ranks: int) -> Path:
    """Every second step looks at the teacher's whole vocabulary."""
    (folder / "prompts.jsonl").write_text("".join(PROMPTS.read_text().splitlines(keepends=True)[:num_prompts]))
    tree = {"job": "opd", "name": "bench", "run_root": str(folder / "runs"), "max_steps": 1000, "device": "cpu",
            "student": {"path": str(models / "student")}, "teacher": {"path": str(models / "teacher")},
            "topology": {"teacher_ranks": num_ranks - 1}, "data": {"train": str(folder / "prompts.jsonl")},
            "rollout": {"max_new_tokens": new_tokens, "batch_size": num_prompts, "stop_ids": []},
            "train": {"prompts_per_step": num_prompts, "micro_batch_tokens": 1024}, "eval": {"every": 0},
            "metrics": {"mass_every": 2}, "probe": {"enabled": False}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


def own_lengths(num_prompts: int, new_tokens: int) -> list[int]:
    """From 8 to `new_tokens`, evenly, long and short ones mixed."""
    shortest = min(8, new_tokens)
    places = [i * 7 % num_prompts for i in range(num_prompts)] if num_prompts % 7 else range(num_prompts)
    return [shortest + (new_tokens - shortest) * i // max(num_prompts - 1, 1) for i in places]


class OwnLengths(Engine):
    """Samples of the length that goes with their prompt."""

    lengths: dict[tuple[int, ...], int]

    def stream(self, prompts, **settings):
        own = [self.lengths[tuple(prompt)] for prompt in prompts]
        return super().stream(prompts, **(settings | {"max_new_tokens": own}))


def match(rank: int, path: Path, num_ranks: int, threads: int, rounds: int, trl: str | None,
          lengths: list[int]) -> dict[str, float] | None:
    """Fastest seconds of "mass", "plain" and "trl" steps on the student's rank; None on the teacher's."""
    torch.set_num_threads(max(threads // num_ranks, 1))
    job = train_opd.prepare(cfg.load(path), num_ranks, num_ranks)
    world = make_groups(job.plan, torch.device("cpu"), job.config.topology.timeout_s)
    if not world.is_student:
        return train_opd.serve_teacher(job, world)
    run = train_opd.build_student(job, world, logging.getLogger("bench"))
    run.teachers = train_opd.connect_teachers(job, world, probing=False)
    run.engine = OwnLengths(run.replica)
    run.engine.lengths = {tuple(prompt.ids): length for prompt, length in zip(job.train, lengths, strict=True)}
    config = job.config
    arguments = [config.student.path, config.teacher.path, config.data.train[0], ",".join(map(str, lengths))]
    peer = Peer(trl, arguments, threads) if trl else None
    times = take_turns(run, peer, rounds)
    run.teachers.stop()
    if peer:
        peer.close()
    return {name: min(seconds[1:]) for name, seconds in times.items() if seconds}


def take_turns(run: train_opd.Run, peer: Peer | None, rounds: int) -> dict[str, list[float]]:
    """Seconds of "mass", "plain" and "trl" steps; the first one of each is a warm-up."""
    times: dict[str, list[float]] = {"mass": [], "plain": [], "trl": []}
    expected = sum(len(prompt.ids) + run.engine.lengths[tuple(prompt.ids)] for prompt in run.job.train)
    for turn in range(rounds + 1):
        for name in ("mass", "plain"):  # mass_every is 2
            times[name].append(seconds_of(lambda: train_opd.step_once(run, train_opd.roll(run), 0)))
        if peer:
            seconds, seen = peer.step()
            assert seen == expected * (turn + 1), f"TRL has seen {seen} tokens, we {expected * (turn + 1)}"
            times["trl"].append(seconds)
    return times


def bench(models: Path, *, num_ranks: int, num_prompts: int, new_tokens: int, rounds: int, threads: int,
          trl: str | None, equal: bool = False) -> list[Row]:
    """num_ranks: 1, the teacher inline, or 2. trl: an interpreter that has it; None leaves the peer out."""
    lengths = [new_tokens] * num_prompts if equal else own_lengths(num_prompts, new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(Path(folder), models, num_prompts=num_prompts, new_tokens=new_tokens, num_ranks=num_ranks)
        values = run_ranks(partial(match, path=path, num_ranks=num_ranks, threads=threads, rounds=rounds, trl=trl,
                                   lengths=lengths), num_ranks, timeout_s=600)[0]
    ours_s, trl_s = 0.9 * values["plain"] + 0.1 * values["mass"], values.get("trl")
    ours = f"{num_prompts / ours_s:.2f} samples/s ({values['plain']:.2f} s a step, with masses {values['mass']:.2f} s)"
    theirs = f"{num_prompts / trl_s:.2f} samples/s ({trl_s:.2f} s a step)" if trl else "TRL is not installed"
    sides = ("teacher inline", "a student and a teacher rank")[num_ranks - 1]
    told = f"{new_tokens} tokens each" if equal else f"own lengths {min(lengths)}-{max(lengths)}"
    return [Row(f"whole OPD step, SmolLM2-135M, {num_prompts} prompts, {told}, fp32, {threads} threads, {sides}: "
                "samples/s", "TRL DistillationTrainer", trl_s / ours_s if trl else None,
                f"{ours} / {theirs}", ">= 2.0")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="folder with student/ and teacher/, of real_model/make_smollm2.py")
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL (default: TRL is left out)")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="2: the teacher has a rank of its own")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96, help="of the longest response")
    parser.add_argument("--equal", action="store_true", help="all responses are as long as the longest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    print_rows(bench(args.models.resolve(), num_ranks=args.ranks, num_prompts=args.prompts, new_tokens=args.new_tokens,
                     rounds=args.rounds, threads=args.threads, trl=args.trl_python, equal=args.equal))
