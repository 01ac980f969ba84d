# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with faults in them: ranks killed, stopped, out of memory; signals, NaN storms, full disks, slow loads.

Ranks are real processes (forked_jobs.py). Each fault must end the job within its deadline, with its cause told once;
the next start must continue from a verified checkpoint, to the same numbers as a run in which nothing happened.
The long version is fault_campaign.py.
"""
from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import time

import pytest
import tiny
import tiny_dmd
import torch
from forked_jobs import Job

from distill_core import checkpoint, fsdp, metrics, role, run, safetensors_io, topology

TIMEOUT_S, DEADLINE_S = 10, 60
ROLES = {"opd": ["student", "student", "teacher"], "dmd": ["trainer", "trainer"]}
STEPS = 8
NOISE = ("time", "memory", "tokens_per_s", "samples_per_s")  # prefixes of metrics that no two runs share


def write_config(kind: str, folder, **changes):
    common = {"checkpoint": {"every": 1}, "eval": {"every": 0}, "topology__timeout_s": TIMEOUT_S, **changes}
    if kind == "opd":
        return tiny.write_config(folder, max_steps=STEPS, data__eval=None, probe__enabled=False, **common)
    sizes = {f"dmd__{role}_micro_batch_size_per_gpu": 3 for role in ("student", "fake_score")}
    return tiny_dmd.write_config(folder, max_cycles=STEPS, dmd__fake_update_ratio=1, **sizes, **common)


class Runs:
    """Starts of one run, `name`, of a job."""

    def __init__(self, kind: str, folder, name: str = "tiny", **changes) -> None:
        self.kind, self.folder, self.name, self.num_ranks = kind, folder, name, len(ROLES[kind])
        self.path, self.run_dir = write_config(kind, folder, **changes), folder / "runs" / name

    def start(self, *overrides: str, meddle=lambda rank: None) -> Job:
        return Job(self.kind, ["--config", str(self.path), f"name={self.name}", *overrides], self.num_ranks,
                   self.folder / f"output_{self.name}", meddle=meddle)

    def curve(self) -> dict[int, dict]:
        lines = metrics.read_jsonl(self.run_dir / "metrics.jsonl") if (self.run_dir / "metrics.jsonl").exists() else []
        return {line["step"]: {key: value for key, value in line.items() if not key.startswith(NOISE)}
                for line in lines if line["kind"] == "train"}

    def reach(self, job: Job, step: int) -> None:
        end = time.monotonic() + DEADLINE_S
        while max(self.curve(), default=0) < step:
            if len(job.alive()) < self.num_ranks or time.monotonic() > end:
                job.kill()
                raise AssertionError([job.output(rank)[-2000:] for rank in range(self.num_ranks)])
            time.sleep(0.01)

    def finish(self, *, saved: int = 1) -> dict[int, dict]:
        """The curve after a start to the end, resumed from step `saved` or a later one."""
        job = self.start()
        assert job.wait(DEADLINE_S) == [0] * self.num_ranks, job.output(0)[-3000:]
        assert (self.run_dir / "DONE").exists() and not list(self.run_dir.glob("error.*"))
        [resumed] = re.findall(r"^resumed from .*/step_(\d+)$", job.output(0), flags=re.MULTILINE)
        assert int(resumed) >= saved, job.output(0)[-3000:]
        checkpoint.open_checkpoint(self.run_dir / f"checkpoints/step_{STEPS:08d}")
        return self.curve()

    def assert_failed(self, codes, *, rank: int, kind: str | None, phase: str, text: str) -> None:
        """The one block names the rank; it, or `kind` None: a survivor, has left a record."""
        told = (self.run_dir / "error.txt").read_text()
        assert all(codes) and told.count("error: ") == 1, (codes, told)
        assert told.startswith(f"error: rank {rank} ({ROLES[self.kind][rank]}) ") and text in told, told
        records = {path.name: json.loads(path.read_text()) for path in self.run_dir.glob("error.*.json")}
        if kind is None:
            assert f"error.{rank}.json" not in records, records
            assert all(record["because"] == [rank] for record in records.values()), records
        else:
            own = records.pop(f"error.{rank}.json")
            assert own["kind"] == kind and own["phase"].startswith(phase) and own["step"] >= 1
            assert all(record["because"] == [rank] for record in records.values()), records
        assert not (self.run_dir / "DONE").exists() and not (self.run_dir / "PREEMPTED").exists()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """straight(job): the curve of a run in which nothing happens."""
    @functools.cache
    def curve(kind: str) -> dict[int, dict]:
        runs = Runs(kind, tmp_path_factory.mktemp(kind))
        assert runs.start().wait(DEADLINE_S) == [0] * runs.num_ranks
        assert list(runs.curve()) == list(range(1, STEPS + 1))
        return runs.curve()

    return curve


@pytest.mark.parametrize("kind, victims", [("opd", [2, 1, 0]), ("dmd", [0])])
def test_a_killed_rank_ends_the_job_at_once_and_costs_no_step(tmp_path, straight, kind, victims):
    """Catches survivors that wait for a dead peer, a death that nobody names, and a resume that is not the same run."""
    runs = Runs(kind, tmp_path)
    for turn, rank in enumerate(victims):
        job = runs.start()
        runs.reach(job, 2 * turn + 3)
        os.kill(job.pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        codes = job.wait(DEADLINE_S)
        assert codes[rank] == -signal.SIGKILL and max(job.ended) - killed < TIMEOUT_S
        runs.assert_failed(codes, rank=rank, kind=None, phase="", text="ended without a word (killed")
    assert runs.finish() == straight(kind)


def test_a_stopped_rank_ends_the_others_within_the_timeout(tmp_path):
    """Catches survivors that wait for ever for a peer that is neither dead nor answering, whatever it is to them."""
    victims = {"teacher": 2, "student": 1, "logger": 0}
    runs = {name: Runs("opd", tmp_path, name, topology__timeout_s=6) for name in victims}
    jobs = {name: each.start("max_steps=100000") for name, each in runs.items()}
    for name, rank in victims.items():
        runs[name].reach(jobs[name], 1)
        os.kill(jobs[name].pids[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    for name, rank in victims.items():
        codes = jobs[name].wait(DEADLINE_S, leaving=[rank])
        slowest = max(jobs[name].ended) - stopped
        jobs[name].kill()  # as torchrun does
        assert slowest < 6 + run.GRACE_S + 5, name
        codes[rank] = -signal.SIGKILL
        runs[name].assert_failed(codes, rank=rank, kind=None, phase="", text="did not answer in time (stopped")


def raise_at(owner, name: str, call: int, error: BaseException) -> None:
    """The `call`-th call of owner.name in this process raises."""
    original, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*args, **options)

    setattr(owner, name, counted)


def test_an_exception_and_a_lack_of_memory_are_told_by_the_rank_that_has_them(tmp_path, straight):
    """Catches a cause that drowns in `connection closed`, and an out-of-memory without its place and remedy."""
    runs = Runs("dmd", tmp_path)
    no_room = torch.OutOfMemoryError("no room")
    for call, error, kind, text in ((7, RuntimeError("a bug"), "error", "Traceback"),
                                    (5, no_room, "out of memory", "dmd.student_micro_batch_size_per_gpu")):
        job = runs.start(meddle=lambda rank: rank == 1 and raise_at(torch.optim.AdamW, "step", call, error))
        codes = job.wait(DEADLINE_S)
        runs.assert_failed(codes, rank=1, kind=kind, phase="train", text=text)
        assert f"ends because rank 1 (trainer) failed: {'a bug' if kind == 'error' else 'out'}" in job.output(0)
        assert "Traceback" not in job.output(0)
    assert runs.finish(saved=2) == straight("dmd")


@pytest.mark.parametrize("kind", ROLES)
def test_a_nan_storm_saves_and_fails(tmp_path, straight, kind):
    """Catches a run that skips for days, and one that ends without the state from before the storm."""
    def storm(rank):
        original, calls = role.global_grad_norm, []

        def norm(*args):
            calls.append(1)
            return original(*args) * (float("nan") if len(calls) > 6 else 1.0)

        role.global_grad_norm = norm

    runs = Runs(kind, tmp_path, checkpoint={"every": 1, "max_skips_in_a_row": 2, "keep_last": 99})
    codes = runs.start(meddle=storm).wait(DEADLINE_S)
    told = (runs.run_dir / "error.txt").read_text()
    assert all(codes) and "2 times in a row" in told and "is kept" in told and told.count("error: ") == 1, told
    last = max(runs.curve())
    assert str(runs.run_dir / f"checkpoints/step_{last:08d}") in told
    assert not (runs.run_dir / "PREEMPTED").exists(), "a launch script must not requeue it"
    for bad in range(6 // (1 if kind == "opd" else 2) + 1, last + 1):  # back to before the storm
        (runs.run_dir / f"checkpoints/step_{bad:08d}").rename(tmp_path / f"bad{bad}")
    assert runs.finish() == straight(kind)


def test_every_request_to_stop_is_heard_by_all_and_costs_nothing(tmp_path, straight):
    """Catches a request that one rank keeps to itself, that breaks a save, or that ends as a failure."""
    runs = Runs("dmd", tmp_path)

    def stop_in_save(rank: int) -> None:
        original = os.fsync

        def fsync(descriptor):
            if rank == 0 and list(runs.run_dir.glob("checkpoints/.tmp-step*")):
                os.kill(os.getpid(), signal.SIGTERM)
            return original(descriptor)

        os.fsync = fsync

    def assert_preempted(job: Job, at_least: int) -> int:
        assert job.wait(DEADLINE_S) == [0, 0], job.output(0)[-2000:]
        assert (runs.run_dir / "PREEMPTED").exists() and not (runs.run_dir / "error.txt").exists()
        last = max(runs.curve())
        assert at_least <= last < STEPS
        checkpoint.open_checkpoint(runs.run_dir / f"checkpoints/step_{last:08d}")
        return last

    last = assert_preempted(runs.start(meddle=stop_in_save), 2)
    last = assert_preempted(runs.start("checkpoint.max_minutes=1e-4"), last + 1)
    job = runs.start()
    runs.reach(job, last + 1)
    os.kill(job.pids[1], signal.SIGUSR1)
    last = assert_preempted(job, last + 1)
    (runs.run_dir / "PREEMPTED").unlink()
    (runs.run_dir / "STOP").touch()
    last = assert_preempted(runs.start(), last + 1)
    assert runs.finish(saved=last) == straight("dmd")


def test_a_teacher_rank_passes_a_request_to_stop_on(tmp_path, straight):
    """Catches a signal to a node that only serves: it would be killed, and the steps since the last save lost."""
    runs = Runs("opd", tmp_path)
    job = runs.start("checkpoint.every=0")
    runs.reach(job, 2)
    os.kill(job.pids[2], signal.SIGTERM)
    assert job.wait(DEADLINE_S) == [0, 0, 0], job.output(0)[-2000:]
    assert (runs.run_dir / "PREEMPTED").exists()
    assert runs.finish(saved=max(runs.curve())) == straight("opd")


def test_a_second_signal_ends_a_rank_that_waits_in_a_collective(tmp_path):
    """Catches a job that cannot be ended by hand because Python hears no signal while it waits for a stopped peer."""
    def impatient(rank):
        run.REPEAT_S = 0.5

    runs = Runs("dmd", tmp_path)
    job = runs.start("max_cycles=100000", meddle=impatient)
    runs.reach(job, 1)
    os.kill(job.pids[1], signal.SIGSTOP)
    time.sleep(1)
    first = time.monotonic()
    for _ in range(2):
        os.kill(job.pids[0], signal.SIGTERM)
        time.sleep(0.1)  # an echo of the same request
    time.sleep(0.6)
    assert job.alive() == [0, 1]
    os.kill(job.pids[0], signal.SIGTERM)
    assert job.wait(DEADLINE_S, leaving=[1])[0] == 128 + signal.SIGTERM
    assert job.ended[0] - first < 3 < TIMEOUT_S and "a second signal" in job.output(0)
    job.kill()


def test_a_full_disk_under_the_metrics_ends_all_ranks_at_the_same_step(tmp_path, straight):
    """Catches rank 0 dying alone of what only it writes, and a curve with a hole after the next start."""
    def fill(rank):
        full = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        raise_at(metrics.Journal, "training", 5, full)

    runs = Runs("dmd", tmp_path)
    job = runs.start(meddle=lambda rank: rank == 0 and fill(rank))
    runs.assert_failed(job.wait(DEADLINE_S), rank=0, kind="error", phase="train", text="No space left")
    assert "ends because rank 0 (trainer) failed" in job.output(1)
    assert runs.finish(saved=2) == straight("dmd")


def test_a_rank_without_gradients_has_nothing_to_scale():
    """Catches a rank that holds no row of any trained tensor and dies in an empty foreach call."""
    empty, full = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(2))
    empty.grad, full.grad = torch.zeros(0, 3), torch.full((2,), 3.0)
    fsdp.scale_grads([empty, torch.nn.Parameter(torch.ones(1))], 0.5)
    fsdp.scale_grads([empty, full], 0.5)
    assert full.grad.tolist() == [1.5, 1.5]


def test_a_load_may_take_longer_than_the_timeout(tmp_path):
    """Catches a start that dies because one rank reads its weights from a slower disk; a negative control with it."""
    def slow(rank):
        if rank == 1:
            original = safetensors_io._read_rows
            safetensors_io._read_rows = lambda *args: (time.sleep(0.06), original(*args))[1]

    def slow_and_silent(rank):
        topology.Pulse.beat = lambda self: None
        slow(rank)

    began = time.monotonic()
    runs = [Runs("dmd", tmp_path, name, topology__timeout_s=4) for name in ("slow", "silent")]
    jobs = [each.start("max_cycles=1", meddle=meddle) for each, meddle in zip(runs, (slow, slow_and_silent))]
    patient, silent = (job.wait(DEADLINE_S) for job in jobs)
    assert patient == [0, 0] and time.monotonic() - began > 5, jobs[0].output(0)[-3000:]
    assert all(silent) and "in load" in (runs[1].run_dir / "error.txt").read_text()
