# SPDX-License-Identifier: Apache-2.0
"""Frozen teachers as a service: request / reply over collectives, with one interface inline and on ranks of their own.

    student rank:  handle = teachers.request(Request(tokens_BT, lengths_B, counts_B, positions_N, ids_NK), route_B)
                   teachers.progress()       # now and then from long work: moves what has arrived, never waits
                   reply = teachers.result(handle, handle.number)    # reply.logits_NK: the teacher's logits at the ids
    teacher rank:  serve(model, links, shape, chunk_size=1024)   # until the students send STOP

One round of the protocol, the same for N students and M teacher ranks; round i is the i-th request of every student:
  1. each student sends a fixed int64 header to the teacher's first rank (gloo), NOOP headers while it still samples
     (which that rank passes on to its own group, so that nobody waits unboundedly or in vain);
  2. that rank validates them all, broadcasts the table to its group and sends it to every student: from the table alone
     every rank knows which rows go where (`split_rows`), so nobody allocates before sizes are agreed;
  3. students send their rows, each teacher rank runs its forwards (`plan_forwards`: students' parts joined up to the
     size of the largest micro-batch; dummy ones where another rank has more, since FSDP2 needs equal counts) and then
     answers with headers and fp32 values. No [rows, time, vocabulary] exists on either side.
gloo validates neither size nor dtype and would return garbage: hence the checked header before every payload. What is
computed depends on the requests and their order alone, never on when they arrive.

Legend: B rows, T tokens, N scored positions (row by row), K ids per position, D the teacher's hidden size.
"""
from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distill_core.losses_kl import flat_rows
from distill_core.topk_logprobs import HeadStats, head_stats, sparse_head_logits

MAGIC, VERSION, HEADER_LEN = 0x4F5044, 2, 18
NOOP, SCORE, STOP, REPLY = range(4)
OPCODES = ("NOOP", "SCORE", "STOP", "REPLY")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_VALUES = 1 << 31  # bound of every size in a header, checked before anything is allocated


class Reply(NamedTuple):
    """Teacher values at the N scored positions, fp32, logits already divided by the temperature."""

    logits_NK: Tensor  # at the ids of the request
    lse_N: Tensor | None  # logsumexp over the whole vocabulary; this and the next three only with own_k > 0
    entropy_N: Tensor | None  # nats
    own_ids_NK: Tensor | None  # the teacher's own top ids, int32
    own_logits_NK: Tensor | None
    hidden: tuple[Tensor, ...]  # final-norm states in compute dtype when asked for: [N, D], one entry a teacher
    num_nonfinite: int  # of the values above
    busy_s: float  # that the teacher has computed for this reply, and for those of the same round


@dataclass(frozen=True)
class Request:
    """What a student asks about its own right-padded rows: values at positions, of which t predicts token t + 1.

    own_k: how many of the teacher's own top ids to return, with logsumexp and entropy. With 0 the teacher reads K rows
    of its head per position and never goes through the vocabulary.
    """

    tokens_BT: Tensor
    lengths_B: Tensor
    counts_B: Tensor  # scored positions of each row
    positions_N: Tensor  # 0 .. length - 2 within the row, row by row
    ids_NK: Tensor
    own_k: int = 0
    want_hidden: bool = False

    def part(self, rows: Tensor) -> Request:
        """The request for these rows alone (a boolean mask), of the same width."""
        picked_N = torch.repeat_interleave(rows, self.counts_B.long())
        return replace(self, tokens_BT=self.tokens_BT[rows], lengths_B=self.lengths_B[rows],
                       counts_B=self.counts_B[rows], positions_N=self.positions_N[picked_N],
                       ids_NK=self.ids_NK[picked_N])


