# SPDX-License-Identifier: Apache-2.0
"""Eight Gaussians on a circle: what the 2-D gate distils, and the figures by which it judges samples.

    python tests/eight_gaussians.py gmm8.npz          # the samples that tests/gmm8 was trained on
    figures = measure(x_NX)                           # of 10,000 samples

Legend: N samples, X the two coordinates, K modes.
"""
from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

RADIUS, STD, NUM_MODES = 2.0, 0.15, 8
NUM_TRAINING_SAMPLES = 51_200


class Figures(NamedTuple):
    """hq: share of samples within 3 STD of a centre, which the other per-mode figures look at. modes: centres that more
    than 2 % of all samples are near. tv: total variation between their shares and equal ones. swd: sliced Wasserstein
    distance to real samples. mmd2: squared maximum mean discrepancy, unbiased. std: within a mode, per coordinate.
    """

    hq: float
    modes: int
    tv: float
    swd: float
    mmd2: float
    std: float

    def __str__(self) -> str:
        return (f"hq {self.hq:.3f}  modes {self.modes}  tv {self.tv:.3f}  swd {self.swd:.3f}  mmd2 {self.mmd2:.4f}  "
                f"std {self.std:.3f}")


def centres() -> Tensor:
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


def real_samples(num: int, seed: int) -> Tensor:
    """[num, 2]"""
    generator = torch.Generator().manual_seed(seed)
    modes = torch.randint(NUM_MODES, (num,), generator=generator)
    return centres()[modes] + STD * torch.randn(num, 2, generator=generator)


def measure(x_NX: Tensor) -> Figures:
    """Figures of samples; where there is nothing to measure (none near a centre, or not finite) they are NaN."""
    distance_N, mode_N = torch.cdist(x_NX, centres()).min(dim=1)
    near_N = distance_N < 3 * STD
    counts_K = torch.bincount(mode_N[near_N], minlength=NUM_MODES)
    offsets = (x_NX - centres()[mode_N])[near_N]
    real = real_samples(len(x_NX), seed=99)
    return Figures(hq=float(near_N.float().mean()), modes=int((counts_K > 0.02 * len(x_NX)).sum()),
                   tv=float((counts_K / counts_K.sum() - 1 / NUM_MODES).abs().sum() / 2),
                   swd=sliced_wasserstein(x_NX, real), mmd2=mmd_squared(x_NX[:2000], real[:2000]),
                   std=float(offsets.square().mean().sqrt()))


def sliced_wasserstein(a_NX: Tensor, b_NX: Tensor, num_projections: int = 256) -> float:
    """Root mean square gap of sorted projections of two sets of equal size."""
    directions = torch.randn(num_projections, a_NX.shape[1], generator=torch.Generator().manual_seed(0))
    directions = directions / directions.norm(dim=1, keepdim=True)
    gaps = (a_NX @ directions.T).sort(dim=0).values - (b_NX @ directions.T).sort(dim=0).values
    return float(gaps.square().mean().sqrt())


def mmd_squared(a_NX: Tensor, b_NX: Tensor, widths: tuple[float, ...] = (0.1, 0.3, 1.0)) -> float:
    """Unbiased: without the pairs of a sample with itself, whose kernel is 1. Gaussian kernels, their mean."""
    def kernels(p: Tensor, q: Tensor) -> Tensor:
        squares = torch.cdist(p, q).square()
        return sum(torch.exp(-squares / (2 * width**2)) for width in widths) / len(widths)

    n = len(a_NX)
    inside = sum((kernels(p, p).sum() - n) / (n * (n - 1)) for p in (a_NX, b_NX))
    return float(inside - 2 * kernels(a_NX, b_NX).mean())


if __name__ == "__main__":
    np.savez(sys.argv[1], x=real_samples(NUM_TRAINING_SAMPLES, seed=0).numpy(),
             labels=np.zeros(NUM_TRAINING_SAMPLES, dtype=np.int64))
