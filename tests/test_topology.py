# SPDX-License-Identifier: Apache-2.0
"""Rank plans at many world sizes, groups and meshes on forked ranks, decisions that all ranks share."""
from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distill_core.topology import Pulse, agree_max, agree_sum, make_groups, plan_ranks, raise_together, step_verdict


def test_plans_are_partitions_with_rank_0_a_student():
    """Catches overlapping or forgotten ranks at any world size, and a teacher that takes the logger's rank."""
    for world in range(1, 65):
        for local in {1, world, *(d for d in (2, 4, 8) if world % d == 0)}:
            for teachers in ((0,), (1,), (2,), (2, 4), (world - 1,)):
                if sum(teachers) >= world:
                    continue
                plan = plan_ranks(world, local, teachers)
                serving = [rank for ranks in plan.teachers if ranks != plan.students for rank in ranks]
                assert sorted([*plan.students, *serving]) == list(range(world))
                assert plan.students[0] == 0
                assert [len(ranks) for ranks, count in zip(plan.teachers, teachers) if count] == [c for c in teachers if c]


def test_teachers_sit_on_the_last_local_ranks_of_each_node():
    """Catches a teacher packed onto one node, whose students would all talk across the network."""
    plan = plan_ranks(16, 8, [4])
    assert plan.teachers == ((6, 7, 14, 15),) and plan.students == (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13)
    assert plan_ranks(16, 8, [2, 2]).teachers == ((6, 14), (7, 15))
    assert plan_ranks(16, 8, [3]).teachers == ((13, 14, 15),)  # does not divide: the end of the world
    assert plan_ranks(3, 3, [0]).teachers == ((0, 1, 2),) and plan_ranks(3, 3, [0]).is_inline(0)
    assert plan_ranks(8, 8, [2]).teacher_of(7) == 0 and plan_ranks(8, 8, [2]).teacher_of(0) is None


@pytest.mark.parametrize("world, teachers", [(2, (2,)), (2, (5,)), (4, (2, 2)), (1, (1,)), (4, (-1,))])
def test_a_plan_without_students_is_refused(world, teachers):
    """Catches a world in which nobody trains, which would wait for ever."""
    with pytest.raises(ValueError, match="teacher_ranks"):
        plan_ranks(world, world, teachers)


def test_groups_and_decisions_on_real_ranks():
    """Catches groups created in different orders on different ranks (a deadlock) and meshes on the wrong ranks."""
    plan = plan_ranks(5, 5, [2])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        value = torch.tensor([float(rank)])
        group = world.students_control if world.is_student else world.teachers_control[0]
        dist.all_reduce(value, group=group)
        mesh = world.student_mesh if world.is_student else world.teacher_meshes[0]
        return value.item(), mesh.size(), world.student_mesh is None, agree_max(group, rank, -rank), agree_sum(group, 1, rank)

    results = run_ranks(body, 5)
    assert [r[:3] for r in results] == [(3.0, 3, False)] * 3 + [(7.0, 2, True)] * 2
    assert results[0][3:] == ([2.0, 0.0], [3.0, 3.0]) and results[4][3:] == ([4.0, -3.0], [2.0, 7.0])


def test_raise_together_names_the_rank_that_failed():
    """Catches a rank that continues after a peer's failure and then hangs in the next collective."""
    def body(rank):
        try:
            raise_together(dist.group.WORLD, ValueError("bad shard") if rank == 1 else None)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error)

    results = run_ranks(body, 3)
    assert results[1] == ("ValueError", "bad shard")
    assert results[0] == results[2] == ("RuntimeError", "stopped because rank 1 failed (its own message says why)")


def test_a_verdict_is_the_same_on_all_ranks():
    """Catches a stop, an end or an error that one rank keeps to itself, and ranks that train different steps."""
    def body(rank, step, stop, abort, failing):
        error = OSError("disk full") if rank == failing else None
        try:
            return step_verdict(dist.group.WORLD, step=step, stop=stop, abort=abort, error=error)
        except (OSError, RuntimeError) as raised:
            return f"{type(raised).__name__}: {raised}"

    def bodies(rank):
        return [body(rank, 7, False, False, None), body(rank, 7, rank == 1, False, None),
                body(rank, 8, False, rank == 2, None), body(rank, 8, True, True, 1),
                body(rank, 8 + (rank == 2), False, False, None)]

    results = run_ranks(bodies, 3)
    assert all(result[:3] == [(False, False), (True, False), (False, True)] for result in results)
    elsewhere = "RuntimeError: stopped because rank 1 failed (its own message says why)"
    assert [result[3] for result in results] == [elsewhere, "OSError: disk full", elsewhere]
    assert all("from 8 to 9" in result[4] and f"this one at {8 + (rank == 2)}" in result[4]
               for rank, result in enumerate(results))


def test_a_pulse_outlasts_the_timeout_while_somebody_works_and_no_longer():
    """Catches ranks that finish early and die waiting for a slow one that is alive, and waiting for a dead one."""
    def body(rank, alive: bool):
        world = make_groups(plan_ranks(3, 3, [0]), torch.device("cpu"), 2)
        told = []
        pulse = Pulse(world.students_control, 0.5, lambda: told.append(time.monotonic()))
        end = time.monotonic() + (5 if rank == 1 else 0.7 * rank)  # rank 0 has nothing to do at all
        while time.monotonic() < end:
            time.sleep(0.05)
            if alive:
                pulse.beat()
        pulse.finish()
        return len(told)

    counts = run_ranks(lambda rank: body(rank, True), 3)
    assert min(counts) >= 4, "finished ranks go on telling others that they are alive"
    with pytest.raises(Exception, match="Timed out|closed|reset"):
        run_ranks(lambda rank: body(rank, False), 3)
