# SPDX-License-Identifier: Apache-2.0
"""The OPD losses against dense float64 autograd and closed forms, at their edges, and under FSDP2."""
from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill_core import losses_kl
from distill_core.losses_kl import (
    forward_kl_full,
    forward_kl_topk,
    generalized_kl_topk,
    importance_weight,
    jsd_topk,
    reverse_kl_full,
    reverse_kl_sampled,
    reverse_kl_topk,
    reverse_kl_topk_unnormalized,
    select_by_entropy,
    tail_bucket_kl_topk,
    topk_diagnostics,
)
from distill_core.topk_logprobs import sparse_head_logits
from ranks import run_ranks

INF = math.inf
FULL = [reverse_kl_full, forward_kl_full]
MASS_AWARE = [generalized_kl_topk, tail_bucket_kl_topk, reverse_kl_topk_unnormalized]


def lse(logits):
    """logsumexp over a vocabulary of these ids and two more, of logit 0."""
    return nn.functional.pad(logits if logits.dtype == torch.float64 else logits.float(), (0, 2)).logsumexp(-1)


def with_lse(loss_fn):
    return lambda student, teacher: loss_fn(student, teacher, lse(student), lse(teacher))


FAMILY = [  # f(student logits, teacher logits); all but the unnormalised one
    pytest.param(reverse_kl_topk, id="reverse"), pytest.param(forward_kl_topk, id="forward"),
    *(pytest.param(partial(jsd_topk, beta=beta), id=f"jsd {beta}") for beta in (0.0, 1e-6, 0.5, 0.9, 1 - 1e-6, 1.0)),
    pytest.param(with_lse(generalized_kl_topk), id="generalized"),
    pytest.param(with_lse(tail_bucket_kl_topk), id="tail bucket"),
]
UNNORMALIZED = pytest.param(with_lse(reverse_kl_topk_unnormalized), id="unnormalized")


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


def randn(*shape, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def kl(log_a, log_b):
    """KL(a || b) from log-probs, as in a textbook."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def dense_full(student_hidden, student_weight, teacher_hidden, teacher_weight, *, forward, temperature=1.0):
    log_q = torch.log_softmax(student_hidden @ student_weight.t() / temperature, -1)
    log_p = torch.log_softmax(teacher_hidden @ teacher_weight.t() / temperature, -1)
    return kl(log_p, log_q) if forward else kl(log_q, log_p)


def make_full(num_rows=13, vocab=29, dtype=torch.float64):
    """(student hidden and weight, teacher hidden and weight); the teacher is wider."""
    shapes = ((num_rows, 6), (vocab, 6), (num_rows, 9), (vocab, 9))
    return [randn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def assert_near(actual, expected, atol):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def weighted_grads(loss, inputs):
    return torch.autograd.grad(loss, inputs, randn(*loss.shape, seed=99, dtype=loss.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.parametrize("loss_fn", [reverse_kl_topk, forward_kl_topk])
def test_topk_equals_renormalised_full_softmax(loss_fn):
    """The long way round: softmax over the vocabulary, gather, renormalise. The wrong direction or a raw mass shows."""
    student, teacher = randn(7, 50, scale=3).requires_grad_(), randn(7, 50, seed=1, scale=3)
    ids = student.topk(8).indices

    def renormalised(logits):
        logp = torch.log_softmax(logits, -1).gather(-1, ids)
        return logp - logp.logsumexp(-1, keepdim=True)

    log_q, log_p = renormalised(student), renormalised(teacher)
    expected = kl(log_q, log_p) if loss_fn is reverse_kl_topk else kl(log_p, log_q)
    actual = loss_fn(student.gather(-1, ids), teacher.gather(-1, ids))
    assert actual.shape == (7,) and actual.dtype == torch.float64
    assert_near(actual, expected, 1e-12)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), 1e-12)
    assert torch.autograd.gradcheck(lambda x: loss_fn(x.gather(-1, ids), teacher.gather(-1, ids)), (student,))


def test_topk_gradients_are_the_closed_forms():
    """q (log q - log p - KL) for the reverse and q - p for the forward KL: a detached normaliser has neither."""
    student, teacher = randn(9, 16, scale=2).requires_grad_(), randn(9, 16, seed=1, scale=2)
    q, p = student.softmax(-1).detach(), teacher.softmax(-1)
    loss = reverse_kl_topk(student, teacher)
    reverse, = torch.autograd.grad(loss.sum(), student)
    forward, = torch.autograd.grad(forward_kl_topk(student, teacher).sum(), student)
    assert_near(reverse, q * ((q / p).log() - loss.detach()[:, None]), 1e-12)
    assert_near(forward, q - p, 1e-12)


def on_vocabulary(loss_fn, student, teacher, ids):
    """A mass-aware loss from logits [N, V]."""
    return loss_fn(student.gather(-1, ids), teacher.gather(-1, ids), student.logsumexp(-1), teacher.logsumexp(-1))


def by_definition(loss_fn, student, teacher, ids):
    """The same from dense probabilities; the tail is the sum over the ids outside."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    outside = torch.ones_like(p).scatter(-1, ids, 0.0)
    q_tail, p_tail = (q * outside).sum(-1, keepdim=True), (p * outside).sum(-1, keepdim=True)
    q, p = q.gather(-1, ids), p.gather(-1, ids)
    if loss_fn is tail_bucket_kl_topk:
        q, p = torch.cat([q, q_tail], -1), torch.cat([p, p_tail], -1)
    terms = q * (q / p).log()
    return (terms - q + p if loss_fn is generalized_kl_topk else terms).sum(-1)


@pytest.mark.parametrize("top_k", [1, 8, 49])
@pytest.mark.parametrize("loss_fn", MASS_AWARE)
def test_mass_aware_losses_equal_their_definitions(loss_fn, top_k):
    """Probabilities renormalised by mistake, a lost -q + p, a tail of the wrong model, a detached logsumexp."""
    student, teacher = randn(7, 50, scale=3).requires_grad_(), randn(7, 50, seed=1, scale=3)
    ids = student.topk(top_k).indices
    actual, expected = (f(loss_fn, student, teacher, ids) for f in (on_vocabulary, by_definition))
    assert actual.shape == (7,) and actual.dtype == torch.float64
    assert_near(actual, expected, 1e-11)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), 1e-11)
    assert torch.autograd.gradcheck(lambda x: on_vocabulary(loss_fn, x, teacher, ids), (student,))


