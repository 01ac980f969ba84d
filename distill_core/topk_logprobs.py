# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities at a few chosen ids of a large vocabulary, without holding [N, V] in fp32 or at all.

Three costs for one question, "what do logits say at these K ids":

    chunked_gather_logprobs   the logits exist already: one fp32 chunk of rows beside them
    head_logprobs, head_stats from hidden states and the head: the logits of one chunk of rows at a time
    sparse_head_logits        only K rows of the head per position. A distribution renormalised over the K ids needs no
                              partition function, so a top-K loss needs nothing more

All results are fp32 (float64 if an input is float64), summed in that precision whatever the inputs are: bf16 is spaced
0.06 near -10. The functions that train keep nothing of size V for backward, they compute it again.

Shapes: N rows (positions), C rows of one chunk, K ids per row, D model, V vocabulary, B batch, T tokens.

    logp_NK = chunked_gather_logprobs(logits_NV, ids_NK)
    logits_NK, lse_N = head_logprobs(hidden_ND, head.weight, ids_NK)             # log-prob = logits_NK - lse_N[:, None]
    logits_NK = sparse_head_logits(hidden_ND, head.weight, ids_NK)
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_TILE_ROWS = 8192  # rows of a 16-bit head upcast at once
_BLOCK_NUMBERS = 1 << 22  # numbers of gathered head rows held at once (16 MiB in fp32)


class HeadStats(NamedTuple):
    """What `head_stats` returns: fp32 (float64 kept), logits divided by the temperature."""

    logits_NK: Tensor  # logits at the requested ids
    lse_N: Tensor  # logsumexp over the vocabulary
    entropy_N: Tensor  # nats
    own_ids_NK: Tensor  # the row's own top own_k ids, best first
    own_logits_NK: Tensor


def chunked_gather_logprobs(logits_NV: Tensor, ids_NK: Tensor, chunk_size: int = 1024,
                            temperature: float = 1.0) -> Tensor:
    """`log_softmax(logits / temperature)` at `ids`: [N, V], [N, K] -> [N, K], or [B, T, V], [B, T, K] -> [B, T, K].

    Differentiable in `logits`; the extra memory of forward and of backward (beside the gradient itself) is one fp32
    chunk, chunk_size * V * 4 bytes. ValueError on wrong shapes, dtypes, an id outside [0, V) (CUDA: a device-side
    assert), or a chunk_size or temperature that is not positive.
    """
    _check_chunking(chunk_size, temperature)
    if logits_NV.dim() not in (2, 3):
        raise ValueError(f"logits must be [N, V] or [B, T, V], got shape {tuple(logits_NV.shape)}")
    _check_floating(logits=logits_NV)
    ids_NK = _check_ids(ids_NK, logits_NV.shape[:-1], logits_NV.shape[-1], of="logits")
    if logits_NV.dim() == 2:
        return _GatherLogprobs.apply(logits_NV, ids_NK, chunk_size, temperature)
    if _has_flat_view(logits_NV):
        flat_NK = _GatherLogprobs.apply(logits_NV.flatten(0, 1), ids_NK.flatten(0, 1), chunk_size, temperature)
        return flat_NK.unflatten(0, logits_NV.shape[:2])
    rows = zip(logits_NV, ids_NK, strict=True)  # logits[:, :-1]: flattening it would copy [B, T, V]
    return torch.stack([_GatherLogprobs.apply(logits, ids, chunk_size, temperature) for logits, ids in rows])


