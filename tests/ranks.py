# SPDX-License-Identifier: Apache-2.0
"""run_ranks(fn, world_size): run a closure on N forked gloo ranks, about 0.7 s for 4 ranks with FSDP2.

Forking is safe because the children use one thread and never touch CUDA, and `fn` needs no pickling. torch._dynamo is
imported in the parent since FSDP2 imports it on first use: once here instead of 8 s in each child.
"""
from __future__ import annotations

import datetime
import faulthandler
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (preload before the fork)
import torch.distributed as dist
import torch.multiprocessing as mp


def _child(rank: int, fn: Callable[[int], Any], world_size: int, directory: str, timeout_s: int) -> None:
    torch.set_num_threads(1)  # OpenMP pools do not survive a fork: without this the child can hang
    torch.manual_seed(rank)
    faulthandler.dump_traceback_later(3 * timeout_s, exit=True)  # a hang shows where each rank stood
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size,
                            timeout=datetime.timedelta(seconds=timeout_s))
    result = fn(rank)
    dist.barrier()  # a missing collective fails here in timeout_s, not at the limit of CI
    dist.destroy_process_group()
    torch.save(result, f"{directory}/rank{rank}.pt")


def run_ranks(fn: Callable[[int], Any], world_size: int, *, timeout_s: int = 20) -> list[Any]:
    """[fn(0), ..., fn(world_size - 1)] from that many processes; raises the first failing rank's traceback."""
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(_child, (fn, world_size, directory, timeout_s), nprocs=world_size, start_method="fork")
        return [torch.load(f"{directory}/rank{rank}.pt", weights_only=False) for rank in range(world_size)]
