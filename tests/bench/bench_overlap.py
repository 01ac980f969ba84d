# SPDX-License-Identifier: Apache-2.0
"""Step time of one student and one teacher rank against what the busier of the two computes.

    python tests/bench/bench_overlap.py                # a minute
    python tests/bench/bench_overlap.py --scale 4      # shorter answers, for a look

Random models, one thread a rank, answers of uneven length that are decoded eight at a time. From the metrics of
train_opd.py: the student's busy time is sampling and training without the wait; the teacher's is what it computed. The
control sends all requests after sampling, in turns with the real thing; the medians count.
"""
from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from timing import Row, print_rows

import torch
from ranks import run_ranks
from tiny import write_lm, write_prompts

import train_opd
from distill_core import config as cfg
from distill_core.topology import make_groups

VOCAB = 4096
STOP_IDS = tuple(range(64))  # a random model samples one of them after some 64 tokens
TIMES = ("step", "roll", "train", "teacher_wait", "teacher_busy")


def write_job(folder: Path, scale: int) -> Path:
    """The student computes for a second or two a step, the teacher for somewhat less."""
    for name, width, heads in (("student", 256, 4), ("teacher", 512, 8)):
        write_lm(folder / name, scale=0.02, vocab_size=VOCAB, hidden_size=width, intermediate_size=3 * width,
                 num_hidden_layers=4, num_attention_heads=heads, num_key_value_heads=heads // 2)
    write_prompts(folder / "prompts.jsonl", 64)
    tree = {"job": "opd", "name": "bench", "run_root": str(folder / "runs"), "max_steps": 1000, "device": "cpu",
            "student": {"path": str(folder / "student")}, "teacher": {"path": str(folder / "teacher")},
            "topology": {"teacher_ranks": 1, "timeout_s": 120},
            "data": {"train": str(folder / "prompts.jsonl"), "tokenizer": "byte"},
            "rollout": {"max_new_tokens": 96 // scale, "batch_size": 8, "stop_ids": STOP_IDS},
            "train": {"prompts_per_step": 32, "micro_batch_tokens": 256}, "eval": {"every": 0},
            "metrics": {"mass_every": 0}, "probe": {"enabled": False}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


def measure(rank: int, path: Path, rounds: int) -> dict[bool, dict[str, float]] | None:
    """Medians of TIMES with (True) and without overlap on the student's rank; None on the teacher's."""
    job = train_opd.prepare(cfg.load(path), 2, 2)
    world = make_groups(job.plan, torch.device("cpu"), job.config.topology.timeout_s)
    if not world.is_student:
        return train_opd.serve_teacher(job, world)
    run = train_opd.build_student(job, world, logging.getLogger("bench"))
    run.teachers = train_opd.connect_teachers(job, world, probing=False)
    start_sampling = train_opd.start_sampling

    def after_sampling(*args) -> Iterator[tuple[int, train_opd.Sample]]:
        return iter(list(start_sampling(*args)))

    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(rounds + 1):
        for overlaps, sampling in ((True, start_sampling), (False, after_sampling)):
            with patch.object(train_opd, "start_sampling", sampling):
                found[overlaps].append(train_opd.step_once(run, train_opd.roll(run), 0))
    run.teachers.stop()
    return {overlaps: {name: statistics.median(values[f"time/{name}_s"] for values in steps[1:]) for name in TIMES}
            for overlaps, steps in found.items()}


def bench(rounds: int, scale: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(Path(folder), scale)
        found = run_ranks(partial(measure, path=path, rounds=rounds), 2, timeout_s=120)[0]
    return [row_of(found[True], "teacher ranks: step time", "<= 1.15"),
            row_of(found[False], "control, all requests after sampling: step time", "")]


def row_of(times: dict[str, float], what: str, reach: str) -> Row:
    student_s, teacher_s = times["roll"] + times["train"], times["teacher_busy"]
    return Row(what, "max(student busy, teacher busy)", times["step"] / max(student_s, teacher_s),
               f"{times['step']:.2f} s / student {student_s:.2f} s (sampling {times['roll']:.2f}, training "
               f"{times['train']:.2f}), teacher {teacher_s:.2f} s; waited {times['teacher_wait']:.2f} s", reach)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=int, default=1, help="divide the answers' length by this")
    args = parser.parse_args()
    print_rows(bench(args.rounds, args.scale))