def answer(model: nn.Module, request: Request, *, vocab_size: int, temperature: float, chunk_size: int) -> Reply:
    """Score a batch with a frozen model: the one code path of inline teachers, teacher ranks and the start-up probe."""
    began = time.monotonic()

    def score(hidden_ND: Tensor, weight_VD: Tensor) -> HeadStats | Tensor:
        weight_VD, ids_NK = weight_VD[:vocab_size], request.ids_NK.long()
        if request.own_k:
            return head_stats(hidden_ND, weight_VD, ids_NK, own_k=request.own_k, chunk_size=chunk_size,
                              temperature=temperature)
        return sparse_head_logits(hidden_ND, weight_VD, ids_NK) / temperature

    with torch.no_grad():
        rows_N = flat_rows(request.counts_B, request.positions_N, request.tokens_BT.shape[1])
        hidden_ND = model(request.tokens_BT.long()).flatten(0, 1)[rows_N]
        scores = model.lm_head(hidden_ND, score)
    values = tuple(scores) if request.own_k else (scores, None, None, None, None)
    logits_NK, lse_N, entropy_N, own_ids_NK, own_logits_NK = values
    num_nonfinite = _num_nonfinite(logits_NK, lse_N, own_logits_NK)  # waits for the device: the time is the whole time
    return Reply(logits_NK, lse_N, entropy_N, None if own_ids_NK is None else own_ids_NK.int(), own_logits_NK,
                 (hidden_ND,) if request.want_hidden else (), num_nonfinite, time.monotonic() - began)


def _num_nonfinite(*values: Tensor | None) -> int:
    return sum(int((~torch.isfinite(value)).sum()) for value in values if value is not None)


# --- several teachers, inline or remote -----------------------------------------------------------------------------

class Teachers:
    """All teachers of a run behind one interface: each row goes to the teacher of its route.

    Every student rank makes the same number of requests in the same order and takes all results; a request without
    rows is one too. The order in which results are taken must be the same on all ranks where a teacher is inline.
    """

    def __init__(self, teachers: Sequence[InlineTeacher | RemoteTeacher]) -> None:
        self._teachers, self._num_requests = tuple(teachers), 0

    def __iter__(self) -> Iterator[InlineTeacher | RemoteTeacher]:
        return iter(self._teachers)

    def request(self, request: Request, route_B: Tensor) -> Handle:
        """route_B: index of the teacher of each row."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if len(self._teachers) == 1:
            return Handle(number, [self._teachers[0].request(request)], None)
        parts = [teacher.request(request.part(route_B == index)) for index, teacher in enumerate(self._teachers)]
        return Handle(number, parts, torch.repeat_interleave(route_B, request.counts_B))

    def result(self, handle: Handle, through: int) -> Reply:
        """Wait for the answer; RuntimeError when a teacher rank is gone, late or answers something else.

        through: number of a request, the same on all ranks and at least the handle's on each: answers up to it are
        waited for. A rank that went on to train with less would be waited for, in training, by one that still waits
        here for a round which the first has not joined.
        """
        assert through >= handle.number, (through, handle.number)
        for teacher in self._teachers:
            teacher.finish_round(through)
        replies = [part.result() for part in handle.parts]
        for teacher in self._teachers:
            teacher.hand_over(through)
        self.progress()  # where that round is over already: later ones go on, and the teachers hear of this rank
        return replies[0] if handle.route_N is None else _merge(replies, handle.route_N)

    def progress(self) -> None:
        """Move what has arrived and tell the teachers that this rank is alive; call it often from long work."""
        for teacher in self._teachers:
            teacher.progress()

    @property
    def stop_wanted(self) -> bool:
        """Whether a rank that only serves was asked to stop the job."""
        return any(teacher.stop_wanted for teacher in self._teachers)

    def open(self) -> None:
        """Once all sides have loaded."""
        for teacher in self._teachers:
            teacher.open()

    def stop(self) -> None:
        """End `serve` on all teacher ranks; all results must have been taken."""
        for teacher in self._teachers:
            teacher.stop()


@dataclass(frozen=True)
class Handle:
    """One request in flight."""

    number: int  # 0, 1, 2, ... of all requests of this rank
    parts: list[InlineHandle | RemoteHandle]  # one a teacher
    route_N: Tensor | None  # teacher of each position; None with one teacher


def _merge(replies: Sequence[Reply], route_N: Tensor) -> Reply:
    """The replies of several teachers, each in the order of its own positions, back in the order of the request."""
    order_N = torch.argsort(torch.argsort(route_N, stable=True))
    tensors = [None if column[0] is None else torch.cat(column)[order_N] for column in zip(*(r[:5] for r in replies))]
    return Reply(*tensors, tuple(hidden for reply in replies for hidden in reply.hidden),
                 sum(reply.num_nonfinite for reply in replies), max(reply.busy_s for reply in replies))


class InlineTeacher:
    """The teacher sharded over the student ranks. A forward happens when its result is taken, on all ranks together."""

    def __init__(self, model: nn.Module, head: nn.Module, *, vocab_size: int, temperature: float,
                 chunk_size: int) -> None:
        """head: a sharded copy of the model's head for whole-vocabulary losses. The model's own must not be called
        apart from its body: torch 2.11 then loses track of a tied group and leaves the embedding sharded."""
        self.model, self.head = model, head
        self.stop_wanted = False  # its ranks are the students
        self.settings = {"vocab_size": vocab_size, "temperature": temperature, "chunk_size": chunk_size}

    def request(self, request: Request) -> InlineHandle:
        return InlineHandle(self, request)

    def progress(self) -> None:
        """Nobody waits for an inline teacher's students."""

    def open(self) -> None:
        """There is no other side."""

    def finish_round(self, seq: int) -> None:
        """There are no rounds: the forward happens in `InlineHandle.result`."""

    def hand_over(self, seq: int) -> None:
        """Nothing to hand over."""

    def stop(self) -> None:
        """Nothing to stop."""


