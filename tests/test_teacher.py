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
from distill_core.teacher import (HEADER_LEN, NOOP, SCORE, Header, InlineTeacher, Links, RemoteTeacher, Request, Segment,
                                  Shape, Teachers, answer, plan_forwards, serve, split_rows, unpack_header)
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
    """Random right-padded rows; about two thirds of the positions are scored, of the last row none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    scored = [torch.randperm(length - 1, generator=generator)[:2 * (length - 1) // 3 + 1].sort().values
              for length in lengths]
    scored[-1:] = [positions[:0] for positions in scored[-1:]]
    counts_B = torch.tensor([len(positions) for positions in scored], dtype=torch.long)
    positions_N = torch.cat([*scored, torch.zeros(0, dtype=torch.long)])
    ids = torch.randint(0, VOCAB, (len(positions_N), K), generator=generator)
    return tokens, torch.tensor(lengths, dtype=torch.long), counts_B, positions_N, ids


BATCHES = {0: batch(0, [9, 4, 12, 5], 12), 1: batch(1, [7], 30), 2: batch(2, [], 1), 3: batch(3, [3, 2, 2, 8, 6, 11], 13)}


def local_answer(model, values, hidden: bool, own_k: int = OWN_K):
    return answer(model, Request(*values, own_k, hidden), vocab_size=VOCAB, temperature=TEMPERATURE, chunk_size=CHUNK)


def links_for(world, index: int = 0) -> Links:
    return Links(world.rank, world.plan.students, world.plan.teachers[index], world.control,
                 world.teachers_control[index], world.device, world.timeout_s)


def sharded(mesh, tied: bool, model: CausalLM | None = None) -> CausalLM:
    model = model or tiny(tied)
    shard(model, model.fsdp_units(), mesh)
    return model


def connect(world, tied: bool, index: int = 0) -> RemoteTeacher:
    head = LMHead(24, VOCAB, bias=False)
    head.weight = tiny(tied).lm_head.weight
    shard(head, [], world.student_mesh)
    teacher = RemoteTeacher(links_for(world, index), Shape(VOCAB, 24, torch.float32), head, temperature=TEMPERATURE)
    teacher.open()
    return teacher


def assert_same(reply, wanted):
    for name in ("logits_NK", "lse_N", "entropy_N", "own_logits_NK"):
        if getattr(wanted, name) is None:
            assert getattr(reply, name) is None
        else:
            torch.testing.assert_close(getattr(reply, name), getattr(wanted, name), rtol=1e-5, atol=1e-5)
    assert reply.num_nonfinite == 0 and len(reply.hidden) == len(wanted.hidden)
    if wanted.own_ids_NK is not None:
        assert torch.equal(reply.own_ids_NK, wanted.own_ids_NK)
    for got, expected in zip(reply.hidden, wanted.hidden):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("students, teachers", [(2, 2), (1, 1), (4, 1), (1, 3), (3, 2)])
def test_each_student_gets_what_a_local_forward_gives(students, teachers, tied):
    """Catches replies to the wrong student, rows mixed by unequal lengths or by joining them, forwards that differ in
    number between teacher ranks (a hang), a rank without rows that blocks the others, requests answered in the wrong
    order, values that were not asked for, and results that can only be taken in order."""
    plan = plan_ranks(students + teachers, students + teachers, [teachers])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            return serve(sharded(world.teacher_meshes[0], tied), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        teacher, model = connect(world, tied), tiny(tied)
        order = [BATCHES[(rank + shift) % 4] for shift in range(4)]  # another batch on each rank, the empty one included
        kinds = [(OWN_K, True), (0, False), (0, True), (OWN_K, False)]
        handles = [teacher.request(Request(*values, *kind)) for values, kind in zip(order, kinds)]
        for index in (1, 0, 3, 2):
            reply, (own_k, hidden) = handles[index].result(), kinds[index]
            if order[index][0].shape[0]:
                assert_same(reply, local_answer(model, order[index], hidden, own_k))
            else:
                assert reply.logits_NK.shape == (0, K) and [h.shape for h in reply.hidden] == [(0, 24)] * hidden
        logits = teacher.head(reply.hidden[0])
        torch.testing.assert_close(logits, model.lm_head(reply.hidden[0]), rtol=1e-5, atol=1e-5)
        teacher.stop()
        return 4

    assert run_ranks(body, students + teachers) == [4] * (students + teachers)


def test_teachers_are_fed_and_kept_waiting_for_nothing_while_a_student_trains():
    """Catches a step longer than the timeout in which rounds that came early leave the teacher without rows or a sign of
    life; and results that are kept after they were taken."""
    plan = plan_ranks(2, 2, [1])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 2)
        if not world.is_student:
            return serve(sharded(world.teacher_meshes[0], False), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        teachers = Teachers([connect(world, False)])
        handles = [teachers.request(Request(*BATCHES[0], OWN_K), torch.zeros(4, dtype=torch.long)) for _ in range(9)]
        deadline = time.monotonic() + 10
        while handles[6].parts[0].reply is None:  # most of the rounds are over before training begins
            teachers.progress()
            assert time.monotonic() < deadline
        for handle in handles:
            teachers.result(handle, handle.number)
            assert handle.parts[0].reply is None
            time.sleep(0.4)  # a training step of nine times this, beside a timeout of 2 s
        teachers.stop()

    run_ranks(body, 2)


def test_hidden_states_of_no_more_than_two_batches_are_held():
    """Catches whole-vocabulary losses that keep the hidden states of a whole rollout."""
    plan = plan_ranks(2, 2, [1])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            return serve(sharded(world.teacher_meshes[0], False), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        teacher = connect(world, False)
        handles = [teacher.request(Request(*BATCHES[0], OWN_K, True)) for _ in range(5)]
        for _ in range(100):
            teacher.progress()
            time.sleep(0.01)
        held = [handle.reply is not None for handle in handles]
        results = [handle.result() for handle in handles]
        teacher.stop()
        return held, len(results)

    assert run_ranks(body, 2)[0] == ([True, True, False, False, False], 5)


@pytest.mark.parametrize("students, teachers, rows", [(1, 2, [1]), (2, 4, [1, 1])])
def test_a_teacher_rank_without_rows_is_heard_when_it_was_asked_to_stop(students, teachers, rows):
    """Catches a signal to a rank that scores nothing, which would be killed half a minute later."""
    plan = plan_ranks(students + teachers, students + teachers, [teachers])

    def body(rank, asked):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            return serve(sharded(world.teacher_meshes[0], False), links_for(world), Shape(VOCAB, 24, torch.float32),
                         chunk_size=CHUNK, stop_wanted=lambda: rank == asked)
        teacher, values = connect(world, False), batch(rank, [5] * rows[rank], 5)
        teacher.request(Request(*values, OWN_K)).result()
        teacher.stop()
        return teacher.stop_wanted

    for asked in (None, *range(students, students + teachers)):
        heard = run_ranks(lambda rank: body(rank, asked), students + teachers)[:students]
        assert heard == [asked is not None] * students


@pytest.mark.parametrize("teacher_ranks", [(1, 2), (0, 1), (0, 0)])
def test_several_teachers_answer_what_each_of_them_would_alone(teacher_ranks):
    """Catches rows sent to the wrong teacher, replies put back in the wrong order, a teacher without rows that hangs, and
    two services that wait for each other."""
    num_ranks = 2 + sum(teacher_ranks)
    plan, routes = plan_ranks(num_ranks, num_ranks, teacher_ranks), {0: [1, 0, 1, 0], 1: [1], 2: [], 3: [0] * 6}

    def variant(index: int) -> CausalLM:
        model = tiny(False)
        model.model.norm.weight.add_(0.3 * index)
        return model

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        shape, settings = Shape(VOCAB, 24, torch.float32), {"vocab_size": VOCAB, "temperature": TEMPERATURE, "chunk_size": CHUNK}
        if not world.is_student:
            index = plan.teacher_of(rank)
            return serve(sharded(world.teacher_meshes[index], False, variant(index)), links_for(world, index), shape, chunk_size=CHUNK)
        teachers = Teachers([InlineTeacher(sharded(world.student_mesh, False, variant(i)), None, **settings)
                             if plan.is_inline(i) else connect(world, False, i) for i in range(2)])
        which = [(rank + shift) % 4 for shift in range(4)]
        handles = [teachers.request(Request(*BATCHES[i], OWN_K, True), torch.tensor(routes[i], dtype=torch.long)) for i in which]
        for i, handle in zip(which, handles):
            reply, route_N = teachers.result(handle, handle.number), torch.tensor(routes[i], dtype=torch.long).repeat_interleave(BATCHES[i][2])
            assert len(reply.logits_NK) == len(route_N) and len(reply.hidden) == 2
            for index in range(2) if len(route_N) else ():
                wanted, mine = local_answer(variant(index), BATCHES[i], True), route_N == index
                for name in ("logits_NK", "lse_N", "entropy_N", "own_logits_NK"):
                    torch.testing.assert_close(getattr(reply, name)[mine], getattr(wanted, name)[mine], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(reply.hidden[index], wanted.hidden[0][mine], rtol=1e-5, atol=1e-5)
                assert torch.equal(reply.own_ids_NK[mine], wanted.own_ids_NK[mine])
        teachers.progress(), teachers.stop()

    run_ranks(body, num_ranks)


def test_progress_alone_brings_all_replies_and_never_waits():
    """Catches requests that move only when somebody waits for them: nothing would be scored while other rows decode."""
    plan = plan_ranks(3, 3, [1])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            return serve(sharded(world.teacher_meshes[0], False), links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
        teacher = connect(world, False)
        if rank == 1:
            time.sleep(1.0)  # the other one has asked long since, and must not be held up
        began = time.monotonic()
        handles = [teacher.request(Request(*BATCHES[rank], OWN_K)) for _ in range(3)]
        assert time.monotonic() - began < 0.5 and (rank == 1 or handles[0].reply is None)
        deadline = time.monotonic() + 10
        while handles[-1].reply is None:
            teacher.progress()
            time.sleep(0.01)
            assert time.monotonic() < deadline, "progress() does not bring the replies"
        for handle in handles:
            assert_same(handle.result(), local_answer(tiny(False), BATCHES[rank], False))
        teacher.stop()

    run_ranks(body, 3)


def test_inline_teacher_has_the_same_interface_and_values():
    """Catches an inline path that scores something else than the service."""
    plan = plan_ranks(2, 2, [0])

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        model = sharded(world.student_mesh, True)
        teacher = InlineTeacher(model, model.lm_head, vocab_size=VOCAB, temperature=TEMPERATURE, chunk_size=CHUNK)
        values = BATCHES[rank]
        handle = teacher.request(Request(*values, OWN_K, True))
        assert_same(handle.result(), local_answer(tiny(True), values, True))
        teacher.progress(), teacher.stop()

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
        connect(world, False).request(Request(*values, OWN_K)).result()

    assert "planted teacher failure" in fails_within(20, body, 3)


@pytest.mark.parametrize("fault, message", [
    (lambda t: setattr(t, "shape", Shape(VOCAB + 1, 24, torch.float32)), "expects a teacher with"),
    (lambda t: setattr(t, "_seq", 7), "sequence number 7"),
    (lambda t: setattr(t, "temperature", 2.0) if t.links.rank == 0 else None, "different k, own_k"),
    (lambda t: setattr(t, "temperature", float("nan")), "asks at temperature nan"),
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
        teacher.request(Request(*values, OWN_K)).result()

    assert message in fails_within(20, body, 3)


def test_headers_are_validated_field_by_field():
    """Catches a header check that lets a wrong magic, version, checksum, sender, opcode or an absurd size through."""
    good = Header(3, SCORE, 1, rows=2, width=5, positions=4, k=5)
    assert unpack_header(good.pack().tolist(), sender=1, seq=3, opcodes=(NOOP, SCORE)) == good
    for position in range(HEADER_LEN):
        bad = good.pack()
        bad[position] += 1
        with pytest.raises(RuntimeError, match="teacher protocol"):
            unpack_header(bad.tolist(), sender=1, seq=3, opcodes=(NOOP, SCORE))
    for wrong in (good._replace(rows=1 << 40), good._replace(positions=11), good._replace(k=-1), good._replace(opcode=9),
                  good._replace(want_hidden=2), good._replace(dtype=9), good._replace(k=1 << 30, positions=8)):
        with pytest.raises(RuntimeError, match="teacher protocol"):
            unpack_header(wrong.pack().tolist(), sender=1, seq=3, opcodes=(NOOP, SCORE))


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
                teacher.progress()
        teacher.request(Request(*values, OWN_K)).result()
        teacher.stop()

    run_ranks(lambda rank: body(rank, True), 3)
    with pytest.raises(Exception, match="Timed out|closed|reset"):
        run_ranks(lambda rank: body(rank, False), 3)


def test_a_forward_is_never_larger_than_the_largest_micro_batch():
    """Catches a service that joins rows beyond the memory that was planned for, or that does not join at all."""
    plan, widths = plan_ranks(5, 5, [1]), {0: [3, 4], 1: [30], 2: [2] * 9, 3: [5, 2]}

    def body(rank):
        world = make_groups(plan, torch.device("cpu"), 20)
        if not world.is_student:
            model, shapes = sharded(world.teacher_meshes[0], False), []
            model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
            serve(model, links_for(world), Shape(VOCAB, 24, torch.float32), chunk_size=CHUNK)
            return shapes
        values = batch(rank, widths[rank], max(widths[rank]))
        teacher, model = connect(world, False), tiny(False)
        assert_same(teacher.request(Request(*values, OWN_K)).result(), local_answer(model, values, False))
        teacher.stop()

    assert run_ranks(body, 5)[4] == [(2, 4), (1, 30), (9, 2), (2, 5)]
    assert plan_forwards(split_rows([2, 1, 2], 1), [Header(0, SCORE, i, r, w) for i, (r, w) in enumerate([(2, 8), (1, 5), (2, 3)])], 1) \
        == [[[Segment(0, 0, 0, 2)], [Segment(1, 0, 0, 1), Segment(2, 0, 0, 2)]]]
