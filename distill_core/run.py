# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: what was started, its logs, stop requests, and how a failure is told.

    runs/NAME/{config.yaml, command.txt, metrics.jsonl, report.html, log_rank*.txt, samples/, checkpoints/}
    STOP      put there by a person or a launch script: checkpoint at the next step boundary and exit
    PREEMPTED, DONE      written last, after the final checkpoint: launch scripts decide on these, not on exit codes
    error.txt            the one-line cause of the last failure, with its traceback

    log = open_run(run_dir, config_text, rank); stop = StopRequest(run_dir)
    if stop.wanted(): ...                               # one rank's view: agree on it before acting
"""
from __future__ import annotations

import argparse
import fcntl
import logging
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

REPEAT_S = 5.0


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
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{run_dir}: {place} is not a folder that can be written to (set run_root)")


def lock_run(run_dir: Path) -> TextIO:
    """Hold the returned file open for the life of the run: a second job in the same folder is refused."""
    run_dir.mkdir(parents=True, exist_ok=True)
    file = open(run_dir / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"{run_dir}: another job is running in this folder (wait, or set another name)") from None
    return file


def open_run(run_dir: Path, config_text: str, rank: int) -> logging.Logger:
    """Create the folder; a logger that writes to log_rank*.txt, and on rank 0 to the terminal too."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (run_dir / "config.yaml").write_text(config_text)
        with open(run_dir / "command.txt", "a") as file:
            file.write(shlex.join(sys.argv) + "\n")
        # A STOP beside an end marker has been obeyed; one alone was asked for while this start was on its way.
        ended = [name for name in ("PREEMPTED", "DONE") if (run_dir / name).exists()]
        for marker in (*ended, *(["STOP"] if ended else []), "error.txt"):
            (run_dir / marker).unlink(missing_ok=True)
    log = logging.getLogger("distill")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers.clear()
    to_file = logging.FileHandler(run_dir / f"log_rank{rank}.txt")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(to_file)
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(TerminalFormatter())
        log.addHandler(terminal)
    return log


class TerminalFormatter(logging.Formatter):
    """Plain lines; warnings say that they are warnings."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return prefix + record.getMessage()


class StopRequest:
    """SIGTERM, SIGUSR1 or a STOP file in the run folder. Handlers only set a flag.

    A signal that comes again within REPEAT_S is the same request: sent to the whole job it arrives directly and, once
    more, from torchrun. A later one exits at once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file, self._signalled = run_dir / "STOP", 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signalled and time.monotonic() - self._signalled > REPEAT_S:
            os._exit(128 + number)
        self._signalled = self._signalled or time.monotonic()

    def wanted(self) -> bool:
        return self._signalled > 0 or self._file.exists()


def mark(run_dir: Path, name: str) -> None:
    """Leave a marker file (PREEMPTED or DONE) for the launch script."""
    (run_dir / name).write_text("")


def report_failure(error: BaseException, run_dir: Path | None, *, rank: int, role: str, is_user_error: bool) -> None:
    """The cause on stderr and in error.txt: one line for a user's error, the line and a traceback for ours."""
    line = f"error: rank {rank} ({role}): {' '.join(str(error).split()) or type(error).__name__}"
    trace = "".join(traceback.format_exception(error))
    print(line if is_user_error else f"{line}\n{trace}", file=sys.stderr, flush=True)
    if run_dir is None:
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with open(run_dir / "error.txt", "a") as file:
            file.write(f"{line}\n" if is_user_error else f"{line}\n{trace}\n")
    except OSError as problem:  # the cause itself may be a full disk: it has been told above
        print(f"error: rank {rank}: {run_dir / 'error.txt'}: {problem.strerror}", file=sys.stderr, flush=True)