@pytest.mark.parametrize("loss_fn", MASS_AWARE)
def test_mass_aware_losses_on_all_ids_are_the_full_kl(loss_fn):
    """K = V: every member of the family is the same divergence, and an empty tail is worth nothing."""
    student, teacher = randn(7, 12, scale=3).requires_grad_(), randn(7, 12, seed=1, scale=3)
    actual = on_vocabulary(loss_fn, student, teacher, torch.arange(12).expand(7, 12))
    expected = kl(torch.log_softmax(student, -1), torch.log_softmax(teacher, -1))
    assert_near(actual, expected, 1e-13)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), 1e-13)


@pytest.mark.parametrize("loss_fn", MASS_AWARE)
def test_mass_aware_losses_do_not_see_shifts_or_order(loss_fn):
    """Logits that are taken for log-probs, or a loss that depends on the place of an id."""
    student, teacher = randn(7, 50, scale=3), randn(7, 50, seed=1, scale=3)
    ids, order = student.topk(8).indices, torch.randperm(8)
    expected = on_vocabulary(loss_fn, student, teacher, ids)
    assert_near(on_vocabulary(loss_fn, student + randn(7, 1, seed=2), teacher - 9.0, ids[:, order]), expected, 1e-12)


def test_generalized_kl_is_the_released_stop_gradient_loss():
    """Gradient = student mass x that of stop(q~ (log q - log p)) log q, with log-probs of the whole vocabulary and the
    weight q~ renormalised; not of the form with plain q as weight, nor of the renormalised loss."""
    student, teacher = randn(20, 50, scale=3).requires_grad_(), randn(20, 50, seed=1, scale=3)
    ids = student.topk(4).indices
    log_q, log_p = (torch.log_softmax(logits, -1).gather(-1, ids) for logits in (student, teacher))
    mass = log_q.detach().exp().sum(-1, keepdim=True)
    advantage = log_q.detach() - log_p
    released = (log_q.detach().softmax(-1) * advantage * log_q).sum(-1)
    actual, = torch.autograd.grad(on_vocabulary(generalized_kl_topk, student, teacher, ids).sum(), student)
    expected, = torch.autograd.grad(released.sum(), student, retain_graph=True)
    assert_near(actual, mass * expected, 1e-14)
    assert (actual - expected).abs().max() > 1e-2
    renormalised, = torch.autograd.grad(reverse_kl_topk(log_q, log_p).sum(), student)
    assert (actual - mass * renormalised).abs().max() > 1e-2


