# SPDX-License-Identifier: Apache-2.0
"""The frozen teacher as a service: request / reply over collectives, with one interface inline and on its own ranks.

    student rank:  handle = teacher.request(tokens_BT, lengths_B, starts_B, ids_NK=ids, own_k=16)
                   ...                       # train on something else meanwhile
                   reply = handle.result()   # reply.logits_NK: the teacher's logits at the student's ids
    teacher rank:  serve(model, links, chunk_size=1024)   # until the students send STOP

One round of the protocol, the same for N students and M teacher ranks:
  1. each student sends a fixed int64 header to the teacher's first rank (gloo), NOOP headers while it still samples
     (which that rank passes on to its own group, so that nobody waits unboundedly or in vain);
  2. that rank validates them all, broadcasts the table to its group and sends it to every student: from the table alone
     every rank knows which rows go where (`split_rows`), so nobody allocates before sizes are agreed;
  3. students send their rows, each teacher rank runs one forward for each student's part (dummy ones where another rank
     has more: FSDP2 needs equal counts) and then answers with headers and fp32 values. A forward is never larger than
     one student's micro-batch, and no [rows, time, vocabulary] exists on either side.
gloo validates neither size nor dtype and would return garbage: hence the checked header before every payload.

Legend: B rows, T tokens, N response positions (row by row), K ids per position, D the teacher's hidden size.
"""
from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_core.losses_kl import response_rows
from distill_core.topk_logprobs import HeadStats, head_stats

MAGIC, VERSION, HEADER_LEN = 0x4F5044, 1, 16
NOOP, SCORE, STOP, REPLY = range(4)
OPCODES = ("NOOP", "SCORE", "STOP", "REPLY")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_TOKENS = 1 << 28  # bound of every size in a header, checked before anything is allocated


class Reply(NamedTuple):
    """Teacher values at the N response positions, fp32, logits already divided by the temperature."""

    logits_NK: Tensor  # at the ids of the request
    lse_N: Tensor  # logsumexp over the whole vocabulary
    entropy_N: Tensor  # nats
    own_ids_NK: Tensor  # the teacher's own top ids, int32
    own_logits_NK: Tensor
    hidden_ND: Tensor | None  # final-norm states in compute dtype, when asked for
    num_nonfinite: int  # of the values above


@dataclass(frozen=True)
class Request:
    """What a student asks about its own rows; tokens are right-padded, starts_B is where each response begins."""

    tokens_BT: Tensor
    lengths_B: Tensor
    starts_B: Tensor
    ids_NK: Tensor
    own_k: int
    want_hidden: bool


def answer(model: nn.Module, request: Request, *, vocab_size: int, temperature: float, chunk_size: int) -> Reply:
    """Score a batch with a frozen model: the one code path of inline teachers, teacher ranks and the start-up probe."""
    with torch.no_grad():
        hidden_BTD = model(request.tokens_BT.long())
        rows_N = response_rows(request.starts_B, request.lengths_B, request.tokens_BT.shape[1])
        hidden_ND = hidden_BTD.flatten(0, 1)[rows_N]
        stats: HeadStats = model.lm_head(hidden_ND, lambda hidden, weight: head_stats(
            hidden, weight[:vocab_size], request.ids_NK.long(), own_k=request.own_k, chunk_size=chunk_size,
            temperature=temperature))
    bad = sum(int((~torch.isfinite(value)).sum()) for value in (stats.logits_NK, stats.lse_N, stats.own_logits_NK))
    return Reply(stats.logits_NK, stats.lse_N, stats.entropy_N, stats.own_ids_NK.int(), stats.own_logits_NK,
                 hidden_ND if request.want_hidden else None, bad)


# --- inline ---------------------------------------------------------------------------------------------------------

