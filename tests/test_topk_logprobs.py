# SPDX-License-Identifier: Apache-2.0
"""Log-probs at ids and the sparse head, against dense float64 autograd, and under FSDP2."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from bench.bench_head import peak_extra_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill_core import topk_logprobs
from distill_core.topk_logprobs import chunked_gather_logprobs, head_logprobs, head_stats, sparse_head_logits
from ranks import run_ranks


class LargestResult(TorchDispatchMode):
    """`.numel`: the most elements in any new tensor (no view) that an operator returns, in forward and in backward."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in old:
                self.numel = max(self.numel, leaf.numel())
        return result


def make_head(num_rows=13, width=6, vocab=29, num_k=5, dtype=torch.float64, seed=0):
    """(hidden [N, D], weight [V, D], ids [N, K] with repeats) that require grad."""
    torch.manual_seed(seed)
    hidden = torch.randn(num_rows, width, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(0, vocab, (num_rows, num_k))
    ids[:, 1] = ids[:, 0]  # twice in a row
    ids[:, 2] = vocab - 1  # in every row
    return hidden, weight, ids


def dense_head(hidden, weight, ids, temperature=1.0):
    logits = hidden @ weight.t() / temperature
    return logits.gather(-1, ids), logits.logsumexp(-1)


def grads(outputs, inputs, seed=1):
    """Gradients of a random weighting of all outputs, so that no symmetric mistake cancels."""
    generator = torch.Generator().manual_seed(seed)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outputs]
    return torch.autograd.grad(outputs, inputs, weights)


def assert_near(actual, expected, atol):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------------------------------
# chunked_gather_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(11, 23), (3, 4, 23)])
def test_gather_equals_log_softmax_in_float64(shape, temperature):
    """Value or gradient off: temperature on one side only, 3-D rows mixed up, softmax missing from the gradient."""
    torch.manual_seed(0)
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 23, (*shape[:-1], 5))
    expected = torch.log_softmax(logits / temperature, -1).gather(-1, ids)
    actual = chunked_gather_logprobs(logits, ids, 4, temperature)
    assert actual.dtype == torch.float64
    assert_near(actual, expected, 1e-12)
    assert_near(grads(actual, [logits]), grads(expected, [logits]), 1e-12)
    assert torch.autograd.gradcheck(lambda x: chunked_gather_logprobs(x, ids, 4, temperature), (logits,))


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1_000_000])
def test_chunk_size_changes_nothing(chunk_size):
    """A ragged last chunk that reads stale scratch rows, or a chunk size that leaks into the result."""
    hidden, weight, ids = make_head(num_rows=100, dtype=torch.float32)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    expected = torch.log_softmax(logits, -1).gather(-1, ids)
    actual = chunked_gather_logprobs(logits, ids, chunk_size)
    assert_near(actual, expected, 1e-6)
    assert_near(grads(actual, [logits]), grads(expected, [logits]), 1e-6)
    expected, actual = dense_head(hidden, weight, ids), head_logprobs(hidden, weight, ids, chunk_size=chunk_size)
    assert_near(actual, expected, 1e-5)
    assert_near(grads(actual, [hidden, weight]), grads(expected, [hidden, weight]), 2e-5)
    stats = head_stats(hidden, weight, ids, own_k=3, chunk_size=chunk_size)
    assert_near((stats.logits_NK, stats.lse_N), actual, 1e-6)


def test_gather_from_bf16_is_fp32_to_the_end():
    """bf16 log-probs: the spacing is 0.06 near -10, which ruins a KL. Rounding the exact result shows it."""
    torch.manual_seed(0)
    logits = (5.0 * torch.randn(64, 4000)).bfloat16().requires_grad_()
    ids = torch.randint(0, 4000, (64, 8))
    exact = torch.log_softmax(logits.double(), -1).gather(-1, ids)
    actual = chunked_gather_logprobs(logits, ids, 16)
    assert actual.dtype == torch.float32 and grads(actual, [logits])[0].dtype == torch.bfloat16
    assert (actual - exact).abs().max() < 1e-5
    assert (exact.bfloat16() - exact).abs().max() > 1e-2