def jsd_by_definition(student, teacher, beta):
    """beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, as published, not scaled."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)


@pytest.mark.parametrize("beta, atol", [(0.1, 1e-13), (0.5, 1e-13), (0.8, 1e-13), (1e-6, 1e-8), (1 - 1e-6, 1e-8)])
def test_jsd_is_the_published_one_over_beta_one_minus_beta(beta, atol):
    """The ends or the weights exchanged (half of the implementations do). Near the ends the definition itself rounds:
    it is divided by 1e-6."""
    student, teacher = randn(30, 8, scale=2).requires_grad_(), randn(30, 8, seed=1, scale=2)
    actual = jsd_topk(student, teacher, beta=beta)
    expected = jsd_by_definition(student, teacher, beta) / (beta * (1 - beta))
    assert_near(actual, expected, atol)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), atol)
    assert torch.autograd.gradcheck(lambda x: jsd_topk(x, teacher, beta=beta), (student,))


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-14), (torch.float32, 2e-6)])
@pytest.mark.parametrize("end, limit_fn", [(0.0, forward_kl_topk), (1.0, reverse_kl_topk)])
def test_jsd_is_continuous_at_its_ends(end, limit_fn, dtype, atol):
    """A JSD that vanishes towards its ends (a known bug: beta = 1 then trains nothing), jumps there, or loses all its
    digits to a division by a small beta. Negative control: the published form at 1e-6 is below 1e-3 of the KL."""
    student = randn(30, 8, dtype=dtype, scale=2).requires_grad_()
    teacher = randn(30, 8, seed=1, dtype=dtype, scale=2)
    limit = limit_fn(student, teacher)
    limit_gradient, = weighted_grads(limit, [student])
    for distance, error in ((0.0, atol), (1e-35, atol), (1e-12, max(atol, 1e-8)), (1e-6, 2e-3), (1e-3, 0.3)):
        loss = jsd_topk(student, teacher, beta=abs(end - distance))
        torch.testing.assert_close(loss, limit, rtol=error, atol=error)
        torch.testing.assert_close(weighted_grads(loss, [student])[0], limit_gradient, rtol=error, atol=error)
    assert jsd_by_definition(student, teacher, abs(end - 1e-6)).abs().max() < 1e-3 * limit.min()


@pytest.mark.parametrize("beta", [1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_jsd_in_fp32_keeps_its_digits(beta):
    """log(1 - beta + beta r) / beta taken as it stands: wrong by percents at beta = 1e-6, infinite at large ratios."""
    student, teacher = randn(50, 16, scale=4).requires_grad_(), randn(50, 16, seed=1, scale=4)
    narrow = student.detach().float().requires_grad_()
    actual, expected = jsd_topk(narrow, teacher.float(), beta=beta), jsd_topk(student, teacher, beta=beta)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = weighted_grads(actual, [narrow])[0].double(), weighted_grads(expected, [student])[0]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=2e-5)
    assert not jsd_topk(narrow, narrow.detach(), beta=beta).any()
    far = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    loss = jsd_topk(far, -far.detach(), beta=beta)
    # nothing in common: -log(beta) / (1 - beta) - log(1 - beta) / beta
    assert loss.item() == pytest.approx(-math.log(beta) / (1 - beta) - math.log1p(-beta) / beta, rel=1e-5)
    assert torch.autograd.grad(loss.sum(), far)[0].isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.3, 0.5, 1.0])
def test_jsd_has_the_curvature_of_the_kl(beta):
    """The reason for the scale: near agreement beta turns the direction of the loss, never its strength."""
    teacher = randn(30, 8, seed=1)
    student = teacher + 1e-3 * randn(30, 8)
    actual, expected = jsd_topk(student, teacher, beta=beta), reverse_kl_topk(student, teacher)
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("dtype, tail_logit", [(torch.float32, -30.0), (torch.float32, -13.0), (torch.float64, -30.0)])
def test_tail_bucket_where_the_tail_is_next_to_nothing(dtype, tail_logit):
    """Mass that rounds to 1: log(1 - sum q) is then -inf. Only the student's tail is small, the teacher's is large."""
    student = torch.tensor([[1.0, 0.5, tail_logit]], dtype=dtype, requires_grad=True)
    teacher, ids = torch.tensor([[0.0, 1.0, 0.0]], dtype=dtype), torch.tensor([[0, 1]])
    loss = on_vocabulary(tail_bucket_kl_topk, student, teacher, ids)
    gradient, = torch.autograd.grad(loss.sum(), student)
    wide = student.detach().double().requires_grad_()
    expected = by_definition(tail_bucket_kl_topk, wide, teacher.double(), ids)
    expected_gradient, = torch.autograd.grad(expected.sum(), wide)
    atol = 5e-6 if dtype == torch.float32 else 1e-11
    assert_near(loss.double(), expected, atol)
    assert_near(gradient.double(), expected_gradient, atol)
    swapped = on_vocabulary(tail_bucket_kl_topk, teacher.requires_grad_(), student.detach(), ids)
    assert swapped.isfinite().all() and swapped.item() > 0.2 * 10  # 0.2 of the mass, at least 10 nats off
    assert torch.autograd.grad(swapped.sum(), teacher)[0].isfinite().all()
    if tail_logit == -30.0 and dtype == torch.float32:
        assert (1.0 - student.softmax(-1)[0, :2].sum()).log() == -INF


def test_tail_bucket_where_the_tail_is_everything():
    """Ids without probability, in one model or both: the tail is 1, its log 0, and log q - log p finite."""
    for student_level, teacher_level in ((-200.0, 1.0), (1.0, -60.0), (-200.0, -150.0), (-20.0, -25.0)):
        student = torch.tensor([[student_level, student_level, 0.0]], requires_grad=True)
        teacher, ids = torch.tensor([[teacher_level, teacher_level, 0.0]]), torch.tensor([[0, 1]])
        loss = on_vocabulary(tail_bucket_kl_topk, student, teacher, ids)
        gradient, = torch.autograd.grad(loss.sum(), student)
        wide = student.detach().double().requires_grad_()
        expected = by_definition(tail_bucket_kl_topk, wide, teacher.double(), ids)
        assert_near(loss.double(), expected.nan_to_num(0.0), 1e-4 if teacher_level == -60.0 else 1e-6)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss_fn", [*FAMILY, UNNORMALIZED])
def test_topk_computes_in_fp32(loss_fn, dtype):
    """A KL taken in the dtype of its inputs: in bf16 it is off by percents."""
    student, teacher = randn(50, 16, dtype=dtype, scale=2), randn(50, 16, seed=1, dtype=dtype, scale=2)
    actual = loss_fn(student, teacher)
    assert actual.dtype == torch.float32
    assert_near(actual.double(), loss_fn(student.double(), teacher.double()), 1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss_fn", FULL)
def test_full_equals_dense_autograd(monkeypatch, loss_fn, temperature):
    """A recompute that forgets the temperature, the incoming gradient, a tile of the head or the ragged last chunk."""
    monkeypatch.setattr(losses_kl, "_TILE_ROWS", 8)
    heads = make_full()
    expected = dense_full(*heads, forward=loss_fn is forward_kl_full, temperature=temperature)
    actual = loss_fn(*heads, chunk_size=4, temperature=temperature)
    assert_near(actual, expected, 1e-12)
    assert_near(weighted_grads(actual, heads[:2]), weighted_grads(expected, heads[:2]), 1e-12)
    options = {"chunk_size": 4, "temperature": temperature}
    assert torch.autograd.gradcheck(lambda h, w: loss_fn(h, w, *heads[2:], **options), heads[:2])


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1_000_000])
@pytest.mark.parametrize("loss_fn", FULL)
def test_full_chunk_size_changes_nothing(loss_fn, chunk_size):
    """A chunk boundary that leaks into loss or gradient."""
    heads = make_full(num_rows=100, dtype=torch.float32)
    expected = dense_full(*heads, forward=loss_fn is forward_kl_full)
    actual = loss_fn(*heads, chunk_size=chunk_size, temperature=1.0)
    assert_near(actual, expected, 1e-5)
    assert_near(weighted_grads(actual, heads[:2]), weighted_grads(expected, heads[:2]), 1e-4)


@pytest.mark.parametrize("loss_fn", FULL)
def test_full_from_bf16_is_fp32_to_the_end(loss_fn):
    """Logits rounded to bf16 on the way; the control is a dense bf16 loss, off by more than 1e-2."""
    heads = make_full(num_rows=60, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in heads]
    forward = loss_fn is forward_kl_full
    actual, expected = loss_fn(*heads, chunk_size=16, temperature=1.0), dense_full(*wide, forward=forward)
    assert actual.dtype == torch.float32
    assert_near(actual.double(), expected, 2e-5)
    assert (dense_full(*heads, forward=forward) - expected).abs().max() > 1e-2
    for mine, theirs in zip(weighted_grads(actual, heads[:2]), weighted_grads(expected, wide[:2]), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8, atol=1e-4)


def test_full_gradient_is_the_slope():
    """Finite differences along a random direction in hidden states and head at once."""
    heads = [tensor.detach() for tensor in make_full()]
    hidden, weight = heads[0].requires_grad_(), heads[1].requires_grad_()
    directions = randn(*hidden.shape, seed=7), randn(*weight.shape, seed=8)
    for loss_fn in FULL:
        def loss(step, loss_fn=loss_fn):
            moved = hidden + step * directions[0], weight + step * directions[1]
            return loss_fn(*moved, *heads[2:], chunk_size=5, temperature=0.8).sum()

        slope = (loss(1e-5) - loss(-1e-5)).item() / 2e-5
        gradients = torch.autograd.grad(loss(0.0), (hidden, weight))
        expected = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True))
        assert slope == pytest.approx(expected.item(), rel=1e-7)


def test_sampled_is_the_reverse_kl_on_average():
    """The policy gradient with the wrong sign, or with an advantage that is not detached: summed over all tokens with
    the student's probabilities it must be the gradient of the full reverse KL."""
    student, teacher = randn(5, 20, scale=2).requires_grad_(), randn(5, 20, seed=1, scale=2)
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    sampled = (log_q.detach().exp() * reverse_kl_sampled(log_q, log_p)).sum()
    actual, = torch.autograd.grad(sampled, student, retain_graph=True)
    expected, = torch.autograd.grad(kl(log_q, log_p).sum(), student)
    assert_near(actual, expected, 1e-12)