@dataclass(frozen=True)
class InlineHandle:
    teacher: InlineTeacher
    request: Request

    def result(self) -> Reply:
        asked = self.request if len(self.request.tokens_BT) else _dummy_request(self.request)
        return answer(self.teacher.model, asked, **self.teacher.settings)


def _dummy_request(like: Request) -> Request:
    """One token without a scored position: takes part in the forward's collectives and nothing else."""
    one = torch.ones(1, 1, dtype=torch.int32, device=like.tokens_BT.device)
    return replace(like, tokens_BT=one * 0, lengths_B=one[0], counts_B=one[0] * 0, positions_N=like.positions_N[:0],
                   ids_NK=like.ids_NK[:0])


# --- wire format ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Links:
    """Who talks to whom. `students` and `teachers` are global ranks; the first teacher rank leads."""

    rank: int
    students: tuple[int, ...]
    teachers: tuple[int, ...]
    control: dist.ProcessGroup  # gloo over all ranks: headers
    teachers_control: dist.ProcessGroup | None  # gloo over the teacher ranks; None on students
    device: torch.device  # of payloads, which travel on the default group
    timeout_s: float


@dataclass(frozen=True)
class Shape:
    """What both sides must agree on about the teacher; a header that says otherwise ends the job."""

    vocab_size: int
    hidden_size: int
    hidden_dtype: torch.dtype

    @property
    def codes(self) -> tuple[int, int, int]:
        """As in a header."""
        return self.vocab_size, self.hidden_size, DTYPES.index(self.hidden_dtype)

    @staticmethod
    def told(codes: Sequence[int]) -> str:
        vocab_size, hidden_size, dtype = codes
        return f"vocabulary {vocab_size}, hidden size {hidden_size}, {str(DTYPES[dtype]).removeprefix('torch.')}"


class Header(NamedTuple):
    """int64[18]: magic, version, these fifteen, checksum of all before it."""

    seq: int
    opcode: int
    rank: int  # of the sender
    rows: int = 0
    width: int = 0
    positions: int = 0
    k: int = 0
    own_k: int = 0
    want_hidden: int = 0
    vocab_size: int = 0
    hidden_size: int = 0
    dtype: int = 0
    extra: int = 0  # request: bits of the float64 temperature; reply: number of non-finite values
    busy_us: int = 0  # reply: time that this rank has computed in the round
    stop_wanted: int = 0  # last row of a table: a rank of the teacher was asked to stop the job

    def pack(self) -> Tensor:
        values = [MAGIC, VERSION, *self]
        return torch.tensor([*values, _checksum(values)], dtype=torch.int64)


def unpack_header(values: Sequence[int], *, sender: int, seq: int, opcodes: Sequence[int]) -> Header:
    """Validate a received header; RuntimeError saying what each side thought."""
    header = Header(*values[2:HEADER_LEN - 1])
    expected = {"magic": (values[0], MAGIC), "version": (values[1], VERSION),
                "checksum": (values[-1], _checksum(values[:-1])), "sender rank": (header.rank, sender),
                "sequence number": (header.seq, seq)}
    for what, (got, wanted) in expected.items():
        if got != wanted:
            raise RuntimeError(f"teacher protocol: header from rank {sender} has {what} {got}, this side expects "
                               f"{wanted}")
    if header.opcode not in opcodes:
        raise RuntimeError(f"teacher protocol: rank {sender} sent opcode {header.opcode}, this side expects one of "
                           f"{[OPCODES[code] for code in opcodes]}")
    sizes = (header.rows, header.width, header.positions, header.k, header.own_k, header.hidden_size,
             header.rows * header.width, header.positions * (header.k + header.own_k + 2))
    is_sound = header.want_hidden in (0, 1) and 0 <= header.dtype < len(DTYPES)
    if min(sizes) < 0 or max(sizes) > MAX_VALUES or header.positions > header.rows * header.width or not is_sound:
        raise RuntimeError(f"teacher protocol: header from rank {sender} has impossible sizes {header}")
    return header


