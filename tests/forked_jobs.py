# SPDX-License-Identifier: Apache-2.0
"""The ranks of a training script as real processes, to be killed and stopped, started in a second instead of ten.

    job = Job("dmd", ["--config", str(path)], 2, folder)     # what torchrun would start, by forking
    os.kill(job.pids[1], signal.SIGKILL)
    codes = job.wait(60)                                     # [exit code of each rank], minus the signal's number
    job.output(0)                                            # stdout and stderr of a rank

See ranks.py on why forking is safe.
"""
from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  (preload before the fork)


class Job:
    """`meddle(rank)` runs in each rank before the script: to put faults into it."""

    def __init__(self, kind: str, arguments: Sequence[str], num_ranks: int, folder: Path, *,
                 meddle: Callable[[int], None] = lambda rank: None) -> None:
        self.folder, self.codes, self.ended = folder, [None] * num_ranks, [0.0] * num_ranks
        folder.mkdir(exist_ok=True)
        main = importlib.import_module(f"train_{kind}").main
        environment = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(free_port())}
        self.pids: list[int] = []
        for rank in range(num_ranks):
            sys.stdout.flush()
            sys.stderr.flush()
            output = folder / f"output{rank}.txt"
            output.unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                sys.argv = [f"train_{kind}.py", *arguments]
                _live(main, rank, output, meddle)
            self.pids.append(pid)

    def alive(self) -> list[int]:
        """Ranks that have not ended, stopped ones included."""
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank], self.ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        return [rank for rank, code in enumerate(self.codes) if code is None]

    def wait(self, timeout_s: float, *, leaving: Collection[int] = ()) -> list[int | None]:
        """Exit codes once all have ended but the ranks `leaving`; else AssertionError, and no rank is left."""
        end = time.monotonic() + timeout_s
        while set(self.alive()) - set(leaving):
            if time.monotonic() > end:
                left = self.alive()
                self.kill()
                raise AssertionError(f"ranks {left} still live after {timeout_s} s:\n" + "\n".join(
                    f"--- rank {rank}\n{self.output(rank)[-3000:]}" for rank in range(len(self.pids))))
            time.sleep(0.02)
        return list(self.codes)

    def kill(self) -> None:
        """What torchrun does in the end with ranks that are left."""
        for rank in self.alive():
            os.kill(self.pids[rank], signal.SIGKILL)
        while self.alive():
            time.sleep(0.01)

    def send(self, number: int) -> None:
        for rank in self.alive():
            os.kill(self.pids[rank], number)

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}.txt").read_text()


def _live(main: Callable[[], int], rank: int, output: Path, meddle: Callable[[int], None]) -> None:
    """The rest of this process's life."""
    code = 70
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
        torch.set_num_threads(1)  # OpenMP pools do not survive a fork
        meddle(rank)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