def head_logprobs(hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, chunk_size: int = 1024,
                  temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(logits [N, K] at `ids`, logsumexp [N] over the vocabulary) of `hidden @ weight.T / temperature`.

    Differentiable in `hidden` and `weight`. Forward and backward hold the logits of `chunk_size` rows; backward also
    holds the head's gradient, accumulated in one fp32 [V, D] buffer. ValueError as in `chunked_gather_logprobs`.
    """
    _check_chunking(chunk_size, temperature)
    ids_NK = _check_head(hidden_ND, weight_VD, ids_NK)
    return _HeadLogprobs.apply(hidden_ND, weight_VD, ids_NK, chunk_size, temperature)


def sparse_head_logits(hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, *, deterministic: bool = False) -> Tensor:
    """`(hidden @ weight.T).gather(-1, ids)` [N, K] from K rows of the head per position, forward and backward.

    Differentiable in `hidden` and `weight`; memory and time do not depend on V, but for the head's gradient, which is
    accumulated in a dense fp32 [V, D] buffer. `deterministic` adds it up in a fixed order, so that two runs on CUDA
    agree bit for bit; it is slower there. ValueError as in `chunked_gather_logprobs`.
    """
    ids_NK = _check_head(hidden_ND, weight_VD, ids_NK)
    return _SparseHead.apply(hidden_ND, weight_VD, ids_NK, deterministic)


@torch.no_grad()
def head_stats(hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, *, own_k: int, chunk_size: int = 1024,
               temperature: float = 1.0) -> HeadStats:
    """Logits at `ids`, logsumexp, entropy and the own top-`own_k` (0: none) of every row in one pass, no gradient."""
    _check_chunking(chunk_size, temperature)
    ids_NK = _check_head(hidden_ND, weight_VD, ids_NK)
    if not 0 <= own_k <= weight_VD.shape[0]:
        raise ValueError(f"own_k must be in [0, {weight_VD.shape[0]}], the rows of weight, got {own_k}")
    num_rows, dtype = len(hidden_ND), _wide_dtype(hidden_ND, weight_VD)
    stats = HeadStats(
        logits_NK=hidden_ND.new_empty(ids_NK.shape, dtype=dtype),
        lse_N=hidden_ND.new_empty(num_rows, dtype=dtype),
        entropy_N=hidden_ND.new_empty(num_rows, dtype=dtype),
        own_ids_NK=ids_NK.new_empty(num_rows, own_k),
        own_logits_NK=hidden_ND.new_empty(num_rows, own_k, dtype=dtype),
    )
    scratch_CV = _scratch(hidden_ND, chunk_size, len(weight_VD), dtype)
    for rows in _slices(num_rows, chunk_size):
        logits_CV = _head_logits(hidden_ND[rows], weight_VD, temperature, scratch_CV)
        stats.logits_NK[rows] = logits_CV.gather(-1, ids_NK[rows])
        if own_k:
            stats.own_logits_NK[rows], stats.own_ids_NK[rows] = logits_CV.topk(own_k, dim=-1)
        peak_C, total_C, exp_CV = _exp_(logits_CV)
        stats.lse_N[rows] = peak_C + total_C.log()
        stats.entropy_N[rows] = total_C.log() + torch.special.entr(exp_CV, out=exp_CV).sum(-1) / total_C
    return stats


# ---------------------------------------------------------------------------------------------------------------------
# Autograd. `weight` is saved as it came: under FSDP2 its storage is freed after forward and filled again before
# backward, so a saved copy or cast of it would keep a whole unsharded head alive.


class _GatherLogprobs(torch.autograd.Function):
    """d logp[k] / d logits[v] = (1[v = ids[k]] - softmax[v]) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NK: Tensor, chunk_size: int, temperature: float) -> Tensor:
        ctx.save_for_backward(logits_NV, ids_NK)
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        logp_NK = logits_NV.new_empty(ids_NK.shape, dtype=_wide_dtype(logits_NV))
        scratch_CV = _scratch(logits_NV, chunk_size, logits_NV.shape[1], logp_NK.dtype)
        for rows in _slices(len(logits_NV), chunk_size):
            logp_CV = _log_softmax(logits_NV[rows], temperature, scratch_CV)
            logp_NK[rows] = logp_CV.gather(-1, ids_NK[rows])
        return logp_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, ids_NK = ctx.saved_tensors
        grad_NK = grad_NK / ctx.temperature
        grad_NV = torch.empty_like(logits_NV)
        scratch_CV = _scratch(logits_NV, ctx.chunk_size, logits_NV.shape[1], grad_NK.dtype)
        for rows in _slices(len(logits_NV), ctx.chunk_size):
            grad_CV = _log_softmax(logits_NV[rows], ctx.temperature, scratch_CV).exp_()
            grad_CV.mul_(-grad_NK[rows].sum(-1, keepdim=True)).scatter_add_(-1, ids_NK[rows], grad_NK[rows])
            grad_NV[rows] = grad_CV
        return grad_NV, None, None, None