def _checksum(values: Sequence[int]) -> int:
    total = 0
    for value in values:
        total = (total * 1000003 + value) % (1 << 61)
    return total


def _float_bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _bits_float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def read_table(table: Tensor, links: Links, seq: int) -> tuple[list[Header], bool]:
    """The headers of all students in round `seq`, as the teacher's first rank has passed them on, and whether a rank of
    the teacher was asked to stop the job: that stands in a last row, its own."""
    headers = [unpack_header(row, sender=sender, seq=seq, opcodes=(SCORE, STOP, REPLY))
               for row, sender in zip(table.tolist(), (*links.students, links.teachers[0]), strict=True)]
    return headers[:-1], bool(headers[-1].stop_wanted)


def open_pairs(links: Links) -> None:
    """One number from each student to each teacher rank, in the same order on all: on CUDA the first message between
    two ranks sets up a communicator, for which each would wait inside of something else later."""
    for student in links.students:
        for teacher in links.teachers:
            number = torch.zeros(1, device=links.device)
            if links.rank == student:
                dist.send(number, teacher)
            elif links.rank == teacher:
                dist.recv(number, student)


class Segment(NamedTuple):
    """Rows first .. last - 1 of a student (by index) that one teacher rank (by index) scores."""

    student: int
    teacher: int
    first: int
    last: int


