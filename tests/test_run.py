# SPDX-License-Identifier: Apache-2.0
"""The run folder: stop requests, markers, the lock of a running job, how failures are told."""
from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distill_core import checkpoint, run


@pytest.fixture(autouse=True)
def restore_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop_and_its_echo_is_the_same_request(tmp_path, monkeypatch, number):
    """Catches a worker killed without a checkpoint because the signal came directly and again through torchrun."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    stop = run.StopRequest(tmp_path)
    assert not stop.wanted()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert soon(stop.wanted) and exits == []
    monkeypatch.setattr(run, "REPEAT_S", -1.0)  # as if the next one came later
    os.kill(os.getpid(), number)
    assert soon(lambda: exits == [128 + number])


def soon(holds) -> bool:
    """Signals are heard by a thread."""
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_other_signals_and_time_budgets(tmp_path):
    """Catches a stop for a signal that is none, such as the alarm of a library, and a budget in the wrong unit."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    stop = run.StopRequest(tmp_path, max_minutes=0.5 / 60)
    os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(0.1)
    assert not stop.wanted() and soon(stop.wanted)
    assert not run.StopRequest(tmp_path, max_minutes=1.0).wanted()
    signal.signal(signal.SIGALRM, before)


def test_a_stop_file_counts_unless_an_earlier_run_has_obeyed_it(tmp_path):
    """Catches a stop asked for during start-up that the start erases, and an old one that ends every new start."""
    (tmp_path / "STOP").touch()
    run.open_run(tmp_path, "x: 1\n", 0).handlers.clear()
    assert run.StopRequest(tmp_path).wanted()
    (tmp_path / "PREEMPTED").touch()
    (tmp_path / "error.txt").write_text("old")
    (tmp_path / "error.3.json").write_text("old")
    run.open_run(tmp_path, "x: 1\n", 0).handlers.clear()
    assert not run.StopRequest(tmp_path).wanted()
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml", "command.txt", "log_rank0.txt"}


def test_a_stop_is_overtaken_by_a_failure_but_not_by_a_refused_start(tmp_path):
    """Catches a STOP put before a run failed that ends the next one, and a start that trips over a folder's name."""
    (tmp_path / "error.old").mkdir()
    (tmp_path / "error.txt").write_text("a typo")
    (tmp_path / "STOP").touch()
    run.open_run(tmp_path, "x: 1\n", 0).handlers.clear()
    assert run.StopRequest(tmp_path).wanted() and not (tmp_path / "error.txt").exists()
    (tmp_path / "error.1.json").write_text("{}")
    run.open_run(tmp_path, "x: 1\n", 0).handlers.clear()
    assert not run.StopRequest(tmp_path).wanted() and (tmp_path / "error.old").is_dir()