def test_sampled_clips_the_advantage():
    """A clip of the loss instead of the advantage, or of one side only."""
    student = torch.tensor([-1.0, -1.0, -5.0, -1.0], requires_grad=True)
    teacher = torch.tensor([-9.0, -1.5, -1.0, -INF])
    for clip, advantage in ((2.0, [-2.0, -0.5, 2.0, -2.0]), (None, [-8.0, -0.5, 4.0, 0.0])):
        loss = reverse_kl_sampled(student, teacher, clip=clip)
        gradient, = torch.autograd.grad(loss.sum(), student)
        assert_near(-gradient, torch.tensor(advantage), 1e-6)
        assert_near(loss, -torch.tensor(advantage) * student, 1e-6)


def test_importance_weight_is_the_clipped_ratio():
    """A ratio the wrong way round, clipped from below too, in 16 bits, or with a gradient of its own."""
    student = torch.tensor([-1.0, -1.0, -9.0, -1.0, -400.0], requires_grad=True)
    sampled = torch.tensor([-1.0, -1.5, -1.0, -400.0, -1.0])
    weight = importance_weight(student, sampled, clip=2.0)
    assert_near(weight, torch.tensor([1.0, math.exp(0.5), math.exp(-8.0), 2.0, 0.0]), 1e-6)
    assert not weight.requires_grad and weight.dtype == torch.float32
    assert importance_weight(student.bfloat16(), sampled.bfloat16(), clip=2.0).dtype == torch.float32
    assert importance_weight(student.double(), sampled.double(), clip=1.0).dtype == torch.float64
    assert importance_weight(torch.tensor([math.nan]), torch.zeros(1), clip=2.0).isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# Selected positions


def test_selected_positions_by_hand():
    """The lowest entropies, positions in order of entropy, ties broken at random, a count that is rounded down."""
    entropy = torch.tensor([0.5, 2.0, 1.0, 2.0, 0.1, 1.0, 1.0])
    expected = {0.01: [1], 2 / 7: [1, 3], 0.3: [1, 2, 3], 0.5: [1, 2, 3, 5], 5 / 7: [1, 2, 3, 5, 6], 1.0: [*range(7)]}
    for fraction, positions in expected.items():
        selected = select_by_entropy(entropy, fraction)
        assert selected.dtype == torch.int64 and selected.tolist() == positions
    assert select_by_entropy(torch.zeros(0), 0.5).shape == (0,)


