# SPDX-License-Identifier: Apache-2.0
"""Measures generated digits against the real ones: numpy and torch, nothing of the project.

    python examples/digits/measure.py teacher50.npz student4.npz          # from any folder

    acc    share of samples that a classifier of real digits takes for the class they were asked for. Alone it proves
           nothing: blurred samples score 1
    FD     Frechet distance |mu - mu'|^2 + tr(C + C' - 2 (C C')^(1/2)) of Gaussians fitted to the classifier's 64
           features; depends on the number of samples, so compare equal numbers (4,000 here)
    SWD    sliced Wasserstein distance: root mean square over 256 random projections
    MMD2   squared maximum mean discrepancy, unbiased, Gaussian kernels as wide as the median distance and half of it
    std    standard deviation over samples, mean over pixels; too low is blur, too high is overshoot

A sample file is an .npz with `x` [N, 1, 8, 8] or [N, 64] in -1 ... 1 and `labels` [N]; numbers `scale` and `offset`
beside them say that the pixels are x * scale + offset. The classifier is trained on first use (seconds) and kept in
.cache beside this file.

Legend: N samples, P pixels (64), C classes, F features.
"""
from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
NUM_CLASSES, NUM_PIXELS = 10, 64
NUM_TRAIN = 1400  # real digits that the classifier learns from; the other 397 test it
CLASSIFIER_STEPS = 1500


class Figures(NamedTuple):
    acc: float
    fd: float
    swd: float
    mmd2: float
    std: float


def measure(x: Tensor, labels: Tensor) -> Figures:
    """The figures of samples [N, ...] of 64 pixels each and the classes [N] they were asked for."""
    x_NP, real_NP = x.flatten(1).float().cpu(), real_digits()[0]
    if x_NP.shape[1] != NUM_PIXELS or labels.shape != x_NP.shape[:1] or len(x_NP) < 2:
        raise ValueError(f"expected x of N times {NUM_PIXELS} pixels and labels [N], got {list(x.shape)} and "
                         f"{list(labels.shape)}")
    if not x_NP.isfinite().all():
        raise ValueError("x holds NaN or infinity")
    classifier = load_classifier()
    with torch.no_grad():
        features_NF, real_NF = classifier[:-1](x_NP), classifier[:-1](real_NP)
        acc = (classifier[-1](features_NF).argmax(1) == labels.cpu()).float().mean()
    width = float(torch.cdist(real_NP[:500], real_NP[500:1000]).median())
    return Figures(float(acc), frechet_distance(features_NF, real_NF), sliced_wasserstein(x_NP, real_NP),
                   mmd_squared(x_NP, real_NP, [width / 2, width]), float(x_NP.std(0).mean()))


# --- distances ------------------------------------------------------------------------------------------------------

def frechet_distance(a_NF: Tensor, b_NF: Tensor) -> float:
    """Of Gaussians with the means and covariances of two sets of features, in float64."""
    a_NF, b_NF = a_NF.double(), b_NF.double()
    cov_a, cov_b = torch.cov(a_NF.T), torch.cov(b_NF.T)
    # The square root of a product of two positive matrices has the roots of its eigenvalues, all real up to rounding.
    root_trace = torch.linalg.eigvals(cov_a @ cov_b).real.clamp_min(0).sqrt().sum()
    mean_gap = (a_NF.mean(0) - b_NF.mean(0)).square().sum()
    return float(mean_gap + cov_a.trace() + cov_b.trace() - 2 * root_trace)


def sliced_wasserstein(a_NP: Tensor, b_NP: Tensor, num_projections: int = 256) -> float:
    """Root mean square gap of sorted projections; of two sets of unequal size the first samples of the larger one."""
    directions = torch.randn(num_projections, a_NP.shape[1], generator=torch.Generator().manual_seed(0))
    directions = directions / directions.norm(dim=1, keepdim=True)
    size = min(len(a_NP), len(b_NP))
    sorted_a, sorted_b = (part[:size].mm(directions.T).sort(dim=0)[0] for part in (a_NP, b_NP))
    return float((sorted_a - sorted_b).square().mean().sqrt())


