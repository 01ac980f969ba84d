# SPDX-License-Identifier: Apache-2.0
"""Distillation losses on the student's own samples: one value per position, the caller masks and averages.

    reverse_kl_topk      KL(student || teacher), both renormalised on the student's K likeliest ids: the default. It
                         does not see the mass outside the ids (watch `student_mass`)
    forward_kl_topk      KL(teacher || student), both renormalised on the teacher's top K
    jsd_topk             from one to the other, by beta
    generalized_kl_topk  KL(student || teacher) on the ids with whole-vocabulary probabilities: sees the mass on them
    tail_bucket_kl_topk  the same with everything outside the ids as one more category
    reverse_kl_topk_unnormalized        moving mass out of the ids lowers it, and the student collapses: for study
    reverse_kl_full, forward_kl_full    over the whole vocabulary, from hidden states, a chunk at a time
    reverse_kl_sampled   policy gradient of the reverse KL on the sampled token alone

Each but the unnormalised one is 0 with zero gradient where student and teacher agree, and none is clamped at 0: a
clamp that bites stops the gradient. Logits come divided by the temperature. Teacher arguments never receive gradients.
Losses are fp32 (float64 kept). An id that the second distribution of the KL masks with -inf (a smaller vocabulary)
leaves the support of both; a row that keeps no id has loss 0. NaNs are passed on.

Shapes: N rows (response positions), K ids per row, S selected positions of T, C rows of one chunk, D model,
V vocabulary.

    student_NK = model.lm_head(hidden_ND, lambda hidden, weight: sparse_head_logits(hidden, weight, ids_NK))
    loss = reverse_kl_topk(student_NK / temperature, teacher_NK).sum() / num_response_tokens
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

_TILE_ROWS = 8192  # rows of a 16-bit head upcast at once


class TopKDiagnostics(NamedTuple):
    """What `topk_diagnostics` returns, each [N]."""

    student_mass: Tensor  # the student's probability of its K ids; a fall means that mass leaks into the tail
    teacher_mass: Tensor  # the teacher's probability of the same ids
    overlap_ratio: Tensor  # |student ids & teacher ids| / K
    overlap_token_advantage: Tensor  # mean of -q (log q - log p) over the overlap, 0 where it is empty


def flat_rows(counts_B: Tensor, positions_N: Tensor, width: int) -> Tensor:
    """Indices [N] into hidden states flattened to [B * width, D]: of positions [N] given row by row, `counts` a row."""
    firsts_B = torch.arange(len(counts_B), device=counts_B.device) * width
    return torch.repeat_interleave(firsts_B, counts_B.long()) + positions_N


@torch.no_grad()
def select_by_entropy(entropy_T: Tensor, fraction: float) -> Tensor:
    """Positions [S] (int64, ascending) of the S = ceil(fraction * T) highest entropies of one response.

    Of equal entropies the earlier position wins. One response at a time, so that the choice depends on neither ranks
    nor micro-batches. ValueError unless 0 < fraction <= 1. arXiv 2604.14084, which also warns of what is left out:
    positions where the student is sure and wrong.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    if entropy_T.dim() != 1 or not entropy_T.is_floating_point():
        raise ValueError(f"entropy must be floating point of shape [T], got {entropy_T.dtype} of shape "
                         f"{tuple(entropy_T.shape)}")
    count = math.ceil(fraction * len(entropy_T) * (1.0 - 1e-12))  # 0.07 * 100 is a hair above 7
    return entropy_T.sort(descending=True, stable=True).indices[:count].sort().values


# ---------------------------------------------------------------------------------------------------------------------
# On K ids per position


def reverse_kl_topk(student_logits_NK: Tensor, teacher_logits_NK: Tensor, *,
                    log_prob_min_clamp: float | None = None) -> Tensor:
    """KL(student || teacher) [N], both renormalised over the K ids: sum q (log q - log p), q the student's.

    The partition functions cancel, so raw logits do. `log_prob_min_clamp` (negative; a common value is -10) bounds the
    teacher's renormalised log-probs from below, masked ids included; where it bites, agreement is no longer a minimum.
    ValueError if the shapes differ or K < 2 (one id renormalises to probability 1). arXiv 2604.13016.
    """
    _check_topk(student_logits_NK, teacher_logits_NK)
    log_p_NK = _log_softmax(teacher_logits_NK.detach())
    if log_prob_min_clamp is not None:
        if not log_prob_min_clamp < 0.0:
            raise ValueError(f"log_prob_min_clamp must be negative, got {log_prob_min_clamp}")
        log_p_NK = log_p_NK.clamp_min(log_prob_min_clamp)
    log_q_NK = _log_softmax(student_logits_NK.masked_fill(log_p_NK == -math.inf, -math.inf))
    return _kl_terms(log_q_NK, log_p_NK).sum(-1)