class InlineTeacher:
    """The teacher sharded over the student ranks: every student rank calls `request` the same number of times."""

    def __init__(self, model: nn.Module, head: nn.Module, *, vocab_size: int, temperature: float,
                 chunk_size: int) -> None:
        """head: a sharded copy of the model's head for whole-vocabulary losses. The model's own must not be called
        apart from its body: torch 2.11 then loses track of a tied group and leaves the embedding sharded."""
        self.model, self.head = model, head
        self._settings = {"vocab_size": vocab_size, "temperature": temperature, "chunk_size": chunk_size}

    def request(self, tokens_BT: Tensor, lengths_B: Tensor, starts_B: Tensor, *, ids_NK: Tensor, own_k: int,
                want_hidden: bool = False) -> "InlineHandle":
        request = Request(tokens_BT, lengths_B, starts_B, ids_NK, own_k, want_hidden)
        return InlineHandle(answer(self.model, request, **self._settings))

    def keepalive(self) -> None:
        """Nobody waits for an inline teacher's students."""

    def stop(self) -> None:
        """Nothing to stop."""


@dataclass(frozen=True)
class InlineHandle:
    reply: Reply

    def result(self) -> Reply:
        return self.reply


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


class Header(NamedTuple):
    """int64[16]: magic, version, these thirteen, checksum of all before it."""

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

    def pack(self) -> Tensor:
        values = [MAGIC, VERSION, *self]
        return torch.tensor([*values, _checksum(values)], dtype=torch.int64)


def unpack_header(raw: Tensor, *, sender: int, seq: int, opcodes: Sequence[int]) -> Header:
    """Validate a received header; RuntimeError saying what each side thought."""
    values = raw.tolist()
    header = Header(*values[2:HEADER_LEN - 1])
    expected = {"magic": (values[0], MAGIC), "version": (values[1], VERSION),
                "checksum": (values[-1], _checksum(values[:-1])), "sender rank": (header.rank, sender)}
    if header.opcode != NOOP:
        expected["sequence number"] = (header.seq, seq)
    for what, (got, wanted) in expected.items():
        if got != wanted:
            raise RuntimeError(f"teacher protocol: header from rank {sender} has {what} {got}, this side expects "
                               f"{wanted}")
    if header.opcode not in opcodes:
        raise RuntimeError(f"teacher protocol: rank {sender} sent opcode {header.opcode}, this side expects one of "
                           f"{[OPCODES[code] for code in opcodes]}")
    sizes = (header.rows, header.width, header.positions, header.k, header.own_k, header.rows * header.width)
    if min(sizes) < 0 or max(sizes) > MAX_TOKENS or header.positions > header.rows * header.width:
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


# --- student side ---------------------------------------------------------------------------------------------------

class RemoteTeacher:
    """Client of teacher ranks. Up to two requests in flight; results are taken in the order of the requests."""

    def __init__(self, links: Links, shape: Shape, head: nn.Module | None, *, temperature: float) -> None:
        """head: read-only sharded copy of the teacher's head on the student ranks, for whole-vocabulary losses."""
        self.links, self.shape, self.head, self.temperature = links, shape, head, temperature
        self._seq = 0
        self._pending: list[RemoteHandle] = []
        self._sends: list[tuple[dist.Work, Tensor]] = []  # a tensor must outlive its asynchronous send
        self._last_sent = time.monotonic()

    def request(self, tokens_BT: Tensor, lengths_B: Tensor, starts_B: Tensor, *, ids_NK: Tensor, own_k: int,
                want_hidden: bool = False) -> "RemoteHandle":
        assert len(self._pending) < 2, "take the result of an earlier request first"
        handle = RemoteHandle(self, self._seq, Request(tokens_BT, lengths_B, starts_B, ids_NK, own_k, want_hidden))
        rows, width = tokens_BT.shape
        self._send(Header(self._seq, SCORE, self.links.rank, rows, width, ids_NK.shape[0], ids_NK.shape[1], own_k,
                          int(want_hidden), self.shape.vocab_size, self.shape.hidden_size,
                          DTYPES.index(self.shape.hidden_dtype), _float_bits(self.temperature)))
        self._seq += 1
        self._pending.append(handle)
        if len(self._pending) == 1:
            handle.dispatch()
        return handle

    def keepalive(self) -> None:
        """Call often from long work that owes the teacher nothing: after a quarter of the timeout it sends NOOP."""
        if not self._pending and time.monotonic() - self._last_sent > self.links.timeout_s / 4:
            self._send(Header(self._seq, NOOP, self.links.rank))

    def stop(self) -> None:
        """End `serve` on the teacher ranks; no request may be in flight."""
        assert not self._pending, "results are still owed"
        self._send(Header(self._seq, STOP, self.links.rank))
        self._receive_table()

    def _send(self, header: Header) -> None:
        raw = header.pack()
        self._sends.append((dist.isend(raw, self.links.teachers[0], group=self.links.control), raw))
        self._last_sent = time.monotonic()

    def _receive_table(self) -> list[Header]:
        """The acknowledged headers of this round, one per student; our own earlier sends are complete by then."""
        table = torch.empty(len(self.links.students), HEADER_LEN, dtype=torch.int64)
        dist.recv(table, self.links.teachers[0], group=self.links.control)
        while len(self._sends) > len(self._pending[1:]):
            self._sends.pop(0)[0].wait()
        return [Header(*row[2:HEADER_LEN - 1]) for row in table.tolist()]

    def _collected(self, handle: "RemoteHandle") -> None:
        assert self._pending[0] is handle, "take results in the order of the requests"
        self._pending.pop(0)
        if self._pending:
            self._pending[0].dispatch()