class _HeadLogprobs(torch.autograd.Function):
    """d lse / d logits[v] = softmax[v]; the rest is the chain rule through hidden @ weight.T / temperature."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, chunk_size: int,
                temperature: float) -> tuple[Tensor, Tensor]:
        logits_NK = hidden_ND.new_empty(ids_NK.shape, dtype=_wide_dtype(hidden_ND, weight_VD))
        lse_N = logits_NK.new_empty(len(hidden_ND))
        scratch_CV = _scratch(hidden_ND, chunk_size, len(weight_VD), logits_NK.dtype)
        for rows in _slices(len(hidden_ND), chunk_size):
            logits_CV = _head_logits(hidden_ND[rows], weight_VD, temperature, scratch_CV)
            logits_NK[rows] = logits_CV.gather(-1, ids_NK[rows])
            peak_C, total_C, _ = _exp_(logits_CV)
            lse_N[rows] = peak_C + total_C.log()
        ctx.save_for_backward(hidden_ND, weight_VD, ids_NK, lse_N)
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        return logits_NK, lse_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_NK: Tensor, grad_lse_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, ids_NK, lse_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = _wide_zeros(weight_VD, lse_N.dtype) if ctx.needs_input_grad[1] else None
        scratch_CV = _scratch(hidden_ND, ctx.chunk_size, len(weight_VD), lse_N.dtype)
        for rows in _slices(len(hidden_ND), ctx.chunk_size):
            grad_CV = _head_logits(hidden_ND[rows], weight_VD, ctx.temperature, scratch_CV)
            grad_CV.sub_(lse_N[rows, None]).exp_().mul_(grad_lse_N[rows, None])
            grad_CV.scatter_add_(-1, ids_NK[rows], grad_logits_NK[rows]).div_(ctx.temperature)
            grad_hidden_ND[rows] = _head_backward(grad_CV, hidden_ND[rows], weight_VD, grad_weight_VD)
        return grad_hidden_ND, _cast(grad_weight_VD, weight_VD.dtype), None, None, None


class _SparseHead(torch.autograd.Function):
    """logits[n, k] = hidden[n] . weight[ids[n, k]], one block of positions at a time."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, deterministic: bool) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, ids_NK)
        ctx.deterministic = deterministic
        logits_NK = hidden_ND.new_empty(ids_NK.shape, dtype=_wide_dtype(hidden_ND, weight_VD))
        for rows in _slices(len(hidden_ND), _block_rows(ids_NK, weight_VD)):
            head_CKD = _head_rows(weight_VD, ids_NK[rows], logits_NK.dtype)
            logits_NK[rows] = head_CKD.mul_(hidden_ND[rows, None]).sum(-1)
        return logits_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, ids_NK = ctx.saved_tensors
        grad_hidden_ND = grad_weight_VD = None
        if ctx.needs_input_grad[0]:
            grad_hidden_ND = torch.empty_like(hidden_ND)
            _sum_pairs(grad_hidden_ND, weight_VD, ids_NK, grad_NK)
        if ctx.needs_input_grad[1]:
            grad_weight_VD = _wide_zeros(weight_VD, grad_NK.dtype)
            add = _add_pairs_sorted if ctx.deterministic else _add_pairs
            add(grad_weight_VD, hidden_ND, ids_NK, grad_NK)
        return grad_hidden_ND, _cast(grad_weight_VD, weight_VD.dtype), None, None