@pytest.mark.parametrize("length", [1, 10, 70, 100, 300])
def test_selected_count_is_the_ceiling_in_decimals(length):
    """0.07 * 100 = 7.000000000000001: the ceiling of a float product selects a position too many."""
    for percent in range(1, 101):
        selected = select_by_entropy(torch.zeros(length), percent / 100)
        assert selected.tolist() == list(range(-(-percent * length // 100)))


def test_selection_equals_masking():
    """Selected rows taken from the wrong place: loss and gradient must be those of a mask over all rows."""
    student, teacher = randn(20, 8, scale=2).requires_grad_(), randn(20, 8, seed=1, scale=2)
    positions = select_by_entropy(torch.special.entr(student.detach().softmax(-1)).sum(-1), 0.3)
    kept = torch.zeros(20, dtype=torch.float64).index_fill(0, positions, 1.0)
    actual = reverse_kl_topk(student[positions], teacher[positions]).sum()
    expected = (reverse_kl_topk(student, teacher) * kept).sum()
    assert positions.numel() == 6
    assert_near(actual, expected, 1e-14)
    assert_near(torch.autograd.grad(actual, student), torch.autograd.grad(expected, student), 1e-14)


# ---------------------------------------------------------------------------------------------------------------------
# Fixed points and support


@pytest.mark.parametrize("loss_fn", [*FAMILY, pytest.param(reverse_kl_sampled, id="sampled")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_with_zero_gradient_at_equality(loss_fn, dtype):
    """A wrong fixed point: the student would move away from a teacher it already equals."""
    student = randn(20, 12, dtype=dtype, scale=3).requires_grad_()
    loss = loss_fn(student, student.detach().clone())
    gradient, = torch.autograd.grad(loss.sum(), student)
    atol = 1e-14 if dtype == torch.float64 else 1e-6
    assert loss.abs().max() <= atol and gradient.abs().max() <= atol


@pytest.mark.parametrize("loss_fn", FULL)
def test_full_is_exactly_zero_at_equality(loss_fn):
    """The same for the whole vocabulary, where equal heads give equal bits."""
    hidden, weight = make_full(dtype=torch.float32)[:2]
    loss = loss_fn(hidden, weight, hidden.detach(), weight.detach(), chunk_size=5, temperature=0.7)
    assert not loss.any() and not any(gradient.any() for gradient in weighted_grads(loss, [hidden, weight]))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_unnormalized_loss_has_the_wrong_fixed_point(scale):
    """Negative control, and the fault of that loss: at equality it is 0, while its gradient takes mass off the ids
    ((1 - mass) q there, -mass q elsewhere)."""
    student = randn(20, 50, scale=scale).requires_grad_()
    ids = student.topk(4).indices
    loss = on_vocabulary(reverse_kl_topk_unnormalized, student, student.detach(), ids)
    gradient, = torch.autograd.grad(loss.sum(), student)
    q, inside = student.detach().softmax(-1), torch.zeros(20, 50).scatter(-1, ids, 1.0).double()
    mass = (q * inside).sum(-1, keepdim=True)
    assert loss.abs().max() < 1e-14 and gradient.abs().max() > 1e-2
    assert_near(gradient, (inside - mass) * q, 1e-14)


def test_gradient_outside_the_support_is_exactly_zero():
    """Mass that leaks out of the top K: no logit, and no head row, outside the ids may feel the loss.

    Negative control: the unnormalised loss moves them.
    """
    hidden, weight = randn(6, 8).requires_grad_(), randn(40, 8, seed=1).requires_grad_()
    ids, teacher = torch.randint(0, 40, (6, 4)), randn(6, 4, seed=2)
    logits = hidden @ weight.t()
    gradient, = torch.autograd.grad(reverse_kl_topk(logits.gather(-1, ids), teacher).sum(), logits, retain_graph=True)
    outside = torch.ones(6, 40, dtype=torch.bool).scatter(-1, ids, False)
    assert not gradient[outside].any() and gradient[~outside].abs().max() > 1e-2
    reverse_kl_topk(sparse_head_logits(hidden, weight, ids), teacher).sum().backward()
    untouched = ~torch.isin(torch.arange(40), ids)
    assert untouched.any() and not weight.grad[untouched].any() and weight.grad[~untouched].any()
    control = on_vocabulary(reverse_kl_topk_unnormalized, logits, torch.zeros_like(logits), ids)
    assert torch.autograd.grad(control.sum(), logits)[0][outside].abs().max() > 1e-3


def test_no_loss_is_clamped_at_zero():
    """clamp_min(0) switches the gradient off where a value is negative, as with a clamped teacher."""
    student, teacher = torch.tensor([[0.4, 0.0]], requires_grad=True), torch.tensor([[20.0, 0.0]])
    loss = reverse_kl_topk(student, teacher, log_prob_min_clamp=-0.5)
    assert loss.item() < -0.1
    assert torch.autograd.grad(loss.sum(), student)[0].abs().min() > 1e-2
    student, teacher = torch.tensor([[1.0, 1.0, 5.0]], requires_grad=True), torch.tensor([[3.0, 3.0, 3.0]])
    loss = on_vocabulary(reverse_kl_topk_unnormalized, student, teacher, torch.tensor([[0, 1]]))
    assert loss.item() < -0.05
    assert torch.autograd.grad(loss.sum(), student)[0].abs().min() > 1e-2


def test_clamp_touches_the_teacher_alone_after_renormalising():
    """A clamp of the student's log-probs, or of the teacher's before they are renormalised."""
    student, teacher = randn(30, 8, scale=8).requires_grad_(), randn(30, 8, seed=1, scale=8)
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1).clamp_min(-10.0)
    assert log_q.min() < -10.0
    actual, expected = reverse_kl_topk(student, teacher, log_prob_min_clamp=-10.0), kl(log_q, log_p)
    assert_near(actual, expected, 1e-12)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), 1e-12)


def test_teacher_gets_no_gradient():
    """A teacher that trains towards the student."""
    student, teacher = randn(5, 6).requires_grad_(), randn(5, 6, seed=1).requires_grad_()
    for parameters in (*FAMILY, UNNORMALIZED):
        parameters.values[0](student, teacher).sum().backward()
    reverse_kl_sampled(student[:, 0], teacher[:, 0]).sum().backward()
    heads = make_full()
    (reverse_kl_full(*heads, chunk_size=4) + forward_kl_full(*heads, chunk_size=4)).sum().backward()
    assert teacher.grad is None and [tensor.grad is None for tensor in heads] == [False, False, True, True]


# ---------------------------------------------------------------------------------------------------------------------
# Masked vocabulary, empty batches, errors


MASKS = {  # ids 0..5; which the teacher and the student mask with -inf
    "teacher masks two": ([1, 4], []),
    "teacher masks all but one": ([0, 1, 2, 3, 4], []),
    "teacher masks all": ([0, 1, 2, 3, 4, 5], []),
    "student masks two": ([], [1, 4]),
    "both mask the same": ([1, 4], [1, 4]),
    "each masks its own": ([1, 4], [0, 2]),
    "nothing in common": ([0, 1, 2], [3, 4, 5]),
    "both mask all": ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("clamp", [None, -10.0])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_masked_ids_give_no_nan(masks, clamp):
    """A smaller vocabulary reads -inf at ids it does not have: p * (log p - log q) is then 0 * inf or inf.

    Negative control: the textbook formula gives a loss or gradient that is not finite in every one of these cases.
    """
    student, teacher = randn(3, 6), randn(3, 6, seed=1)
    teacher[:, masks[0]], student[:, masks[1]] = -INF, -INF
    student.requires_grad_()
    family = [parameters.values[0] for parameters in (*FAMILY, UNNORMALIZED)]
    for loss_fn in (partial(reverse_kl_topk, log_prob_min_clamp=clamp), *family):
        loss = loss_fn(student, teacher)
        gradient, = torch.autograd.grad(loss.sum(), student)
        assert loss.isfinite().all() and gradient.isfinite().all()
        assert not gradient[:, masks[1]].any()
    control = kl(torch.log_softmax(student, -1), torch.log_softmax(teacher, -1))
    control_gradient, = torch.autograd.grad(control.sum(), student)
    assert not (control.isfinite().all() and control_gradient.isfinite().all())


def test_masked_ids_leave_the_support_of_both():
    """An id that one model cannot produce counted on one side: the KL must be that of the other ids."""
    student, teacher, kept = randn(4, 6).requires_grad_(), randn(4, 6, seed=1), [0, 2, 3, 5]
    masked_teacher = teacher.clone()
    masked_teacher[:, [1, 4]] = -INF
    actual, expected = reverse_kl_topk(student, masked_teacher), reverse_kl_topk(student[:, kept], teacher[:, kept])
    assert_near(actual, expected, 1e-14)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), 1e-14)
    masked_student = student.detach().clone()
    masked_student[:, [1, 4]] = -INF
    assert_near(forward_kl_topk(masked_student, teacher), forward_kl_topk(student[:, kept], teacher[:, kept]), 1e-14)
    masked_student[:, [0, 4]] = -INF
    kept_by_both = [2, 3, 5]
    for beta in (0.0, 0.5, 1.0):
        assert_near(jsd_topk(masked_student, masked_teacher, beta=beta),
                    jsd_topk(student[:, kept_by_both], teacher[:, kept_by_both], beta=beta), 1e-14)
    everything = torch.full_like(teacher, -INF)
    assert not reverse_kl_topk(student, everything).any() and not jsd_topk(student, everything, beta=0.5).any()


@pytest.mark.parametrize("loss_fn", MASS_AWARE)
def test_masked_ids_leave_the_support_of_mass_aware_losses(loss_fn):
    """The same with whole-vocabulary probabilities: the logsumexps stay, so the student's probability of such an id is
    outside the ids (the tail's, where there is one)."""
    student, teacher, kept = randn(4, 6).requires_grad_(), randn(4, 6, seed=1), [0, 2, 3, 5]
    teacher[:, [1, 4]] = -INF
    actual = loss_fn(student, teacher, lse(student), lse(teacher))
    expected = loss_fn(student[:, kept], teacher[:, kept], lse(student), lse(teacher))
    assert_near(actual, expected, 1e-14)
    assert_near(weighted_grads(actual, [student]), weighted_grads(expected, [student]), 1e-14)
    nothing = loss_fn(student, torch.full_like(teacher, -INF), lse(student), lse(teacher))
    assert not nothing.any() and not weighted_grads(nothing, [student])[0].any()


def test_forward_kl_pushes_the_student_off_a_masked_id():
    """Forward KL with p = 0 is finite: the id stays in the student's normaliser, so that its logit falls."""
    student, teacher = torch.zeros(1, 3, requires_grad=True), torch.tensor([[0.0, 0.0, -INF]])
    loss = forward_kl_topk(student, teacher)
    assert loss.item() == pytest.approx(math.log(3 / 2))
    assert_near(torch.autograd.grad(loss.sum(), student)[0], torch.tensor([[-1 / 6, -1 / 6, 1 / 3]]), 1e-6)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_is_passed_on(side):
    """A mask that also hides a NaN: the run would go on with a broken model."""
    student, teacher = randn(3, 6), randn(3, 6, seed=1)
    (student if side == "student" else teacher)[1, 2] = math.nan
    for loss_fn in (*(parameters.values[0] for parameters in (*FAMILY, UNNORMALIZED)), reverse_kl_sampled):
        assert loss_fn(student, teacher).isnan().any() and loss_fn(student, teacher)[[0, 2]].isfinite().all()


def test_no_rows():
    """A rank without response tokens: forward and backward must run, and the head gets a zero gradient."""
    for parameters in (*FAMILY, UNNORMALIZED):
        student = torch.zeros(0, 4, requires_grad=True)
        parameters.values[0](student, torch.zeros(0, 4)).sum().backward()
        assert student.grad.shape == (0, 4)
    for loss_fn in FULL:
        heads = make_full(num_rows=0)
        loss_fn(*heads, chunk_size=4, temperature=1.0).sum().backward()
        assert heads[0].grad.shape == (0, 6) and torch.equal(heads[1].grad, torch.zeros_like(heads[1]))
    assert reverse_kl_sampled(torch.zeros(0), torch.zeros(0)).shape == (0,)
    ids, rows = torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4)
    diagnostics = topk_diagnostics(ids, rows, teacher_logits_NK=rows, teacher_lse_N=torch.zeros(0), teacher_ids_NK=ids)
    assert all(tensor.shape == (0,) for tensor in diagnostics)