def split_rows(rows: Sequence[int], num_teachers: int) -> list[Segment]:
    """Deal all students' rows, laid end to end, in equal consecutive blocks to the teacher ranks; pure."""
    total, segments, offset = sum(rows), [], 0
    cuts = [total * index // num_teachers for index in range(num_teachers + 1)]
    for student, count in enumerate(rows):
        for teacher in range(num_teachers):
            first, last = max(cuts[teacher], offset), min(cuts[teacher + 1], offset + count)
            if first < last:
                segments.append(Segment(student, teacher, first - offset, last - offset))
        offset += count
    return segments


def plan_forwards(segments: Sequence[Segment], table: Sequence[Header], num_teachers: int) -> list[list[list[Segment]]]:
    """For each teacher rank its forwards, for each forward the segments that it joins; pure.

    A forward has at most as many padded tokens as the largest micro-batch of a student in this round: what the students
    train on fits their memory, so that no other bound is needed here.
    """
    budget = max((header.rows * header.width for header in table), default=0)
    plan: list[list[list[Segment]]] = [[] for _ in range(num_teachers)]
    for segment in segments:
        forwards = plan[segment.teacher]
        joined = [*forwards[-1], segment] if forwards else []
        width = max((table[s.student].width for s in joined), default=0)
        if joined and sum(s.last - s.first for s in joined) * width <= budget:
            forwards[-1] = joined
        else:
            forwards.append([segment])
    return plan


# --- student side ---------------------------------------------------------------------------------------------------

class RemoteTeacher:
    """Client of teacher ranks. Requests are queued; a round starts once the one before it is over."""

    def __init__(self, links: Links, shape: Shape, head: nn.Module | None, *, temperature: float) -> None:
        """head: read-only sharded copy of the teacher's head on the student ranks, for whole-vocabulary losses."""
        self.links, self.shape, self.head, self.temperature = links, shape, head, temperature
        self._seq = 0
        self.stop_wanted = False  # whether a rank of the teacher was asked to stop the job
        self.held = 0  # replies that nobody has taken yet
        self._queue: deque[RemoteHandle] = deque()  # the first one's round is on its way
        self._sends: deque[tuple[int, dist.Work, Tensor]] = deque()  # a tensor must outlive its asynchronous send
        self._last_sent = time.monotonic()

    def request(self, request: Request) -> RemoteHandle:
        rows, width = request.tokens_BT.shape
        header = Header(self._seq, SCORE, self.links.rank, rows, width, *request.ids_NK.shape, request.own_k,
                        int(request.want_hidden), *self.shape.codes, _float_bits(self.temperature))
        handle = RemoteHandle(self, request, header)
        self._send_header(header)
        self._seq += 1
        self._queue.append(handle)
        self.progress()
        return handle

    def open(self) -> None:
        """Once both sides are there: see `open_pairs`."""
        open_pairs(self.links)

    def progress(self) -> None:
        """Move what has arrived, without waiting; when nothing is owed, a NOOP after a quarter of the timeout."""
        while self._queue and not self._holds_enough() and self._queue[0].advance(wait=False):
            pass
        if not self._queue and time.monotonic() - self._last_sent > self.links.timeout_s / 4:
            self._send_header(Header(self._seq, NOOP, self.links.rank))

    def _holds_enough(self) -> bool:
        """Hidden states are large: of those, no more than two micro-batches' lie here before they are used."""
        return self._queue[0].request.want_hidden and self.held >= 2

    def stop(self) -> None:
        assert not self._queue, "results are still owed"
        self._send_header(Header(self._seq, STOP, self.links.rank))
        awaited = self.receive(len(self.links.students) + 1, self.links.teachers[0])
        awaited.work.wait()
        read_table(awaited.buffer, self.links, self._seq)
        self.finish_sends(self._seq)

    def finish_round(self, seq: int) -> None:
        """Wait until all rounds up to this one are over."""
        while self._queue and self._queue[0].seq <= seq:
            self._queue[0].advance(wait=True)

    def hand_over(self, seq: int) -> None:
        """After round `seq`: the next one gets its rows, since the caller may work long now. Not the ones after it, if
        it is over already: while others still take replies of another teacher, that could block in a circle."""
        while self._queue and self._queue[0].seq == seq + 1 and not self._queue[0].rows_sent:
            self._queue[0].advance(wait=True)

    def send(self, tensor: Tensor, rank: int, seq: int, group: dist.ProcessGroup | None = None) -> None:
        """Asynchronous, so that two ranks that send to each other's waiting peers cannot block in a circle."""
        if tensor.numel():
            self._sends.append((seq, dist.isend(tensor, rank, group=group), tensor))

    def receive(self, rows: int, rank: int) -> Receive:
        """Headers from a teacher rank."""
        buffer = torch.zeros(rows, HEADER_LEN, dtype=torch.int64)
        return Receive(buffer, dist.irecv(buffer, rank, group=self.links.control))

    def round_over(self, handle: RemoteHandle) -> None:
        assert self._queue.popleft() is handle
        self.finish_sends(handle.seq)

    def finish_sends(self, seq: int) -> None:
        """Everything sent up to this round has been answered, hence received."""
        while self._sends and self._sends[0][0] <= seq:
            self._sends.popleft()[1].wait()

    def _send_header(self, header: Header) -> None:
        self.send(header.pack(), self.links.teachers[0], header.seq, self.links.control)
        self._last_sent = time.monotonic()


class Receive(NamedTuple):
    """Headers on their way. gloo's work handles cannot be polled, but the buffer can: each header has a checksum."""

    buffer: Tensor
    work: dist.Work

    def arrived(self) -> bool:
        last = self.buffer[-1].tolist()
        return last[0] == MAGIC and last[-1] == _checksum(last[:-1])


class RemoteHandle:
    """One request to one teacher: its round is a generator that yields whatever it has to wait for."""

    def __init__(self, teacher: RemoteTeacher, request: Request, header: Header) -> None:
        self.teacher, self.request, self.header, self.seq = teacher, request, header, header.seq
        self.reply: Reply | None = None
        self.rows_sent = False
        self._steps = self._round()
        self._awaited: Receive | None = None

    def result(self) -> Reply:
        """The reply, once: it is not kept here."""
        self.teacher.finish_round(self.seq)
        reply, self.reply = self.reply, None
        self.teacher.held -= 1
        return reply

    def advance(self, *, wait: bool) -> bool:
        """Go on to the next point of waiting; False if that needs something that has not arrived, and `wait` is off."""
        if self._awaited is not None:
            if not wait and not self._awaited.arrived():
                return False
            self._awaited.work.wait()
        self._awaited = next(self._steps, None)
        return True

    def _round(self) -> Generator[Receive, None, None]:
        teacher, links = self.teacher, self.teacher.links
        awaited = teacher.receive(len(links.students) + 1, links.teachers[0])
        yield awaited
        table, teacher.stop_wanted = read_table(awaited.buffer, links, self.seq)
        me = links.students.index(links.rank)
        if table[me] != self.header:
            raise RuntimeError(f"teacher protocol: rank {links.teachers[0]} acknowledges {table[me]}, this rank has "
                               f"sent {self.header}")
        segments = [segment for segment in split_rows([header.rows for header in table], len(links.teachers))
                    if segment.student == me]
        for segment in segments:
            self._send_rows(segment)
        self.rows_sent = True
        parts = []
        for segment in segments:
            awaited = teacher.receive(1, links.teachers[segment.teacher])
            yield awaited
            header = unpack_header(awaited.buffer[0].tolist(), sender=links.teachers[segment.teacher], seq=self.seq,
                                   opcodes=(REPLY,))
            parts.append(_receive_values(links, teacher.shape, self.request, header, segment))
        self.reply = _join(parts or [_empty_reply(teacher.shape, self.request, links.device)])
        teacher.held += 1
        teacher.round_over(self)

    def _send_rows(self, segment: Segment) -> None:
        links, request = self.teacher.links, _rows_of(self.request, segment)
        layout = torch.stack([request.lengths_B, request.counts_B], dim=1)
        ids = torch.cat([request.positions_N[:, None], request.ids_NK], dim=1)
        for payload in (torch.cat([layout, request.tokens_BT], dim=1), ids):
            self.teacher.send(payload.int().to(links.device), links.teachers[segment.teacher], self.seq)


def _rows_of(request: Request, segment: Segment) -> Request:
    rows = torch.zeros(len(request.tokens_BT), dtype=torch.bool, device=request.tokens_BT.device)
    rows[segment.first:segment.last] = True
    return request.part(rows)


def _receive_values(links: Links, shape: Shape, request: Request, header: Header, segment: Segment) -> Reply:
    positions, k = int(request.counts_B[segment.first:segment.last].sum()), request.ids_NK.shape[1]
    if header[9:12] != shape.codes:
        raise RuntimeError(f"teacher protocol: rank {header.rank} holds a teacher with {shape.told(header[9:12])}, "
                           f"this rank expects {shape.told(shape.codes)}")
    if (header.positions, header.k, header.own_k) != (positions, k, request.own_k):
        raise RuntimeError(f"teacher protocol: rank {header.rank} answers {header.positions} positions x ({header.k} + "
                           f"{header.own_k}) ids, this rank asked for {positions} x ({k} + {request.own_k})")
    source, own_k = links.teachers[segment.teacher], request.own_k
    values = _recv_payload((positions, k + 2 + own_k if own_k else k), torch.float32, source, links)
    own_ids = _recv_payload((positions, own_k), torch.int32, source, links)
    hidden = ()
    if request.want_hidden:
        hidden = (_recv_payload((positions, shape.hidden_size), shape.hidden_dtype, source, links),)
    own = (values[:, k], values[:, k + 1], own_ids, values[:, k + 2:]) if own_k else (None,) * 4
    return Reply(values[:, :k], *own, hidden, header.extra, header.busy_us * 1e-6)


def _join(parts: Sequence[Reply]) -> Reply:
    """The parts of one reply that different ranks of one teacher have computed, in the order of the rows."""
    tensors = [None if column[0] is None else torch.cat(column) for column in zip(*(part[:5] for part in parts))]
    hidden = tuple(torch.cat(column) for column in zip(*(part.hidden for part in parts)))
    return Reply(*tensors, hidden, sum(part.num_nonfinite for part in parts), max(part.busy_s for part in parts))


def _empty_reply(shape: Shape, request: Request, device: torch.device) -> Reply:
    empty = torch.zeros(0, device=device)
    own_ids = torch.zeros(0, request.own_k, dtype=torch.int32, device=device)
    own = (empty, empty, own_ids, own_ids.float()) if request.own_k else (None,) * 4
    hidden = torch.zeros(0, shape.hidden_size, dtype=shape.hidden_dtype, device=device)
    return Reply(empty.new_zeros(0, request.ids_NK.shape[1]), *own, (hidden,) if request.want_hidden else (), 0, 0.0)


def _recv_payload(shape: tuple[int, ...], dtype: torch.dtype, source: int, links: Links) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=links.device)
    if tensor.numel():
        dist.recv(tensor, source)
    return tensor


