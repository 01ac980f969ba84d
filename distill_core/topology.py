# SPDX-License-Identifier: Apache-2.0
"""Which rank does what: a pure rank plan, the process groups and meshes it needs, and decisions that all ranks share.

    plan = plan_ranks(world_size=16, local_world_size=8, teacher_ranks=[4])     # pure: no process group
    world = start(plan, device_type="cuda", timeout_s=600)                      # every rank, in the same order
    if step_verdict(world.students_control, step=12, stop=stop_requested).stop: ...    # after each step
    stop(world)

Every rank creates every group in the same order, members or not: `new_group` deadlocks otherwise. Control messages
travel on gloo groups (CPU tensors) whatever the device; the model's tensors on the default group and the meshes.
"""
from __future__ import annotations

import datetime
import hashlib
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RankPlan:
    """students: ranks that train; teachers: one tuple of ranks per teacher (the students' own where it is inline)."""

    world_size: int
    students: tuple[int, ...]
    teachers: tuple[tuple[int, ...], ...]

    def is_inline(self, index: int) -> bool:
        """Whether teacher `index` is sharded over the student ranks."""
        return self.teachers[index] == self.students

    def teacher_of(self, rank: int) -> int | None:
        """Index of the teacher that `rank` serves; None for a student."""
        if rank in self.students:
            return None
        return next(i for i, ranks in enumerate(self.teachers) if rank in ranks)


