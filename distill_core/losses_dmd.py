# SPDX-License-Identifier: Apache-2.0
"""Distribution-matching losses (DMD2): the student's surrogate, the fake score's denoising loss, the GAN terms.

The student follows the gradient of KL(student || teacher) between noised samples, a difference of two denoisers at the
same noised sample (arXiv 2311.18828 eq. 7 and 8):

    g = (x0_fake - x0_real) / Z,    Z = mean |x - x0_real| over a sample,    L = mean((x - stopgrad(x - g))^2) / 2

so dL/dx = g / numel and L = mean(g^2) / 2. Z makes g of order one: the value of L says nothing about progress and does
not go to 0. Watch |g|, the fake score's loss and x0_real - x0_fake by noise level instead (`noise_bins`).

Losses are fp32 (float64 kept). Predictions of teacher and fake score never receive gradients from the surrogate.

Shapes: B batch, samples x and predictions [B, ...], logits of a discriminator any shape.

    loss = dmd_surrogate(x, x0_real, x0_fake)                      # student phase; x carries the graph
    loss = fake_score_loss(fake(x_s, s), x.detach(), noise)        # fake phase; x_s = (1 - s) x + s noise
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class DMDGradient(NamedTuple):
    """What `dmd_gradient` returns, detached."""

    g: Tensor  # [B, ...], finite
    normaliser_B: Tensor  # Z, as it divided
    num_nonfinite: Tensor  # int64 scalar: entries of g that were not finite and are 0 now


class NoiseBins(NamedTuple):
    """Sums and counts [num bins] of a value by noise level; add them over micro-batches and ranks, then divide."""

    sums: Tensor
    counts: Tensor


# ---------------------------------------------------------------------------------------------------------------------
# Student


@torch.no_grad()
def dmd_gradient(x: Tensor, x0_real: Tensor, x0_fake: Tensor, eps: float = 1e-6,
                 normalizer: str = "sample") -> DMDGradient:
    """g = (x0_fake - x0_real) / Z.

    x: the student's clean samples; x0_real, x0_fake: x0 predictions of teacher (guided) and fake score at the noised x.
    normalizer, with the mean of |x - x0_real| over all but the batch dim:
    "sample": Z = max(mean, eps) of each sample (DMD2, CausVid, Self-Forcing and LightX2V without eps; verl-omni; rCM).
    "sample_add": Z = mean + eps of each sample (FastGen).
    "batch": Z = max(mean of the means, eps), one for all (FastVideo, without eps); g then depends on what else is in
        the micro-batch.
    A non-finite entry is counted, then trains nothing; one in x0_real spoils Z and with it its whole sample, or batch.
    """
    _check_samples(x, x0_real=x0_real, x0_fake=x0_fake)
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    x, x0_real, x0_fake = _widen(x, x0_real, x0_fake)
    normaliser_B = _normaliser(_sample_mean((x - x0_real).abs()), eps, normalizer)
    g = (x0_fake - x0_real) / normaliser_B.view(-1, *[1] * (x.dim() - 1))
    num_nonfinite = g.isfinite().logical_not().sum()
    return DMDGradient(torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0), normaliser_B, num_nonfinite)


def _normaliser(mean_B: Tensor, eps: float, normalizer: str) -> Tensor:
    if normalizer == "sample":
        return mean_B.clamp_min(eps)
    if normalizer == "sample_add":
        return mean_B + eps
    if normalizer == "batch":
        return mean_B.mean().clamp_min(eps).expand_as(mean_B)
    raise ValueError(f"normalizer {normalizer!r}: choose sample, sample_add or batch")


def surrogate_per_sample(x: Tensor, g: Tensor) -> Tensor:
    """[B]: mean((x - stopgrad(x - g))^2) / 2 over each sample. Its value is mean(g^2) / 2, its gradient g / numel.

    For a caller that has the gradient (and logs it, or changes it). NaN for a sample whose x is not finite.
    """
    _check_samples(x, g=g)
    x, g = _widen(x, g.detach())
    return 0.5 * _sample_mean((g + (x - x.detach())).square())  # x - (x - g) would round g to the last bits of x


def dmd_surrogate_per_sample(x: Tensor, x0_real: Tensor, x0_fake: Tensor, eps: float = 1e-6) -> Tensor:
    """[B]: the surrogate of each sample, the mean over its elements; for sample-weighted sums."""
    return surrogate_per_sample(x, dmd_gradient(x, x0_real, x0_fake, eps).g)


def dmd_surrogate(x: Tensor, x0_real: Tensor, x0_fake: Tensor, eps: float = 1e-6) -> Tensor:
    """Scalar: the surrogate loss, the mean over all elements; arguments and edge cases as in `dmd_gradient`."""
    return dmd_surrogate_per_sample(x, x0_real, x0_fake, eps).mean()


# ---------------------------------------------------------------------------------------------------------------------
# Fake score


def fake_score_loss_per_sample(v_pred: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """[B]: mean((v_pred - (noise - x0))^2) over each sample; no gradient to x0 and noise.

    The target of a flow model is noise - x0, not noise. Other targets: multiply by `fake_loss_weight`.
    """
    _check_samples(v_pred, x0=x0, noise=noise)
    v_pred, x0, noise = _widen(v_pred, x0.detach(), noise.detach())
    return _sample_mean((v_pred - (noise - x0)).square())


def fake_loss_weight(s_B: Tensor, form: str) -> Tensor:
    """[B]: what turns the squared error of the flow velocity at noise level s into that of another target.

    At a given x_s the predictions are tied, x0 = x_s - s v and noise = x_s + (1 - s) v, and so are their errors. With
    |dv|^2 for the squared error of v:
    "flow": 1.
    "x0":   |dx0|^2 = s^2 |dv|^2.
    "eps":  |dnoise|^2 = (1 - s)^2 |dv|^2, whichever path the network lives on.
    "edm":  (1 / sigma^2 + 1 / sigma_data^2) |dx0|^2 with sigma = s / (1 - s) and sigma_data = 1/2 (DMD2's ImageNet):
            ((1 - s)^2 / s^2 + 4) s^2 = (1 - s)^2 + 4 s^2, finite at both ends.
    "vp_v": the velocity alpha noise - sigma x0 of the path alpha = (1 - s) / r, sigma = s / r, r^2 = (1 - s)^2 + s^2.
            Its error is |dx0|^2 / sigma^2 (rCM, with sigma = sin t): r^2 = (1 - s)^2 + s^2.
    """
    s_B, = _widen(s_B)
    if form == "flow":
        return torch.ones_like(s_B)
    if form == "x0":
        return s_B.square()
    if form == "eps":
        return (1.0 - s_B).square()
    if form == "edm":
        return (1.0 - s_B).square() + 4.0 * s_B.square()
    if form == "vp_v":
        return (1.0 - s_B).square() + s_B.square()
    raise ValueError(f"form {form!r}: choose flow, x0, eps, edm or vp_v")


def fake_score_loss(v_pred: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """Scalar: mean((v_pred - (noise - x0))^2) of the fake score's velocity at (1 - s) x0 + s noise."""
    return fake_score_loss_per_sample(v_pred, x0, noise).mean()


# ---------------------------------------------------------------------------------------------------------------------
# Discriminator (arXiv 2405.14867)


def gan_generator_losses(fake_logits: Tensor) -> Tensor:
    """softplus(-D(generated)) of each logit, for the student."""
    return F.softplus(-_widen(fake_logits)[0])


def gan_discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Scalar: mean softplus(-D(real)) + mean softplus(D(generated)), for the discriminator; the batches may differ."""
    real_logits, fake_logits = _widen(real_logits, fake_logits)
    return F.softplus(-real_logits).mean() + F.softplus(fake_logits).mean()


def gradient_at(x: Tensor, losses_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(losses [B], gradient of each at x [B, ...]), detached; parameters that `losses_of` uses receive no gradient.

    losses_of(x) must give one loss per sample that depends on that sample alone. For a network that another phase
    trains: the discriminator, and the fake score whose features it reads, in the student's phase.
    """
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        losses_B = losses_of(leaf)
        (gradient,) = torch.autograd.grad(losses_B.sum(), leaf)
    return losses_B.detach(), gradient


def with_gradient(losses_B: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
    """[B] these losses, with `gradient` as what they send back into x: the way on from `gradient_at`."""
    return losses_B + ((x - x.detach()) * gradient).flatten(1).sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# Diagnostics


@torch.no_grad()
def noise_bins(values_B: Tensor, s_B: Tensor, edges: Sequence[float]) -> NoiseBins:
    """Values summed by noise level into the bins [edges[i], edges[i + 1]); the outer bins take what lies outside."""
    if len(edges) < 2 or list(edges) != sorted(set(edges)):
        raise ValueError(f"edges must ascend and be at least 2, got {list(edges)}")
    if values_B.dim() != 1 or s_B.shape != values_B.shape:
        raise ValueError(f"values and s must be [B], got {tuple(values_B.shape)} and {tuple(s_B.shape)}")
    values_B, s_B = _widen(values_B, s_B)
    inner = torch.tensor(edges[1:-1], dtype=s_B.dtype, device=s_B.device)
    bin_B = torch.bucketize(s_B, inner, right=True)
    member_BI = bin_B[:, None] == torch.arange(len(edges) - 1, device=s_B.device)
    return NoiseBins(torch.where(member_BI, values_B[:, None], 0.0).sum(0), member_BI.sum(0))


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


def _widen(*tensors: Tensor) -> list[Tensor]:
    """All as float64 if any is, else as float32."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return [tensor.to(dtype) for tensor in tensors]


def _sample_mean(x: Tensor) -> Tensor:
    """[B]: mean over all but the batch dim."""
    return x.flatten(1).mean(1)


def _check_samples(x: Tensor, **others: Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"samples must be [B, ...] with at least two dims, got shape {tuple(x.shape)}")
    for name, other in others.items():
        if other.shape != x.shape:
            raise ValueError(f"{name} must have shape {tuple(x.shape)}, got {tuple(other.shape)}")
