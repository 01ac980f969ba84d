# SPDX-License-Identifier: Apache-2.0
"""The README's first command as it is shipped: real torchrun, the shipped models, the promised gain - and its control."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill_core import config as cfg
from distill_core.build import load_lm
from distill_core.data import answer_matches, load_tokenizer, read_prompts
from distill_core.generate import generate
from distill_core.metrics import read_jsonl

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
CONFIG = cfg.load(ROOT / "configs/quickstart.yaml")


def quickstart(tmp_path: Path, *overrides: str) -> tuple[dict, dict, str]:
    """First and last evaluation, and the terminal, of launch/quickstart.sh in this environment."""
    done = subprocess.run(["bash", str(ROOT / "launch/quickstart.sh"), f"run_root={tmp_path}", *overrides], cwd=tmp_path,
                          env=os.environ | {"VENV": sys.prefix}, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    evals = [line for line in read_jsonl(tmp_path / "quickstart/metrics.jsonl") if line["kind"] == "eval"]
    return evals[0], evals[-1], done.stdout


def test_the_student_gains_what_the_readme_promises(tmp_path):
    """Catches an example that runs but does not learn: at least +20 points exact match, held-out KL at most a third."""
    first, last, shown = quickstart(tmp_path)
    assert 0.10 <= first["eval/exact_match"] <= 0.60, "room above, and not from nothing"
    assert last["eval/exact_match"] >= first["eval/exact_match"] + 0.20
    assert last["eval/reverse_kl_full"] <= first["eval/reverse_kl_full"] / 3
    assert "eval/exact_match" in shown and "start-up probe passed" in shown
    assert (tmp_path / "quickstart/report.html").stat().st_size > 10_000


def test_a_student_that_teaches_itself_gains_nothing(tmp_path):
    """The control: what improves must come from the teacher, not from sampling, the data or the answers."""
    first, last, _ = quickstart(tmp_path, f"teacher.path={CONFIG.student.path}", "max_steps=60")
    assert abs(last["eval/exact_match"] - first["eval/exact_match"]) < 0.03 or \
        last["eval/exact_match"] < first["eval/exact_match"]
    assert first["eval/reverse_kl_full"] < 1e-6


def test_the_teacher_is_right_on_the_held_out_prompts():
    """Catches a teacher that has not learned the task; its answers are greedy, as in the evaluation."""
    tokenizer = load_tokenizer(None, "byte")
    prompts, _ = read_prompts(ROOT / CONFIG.data.eval, tokenizer, max_prompt_tokens=16, long_prompts="drop")
    torch.manual_seed(0)
    samples = generate(load_lm(ROOT / CONFIG.teacher.path), [p.ids for p in prompts], temperature=0.0, stop_ids=(256,),
                       max_new_tokens=CONFIG.eval.max_new_tokens, batch_size=64)
    right = [answer_matches(tokenizer.decode(s.tokens), p.answer, CONFIG.eval.answer_pattern)
             for s, p in zip(samples, prompts, strict=True)]
    assert len(right) == CONFIG.eval.num_prompts and sum(right) >= 0.95 * len(right)


def test_evaluation_prompts_are_disjoint_from_training_prompts():
    """Catches a gain that is memory."""
    train, held_out = ([json.loads(line) for line in (ROOT / path).read_text().splitlines()]
                       for path in (CONFIG.data.train[0], CONFIG.data.eval))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == len(held_out) and all(row["answer"] for row in held_out)


def test_digit_students_beat_the_teacher_at_few_steps(tmp_path):
    """Catches a DMD example that runs but does not learn, in 100 of its cycles; FD decides, see the README."""
    done = subprocess.run(["bash", str(ROOT / "launch/quickstart.sh"), "dmd", f"run_root={tmp_path}", "max_cycles=100"],
                          cwd=tmp_path, env=os.environ | {"VENV": sys.prefix}, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {}
    for line in done.stdout.split("acc       FD", 1)[1].splitlines()[1:]:
        *name, acc, fd, swd, mmd2, std = line.split()
        if not name or name[0] not in ("teacher,", "student,"):
            break
        rows[" ".join(name)] = dict(acc=float(acc), fd=float(fd), std=float(std))
    four, one, teacher = rows["student, 4 steps"], rows["student, 1 step"], rows["teacher, 50 steps"]
    assert four["fd"] < rows["teacher, 4 steps"]["fd"] and four["acc"] >= 0.97
    assert abs(four["std"] / teacher["std"] - 1) < 0.08
    assert one["fd"] < rows["teacher, 1 step"]["fd"] / 1.5, "which is where it starts"
    for name in ("student, 4 steps", "student, 1 step", "teacher, 50 steps"):
        assert (tmp_path / "dmd_digits/table" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "dmd_digits/report.html").stat().st_size > 10_000
