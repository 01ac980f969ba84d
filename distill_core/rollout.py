# SPDX-License-Identifier: Apache-2.0
"""From samples to training batches and their metrics: deal prompts to ranks, fill micro-batches, select positions.

    mine = deal(prompt_lengths, num_ranks)[rank]                      # pure: the same on every rank
    packer = Packer(token_budget=8192)
    for place, sample in sample_stream(replica, prompts, capture_top_k=16, ...):
        for rows in packer.add(Row(sample, route)):                   # a full micro-batch, while others still decode
            batch = collate(rows, top_k=16, token_fraction=1.0, device=device)
    batches = [collate(rows, ...) for rows in packer.rest()]

Legend: B rows, T tokens, N scored response positions (row by row), K captured ids.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill_core.generate import Sample
from distill_core.losses_kl import flat_rows, select_by_entropy, topk_diagnostics
from distill_core.metrics import Metrics


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices for each rank, costly ones first, as equal in number and cost as possible: serpentine over the costs.

    A pure function of the batch, so that a resumed run deals the same way.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn, index in enumerate(order):
        lap, place = divmod(turn, num_ranks)
        dealt[place if lap % 2 == 0 else num_ranks - 1 - place].append(index)
    return dealt


def claim(dealt: Sequence[Sequence[int]], rank: int, next_turn: Callable[[], int]) -> Iterator[int]:
    """Indices for one rank: half of what it was dealt, then one at a time of what is left of all, while there is any.

    next_turn: 0, 1, 2, ... over all ranks together, each number once. Who gets what depends on how fast the ranks are.
    """
    halves = [len(indices) // 2 for indices in dealt]
    yield from dealt[rank][:halves[rank]]
    rest = [index for indices, half in zip(dealt, halves) for index in indices[half:]]
    while (turn := next_turn()) < len(rest):
        yield rest[turn]


@dataclass(frozen=True, eq=False)
class Row:
    """A sample and the index of the teacher that scores it."""

    sample: Sample
    route: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.sample.prompt) + len(self.sample.tokens)


def plan_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group rows, longest first, so that rows x longest stays within the budget; a longer row stands alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class Packer:
    """Fills micro-batches with samples as they finish, rows x longest within the budget; a longer row stands alone.

    Rows of about equal length stand together (classes of a quarter octave), so that at most a fifth is padding while
    nothing has to wait for the last sample. A function of the samples and their order alone.
    """

    def __init__(self, token_budget: int) -> None:
        self._budget = token_budget
        self._open: dict[int, list[Row]] = {}

    def add(self, row: Row) -> list[list[Row]]:
        """Takes a row; the micro-batches that are full now."""
        key, full = math.ceil(4 * math.log2(row.num_tokens)), []
        rows = self._open.pop(key, [])
        if rows and not self._fits([*rows, row]):
            full.append(rows)
            rows = []
        rows.append(row)
        if self._fits([*rows, max(rows, key=lambda row: row.num_tokens)]):
            self._open[key] = rows
        else:
            full.append(rows)
        return full

    def rest(self) -> list[list[Row]]:
        """Everything that is left, grouped anew."""
        rows = [row for rows in self._open.values() for row in rows]
        self._open.clear()
        return [[rows[i] for i in batch] for batch in plan_batches([row.num_tokens for row in rows], self._budget)]

    def _fits(self, rows: Sequence[Row]) -> bool:
        return len(rows) * max(row.num_tokens for row in rows) <= self._budget


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded rows and, for the N response positions that are scored, what sampling has captured."""

    tokens_BT: Tensor
    lengths_B: Tensor
    counts_B: Tensor  # scored positions of each row
    positions_N: Tensor  # within the row: t predicts token t + 1
    route_B: Tensor  # teacher of each row
    targets_N: Tensor  # the sampled tokens
    logprobs_N: Tensor  # of the sampled tokens, at sampling time
    ids_NK: Tensor  # the student's top-K ids, at sampling time
    topk_logprobs_NK: Tensor
    entropy_N: Tensor
    num_tokens: int  # of the responses, scored or not

    @property
    def num_positions(self) -> int:
        return self.positions_N.shape[0]

    @property
    def rows_N(self) -> Tensor:
        """Indices of the scored positions into hidden states flattened to [B * T, D]."""
        return flat_rows(self.counts_B, self.positions_N, self.tokens_BT.shape[1])

    @property
    def route_N(self) -> Tensor:
        return torch.repeat_interleave(self.route_B, self.counts_B)