@pytest.mark.parametrize("message, call", [
    ("K must be at least 2", lambda: reverse_kl_topk(torch.zeros(3, 1), torch.zeros(3, 1))),
    ("K must be at least 2", lambda: forward_kl_topk(torch.zeros(3, 1), torch.zeros(3, 1))),
    ("teacher_logits must", lambda: reverse_kl_topk(torch.zeros(3, 4), torch.zeros(3, 5))),
    ("log_prob_min_clamp must", lambda: reverse_kl_topk(torch.zeros(3, 4), torch.zeros(3, 4), log_prob_min_clamp=1.0)),
    ("teacher_logp must", lambda: reverse_kl_sampled(torch.zeros(3), torch.zeros(3, 1))),
    ("clip must", lambda: reverse_kl_sampled(torch.zeros(3), torch.zeros(3), clip=0.0)),
    ("student_logits must be floating", lambda: reverse_kl_topk(torch.zeros(3, 4).long(), torch.zeros(3, 4))),
    ("K must be at least 2", lambda: jsd_topk(torch.zeros(3, 1), torch.zeros(3, 1), beta=0.5)),
    ("beta must", lambda: jsd_topk(torch.zeros(3, 4), torch.zeros(3, 4), beta=1.1)),
    ("beta must", lambda: jsd_topk(torch.zeros(3, 4), torch.zeros(3, 4), beta=math.nan)),
    ("teacher_logits must have", lambda: generalized_kl_topk(*map(torch.zeros, ((3, 4), (3, 5), 3, 3)))),
    ("teacher_logits must be floating",
     lambda: generalized_kl_topk(torch.zeros(3, 4), torch.zeros(3, 4).long(), torch.zeros(3), torch.zeros(3))),
    ("student_lse must have", lambda: tail_bucket_kl_topk(*map(torch.zeros, ((3, 4), (3, 4), (3, 1), 3)))),
    ("teacher_lse must have", lambda: reverse_kl_topk_unnormalized(*map(torch.zeros, ((3, 4), (3, 4), 3, 4)))),
    ("teacher_lse must be floating",
     lambda: tail_bucket_kl_topk(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3), torch.zeros(3).long())),
    ("student_lse must carry",
     lambda: generalized_kl_topk(torch.zeros(3, 4, requires_grad=True), *map(torch.zeros, ((3, 4), 3, 3)))),
    ("sampled_logp must have", lambda: importance_weight(torch.zeros(3), torch.zeros(3, 1), clip=2.0)),
    ("student_logp must be floating", lambda: importance_weight(torch.zeros(3).long(), torch.zeros(3), clip=2.0)),
    ("clip must", lambda: importance_weight(torch.zeros(3), torch.zeros(3), clip=0.5)),
    ("clip must", lambda: importance_weight(torch.zeros(3), torch.zeros(3), clip=INF)),
    ("clip must", lambda: importance_weight(torch.zeros(3), torch.zeros(3), clip=math.nan)),
    ("fraction must", lambda: select_by_entropy(torch.zeros(3), 0.0)),
    ("fraction must", lambda: select_by_entropy(torch.zeros(3), 1.5)),
    ("fraction must", lambda: select_by_entropy(torch.zeros(3), math.nan)),
    ("entropy must", lambda: select_by_entropy(torch.zeros(3, 1), 0.5)),
    ("entropy must", lambda: select_by_entropy(torch.zeros(3).long(), 0.5)),
    ("student_weight and teacher_weight", lambda: reverse_kl_full(*map(torch.zeros, ((3, 2), (9, 2), (3, 5), (8, 5))))),
    ("student_hidden and teacher_hidden", lambda: forward_kl_full(*map(torch.zeros, ((3, 2), (9, 2), (4, 5), (9, 5))))),
    ("teacher_hidden and teacher_weight", lambda: reverse_kl_full(*map(torch.zeros, ((3, 2), (9, 2), (3, 5), (9, 4))))),
    ("chunk_size must", lambda: reverse_kl_full(*make_full(), chunk_size=0)),
    ("temperature must", lambda: forward_kl_full(*make_full(), temperature=0.0)),
])
def test_errors_name_the_argument(message, call):
    """Shapes that would broadcast into a wrong loss instead of failing."""
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_step_never_holds_the_logits():
    """[N, V] anywhere in a training step: sparse head + default loss, or a full-vocabulary loss in chunks.

    Negative control: the dense loss.
    """
    num_rows, vocab = 400, 3000
    heads = make_full(num_rows, vocab, torch.float32)
    ids, teacher = torch.randint(0, vocab, (num_rows, 8)), torch.randn(num_rows, 8)

    def largest(fn):
        with LargestResult() as spy:
            fn().sum().backward()
        return spy.numel

    assert largest(lambda: reverse_kl_topk(sparse_head_logits(*heads[:2], ids), teacher)) <= vocab * 9
    for loss_fn in FULL:
        assert largest(lambda: loss_fn(*heads, chunk_size=50, temperature=1.0)) <= 50 * vocab
    assert largest(lambda: dense_full(*heads, forward=False)) >= num_rows * vocab


