# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: what was started, its logs, stop requests, and how a failure is told.

    runs/NAME/{config.yaml, command.txt, metrics.jsonl, report.html, log_rank*.txt, samples/, checkpoints/}
    STOP      put there by a person or a launch script: checkpoint at the next step boundary and exit
    PREEMPTED, DONE      written last, after the final checkpoint: launch scripts decide on these, not on exit codes
    error.txt            the cause of the last failure, once, with its traceback
    error.RANK.json      what a rank knew when it failed: role, phase, step, kind, message, traceback, host, time

    log = open_run(run_dir, config_text, rank); stop = StopRequest(run_dir, max_minutes=230)
    if stop.wanted(): ...                               # one rank's view: agree on it before acting
    where = Where(rank, roles); where.phase, where.step = "train", 12
    fail(error, where, run_dir)                         # tell_failure and the end: peers see the closed connection
"""
from __future__ import annotations

import argparse
import fcntl
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_S = 5.0
GRACE_S = 2.0  # how long a rank that has lost its peers waits for one of them to say why

# How a broken connection reads: gloo and the store raise plain RuntimeErrors; the last is what topology and checkpoint
# say of another rank's failure. An OSError may read alike (a file on a network disk) and is no lost rank.
LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "imed out",
        "timeout caused pair closure", "NCCL", "stopped because rank")


def parse_args(doc: str) -> argparse.Namespace:
    """The command line of a training script: .config, .overrides, .check, .dry_run."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--check", action="store_true", help="validate config, data and file headers, then exit")
    parser.add_argument("--dry-run", action="store_true", help="build the job on a fake process group, then exit")
    return parser.parse_intermixed_args()


def check_run_dir(run_dir: Path) -> None:
    """ValueError where the folder cannot be made or written to; touches nothing."""
    try:
        place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    except OSError as error:
        raise ValueError(f"{run_dir}: {error.strerror} (set run_root)") from None
    if not place.is_dir() or not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{run_dir}: {place} is not a folder that can be written to (set run_root)")


def lock_run(run_dir: Path) -> TextIO:
    """Hold the returned file open for the life of the run: a second job in the same folder is refused."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / ".lock", "a+")  # not "w": what another job has written stays
        locked = _try_lock(file, fcntl.LOCK_EX)
        if locked is not False:
            file.truncate(0)
            os.write(file.fileno(), _job_token().encode())
            os.fsync(file.fileno())  # on a network disk other nodes do not see it before
    except OSError as error:
        raise ValueError(f"{run_dir / '.lock'}: {error.strerror} (check owner and space, or set run_root)") from None
    if locked is False:
        file.close()
        raise ValueError(f"{run_dir}: another job is running in this folder (wait, or set another name)")
    if locked is None:
        print(f"warning: {run_dir}: the file system has no locks; see to it that no other job runs in this folder",
              file=sys.stderr, flush=True)
    return file


def used_by_another_job(run_dir: Path) -> bool:
    """Whether a job other than this rank's runs in the folder, in which case nothing may be written there.

    A lock that cannot be read is another's.
    """
    try:
        with open(run_dir / ".lock") as file:
            return _try_lock(file, fcntl.LOCK_SH) is False and file.read() != _job_token()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _job_token() -> str:
    """The same on all ranks of a job, another in every job that runs at the same time."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    address, port = os.environ.get("MASTER_ADDR", os.uname().nodename), os.environ.get("MASTER_PORT", os.getpid())
    return "/".join([*(os.environ[name] for name in names if name in os.environ), f"{address}:{port}"])


def _try_lock(file: TextIO, kind: int) -> bool | None:
    """False: a lock of another process excludes this one. None: the file system has no locks.

    NFS wants a file opened for writing as well as reading, whatever the kind.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_run(run_dir: Path, config_text: str, rank: int) -> logging.Logger:
    """Create the folder; a logger that writes to log_rank*.txt, and on rank 0 to the terminal too."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (run_dir / "config.yaml").write_text(config_text)
        with open(run_dir / "command.txt", "a") as file:
            file.write(shlex.join(sys.argv) + "\n")
        # A STOP beside an end marker or the record of a failure was meant for the run that has ended; one alone was
        # asked for while this start was on its way. (A refused start leaves no record, only error.txt.)
        ended = [run_dir / name for name in ("PREEMPTED", "DONE") if (run_dir / name).exists()]
        failed = [path for path in run_dir.glob("error.*") if path.is_file()]
        overtaken = ended or any(path.suffix == ".json" for path in failed)
        for path in (*ended, *failed, *([run_dir / "STOP"] if overtaken else [])):
            path.unlink(missing_ok=True)
    log = logging.getLogger("distill")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers.clear()
    to_file = logging.FileHandler(run_dir / f"log_rank{rank}.txt", mode="a+")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(to_file)
    _try_lock(to_file.stream, fcntl.LOCK_SH)  # the kernel lets go of it when the process dies, however it dies
    log.info(_log_start())
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(TerminalFormatter())
        log.addHandler(terminal)
    return log