def forward_kl_topk(student_logits_NK: Tensor, teacher_logits_NK: Tensor) -> Tensor:
    """KL(teacher || student) [N], both renormalised over the K ids, which should be the teacher's top K."""
    _check_topk(student_logits_NK, teacher_logits_NK)
    log_q_NK = _log_softmax(student_logits_NK)
    log_p_NK = _log_softmax(teacher_logits_NK.detach().masked_fill(log_q_NK == -math.inf, -math.inf))
    return _kl_terms(log_p_NK, log_q_NK).sum(-1)


def jsd_topk(student_logits_NK: Tensor, teacher_logits_NK: Tensor, *, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence [N], both renormalised over the K ids, divided by beta (1 - beta).

    [beta KL(p || m) + (1 - beta) KL(q || m)] / (beta (1 - beta)), m = beta p + (1 - beta) q, q the student's, p the
    teacher's: Eq. 1 of arXiv 2306.13649 (GKD), which by itself vanishes at both ends. So scaled, beta -> 0 gives
    KL(teacher || student) and beta -> 1 gives KL(student || teacher), value and gradient; near agreement every beta has
    the curvature of the KL; beta = 0.5 is 4 times the usual JSD. An id that either masks leaves the support of both.
    ValueError if the shapes differ, K < 2, or beta is outside [0, 1].
    """
    _check_topk(student_logits_NK, teacher_logits_NK)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    masked_NK = (student_logits_NK == -math.inf) | (teacher_logits_NK == -math.inf)
    log_q_NK = _log_softmax(student_logits_NK.masked_fill(masked_NK, -math.inf))
    log_p_NK = _log_softmax(teacher_logits_NK.detach().masked_fill(masked_NK, -math.inf))
    if beta < 1e-30:  # the limits; nearer to 0 the quotients below leave the range of fp32
        return _kl_terms(log_p_NK, log_q_NK).sum(-1)
    if beta == 1.0:
        return _kl_terms(log_q_NK, log_p_NK).sum(-1)
    # log(p / m) and log(q / m) as posterior over prior of having been drawn from p or q: they overflow nowhere and are
    # exactly 0 at p = q, as they must be for the division
    prior = log_q_NK.new_full((), math.log(beta) - math.log1p(-beta))
    posterior_NK = prior + (log_p_NK - log_q_NK).masked_fill(masked_NK, 0.0)
    teacher_NK = log_p_NK.exp() * (logsigmoid(posterior_NK) - logsigmoid(prior))
    student_NK = log_q_NK.exp() * (logsigmoid(-posterior_NK) - logsigmoid(-prior))
    return (teacher_NK / (1.0 - beta) + student_NK / beta).sum(-1)


# ---------------------------------------------------------------------------------------------------------------------
# On K ids per position, with whole-vocabulary probabilities


def generalized_kl_topk(student_logits_NK: Tensor, teacher_logits_NK: Tensor, student_lse_N: Tensor,
                        teacher_lse_N: Tensor) -> Tensor:
    """Generalised KL(student || teacher) [N] on the K ids: sum q (log q - log p) - q + p, q the student's.

    q and p are probabilities of the whole vocabulary, by `student_lse` and `teacher_lse`, the logsumexp of all logits
    (after the temperature). 0 only where q = p on the ids, so the mass on them is matched too. Eq. 5 of arXiv
    2606.30406. Its gradient is the student's mass times that of sum stop(q / mass (log q - log p)) log q, the released
    code of arXiv 2604.13016. ValueError if the arguments do not fit together or `student_lse` is detached.
    """
    log_q_NK, log_p_NK = _vocab_logp(student_logits_NK, teacher_logits_NK, student_lse_N, teacher_lse_N)
    return _generalized_kl_terms(log_q_NK, log_p_NK).sum(-1)


def tail_bucket_kl_topk(student_logits_NK: Tensor, teacher_logits_NK: Tensor, student_lse_N: Tensor,
                        teacher_lse_N: Tensor) -> Tensor:
    """KL(student || teacher) [N] over K + 1 categories: the K ids, and everything else as one tail.

    Arguments and errors as in `generalized_kl_topk`. A tail below the machine epsilon (the mass rounds to 1) counts as
    one epsilon and gives no gradient. What the student has on an id that the teacher masks counts to its tail.
    """
    log_q_NK, log_p_NK = _vocab_logp(student_logits_NK, teacher_logits_NK, student_lse_N, teacher_lse_N)
    # the terms - q + p cancel over all categories; with them the ids alone have the right minimum, whatever rounding
    # has made of the tail
    return (_generalized_kl_terms(log_q_NK, log_p_NK).sum(-1)
            + _generalized_kl_terms(_log_tail(log_q_NK), _log_tail(log_p_NK)))


def reverse_kl_topk_unnormalized(student_logits_NK: Tensor, teacher_logits_NK: Tensor, student_lse_N: Tensor,
                                 teacher_lse_N: Tensor) -> Tensor:
    """sum q (log q - log p) [N] over the K ids, differentiated as it stands. For study: a student collapses under it.

    It is not a divergence. Where q = p it is 0 but has a gradient, (1 - mass) q on a logit of the ids and -mass q on
    any other: mass leaves the ids, the loss falls below 0, and nothing brings the mass back. Clamping it at 0 halves
    the damage by stopping the gradient. Arguments and errors as in `generalized_kl_topk`, which is the remedy.
    """
    log_q_NK, log_p_NK = _vocab_logp(student_logits_NK, teacher_logits_NK, student_lse_N, teacher_lse_N)
    return _kl_terms(log_q_NK, log_p_NK).sum(-1)


def _vocab_logp(student_logits_NK: Tensor, teacher_logits_NK: Tensor, student_lse_N: Tensor,
                teacher_lse_N: Tensor) -> tuple[Tensor, Tensor]:
    """(student, teacher) log-probs [N, K] of the whole vocabulary, both -inf where the teacher masks."""
    _check_logits(student_logits_NK, teacher_logits_NK)
    for name, lse_N in (("student_lse", student_lse_N), ("teacher_lse", teacher_lse_N)):
        _check_shape(name, lse_N, student_logits_NK.shape[:-1])
        _check_float(name, lse_N)
    if torch.is_grad_enabled() and student_logits_NK.requires_grad and not student_lse_N.requires_grad:
        raise ValueError("student_lse must carry the student's gradient as its logits do, got a detached tensor")
    log_p_NK = _widen(teacher_logits_NK.detach()) - _widen(teacher_lse_N.detach()).unsqueeze(-1)
    log_q_NK = _widen(student_logits_NK) - _widen(student_lse_N).unsqueeze(-1)
    return log_q_NK.masked_fill(log_p_NK == -math.inf, -math.inf), log_p_NK


def _log_tail(logp_NK: Tensor) -> Tensor:
    """log of the probability [N] outside the ids, at least that of one machine epsilon."""
    empty_N = (logp_NK == -math.inf).all(-1)  # logsumexp of -inf alone has a NaN gradient
    log_mass_N = logp_NK.masked_fill(empty_N.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(empty_N, -math.inf)
    return torch.log1p(-log_mass_N.clamp_max(-torch.finfo(logp_NK.dtype).eps).exp())


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics


@torch.no_grad()
def topk_diagnostics(student_ids_NK: Tensor, student_logp_NK: Tensor, *, teacher_logits_NK: Tensor,
                     teacher_lse_N: Tensor, teacher_ids_NK: Tensor) -> TopKDiagnostics:
    """How far student and teacher agree on the student's top K, before any loss is taken.

    `student_logp`: the student's log-probs at its ids (captured at sampling, or logits - logsumexp). `teacher_logits`:
    the teacher's logits at the same ids, with `teacher_lse` their logsumexp over the vocabulary. `teacher_ids`: the
    teacher's own top K. The two probabilities of the advantage are renormalised over the K ids, as in the loss.
    """
    _check_topk(student_logp_NK, teacher_logits_NK)
    _check_shape("student_ids", student_ids_NK, student_logp_NK.shape)
    _check_shape("teacher_lse", teacher_lse_N, student_logp_NK.shape[:-1])
    _check_shape("teacher_ids", teacher_ids_NK, (*student_logp_NK.shape[:-1], teacher_ids_NK.shape[-1]))
    student_logp_NK, teacher_logits_NK = _widen(student_logp_NK), _widen(teacher_logits_NK)
    log_p_NK = _log_softmax(teacher_logits_NK)
    log_q_NK = _log_softmax(student_logp_NK.masked_fill(log_p_NK == -math.inf, -math.inf))
    overlap_NK = (student_ids_NK.unsqueeze(-1) == teacher_ids_NK.unsqueeze(-2)).any(-1)
    count_N = overlap_NK.sum(-1)
    advantage_N = -_kl_terms(log_q_NK, log_p_NK).masked_fill(~overlap_NK, 0.0).sum(-1) / count_N.clamp_min(1)
    return TopKDiagnostics(
        student_mass=student_logp_NK.exp().sum(-1),
        teacher_mass=(teacher_logits_NK - teacher_lse_N.unsqueeze(-1)).exp().sum(-1),
        overlap_ratio=count_N.to(advantage_N.dtype) / student_ids_NK.shape[-1],
        overlap_token_advantage=advantage_N,
    )


# ---------------------------------------------------------------------------------------------------------------------
# On the sampled token


def reverse_kl_sampled(student_logp_N: Tensor, teacher_logp_N: Tensor, *, clip: float | None = None) -> Tensor:
    """-advantage * student_logp [N], advantage = teacher - student log-prob of the sampled token, detached.

    Its gradient is an unbiased sample of the reverse KL's; its value is not a KL. `clip` bounds the advantage to
    [-clip, clip]. A token that the teacher masks with -inf has advantage -clip, or 0 (left out) without a clip.
    """
    _check_shape("teacher_logp", teacher_logp_N, student_logp_N.shape)
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip must be positive, got {clip}")
    student_logp_N, teacher_logp_N = _widen(student_logp_N), _widen(teacher_logp_N.detach())
    advantage_N = teacher_logp_N - student_logp_N.detach()
    advantage_N = advantage_N.masked_fill(teacher_logp_N == -math.inf, 0.0 if clip is None else -clip)
    if clip is not None:
        advantage_N = advantage_N.clamp(-clip, clip)
    return -advantage_N * student_logp_N


@torch.no_grad()
def importance_weight(student_logp_N: Tensor, sampled_logp_N: Tensor, *, clip: float) -> Tensor:
    """min(student probability / sampling probability, clip) [N] of the sampled token, without gradient.

    Multiplies the loss of a position whose rollout came from older weights; `sampled_logp` was captured there.
    ValueError if the shapes differ or unless 1 <= clip < inf.
    """
    _check_shape("sampled_logp", sampled_logp_N, student_logp_N.shape)
    for name, logp_N in (("student_logp", student_logp_N), ("sampled_logp", sampled_logp_N)):
        _check_float(name, logp_N)
    if not 1.0 <= clip < math.inf:
        raise ValueError(f"clip must be at least 1 and finite, got {clip}")
    return (_widen(student_logp_N) - _widen(sampled_logp_N)).exp().clamp_max(clip)


# ---------------------------------------------------------------------------------------------------------------------
# Over the whole vocabulary


def reverse_kl_full(student_hidden_ND: Tensor, student_weight_VD: Tensor, teacher_hidden_ND: Tensor,
                    teacher_weight_VD: Tensor, *, chunk_size: int = 1024, temperature: float = 1.0) -> Tensor:
    """KL(student || teacher) [N] over the whole vocabulary, from hidden states [N, D] and heads [V, D].

    The two D may differ; the rows of the heads must be the same ids. Four fp32 buffers [chunk_size, V] are alive at
    a time, in backward too, which computes the logits again; the student head's gradient is summed in one fp32 [V, D]
    buffer. Both heads must still hold their values at backward. ValueError if the arguments do not fit together.
    """
    heads = (student_hidden_ND, student_weight_VD, teacher_hidden_ND, teacher_weight_VD)
    _check_full(*heads, chunk_size, temperature)
    return _FullKL.apply(*heads, _reverse_kl_rows, chunk_size, temperature)


def forward_kl_full(student_hidden_ND: Tensor, student_weight_VD: Tensor, teacher_hidden_ND: Tensor,
                    teacher_weight_VD: Tensor, *, chunk_size: int = 1024, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) [N] over the whole vocabulary; arguments, memory and errors as in `reverse_kl_full`."""
    heads = (student_hidden_ND, student_weight_VD, teacher_hidden_ND, teacher_weight_VD)
    _check_full(*heads, chunk_size, temperature)
    return _FullKL.apply(*heads, _forward_kl_rows, chunk_size, temperature)


def _reverse_kl_rows(log_q_CV: Tensor, log_p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(q || p) [C], its gradient in the student's logits: q (log q - log p - KL)); overwrites both arguments."""
    log_ratio_CV = torch.sub(log_q_CV, log_p_CV, out=log_p_CV)
    q_CV = log_q_CV.exp_()
    kl_C = (q_CV * log_ratio_CV).sum(-1)
    return kl_C, q_CV.mul_(log_ratio_CV.sub_(kl_C.unsqueeze(-1)))


def _forward_kl_rows(log_q_CV: Tensor, log_p_CV: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(p || q) [C], its gradient in the student's logits: q - p); overwrites both arguments."""
    p_CV = log_p_CV.exp()
    kl_C = log_p_CV.sub_(log_q_CV).mul_(p_CV).sum(-1)
    return kl_C, log_q_CV.exp_().sub_(p_CV)


class _FullKL(torch.autograd.Function):
    """`kl_rows` on one chunk of rows at a time. Weights are saved as they came (FSDP2 frees and refills them)."""

    @staticmethod
    def forward(ctx: Any, student_hidden_ND: Tensor, student_weight_VD: Tensor, teacher_hidden_ND: Tensor,
                teacher_weight_VD: Tensor, kl_rows: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
                chunk_size: int, temperature: float) -> Tensor:
        heads = (student_hidden_ND, student_weight_VD, teacher_hidden_ND, teacher_weight_VD)
        ctx.save_for_backward(*heads)
        ctx.kl_rows, ctx.chunk_size, ctx.temperature = kl_rows, chunk_size, temperature
        loss_N = student_hidden_ND.new_empty(len(student_hidden_ND), dtype=_wide_dtype(*heads))
        for rows in _slices(len(loss_N), chunk_size):
            log_q_CV, log_p_CV = _chunk_log_softmax(heads, rows, temperature, loss_N.dtype)
            loss_N[rows] = kl_rows(log_q_CV, log_p_CV)[0]
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_N: Tensor) -> tuple[Tensor | None, ...]:
        student_hidden_ND, student_weight_VD, *_ = heads = ctx.saved_tensors
        dtype, temperature = grad_loss_N.dtype, ctx.temperature
        grad_hidden_ND, grad_weight_VD = torch.empty_like(student_hidden_ND), None
        if ctx.needs_input_grad[1]:
            grad_weight_VD = torch.zeros(student_weight_VD.shape, dtype=dtype, device=student_weight_VD.device)
        for rows in _slices(len(grad_loss_N), ctx.chunk_size):
            log_q_CV, log_p_CV = _chunk_log_softmax(heads, rows, temperature, dtype)
            grad_CV = ctx.kl_rows(log_q_CV, log_p_CV)[1].mul_(grad_loss_N[rows, None] / temperature)
            grad_hidden_ND[rows] = _head_backward(grad_CV, student_hidden_ND[rows], student_weight_VD, grad_weight_VD)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(student_weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _chunk_log_softmax(heads: tuple[Tensor, ...], rows: slice, temperature: float,
                       dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(student, teacher) log-probs [C, V] of these rows."""
    student_hidden_ND, student_weight_VD, teacher_hidden_ND, teacher_weight_VD = heads
    return (_head_log_softmax(student_hidden_ND[rows], student_weight_VD, temperature, dtype),
            _head_log_softmax(teacher_hidden_ND[rows], teacher_weight_VD, temperature, dtype))


def _head_log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """log_softmax(hidden @ weight.T / temperature) [C, V] in `dtype`, never rounded to 16 bits on the way."""
    logits_CV = hidden_CD.new_empty(len(hidden_CD), len(weight_VD), dtype=dtype)
    if hidden_CD.is_cuda and hidden_CD.dtype == weight_VD.dtype and weight_VD.dtype.itemsize == 2:
        torch.mm(hidden_CD, weight_VD.t(), out_dtype=dtype, out=logits_CV)
    else:
        hidden_CD = hidden_CD.to(dtype)
        for tile in _slices(len(weight_VD), _TILE_ROWS):
            torch.mm(hidden_CD, weight_VD[tile].to(dtype).t(), out=logits_CV[:, tile])
    if temperature != 1.0:
        logits_CV.div_(temperature)
    return torch.log_softmax(logits_CV, dim=-1, out=logits_CV)  # exact when in place: an element is read, then written


def _head_backward(grad_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, grad_weight_VD: Tensor | None) -> Tensor:
    """Returns grad @ weight and adds grad.T @ hidden to `grad_weight`, in the dtype of `grad`."""
    hidden_CD = hidden_CD.to(grad_CV.dtype)
    grad_hidden_CD = torch.zeros_like(hidden_CD)
    for tile in _slices(len(weight_VD), _TILE_ROWS):
        grad_hidden_CD.addmm_(grad_CV[:, tile], weight_VD[tile].to(grad_CV.dtype))
        if grad_weight_VD is not None:
            grad_weight_VD[tile].addmm_(grad_CV[:, tile].t(), hidden_CD)
    return grad_hidden_CD


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


def _wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _log_softmax(logits_NK: Tensor) -> Tensor:
    """log_softmax in fp32 or float64; a row of -inf alone stays -inf, where softmax would give NaN."""
    logits_NK = _widen(logits_NK)
    empty_N1 = (logits_NK == -math.inf).all(-1, keepdim=True)
    return torch.log_softmax(logits_NK.masked_fill(empty_N1, 0.0), dim=-1).masked_fill(empty_N1, -math.inf)


def _kl_terms(log_a_NK: Tensor, log_b_NK: Tensor) -> Tensor:
    """a (log a - log b), with value and gradient 0 where a is 0: -inf - -inf never enters the sum."""
    return log_a_NK.exp() * (log_a_NK - log_b_NK).masked_fill(log_a_NK == -math.inf, 0.0)


def _generalized_kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a (log a - log b) - a + b: never negative, and 0 with zero gradient at a = b, term by term."""
    return _kl_terms(log_a, log_b) - log_a.exp() + log_b.exp()


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def _check_float(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")


def _check_logits(student_logits_NK: Tensor, teacher_logits_NK: Tensor) -> None:
    _check_shape("teacher_logits", teacher_logits_NK, student_logits_NK.shape)
    _check_float("student_logits", student_logits_NK)
    _check_float("teacher_logits", teacher_logits_NK)


def _check_topk(student_logits_NK: Tensor, teacher_logits_NK: Tensor) -> None:
    _check_logits(student_logits_NK, teacher_logits_NK)
    if student_logits_NK.shape[-1] < 2:
        raise ValueError(f"K must be at least 2 (one id renormalises to probability 1), got logits of shape "
                         f"{tuple(student_logits_NK.shape)}")


def _check_full(student_hidden_ND: Tensor, student_weight_VD: Tensor, teacher_hidden_ND: Tensor,
                teacher_weight_VD: Tensor, chunk_size: int, temperature: float) -> None:
    for role, hidden_ND, weight_VD in (("student", student_hidden_ND, student_weight_VD),
                                       ("teacher", teacher_hidden_ND, teacher_weight_VD)):
        if hidden_ND.dim() != 2 or weight_VD.dim() != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
            raise ValueError(f"{role}_hidden and {role}_weight must be [N, D] and [V, D], got "
                             f"{tuple(hidden_ND.shape)} and {tuple(weight_VD.shape)}")
    if len(student_hidden_ND) != len(teacher_hidden_ND):
        raise ValueError(f"student_hidden and teacher_hidden must have the same rows, got {len(student_hidden_ND)} "
                         f"and {len(teacher_hidden_ND)}")
    if len(student_weight_VD) != len(teacher_weight_VD):
        raise ValueError(f"student_weight and teacher_weight must have the same rows, got {len(student_weight_VD)} "
                         f"and {len(teacher_weight_VD)}: slice both to the ids they share")
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
