# SPDX-License-Identifier: Apache-2.0
"""The teacher service against a local forward: N students x M sharded teacher ranks, and what happens when a side fails."""
from __future__ import annotations

import time

import pytest
import torch
from ranks import run_ranks
from torch import nn

from distill_core.fsdp import shard
from distill_core.models.lm import CausalLM, LMConfig, LMHead, Rope
from distill_core.teacher import (HEADER_LEN, NOOP, SCORE, Header, InlineTeacher, Links, RemoteTeacher, Request, Shape,
                                  answer, serve, split_rows, unpack_header)
from distill_core.topology import make_groups, plan_ranks

VOCAB, K, OWN_K, TEMPERATURE, CHUNK = 97, 5, 6, 0.7, 4


def tiny(tied: bool) -> CausalLM:
    config = LMConfig("llama", VOCAB, 24, 40, 2, 4, 2, 6, 1e-5, 64, Rope("default", 1e4), tied, False, False, False, False)
    torch.manual_seed(3)
    model = CausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def batch(seed: int, lengths: list[int], width: int) -> tuple[torch.Tensor, ...]:
    """Random right-padded rows; responses begin at 1 + length // 3, the last row's response is empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    lengths_B = torch.tensor(lengths, dtype=torch.long)
    starts_B = 1 + lengths_B // 3
    if lengths:
        starts_B[-1] = lengths_B[-1]
    ids = torch.randint(0, VOCAB, (int((lengths_B - starts_B).sum()), K), generator=generator)
    return tokens, lengths_B, starts_B, ids


BATCHES = {0: batch(0, [9, 4, 12, 5], 12), 1: batch(1, [7], 30), 2: batch(2, [], 1), 3: batch(3, [3, 2, 2, 8, 6, 11], 13)}


def local_answer(model, values, hidden: bool):
    return answer(model, Request(*values, OWN_K, hidden), vocab_size=VOCAB, temperature=TEMPERATURE, chunk_size=CHUNK)


def links_for(world) -> Links:
    return Links(world.rank, world.plan.students, world.plan.teachers[0], world.control, world.teachers_control[0],
                 world.device, world.timeout_s)


def sharded(mesh, tied: bool) -> CausalLM:
    model = tiny(tied)
    shard(model, model.fsdp_units(), mesh)
    return model


def connect(world, tied: bool) -> RemoteTeacher:
    head = LMHead(24, VOCAB, bias=False)
    head.weight = tiny(tied).lm_head.weight
    shard(head, [], world.student_mesh)
    return RemoteTeacher(links_for(world), Shape(VOCAB, 24, torch.float32), head, temperature=TEMPERATURE)


def assert_same(reply, wanted):
    for name in ("logits_NK", "lse_N", "entropy_N", "own_logits_NK"):
        torch.testing.assert_close(getattr(reply, name), getattr(wanted, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(reply.own_ids_NK, wanted.own_ids_NK) and reply.num_nonfinite == 0
    if wanted.hidden_ND is not None:
        torch.testing.assert_close(reply.hidden_ND, wanted.hidden_ND, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("students, teachers", [(2, 2), (1, 1), (4, 1), (1, 3), (3, 2)])
def test_each_student_gets_what_a_local_forward_gives(students, teachers, tied):
    """Catches replies to the wrong student, rows mixed by unequal lengths, forwards that differ in number between teacher
    ranks (a hang), a rank without rows that blocks the others, two requests in flight answered in the wrong order."""
    plan = plan_ranks(students + teachers, students + teachers, [teachers])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            return serve(sharded(world.teacher_meshes[0], tied), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        teacher, model = connect(world, tied), tiny(tied)
        order = [BATCHES[(rank + shift) % 4] for shift in range(4)]  # another batch on each rank, the empty one included
        handles = [teacher.request(*order[0][:3], ids_NK=order[0][3], own_k=OWN_K, want_hidden=True)]
        for i, values in enumerate(order):
            if i + 1 < len(order):
                following = order[i + 1]
                handles.append(teacher.request(*following[:3], ids_NK=following[3], own_k=OWN_K, want_hidden=True))
            reply = handles[i].result()
            if values[0].shape[0]:
                assert_same(reply, local_answer(model, values, True))
            else:
                assert reply.logits_NK.shape == (0, K) and reply.hidden_ND.shape == (0, 24)
        logits = teacher.head(reply.hidden_ND)
        torch.testing.assert_close(logits, model.lm_head(reply.hidden_ND), rtol=1e-5, atol=1e-5)
        teacher.stop()
        return 4

    assert run_ranks(body, students + teachers) == [4] * (students + teachers)


def test_inline_teacher_has_the_same_interface_and_values():
    """Catches an inline path that scores something else than the service."""
    plan = plan_ranks(2, 2, [0])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        model = sharded(world.student_mesh, True)
        teacher = InlineTeacher(model, model.lm_head, vocab_size=VOCAB, temperature=TEMPERATURE, chunk_size=CHUNK)
        values = BATCHES[rank]
        reply = teacher.request(*values[:3], ids_NK=values[3], own_k=OWN_K, want_hidden=True).result()
        assert_same(reply, local_answer(tiny(True), values, True))
        teacher.keepalive(), teacher.stop()

    run_ranks(body, 2)


def test_a_shift_by_one_or_another_temperature_is_seen():
    """Negative control of the comparisons above: both planted faults move the values by far more than 1e-5."""
    model, values = tiny(False), BATCHES[0]
    wanted = local_answer(model, values, False)
    warm = answer(model, Request(*values, OWN_K, False), vocab_size=VOCAB, temperature=TEMPERATURE * 1.1, chunk_size=CHUNK)
    assert (warm.logits_NK - wanted.logits_NK).abs().max() > 1e-2
    shifted = answer(model, Request(values[0].roll(1, dims=1), *values[1:], OWN_K, False), vocab_size=VOCAB,
                     temperature=TEMPERATURE, chunk_size=CHUNK)
    assert (shifted.logits_NK - wanted.logits_NK).abs().max() > 1e-2


def test_rows_are_dealt_completely_and_evenly():
    """Catches rows that no teacher rank scores, or two do."""
    for rows in ([0, 0], [5, 0, 3], [1], [7, 7, 7], [1, 1, 1, 1, 1]):
        for teachers in range(1, 6):
            segments = split_rows(rows, teachers)
            covered = sorted((s.student, row) for s in segments for row in range(s.first, s.last))
            assert covered == [(student, row) for student, count in enumerate(rows) for row in range(count)]
            loads = [sum(s.last - s.first for s in segments if s.teacher == t) for t in range(teachers)]
            assert max(loads) - min(loads) <= 1


# --- failure --------------------------------------------------------------------------------------------------------

def fails_within(seconds: float, body, num_ranks: int) -> str:
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        run_ranks(body, num_ranks, timeout_s=5)
    assert time.monotonic() - began < seconds
    return str(caught.value)


def test_a_teacher_that_raises_ends_the_job_with_its_traceback():
    """Catches students that wait for ever for a teacher rank that is gone."""
    plan = plan_ranks(3, 3, [1])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 5)
        if not world.is_student:
            model = sharded(world.teacher_meshes[0], False)
            model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("planted teacher failure")))
            serve(model, links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        values = BATCHES[rank]
        connect(world, False).request(*values[:3], ids_NK=values[3], own_k=OWN_K).result()

    assert "planted teacher failure" in fails_within(20, body, 3)


@pytest.mark.parametrize("fault, message", [
    (lambda t: setattr(t, "shape", Shape(VOCAB + 1, 24, torch.float32)), "expects a teacher with"),
    (lambda t: setattr(t, "_seq", 7), "sequence number 7"),
    (lambda t: setattr(t, "temperature", float("nan")) if t.links.rank == 0 else None, "different k, own_k"),
])
def test_a_header_that_disagrees_ends_the_job_saying_what_each_side_thought(fault, message):
    """Catches garbage payloads: gloo itself would deliver them without an error."""
    plan = plan_ranks(3, 3, [1])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 5)
        if not world.is_student:
            serve(sharded(world.teacher_meshes[0], False), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        teacher, values = connect(world, False), BATCHES[rank]
        fault(teacher)
        teacher.request(*values[:3], ids_NK=values[3], own_k=OWN_K).result()

    assert message in fails_within(20, body, 3)


def test_headers_are_validated_field_by_field():
    """Catches a header check that lets a wrong magic, version, checksum, sender, opcode or an absurd size through."""
    good = Header(3, SCORE, 1, rows=2, width=5, positions=4, k=5)
    assert unpack_header(good.pack(), sender=1, seq=3, opcodes=(NOOP, SCORE)) == good
    for position in range(HEADER_LEN):
        bad = good.pack()
        bad[position] += 1
        with pytest.raises(RuntimeError, match="teacher protocol"):
            unpack_header(bad, sender=1, seq=3, opcodes=(NOOP, SCORE))
    for wrong in (good._replace(rows=1 << 40), good._replace(positions=11), good._replace(k=-1), good._replace(opcode=9)):
        with pytest.raises(RuntimeError, match="teacher protocol"):
            unpack_header(wrong.pack(), sender=1, seq=3, opcodes=(NOOP, SCORE))


def test_noop_keeps_a_slow_student_alive_and_silence_does_not():
    """Catches a long rollout that looks like a dead student, and a dead one that is waited for without bound."""
    plan = plan_ranks(3, 3, [2])  # the second teacher rank hears of a NOOP only through the first

    def body(rank, alive: bool):
        world = make_groups(plan, torch.device("cpu"), 2)
        if not world.is_student:
            serve(sharded(world.teacher_meshes[0], False), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
            return
        teacher, values = connect(world, False), BATCHES[0]
        for _ in range(35):
            time.sleep(0.1)
            if alive:
                teacher.keepalive()
        teacher.request(*values[:3], ids_NK=values[3], own_k=OWN_K).result()
        teacher.stop()

    run_ranks(lambda rank: body(rank, True), 3)
    with pytest.raises(Exception, match="Timed out|closed|reset"):
        run_ranks(lambda rank: body(rank, False), 3)


def test_a_forward_is_never_larger_than_one_students_micro_batch():
    """Catches a service that joins the students' rows into one padded batch, whose memory nobody has planned for."""
    plan, widths = plan_ranks(4, 4, [1]), {0: [3, 4], 1: [30], 2: [2] * 9}

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            model, shapes = sharded(world.teacher_meshes[0], False), []
            model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
            serve(model, links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
            return shapes
        values = batch(rank, widths[rank], max(widths[rank]))
        teacher = connect(world, False)
        teacher.request(*values[:3], ids_NK=values[3], own_k=OWN_K).result()
        teacher.stop()

    assert run_ranks(body, 4)[3] == [(2, 4), (1, 30), (9, 2)]