# --- teacher side ---------------------------------------------------------------------------------------------------

def serve(model: nn.Module, links: Links, shape: Shape, *, chunk_size: int,
          stop_wanted: Callable[[], bool] = lambda: False) -> int:
    """Answer rounds until every student has sent STOP; returns their number. Any fault raises, and so ends the job.

    stop_wanted: whether this rank was asked to stop the job; the students hear of it in the next round.
    """
    open_pairs(links)
    seq, me = 0, links.teachers.index(links.rank)
    while True:
        table = _next_round(links, shape, seq, stop_wanted)
        if table[0].opcode == STOP:
            return seq
        segments = split_rows([header.rows for header in table], len(links.teachers))
        plan = plan_forwards(segments, table, len(links.teachers))
        requests = {segment: _receive_request(links, shape, table[segment.student], segment)
                    for forward in plan[me] for segment in forward}
        joined = [_join_requests([requests[segment] for segment in forward]) for forward in plan[me]]
        dummies = [_nothing(table[0], links.device)] * (max(map(len, plan)) - len(joined))
        replies = [answer(model, request, vocab_size=shape.vocab_size, temperature=_bits_float(table[0].extra),
                          chunk_size=chunk_size) for request in [*joined, *dummies]]
        # Only now: a send may wait for a student that waits for another teacher rank, which must not lack our forwards.
        busy_s = sum(reply.busy_s for reply in replies)
        for forward, reply in zip(plan[me], replies, strict=False):
            first = 0
            for segment in forward:
                last = first + len(requests[segment].positions_N)
                _send_reply(links, shape, seq, links.students[segment.student], _cut(reply, first, last, busy_s))
                first = last
        seq += 1