def test_gather_survives_extreme_logits():
    """exp of unshifted logits overflows at 89 in fp32; masked (-inf) ids are legal and have log-prob -inf."""
    torch.manual_seed(0)
    logits = 1e4 * torch.randn(8, 50)
    logits[:, 7] = -torch.inf
    ids = torch.tensor([[0, 7, 49]]).expand(8, 3)
    assert_near(chunked_gather_logprobs(logits, ids, 3), torch.log_softmax(logits, -1).gather(-1, ids), 1e-2)
    assert chunked_gather_logprobs(logits, ids, 3)[:, 1].eq(-torch.inf).all()


@pytest.mark.parametrize("view", ["fp32", "bf16", "next-token slice", "vocabulary slice"])
def test_gather_holds_one_chunk(view):
    """An upcast, a flatten or a log-sum-exp that copies: every byte beyond one fp32 chunk + 5 % counts."""
    logits_BTV = torch.randn(4, 65, 4000)
    logits = {"fp32": logits_BTV, "bf16": logits_BTV.bfloat16(), "next-token slice": logits_BTV[:, :-1],
              "vocabulary slice": logits_BTV[:, :, :-3]}[view]
    ids = torch.randint(0, logits.shape[-1], (*logits.shape[:-1], 2))
    peak_bytes = peak_extra_bytes(lambda: chunked_gather_logprobs(logits, ids, 32))
    assert peak_bytes <= 1.05 * 32 * logits.shape[-1] * 4


def test_memory_check_sees_a_second_chunk():
    """Negative control: the usual loop, upcast then gather - logsumexp, peaks at two chunks."""
    logits, ids = torch.randn(260, 4000).bfloat16(), torch.randint(0, 4000, (260, 2))

    def usual():
        for chunk, at in zip(logits.split(32), ids.split(32), strict=True):
            chunk = chunk.float()
            chunk.gather(-1, at) - chunk.logsumexp(-1, keepdim=True)

    assert peak_extra_bytes(usual) >= 1.95 * 32 * 4000 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_gradient_holds_one_chunk(dtype):
    """A backward that saves its chunks or upcasts the whole gradient: only one chunk is allowed beside the gradient."""
    logits, ids = torch.randn(260, 4000).to(dtype).requires_grad_(), torch.randint(0, 4000, (260, 2))
    peak_bytes = peak_extra_bytes(lambda: grads(chunked_gather_logprobs(logits, ids, 32), [logits]))
    assert peak_bytes <= logits.numel() * logits.element_size() + 1.05 * 32 * 4000 * 4


@pytest.mark.parametrize("shape", [(0, 9), (0, 3, 9), (2, 0, 9)])
def test_gather_of_no_rows(shape):
    """A rank without response tokens must still run forward and backward."""
    logits = torch.randn(shape, requires_grad=True)
    logp = chunked_gather_logprobs(logits, torch.zeros(*shape[:-1], 4, dtype=torch.long))
    assert logp.shape == (*shape[:-1], 4)
    logp.sum().backward()
    assert logits.grad.shape == shape


def test_int32_ids_are_welcome():
    """Captured ids travel as int32; gather wants int64."""
    hidden, weight, ids = make_head()
    assert torch.equal(sparse_head_logits(hidden, weight, ids.int()), sparse_head_logits(hidden, weight, ids))
    logits = hidden @ weight.t()
    assert torch.equal(chunked_gather_logprobs(logits, ids.int()), chunked_gather_logprobs(logits, ids))


@pytest.mark.parametrize("name, change", [
    ("chunk_size", {"chunk_size": 0}),
    ("chunk_size", {"chunk_size": -1}),
    ("temperature", {"temperature": 0.0}),
    ("temperature", {"temperature": float("nan")}),
    ("logits", {"logits_NV": torch.zeros(9)}),
    ("logits", {"logits_NV": torch.zeros(4, 9, dtype=torch.long)}),
    ("ids", {"ids_NK": torch.zeros(4, 2)}),
    ("ids", {"ids_NK": torch.zeros(3, 2, dtype=torch.long)}),
    ("ids", {"ids_NK": torch.zeros(4, dtype=torch.long)}),
    ("ids", {"ids_NK": torch.full((4, 2), 9)}),
    ("ids", {"ids_NK": torch.full((4, 2), -1)}),
])
def test_gather_names_the_wrong_argument(name, change):
    """A wrong argument found deep in a kernel, or, for a negative id, not found at all."""
    arguments = {"logits_NV": torch.zeros(4, 9), "ids_NK": torch.zeros(4, 2, dtype=torch.long)} | change
    with pytest.raises(ValueError, match=f"^{name} "):
        chunked_gather_logprobs(**arguments)