def mmd_squared(a_NP: Tensor, b_NP: Tensor, widths: Sequence[float], limit: int = 2000) -> float:
    """Unbiased estimate from at most `limit` samples of each set; near 0, and possibly below, for equal laws."""
    a_NP, b_NP = a_NP[:limit], b_NP[:limit]

    def kernel(p_NP: Tensor, q_NP: Tensor) -> Tensor:
        distance = torch.cdist(p_NP, q_NP).square()
        return torch.stack([torch.exp(-distance / (2 * width**2)) for width in widths]).mean(0)

    def among_different(p_NP: Tensor) -> Tensor:
        values = kernel(p_NP, p_NP)
        return (values.sum() - values.diag().sum()) / (len(values) * (len(values) - 1))

    return float(among_different(a_NP) + among_different(b_NP) - 2 * kernel(a_NP, b_NP).mean())


# --- real digits and their classifier -------------------------------------------------------------------------------

def read_samples(path: str | Path) -> tuple[Tensor, Tensor]:
    """(x [N, ...] in fp32, labels [N] in int64) of an .npz file."""
    try:
        with np.load(path) as archive:
            x = archive["x"].astype(np.float32)
            if "scale" in archive.files:
                x = x * np.float32(archive["scale"]) + np.float32(archive["offset"])
            return torch.from_numpy(x), torch.from_numpy(archive["labels"].astype(np.int64))
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not an .npz with x and labels ({' '.join(str(error).split())[:200]})") from None


def real_digits() -> tuple[Tensor, Tensor]:
    """All 1,797 as ([N, 64] in -1 ... 1, [N])."""
    x, labels = read_samples(HERE / "digits.npz")
    return x.flatten(1), labels


def split() -> tuple[Tensor, Tensor]:
    """Indices of the digits that the classifier learns from, and of those it is tested on."""
    order = torch.randperm(len(real_digits()[0]), generator=torch.Generator().manual_seed(0))
    return order[:NUM_TRAIN], order[NUM_TRAIN:]


def new_classifier() -> nn.Sequential:
    """64-128-64-10; all but the last layer give the features. Initialised from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(NUM_PIXELS, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU(),
                             nn.Linear(64, NUM_CLASSES))


def train_classifier() -> nn.Sequential:
    """About 2 seconds; .977 of the test digits are right."""
    real_NP, labels_N = real_digits()
    train, _ = split()
    classifier, generator = new_classifier(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(CLASSIFIER_STEPS):
        picked = train[torch.randint(len(train), (128,), generator=generator)]
        jittered = real_NP[picked] + 0.1 * torch.randn(128, NUM_PIXELS, generator=generator)
        loss = F.cross_entropy(classifier(jittered), labels_N[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return classifier


def load_classifier() -> nn.Sequential:
    """From the cache, whose name depends on this file and on the digits; trained and put there if it is not."""
    content = Path(__file__).read_bytes() + (HERE / "digits.npz").read_bytes()
    path = HERE / ".cache" / f"classifier-{hashlib.sha256(content).hexdigest()[:12]}.npz"
    if path.exists():
        classifier = new_classifier()
        with np.load(path) as archive:
            classifier.load_state_dict({name: torch.from_numpy(archive[name]) for name in archive.files})
        return classifier.eval()
    classifier = train_classifier().eval()
    path.parent.mkdir(exist_ok=True)
    staging = path.with_name(f".{os.getpid()}-{path.name}")
    np.savez(staging, **{name: tensor.numpy() for name, tensor in classifier.state_dict().items()})
    os.replace(staging, path)  # several processes may train it at once: each puts a whole file there
    return classifier


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print("usage: python examples/digits/measure.py FILE.npz ...", file=sys.stderr)
        return 2
    try:
        rows = [(Path(path).stem, measure(*read_samples(path))) for path in argv]
    except ValueError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    width = max(len(name) for name, _ in rows)
    print(f"{'':{width}}    acc       FD    SWD     MMD2   std")
    for name, row in rows:
        print(f"{name:{width}}  {row.acc:5.3f}  {row.fd:7.2f}  {row.swd:5.3f}  {row.mmd2:7.4f}  {row.std:4.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