def _log_start() -> str:
    """The first line of each start in a log: whoever finds the log unlocked knows which job's rank has gone."""
    return f"start of job {_job_token()}"


class TerminalFormatter(logging.Formatter):
    """Plain lines; warnings say that they are warnings."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return prefix + record.getMessage()


class StopRequest:
    """SIGTERM, SIGUSR1, a STOP file in the run folder, a run that has lasted `max_minutes`, or the death of torchrun,
    after which nobody would end this rank.

    A signal that comes again within REPEAT_S is the same request: sent to the whole job it arrives directly and, once
    more, from torchrun. A later one exits at once, also from within a collective that waits for a peer: Python would
    run a handler only after that, so a thread listens for the byte that each signal leaves in a pipe.
    """

    def __init__(self, run_dir: Path, max_minutes: float | None = None) -> None:
        self._file, self._signalled = run_dir / "STOP", 0.0
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._ears, mouth = os.pipe()
        os.set_blocking(mouth, False)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)  # a signal without a handler leaves no byte
        signal.set_wakeup_fd(mouth)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while byte := os.read(self._ears, 1):
            if byte[0] not in SIGNALS:
                continue
            if self._signalled and time.monotonic() - self._signalled > REPEAT_S:
                os.write(2, b"a second signal: this rank ends at once, without a checkpoint\n")
                os._exit(128 + byte[0])
            self._signalled = self._signalled or time.monotonic()

    def wanted(self) -> bool:
        orphaned = self._torchrun is not None and os.getppid() != self._torchrun
        return self._signalled > 0 or orphaned or time.monotonic() >= self._deadline or self._file.exists()


def mark(run_dir: Path, name: str) -> None:
    """Leave a marker file (PREEMPTED or DONE) for the launch script."""
    (run_dir / name).write_text("")


# --- failures -------------------------------------------------------------------------------------------------------

@dataclass
class Where:
    """What this rank is doing, in case it fails: plain attributes that the script sets as it goes."""

    rank: int
    roles: Sequence[str] = ()  # of all ranks; empty until the job is known to be sound
    phase: str = "start-up"
    step: int | None = None  # the one in work

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.roles[rank]})" if rank < len(self.roles) else f"rank {rank}"

    def __str__(self) -> str:
        return f"{self.name(self.rank)} in {self.phase}" + ("" if self.step is None else f", step {self.step}")


def fail(error: BaseException, where: Where, run_dir: Path, *, memory_remedy: str = "") -> NoReturn:
    """tell_failure, then the end of this process, whatever becomes of the telling.

    There is no clean-up that could wait for peers: they see the closed connection and end too.
    """
    try:
        overdue = threading.Timer(GRACE_S + 5, os._exit, [1])
        overdue.daemon = True
        overdue.start()
        tell_failure(error, where, run_dir, memory_remedy=memory_remedy)
    except BaseException:
        traceback.print_exc()  # with `error`, which was being handled
    finally:
        os._exit(1)


@contextmanager
def deadline(seconds: float, what: str, where: Where, run_dir: Path) -> Iterator[None]:
    """Ends the process if the block takes longer. For start-up: a wait in torch's store is bounded by its timeout only
    while the process that holds the store answers."""
    error = RuntimeError(f"Timed out after {seconds:.0f} s: {what}")
    timer = threading.Timer(seconds, fail, (error, where, run_dir))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell_failure(error: BaseException, where: Where, run_dir: Path | None, *, memory_remedy: str = "") -> None:
    """Say once what went wrong, on stderr and in error.txt: where, the cause, and a traceback if the fault is ours.

    A rank that fails because another one did says so in one line that names it. All that is known goes into
    error.RANK.json, unless the start was refused (no roles), which leaves an earlier run's folder as it was. Nothing is
    written where another job runs: this one was refused, and its other ranks found no rank 0.
    Returns soon after 2 GRACE_S at the latest; a folder that cannot be written does not hide the cause.
    """
    if run_dir is not None and used_by_another_job(run_dir):
        run_dir = None
    record = failure_record(error, where, memory_remedy)
    line, told = f"error: {where}: {record['message']}", False
    is_lost = record["kind"] == "lost rank"
    if run_dir is not None and where.roles:
        _write_record(run_dir, record, where)
        if is_lost:
            record["because"], line, told = find_cause(run_dir, where, record["message"])
            _write_record(run_dir, record, where)
    block = f"{line}\n{record['traceback']}" if record["kind"] in ("error", "out of memory") else line
    if run_dir is not None and not told and _is_told(run_dir, block, where, None if is_lost else record["message"]):
        block = f"error: {where}: ends too; the cause is in {run_dir / 'error.txt'}"
    print(block, file=sys.stderr, flush=True)


def failure_record(error: BaseException, where: Where, memory_remedy: str) -> dict[str, Any]:
    """What error.RANK.json holds; `because`: the ranks to blame, where they are others."""
    kind, message = failure_kind(error), " ".join(str(error).split()) or type(error).__name__
    if kind == "out of memory":
        message = f"out of memory: {message}" + (f" ({memory_remedy})" if memory_remedy else "")
    if kind == "lost rank":  # without gloo's source file and advice
        message = re.sub(r"^\[\S+:\d+\] ", "", message).partition(". This is typically")[0]
    return {"rank": where.rank, "role": where.roles[where.rank] if where.roles else None, "phase": where.phase,
            "step": where.step, "kind": kind, "message": message, "because": [],
            "traceback": "".join(traceback.format_exception(error)), "host": os.uname().nodename, "job": _job_token(),
            "time": datetime.now(timezone.utc).isoformat()}


def failure_kind(error: BaseException) -> str:
    """user error | out of memory | lost rank (another one is gone, late or has failed) | interrupted | error"""
    text = str(error)
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and any(words in text for words in LOST)):
        return "lost rank"  # first: it may quote what another rank has died of
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text:
        return "out of memory"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "user error" if isinstance(error, ValueError) else "error"


def find_cause(run_dir: Path, where: Where, symptom: str) -> tuple[list[int], str, bool]:
    """(ranks to blame for a broken connection, the line that says so, whether they say it themselves).

    A rank that failed has left its record; one that was killed no longer holds the lock on its log; one that is stopped
    or stuck does neither, and is told from those that are about to fail themselves by waiting for GRACE_S.
    """
    others, deadline = [rank for rank in range(len(where.roles)) if rank != where.rank], time.monotonic() + GRACE_S
    while True:
        gone = [rank for rank in others if _is_gone(run_dir / f"log_rank{rank}.txt")]
        records = {rank: record for rank in others if (record := _read_record(run_dir, rank)) is not None}
        failed = sorted((record["time"], rank) for rank, record in records.items() if record["kind"] != "lost rank")
        killed = [rank for rank in gone if rank not in records]
        if failed or killed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if failed:
        rank = failed[0][1]
        return [rank], f"error: {where}: ends because {where.name(rank)} failed: {records[rank]['message']}", True
    missing = killed or [rank for rank in others if rank not in records]
    names = ", ".join(map(where.name, missing)) or "the connection between ranks"
    what = ("ended without a word (killed, perhaps by the kernel for want of memory)" if killed
            else "did not answer in time (stopped or stuck)" if missing else "broke")
    return missing, f"error: {names} {what}, which ends {where}: {symptom}", False


def _is_gone(log_file: Path) -> bool:
    """Whether the rank has begun in this job and is dead. False where that cannot be found out."""
    try:
        with open(log_file, "r+", errors="replace") as file:
            return _try_lock(file, fcntl.LOCK_EX) is True and f" {_log_start()}\n" in file.read()
    except OSError:
        return False


def _write_record(run_dir: Path, record: dict[str, Any], where: Where) -> None:
    temporary = run_dir / f".error.{where.rank}.json"
    with _noted(where):
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, run_dir / f"error.{where.rank}.json")


def _read_record(run_dir: Path, rank: int) -> dict[str, Any] | None:
    """None: the rank has not failed in this job, or its record cannot be read."""
    try:
        record = json.loads((run_dir / f"error.{rank}.json").read_text())
    except OSError:
        return None
    return record if record["job"] == _job_token() else None


def _is_told(run_dir: Path, block: str, where: Where, message: str | None) -> bool:
    """Whether error.txt has this message already (None: any); if not, the block is appended, by one rank at a time.

    The turn of a rank that is stopped while it has it is waited for no longer than GRACE_S. Before a start is accepted
    rank 0 overwrites what an earlier start has left.
    """
    deadline = time.monotonic() + GRACE_S
    with _noted(where):
        run_dir.mkdir(parents=True, exist_ok=True)
        with open(run_dir / "error.txt", "a+") as file:
            while _try_lock(file, fcntl.LOCK_EX) is False and time.monotonic() < deadline:
                time.sleep(0.01)
            if where.rank == 0 and not where.roles:
                file.truncate(0)
            file.seek(0)
            before = file.read()
            if before if message is None else f": {message}\n" in before:
                return True
            file.write(f"{block}\n")
    return False


@contextmanager
def _noted(where: Where) -> Iterator[None]:
    """A file that cannot be written is told on stderr: the failure to be reported may be the full disk itself."""
    try:
        yield
    except OSError as problem:
        print(f"error: {where}: {problem.filename or 'error.txt'}: {problem.strerror}", file=sys.stderr, flush=True)