class RemoteHandle:
    """One request in flight."""

    def __init__(self, teacher: RemoteTeacher, seq: int, request: Request) -> None:
        self._teacher, self._seq, self._request = teacher, seq, request
        self._segments: list[Segment] = []

    def dispatch(self) -> None:
        """Wait for the round's acknowledgement and send this rank's rows where the table says."""
        links = self._teacher.links
        table = self._teacher._receive_table()
        me = links.students.index(links.rank)
        segments = split_rows([header.rows for header in table], len(links.teachers))
        self._segments = [segment for segment in segments if segment.student == me]
        request, counts_B = self._request, (self._request.lengths_B - self._request.starts_B).tolist()
        for segment in self._segments:
            rows = slice(segment.first, segment.last)
            layout = torch.stack([request.lengths_B[rows], request.starts_B[rows]], dim=1)
            _send_payload(torch.cat([layout, request.tokens_BT[rows]], dim=1).int(), segment.teacher, links)
            first, last = sum(counts_B[:segment.first]), sum(counts_B[:segment.last])
            _send_payload(request.ids_NK[first:last].int(), segment.teacher, links)

    def result(self) -> Reply:
        """Wait for the answer; RuntimeError when a teacher rank is gone, late or answers something else."""
        links, shape, request = self._teacher.links, self._teacher.shape, self._request
        parts = [_receive_reply(links, shape, request, self._seq, segment) for segment in self._segments]
        self._teacher._collected(self)
        if not parts:
            parts = [_empty_reply(shape, request, links.device)]
        tensors = [torch.cat(column) for column in zip(*(part[:5] for part in parts))]
        hidden = torch.cat([part.hidden_ND for part in parts]) if request.want_hidden else None
        return Reply(*tensors, hidden, sum(part.num_nonfinite for part in parts))


def _receive_reply(links: Links, shape: Shape, request: Request, seq: int, segment: Segment) -> Reply:
    source = links.teachers[segment.teacher]
    raw = torch.empty(HEADER_LEN, dtype=torch.int64)
    dist.recv(raw, source, group=links.control)
    header = unpack_header(raw, sender=source, seq=seq, opcodes=(REPLY,))
    rows = slice(segment.first, segment.last)
    positions, k = int((request.lengths_B[rows] - request.starts_B[rows]).sum()), request.ids_NK.shape[1]
    if (header.positions, header.k, header.own_k) != (positions, k, request.own_k):
        raise RuntimeError(f"teacher protocol: rank {source} answers {header.positions} positions x ({header.k} + "
                           f"{header.own_k}) ids, this rank asked for {positions} x ({k} + {request.own_k})")
    values = _recv_payload((positions, k + 2 + request.own_k), torch.float32, segment.teacher, links)
    own_ids = _recv_payload((positions, request.own_k), torch.int32, segment.teacher, links)
    hidden = None
    if request.want_hidden:
        hidden = _recv_payload((positions, shape.hidden_size), shape.hidden_dtype, segment.teacher, links)
    return Reply(values[:, :k], values[:, k], values[:, k + 1], own_ids, values[:, k + 2:], hidden, header.extra)


