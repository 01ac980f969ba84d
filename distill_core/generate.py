# SPDX-License-Identifier: Apache-2.0
"""KV-cache sampling: batching, compaction, stop tokens, reproducible randomness, top-K capture.

    samples = generate(model, [[5, 7, 9], [4]], max_new_tokens=64, stop_ids=(2,), n=4, capture_top_k=16)
    samples[0].tokens, samples[0].logprobs, samples[0].topk_ids  # 4 samples of prompt 0, then 4 of prompt 1

The model is an argument: an nn.Module with `config.vocab_size` and (as in models/lm.py)
    model(tokens_BT, cache) -> hidden_BTD    model.lm_head(hidden) -> logits    model.make_cache(batch, length) -> cache
    cache.advance(lengths_B or None, span)   cache.select(rows_B) -> cache

A token is drawn by inverting the CDF at one uniform, which is an integer hash of (seed, step, sample id, number of new
tokens before it). So a sample depends neither on the batch it is decoded in nor on the number of ranks, as far as its
logits don't: batches of another shape round them differently, and a token may change where the uniform lies that close
to an edge of its interval. `Sample.cdf_margins` tells how close; batches of equal shapes agree bit for bit.

Legend: B rows (samples being decoded), P prompts, T tokens, V vocabulary, W the most probable of V, K captured ids,
D model.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

COMPACT_AT = 0.25  # share of ended rows at which the others move to a smaller batch (moving copies keys and values)


@dataclass(frozen=True, eq=False)
class Sample:
    """One response. The tensors are on the CPU with one entry a new token, fp32 (float64 for a float64 model).

    logprobs, topk_* and entropies are those of the whole distribution at the sampling temperature (1 for greedy),
    before top-p and top-k: what a loss on these tokens compares.
    """

    prompt: list[int]
    tokens: list[int]  # new ids; a stop id that ended the sample is the last one
    logprobs: Tensor  # [T]
    topk_ids: Tensor  # [T, K] int32, most probable first
    topk_logprobs: Tensor  # [T, K]
    entropies: Tensor  # [T] nats
    finished: bool  # by a stop id, not by max_new_tokens
    cdf_margins: Tensor  # [T] the change of probability that it would take to get another token


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: temperature 0 takes the most probable one; top_p 1 and top_k 0 cut nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    capture_top_k: int = 0


class Picked(NamedTuple):
    """One token a row and what is recorded about it. The record of a batch has the same fields, [B, T] or [B, T, K]."""

    tokens_B: Tensor
    logprobs_B: Tensor
    entropies_B: Tensor
    margins_B: Tensor
    topk_ids_BK: Tensor
    topk_logprobs_BK: Tensor


@dataclass(frozen=True)
class _Job:
    """One sample to draw."""

    place: int  # in the result
    prompt_index: int
    prompt: list[int]
    max_new: int
    sample_id: int


@torch.no_grad()
def generate(model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int],
             temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, stop_ids: Sequence[int] = (), n: int = 1,
             seed: int = 0, step: int = 0, sample_ids: Sequence[int] | None = None, capture_top_k: int = 0,
             batch_size: int | None = None, keepalive: Callable[[], None] | None = None) -> list[Sample]:
    """`n` samples of each prompt, in the order of the prompts.

    max_new_tokens: one number or one per prompt. top_k is applied first, then top_p to what it leaves.
    sample_ids: global, one per sample (default 0, 1, ...); the same id, seed and step give the same uniforms.
    batch_size: rows decoded at a time (default all). keepalive: called once per decode step.
    ValueError for arguments out of range, RuntimeError for logits that are not finite.
    """
    vocab_size = model.config.vocab_size
    sampling = Sampling(temperature, top_p, top_k, capture_top_k)
    _check_sampling(sampling, vocab_size)
    _check_ids("stop_ids", stop_ids, vocab_size)
    jobs = _plan(prompts, max_new_tokens, _at_least_one("n", n), sample_ids, vocab_size)
    # Rows that run equally long stand together. The longest come first: what does not fit in memory fails at once.
    jobs.sort(key=lambda job: (-job.max_new, -len(job.prompt)))
    num_rows = len(jobs) if batch_size is None else _at_least_one("batch_size", batch_size)
    samples: dict[int, Sample] = {}
    for start in range(0, len(jobs), num_rows or 1):
        batch = jobs[start:start + num_rows]
        record = _decode(model, batch, sampling, stop_ids, seed, step, keepalive)
        for row, job in enumerate(batch):
            samples[job.place] = _cut(job, Picked(*(values[row] for values in record)), stop_ids)
    return [samples[place] for place in range(len(jobs))]


# --- arguments ------------------------------------------------------------------------------------------------------

def _plan(prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], n: int,
          sample_ids: Sequence[int] | None, vocab_size: int) -> list[_Job]:
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    ids = range(len(prompts) * n) if sample_ids is None else sample_ids
    if len(limits) != len(prompts):
        raise ValueError(f"max_new_tokens: {len(limits)} values for {len(prompts)} prompts")
    if len(ids) != len(prompts) * n:
        raise ValueError(f"sample_ids: {len(ids)} values for {len(prompts)} prompts x n = {n}")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{index}] is empty: a model needs a token to start from")
        _check_ids(f"prompts[{index}]", prompt, vocab_size)
        _at_least_one("max_new_tokens", limits[index])
    return [_Job(place, place // n, list(prompts[place // n]), limits[place // n], sample_id)
            for place, sample_id in enumerate(ids)]


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or positive, got {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or positive, got {sampling.top_k}")
    if not 0 <= sampling.capture_top_k <= vocab_size:
        raise ValueError(f"capture_top_k must be from 0 to the vocabulary's {vocab_size}, got {sampling.capture_top_k}")


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if len(ids) and not (0 <= min(ids) and max(ids) < vocab_size):
        raise ValueError(f"{name}: ids must be from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


# --- decoding -------------------------------------------------------------------------------------------------------

@dataclass
class _Live:
    """The rows that are still decoded."""

    cache: Any
    span: int  # no row has more positions in the cache
    rows_B: Tensor  # the job of each row
    limits_B: Tensor
    uniforms_BT: Tensor
    ended_B: Tensor
    tokens_B: Tensor  # picked last

    def keep(self, left_B: Tensor) -> _Live:
        return _Live(self.cache.select(left_B), self.span, self.rows_B[left_B], self.limits_B[left_B],
                     self.uniforms_BT[left_B], self.ended_B[left_B], self.tokens_B[left_B])

    def next_logits(self, model: nn.Module) -> Tensor:
        hidden_B1D = model(self.tokens_B[:, None], self.cache)
        self.span += 1
        self.cache.advance(None, self.span)
        return model.lm_head(hidden_B1D[:, 0])


def check_interval(device: torch.device) -> int:
    """Decode steps between two looks at which rows have ended: a look waits for the device (on a CPU it is free)."""
    return 1 if device.type == "cpu" else 8


def _decode(model: nn.Module, jobs: Sequence[_Job], sampling: Sampling, stop_ids: Sequence[int], seed: int, step: int,
            keepalive: Callable[[], None] | None) -> Picked:
    """The record of one batch, [B, T, ...] on the CPU; what follows the end of a row means nothing."""
    num_steps = max(job.max_new for job in jobs)
    logits_BV, live = _prefill(model, jobs, num_steps, seed, step)
    stops = torch.tensor(list(stop_ids), dtype=torch.long, device=logits_BV.device)
    interval = check_interval(logits_BV.device)
    record: Picked | None = None
    for t in range(num_steps):
        picked = pick(logits_BV, live.uniforms_BT[:, t], sampling)
        if record is None:
            record = Picked(*(values.new_zeros(len(jobs), num_steps, *values.shape[1:]) for values in picked))
        for store, values in zip(record, picked):
            store[live.rows_B, t] = values
        live.tokens_B = picked.tokens_B
        live.ended_B |= torch.isin(live.tokens_B, stops) | (live.limits_B == t + 1)
        if keepalive is not None:
            keepalive()
        if t + 1 == num_steps:
            break
        if (t + 1) % interval == 0:
            num_ended, num_rows = int(live.ended_B.sum()), len(live.ended_B)
            if num_ended == num_rows:
                break
            if num_ended >= COMPACT_AT * num_rows:
                live = live.keep((~live.ended_B).nonzero().squeeze(1))
        logits_BV = live.next_logits(model)
    assert record is not None
    return Picked(*(store.cpu() for store in record))


def _prefill(model: nn.Module, jobs: Sequence[_Job], num_steps: int, seed: int, step: int) -> tuple[Tensor, _Live]:
    """Logits of the first new token of each job, and the rows; the samples of one prompt share its forward."""
    device = next(model.parameters()).device
    prompts = {job.prompt_index: torch.tensor(job.prompt) for job in jobs}
    place_of = {index: place for place, index in enumerate(prompts)}
    rows_B = torch.tensor([place_of[job.prompt_index] for job in jobs], device=device)
    lengths_P = torch.tensor([len(prompt) for prompt in prompts.values()], device=device)
    tokens_PT = pad_sequence(list(prompts.values()), batch_first=True).to(device)
    span = tokens_PT.shape[1]
    cache = model.make_cache(len(prompts), span + num_steps)
    hidden_PTD = model(tokens_PT, cache)
    cache.advance(lengths_P, span)
    logits_PV = model.lm_head(hidden_PTD[torch.arange(len(prompts), device=device), lengths_P - 1])

    ids_B1 = torch.tensor([[job.sample_id] for job in jobs], device=device)
    return logits_PV[rows_B], _Live(
        cache=cache if len(prompts) == len(jobs) else cache.select(rows_B), span=span,
        rows_B=torch.arange(len(jobs), device=device),
        limits_B=torch.tensor([job.max_new for job in jobs], device=device),
        uniforms_BT=uniforms(seed, step, ids_B1, torch.arange(num_steps, device=device)),
        ended_B=torch.zeros_like(rows_B, dtype=torch.bool), tokens_B=torch.zeros_like(rows_B))


def _cut(job: _Job, row: Picked, stop_ids: Sequence[int]) -> Sample:
    """The sample of one job from its row [T, ...] of the record."""
    tokens = row.tokens_B[:job.max_new].tolist()
    length = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    _, logprobs, entropies, margins, topk_ids, topk_logprobs = (values[:length].clone() for values in row)
    if not logprobs.isfinite().all():
        raise RuntimeError(f"logits are not finite at new token {int(logprobs.isfinite().int().argmin())} of sample "
                           f"id {job.sample_id} (the model's weights or its input are broken)")
    return Sample(job.prompt, tokens[:length], logprobs, topk_ids, topk_logprobs, entropies,
                  finished=tokens[length - 1] in stop_ids, cdf_margins=margins)


# --- one token ------------------------------------------------------------------------------------------------------

def pick(logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> Picked:
    """Draw one token a row at uniforms in [0, 1)."""
    wide_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    logp_BV = (wide_BV / (sampling.temperature or 1.0)).log_softmax(-1)
    probs_BV = logp_BV.exp()
    if sampling.temperature == 0.0:
        tokens_B, best_B2 = wide_BV.argmax(-1), probs_BV.topk(2).values
        margins_B = best_B2[:, 0] - best_B2[:, 1]
    elif sampling.top_p == 1.0 and not 0 < sampling.top_k < probs_BV.shape[1]:
        tokens_B, margins_B = invert_cdf(probs_BV, uniforms_B)
    else:
        kept_BV, cut_margins_B = cut_tail(probs_BV, sampling.top_p, sampling.top_k)
        tokens_B, margins_B = invert_cdf(kept_BV, uniforms_B)
        margins_B = margins_B.minimum(cut_margins_B)
    logprobs_B = logp_BV.gather(1, tokens_B[:, None]).squeeze(1)
    entropies_B = torch.special.entr(probs_BV).sum(-1)
    topk_logprobs_BK, topk_ids_BK = logp_BV.topk(sampling.capture_top_k)
    return Picked(tokens_B, logprobs_B, entropies_B, margins_B, topk_ids_BK.int(), topk_logprobs_BK)


def cut_tail(probs_BV: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Top-k, then the smallest set with at least top_p of what is left; renormalised, zero where cut.

    Also, a row, how close it is to keeping another set: the gap between the last token kept and the first one cut, or
    the distance to top_p of the mass above one of them.
    """
    size = min(top_k or probs_BV.shape[1], probs_BV.shape[1])
    width = min(size + 1, probs_BV.shape[1])  # with the first one cut
    sorted_BW, ids_BW = probs_BV.topk(width)
    sorted_BW = sorted_BW / sorted_BW[:, :size].sum(-1, keepdim=True)
    above_BW = sorted_BW.cumsum(-1) - sorted_BW
    limit = top_p if top_p < 1.0 else float("inf")
    keep_BW = (above_BW < limit) & (torch.arange(width, device=probs_BV.device) < size)
    last_B1 = (keep_BW.sum(-1, keepdim=True) - 1).clamp(min=0)  # logits that are NaN keep nothing
    edge_B2 = torch.cat([last_B1, (last_B1 + 1).clamp(max=width - 1)], dim=1)
    edge_probs_B2 = sorted_BW.gather(1, edge_B2)
    gaps_B = edge_probs_B2[:, 0] - edge_probs_B2[:, 1]
    margins_B = gaps_B.minimum((above_BW.gather(1, edge_B2) - limit).abs().amin(-1))
    kept_BV = torch.zeros_like(probs_BV).scatter(1, ids_BW, sorted_BW * keep_BW)
    return kept_BV / kept_BV.sum(-1, keepdim=True), margins_B