@pytest.mark.parametrize("name, change", [
    ("hidden", {"hidden_ND": torch.zeros(2, 2, 6)}),
    ("hidden", {"hidden_ND": torch.zeros(4, 6, dtype=torch.long)}),
    ("weight", {"weight_VD": torch.zeros(9, 5)}),
    ("weight", {"weight_VD": torch.zeros(9)}),
    ("ids", {"ids_NK": torch.zeros(3, 2, dtype=torch.long)}),
    ("ids", {"ids_NK": torch.full((4, 2), 9)}),
])
def test_head_functions_name_the_wrong_argument(name, change):
    """The same for hidden states and head."""
    arguments = {"hidden_ND": torch.zeros(4, 6), "weight_VD": torch.zeros(9, 6),
                 "ids_NK": torch.zeros(4, 2, dtype=torch.long)} | change
    for function, extra in ((sparse_head_logits, {}), (head_logprobs, {}), (head_stats, {"own_k": 2})):
        with pytest.raises(ValueError, match=f"^{name} "):
            function(**arguments, **extra)
    with pytest.raises(ValueError, match="^own_k "):
        head_stats(torch.zeros(4, 6), torch.zeros(9, 6), torch.zeros(4, 2, dtype=torch.long), own_k=10)


# ---------------------------------------------------------------------------------------------------------------------
# From hidden states