def plan_ranks(world_size: int, local_world_size: int, teacher_ranks: Sequence[int]) -> RankPlan:
    """Split the world into student ranks and one group of ranks per teacher.

    teacher_ranks: how many ranks serve each teacher; 0 means inline (sharded over the student ranks). The last local
    ranks of each node serve when every count divides evenly over the nodes, else the last ranks of the world.
    """
    total = sum(teacher_ranks)
    if min(teacher_ranks, default=0) < 0:
        raise ValueError(f"teacher_ranks {list(teacher_ranks)}: counts cannot be negative")
    if total >= world_size:
        raise ValueError(f"topology.teacher_ranks = {total} leaves no student in a world of {world_size} ranks "
                         f"(start at least {total + 1} ranks or lower teacher_ranks)")
    nodes = world_size // local_world_size if world_size % local_world_size == 0 else 1
    if nodes > 1 and all(count % nodes == 0 for count in teacher_ranks):
        local = world_size // nodes
        per_node = [[count // nodes] for count in teacher_ranks]
        servers = [_last_ranks(local, [c for [c] in per_node], node * local) for node in range(nodes)]
        groups = [tuple(rank for node in servers for rank in node[i]) for i in range(len(teacher_ranks))]
    else:
        groups = [tuple(ranks) for ranks in _last_ranks(world_size, teacher_ranks, 0)]
    serving = {rank for ranks in groups for rank in ranks}
    students = tuple(rank for rank in range(world_size) if rank not in serving)
    return RankPlan(world_size, students, tuple(ranks or students for ranks in groups))


def _last_ranks(size: int, counts: Sequence[int], offset: int) -> list[range]:
    """Consecutive ranges of `counts` at the end of offset .. offset + size - 1."""
    start, ranges = offset + size - sum(counts), []
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges


# --- start and stop -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class World:
    """This rank's place and groups; a mesh or group of a role that the rank does not play is None."""

    plan: RankPlan
    rank: int
    device: torch.device
    timeout_s: float
    control: dist.ProcessGroup  # gloo, every rank
    students_control: dist.ProcessGroup | None  # gloo, student ranks
    student_mesh: DeviceMesh | None
    teachers_control: tuple[dist.ProcessGroup | None, ...]  # gloo, one per teacher with ranks of its own
    teacher_meshes: tuple[DeviceMesh | None, ...]

    @property
    def is_student(self) -> bool:
        return self.rank in self.plan.students


def shared_counter(name: str) -> Callable[[], int]:
    """0, 1, 2, ... over all ranks of the job together, each number given once: from the store of the default group."""
    store = dist.distributed_c10d._get_default_store()
    return lambda: store.add(name, 1) - 1


def env_rank() -> tuple[int, int, int]:
    """(rank, world size, local world size) as torchrun sets them; (0, 1, 1) without it."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("RANK", "0")), world_size, int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` -> this rank's device, made current before anything can touch another one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device: cuda, but torch sees no CUDA device on this machine (set device: cpu)")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()} "
                         "(lower --nproc_per_node)")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def device_memory(device: torch.device) -> int:
    """Bytes that one rank may use: its GPU, or its share of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // env_rank()[2]


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def start(plan: RankPlan, device: torch.device, timeout_s: float) -> World:
    """Join the job: the default group if there is none yet, then every group and mesh of the plan."""
    rank, world_size, _ = env_rank()
    timeout = datetime.timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        alone = {"store": dist.HashStore()} if "RANK" not in os.environ else {}  # plain `python train_*.py`
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **alone)
    return make_groups(plan, device, timeout_s)


def make_groups(plan: RankPlan, device: torch.device, timeout_s: float) -> World:
    """The groups and meshes of `plan` over an existing default group; the same calls on every rank."""
    timeout = datetime.timedelta(seconds=timeout_s)
    fake = dist.get_backend() == "fake"  # a dry run: every collective is a no-op

    def control_group(ranks: Sequence[int]) -> dist.ProcessGroup:
        return dist.new_group(ranks, backend="fake" if fake else "gloo", timeout=timeout)

    def mesh_of(ranks: Sequence[int]) -> DeviceMesh | None:
        group = dist.new_group(ranks, timeout=timeout)
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",)) if rank in ranks else None

    rank = dist.get_rank()
    control = control_group(range(plan.world_size))
    students_control = control_group(plan.students)
    student_mesh = mesh_of(plan.students)
    own_ranks = [ranks if ranks != plan.students else () for ranks in plan.teachers]
    teachers_control = [control_group(ranks) if ranks else None for ranks in own_ranks]
    teacher_meshes = [mesh_of(ranks) if ranks else student_mesh for ranks in own_ranks]
    mine = [group if rank in ranks else None for group, ranks in zip(teachers_control, own_ranks, strict=True)]
    return World(plan, rank, device, timeout_s, control, students_control if rank in plan.students else None,
                 student_mesh, tuple(mine), tuple(teacher_meshes))


def stop(world: World) -> None:
    """Leave together: without the barrier a rank that ends early looks like a dead peer to the others."""
    dist.barrier(group=world.control)
    dist.destroy_process_group()


# --- decisions that all ranks of a group share ----------------------------------------------------------------------

def agree_max(group: dist.ProcessGroup, *values: float) -> list[float]:
    """Element-wise maximum over the group: a stop request, an error code, a count to pad to."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


class Verdict(NamedTuple):
    """What all ranks know after a step."""

    stop: bool  # some rank was asked to stop
    abort: bool  # some rank does not want to go on: too many steps in a row were not finite


def step_verdict(group: dist.ProcessGroup, *, step: int, stop: bool, abort: bool = False,
                 error: Exception | None = None) -> Verdict:
    """The one all-reduce at the end of a step, after which all ranks act alike.

    An error of one rank (writing metrics, say) is raised on all: there as it is, elsewhere as a RuntimeError that names
    the rank. RuntimeError also where ranks are at different steps.
    """
    failed = 0 if error is None else dist.get_rank() + 1
    stop, abort, failed, high, low = agree_max(group, stop, abort, failed, step, -step)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"stopped because rank {int(failed) - 1} failed (its own message says why)")
    if high != -low:
        raise RuntimeError(f"ranks are at different steps: from {-low:.0f} to {high:.0f}, this one at {step}")
    return Verdict(bool(stop), bool(abort))


def agree_sum(group: dist.ProcessGroup, *values: float) -> list[float]:
    """Element-wise sum over the group, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def agree_equal(group: dist.ProcessGroup, text: str, what: str) -> None:
    """ValueError on all ranks where `text` is not the same on all: a stale file on one node would train silently."""
    mine = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    odd = [dist.get_global_rank(group, index) for index, digest in enumerate(digests)
           if not torch.equal(digest, digests[0])]
    if odd:
        raise ValueError(f"rank {', '.join(map(str, odd))} has another {what} than rank "
                         f"{dist.get_global_rank(group, 0)} (compare the files on its node)")


class Pulse:
    """Lets ranks of a group work for unequal times without anyone's bounded wait running out.

    Each calls `beat` often while it works, then `finish`. Every `every_s` the working ranks join one small collective,
    in which the finished ones are waiting already; `finish` returns on all ranks once none is working. `also` is called
    with every beat, and on a finished rank at least every `every_s`.
    """

    def __init__(self, group: dist.ProcessGroup, every_s: float, also: Callable[[], None] = lambda: None) -> None:
        self._group, self._every_s, self._also = group, every_s, also
        self._next = time.monotonic() + every_s

    def beat(self) -> None:
        self._also()
        if time.monotonic() > self._next:
            agree_sum(self._group, 1)
            self._next = time.monotonic() + self._every_s

    def finish(self) -> None:
        while agree_sum(self._group, 0)[0] > 0:
            self._also()


def raise_together(group: dist.ProcessGroup, error: Exception | None) -> None:
    """Every rank calls this after a step that may fail on some: all raise, or none does.

    The rank that failed raises its own error; the others say which ranks failed, so that no rank waits for a peer that
    has already left.
    """
    failed = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    failed[dist.get_rank(group)] = error is not None
    dist.all_reduce(failed, group=group)
    if error is not None:
        raise error
    if failed.any():
        ranks = [dist.get_global_rank(group, index) for index in failed.nonzero().flatten().tolist()]
        raise RuntimeError(f"stopped because rank {', '.join(map(str, ranks))} failed (its own message says why)")
