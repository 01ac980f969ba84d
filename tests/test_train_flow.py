# SPDX-License-Identifier: Apache-2.0
"""train_flow: a short run learns, writes a folder that reloads equal, repeats itself, and refuses what it cannot do."""
from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from distill_core.adapters import check_adapter, read_adapter
from distill_core.data import read_latents
from distill_core.flow import euler_sample
from distill_core.models.mlp2d import MLP2D, MLP2DConfig
from distill_core.safetensors_io import load_into, open_folder
from distill_core.train_flow import _noised, main, train_flow


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """Four Gaussians on a circle of radius 2, one class each, as a file."""
    rng = np.random.default_rng(0)
    labels = np.arange(2000) % 4
    angles = labels * (math.pi / 2)
    x = 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1) + 0.15 * rng.standard_normal((2000, 2))
    path = tmp_path_factory.mktemp("ring") / "ring.npz"
    np.savez(path, x=x.astype(np.float32), labels=labels)
    return path


def load(folder):
    adapter = read_adapter(folder)
    with torch.device("meta"):
        module = adapter.build()
    module.to_empty(device="cpu")
    load_into(open_folder(folder), dict(module.named_parameters()))
    return adapter, module


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step")]


def run(data, out, *arguments: str) -> int:
    return main(["--data", str(data), "--out", str(out), "--hidden-size", "24", "--depth", "2", "--log-every", "50",
                 *arguments])


def test_a_short_run_learns(ring, tmp_path, capsys):
    """Catches a loop that does not train, a target of wrong sign or time, and labels that are not used."""
    arguments = ["--model", "mlp2d", "--steps", "300", "--lr", "5e-3", "--ema-decay", "0.99"]
    assert run(ring, tmp_path / "teacher", *arguments) == 0
    curve = losses(capsys.readouterr().out)
    assert len(curve) == 6 and curve[-1] < 0.6 * curve[0], curve
    adapter, module = load(tmp_path / "teacher")
    x0, labels = read_latents(ring)
    check_adapter(adapter, module, x0[:512], labels[:512])
    wanted, noise = torch.arange(200) % 4, torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    samples = euler_sample(lambda x, s: module(x, s, wanted), noise, [1 - k / 20 for k in range(21)])
    centres = torch.stack([x0[labels == label].mean(0) for label in range(4)])
    assert (torch.cdist(samples, centres).argmin(1) == wanted).float().mean() > 0.95


def test_the_folder_holds_the_average_and_reloads_equal(ring, tmp_path):
    """Catches weights written instead of their average, in another dtype, or a run that does not repeat itself."""
    arguments = ["--model", "mlp2d", "--steps", "20", "--num-classes", "6"]
    assert run(ring, tmp_path / "a", *arguments) == run(ring, tmp_path / "b", *arguments) == 0
    assert run(ring, tmp_path / "c", *arguments, "--dtype", "bfloat16") == 0
    files = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == files
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {
        "model_type": "mlp2d", "hidden_size": 24, "depth": 2, "num_classes": 6}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MLP2D(MLP2DConfig(24, 2, 6))
    average = train_flow(module, *read_latents(ring), null_class=6, steps=20, batch_size=128, lr=1e-3,
                         label_dropout=0.1, ema_decay=0.999, seed=0)
    full, half = load(tmp_path / "a")[1].state_dict(), load(tmp_path / "c")[1].state_dict()
    assert average.keys() == full.keys()
    assert all(torch.equal(average[name], full[name]) for name in full)
    assert all(torch.equal(average[name].bfloat16().float(), half[name]) for name in full)
    assert not torch.equal(dict(module.named_parameters())["final_layer.weight"], full["final_layer.weight"])


def test_a_dit_takes_its_shape_from_the_data(tmp_path):
    """Catches channels or side taken from elsewhere, and patches that do not divide the side."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=rng.integers(0, 17, (40, 3, 6, 6), dtype=np.uint8), labels=np.arange(40) % 5,
             scale=0.125, offset=-1.0)
    assert run(tmp_path / "x.npz", tmp_path / "out", "--model", "dit", "--steps", "2", "--batch-size", "8") == 0
    adapter, module = load(tmp_path / "out")
    assert (adapter.latent_shape, adapter.num_classes, module.config.patch_size) == ((3, 6, 6), 5, 2)


def test_labels_are_dropped_at_the_rate_asked_for():
    """Catches guidance without a trained null condition, and a dropout of everything or of the complement."""
    labels, generator = torch.zeros(20_000, dtype=torch.int64), torch.Generator().manual_seed(0)
    _, noise, s, dropped = _noised(torch.zeros(20_000, 2), labels, 7, 0.1, generator)
    assert set(dropped.tolist()) == {0, 7} and abs((dropped == 7).float().mean() - 0.1) < 0.01
    assert abs(noise.std() - 1) < 0.02 and 0 <= s.min() and s.max() <= 1 and abs(s.mean() - 0.5) < 0.01
    assert abs(s.var() - (1 / 12 + 0.0433) / 2) < 0.002  # a uniform and a logistic-normal half
    assert torch.equal(_noised(torch.zeros(9, 2), labels[:9], 7, 0.0, generator)[3], labels[:9])


def test_a_loss_that_is_not_finite_stops_the_run(ring, tmp_path, capsys):
    """Catches a teacher of NaN that is written as if it were one."""
    assert run(ring, tmp_path / "out", "--model", "mlp2d", "--steps", "400", "--lr", "1e30") == 2
    assert "the loss is" in (error := capsys.readouterr().err) and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments, reason", [
    (["--model", "dit"], "dit takes square images [N, C, H, H], got [2000, 2]"),
    (["--model", "mlp2d", "--num-classes", "3"], "labels[3]: 3 is no class (the model has 0 to 2)"),
    (["--model", "mlp2d", "--label-dropout", "1"], "--label-dropout: 1.0 is out of range"),
    (["--model", "mlp2d", "--lr", "nan"], "--lr: nan is out of range"),
    (["--model", "mlp2d", "--seed", "-1"], "--seed: -1 is out of range"),
    (["--model", "mlp2d", "--data", "nowhere.npz"], "nowhere.npz: cannot be read"),
    (["--model", "mlp2d", "--out", "."], ".: exists; choose another --out"),
])
def test_bad_arguments_are_refused_in_one_line(ring, tmp_path, capsys, arguments, reason):
    """Catches a traceback, and work done before a refusal."""
    assert run(ring, tmp_path / "out", "--steps", "1", *arguments) == 2
    error = capsys.readouterr().err
    assert reason in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "out").exists()