def test_the_death_of_torchrun_is_a_request_to_stop(tmp_path, monkeypatch):
    """Catches ranks that train on unseen, with the GPUs and the lock; also: a run that ends because its shell has."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    alone = run.StopRequest(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    stop = run.StopRequest(tmp_path)
    assert not stop.wanted()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.wanted() and not alone.wanted()


def test_a_second_job_in_the_same_folder_is_refused(tmp_path, monkeypatch):
    """Catches two jobs that overwrite each other's files, and a refused one that writes its error into the other's."""
    monkeypatch.setenv("MASTER_PORT", "1")
    lock = run.lock_run(tmp_path)
    assert not run.used_by_another_job(tmp_path), "it is this job's"
    monkeypatch.setenv("MASTER_PORT", "2")
    with pytest.raises(ValueError, match="another job is running"):
        run.lock_run(tmp_path)
    assert run.used_by_another_job(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert run.used_by_another_job(tmp_path), "the same port, in another job"
    lock.close()
    assert not run.used_by_another_job(tmp_path) and not run.used_by_another_job(tmp_path / "none")
    run.lock_run(tmp_path).close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    """Catches a cluster on which no run starts because its file system has no locks, and a silent lack of them."""
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run.fcntl, "flock", refuse)
    run.lock_run(tmp_path).close()
    assert "warning" in capsys.readouterr().err
    (tmp_path / "log_rank0.txt").touch()
    assert not run._is_gone(tmp_path / "log_rank0.txt"), "nobody knows"
    assert tell(KeyError("w"), 2, tmp_path, capsys).startswith("error: rank 2 (teacher)")
    assert "error: rank 2" in (tmp_path / "error.txt").read_text()


def test_a_lock_that_cannot_be_taken_is_one_line(tmp_path, monkeypatch):
    """Catches a traceback for a full disk or somebody else's folder, and a word left in a folder nobody can read."""
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def foreign(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"\.lock: No space left on device \(check owner and space"):
            run.lock_run(tmp_path)
    run.lock_run(tmp_path).close()
    monkeypatch.setattr(run, "open", foreign, raising=False)
    with pytest.raises(ValueError, match=r"\.lock: Permission denied"):
        run.lock_run(tmp_path)
    assert run.used_by_another_job(tmp_path)
    monkeypatch.setattr(run.Path, "exists", foreign)
    with pytest.raises(ValueError, match="Permission denied .set run_root"):
        run.check_run_dir(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_early(tmp_path):
    """Catches a run that trains for hours and then cannot save."""
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(ValueError, match="not a folder that can be written"):
            run.check_run_dir(bad)
    run.check_run_dir(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


# --- failures -------------------------------------------------------------------------------------------------------

ROLES = ["student", "student", "teacher"]


def tell(error: BaseException, rank: int, folder, capsys, **options) -> str:
    """What the rank says on stderr."""
    try:
        raise error
    except type(error) as raised:
        run.tell_failure(raised, run.Where(rank, ROLES, "train", 7), folder, **options)
    return capsys.readouterr().err


def test_user_errors_are_one_line_and_ours_carry_a_traceback(tmp_path, capsys):
    """Catches a traceback for a typo, a bug told without one or without its place, and one cause told three times."""
    assert tell(ValueError("bad\nvalue"), 1, tmp_path, capsys) == "error: rank 1 (student) in train, step 7: bad value\n"
    again = tell(ValueError("bad value"), 0, tmp_path, capsys)
    assert again.startswith("error: rank 0 (student) in train, step 7: ends too") and again.count("\n") == 1
    ours = tell(KeyError("w"), 2, tmp_path, capsys)
    assert ours.startswith("error: rank 2 (teacher) in train, step 7: 'w'\nTraceback") and "KeyError" in ours
    told = (tmp_path / "error.txt").read_text()
    assert told.count("error: rank") == 2 and "KeyError" in told and "ends too" not in told
    record = json.loads((tmp_path / "error.2.json").read_text())
    assert (record["rank"], record["role"], record["phase"], record["step"]) == (2, "teacher", "train", 7)
    assert record["kind"] == "error" and "KeyError" in record["traceback"] and record["host"] and record["time"]


def test_a_refused_start_is_told_each_time_and_leaves_no_record(tmp_path, capsys):
    """Catches a message swallowed because the same mistake was made before, and files left in a finished run."""
    for _ in range(2):
        for rank in (0, 1):
            run.tell_failure(ValueError("typo"), run.Where(rank), tmp_path)
        first, second = capsys.readouterr().err.splitlines()
        assert first == "error: rank 0 in start-up: typo" and "ends too" in second
    assert [p.name for p in tmp_path.iterdir()] == ["error.txt"]


@pytest.mark.parametrize("error", [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory. Tried"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])
def test_memory_errors_come_with_a_remedy(tmp_path, capsys, error):
    """Catches a user left alone with an allocator's message."""
    shown = tell(error, 0, tmp_path, capsys, memory_remedy="lower train.micro_batch_tokens")
    assert "out of memory" in shown and "(lower train.micro_batch_tokens)" in shown
    assert json.loads((tmp_path / "error.0.json").read_text())["kind"] == "out of memory"


def test_a_full_disk_does_not_hide_the_cause(tmp_path, capsys, monkeypatch):
    """Catches an error that is lost because the report of it fails as well."""
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "error.0.json"))

    (tmp_path / "file").write_text("")
    assert "cause" in tell(ValueError("cause"), 0, tmp_path / "file", capsys)
    monkeypatch.setattr(run.Path, "write_text", full)
    shown = tell(OSError(errno.ENOSPC, "No space left on device"), 0, tmp_path, capsys)
    assert "Traceback" in shown and "error.0.json: No space left" in shown


CLOSED = "[/pytorch/gloo/pair.cc:537] Read error [127.0.0.1]:2: Connection reset by peer. This is typically caused by"


def test_a_survivor_names_the_rank_that_failed(tmp_path, capsys):
    """Catches the first cause drowned in the messages of those that merely lost the connection to it."""
    tell(KeyError("w"), 2, tmp_path, capsys)
    for rank, error in enumerate((RuntimeError(CLOSED), RuntimeError("stopped because rank 2 failed (its own message"))):
        shown = tell(error, rank, tmp_path, capsys)
        assert shown == f"error: rank {rank} (student) in train, step 7: ends because rank 2 (teacher) failed: 'w'\n"
        assert json.loads((tmp_path / f"error.{rank}.json").read_text())["because"] == [2]
    assert (tmp_path / "error.txt").read_text().count("error: rank") == 1


def test_a_survivor_tells_killed_from_stopped_ranks(tmp_path, capsys, monkeypatch):
    """Catches a job that ends with `connection closed` on every rank and nothing about the one that was killed."""
    monkeypatch.setattr(run, "GRACE_S", 0.2)
    for rank in (1, 2):
        run.open_run(tmp_path, "", rank).handlers.pop().close()
    alive = [subprocess.Popen([sys.executable, "-c", f"""if True:
        import fcntl, time
        file = open({str(tmp_path / f'log_rank{rank}.txt')!r})
        fcntl.flock(file, fcntl.LOCK_SH)
        print(flush=True)
        time.sleep(60)"""], stdout=subprocess.PIPE) for rank in (1, 2)]
    for process in alive:
        process.stdout.readline()
    stuck = tell(RuntimeError(CLOSED), 0, tmp_path, capsys)
    assert stuck.startswith("error: rank 1 (student), rank 2 (teacher) did not answer in time (stopped or stuck), which "
                            "ends rank 0 (student) in train, step 7: Read error [127.0.0.1]:2: Connection reset by peer\n")
    (tmp_path / "error.txt").unlink()
    alive[1].kill()
    alive[1].wait()
    killed = tell(RuntimeError(CLOSED), 0, tmp_path, capsys)
    assert killed.startswith("error: rank 2 (teacher) ended without a word (killed")
    assert json.loads((tmp_path / "error.0.json").read_text())["because"] == [2]
    assert "ends too" in tell(RuntimeError(CLOSED), 1, tmp_path, capsys), "told once"
    alive[0].kill()
    alive[0].wait()


def test_what_other_jobs_have_left_is_no_news_of_this_one(tmp_path, capsys, monkeypatch):
    """Catches a rank that is late blamed as killed, or as failed, because of the files of an earlier start."""
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    monkeypatch.setenv("MASTER_PORT", "1")
    run.open_run(tmp_path, "", 1).handlers.pop().close()
    tell(KeyError("w"), 2, tmp_path, capsys)
    (tmp_path / "error.txt").unlink()
    monkeypatch.setenv("MASTER_PORT", "2")
    late = tell(RuntimeError(CLOSED), 0, tmp_path, capsys)
    assert late.startswith("error: rank 1 (student), rank 2 (teacher) did not answer in time"), late
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "because rank 2 (teacher) failed" in tell(RuntimeError(CLOSED), 0, tmp_path, capsys), "the check's own check"


def test_a_refused_job_leaves_the_other_ones_folder_as_it_was(tmp_path, capsys, monkeypatch):
    """Catches ranks that, having waited in vain for their rank 0, write their failure over that of the running job."""
    monkeypatch.setenv("MASTER_PORT", "1")
    with run.lock_run(tmp_path):
        before = sorted(tmp_path.iterdir())
        monkeypatch.setenv("MASTER_PORT", "2")
        assert "timed out" in tell(dist.DistNetworkError("the client socket has timed out"), 1, tmp_path, capsys)
        assert "'w'" in tell(KeyError("w"), 1, tmp_path, capsys) and sorted(tmp_path.iterdir()) == before
        monkeypatch.setenv("MASTER_PORT", "1")
        tell(KeyError("w"), 1, tmp_path, capsys)
        assert (tmp_path / "error.1.json").exists() and (tmp_path / "error.txt").exists()


def test_a_disk_that_times_out_is_no_lost_rank():
    """Catches peers blamed for a file server: the words are the same, in the error and where ranks agree on it."""
    texts = ("Connection timed out", "Broken pipe", "Connection reset by peer")

    def fails(rank: int) -> list[str]:
        def write() -> None:
            if rank == 1:
                raise OSError(errno.EIO, text)

        kinds = []
        for text in texts:
            try:
                checkpoint._together(write, dist.group.WORLD)
            except Exception as error:
                kinds.append(run.failure_kind(error))
        return kinds

    assert run_ranks(fails, 2) == [3 * ["lost rank"], 3 * ["error"]], "rank 0 says that rank 1 has failed"
    for text in texts:
        assert run.failure_kind(OSError(errno.EIO, text)) == run.failure_kind(BrokenPipeError(text)) == "error"
        assert run.failure_kind(RuntimeError(text)) == "lost rank", "the check's own check"


def end(error: BaseException, folder, monkeypatch) -> list[int]:
    """What `fail` would have ended the process with, in turn."""
    exits = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", exits.append)
        try:
            raise error
        except type(error) as raised:
            with contextlib.suppress(OSError):  # of a full stderr: in earnest nothing comes after _exit
                run.fail(raised, run.Where(0, ROLES, "train", 7), folder)
    return exits


def test_the_end_comes_even_where_the_telling_fails_or_hangs(tmp_path, capsys, monkeypatch):
    """Catches a rank that lives on, and keeps its peers waiting, because its failure could not be told."""
    monkeypatch.setattr(run, "tell_failure", lambda *args, **options: 1 / 0)
    assert end(KeyError("the cause"), tmp_path, monkeypatch) == [1]
    shown = capsys.readouterr().err
    assert "the cause" in shown and "ZeroDivisionError" in shown
    monkeypatch.setattr(run, "tell_failure", lambda *args, **options: time.sleep(0.5))
    monkeypatch.setattr(run, "GRACE_S", 0.1 - 5)
    assert end(KeyError("the cause"), tmp_path, monkeypatch) == [1, 1]


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_cause_is_written_past_a_stopped_writer_and_a_full_terminal(tmp_path, monkeypatch):
    """Catches a wait for ever for a lock, and a cause that is lost with stderr or with an unreadable log."""
    def read_only(path, mode="r", **options):
        if mode == "r+":
            raise OSError(errno.EROFS, "Read-only file system")
        return open(path, mode, **options)

    monkeypatch.setattr(run, "GRACE_S", 0.1)
    monkeypatch.setattr(run, "open", read_only, raising=False)
    monkeypatch.setattr(sys, "stderr", Full())
    with open(tmp_path / "error.txt", "a") as stopped:
        assert run._try_lock(stopped, run.fcntl.LOCK_EX)
        began = time.monotonic()
        assert end(RuntimeError(CLOSED), tmp_path, monkeypatch) == [1] and time.monotonic() - began < 2
    assert "which ends rank 0 (student) in train" in (tmp_path / "error.txt").read_text()


def test_a_start_that_hangs_ends_by_its_deadline_and_one_that_does_not_goes_on(tmp_path):
    """Catches ranks that wait for ever for a store whose process was stopped; and a timer that outlives its block."""
    where = run.Where(1, ["student", "student"])

    def child(block_s: float, then_s: float) -> int:
        pid = os.fork()
        if pid == 0:
            with run.deadline(0.3, "not all ranks have started", where, tmp_path):
                time.sleep(block_s)
            time.sleep(then_s)
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    began = time.monotonic()
    assert child(60, 0) == 1 and time.monotonic() - began < 20
    assert "not all ranks have started" in json.loads((tmp_path / "error.1.json").read_text())["message"]
    assert child(0, 0.6) == 7