def invert_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens whose interval of the CDF, in the order of the ids, holds the uniform; its distance to the nearer edge.

    The order of the ids does not depend on the logits, so a small error moves the edges but swaps no intervals.
    """
    uniforms_B1 = uniforms_B[:, None].to(probs_BV.dtype).contiguous()
    cdf_BV = probs_BV.cumsum(-1)
    found_B1 = torch.searchsorted(cdf_BV, uniforms_B1, right=True)
    # Rounding can leave the uniform above the total and, where the scan is parallel, on a token of probability 0.
    ids_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    tokens_B1 = torch.where((probs_BV > 0.0) & (ids_V <= found_B1), ids_V, 0).amax(-1, keepdim=True)
    above_B1 = cdf_BV.gather(1, tokens_B1) - uniforms_B1
    margins_B1 = above_B1.minimum(probs_BV.gather(1, tokens_B1) - above_B1).clamp(min=0.0)
    return tokens_B1.squeeze(1), margins_B1.squeeze(1)


# --- uniforms -------------------------------------------------------------------------------------------------------

def uniforms(seed: int, step: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in [0, 1), fp32 with 24 random bits: a pure function of four integers, the same on every device.

    sample_ids and positions are int64 and broadcast. Each word is absorbed by the finaliser of splitmix64 (Steele, Lea,
    Flood 2014), in 64-bit arithmetic modulo 2^64 on signed integers.
    """
    state = torch.zeros((), dtype=torch.int64)
    for word in (torch.tensor(_signed(seed)), torch.tensor(_signed(step)), sample_ids, positions):
        state = _mix((state ^ word) + _signed(0x9E3779B97F4A7C15))  # without the constant, zeros would stay zeros
    return _shift_right(state, 40).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the same 64 low bits."""
    return (word + 2**63) % 2**64 - 2**63