def _empty_reply(shape: Shape, request: Request, device: torch.device) -> Reply:
    empty = torch.zeros(0, device=device)
    ids = torch.zeros(0, request.own_k, dtype=torch.int32, device=device)
    hidden = torch.zeros(0, shape.hidden_size, dtype=shape.hidden_dtype, device=device)
    return Reply(empty.view(0, 1).expand(0, request.ids_NK.shape[1]), empty, empty, ids, ids.float(), hidden, 0)


def _send_payload(tensor: Tensor, teacher: int, links: Links) -> None:
    if tensor.numel():
        dist.send(tensor.to(links.device).contiguous(), links.teachers[teacher])


def _recv_payload(shape: tuple[int, ...], dtype: torch.dtype, teacher: int, links: Links) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=links.device)
    if tensor.numel():
        dist.recv(tensor, links.teachers[teacher])
    return tensor


# --- teacher side ---------------------------------------------------------------------------------------------------

def serve(model: nn.Module, links: Links, shape: Shape, *, chunk_size: int) -> int:
    """Answer rounds until every student has sent STOP; returns their number. Any fault raises, and so ends the job."""
    seq, me = 0, links.teachers.index(links.rank)
    while True:
        table = _next_round(links, shape, seq)
        if table[0].opcode == STOP:
            return seq
        segments = split_rows([header.rows for header in table], len(links.teachers))
        mine = [segment for segment in segments if segment.teacher == me]
        requests = [_receive_request(links, shape, table[segment.student], segment) for segment in mine]
        dummies = [_dummy_request(table[0], links.device)] * (_num_forwards(segments) - len(mine))
        replies = [answer(model, request, vocab_size=shape.vocab_size, temperature=_bits_float(table[0].extra),
                          chunk_size=chunk_size) for request in [*requests, *dummies]]
        # Only now: a send may wait for a student that waits for another teacher rank, which must not lack our forwards.
        for segment, reply in zip(mine, replies, strict=False):
            _send_reply(links, seq, links.students[segment.student], reply)
        seq += 1


def _num_forwards(segments: Sequence[Segment]) -> int:
    """The same on every teacher rank, from the table alone: what the rank with the most segments needs."""
    loads = [segment.teacher for segment in segments]
    return max((loads.count(teacher) for teacher in set(loads)), default=0)


def _next_round(links: Links, shape: Shape, seq: int) -> list[Header]:
    """The headers of all students for round `seq`, the same on every teacher rank, acknowledged to every student."""
    table = torch.zeros(len(links.students), HEADER_LEN, dtype=torch.int64)
    if links.rank == links.teachers[0]:
        headers = [_receive_header(links, student, seq) for student in links.students]
        _check_round(headers, shape)
        table = torch.stack([header.pack() for header in headers])
        for student in links.students:
            dist.send(table, student, group=links.control)
        _tell_group(links, table)
    else:
        while not table.any():  # an empty table: the leader has heard from a student that is still sampling
            _tell_group(links, table)
    return [Header(*row[2:HEADER_LEN - 1]) for row in table.tolist()]


def _tell_group(links: Links, table: Tensor) -> None:
    dist.broadcast(table, links.teachers[0], group=links.teachers_control)


def _receive_header(links: Links, student: int, seq: int) -> Header:
    """The next SCORE or STOP of a student; each NOOP before it restarts the bounded wait."""
    while True:
        raw = torch.empty(HEADER_LEN, dtype=torch.int64)
        dist.recv(raw, student, group=links.control)
        header = unpack_header(raw, sender=student, seq=seq, opcodes=(NOOP, SCORE, STOP))
        if header.opcode != NOOP:
            return header
        _tell_group(links, torch.zeros(len(links.students), HEADER_LEN, dtype=torch.int64))