@pytest.fixture
def small_pieces(monkeypatch):
    """Tiles of 8 head rows and blocks of 2 positions, so that small tensors meet every boundary."""
    monkeypatch.setattr(topk_logprobs, "_TILE_ROWS", 8)
    monkeypatch.setattr(topk_logprobs, "_BLOCK_NUMBERS", 2 * 5 * 6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_logprobs_equals_dense_head(small_pieces, temperature):
    """A gradient that misses the temperature, a tile, a chunk, a repeated id or the log-sum-exp's part."""
    hidden, weight, ids = make_head()
    expected = dense_head(hidden, weight, ids, temperature)
    actual = head_logprobs(hidden, weight, ids, 4, temperature)
    assert_near(actual, expected, 1e-12)
    assert_near(grads(actual, [hidden, weight]), grads(expected, [hidden, weight]), 1e-12)
    for index in (0, 1):  # only one of the two outputs used
        actual = head_logprobs(hidden, weight, ids, 4, temperature)
        expected = dense_head(hidden, weight, ids, temperature)
        assert_near(grads(actual[index], [hidden, weight]), grads(expected[index], [hidden, weight]), 1e-12)
    assert torch.autograd.gradcheck(lambda h, w: head_logprobs(h, w, ids, 4, temperature), (hidden, weight))


@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_head_equals_dense_head(small_pieces, deterministic):
    """A repeated id counted once, a block boundary that splits the sum of an id, a head row at the wrong position."""
    hidden, weight, ids = make_head()
    expected, _ = dense_head(hidden, weight, ids)
    actual = sparse_head_logits(hidden, weight, ids, deterministic=deterministic)
    assert_near(actual, expected, 1e-12)
    assert_near(grads(actual, [hidden, weight]), grads(expected, [hidden, weight]), 1e-12)
    assert torch.autograd.gradcheck(
        lambda h, w: sparse_head_logits(h, w, ids, deterministic=deterministic), (hidden, weight))


def test_head_stats_equals_dense_head(small_pieces):
    """Entropy of the wrong temperature, own top-K taken after the logits were overwritten."""
    hidden, weight, ids = make_head()
    logits = (hidden @ weight.t() / 0.7).detach()
    stats = head_stats(hidden, weight, ids, own_k=4, chunk_size=3, temperature=0.7)
    own_logits, own_ids = logits.topk(4)
    assert_near(stats.logits_NK, logits.gather(-1, ids), 1e-12)
    assert_near(stats.lse_N, logits.logsumexp(-1), 1e-12)
    assert_near(stats.entropy_N, torch.distributions.Categorical(logits=logits).entropy(), 1e-12)
    assert torch.equal(stats.own_ids_NK, own_ids)
    assert_near(stats.own_logits_NK, own_logits, 1e-12)
    assert not any(tensor.requires_grad for tensor in stats)
    assert head_stats(hidden, weight, ids, own_k=0).own_ids_NK.shape == (13, 0)


def test_head_stats_of_a_certain_position():
    """Entropy from p log p: 0 * -inf gives NaN where a probability underflows."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[500.0], [0.0], [-500.0]])
    stats = head_stats(hidden, weight, torch.tensor([[0]]), own_k=1)
    assert stats.entropy_N.item() == 0.0 and stats.lse_N.item() == 500.0


@pytest.mark.parametrize("function", [
    lambda h, w, i: head_logprobs(h, w, i, chunk_size=16),
    sparse_head_logits,
    lambda h, w, i: sparse_head_logits(h, w, i, deterministic=True),
], ids=["head_logprobs", "sparse", "sparse deterministic"])
def test_bf16_head_is_fp32_to_the_end(small_pieces, function):
    """Logits or sums rounded to bf16. Negative control: the logits of a bf16 matmul are off by more than 1e-2."""
    hidden, weight, ids = make_head(num_rows=60, width=64, vocab=50, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    outputs = function(hidden, weight, ids)
    actual = outputs if isinstance(outputs, Tensor) else outputs[0]
    expected = dense_head(*wide, ids)
    assert actual.dtype == torch.float32
    assert (actual - expected[0]).abs().max() < 2e-5
    assert (dense_head(hidden, weight, ids)[0] - expected[0]).abs().max() > 1e-2
    actual_grads = grads(outputs, [hidden, weight])
    expected_grads = grads(expected[0] if isinstance(outputs, Tensor) else expected, wide)
    for actual, expected in zip(actual_grads, expected_grads, strict=True):
        assert actual.dtype == torch.bfloat16  # what autograd demands; summed in fp32 and rounded once
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_head_gradient_of_a_frequent_id_keeps_its_small_terms(monkeypatch, deterministic):
    """A bf16 sum stops growing at 256 times its terms: the control loses 3/4 of 1,024 equal terms."""
    monkeypatch.setattr(topk_logprobs, "_BLOCK_NUMBERS", 2)  # one position at a time
    hidden, weight = torch.ones(1024, 1).bfloat16(), torch.ones(3, 1).bfloat16().requires_grad_()
    ids = torch.tensor([[1, 2]]).expand(1024, 2)
    sparse_head_logits(hidden, weight, ids, deterministic=deterministic).sum().backward()
    assert weight.grad.flatten().tolist() == [0.0, 1024.0, 1024.0]
    control = torch.zeros(3, 1).bfloat16()
    for row in range(1024):
        control.index_add_(0, ids[row], hidden[row].expand(2, 1))
    assert control.flatten().tolist() == [0.0, 256.0, 256.0]


def test_autocast_does_not_lower_the_precision():
    """Someone else's trainer calls this under autocast, where torch.bmm and torch.matmul silently run in bf16."""
    hidden, weight, ids = make_head(num_rows=20, width=64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse_head_logits(hidden, weight, ids), sparse_head_logits(hidden.clone(), weight, ids))
        inside = (sparse_head_logits(hidden, weight, ids), *head_logprobs(hidden, weight, ids),
                  *head_stats(hidden, weight, ids, own_k=2), chunked_gather_logprobs(hidden @ weight.t(), ids))
        logits = hidden @ weight.t()
    outside = (sparse_head_logits(hidden, weight, ids), *head_logprobs(hidden, weight, ids),
               *head_stats(hidden, weight, ids, own_k=2), chunked_gather_logprobs(logits, ids))
    assert logits.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_no_tensor_of_the_size_of_the_logits(monkeypatch):
    """[N, V] in forward or backward of the default training step, or [N, K, D] of the whole batch.

    Negative control: the spy sees the one in a dense head, the other in one gather of all head rows.
    """
    num_rows, vocab, width, num_k = 1024, 2000, 128, 16
    monkeypatch.setattr(topk_logprobs, "_BLOCK_NUMBERS", num_rows * num_k * width // 8)
    hidden, weight, ids = make_head(num_rows, width, vocab, num_k, torch.float32)

    def largest(fn):
        with LargestResult() as spy:
            fn().sum().backward()
        return spy.numel

    for deterministic in (False, True):
        assert largest(lambda: sparse_head_logits(hidden, weight, ids, deterministic=deterministic)) \
            <= num_rows * num_k * width // 8
    assert largest(lambda: head_logprobs(hidden, weight, ids, chunk_size=128)[0]) <= 128 * vocab
    assert largest(lambda: dense_head(hidden, weight, ids)[0]) >= num_rows * vocab
    assert largest(lambda: torch.einsum("nd,nkd->nk", hidden, weight[ids])) >= num_rows * num_k * width


@pytest.mark.parametrize("function", [sparse_head_logits, head_logprobs, chunked_gather_logprobs])
def test_saves_the_arguments_and_no_copy_of_them(function):
    """A saved cast of the head keeps it alive when FSDP2 frees the weight; saved chunks add up to [N, V]."""
    hidden, weight, ids = make_head(num_rows=40, dtype=torch.bfloat16)
    arguments = ((hidden @ weight.t()).detach().requires_grad_(), ids)
    arguments = arguments if function is chunked_gather_logprobs else (hidden, weight, ids)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        function(*arguments)
    known = {argument.data_ptr() for argument in arguments}
    assert sum(tensor.data_ptr() in known for tensor in saved) == len(arguments)
    assert all(tensor.numel() <= 40 for tensor in saved if tensor.data_ptr() not in known)  # the log-sum-exp [N]


def test_frozen_head_gets_no_gradient_buffer():
    """A frozen head (LoRA, a teacher) must not cost a [V, D] buffer."""
    hidden, weight, ids = make_head(num_rows=4, vocab=4000, num_k=3)
    weight.requires_grad_(False)
    for function in (sparse_head_logits, lambda *args: head_logprobs(*args, chunk_size=1)[0]):
        with LargestResult() as largest:
            function(hidden, weight, ids).sum().backward()
        assert hidden.grad is not None and weight.grad is None and largest.numel <= 4000


def test_deterministic_gradient_is_reproducible():
    """Two runs that differ in the last bit: a stale resume looks like a bug, or hides one."""
    hidden, weight, ids = make_head(num_rows=500, dtype=torch.float32)
    runs = [grads(sparse_head_logits(hidden, weight, ids, deterministic=True), [hidden, weight]) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_second_derivative_is_refused():
    """A custom backward differentiated again returns nonsense unless it says no."""
    hidden, weight, ids = make_head()
    for output in (sparse_head_logits(hidden, weight, ids), head_logprobs(hidden, weight, ids)[1],
                   chunked_gather_logprobs(hidden @ weight.t(), ids)):
        gradient, = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.parametrize("function", [
    sparse_head_logits,
    lambda h, w, i: sparse_head_logits(h, w, i, deterministic=True),
    lambda h, w, i: torch.cat([out.flatten() for out in head_logprobs(h, w, i)]),
], ids=["sparse", "sparse deterministic", "head_logprobs"])
def test_head_functions_of_no_rows(function):
    """A rank without response tokens must give the head a zero gradient, not None: its peers wait in the reduction."""
    hidden, weight = torch.zeros(0, 6, requires_grad=True), torch.ones(9, 6, requires_grad=True)
    function(hidden, weight, torch.zeros(0, 2, dtype=torch.long)).sum().backward()
    assert hidden.grad.shape == (0, 6) and torch.equal(weight.grad, torch.zeros(9, 6))
    assert head_stats(hidden, weight, torch.zeros(0, 2, dtype=torch.long), own_k=3).own_logits_NK.shape == (0, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Under FSDP2


class Head(nn.Linear):
    """The way a model offers its head: called as a module, so that FSDP2's hooks gather the weight."""

    def forward(self, hidden, fn=None):
        return super().forward(hidden) if fn is None else fn(hidden, self.weight)


class TinyLM(nn.Module):
    def __init__(self, tied, vocab=37, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.lm_head = Head(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.flatten(0, -2)


def shard(model, tied, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard([model.embed, model.lm_head] if tied else model.lm_head, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def head_outputs(model, hidden, ids):
    """Everything a step may ask of the head, as one scalar with unequal weights."""
    sparse = model.lm_head(hidden, lambda h, w: sparse_head_logits(h, w, ids))
    sorted_ = model.lm_head(hidden, lambda h, w: sparse_head_logits(h, w, ids, deterministic=True))
    logits, lse = model.lm_head(hidden, lambda h, w: head_logprobs(h, w, ids, chunk_size=4, temperature=0.7))
    return sparse.sin().sum() + 2.0 * sorted_.cos().sum() + (logits - lse[:, None]).square().sum()


def dense_outputs(model, hidden, ids):
    logits = model.lm_head(hidden)
    at_ids = logits.gather(-1, ids)
    logp = torch.log_softmax(logits / 0.7, -1).gather(-1, ids)
    return at_ids.sin().sum() + 2.0 * at_ids.cos().sum() + logp.square().sum()


def fsdp_gradient_error(world_size, tied, outputs=head_outputs, **options):
    """Largest relative gradient error of two accumulated micro-batches on `world_size` ranks against one dense process.

    The last rank has no rows in the second micro-batch.
    """
    def run(rank):
        torch.manual_seed(0)
        model = TinyLM(tied)
        reference = copy.deepcopy(model)
        shard(model, tied, **options)
        torch.manual_seed(1)
        tokens, ids = torch.randint(0, 37, (2, world_size, 2, 3)), torch.randint(0, 37, (2, world_size, 6, 4))
        num_rows = [[6] * world_size, [6] * (world_size - 1) + [0]]
        for step in range(2):
            rows = num_rows[step][rank]
            outputs(model, model(tokens[step, rank])[:rows], ids[step, rank, :rows]).backward()
            for peer in range(world_size):
                rows = num_rows[step][peer]
                hidden = reference(tokens[step, peer])[:rows]
                (dense_outputs(reference, hidden, ids[step, peer, :rows]) / world_size).backward()
        pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
        return max(((mine.grad.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max()).item()
                   for (_, mine), (_, theirs) in pairs)

    return max(run_ranks(run, world_size))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp_gradients_equal_unsharded(world_size, tied):
    """A backward that reads a freed or stale weight, misses uneven shards (37 rows on 2 or 3 ranks), or drops one use
    of a tied weight."""
    assert fsdp_gradient_error(world_size, tied) < 2e-6


def test_fsdp_bf16_parameters_are_close():
    """The bf16 unsharded weight of mixed precision: cast inside, never saved as a cast."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert fsdp_gradient_error(2, True, mp_policy=policy) < 5e-2


def test_fsdp_check_sees_a_wrong_backward():
    """Negative control: a head gradient that keeps one of several equal ids differs by more than the tolerance."""
    def outputs_of_unique_ids(model, hidden, ids):
        first = (ids[:, :, None] == ids[:, None, :]).int().argmax(-1) == torch.arange(ids.shape[1])
        logits = model.lm_head(hidden, lambda h, w: sparse_head_logits(h, w, ids))
        frozen = model.lm_head(hidden, lambda h, w: sparse_head_logits(h, w.detach(), ids))
        at_ids = torch.where(first, logits, frozen)
        logits, lse = model.lm_head(hidden, lambda h, w: head_logprobs(h, w, ids, temperature=0.7))
        return at_ids.sin().sum() + 2.0 * at_ids.cos().sum() + (logits - lse[:, None]).square().sum()

    assert fsdp_gradient_error(2, False, outputs_of_unique_ids) > 1e-3