def test_full_saves_the_arguments_and_no_copy_of_them():
    """A saved cast of a head keeps it alive when FSDP2 frees the weight."""
    heads, saved = make_full(dtype=torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        reverse_kl_full(*heads, chunk_size=4, temperature=1.0)
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in heads]


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics


def test_diagnostics_by_hand():
    """Masses after renormalising, an overlap over positions instead of ids, an advantage of the wrong sign."""
    student_ids, teacher_ids = torch.tensor([[3, 7, 1], [3, 7, 1]]), torch.tensor([[7, 5, 3], [0, 2, 4]])
    student_p = torch.tensor([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]], dtype=torch.float64)
    teacher_p = torch.tensor([[0.2, 0.4, 0.2], [0.1, 0.1, 0.1]], dtype=torch.float64)
    result = topk_diagnostics(student_ids, student_p.log(), teacher_logits_NK=teacher_p.log() + 5.0,
                              teacher_lse_N=torch.full((2,), 5.0, dtype=torch.float64), teacher_ids_NK=teacher_ids)
    assert_near(result.student_mass, torch.tensor([0.9, 0.9], dtype=torch.float64), 1e-12)
    assert_near(result.teacher_mass, torch.tensor([0.8, 0.3], dtype=torch.float64), 1e-12)
    assert_near(result.overlap_ratio, torch.tensor([2 / 3, 0.0], dtype=torch.float64), 1e-12)
    q, p = student_p[0] / 0.9, teacher_p[0] / 0.8
    advantage = -sum((q[k] * (q[k] / p[k]).log()).item() for k in (0, 1)) / 2
    assert_near(result.overlap_token_advantage, torch.tensor([advantage, 0.0], dtype=torch.float64), 1e-12)