def _next_round(links: Links, shape: Shape, seq: int, stop_wanted: Callable[[], bool]) -> list[Header]:
    """The headers of all students for round `seq`, the same on every teacher rank, acknowledged to every student."""
    table = torch.zeros(len(links.students) + 1, HEADER_LEN, dtype=torch.int64)
    is_leader = links.rank == links.teachers[0]
    if is_leader:
        headers = [_receive_header(links, student, seq) for student in links.students]
        _check_round(headers, shape)
        table = torch.stack([header.pack() for header in (*headers, Header(seq, REPLY, links.rank))])
        _tell_group(links, table)
    else:
        while not table.any():  # an empty table: the leader has heard from a student that is still sampling
            _tell_group(links, table)
    wanted = torch.tensor([int(stop_wanted())])
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=links.teachers_control)
    if is_leader:
        table[-1] = Header(seq, REPLY, links.rank, stop_wanted=int(wanted)).pack()
        for student in links.students:
            dist.send(table, student, group=links.control)
    return read_table(table, links, seq)[0]


def _tell_group(links: Links, table: Tensor) -> None:
    dist.broadcast(table, links.teachers[0], group=links.teachers_control)


def _receive_header(links: Links, student: int, seq: int) -> Header:
    """The next SCORE or STOP of a student; each NOOP before it restarts the bounded wait."""
    while True:
        raw = torch.empty(HEADER_LEN, dtype=torch.int64)
        dist.recv(raw, student, group=links.control)
        header = unpack_header(raw.tolist(), sender=student, seq=seq, opcodes=(NOOP, SCORE, STOP))
        if header.opcode != NOOP:
            return header
        _tell_group(links, torch.zeros(len(links.students) + 1, HEADER_LEN, dtype=torch.int64))


def _check_round(headers: Sequence[Header], shape: Shape) -> None:
    """All students ask for the same kind of thing, about the model that this side holds."""
    first = headers[0]
    for header in headers:
        if header.opcode != first.opcode:
            raise RuntimeError(f"teacher protocol: rank {header.rank} sent {OPCODES[header.opcode]} while rank "
                               f"{first.rank} sent {OPCODES[first.opcode]} in the same round")
        if header.opcode == STOP:
            continue
        if header[6:9] + (header.extra,) != first[6:9] + (first.extra,):
            raise RuntimeError(f"teacher protocol: ranks {first.rank} and {header.rank} ask for different k, own_k, "
                               f"hidden states or temperature: {first} and {header}")
        if header[9:12] != shape.codes:
            raise RuntimeError(f"teacher protocol: rank {header.rank} expects a teacher with "
                               f"{shape.told(header[9:12])}, this one has {shape.told(shape.codes)}")
        if not 0.0 < _bits_float(header.extra) < float("inf"):
            raise RuntimeError(f"teacher protocol: rank {header.rank} asks at temperature {_bits_float(header.extra)}")
        if header.k > shape.vocab_size + 1 or header.own_k > shape.vocab_size:  # k: the sampled token and the top K
            raise RuntimeError(f"teacher protocol: rank {header.rank} asks for {header.k} + {header.own_k} ids of a "
                               f"vocabulary of {shape.vocab_size}")


