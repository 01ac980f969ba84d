# SPDX-License-Identifier: Apache-2.0
"""A handful of real torchrun jobs: the launcher, real processes, real files, signals and failures."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import write_config, write_lm

from distill_core.build import load_lm
from distill_core.export import export_hf
from distill_core.metrics import read_jsonl

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def torchrun(path: Path, num_ranks: int, *overrides: str, script: str = "train_opd.py") -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "--max-restarts=0",
               script, "--config", str(path), *overrides]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def finish(job: subprocess.Popen, timeout_s: float = 120) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return job.returncode, out, err


def test_a_real_job_trains_and_exports_what_transformers_loads(tmp_path):
    """Catches anything that only a real launch shows, and an export that another library reads differently."""
    transformers = pytest.importorskip("transformers")
    code, out, err = finish(torchrun(write_config(tmp_path, eval__every=0, data__eval=None), 3))
    assert code == 0, err[-3000:]
    assert "start-up probe passed" in out and "done at step 6: 6 updates, 0 skipped" in out
    run_dir = tmp_path / "runs/tiny"
    assert (run_dir / "DONE").exists() and len([x for x in read_jsonl(run_dir / "metrics.jsonl") if x["kind"] == "train"]) == 6
    export_hf(run_dir / "checkpoints/step_00000006", tmp_path / "export", role="student")
    ours, theirs = load_lm(tmp_path / "export"), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokens = torch.randint(0, 257, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.lm_head(ours(tokens)), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
        before = load_lm(tmp_path / "student")
        assert (ours.lm_head(ours(tokens)) - before.lm_head(before(tokens))).abs().max() > 1e-3, "the student has learned"


def test_sigterm_checkpoints_and_the_same_command_continues(tmp_path):
    """Catches a preempted job that loses its steps or leaves its teacher ranks behind."""
    path = write_config(tmp_path, max_steps=100000, checkpoint__every=0, eval__every=0, data__eval=None)
    job = torchrun(path, 3)
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count('"train"') >= 3):
        assert job.poll() is None and time.monotonic() < deadline, finish(job)
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    code, out, err = finish(job, 60)
    assert (tmp_path / "runs/tiny/PREEMPTED").exists(), (out[-2000:], err[-2000:])
    steps = [line["step"] for line in read_jsonl(metrics) if line["kind"] == "train"]
    saved = sorted((tmp_path / "runs/tiny/checkpoints").glob("step_*"))[-1]
    assert saved.name == f"step_{steps[-1]:08d}"
    code, out, err = finish(torchrun(path, 3, f"max_steps={steps[-1] + 2}"))
    assert code == 0 and f"resumed from {saved}" in out, err[-2000:]
    resumed = [line["step"] for line in read_jsonl(metrics) if line["kind"] == "train"]
    assert resumed == list(range(1, steps[-1] + 3)), "no step twice, none missing"


def test_a_teacher_rank_that_fails_ends_the_job_with_its_message(tmp_path):
    """Catches students that wait for ever, and a cause that drowns in the launcher's own output."""
    path = write_config(tmp_path, topology__timeout_s=10)
    write_lm(tmp_path / "broken", seed=2)
    shard = sorted((tmp_path / "broken").glob("model-*"))[-1]
    raw = bytearray(shard.read_bytes())
    raw[-4:] = b"\x00\x00\xc0\x7f"  # a NaN in fp32
    shard.write_bytes(raw)
    began = time.monotonic()
    code, out, err = finish(torchrun(path, 3, f"teacher.path={tmp_path / 'broken'}"))
    assert code != 0 and time.monotonic() - began < 60
    assert "error: rank 2 (teacher)" in err and "holds NaN or infinity" in err
    assert "holds NaN or infinity" in (tmp_path / "runs/tiny/error.txt").read_text()


def test_a_bad_config_under_torchrun_is_the_first_line(tmp_path):
    """Catches a user's typo shown as three tracebacks."""
    path = write_config(tmp_path)
    code, out, err = finish(torchrun(path, 2, "optim.lrr=1"))
    assert code != 0
    lines = [line for line in err.splitlines() if line and not line.startswith(("W", "*"))]
    assert lines[0].startswith("error: rank 0") and "optim.lr" in lines[0]
    assert 'train_opd.py", line' not in err, "a traceback of ours"
    code, out, err = finish(torchrun(path, 2, "loss.top_k=999"))
    assert code != 0 and "loss.top_k: 999" in (tmp_path / "runs/tiny/error.txt").read_text()


def test_one_process_without_torchrun(tmp_path):
    """Catches a script that cannot be stepped through in a debugger."""
    path = write_config(tmp_path, topology__teacher_ranks=0, max_steps=1, eval__every=0, data__eval=None)
    done = subprocess.run([sys.executable, "train_opd.py", "--config", str(path)], cwd=ROOT, text=True, capture_output=True,
                          env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}, timeout=120)
    assert done.returncode == 0 and "done at step 1" in done.stdout, done.stderr[-2000:]
    manifest = json.loads((tmp_path / "runs/tiny/checkpoints/step_00000001/manifest.json").read_text())
    assert manifest["state"]["roles"]["student"]["successes"] == 1
