# SPDX-License-Identifier: Apache-2.0
"""KV-cache sampling by continuous batching: refill, stop tokens, reproducible randomness, top-K capture, CUDA graphs.

    samples = generate(model, [[5, 7, 9], [4]], max_new_tokens=64, stop_ids=(2,), n=4, capture_top_k=16)
    samples[0].tokens, samples[0].logprobs, samples[0].topk_ids  # 4 samples of prompt 0, then 4 of prompt 1
    for place, sample in Engine(model).stream(prompts, max_new_tokens=64, batch_size=32): ...  # as soon as they end

The model is an argument: an nn.Module with `config.vocab_size` and (as in models/lm.py)
    model(tokens_BT, cache) -> hidden_BTD    model.lm_head(hidden) -> logits    model.make_cache(batch, length) -> cache
    cache.lengths_B    cache.window(num_rows, span) -> cache    cache.put(row, source_cache, source_row, length)

The rows of a batch live in buffers that never move. Each decode step feeds every row its last token, draws the next one
and records it, in place; a row that has ended stands still until the host looks, hands it over and starts the next
sample there. Prompts are read ahead of time, several in one forward and but for their last token, which is the first
that a row is fed: a new sample costs a copy of keys and values, and so do further samples of the same prompt.

A token is drawn by inverting the CDF at one uniform, which is an integer hash of (seed, step, sample id, number of new
tokens before it). So a sample depends neither on the batch it is decoded in nor on the number of ranks, as far as its
logits don't: batches of another shape round them differently, and a token may change where the uniform lies that close
to an edge of its interval. `Sample.cdf_margins` tells how close; batches of equal shapes agree bit for bit.

Legend: B rows (samples being decoded), P prompts, R rows that start or end, T tokens, S cached positions, V vocabulary,
C chunks of W neighbouring ids, K captured ids, D model.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

CHUNK = 128  # W: ids that are summed or compared together before one of the chunks is looked at closely
LEAST_SPAN = 128  # positions; shorter spans share CUDA graphs
PREFILL_TOKENS = 16_384  # of prompts, padding included, that are read in one forward and kept until their samples start


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
    prompt: list[int]
    max_new: int
    sample_id: int


def generate(model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int],
             temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, stop_ids: Sequence[int] = (), n: int = 1,
             seed: int = 0, step: int = 0, sample_ids: Sequence[int] | None = None, capture_top_k: int = 0,
             batch_size: int | None = None, keepalive: Callable[[], None] | None = None) -> list[Sample]:
    """`n` samples of each prompt, in the order of the prompts; arguments and errors are those of `Engine.stream`."""
    samples = dict(sample_stream(
        model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
        stop_ids=stop_ids, n=n, seed=seed, step=step, sample_ids=sample_ids, capture_top_k=capture_top_k,
        batch_size=batch_size, keepalive=keepalive))
    return [samples[place] for place in range(len(samples))]


def sample_stream(model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int],
                  temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, stop_ids: Sequence[int] = (),
                  n: int = 1, seed: int = 0, step: int = 0, sample_ids: Sequence[int] | None = None,
                  capture_top_k: int = 0, batch_size: int | None = None, queue: Iterable[int] | None = None,
                  keepalive: Callable[[], None] | None = None) -> Iterator[tuple[int, Sample]]:
    """`Engine.stream` of an engine that keeps nothing for a next call."""
    return Engine(model).stream(
        prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop_ids=stop_ids,
        n=n, seed=seed, step=step, sample_ids=sample_ids, capture_top_k=capture_top_k, batch_size=batch_size,
        queue=queue, keepalive=keepalive)


class Engine:
    """Samples from one model. On CUDA it keeps its buffers and graphs for the next call, until `release`; the weights
    may change between calls, in place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.release()

    def release(self) -> None:
        """Free keys, values, records and graphs."""
        self.batch: _Batch | None = None
        self.graphs: dict[tuple[int, int, Sampling], torch.cuda.CUDAGraph] = {}  # by rows and span

    def stream(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int],
               temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, stop_ids: Sequence[int] = (), n: int = 1,
               seed: int = 0, step: int = 0, sample_ids: Sequence[int] | None = None, capture_top_k: int = 0,
               batch_size: int | None = None, queue: Iterable[int] | None = None,
               keepalive: Callable[[], None] | None = None) -> Iterator[tuple[int, Sample]]:
        """(place, sample) as soon as a sample has ended; place = n * (index of its prompt) + its number.

        max_new_tokens: one number or one per prompt. top_k is applied first, then top_p to what it leaves.
        sample_ids: global, one per sample (default 0, 1, ...); the same id, seed and step give the same uniforms.
        batch_size: rows decoded at a time (default all). keepalive: called once per decode step.
        queue: indices of prompts in the order in which they start. A list is read ahead; an iterator is asked only when
        rows are free, so that several ranks can share one. Default: all, the longest limits and prompts first.
        The order in which samples end is a function of the arguments. One stream at a time.
        ValueError for arguments out of range, RuntimeError for logits that are not finite.
        """
        vocab_size = self.model.config.vocab_size
        sampling = Sampling(temperature, top_p, top_k, capture_top_k)
        _check_sampling(sampling, vocab_size)
        _check_ids("stop_ids", stop_ids, vocab_size)
        jobs = _plan(prompts, max_new_tokens, _at_least_one("n", n), sample_ids, vocab_size)
        if queue is None:  # the longest first: the batch stays full to the end, and what does not fit fails at once
            queue = sorted(range(len(prompts)), key=lambda index: (-jobs[n * index].max_new, -len(prompts[index])))
        num_rows = len(jobs) if batch_size is None else min(_at_least_one("batch_size", batch_size), len(jobs))
        waiting = _Waiting(self.model, jobs, n, queue, num_rows)
        return self._run(waiting, jobs, num_rows, sampling, stop_ids, (seed, step), keepalive)

    @torch.no_grad()
    def _run(self, waiting: _Waiting, jobs: Sequence[_Job], num_rows: int, sampling: Sampling, stop_ids: Sequence[int],
             seeds: tuple[int, int], keepalive: Callable[[], None] | None) -> Iterator[tuple[int, Sample]]:
        if not jobs:
            return
        batch = self._claim_batch(jobs, num_rows, sampling, stop_ids)
        try:
            batch.start(waiting, num_rows, seeds)
            while batch.live:
                for _ in range(batch.steps_to_look()):
                    self._step(batch, sampling)
                    if keepalive is not None:
                        keepalive()
                ended = batch.collect(stop_ids)
                batch.start(waiting, num_rows, seeds)
                yield from ended
        finally:
            if uses_graphs(self.device):
                batch.clear()
            else:
                self.release()

    def _claim_batch(self, jobs: Sequence[_Job], num_rows: int, sampling: Sampling, stop_ids: Sequence[int]) -> _Batch:
        """The buffers of the last stream where they are large enough: graphs know them by address."""
        sizes = _Sizes(num_rows, max(len(job.prompt) + job.max_new - 1 for job in jobs),
                       max(job.max_new for job in jobs), sampling.capture_top_k)
        if self.batch is not None:
            assert not self.batch.live, "an engine runs one stream at a time"
            if not self.batch.sizes.holds(sizes):
                sizes = sizes.grown_to(self.batch.sizes)
                self.release()
        if self.batch is None:
            self.batch = _Batch(self.model, sizes)
        self.batch.stops_V.zero_()
        self.batch.stops_V[list(stop_ids)] = True
        return self.batch

    def _step(self, batch: _Batch, sampling: Sampling) -> None:
        rows, span = batch.reach()
        for live in batch.live:
            live.count += 1
        if not uses_graphs(self.device):
            decode_step(self.model, batch.window(rows, span), sampling)
            return
        most = batch.sizes.rows, batch.sizes.length
        key = bucket(rows, 1, most[0]), bucket(span, LEAST_SPAN, most[1]), sampling
        for wanted in ((*most, sampling), key):  # the largest first: the memory that it needs serves all others
            if wanted not in self.graphs:
                self.graphs[wanted] = self._capture(batch, *wanted)
        self.graphs[key].replay()

    def _capture(self, batch: _Batch, rows: int, span: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        window = batch.window(rows, span)
        ended_B = batch.ended_B.clone()
        batch.ended_B.fill_(True)  # so that the warm-up of the capture, which is a real step, moves nothing on
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        graph = capture(lambda: decode_step(self.model, window, sampling), pool)
        batch.ended_B.copy_(ended_B)
        return graph


def look_interval(device: torch.device) -> int:
    """Decode steps between two looks at which rows have stopped: a look waits for the device (on a CPU it is free)."""
    return 1 if device.type == "cpu" else 16


def uses_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def bucket(size: int, least: int, most: int) -> int:
    """`size` rounded up by at most a quarter, or to `least`, so that few graphs serve all sizes."""
    grain = max(least, 1 << max(size.bit_length() - 3, 0))
    return min(-(-size // grain) * grain, most)


def capture(step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph that repeats `step` on the same memory. Once it runs here: what is set up lazily must exist before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL's threads may query events
        step()
    return graph


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
    return [_Job(place, list(prompts[place // n]), limits[place // n], sample_id)
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


# --- the batch ------------------------------------------------------------------------------------------------------

def num_parked(num_rows: int, n: int, longest: int) -> int:
    """Prompts of at most `longest` tokens that are read together for `num_rows` rows of n samples a prompt."""
    return min(-(-num_rows // n), max(PREFILL_TOKENS // longest, 1))


class _Waiting:
    """The jobs that have not started, in their order, and keys and values of the prompts that come next."""

    def __init__(self, model: nn.Module, jobs: Sequence[_Job], n: int, queue: Iterable[int], num_rows: int) -> None:
        self.model, self.jobs, self.n = model, jobs, n
        self.order = iter(queue)
        self.num_ahead = num_rows if isinstance(queue, Sequence) else 0
        self.ready: deque[tuple[_Job, int]] = deque()  # with its row in the cache
        self.cache: Any = None
        self.longest = max((len(job.prompt) for job in jobs), default=1)
        self.cache_rows = num_parked(num_rows, n, self.longest)

    def take(self, num_rows: int) -> Iterator[tuple[_Job, int]]:
        """Up to so many jobs, each with a row of `cache` that is good until the next one is asked for."""
        for taken in range(num_rows):
            if not self.ready:
                self._read_prompts(num_parked(max(self.num_ahead, num_rows - taken), self.n, self.longest))
            if not self.ready:
                return
            yield self.ready.popleft()

    def _read_prompts(self, num_prompts: int) -> None:
        """One forward of the next prompts without their last tokens, right-padded."""
        indices = list(islice(self.order, num_prompts))
        if len(indices) < num_prompts:
            self.order = iter(())  # a shared counter need not be asked again
        if not indices:
            return
        for index in indices:
            if not 0 <= index < len(self.jobs) // self.n:
                raise ValueError(f"queue: prompt {index}, but there are {len(self.jobs) // self.n} prompts")
        device = next(self.model.parameters()).device
        if self.cache is None:
            self.cache = self.model.make_cache(self.cache_rows, max(self.longest - 1, 1))
        prompts = [self.jobs[self.n * index].prompt for index in indices]
        tokens_PT = pad_sequence([torch.tensor(prompt[:-1] or prompt) for prompt in prompts], batch_first=True)
        self.model(tokens_PT.to(device), self.cache.window(*tokens_PT.shape))
        self.ready.extend((job, row) for row, index in enumerate(indices)
                          for job in self.jobs[self.n * index:self.n * (index + 1)])


class _Sizes(NamedTuple):
    rows: int
    length: int  # positions of a row
    max_new: int
    top_k: int

    def holds(self, other: _Sizes) -> bool:
        return self.top_k == other.top_k and all(mine >= need for mine, need in zip(self, other))

    def grown_to(self, other: _Sizes) -> _Sizes:
        return _Sizes(*map(max, self[:3], other[:3]), self.top_k)


class _Window(NamedTuple):
    """What a decode step reads and writes: the first rows of the batch. A row that has ended must not move on."""

    cache: Any
    tokens_B: Tensor  # to be fed
    counts_B: Tensor  # new tokens so far
    ended_B: Tensor
    uniforms_BT: Tensor
    record: Picked
    stops_V: Tensor


@dataclass
class _Live:
    job: _Job
    count: int = 0  # of new tokens: exact after a look, until then more where the row has stopped


class _Batch:
    """Buffers, which keep their addresses, and the jobs in their first rows. Other rows have ended, at length 0."""

    def __init__(self, model: nn.Module, sizes: _Sizes) -> None:
        weight = next(model.parameters())
        self.sizes, self.device = sizes, weight.device
        self.live: list[_Live | None] = []  # by row; None: a gap
        self.cache = model.make_cache(sizes.rows, sizes.length)
        shape, dtype = (sizes.rows, sizes.max_new), torch.float64 if weight.dtype == torch.float64 else torch.float32

        def zeros(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.tokens_B, self.counts_B = zeros(sizes.rows, dtype=torch.long), zeros(sizes.rows, dtype=torch.long)
        self.ended_B = zeros(sizes.rows, dtype=torch.bool).fill_(True)
        self.uniforms_BT = zeros(*shape, dtype=torch.float32)
        self.record = Picked(zeros(*shape, dtype=torch.long), zeros(*shape), zeros(*shape), zeros(*shape),
                             zeros(*shape, sizes.top_k, dtype=torch.int32), zeros(*shape, sizes.top_k))
        self.stops_V = zeros(model.config.vocab_size, dtype=torch.bool)

    def reach(self) -> tuple[int, int]:
        """Rows and positions that the next step needs."""
        return len(self.live), max(len(live.job.prompt) + live.count for live in self.live)

    def window(self, rows: int, span: int) -> _Window:
        return _Window(self.cache.window(rows, span), self.tokens_B[:rows], self.counts_B[:rows], self.ended_B[:rows],
                       self.uniforms_BT[:rows], Picked(*(store[:rows] for store in self.record)), self.stops_V)

    def start(self, waiting: _Waiting, num_rows: int, seeds: tuple[int, int]) -> None:
        """Put jobs into the gaps and behind the live rows, while there are any; then close the gaps."""
        self.live += [None] * (num_rows - len(self.live))
        rows = [row for row, live in enumerate(self.live) if live is None]
        started: dict[int, _Job] = {}
        for row, (job, source_row) in zip(rows, waiting.take(len(rows))):
            self.cache.put(row, waiting.cache, source_row, len(job.prompt) - 1)
            started[row], self.live[row] = job, _Live(job)
        if started:
            rows_R = torch.tensor(list(started), device=self.device)
            ids_R1 = torch.tensor([[job.sample_id] for job in started.values()], device=self.device)
            self.tokens_B[rows_R] = torch.tensor([job.prompt[-1] for job in started.values()], device=self.device)
            self.uniforms_BT[rows_R] = uniforms(*seeds, ids_R1, torch.arange(self.sizes.max_new, device=self.device))
            self.ended_B[rows_R] = False
        self._close_gaps()

    def _close_gaps(self) -> None:
        """Rows from the end take the place of those where nothing was left to start."""
        while None in self.live:
            last = self.live.pop()
            if last is not None:
                row, source = self.live.index(None), len(self.live)
                self.live[row] = last
                self.cache.put(row, self.cache, source, len(last.job.prompt) + last.count - 1)
                for store in (self.tokens_B, self.counts_B, self.ended_B, self.uniforms_BT, *self.record):
                    store[row] = store[source]
                self._free([source])

    def steps_to_look(self) -> int:
        """Steps that no row needs the host in between: up to the first limit, which the host knows."""
        return min(look_interval(self.device), min(live.job.max_new - live.count for live in self.live))

    def collect(self, stop_ids: Sequence[int]) -> list[tuple[int, Sample]]:
        """The samples that have ended; their rows become gaps."""
        ended, counts = torch.stack([self.ended_B, self.counts_B])[:, :len(self.live)].tolist()
        for live, count in zip(self.live, counts):
            live.count = count
        rows = [row for row, live in enumerate(self.live) if ended[row] or live.count == live.job.max_new]
        if not rows:
            return []
        longest = max(counts[row] for row in rows)
        record = [store[rows, :longest].cpu() for store in self.record]
        jobs = [self.live[row].job for row in rows]
        self._free(rows)
        for row in rows:
            self.live[row] = None
        return [(job.place, _sample(job, Picked(*(values[place, :counts[row]].clone() for values in record)), stop_ids))
                for place, (row, job) in enumerate(zip(rows, jobs))]

    def clear(self) -> None:
        """Forget the live rows."""
        self._free(list(range(self.sizes.rows)))
        self.live = []

    def _free(self, rows: list[int]) -> None:
        self.ended_B[rows] = True
        self.counts_B[rows] = 0
        self.cache.lengths_B[rows] = 0  # wherever the row stands, a narrower window must hold its next position


def decode_step(model: nn.Module, window: _Window, sampling: Sampling) -> None:
    """One more token for each row that has not ended, in place and without a word to the host."""
    cache, tokens_B, counts_B, ended_B, uniforms_BT, record, stops_V = window
    hidden_B1D = model(tokens_B[:, None], cache)
    uniforms_B = uniforms_BT.gather(1, counts_B[:, None]).squeeze(1)
    picked = pick(model.lm_head(hidden_B1D[:, 0]), uniforms_B, sampling)
    rows_B = torch.arange(len(tokens_B), device=tokens_B.device)
    for store, values in zip(record, picked):
        store[rows_B, counts_B] = values  # of a row that has ended: where nothing is read
    tokens_B.copy_(torch.where(ended_B, tokens_B, picked.tokens_B))
    counts_B += ~ended_B
    cache.lengths_B += ~ended_B
    ended_B |= stops_V[picked.tokens_B]


def _sample(job: _Job, row: Picked, stop_ids: Sequence[int]) -> Sample:
    """The sample of one job from its row [T, ...] of the record."""
    tokens = row.tokens_B.tolist()
    if not row.logprobs_B.isfinite().all():
        raise RuntimeError(f"logits are not finite at new token {int(row.logprobs_B.isfinite().int().argmin())} of "
                           f"sample id {job.sample_id} (the model's weights or its input are broken)")
    return Sample(job.prompt, tokens, row.logprobs_B, row.topk_ids_BK, row.topk_logprobs_BK, row.entropies_B,
                  finished=tokens[-1] in stop_ids, cdf_margins=row.margins_B)


# --- one token ------------------------------------------------------------------------------------------------------

def pick(logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> Picked:
    """Draw one token a row at uniforms in [0, 1)."""
    wide_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    if sampling.temperature not in (0.0, 1.0):
        wide_BV = wide_BV / sampling.temperature
    logp_BV, probs_BV = wide_BV.log_softmax(-1), wide_BV.softmax(-1)
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
    topk_logprobs_BK, topk_ids_BK = largest(logp_BV, sampling.capture_top_k)
    logp_BV.clamp_(min=torch.finfo(logp_BV.dtype).min)  # 0 times minus infinity is no number
    entropies_B = -probs_BV.mul_(logp_BV).sum(-1)
    return Picked(tokens_B, logprobs_B, entropies_B, margins_B, topk_ids_BK.int(), topk_logprobs_BK)


def largest(x_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """topk, but after one pass only the `count` chunks with the largest maxima are looked at: they hold all of it."""
    if count == 0 or count * CHUNK >= x_BV.shape[1]:
        return x_BV.topk(count)
    chunks_BK = by_chunk(x_BV, torch.amax).topk(count).indices
    ids_BN = (chunks_BK[..., None] * CHUNK + torch.arange(CHUNK, device=x_BV.device)).flatten(1)
    values_BK, places_BK = _chosen(x_BV, ids_BN, -math.inf).topk(count)
    return values_BK, ids_BN.gather(1, places_BK)


def by_chunk(x_BV: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """[B, C]: `reduce` of each run of W ids, of which the last may be shorter; without a copy."""
    num_whole = x_BV.shape[1] // CHUNK
    whole_BC = reduce(x_BV[:, :num_whole * CHUNK].unflatten(1, (num_whole, CHUNK)), dim=-1)
    rest_BV = x_BV[:, num_whole * CHUNK:]
    return torch.cat([whole_BC, reduce(rest_BV, dim=-1, keepdim=True)], dim=1) if rest_BV.shape[1] else whole_BC


def _chosen(x_BV: Tensor, ids_BN: Tensor, beyond: float) -> Tensor:
    """x at the ids, `beyond` where they lie beyond the vocabulary."""
    last = x_BV.shape[1] - 1
    return x_BV.gather(1, ids_BN.clamp(max=last)).masked_fill_(ids_BN > last, beyond)


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

    The order of the ids does not depend on the logits, so a small error moves the edges but swaps no intervals. First
    the chunk is found in the CDF of chunks, then the token in the CDF of that chunk.
    """
    uniforms_B1 = uniforms_B[:, None].to(probs_BV.dtype).contiguous()
    masses_BC = by_chunk(probs_BV, torch.sum)
    edges_BC = masses_BC.cumsum(-1)
    chunk_B1 = _interval(masses_BC, edges_BC, uniforms_B1)
    ids_BW = chunk_B1 * CHUNK + torch.arange(CHUNK, device=probs_BV.device)
    probs_BW = _chosen(probs_BV, ids_BW, 0.0)
    cdf_BW = F.pad(edges_BC, (1, 0)).gather(1, chunk_B1) + probs_BW.cumsum(-1)
    place_B1 = _interval(probs_BW, cdf_BW, uniforms_B1)
    above_B1 = cdf_BW.gather(1, place_B1) - uniforms_B1
    margins_B1 = above_B1.minimum(probs_BW.gather(1, place_B1) - above_B1).clamp(min=0.0)
    return ids_BW.gather(1, place_B1).squeeze(1), margins_B1.squeeze(1)


def _interval(masses_BN: Tensor, cdf_BN: Tensor, uniforms_B1: Tensor) -> Tensor:
    """[B, 1]: the interval that holds the uniform; the last one before it with a mass where rounding has left the
    uniform above the total or, where the scan is parallel, on an empty one."""
    found_B1 = torch.searchsorted(cdf_BN, uniforms_B1, right=True)
    places_N = torch.arange(masses_BN.shape[1], device=masses_BN.device)
    return torch.where((masses_BN > 0.0) & (places_N <= found_B1), places_N, 0).amax(-1, keepdim=True)


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