def collate(rows: Sequence[Row], *, top_k: int, token_fraction: float, device: torch.device) -> MicroBatch:
    """One micro-batch; token ids need no attention mask because padding stands on the right.

    token_fraction: share of each response's positions that are scored, those of highest student entropy. Without rows:
    one token and no position, which contributes exactly nothing (FSDP2 needs equal numbers of forwards on all ranks).
    """
    samples = [row.sample for row in rows]
    tokens = [torch.tensor([*s.prompt, *s.tokens]) for s in samples] or [torch.zeros(1, dtype=torch.long)]
    chosen = [select_by_entropy(s.entropies, token_fraction) for s in samples]
    counts = [len(places) for places in chosen] or [0]
    starts = [len(s.prompt) - 1 for s in samples]  # the position that predicts the first response token

    def joined(name: str, dtype: torch.dtype, *trailing: int) -> Tensor:
        parts = [torch.as_tensor(getattr(s, name), dtype=dtype)[places] for s, places in zip(samples, chosen)
                 if len(places)]
        return (torch.cat(parts) if parts else torch.zeros(0, *trailing, dtype=dtype)).to(device)

    positions = [start + places for start, places in zip(starts, chosen)]
    return MicroBatch(
        torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(device),
        torch.tensor([len(row) for row in tokens], device=device), torch.tensor(counts, device=device),
        torch.cat(positions or [torch.zeros(0, dtype=torch.long)]).to(device),
        torch.tensor([row.route for row in rows] or [0], device=device), joined("tokens", torch.long),
        joined("logprobs", torch.float32), joined("topk_ids", torch.long, top_k),
        joined("topk_logprobs", torch.float32, top_k), joined("entropies", torch.float32),
        sum(len(s.tokens) for s in samples))


def record_batch(metrics: Metrics, batch: MicroBatch, reply: Any, logits_NK: Tensor | None,
                 teacher_names: Sequence[str]) -> None:
    """Sums over this micro-batch's scored positions; the means over the global batch are taken in Metrics.reduce.

    Where the teacher has not gone through its vocabulary (reply.lse_N is None), what needs that is left out.
    """
    count = batch.num_positions
    metrics.mean("student_mass", batch.topk_logprobs_NK.exp().sum(), count)
    metrics.mean("student_entropy", batch.entropy_N.sum(), count)
    metrics.total("teacher_nonfinite", reply.num_nonfinite)
    metrics.total("tokens", batch.num_tokens)
    if logits_NK is not None:  # how far the training forward is from what was sampled from: 0 if truly on-policy
        trained, sampled = logits_NK.detach().log_softmax(-1), batch.topk_logprobs_NK.log_softmax(-1)
        metrics.mean("logprob_gap", (sampled.exp() * (trained - sampled).abs()).sum(), count)
    if reply.lse_N is not None:
        record_masses(metrics, batch, reply, teacher_names)


def record_masses(metrics: Metrics, batch: MicroBatch, reply: Any, teacher_names: Sequence[str]) -> None:
    """Agreement of student and teacher on the vocabulary; with several teachers also for each one's positions."""
    values = topk_diagnostics(batch.ids_NK, batch.topk_logprobs_NK, teacher_logits_NK=reply.logits_NK[:, 1:],
                              teacher_lse_N=reply.lse_N, teacher_ids_NK=reply.own_ids_NK)._asdict()
    del values["student_mass"]  # known at every step
    values |= {"teacher_entropy": reply.entropy_N,
               "sampled_kl": batch.logprobs_N - (reply.logits_NK[:, 0] - reply.lse_N)}
    for name, value_N in values.items():
        metrics.mean(name, value_N.sum(), batch.num_positions)
    if len(teacher_names) == 1:
        return
    for index, teacher in enumerate(teacher_names):
        mine_N = batch.route_N == index
        for name, value_N in values.items():
            metrics.mean(f"{name}/{teacher}", value_N[mine_N].sum(), mine_N.sum())


def record_samples(metrics: Metrics, samples: Sequence[Sample]) -> None:
    metrics.mean("response_length", sum(len(s.tokens) for s in samples), len(samples))
    metrics.mean("truncated_frac", sum(not s.finished for s in samples), len(samples))
    metrics.mean("repetition_frac", sum(repetition_frac(s.tokens) for s in samples), len(samples))


def repetition_frac(tokens: Sequence[int], *, ngram: int = 4) -> float:
    """Share of the n-grams that repeat an earlier one of the same response; 0 for short responses."""
    grams = [tuple(tokens[i:i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
