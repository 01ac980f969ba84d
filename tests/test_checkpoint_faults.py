# SPDX-License-Identifier: Apache-2.0
"""Fault campaign on checkpoints, in process: after every injected fault a whole checkpoint is found and saving goes on.

Each test prints how many faults it has tried: pytest -rP tests/test_checkpoint_faults.py | grep tried
"""
from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_checkpoint import assert_resumes, outcome, save_steps, sharded, values

from distill_core import checkpoint as checkpoint_module
from distill_core.checkpoint import Saver, find_latest, open_checkpoint

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "replace", "unlink", "rmdir")
ENOSPC, EIO = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")


@pytest.fixture
def no_sync(monkeypatch):
    """Thousands of real ones would be the time of the disk; where they are missing, another test says."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Crash(BaseException):
    """Death of the process: not an Exception, so that no handler of the code can take it for an error."""


@contextmanager
def fault_at(count: int, error: BaseException) -> Iterator[list[str]]:
    """The count-th call that changes files fails, a write half way; after a Crash all later ones do. Logs the calls."""
    calls: list[str] = []

    def wrap(name: str, real):
        def call(*args, **kwargs):
            calls.append(name)
            dead = isinstance(error, Crash) and len(calls) > count
            if len(calls) != count and not dead:
                return real(*args, **kwargs)
            if name == "write" and not dead:
                real(args[0], args[1][:len(args[1]) // 2])
            if name == "close":
                with suppress(OSError):  # closed already, where clean-up code closes it again
                    real(*args, **kwargs)  # as the kernel does for a dead process
            raise error
        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in CALLS:
            monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def prepare(root: Path, scene: str) -> None:
    """Steps 1 and 2 and what dead runs leave; step 3 in ruins where the scene says so."""
    if scene == "first save":
        return
    save_steps(root, 1, 2)
    shutil.copytree(root / "step_00000002", root / ".tmp-step_00000003-0123abcd")
    (root / ".tmp-latest-0123abcd").write_text("step_0")
    if scene == "ruins":
        shutil.copytree(root / "step_00000002", root / "step_00000003")


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if "unverified" not in path.name}


def assert_whole(root: Path) -> int:
    """The step that a new start would resume, 0 if there is none; what the hint names is whole, too."""
    found = find_latest(root)
    if found is None:
        return 0
    assert_resumes(root, found.step)
    if (root / "latest").exists():
        open_checkpoint(root / (root / "latest").read_text().strip())
    return found.step


def assert_goes_on(root: Path) -> None:
    """The next run saves, and clears what the dead one left."""
    save_steps(root, 3, 4, keep_last=2)
    assert_resumes(root, 4)
    assert names_in(root) - {"step_00000002"} == {"latest", "step_00000003", "step_00000004"}


# --- a fault at every call ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scene", ["first save", "third save", "ruins"])
@pytest.mark.parametrize("error", [Crash(), ENOSPC, EIO], ids=["crash", "ENOSPC", "EIO"])
def test_a_fault_at_any_call_leaves_a_whole_checkpoint(tmp_path, no_sync, scene, error):
    """Catches any order of writing, renaming and removing in which some instant leaves nothing, or half, to resume; an
    error that is swallowed before the step is complete; rubbish that nobody clears."""
    outcomes, failed = [], []
    for count in range(1, 1000):
        root = tmp_path / f"{count}"
        prepare(root, scene)
        with fault_at(count, error) as calls:
            ended = outcome(lambda: save_steps(root, 3, keep_last=2))
        if len(calls) < count:
            break
        outcomes.append(assert_whole(root))
        failed.append(ended != "done")
        assert failed[-1] or outcomes[-1] == 3, f"call {count}, {calls[count - 1]}: no error, yet no step 3"
        assert_goes_on(root)
        shutil.rmtree(root)
    old = 0 if scene == "first save" else 2
    assert set(outcomes) == {old, 3} and len(outcomes) > 15
    if isinstance(error, Crash):
        assert all(failed) and outcomes == sorted(outcomes)
    else:  # once the step is published, errors of the hint and of removals only warn
        assert not all(failed) and ended == "done"
    print(f"{scene}, {error!r}: {len(outcomes)} tried")


def test_losing_what_was_not_synced_leaves_a_whole_checkpoint(tmp_path, monkeypatch, no_sync):
    """Catches a missing fsync: at a power failure, files that were not synced come back empty."""
    num_tried = lost = 0
    for count in range(1, 1000):
        root = tmp_path / f"{count}"
        save_steps(root, 1, 2)
        with fault_at(count, Crash()), pytest.MonkeyPatch.context() as inner:
            unsynced = track_unsynced(inner)
            ended = outcome(lambda: save_steps(root, 3, keep_last=1))
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in unsynced:
                path.write_bytes(b"")
                lost += 1
        if ended == "done":
            break
        assert assert_whole(root) >= 2
        num_tried += 1
    assert num_tried > 15 and lost > 3
    monkeypatch.setattr(checkpoint_module, "_write_file", unsynced_write)  # negative control
    with pytest.MonkeyPatch.context() as inner:
        unsynced = track_unsynced(inner)
        save_steps(tmp_path / "control", 3)
    assert any(path.stat().st_ino in unsynced for path in (tmp_path / "control/step_00000003").iterdir())
    print(f"power failure: {num_tried} tried")


def track_unsynced(monkeypatch) -> set[int]:
    """Inodes of files that were created and not synced since."""
    inodes: set[int] = set()
    real_open, real_sync = os.open, os.fsync

    def spy_open(path, flags, *args, **kwargs):
        descriptor = real_open(path, flags, *args, **kwargs)
        if flags & os.O_CREAT:
            inodes.add(os.fstat(descriptor).st_ino)
        return descriptor

    def spy_sync(descriptor):
        real_sync(descriptor)
        inodes.discard(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "fsync", spy_sync)
    return inodes


def unsynced_write(path: Path, buffers) -> dict:
    data = b"".join(bytes(buffer) for buffer in buffers)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    os.write(descriptor, data)
    os.close(descriptor)
    return {"size": len(data), "sha256": checkpoint_module.hashlib.sha256(data).hexdigest()}


def test_the_campaign_sees_an_unsafe_order(tmp_path, monkeypatch):
    """Control: a save that writes under the final name is caught by the same harness."""
    monkeypatch.setattr(checkpoint_module, "_probe", lambda *args: None)
    monkeypatch.setattr(checkpoint_module, "_make_staging", lambda root, name: os.mkdir(root / name) or root / name)
    monkeypatch.setattr(checkpoint_module, "_publish", lambda *args: None)
    with fault_at(4, Crash()), pytest.raises(Crash):
        save_steps(tmp_path, 3)
    with pytest.raises(ValueError, match="none of 1 checkpoints can be used"):
        find_latest(tmp_path)


def test_an_error_at_any_call_of_one_rank_reaches_all(tmp_path, no_sync):
    """Catches a hang in the next collective, and ranks that disagree on whether there is a new checkpoint."""
    def one(root: Path, rank: int, failing: int, count: int) -> tuple[bool, bool, str]:
        """(whether the fault was reached, whether this rank saw an error, whether the next save went well)."""
        group = dist.group.WORLD
        mine = {step: {name: sharded(tensor, 2, rank) for name, tensor in values(step).items()} for step in (2, 3)}
        with fault_at(count if rank == failing else 10_000, ENOSPC) as calls:
            first = outcome(lambda: checkpoint_module.save(root, 2, mine[2], {"step": 2}, group=group, keep_last=1))
        reached = torch.tensor([rank == failing and len(calls) >= count])
        dist.broadcast(reached, failing)
        dist.barrier()
        second = outcome(lambda: checkpoint_module.save(root, 3, mine[3], {"step": 3}, group=group, keep_last=2))
        return bool(reached), first != "done", second

    def body(rank: int) -> list[list]:
        rounds = []
        for failing in (0, 1):
            for count in range(1, 1000):
                root = tmp_path / f"{failing}-{count}"
                if rank == 0:
                    save_steps(root, 1)
                dist.barrier()
                reached, *result = one(root, rank, failing, count)
                if not reached:
                    break
                rounds.append([str(root), *result])
        return rounds

    first, second = run_ranks(body, 2)
    assert first == second and len(first) > 20 and any(failed for _, failed, _ in first)
    for root, _, later in first:
        assert later == "done"
        assert_resumes(Path(root), 3)
    print(f"ENOSPC on one of two ranks: {len(first)} tried")


# --- damage ---------------------------------------------------------------------------------------------------------

def damages(good: bytes, generator: random.Random) -> Iterator[bytes | None]:
    """What may become of a file; None: it is gone."""
    yield None
    for length in {0, 1, 7, 8, 100, len(good) // 2, len(good) - 8, len(good) - 1}:
        yield good[:length]
    for number in (1, 4096):
        yield good + bytes(number)
        yield bytes(min(number, len(good))) + good[number:]  # a block of zeros, as after a crash of the file system
    for _ in range(200):
        position, bit = generator.randrange(len(good)), generator.randrange(8)
        yield good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1:]


def test_any_damage_is_found_and_named(tmp_path, caplog):
    """Catches trust in safetensors (which loads flipped data), in sizes, or in a manifest that nothing protects."""
    def body(rank: int) -> None:
        for step in (1, 2):
            mine = {name: sharded(tensor, 2, rank) for name, tensor in values(step).items()}
            checkpoint_module.save(tmp_path, step, mine, {"step": step}, group=dist.group.WORLD)

    run_ranks(body, 2)
    num_tried, generator = 0, random.Random(0)
    for path in sorted((tmp_path / "step_00000002").iterdir()):
        good = path.read_bytes()
        for damaged in damages(good, generator):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            caplog.clear()
            found = find_latest(tmp_path)
            assert found.step == 1 and path.name in caplog.text and "step_00000002" in caplog.text
            num_tried += 1
        path.write_bytes(good)
    assert_resumes(tmp_path, 2)
    print(f"damaged files: {num_tried} tried")


def test_a_write_that_lies_does_not_cost_the_older_checkpoint(tmp_path, monkeypatch):
    """Catches retention by what was meant to be written: the disk has other bytes, and the last good step is gone."""
    save_steps(tmp_path, 1)
    real = os.write

    def lying(descriptor: int, data) -> int:
        return real(descriptor, bytes(data[:-1]) + bytes([data[-1] ^ 1]))

    with monkeypatch.context() as inner:
        inner.setattr(os, "write", lying)
        with pytest.raises(ValueError, match="shard_00000.safetensors: does not have the sha256"):
            save_steps(tmp_path, 2, keep_last=1)
    assert_resumes(tmp_path, 1)
    assert_goes_on(tmp_path)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTEMPTY])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("which", [1, 2])
def test_errors_of_rename(tmp_path, monkeypatch, number, done, which):
    """Catches a step taken for published that is not, and one that is but fails the run. done: the rename happened, and
    its answer was lost; which: the first moves a ruin aside, the second publishes."""
    prepare(tmp_path, "ruins")
    real, calls = os.rename, []

    def rename(source, target) -> None:
        calls.append(target)
        if len(calls) != which or done:
            real(source, target)
        if len(calls) == which:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as inner:
        inner.setattr(os, "rename", rename)
        ended = outcome(lambda: save_steps(tmp_path, 3))
    published = which == 2 and done
    assert (ended == "done") == published
    assert assert_whole(tmp_path) == (3 if published else 2)
    assert_goes_on(tmp_path)


# --- real file systems ----------------------------------------------------------------------------------------------

@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path):
    """Catches a state that only a real ENOSPC leaves: here with every amount of room from none to enough."""
    tensors = {"w": torch.arange(16_384.0)}  # 16 pages

    def attempt(root: Path, step: int) -> str:
        return outcome(lambda: checkpoint_module.save(root, step, tensors, {}, keep_last=2))

    with tmpfs(tmp_path / "small", "512k") as disk:
        assert [attempt(disk / "root", step) for step in (1, 2)] == ["done", "done"]
        ended = []
        while "done" not in ended:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            (disk / "ballast").write_bytes(bytes(free - 4096 * len(ended)))
            ended.append(attempt(disk / "root", 3))
            assert find_latest(disk / "root").step == (3 if ended[-1] == "done" else 2)
            (disk / "ballast").unlink()
        assert len(ended) > 16 and all("No space left" in text for text in ended[:-1])
        assert sum("shard_00000.safetensors" in text for text in ended) > 12, "which file, that is: which disk"
        assert attempt(disk / "root", 4) == "done"
        assert names_in(disk / "root") == {"latest", "step_00000003", "step_00000004"}
    print(f"full disk: {len(ended) - 1} tried")


def test_a_limit_on_file_sizes(tmp_path):
    """Catches what a quota does, without root: writes that end short, then fail."""
    save_steps(tmp_path, 1)
    size = (tmp_path / "step_00000001/shard_00000.safetensors").stat().st_size
    limits = [0, 1, 4, 100, size // 2, size - 1, size]

    def body(rank: int) -> list[str]:
        ended = []
        for limit in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            ended.append(outcome(lambda: save_steps(tmp_path, 2)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert_resumes(tmp_path, 2 if ended[-1] == "done" else 1)
        return ended

    *failed, last = run_ranks(body, 1)[0]
    assert all("File too large" in text for text in failed) and last == "done"
    print(f"limit on file sizes: {len(failed)} tried")


def test_a_read_only_root_is_refused_before_training(tmp_path):
    """Catches hours of training whose first save fails."""
    with tmpfs(tmp_path / "disk", "256k") as disk:
        save_steps(disk / "root", 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for root in (disk / "root", disk / "other"):
            with pytest.raises(ValueError, match="cannot be written there .Read-only file system"):
                Saver(root)
        assert_resumes(disk / "root", 1)


@pytest.mark.parametrize("call, number", [("mkdir", errno.EROFS), ("open", errno.EACCES), ("open", errno.ENOENT)])
def test_a_root_that_one_rank_cannot_write_is_refused_on_all(tmp_path, call, number):
    """Catches a root on a disk of its own node: found at the first save, or never by the rank that waits."""
    def body(rank: int) -> str:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == (0 if call == "mkdir" else 1):
                def refuse(*args, **kwargs):
                    raise OSError(number, os.strerror(number))
                monkeypatch.setattr(os, call, refuse)
            return outcome(lambda: Saver(tmp_path / "root", group=dist.group.WORLD))

    for text in run_ranks(body, 2):
        assert "ValueError" in text and "cannot be written there" in text and os.strerror(number) in text
    assert not list((tmp_path / "root").iterdir()) if (tmp_path / "root").exists() else True


# --- a killed process -----------------------------------------------------------------------------------------------

def test_kill_at_any_time_while_a_save_is_in_flight(tmp_path):
    """Catches what only a real SIGKILL shows: threads, buffers and descriptors that the test process keeps alive."""
    generator, steps = random.Random(0), []
    tensors = {"w": torch.randn(1 << 20)}
    began = time.monotonic()
    checkpoint_module.save(tmp_path, 1, tensors, {"step": 1})
    one_s = time.monotonic() - began
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            save_for_ever(tmp_path, tensors, find_latest(tmp_path).step)
        time.sleep(3 * one_s * generator.random())
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        steps.append(find_latest(tmp_path).step)
    assert steps == sorted(steps) and steps[-1] > 1
    before = find_latest(tmp_path).step
    checkpoint_module.save(tmp_path, before + 1, tensors, {}, keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", f"step_{before:08d}", f"step_{before + 1:08d}"}
    print(f"SIGKILL while a save is in flight: {len(steps)} tried, of which {len(set(steps))} after another save")


def save_for_ever(root: Path, tensors: dict, step: int) -> None:
    """A training loop in a forked child, which must not return into pytest."""
    try:
        torch.set_num_threads(1)
        saver = Saver(root, keep_last=2)
        for step in range(step + 1, 10_000):
            saver.start(step, tensors, {"step": step})
            while saver.published is None or saver.published.name != f"step_{step:08d}":
                saver.poll()
    finally:
        os._exit(1)