def test_diagnostics_agree_with_the_loss():
    """With full overlap the mean advantage is -KL / K; a masked teacher id gives no NaN."""
    ids, student, teacher = torch.arange(8).expand(20, 8), randn(20, 8, scale=2), randn(20, 8, seed=1, scale=2)
    teacher[0, 3] = -INF
    arguments = {"teacher_logits_NK": teacher, "teacher_lse_N": teacher.logsumexp(-1), "teacher_ids_NK": ids.flip(-1)}
    result = topk_diagnostics(ids, torch.log_softmax(student, -1), **arguments)
    assert_near(result.overlap_token_advantage, -reverse_kl_topk(student, teacher) / 8, 1e-14)
    assert_near(result.overlap_ratio, torch.ones(20, dtype=torch.float64), 0.0)
    assert_near(result.teacher_mass, torch.ones(20, dtype=torch.float64), 1e-12)
    for name, wrong in (("teacher_lse", {"teacher_lse_N": teacher}), ("teacher_ids", {"teacher_ids_NK": ids[:5]})):
        with pytest.raises(ValueError, match=f"^{name} must"):
            topk_diagnostics(ids, student, **(arguments | wrong))


# ---------------------------------------------------------------------------------------------------------------------
# Under FSDP2


class Head(nn.Linear):
    """A head called as a module, so that FSDP2's hooks gather the weight."""

    def forward(self, hidden, fn=None):
        return super().forward(hidden) if fn is None else fn(hidden, self.weight)


def fsdp_error(world_size, loss_fn, *, sees_teacher=True):
    """Largest gradient error of sharded heads (37 rows) against dense autograd; the last rank has no rows."""
    def run(rank):
        torch.manual_seed(0)
        student, teacher = Head(6, 37, bias=False), Head(9, 37, bias=False).requires_grad_(False)
        reference, reference_teacher = copy.deepcopy(student), copy.deepcopy(teacher)
        for head in (student, teacher):
            fully_shard(head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        hidden, teacher_hidden = torch.randn(world_size, 5, 6), torch.randn(world_size, 5, 9)
        num_rows = [5] * (world_size - 1) + [0]
        mine = hidden[rank, :num_rows[rank]].requires_grad_()
        theirs = teacher_hidden[rank, :num_rows[rank]] if sees_teacher else mine.new_zeros(num_rows[rank], 9)
        loss = teacher(theirs, lambda t, tw: student(mine, lambda s, sw: loss_fn(s, sw, t, tw, chunk_size=2)))
        loss.sum().backward()
        for peer in range(world_size):
            rows = slice(num_rows[peer])
            expected = dense_full(hidden[peer, rows], reference.weight, teacher_hidden[peer, rows],
                                  reference_teacher.weight, forward=loss_fn is forward_kl_full)
            (expected.sum() / world_size).backward()
        return (student.weight.grad.full_tensor() - reference.weight.grad).abs().max().item()

    return max(run_ranks(run, world_size))


@pytest.mark.parametrize("loss_fn", FULL)
@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp_full_losses_equal_unsharded(world_size, loss_fn):
    """Both heads sharded, the loss taken inside the teacher's head: a weight that is freed at backward, uneven shards,
    or a rank without rows that leaves its peers waiting."""
    assert fsdp_error(world_size, loss_fn) < 1e-6


def test_fsdp_check_sees_a_wrong_teacher():
    """Negative control: a teacher whose hidden states are lost on the way differs by more than the tolerance."""
    assert fsdp_error(2, reverse_kl_full, sees_teacher=False) > 1e-3
