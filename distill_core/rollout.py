# SPDX-License-Identifier: Apache-2.0
"""From prompts to training batches and their metrics: deal prompts to ranks, sample, pack by token budget, have scored.

    mine = deal(prompt_lengths, num_ranks)[rank]                      # pure: the same on every rank
    samples = generate(replica, prompts, sample_ids=..., capture_top_k=16, ...)
    micro_batches = pack(samples, token_budget=8192, num_batches=agreed, top_k=16, device=device)

Legend: B rows, T tokens, N response positions (row by row), K captured ids.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill_core.generate import Sample
from distill_core.losses_kl import response_rows, topk_diagnostics
from distill_core.metrics import Metrics


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices for each rank, as equal in number as possible, long ones spread: serpentine over the sorted costs.

    A pure function of the batch, so that a resumed run deals the same way.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn, index in enumerate(order):
        lap, place = divmod(turn, num_ranks)
        dealt[place if lap % 2 == 0 else num_ranks - 1 - place].append(index)
    return [sorted(indices) for indices in dealt]


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded rows and, for their N response positions, what sampling has captured."""

    tokens_BT: Tensor
    lengths_B: Tensor
    starts_B: Tensor  # first response token of each row
    rows_N: Tensor  # indices into flattened [B * T] hidden states: position t predicts token t + 1
    targets_N: Tensor  # the sampled tokens
    logprobs_N: Tensor  # of the sampled tokens, at sampling time
    ids_NK: Tensor  # the student's top-K ids, at sampling time
    topk_logprobs_NK: Tensor
    entropy_N: Tensor

    @property
    def num_positions(self) -> int:
        return self.rows_N.shape[0]


def plan_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group rows, longest first, so that rows x longest stays within the budget; a longer row stands alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pack(samples: Sequence[Sample], *, token_budget: int, num_batches: int, top_k: int,
         device: torch.device) -> list[MicroBatch]:
    """`num_batches` micro-batches (at least as many as `plan_batches` gives): FSDP2 needs equal counts on all ranks.

    The padding ones hold one token and no response position: they contribute exactly nothing.
    """
    plan = plan_batches([len(s.prompt) + len(s.tokens) for s in samples], token_budget)
    assert len(plan) <= num_batches, (len(plan), num_batches)
    batches = [collate([samples[index] for index in rows], top_k=top_k, device=device) for rows in plan]
    return batches + [collate([], top_k=top_k, device=device)] * (num_batches - len(plan))


def collate(samples: Sequence[Sample], *, top_k: int, device: torch.device) -> MicroBatch:
    """One micro-batch; token ids need no attention mask because padding stands on the right."""
    rows = [torch.tensor([*s.prompt, *s.tokens]) for s in samples] or [torch.zeros(1, dtype=torch.long)]
    lengths_B = torch.tensor([len(row) for row in rows])
    starts_B = torch.tensor([len(s.prompt) for s in samples] or [1])
    tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    targets_N = torch.tensor([token for s in samples for token in s.tokens], dtype=torch.long)

    def joined(name: str, *trailing: int, dtype: torch.dtype = torch.float32) -> Tensor:
        parts = [getattr(s, name) for s in samples if s.tokens]
        return torch.cat(parts).to(device) if parts else torch.zeros(0, *trailing, dtype=dtype, device=device)

    return MicroBatch(
        tokens_BT.to(device), lengths_B.to(device), starts_B.to(device),
        response_rows(starts_B, lengths_B, tokens_BT.shape[1]).to(device), targets_N.to(device), joined("logprobs"),
        joined("topk_ids", top_k, dtype=torch.int32).long(), joined("topk_logprobs", top_k), joined("entropies"))


def score_ahead(teacher: Any, batches: Sequence[MicroBatch], *, own_k: int,
                want_hidden: bool) -> Iterator[Any]:
    """The teacher's replies in order, the next batch always being scored while the caller works on this one.

    Column 0 of the reply's logits is the sampled token, the others are the student's top-K ids.
    """
    handles: deque[Any] = deque()
    for batch in batches:
        ids_NK = torch.cat([batch.targets_N[:, None], batch.ids_NK], dim=1)
        handles.append(teacher.request(batch.tokens_BT, batch.lengths_B, batch.starts_B, ids_NK=ids_NK, own_k=own_k,
                                       want_hidden=want_hidden))
        if len(handles) == 2:
            yield handles.popleft().result()
    while handles:
        yield handles.popleft().result()


def record_batch(metrics: Metrics, batch: MicroBatch, reply: Any, logits_NK: Tensor | None) -> None:
    """Sums over this micro-batch's positions; the means over the global batch are taken in Metrics.reduce."""
    count = batch.num_positions
    diagnostics = topk_diagnostics(batch.ids_NK, batch.topk_logprobs_NK, teacher_logits_NK=reply.logits_NK[:, 1:],
                                   teacher_lse_N=reply.lse_N, teacher_ids_NK=reply.own_ids_NK)
    for name, value_N in diagnostics._asdict().items():
        metrics.mean(name, value_N.sum(), count)
    metrics.mean("student_entropy", batch.entropy_N.sum(), count)
    metrics.mean("teacher_entropy", reply.entropy_N.sum(), count)
    metrics.mean("sampled_kl", (batch.logprobs_N - (reply.logits_NK[:, 0] - reply.lse_N)).sum(), count)
    metrics.total("teacher_nonfinite", reply.num_nonfinite)
    metrics.total("tokens", count)
    if logits_NK is not None:  # how far the training forward is from what was sampled from: 0 if truly on-policy
        trained, sampled = logits_NK.detach().log_softmax(-1), batch.topk_logprobs_NK.log_softmax(-1)
        metrics.mean("logprob_gap", (sampled.exp() * (trained - sampled).abs()).sum(), count)


def record_samples(metrics: Metrics, samples: Sequence[Sample]) -> None:
    metrics.mean("response_length", sum(len(s.tokens) for s in samples), len(samples))
    metrics.mean("truncated_frac", sum(not s.finished for s in samples), len(samples))
    metrics.mean("repetition_frac", sum(repetition_frac(s.tokens) for s in samples), len(samples))


def repetition_frac(tokens: Sequence[int], *, ngram: int = 4) -> float:
    """Share of the n-grams that repeat an earlier one of the same response; 0 for short responses."""
    grams = [tuple(tokens[i:i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
