# SPDX-License-Identifier: Apache-2.0
"""examples/digits/measure.py: distances against closed forms and loops, and what they say of real and spoilt digits."""
from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits"


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """A copy in a folder of its own: it needs nothing but the digits, and its cache is not the checkout's."""
    folder = tmp_path_factory.mktemp("digits")
    for name in ("measure.py", "digits.npz"):
        shutil.copy(DIGITS / name, folder)
    spec = importlib.util.spec_from_file_location("digits_measure", folder / "measure.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_measure"] = module
    spec.loader.exec_module(module)
    return module


def test_frechet_distance_in_closed_form(measure):
    """Catches a root taken of the wrong product: with independent features it is sum (mu - mu')^2 + (sd - sd')^2."""
    x = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0)).double()
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.T))).T  # covariance exactly 1
    scale, shift = torch.tensor([2.0, 0.5, 1.0]), torch.tensor([1.0, 0.0, -2.0])
    assert abs(measure.frechet_distance(x, x * scale + shift) - (5 + 1 + 0.25)) < 1e-9
    assert abs(measure.frechet_distance(x, x)) < 1e-9


def test_mmd_is_unbiased_at_unequal_sizes(measure):
    """Catches an estimator that divides by the size of the other set."""
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    y = torch.randn(5, 2, generator=torch.Generator().manual_seed(1)) + 1

    def kernel(a, b):
        squared = float((a - b).square().sum())
        return (np.exp(-squared / (2 * 0.5**2)) + np.exp(-squared / 2)) / 2

    among = [sum(kernel(a, b) for i, a in enumerate(p) for j, b in enumerate(p) if i != j) / len(p) / (len(p) - 1)
             for p in (x, y)]
    across = sum(kernel(a, b) for a in x for b in y) / 35
    assert abs(measure.mmd_squared(x, y, [0.5, 1.0]) - (sum(among) - 2 * across)) < 1e-5
    assert abs(measure.sliced_wasserstein(x[:5], x[:5] + torch.tensor([3.0, 4.0]))) > 3.0


def test_real_and_spoilt_digits(measure):
    """Catches a classifier that learnt nothing, and figures that do not see blurred or mislabelled samples."""
    x, labels = measure.real_digits()
    train, test = measure.split()
    classifier = measure.load_classifier()
    correct = (classifier(x[test]).argmax(1) == labels[test]).float().mean()
    assert correct > 0.96 and len(train) == 1400
    real, cached = measure.measure(x, labels), measure.measure(x.reshape(-1, 1, 8, 8), labels)
    assert real == cached and real.acc > 0.99 and abs(real.fd) < 1e-3 and real.swd == 0 and abs(real.std - 0.461) < 1e-3
    halves = measure.measure(x[::2], labels[::2])
    means = torch.stack([x[labels == digit].mean(0) for digit in range(10)])
    blurred = measure.measure(0.5 * x + 0.5 * means[labels], labels)
    assert blurred.acc > 0.99 and blurred.fd > 5 * halves.fd and blurred.std < 0.9 * real.std
    assert blurred.swd > halves.swd and blurred.mmd2 > halves.mmd2
    assert measure.measure(x, (labels + 1) % 10).acc < 0.02
    with pytest.raises(ValueError, match="expected x of"):
        measure.measure(x[:, :63], labels)


def test_the_command(measure, tmp_path):
    """Catches a script that needs the project on its path, and a traceback for a file that is no sample file."""
    script = Path(measure.__file__)
    result = subprocess.run([sys.executable, str(script), str(DIGITS / "digits.npz")], cwd=tmp_path, text=True,
                            capture_output=True)
    assert result.returncode == 0 and result.stdout.splitlines()[1].split()[0] == "digits", result
    (tmp_path / "bad.npz").write_text("no")
    bad = subprocess.run([sys.executable, str(script), "bad.npz"], cwd=tmp_path, text=True, capture_output=True)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1 and "bad.npz" in bad.stderr, bad