def _sum_pairs(grad_hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, grad_NK: Tensor) -> None:
    """grad_hidden[n] = sum over k of grad[n, k] * weight[ids[n, k]]."""
    for rows in _slices(len(grad_hidden_ND), _block_rows(ids_NK, weight_VD)):
        head_CKD = _head_rows(weight_VD, ids_NK[rows], grad_NK.dtype)
        grad_hidden_ND[rows] = head_CKD.mul_(grad_NK[rows, :, None]).sum(1)


def _add_pairs(grad_weight_VD: Tensor, hidden_ND: Tensor, ids_NK: Tensor, grad_NK: Tensor) -> None:
    """grad_weight[ids[n, k]] += grad[n, k] * hidden[n] for every pair; on CUDA the order of the sums is open."""
    for rows in _slices(len(hidden_ND), _block_rows(ids_NK, grad_weight_VD)):
        pairs_CKD = grad_NK[rows, :, None] * hidden_ND[rows, None]
        grad_weight_VD.index_add_(0, ids_NK[rows].flatten(), pairs_CKD.flatten(0, 1))


def _add_pairs_sorted(grad_weight_VD: Tensor, hidden_ND: Tensor, ids_NK: Tensor, grad_NK: Tensor) -> None:
    """The same sums in a fixed order: pairs sorted by id, one segment sum per id, each id added once per block."""
    num_k = ids_NK.shape[1]
    sorted_ids, order = ids_NK.flatten().sort(stable=True)
    for block in _slices(len(order), num_k * _block_rows(ids_NK, grad_weight_VD)):
        pairs = order[block]
        pairs_PD = grad_NK.flatten()[pairs, None] * hidden_ND[pairs // num_k]
        ids, lengths = sorted_ids[block].unique_consecutive(return_counts=True)
        grad_weight_VD.index_add_(0, ids, torch.segment_reduce(pairs_PD, "sum", lengths=lengths))


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


def _wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _wide_zeros(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(weight_VD.shape, dtype=dtype, device=weight_VD.device)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _scratch(like: Tensor, chunk_size: int, num_ids: int, dtype: torch.dtype) -> Tensor:
    """One [C, V] buffer for all chunks: on CPU, fresh pages for each chunk cost as much as the arithmetic."""
    return like.new_empty(min(chunk_size, len(like)), num_ids, dtype=dtype)


def _block_rows(ids_NK: Tensor, weight_VD: Tensor) -> int:
    return max(1, _BLOCK_NUMBERS // max(1, ids_NK.shape[1] * weight_VD.shape[1]))


def _head_rows(weight_VD: Tensor, ids_CK: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[ids] [C, K, D], a fresh tensor that the caller may overwrite."""
    return weight_VD.index_select(0, ids_CK.flatten()).to(dtype).unflatten(0, ids_CK.shape)


def _log_softmax(logits_CV: Tensor, temperature: float, scratch_CV: Tensor) -> Tensor:
    """log_softmax(logits / temperature), written into the first rows of `scratch` and nowhere else."""
    out_CV = scratch_CV[:len(logits_CV)]
    if temperature != 1.0 or logits_CV.dtype != out_CV.dtype or not logits_CV.is_contiguous():
        logits_CV = out_CV.copy_(logits_CV).div_(temperature)
    return torch.log_softmax(logits_CV, dim=-1, out=out_CV)  # exact when in place: an element is read, then written


def _exp_(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(peak [C], total [C], exp(logits - peak) in the place of logits); logsumexp = peak + log(total)."""
    peak_C1 = logits_CV.amax(dim=-1, keepdim=True)
    peak_C1.masked_fill_(peak_C1.isinf(), 0.0)  # a row of -inf has lse -inf, not NaN
    exp_CV = logits_CV.sub_(peak_C1).exp_()
    return peak_C1.squeeze(-1), exp_CV.sum(-1), exp_CV


def _head_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float, scratch_CV: Tensor) -> Tensor:
    """hidden @ weight.T / temperature into the first rows of `scratch`; logits are never rounded to 16 bits."""
    out_CV = scratch_CV[:len(hidden_CD)]
    if hidden_CD.is_cuda and hidden_CD.dtype == weight_VD.dtype and weight_VD.dtype.itemsize == 2:
        torch.mm(hidden_CD, weight_VD.t(), out_dtype=out_CV.dtype, out=out_CV)
    else:
        hidden_CD = hidden_CD.to(out_CV.dtype)
        for tile in _slices(len(weight_VD), _TILE_ROWS):
            torch.mm(hidden_CD, weight_VD[tile].to(out_CV.dtype).t(), out=out_CV[:, tile])
    return out_CV if temperature == 1.0 else out_CV.div_(temperature)


def _head_backward(grad_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, grad_weight_VD: Tensor | None) -> Tensor:
    """Returns grad @ weight and adds grad.T @ hidden to `grad_weight`, in the dtype of `grad`."""
    hidden_CD = hidden_CD.to(grad_CV.dtype)
    grad_hidden_CD = torch.zeros_like(hidden_CD)
    for tile in _slices(len(weight_VD), _TILE_ROWS):
        grad_hidden_CD.addmm_(grad_CV[:, tile], weight_VD[tile].to(grad_CV.dtype))
        if grad_weight_VD is not None:
            grad_weight_VD[tile].addmm_(grad_CV[:, tile].t(), hidden_CD)
    return grad_hidden_CD


def _has_flat_view(x_BTV: Tensor) -> bool:
    batch, tokens, _ = x_BTV.shape
    return x_BTV.numel() == 0 or 1 in (batch, tokens) or x_BTV.stride(0) == tokens * x_BTV.stride(1)


# ---------------------------------------------------------------------------------------------------------------------
# Argument checks


def _check_chunking(chunk_size: int, temperature: float) -> None:
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


def _check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def _check_ids(ids_NK: Tensor, rows: torch.Size, num_ids: int, *, of: str) -> Tensor:
    """`ids` as int64, once its shape, dtype and range are right."""
    if ids_NK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be int32 or int64, got {ids_NK.dtype}")
    if ids_NK.dim() != len(rows) + 1 or ids_NK.shape[:-1] != rows:
        raise ValueError(f"ids must have shape {(*rows, 'K')} to match {of}, got {tuple(ids_NK.shape)}")
    if ids_NK.is_cuda:
        in_range = ((ids_NK >= 0) & (ids_NK < num_ids)).all()
        torch._assert_async(in_range, f"ids must be in [0, {num_ids})")  # a ValueError would wait for the device
    elif ids_NK.device.type == "cpu" and ids_NK.numel():
        low, high = (int(bound) for bound in ids_NK.aminmax())
        if low < 0 or high >= num_ids:
            raise ValueError(f"ids must be in [0, {num_ids}), got values from {low} to {high}")
    return ids_NK.long()


def _check_head(hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor) -> Tensor:
    """`ids` as int64, once the three arguments of a head function fit together."""
    _check_floating(hidden=hidden_ND, weight=weight_VD)
    if hidden_ND.dim() != 2:
        raise ValueError(f"hidden must be [N, D], got shape {tuple(hidden_ND.shape)}")
    if weight_VD.dim() != 2 or weight_VD.shape[1] != hidden_ND.shape[1]:
        raise ValueError(f"weight must be [V, {hidden_ND.shape[1]}] to match hidden, got {tuple(weight_VD.shape)}")
    return _check_ids(ids_NK, hidden_ND.shape[:1], weight_VD.shape[0], of="hidden")