def _receive_request(links: Links, shape: Shape, header: Header, segment: Segment) -> Request:
    source, rows = links.students[segment.student], segment.last - segment.first
    layout = torch.empty(rows, 2 + header.width, dtype=torch.int32, device=links.device)
    dist.recv(layout, source)
    lengths_B, counts_B, tokens_BT = layout[:, 0], layout[:, 1], layout[:, 2:]
    sound = (lengths_B >= 1) & (lengths_B <= header.width) & (counts_B >= 0) & (counts_B < lengths_B)
    in_range = (tokens_BT >= 0) & (tokens_BT < shape.vocab_size)
    num_positions = int(counts_B.sum()) if sound.all() else -1
    if not in_range.all() or not 0 <= num_positions <= header.positions:
        raise RuntimeError(f"teacher protocol: rank {source} sent rows with impossible lengths or token ids outside "
                           f"0 .. {shape.vocab_size - 1}")
    ids = torch.empty(num_positions, 1 + header.k, dtype=torch.int32, device=links.device)
    if ids.numel():
        dist.recv(ids, source)
    positions_N, ids_NK = ids[:, 0].long(), ids[:, 1:]
    last_N = torch.repeat_interleave(lengths_B, counts_B) - 2
    if not ((positions_N >= 0) & (positions_N <= last_N)).all():
        raise RuntimeError(f"teacher protocol: rank {source} asks for positions outside of its rows")
    if not ((ids_NK >= 0) & (ids_NK < shape.vocab_size)).all():
        raise RuntimeError(f"teacher protocol: rank {source} asks for ids outside 0 .. {shape.vocab_size - 1}")
    return Request(tokens_BT, lengths_B, counts_B, positions_N, ids_NK, header.own_k, bool(header.want_hidden))


def _join_requests(requests: Sequence[Request]) -> Request:
    """One request for the rows of several, padded on the right to the widest."""
    width = max(request.tokens_BT.shape[1] for request in requests)
    tokens_BT = torch.cat([F.pad(r.tokens_BT, (0, width - r.tokens_BT.shape[1])) for r in requests])
    joined = {name: torch.cat([getattr(request, name) for request in requests])
              for name in ("lengths_B", "counts_B", "positions_N", "ids_NK")}
    return replace(requests[0], tokens_BT=tokens_BT, **joined)


def _nothing(header: Header, device: torch.device) -> Request:
    """A dummy request of the same kind as this round's."""
    none = torch.zeros(0, header.k, dtype=torch.int32, device=device)
    return _dummy_request(Request(none, none[:, 0], none[:, 0], none[:, 0].long(), none, header.own_k,
                                  bool(header.want_hidden)))


def _cut(reply: Reply, first: int, last: int, busy_s: float) -> Reply:
    """Positions first .. last - 1 of a reply."""
    tensors = [None if tensor is None else tensor[first:last] for tensor in reply[:5]]
    return Reply(*tensors, tuple(hidden[first:last] for hidden in reply.hidden),
                 _num_nonfinite(tensors[0], tensors[1], tensors[4]), busy_s)


def _send_reply(links: Links, shape: Shape, seq: int, student: int, reply: Reply) -> None:
    values, own_k = reply.logits_NK, 0
    if reply.own_ids_NK is not None:
        own_k = reply.own_ids_NK.shape[1]
        values = torch.cat([values, reply.lse_N[:, None], reply.entropy_N[:, None], reply.own_logits_NK], dim=1)
    positions, k = reply.logits_NK.shape
    header = Header(seq, REPLY, links.rank, positions, 1, positions, k, own_k, len(reply.hidden), *shape.codes,
                    reply.num_nonfinite, int(reply.busy_s * 1e6))
    dist.send(header.pack(), student, group=links.control)
    for tensor in (values, reply.own_ids_NK, *reply.hidden):
        if tensor is not None and tensor.numel():
            dist.send(tensor.contiguous(), student)