def _check_round(headers: Sequence[Header], shape: Shape) -> None:
    """All students ask for the same kind of thing, about the model that this side holds."""
    first = headers[0]
    mine = (shape.vocab_size, shape.hidden_size, DTYPES.index(shape.hidden_dtype))
    for header in headers:
        if header.opcode != first.opcode:
            raise RuntimeError(f"teacher protocol: rank {header.rank} sent {OPCODES[header.opcode]} while rank "
                               f"{first.rank} sent {OPCODES[first.opcode]} in the same round")
        if header.opcode == STOP:
            continue
        if header[6:9] + (header.extra,) != first[6:9] + (first.extra,):
            raise RuntimeError(f"teacher protocol: ranks {first.rank} and {header.rank} ask for different k, own_k, "
                               f"hidden states or temperature: {first} and {header}")
        if header[9:12] != mine:
            raise RuntimeError(f"teacher protocol: rank {header.rank} expects a teacher with (vocabulary, hidden size, "
                               f"dtype code) {header[9:12]}, this one has {mine}")
        if not 0 <= max(header.k, header.own_k) <= shape.vocab_size:
            raise RuntimeError(f"teacher protocol: rank {header.rank} asks for {header.k} + {header.own_k} ids of a "
                               f"vocabulary of {shape.vocab_size}")


def _receive_request(links: Links, shape: Shape, header: Header, segment: Segment) -> Request:
    source, rows = links.students[segment.student], segment.last - segment.first
    layout = torch.empty(rows, 2 + header.width, dtype=torch.int32, device=links.device)
    dist.recv(layout, source)
    lengths_B, starts_B, tokens_BT = layout[:, 0], layout[:, 1], layout[:, 2:]
    sound = (starts_B >= 1) & (lengths_B >= starts_B) & (lengths_B <= header.width)
    in_range = (tokens_BT >= 0) & (tokens_BT < shape.vocab_size)
    positions = int((lengths_B - starts_B).sum()) if sound.all() else -1
    if not in_range.all() or not 0 <= positions <= header.positions:
        raise RuntimeError(f"teacher protocol: rank {source} sent rows with impossible lengths or token ids outside "
                           f"0 .. {shape.vocab_size - 1}")
    ids_NK = torch.empty(positions, header.k, dtype=torch.int32, device=links.device)
    if ids_NK.numel():
        dist.recv(ids_NK, source)
        if not ((ids_NK >= 0) & (ids_NK < shape.vocab_size)).all():
            raise RuntimeError(f"teacher protocol: rank {source} asks for ids outside 0 .. {shape.vocab_size - 1}")
    return Request(tokens_BT, lengths_B, starts_B, ids_NK, header.own_k, bool(header.want_hidden))


def _dummy_request(like: Header, device: torch.device) -> Request:
    """One token without a response position: takes part in the forward's collectives and nothing else."""
    one = torch.ones(1, dtype=torch.int32, device=device)
    return Request(torch.zeros(1, 1, dtype=torch.int32, device=device), one, one,
                   torch.zeros(0, like.k, dtype=torch.int32, device=device), like.own_k, bool(like.want_hidden))


def _send_reply(links: Links, seq: int, student: int, reply: Reply) -> None:
    values = torch.cat([reply.logits_NK, reply.lse_N[:, None], reply.entropy_N[:, None], reply.own_logits_NK], dim=1)
    positions, k = reply.logits_NK.shape
    header = Header(seq, REPLY, links.rank, rows=positions, width=1, positions=positions, k=k,
                    own_k=reply.own_ids_NK.shape[1], extra=reply.num_nonfinite)
    dist.send(header.pack(), student, group=links.control)
    for tensor in (values, reply.own_ids_NK, reply.hidden_ND):
        if tensor is not None and tensor.numel():
            dist.send(tensor.contiguous(), student)
