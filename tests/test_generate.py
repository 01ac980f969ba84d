# SPDX-License-Identifier: Apache-2.0
"""generate.py against a slow reference (one full forward a token, float64 sampling, hash in Python integers)."""
from __future__ import annotations

import math
import types
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distill_core import generate as generate_module
from distill_core.generate import (Engine, Sample, Sampling, bucket, generate, invert_cdf, largest, pick, sample_stream,
                                   uniforms)
from distill_core.models import lm

V = 97
RAW = dict(model_type="llama", vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
PROMPTS = [[5, 7, 9, 11, 2], [1], [96, 0, 0, 3], [8, 8, 8, 8, 8, 8, 8, 8, 8], [40, 41]]
TENSORS = ("logprobs", "topk_ids", "topk_logprobs", "entropies", "cdf_margins")


def tiny_lm(std: float = 0.2, **raw: object) -> lm.CausalLM:
    model = lm.CausalLM(lm.config_from_hf(RAW | raw, source="config.json"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, std, generator=generator)
    return model


# --- the slow reference ---------------------------------------------------------------------------------------------

MASK = 2**64 - 1


def reference_uniform(*words: int) -> float:
    """splitmix64's finaliser over (seed, step, sample id, position), in unbounded integers."""
    state = 0
    for word in words:
        state = ((state ^ (word & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return (state >> 40) / 2**24


def reference_kept(probs: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Distribution after top-k, then top-p, by walking down the sorted list."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[:top_k or len(probs)]
    total, mass, kept = sum(probs[token] for token in order), 0.0, np.zeros_like(probs)
    for token in order:
        if top_p < 1.0 and mass >= top_p * total:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return kept / kept.sum()


@torch.no_grad()
def slow_generate(model: nn.Module, prompt: list[int], max_new: int, sample_id: int, *, temperature: float = 1.0,
                  top_p: float = 1.0, top_k: int = 0, stop_ids: tuple[int, ...] = (), seed: int = 0,
                  step: int = 0) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_new and not (tokens and tokens[-1] in stop_ids):
        logits = model.lm_head(model(torch.tensor([prompt + tokens])))[0, -1].double().numpy()
        if temperature == 0.0:
            tokens.append(int(logits.argmax()))
            continue
        probs = np.exp((logits - logits.max()) / temperature)
        kept = reference_kept(probs / probs.sum(), top_p, top_k)
        uniform = reference_uniform(seed, step, sample_id, len(tokens))
        tokens.append(int(np.searchsorted(np.cumsum(kept), uniform, side="right")))
    return tokens


class MarkovModel(nn.Module):
    """Known logits: those of the next token depend on the last token only. Counts the rows it was fed."""

    def __init__(self, table_VV: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table_VV)
        self.config = types.SimpleNamespace(vocab_size=table_VV.shape[1])
        self.rows_fed: list[int] = []
        self.wide_forwards = 0

    def forward(self, tokens_BT: Tensor, cache: object) -> Tensor:
        self.rows_fed.append(len(tokens_BT))
        self.wide_forwards += tokens_BT.shape[1] > 1
        return self.table[tokens_BT]

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def make_cache(self, batch: int, length: int) -> NoCache:
        return NoCache(torch.zeros(batch, dtype=torch.long))


class NoCache:
    def __init__(self, lengths_B: Tensor) -> None:
        self.lengths_B = lengths_B

    def window(self, num_rows: int, span: int) -> NoCache:
        return NoCache(self.lengths_B[:num_rows])

    def put(self, row: int, source: NoCache, source_row: int, length: int) -> None:
        self.lengths_B[row] = length


def assert_same(left: list[Sample], right: list[Sample], *, exact: bool = True) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one.prompt, one.tokens, one.finished) == (other.prompt, other.tokens, other.finished)
        for name in TENSORS if exact else ("logprobs", "topk_logprobs", "entropies"):
            values, expected = getattr(one, name), getattr(other, name)
            assert torch.equal(values, expected) if exact else torch.allclose(values, expected, atol=1e-5), name


# --- what is sampled ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("raw", [{}, {"model_type": "qwen2"}, {"model_type": "qwen3", "head_dim": 16}])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_greedy_is_the_argmax_of_full_forwards(raw, batch_size):
    """Catches any fault of cache, positions, padding or compaction: token for token, at all lengths and limits."""
    model, limits = tiny_lm(**raw), [30, 7, 1, 19, 30]
    samples = generate(model, PROMPTS, max_new_tokens=limits, temperature=0.0, batch_size=batch_size)
    assert [s.prompt for s in samples] == PROMPTS
    for index, sample in enumerate(samples):
        assert sample.tokens == slow_generate(model, PROMPTS[index], limits[index], index, temperature=0.0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"top_k": 1},
                                      {"temperature": 1.4, "top_p": 0.7, "top_k": 20}, {"seed": 2**70 + 3, "step": 9}])
def test_sampling_equals_the_slow_reference(settings):
    """Catches a wrong hash, CDF order, filter, temperature or uniform index: every token of every sample."""
    model, sample_ids = tiny_lm(), [10, 2**40, 3, 4, 7, 1, 0, 99, 12, 13]
    samples = generate(model, PROMPTS, max_new_tokens=16, n=2, sample_ids=sample_ids, batch_size=4, **settings)
    for index, sample in enumerate(samples):
        assert sample.tokens == slow_generate(model, PROMPTS[index // 2], 16, sample_ids[index], **settings)
    assert len({tuple(s.tokens) for s in samples}) == (len(PROMPTS) if settings == {"top_k": 1} else 10)


def test_stop_ids_end_a_sample_and_are_kept():
    """Catches a lost stop token (the loss must see it), a wrong flag, and pad id 0 taken for the stop id 0 or back."""
    model, stops = tiny_lm(), (0, 17, 50)
    free = generate(model, PROMPTS, max_new_tokens=40, n=4, capture_top_k=4)
    stopped = generate(model, PROMPTS, max_new_tokens=40, n=4, capture_top_k=4, stop_ids=stops)
    for whole, sample in zip(free, stopped, strict=True):
        length = next((i + 1 for i, token in enumerate(whole.tokens) if token in stops), 40)
        assert sample.tokens == whole.tokens[:length]
        assert sample.finished == (whole.tokens[length - 1] in stops) and not whole.finished
        assert all(len(getattr(sample, name)) == length for name in TENSORS)
    assert 0 < sum(s.finished for s in stopped) < len(stopped) and len({len(s.tokens) for s in stopped}) > 5
    assert any(s.tokens[-1] == 0 for s in stopped)


def test_stop_at_the_last_allowed_token_is_finished():
    """Catches a sample that stops exactly at its limit but is reported as truncated."""
    chain = torch.full((4, 4), -20.0)
    chain[0, 1] = chain[1, 2] = chain[2, 3] = chain[3, 0] = 20.0
    model = MarkovModel(chain)
    samples = generate(model, [[0]] * 3, max_new_tokens=[2, 3, 4], stop_ids=(3,))
    assert [(s.tokens, s.finished) for s in samples] == [([1, 2], False), ([1, 2, 3], True), ([1, 2, 3], True)]


# --- independence from the batch ------------------------------------------------------------------------------------

def divergences(left: list[Sample], right: list[Sample]) -> tuple[int, int, float]:
    """Tokens compared (up to the first difference of each sample), differences, largest margin at a difference."""
    compared, differ, margin = 0, 0, 0.0
    for one, other in zip(left, right, strict=True):
        assert one.prompt == other.prompt
        first = next((t for t, pair in enumerate(zip(one.tokens, other.tokens)) if pair[0] != pair[1]), None)
        compared += len(one.tokens) if first is None else first + 1
        if first is not None:
            differ += 1
            margin = max(margin, float(one.cdf_margins[first]))
    return compared, differ, margin


def composed(model: nn.Module, settings: dict) -> list[list[Sample]]:
    """The same samples decoded in batches of other sizes, in another order, with others, and drawn n at a time."""
    common = dict(max_new_tokens=24, stop_ids=(17,), seed=3, **settings)
    together = generate(model, PROMPTS, n=8, **common)
    halves = generate(model, PROMPTS, n=8, batch_size=21, **common)
    ids = list(range(8 * len(PROMPTS)))
    apart = generate(model, [PROMPTS[i // 8] for i in ids[::-1]], sample_ids=ids[::-1], batch_size=7, **common)
    crowd = generate(model, [PROMPTS[i // 8] for i in ids] + [[1, 2, 3] * 9] * 5, sample_ids=ids + [77] * 5, **common)
    return [together, halves, apart[::-1], crowd[:len(ids)]]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.95}, {"top_k": 10}])
def test_samples_do_not_depend_on_the_batch(settings):
    """Catches randomness tied to the row, the batch or the call; differences only where the CDF margin is tiny."""
    runs = composed(tiny_lm(), settings)
    for run in runs[1:]:
        compared, differ, margin = divergences(runs[0], run)
        assert compared > 600 and differ <= 1e-3 * compared and margin < 1e-4, (compared, differ, margin)


def test_batch_dependent_randomness_is_noticed(monkeypatch):
    """Negative control of the test above: uniforms by row of the batch, or from a shared generator, break it."""
    by_row = lambda seed, step, ids, positions: uniforms(seed, step, torch.arange(len(ids))[:, None], positions)  # noqa
    for faulty in (by_row, lambda seed, step, ids, positions: torch.rand(len(ids), len(positions))):
        monkeypatch.setattr(generate_module, "uniforms", faulty)
        runs = composed(tiny_lm(), {})
        assert max(divergences(runs[0], run)[1] for run in runs[1:]) > 10


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 8}, {"temperature": 0.0}])
def test_margins_account_for_rounded_logits(settings, monkeypatch):
    """Catches a margin that misses a cause: errors of 2e-5 in the logits change some tokens, each with margin < 1e-4.

    Logits come in steps of 0.5, so that the last token that top-p, top-k or greedy keeps is often tied with the next.
    """
    generator = torch.Generator().manual_seed(0)
    table = (3.0 * torch.randn(40, 40, generator=generator)).round() / 2
    noise = 2e-5 * torch.randn(40, 40, generator=generator).clamp(-1, 1)
    prompts = [[token] for token in range(40)] * 20

    def run() -> tuple[int, int, float]:
        models = MarkovModel(table), MarkovModel(table + noise)
        return divergences(*(generate(model, prompts, max_new_tokens=60, **settings) for model in models))

    compared, differ, margin = run()
    assert differ > 0 and margin < 1e-4, (compared, differ, margin)
    assert settings or differ <= 1e-3 * compared, (compared, differ)
    if "top_p" in settings or "top_k" in settings:  # negative control: the distance to the CDF's edges is not enough
        cut_tail = generate_module.cut_tail
        monkeypatch.setattr(generate_module, "cut_tail", lambda *args: (cut_tail(*args)[0], torch.tensor(math.inf)))
        assert run()[2] > 1e-2


def test_equal_batch_shapes_are_bit_equal():
    """Catches state that leaks between rows or calls: with the same shapes, what the other rows hold is irrelevant."""
    model, common = tiny_lm(), dict(max_new_tokens=20, capture_top_k=5, seed=1)
    others = [[(token + 13) % V for token in prompt] for prompt in PROMPTS]
    samples = generate(model, PROMPTS, **common)
    assert_same(generate(model, PROMPTS, **common), samples)
    for index, prompt in enumerate(PROMPTS):
        mixed = others[:index] + [prompt] + others[index + 1:]
        assert_same([generate(model, mixed, **common)[index]], [samples[index]])


@pytest.mark.parametrize("interval, batch_size", [(1, 1), (1, 3), (1, 20), (3, 7), (16, 2), (16, 7)])
def test_continuous_batching_equals_one_by_one(monkeypatch, interval, batch_size):
    """Catches rows mixed up by a refill or by closing gaps, with late looks too, and stale keys of the row before."""
    model, limits = tiny_lm(), [1, 2, 3, 5, 8, 13, 21, 21, 4, 9]
    common = dict(max_new_tokens=limits, stop_ids=(0, 17, 33), capture_top_k=3, n=2)
    ids = [(place // 2, place) for place in range(20)]
    expected = [generate(model, [(PROMPTS * 2)[index]], sample_ids=[place],
                         **common | {"n": 1, "max_new_tokens": limits[index]})[0] for index, place in ids]
    monkeypatch.setattr(generate_module, "look_interval", lambda device: interval)
    assert_same(generate(model, PROMPTS * 2, batch_size=batch_size, **common), expected, exact=False)


def test_ended_rows_leave_the_batch():
    """Catches decoding to the bitter end: no row is fed more than it needs, and prompts are read once."""
    model, limits = MarkovModel(torch.zeros(5, 5)), list(range(1, 41))
    samples = generate(model, [[1, 2]] * 40, max_new_tokens=limits, n=3)
    assert [len(s.tokens) for s in samples] == [limit for limit in limits for _ in range(3)]
    assert model.rows_fed[0] == 40, "three samples share the forward of their prompt"
    assert model.rows_fed[1:] == [3 * (40 - t) for t in range(40)]


def test_free_rows_are_refilled():
    """Catches a batch that waits for its longest row: it stays full while anything is left to start."""
    model, limits = MarkovModel(torch.zeros(5, 5)), [40, 1, 3, 17, 40, 1, 8, 30]
    samples = generate(model, [[token] for token in (1, 2, 3, 4) * 2], max_new_tokens=limits, batch_size=2)
    assert [len(s.tokens) for s in samples] == limits
    assert sum(model.rows_fed) == sum(limits) + len(limits), "each prompt is read once, each token is decoded once"
    assert sum(rows == 1 for rows in model.rows_fed) <= 1, "the two rows end together: the longest started first"


def test_rows_stop_at_once():
    """Catches a loop that runs to max_new_tokens though every row ended early."""
    chain = torch.full((3, 3), -30.0)
    chain[:, 2] = 30.0
    model, beats = MarkovModel(chain), []
    generate(model, [[0], [1]], max_new_tokens=500, stop_ids=(2,), keepalive=lambda: beats.append(1))
    assert model.rows_fed == [2, 2] and len(beats) == 1, "the prompts, then one step"


# --- streams --------------------------------------------------------------------------------------------------------

LIMITS = [1, 12, 3, 25, 8, 13, 21, 2, 4, 9]


def test_samples_come_as_soon_as_they_have_ended():
    """Catches a stream that waits for a whole batch, and places that are not n * prompt + number."""
    model, beats, seen = tiny_lm(), [], []
    for place, sample in sample_stream(model, PROMPTS * 2, max_new_tokens=LIMITS, n=2, batch_size=20,
                                       keepalive=lambda: beats.append(1)):
        seen.append(place)
        assert len(beats) == len(sample.tokens) == LIMITS[place // 2] and sample.prompt == (PROMPTS * 2)[place // 2]
    assert sorted(seen) == list(range(20))
    again = [place for place, _ in sample_stream(model, PROMPTS * 2, max_new_tokens=LIMITS, n=2, batch_size=20)]
    assert again == seen, "the order is a function of the arguments"


@pytest.mark.parametrize("batch_size, n", [(1, 1), (2, 3), (4, 1), (50, 2)])
def test_two_ranks_share_a_queue(batch_size, n):
    """Catches a prompt sampled twice or by nobody, one taken while no row is free, and samples that depend on who."""
    model, pulled, common = tiny_lm(), [[], []], dict(max_new_tokens=LIMITS, stop_ids=(17, 33), n=n, capture_top_k=2)
    expected = generate(model, PROMPTS * 2, **common)
    counter = iter(range(10))

    def queue(rank):
        for index in counter:
            pulled[rank].append(index)
            yield index

    streams = [sample_stream(model, PROMPTS * 2, batch_size=batch_size, queue=queue(rank), **common)
               for rank in range(2)]
    samples, running = {}, deque([0, 1])
    while running:
        rank = running.popleft()
        for place, sample in islice(streams[rank], 1):
            assert place // n in pulled[rank] and place not in samples
            samples[place] = sample
            running.append(rank)
            started = len(pulled[rank]) * n - sum(done // n in pulled[rank] for done in samples)
            assert started < batch_size + n + 1, "never more prompts than rows were free"
    assert sorted(samples) == list(range(10 * n))
    assert_same([samples[place] for place in range(10 * n)], expected, exact=False)
    assert batch_size == 50 or all(pulled)


def test_a_list_is_a_queue_that_is_read_ahead():
    """Catches a forward for each prompt where the next ones are known, and a subset that samples the rest as well."""
    model = MarkovModel(torch.zeros(5, 5))
    places = [place for place, _ in sample_stream(model, [[1, 2, 3]] * 9, max_new_tokens=list(range(1, 10)),
                                                  batch_size=3, queue=[4, 8, 0, 7, 2, 5])]
    assert sorted(places) == [0, 2, 4, 5, 7, 8]
    assert model.wide_forwards == 2, "six prompts, three at a time"


@pytest.mark.parametrize("most", [1, 7, 20])
def test_prompts_are_read_within_a_budget(monkeypatch, most):
    """Catches one forward of a whole batch of long prompts, whose activations fit nowhere."""
    model, common = tiny_lm(), dict(max_new_tokens=5, batch_size=5)
    expected = generate(model, PROMPTS, **common)
    monkeypatch.setattr(generate_module, "PREFILL_TOKENS", most)
    fed = []
    hook = model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape))
    assert_same(generate(model, PROMPTS, **common), expected, exact=False)
    hook.remove()
    assert max(rows * length for rows, length in fed if length > 1) <= max(most, max(map(len, PROMPTS)))


def test_a_stream_that_is_left_early_leaves_nothing(monkeypatch):
    """Catches rows of an abandoned stream that go on in the next one of the same engine."""
    monkeypatch.setattr(generate_module, "uses_graphs", lambda device: True)
    monkeypatch.setattr(generate_module, "capture", Replay)
    model, common = tiny_lm(), dict(max_new_tokens=LIMITS, batch_size=4, capture_top_k=2)
    engine = Engine(model)
    next(engine.stream(PROMPTS * 2, **common))
    assert_same([sample for _, sample in sorted(engine.stream(PROMPTS * 2, **common), key=lambda pair: pair[0])],
                generate(model, PROMPTS * 2, **common), exact=False)


# --- graphs ---------------------------------------------------------------------------------------------------------

class Replay:
    """Stands in for a CUDA graph: repeats the captured step on the memory of that time, whatever has changed since."""

    def __init__(self, step: Callable[[], None], pool: object) -> None:
        step()  # the warm-up
        self.replay = step
        self.shared = pool or self

    def pool(self) -> object:
        return self.shared


@pytest.mark.parametrize("interval", [1, 16])
def test_replays_equal_eager_decoding(monkeypatch, interval):
    """Catches a replay that reads other memory than the rows stand in (after a refill, a move, in a second call), a
    graph of too few rows or positions, a capture that moves a row on, and pools that are not shared."""
    model, common = tiny_lm(), dict(stop_ids=(17, 33), n=2, capture_top_k=3, batch_size=7)
    calls = [dict(max_new_tokens=LIMITS), dict(max_new_tokens=LIMITS, temperature=0.7, step=1),
             dict(max_new_tokens=7, step=2)]
    expected = [generate(model, PROMPTS * 2, **common, **call) for call in calls]
    monkeypatch.setattr(generate_module, "look_interval", lambda device: interval)
    monkeypatch.setattr(generate_module, "uses_graphs", lambda device: True)
    monkeypatch.setattr(generate_module, "LEAST_SPAN", 4)
    monkeypatch.setattr(generate_module, "capture", Replay)
    engine = Engine(model)
    for call, want in zip(calls, expected):
        samples = dict(engine.stream(PROMPTS * 2, **common, **call))
        assert_same([samples[place] for place in range(20)], want, exact=False)
        addresses = {store.data_ptr() for store in engine.batch.record}
    sizes = list(engine.graphs)
    assert sizes[0][:2] == (7, 9 + 25 - 1), "the largest first"
    assert len({rows for rows, _, _ in sizes}) > 4 and len({span for _, span, _ in sizes}) > 4
    assert len({graph.pool() for graph in engine.graphs.values()}) == 1
    captured = len(engine.graphs)
    dict(engine.stream(PROMPTS * 2, **common, **calls[0]))
    assert len(engine.graphs) == captured and {store.data_ptr() for store in engine.batch.record} == addresses
    dict(engine.stream([PROMPTS[0] * 9], max_new_tokens=50, capture_top_k=3))
    assert engine.batch.sizes == (7, 45 + 49, 50, 3), "grown, and no smaller in anything"
    assert len(engine.graphs) < captured, "graphs of the old buffers are gone"


def test_a_faulty_graph_is_noticed(monkeypatch):
    """Negative control of the test above: a graph of one row or one position too few changes samples or fails."""
    model, common = tiny_lm(), dict(max_new_tokens=LIMITS, capture_top_k=3, batch_size=7)
    expected = generate(model, PROMPTS * 2, **common)
    monkeypatch.setattr(generate_module, "uses_graphs", lambda device: True)
    monkeypatch.setattr(generate_module, "LEAST_SPAN", 1)
    monkeypatch.setattr(generate_module, "capture", Replay)
    monkeypatch.setattr(generate_module, "bucket", lambda size, least, most: max(size - 1, 1))
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        assert_same(generate(model, PROMPTS * 2, **common), expected, exact=False)


def test_buckets():
    """Catches a size that is rounded down, beyond the buffers, or by more than a quarter."""
    for size in range(1, 3000):
        rounded = bucket(size, 1, 10_000)
        assert size <= rounded <= max(1.25 * size, size + 1)
        assert bucket(size, 128, 10_000) >= max(size, 128) and bucket(size, 128, 3000) <= 3000
    assert len({bucket(size, 1, 256) for size in range(1, 257)}) <= 32


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor) and not func.is_view:
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}])
def test_no_tensor_is_larger_than_the_logits(settings):
    """Catches a padded or doubled [B, V] in the drawing of a token; B rows of an odd vocabulary."""
    logits = torch.randn(6, 5003, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as seen:
        pick(logits, torch.rand(6), Sampling(capture_top_k=16, **settings))
    assert seen.numel == logits.numel()


@pytest.mark.parametrize("vocab", [100, 128, 129, 5003, 8192])
def test_largest_equals_topk(vocab):
    """Catches a candidate lost with its chunk, in the last short chunk most of all, and an id beyond the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, vocab, generator=generator)
    logits[:, -1] += 3.0
    logits[0], logits[1, 3:] = -5.0, -math.inf
    for count in (0, 1, 16, 64, 100):
        values, ids = largest(logits, count)
        assert torch.equal(values, logits.topk(count).values) and torch.equal(logits.gather(1, ids), values)
        assert all(len(set(row)) == count for row in ids[2:].tolist())


# --- distribution ---------------------------------------------------------------------------------------------------

def chi_square_excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """Standard deviations (Wilson-Hilferty) by which the counts miss the distribution; inf for an impossible token."""
    support = probs > 0
    if counts[~support].any():
        return math.inf
    expected = probs[support] * counts.sum()
    statistic, df = ((counts[support] - expected) ** 2 / expected).sum(), support.sum() - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_p": 0.05}, {"top_k": 4},
                                      {"temperature": 2.0, "top_p": 0.9, "top_k": 7}])
def test_draws_follow_the_cut_distribution(settings):
    """Catches a filter that keeps one token too many or too few, or forgets to renormalise, on 60,000 draws."""
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, -2.0, 1.7, 0.0, -1.0, 0.9, 2.2])
    samples = generate(MarkovModel(logits.expand(10, 10).clone()), [[0]] * 2000, max_new_tokens=30, **settings)
    counts = np.bincount([token for s in samples for token in s.tokens], minlength=10)
    probs = torch.softmax(logits.double() / settings.get("temperature", 1.0), 0).numpy()
    kept = reference_kept(probs, settings.get("top_p", 1.0), settings.get("top_k", 0))
    if (kept > 0).sum() > 1:
        assert abs(chi_square_excess(counts, kept)) < 4
        spoiled = np.where(kept > 0, kept + 0.03, 0.0)
        assert chi_square_excess(counts, spoiled / spoiled.sum()) > 5, "negative control: a few per cent off are seen"
    else:
        assert counts[logits.argmax()] == counts.sum()


def test_uniforms_equal_the_integer_reference():
    """Catches a wrong wrap-around, an arithmetic shift, and any change of the stream (it would change samples)."""
    words = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (-5, 3, 9, 1),
             (2**64 - 1, 2**63, 2**62, 7680)]
    for seed, step, sample_id, position in words:
        value = uniforms(seed, step, torch.tensor(sample_id), torch.tensor(position))
        assert value.dtype == torch.float32 and value.item() == reference_uniform(seed, step, sample_id, position)
    grid = uniforms(7, 8, torch.arange(5)[:, None], torch.arange(6))
    assert grid.tolist() == [[reference_uniform(7, 8, i, t) for t in range(6)] for i in range(5)]
    pinned = [2175092, 2772753, 5210941, 6917627]
    assert (uniforms(0, 0, torch.tensor(0), torch.arange(4)) * 2**24).tolist() == pinned


def test_uniforms_are_uniform_and_unrelated():
    """Catches a weak hash: bias, a bad distribution, correlation between neighbours in any of the four words."""
    ids, positions = torch.arange(512)[:, None], torch.arange(512)
    base = uniforms(0, 0, ids, positions).double()
    count = base.numel()
    assert base.min() >= 0 and base.max() < 1
    assert abs(base.mean() - 0.5) < 4 * math.sqrt(1 / 12 / count)
    assert abs(base.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    sorted_u = base.flatten().sort().values
    ranks = torch.arange(count, dtype=torch.float64) / count
    assert (sorted_u - ranks).abs().max() * math.sqrt(count) < 2.0  # Kolmogorov-Smirnov: exceeded with chance 7e-4
    others = {"next id": uniforms(0, 0, ids + 1, positions), "next position": uniforms(0, 0, ids, positions + 1),
              "next step": uniforms(0, 1, ids, positions), "next seed": uniforms(1, 0, ids, positions),
              "id and position swapped": base.T, "far id": uniforms(0, 0, ids + 2**32, positions)}
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack([base.flatten(), other.double().flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(count), name
    cells = (base * 16).long() * 16 + (others["next position"].double() * 16).long()
    counts = np.bincount(cells.flatten().numpy(), minlength=256)
    assert abs(chi_square_excess(counts, np.full(256, 1 / 256))) < 4  # pairs of neighbours fill the square evenly
    assert len(base.flatten().unique()) > 0.98 * count


def test_inverse_cdf_at_its_edges():
    """Catches a token of probability 0 (first, last or between), an id out of range, and a wrong side at an edge."""
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0]])
    cases = {0.0: 1, 0.2499: 1, 0.25: 3, 0.4999: 3, 0.5: 4, 1 - 2**-24: 4}
    for uniform, token in cases.items():
        tokens, margins = invert_cdf(probs, torch.tensor([uniform]))
        assert tokens.item() == token
        assert margins.item() == pytest.approx(min(abs(uniform - e) for e in (0.0, 0.25, 0.5, 1.0)), abs=1e-6)
    short = probs * 0.999  # as when rounding leaves the total below the uniform
    assert invert_cdf(short, torch.tensor([0.9999]))[0].item() == 4
    wide = torch.full((1, 200_000), 1 / 200_000)
    assert invert_cdf(wide, torch.tensor([1 - 2**-24]))[0].item() == 199_999


# --- what is recorded -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature, reported", [(1.0, 1.0), (0.5, 0.5), (1.7, 1.7), (0.0, 1.0)])
def test_records_equal_a_full_forward(temperature, reported):
    """Catches records shifted by one position, of the cut distribution, or at another temperature than the loss's."""
    model = tiny_lm()
    samples = generate(model, PROMPTS, max_new_tokens=20, n=2, temperature=temperature, top_p=0.7, top_k=30,
                       stop_ids=(17,), capture_top_k=6)
    for sample in samples:
        with torch.no_grad():
            hidden = model(torch.tensor([sample.prompt + sample.tokens]))[0, len(sample.prompt) - 1:-1]
        logp = (model.lm_head(hidden).detach() / reported).log_softmax(-1)
        torch.testing.assert_close(sample.logprobs, logp[torch.arange(len(logp)), sample.tokens], atol=1e-5, rtol=0)
        torch.testing.assert_close(sample.topk_logprobs, logp.topk(6).values, atol=1e-5, rtol=0)
        torch.testing.assert_close(logp.gather(1, sample.topk_ids.long()), sample.topk_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(sample.entropies, -(logp.exp() * logp).sum(-1), atol=1e-5, rtol=0)
        assert (sample.topk_logprobs.diff(dim=1) <= 0).all() and sample.topk_ids.dtype == torch.int32
        for name in TENSORS:
            values = getattr(sample, name)
            assert values.device.type == "cpu" and not values.requires_grad and not values.is_inference(), name
            assert values.dtype == (torch.int32 if name == "topk_ids" else torch.float32), name


def test_capture_of_nothing_and_of_everything():
    """Catches an off-by-one at the limits of capture_top_k: K = 0 has shape [T, 0], K = V holds everything."""
    model = tiny_lm()
    nothing, = generate(model, [[3, 4]], max_new_tokens=5)
    everything, = generate(model, [[3, 4]], max_new_tokens=5, capture_top_k=V)
    assert nothing.topk_ids.shape == nothing.topk_logprobs.shape == (5, 0)
    assert nothing.tokens == everything.tokens
    torch.testing.assert_close(everything.topk_logprobs.exp().sum(-1), torch.ones(5))
    assert [sorted(row) for row in everything.topk_ids.tolist()] == [list(range(V))] * 5


def test_bf16_and_float64_models():
    """Catches log-probs kept in bf16 (spacing 0.06 near -10) and float64 models rounded to fp32."""
    for dtype, recorded in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        sample, = generate(tiny_lm().to(dtype), [[3, 4]], max_new_tokens=8, capture_top_k=V)
        assert sample.logprobs.dtype == sample.topk_logprobs.dtype == sample.entropies.dtype == recorded
        torch.testing.assert_close(sample.topk_logprobs.exp().sum(-1), torch.ones(8, dtype=recorded))


def test_masked_logits_are_never_drawn():
    """Catches NaN entropies and impossible tokens where a padded head has logits of minus infinity."""
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    table[:, [0, 5, 7]] = -math.inf
    samples = generate(MarkovModel(table), [[1]] * 200, max_new_tokens=20, capture_top_k=8)
    assert {token for s in samples for token in s.tokens} == {1, 2, 3, 4, 6}
    assert all(s.entropies.isfinite().all() and s.logprobs.isfinite().all() for s in samples)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 2}, {"temperature": 0.0}])
def test_logits_that_are_not_finite_end_the_run(settings):
    """Catches a broken model that samples garbage in silence; the message names the sample and the token."""
    chain = torch.full((4, 4), -30.0)
    chain[0, 1] = chain[1, 2] = 30.0
    chain[2] = math.nan
    with pytest.raises(RuntimeError, match="not finite at new token 2 of sample id 41"):
        generate(MarkovModel(chain), [[0]], max_new_tokens=5, sample_ids=[41], **settings)


def test_keepalive_is_called_at_every_step():
    """Catches a long decode that tells nobody it is alive: once a step, in every batch."""
    beats = []
    generate(tiny_lm(), PROMPTS, max_new_tokens=6, batch_size=2, keepalive=lambda: beats.append(1))
    assert len(beats) == 3 * 6


# --- arguments ------------------------------------------------------------------------------------------------------

def test_no_prompts_give_no_samples():
    """Catches a crash on a rank that was dealt nothing."""
    assert generate(tiny_lm(), [], max_new_tokens=5) == []
    assert generate(tiny_lm(), [], max_new_tokens=[], n=3, sample_ids=[], batch_size=4) == []


@pytest.mark.parametrize("change, named", [
    ({"prompts": [[1], []]}, r"prompts\[1\] is empty"),
    ({"prompts": [[1], [V]]}, r"prompts\[1\]: ids must be from 0 to 96, got 97"),
    ({"prompts": [[-1], [2]]}, r"prompts\[0\]: ids"),
    ({"stop_ids": (2, V)}, "stop_ids: ids"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": [3, 0]}, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": [3]}, "max_new_tokens: 1 values for 2 prompts"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"capture_top_k": -1}, "capture_top_k"),
    ({"capture_top_k": V + 1}, "capture_top_k must be from 0 to the vocabulary's 97"),
    ({"n": 0}, "n must be at least 1"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"sample_ids": [1, 2, 3]}, "sample_ids: 3 values for 2 prompts x n = 1"),
    ({"queue": [0, 2]}, "queue: prompt 2, but there are 2 prompts"),
    ({"queue": iter([-1])}, "queue: prompt -1"),
])
def test_bad_arguments_are_named(change, named):
    """Catches an argument that would fail deep inside, or silently sample something else."""
    arguments = {"prompts": [[1], [2]], "max_new_tokens": 3} | change
    with pytest.raises(ValueError, match=named):
        list(sample_stream(tiny_lm(), arguments.pop("prompts"), **arguments))
