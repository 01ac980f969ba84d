# SPDX-License-Identifier: Apache-2.0
"""Sampling: the inputs that training simulates, independent of batches, for teachers and exports of both storages."""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_export_dmd import dmd_state, full_run, lora_run, make_base
from torch import Tensor, nn

from distill_core import flow
from distill_core.adapters import read_adapter
from distill_core.data import read_latents
from distill_core.export import export_hf, export_peft
from distill_core.lora import use
from distill_core.noise import normal
from distill_core.sample import Sampling, draw, labels_of, load_student, main

LABELS = labels_of(12, [0, 1, 2])


def inputs_of(module: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Filled with (x, s, labels) of every forward."""
    seen: list = []
    module.register_forward_pre_hook(lambda _, args: seen.append(tuple(arg.clone() for arg in args)))
    return seen


def noise(shape: tuple[int, ...], stream: str, num: int = 12, seed: int = 5) -> Tensor:
    return normal(shape, torch.arange(num), seed=seed, stream=stream, step=-1)


# --- drawing --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["mlp2d", "dit"])
@pytest.mark.parametrize("mode", ["sde", "ode"])
def test_inputs_are_those_that_training_simulates(tmp_path, kind, mode):
    """Catches another grid, other noises or another update than training's: equal bit for bit at every step."""
    module, adapter = make_base(tmp_path / "base", kind), read_adapter(tmp_path / "base")
    sampling, shape = Sampling(steps=4, mode=mode, shift=3.0), adapter.latent_shape

    def student(x: Tensor, s: Tensor) -> Tensor:
        return adapter.to_x0(module(x, s, LABELS), x, s)

    grid = [1.0, 9 / 10, 3 / 4, 1 / 2, 0.0]  # 3 u / (1 + 2 u) at u = 1, 3/4, 1/2, 1/4, 0
    assert sampling.grid(adapter) == pytest.approx(grid, abs=1e-15)
    states = flow.few_step_states(student, noise(shape, "initial noise"), sampling.grid(adapter), mode=mode,
                                  noise_at=lambda k: noise(shape, f"rollout {k}"))
    states = [x for _, x in states]
    seen = inputs_of(module)
    x = draw(adapter, module, LABELS, sampling, seed=5)
    assert len(seen) == 4
    for (x_k, s_k, labels_k), state, level in zip(seen, states, grid):
        assert torch.equal(x_k, state) and torch.equal(labels_k, LABELS)
        torch.testing.assert_close(s_k, torch.full((12,), level))
    assert torch.equal(x, student(states[-1], seen[3][1]))
    draw(adapter, module, LABELS, sampling, seed=6)
    assert not torch.equal(seen[5][0], states[0])  # control: the seed matters
    assert (draw(adapter, module, LABELS, replace(sampling, mode="sde" if mode == "ode" else "ode"), seed=5)
            - x).abs().max() > 0.01  # control: so does the mode


@pytest.mark.parametrize("sampling", [Sampling(3, "sde"), Sampling(3, "ode"), Sampling(3), Sampling(3, guidance=2.0)])
def test_samples_do_not_depend_on_the_batch_size_or_their_number(tmp_path, sampling):
    """Catches noises drawn by place in the batch, and labels that shift between batches."""
    module, adapter = make_base(tmp_path / "base"), read_adapter(tmp_path / "base")
    whole = draw(adapter, module, LABELS, sampling)
    for batch_size in (1, 5, 12, 100):
        torch.testing.assert_close(draw(adapter, module, LABELS, sampling, batch_size=batch_size), whole, rtol=1e-5,
                                   atol=1e-5)
    torch.testing.assert_close(draw(adapter, module, LABELS[:7], sampling), whole[:7], rtol=1e-5, atol=1e-5)
    assert torch.pdist(whole).min() > 1e-3  # control: no two samples are alike


def test_a_teacher_takes_guided_euler_steps(tmp_path):
    """Catches a wrong sign or step, condition and null exchanged, and a second pass that guidance 1 does not need."""
    module, adapter = make_base(tmp_path / "base"), read_adapter(tmp_path / "base")
    for scale, num_forwards in ((1.0, 5), (2.5, 10)):
        x = noise((2,), "initial noise")
        for k in range(5):
            s = torch.full((12,), 1 - k / 5)
            c, u = module(x, s, LABELS), module(x, s, torch.full((12,), 3))
            x = x - (u + scale * (c - u)) / 5
        seen = inputs_of(module)
        torch.testing.assert_close(draw(adapter, module, LABELS, Sampling(5, guidance=scale), seed=5), x, rtol=0,
                                   atol=2e-5)
        assert len(seen) == num_forwards
    guided = draw(adapter, module, LABELS, Sampling(1, guidance=8.0), seed=5)
    rescaled = draw(adapter, module, LABELS, Sampling(1, guidance=8.0, cfg_norm="scalar"), seed=5)
    start = noise((2,), "initial noise")
    assert (start - rescaled).norm() < 0.8 * (start - guided).norm()  # the velocity is no longer than the condition's


def test_samplings_that_make_no_sense():
    """Catches values of a hand-edited export.json or of the command line that would fail late or not at all."""
    for values, message in (({"steps": 0}, "steps must be 1 to 10000, got 0"), ({"steps": True}, "steps must be"),
                            ({"steps": 4.0}, "steps must be"), ({"steps": 10**6}, "steps must be"),
                            ({"shift": 0.0}, "shift must be a positive number"), ({"shift": "1"}, "shift must be"),
                            ({"guidance": float("nan")}, "guidance must be"), ({"mode": "heun"}, "mode 'heun': choose"),
                            ({"cfg_norm": "l2"}, "cfg_norm 'l2': choose"),
                            ({"mode": "sde", "guidance": 2.0}, "a student has learnt")):
        with pytest.raises(ValueError, match=message):
            Sampling(**{"steps": 4, **values})


# --- exports --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["mlp2d", "dit"])
def test_exports_of_all_parameters_sample_as_the_role_did(tmp_path, kind):
    """Catches weights of another role and another sampler than the config's, over the whole round trip."""
    base, adapter = make_base(tmp_path / "base", kind), read_adapter(tmp_path / "base")
    roles = full_run(tmp_path / "run", base, dmd_state(tmp_path / "base", student_steps=3, rollout="ode",
                                                       rollout_timestep_shift=2.0))
    for role in ("student", "student_ema"):
        export_hf(tmp_path / "run", tmp_path / role, role=role)
        _, module, sampling = load_student(tmp_path / role)
        assert sampling == Sampling(steps=3, mode="ode", shift=2.0)
        assert torch.equal(draw(adapter, module, LABELS, sampling),
                           draw(adapter, roles[role], LABELS, Sampling(3, "ode", 2.0)))


def test_the_adapters_state_travels_with_the_export(tmp_path):
    """Catches an architecture with a sampling state of its own that starts afresh: here one that refuses any."""
    base = make_base(tmp_path / "base")
    full_run(tmp_path / "run", base, dmd_state(tmp_path / "base") | {"sampling": {"cache": [1, 2]}})
    export_hf(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match="export.json: sampling: mlp2d keeps no sampling state, got cache"):
        load_student(tmp_path / "out")


@pytest.mark.parametrize("kind", ["mlp2d", "dit"])
def test_exported_adapters_sample_as_the_role_did(tmp_path, kind):
    """Catches a base, a scale or layers other than those trained, merged by the export or by the sampler."""
    base, adapter = make_base(tmp_path / "base", kind), read_adapter(tmp_path / "base")
    trained = lora_run(tmp_path / "run", base, dmd_state(tmp_path / "base", rank=3, alpha=1.5, student_steps=2),
                       kind=kind)
    for role in ("student", "student_ema"):
        export_hf(tmp_path / "run", tmp_path / f"{role}-hf", role=role)
        export_peft(tmp_path / "run", tmp_path / f"{role}-peft", role=role)
        with use(trained, role):
            wanted = draw(adapter, trained, LABELS, Sampling(2, "sde"))
        for form in ("hf", "peft"):
            found, module, sampling = load_student(tmp_path / f"{role}-{form}")
            assert (found.kind, sampling) == (kind, Sampling(2, "sde"))
            torch.testing.assert_close(draw(found, module, LABELS, sampling), wanted, rtol=1e-5, atol=1e-5)
        assert (draw(adapter, base, LABELS, Sampling(2, "sde")) - wanted).abs().max() > 0.05  # control


# --- the command ----------------------------------------------------------------------------------------------------

def command(*arguments) -> int:
    return main([str(argument) for argument in (*arguments, "--device", "cpu")])


def test_the_command(tmp_path, capsys):
    """Catches labels out of balance, files that the other tools cannot read, and options that have no effect."""
    base, adapter = make_base(tmp_path / "base", "dit"), read_adapter(tmp_path / "base")
    roles = full_run(tmp_path / "run", base, dmd_state(tmp_path / "base", student_steps=2))
    export_hf(tmp_path / "run", tmp_path / "out")
    student, cases = ("--export", tmp_path / "out"), {
        "plain": ((), LABELS, Sampling(2, "sde")),
        "steps": (("--steps", 4, "--mode", "ode"), LABELS, Sampling(4, "ode")),
        "labels": (("--labels", "2,0", "--batch-size", 5), labels_of(12, [2, 0]), Sampling(2, "sde"))}
    for name, (options, labels, sampling) in cases.items():
        out = tmp_path / "new" / f"{name}.npz"
        assert command(*student, "--out", out, "--num", 12, "--seed", 7, *options) == 0
        x, found = read_latents(out, num_classes=3)
        assert torch.equal(found, labels)
        wanted = draw(adapter, roles["student_ema"], labels, sampling, seed=7)
        torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)
    assert "12 samples of shape [1, 4, 4]: 2 steps (sde) at noise levels 1, 0.5, 0\n" in capsys.readouterr().out
    with np.load(tmp_path / "new" / "plain.npz") as archive:
        assert (archive["x"].dtype, archive["labels"].dtype) == (np.float32, np.int64)

    picture = tmp_path / "grid.png"
    assert command("--export", tmp_path / "base", "--out", tmp_path / "t.npz", "--png", picture, "--steps", 3,
                   "--guidance", 1.5) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and len(read_latents(tmp_path / "t.npz")[1]) == 64
    assert command("--export", tmp_path / "base", "--out", tmp_path / "t50.npz", "--num", 2) == 0
    assert "50 steps (euler)" in capsys.readouterr().out


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys):
    """Catches samples from damaged weights or another base, options without effect, and files written over."""
    base = make_base(tmp_path / "base")
    full_run(tmp_path / "run", base, dmd_state(tmp_path / "base"))
    lora_run(tmp_path / "lora-run", base, dmd_state(tmp_path / "base", rank=2))
    for name in ("good", "flipped", "steps", "mode"):
        export_hf(tmp_path / "run", tmp_path / name)
    export_peft(tmp_path / "lora-run", tmp_path / "lora")
    weights = bytearray((tmp_path / "flipped" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "flipped" / "model.safetensors").write_bytes(weights)
    edit(tmp_path / "steps" / "export.json", '"steps": 4', '"steps": 0')
    edit(tmp_path / "mode" / "export.json", '"mode": "sde"', '"mode": "euler"')
    make_base(tmp_path / "dit", "dit")
    (tmp_path / "old.npz").touch()
    listing = sorted(os.listdir(tmp_path))
    out = ("--out", tmp_path / "x.npz")
    cases = [
        (("flipped", *out), "model.safetensors: does not have the sha256 that export.json records"),
        (("steps", *out), "steps/export.json: sampling: steps must be"),
        (("mode", *out), "mode/export.json: sampling: mode 'euler' is a teacher's"),
        (("good", "--out", tmp_path / "old.npz"), "old.npz: exists"),
        (("good", *out, "--png", tmp_path / "old.npz"), "expected the name of a .png file"),
        (("good", "--out", tmp_path / "x.txt"), "expected the name of a .npz file"),
        (("good", *out, "--guidance", 2), "a student has learnt the guided teacher"),
        (("good", *out, "--base", tmp_path / "base"), "holds whole weights and needs no base"),
        (("lora", *out, "--base", tmp_path / "dit"), "dit: does not hold the weights that"),
        (("lora", *out, "--base", tmp_path / "gone"), "gone: the base model of"),
        (("base", *out, "--mode", "sde"), "--mode: "), (("base", *out, "--base", tmp_path / "dit"), "--base: "),
        (("base", *out, "--guidance", "nan"), "guidance must be a positive number"),
        (("base", *out, "--steps", 0), "steps must be 1 to 10000, got 0"),
        (("base", *out, "--num", 0), "--num 0: expected 1 to"), (("base", *out, "--num", 10**9), "--num 1000000000: "),
        (("base", *out, "--batch-size", 0), "--batch-size 0: "), (("base", *out, "--seed", -1), "--seed -1: "),
        (("base", *out, "--labels", "0,3"), "--labels 0,3: expected all, or classes 0 to 2 separated by commas"),
        (("base", *out, "--labels", "0,x"), "--labels 0,x: "), (("base", *out, "--labels", ""), "--labels : "),
        (("run", *out), "config.json: cannot be read"),
    ]
    for (folder, *arguments), message in cases:
        assert command("--export", tmp_path / folder, *arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("sample: ") and captured.err.count("\n") == 1, captured.err
        assert message in captured.err
        assert sorted(os.listdir(tmp_path)) == listing
    os.rename(tmp_path / "base", tmp_path / "moved")  # control: the right base in another place
    assert command("--export", tmp_path / "lora", *out) == 2
    assert command("--export", tmp_path / "lora", *out, "--base", tmp_path / "moved", "--num", 3) == 0


def test_samples_that_are_not_finite_are_not_written(tmp_path, capsys):
    """Catches a file of NaN from a student that diverges at a step it was not trained for."""
    base = make_base(tmp_path / "base")
    for parameter in base.parameters():
        parameter.mul_(1e20)
    full_run(tmp_path / "run", base, dmd_state(tmp_path / "base"))
    export_hf(tmp_path / "run", tmp_path / "out")
    assert command("--export", tmp_path / "out", "--out", tmp_path / "x.npz") == 2
    assert "out: gives samples that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()
