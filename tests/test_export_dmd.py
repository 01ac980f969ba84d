# SPDX-License-Identifier: Apache-2.0
"""Exports of job dmd: equal to what was trained, merged or as peft's adapter, recorded, and every refusal."""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distill_core import config as cfg
from distill_core.checkpoint import save
from distill_core.export import export_hf, export_peft, main, read_export
from distill_core.lora import inject, named_adapter, peft_config, peft_state, use
from distill_core.models.dit import DiT, DiTConfig
from distill_core.models.mlp2d import MLP2D, MLP2DConfig
from distill_core.safetensors_io import open_folder, read_tensor, weights_digest
from distill_core.train_flow import write_model

ROLES = ("student", "fake_score", "student_ema")
TARGETS = {"mlp2d": ["fc1", "modulation"], "dit": ["attn.qkv", "mlp.fc2"]}
SUCCESSES = {"student": 3, "fake_score": 15}


# --- checkpoints as train_dmd.py writes them ------------------------------------------------------------------------

def make_base(folder: Path, kind: str = "mlp2d", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A teacher folder and its module in fp32. No parameter is zero, as DiT's last layers are at first."""
    torch.manual_seed(0)
    module = MLP2D(MLP2DConfig(16, 2, 3)) if kind == "mlp2d" else DiT(DiTConfig(16, 2, 2, 4, 2, 1, 3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)).copy_(parameter.to(dtype))
    write_model(folder, module, {name: p.detach() for name, p in module.named_parameters()}, dtype=dtype)
    (folder / "LICENSE").write_text("L")
    return module.requires_grad_(False).eval()


def dmd_state(base: Path, *, rank: int = 0, alpha: float | None = None, successes: dict[str, int] | None = None,
              **dmd) -> dict:
    config = cfg.DMDConfig(name="tiny", max_cycles=3, teacher=cfg.DMDTeacherConfig(path=str(base)),
                           data=cfg.DMDDataConfig(conditions="c.npz"), dmd=cfg.DMDMethodConfig(**dmd),
                           lora=cfg.LoRAConfig(rank=rank, alpha=alpha))
    counts = {role: {"successes": number, "skips": 0, "skips_in_a_row": 0}
              for role, number in {**SUCCESSES, **(successes or {})}.items()}
    return {"job": "dmd", "step": 3, "attempt": 18, "position": 7, "roles": counts, "sampling": {},
            "config": dataclasses.asdict(config),
            "fingerprints": {"teacher.weights": weights_digest(open_folder(base))}}


def save_dmd(run: Path, weights: dict[str, dict[str, Tensor]], state: dict) -> Path:
    """weights: role -> name in the module -> tensor."""
    tensors = {f"{role}.{name}": tensor.detach() for role, own in weights.items() for name, tensor in own.items()}
    tensors |= {f"{role}.optimizer.exp_avg.{name}": torch.ones_like(tensor.detach())
                for role in SUCCESSES for name, tensor in weights[role].items()}
    return save(run / "checkpoints", 3, tensors, state)


def full_run(run: Path, base: nn.Module, state: dict) -> dict[str, nn.Module]:
    """A run that trained all parameters: its roles, each moved away from the base in its own way."""
    roles = {role: deepcopy(base) for role in ROLES}
    for number, module in enumerate(roles.values()):
        generator = torch.Generator().manual_seed(number)
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_dmd(run, {role: dict(module.named_parameters()) for role, module in roles.items()}, state)
    return roles


def lora_run(run: Path, base: nn.Module, state: dict, *, kind: str = "mlp2d", names: tuple[str, ...] = ROLES
             ) -> nn.Module:
    """A run that trained adapters, here on one base (both storages save the same): the module with all of them."""
    module = deepcopy(base)
    lora = state["config"]["lora"]
    inject(module, TARGETS[kind], rank=lora["rank"], alpha=lora["alpha"] or lora["rank"], adapters=names)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.3)
    save_dmd(run, {role: dict(named_adapter(module, name)) for role, name in zip(ROLES, names)}, state)
    return module.requires_grad_(False)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    index = open_folder(folder)
    return {name: read_tensor(index, name) for name in index.entries}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


def batch(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: at 1e-6 only the rounding of the written weights may show, not that of the forwards."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, *((2,) if kind == "mlp2d" else (1, 4, 4)), generator=generator)
    return x.double(), torch.rand(6, generator=generator, dtype=torch.float64), torch.arange(6) % 4


# --- what is written ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["mlp2d", "dit"])
def test_all_parameters_of_either_role(tmp_path, kind):
    """Catches another role's weights, optimizer state among them, a changed config.json or a touched checkpoint."""
    base = make_base(tmp_path / "base", kind)
    state = dmd_state(tmp_path / "base", student_steps=2, rollout="ode", rollout_timestep_shift=3.0)
    roles = full_run(tmp_path / "run", base, state)
    before = digests(tmp_path / "run")
    for asked, role in ((None, "student_ema"), ("student", "student"), ("student_ema", "student_ema")):
        out = tmp_path / f"out-{asked}"
        assert export_hf(tmp_path / "run", out, role=asked) == (role, 3)
        assert_same(tensors_of(out), dict(roles[role].named_parameters()))
        assert (out / "config.json").read_bytes() == (tmp_path / "base" / "config.json").read_bytes()
        assert sorted(os.listdir(out)) == ["LICENSE", "config.json", "export.json", "model.safetensors"]
        assert read_export(out) == {
            "format": "hf", "job": "dmd", "role": role, "cycle": 3, "successes": SUCCESSES,
            "base": {"path": str(tmp_path / "base"), "weights": weights_digest(open_folder(tmp_path / "base")),
                     "config": digests(tmp_path / "base")["config.json"]},
            "sampling": {"steps": 2, "mode": "ode", "shift": 3.0, "guidance": None, "state": {}},
            "files": {name: digests(out)[name] for name in ("config.json", "model.safetensors")}}
    assert digests(tmp_path / "run") == before
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_configs_export_role_is_the_default(tmp_path):
    """Catches a default that overrules dmd.export_role."""
    base = make_base(tmp_path / "base")
    roles = full_run(tmp_path / "run", base, dmd_state(tmp_path / "base", export_role="student"))
    assert export_hf(tmp_path / "run", tmp_path / "out").role == "student"
    assert_same(tensors_of(tmp_path / "out"), dict(roles["student"].named_parameters()))


@pytest.mark.parametrize("alpha", [None, 12.0])
@pytest.mark.parametrize("kind", ["mlp2d", "dit"])
def test_a_merged_adapter_predicts_what_the_adapter_did(tmp_path, kind, alpha):
    """Catches a wrong scale, another role's adapter, factors of another layer, and adapter keys in the weights."""
    base = make_base(tmp_path / "base", kind)
    trained = lora_run(tmp_path / "run", base, dmd_state(tmp_path / "base", rank=3, alpha=alpha), kind=kind)
    for role in ("student", "student_ema"):
        export_hf(tmp_path / "run", tmp_path / role, role=role)
        merged = deepcopy(base).double()
        merged.load_state_dict(tensors_of(tmp_path / role))  # strict: the base's names and no others
        with use(trained.double(), role):
            torch.testing.assert_close(merged(*batch(kind)), trained(*batch(kind)), rtol=0, atol=1e-6)
        assert (merged(*batch(kind)) - base.double()(*batch(kind))).abs().max() > 0.05  # control


def test_merged_weights_are_rounded_once(tmp_path):
    """Catches a merge in bf16, a base left in its own dtype where another is asked for, and a dtype in config.json."""
    base = make_base(tmp_path / "base", dtype=torch.bfloat16)
    trained = lora_run(tmp_path / "run", base, dmd_state(tmp_path / "base", rank=2, alpha=3.0))
    layer = trained.blocks[1].fc1
    exact = layer.weight + 1.5 * (layer.lora_B["student"] @ layer.lora_A["student"])
    for asked, dtype in ((None, torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        export_hf(tmp_path / "run", tmp_path / f"out-{asked}", role="student", dtype=asked)
        written = tensors_of(tmp_path / f"out-{asked}")
        assert {tensor.dtype for tensor in written.values()} == {dtype}
        assert torch.equal(written["blocks.1.fc1.weight"], exact.to(dtype))
        assert torch.equal(written["blocks.1.fc2.weight"].float(), base.blocks[1].fc2.weight)  # it had no adapter
        assert (tmp_path / f"out-{asked}" / "config.json").read_bytes() == (tmp_path / "base/config.json").read_bytes()


@pytest.mark.parametrize("names", [ROLES, ("a", "b", "c")])
def test_a_peft_folder_holds_the_adapter(tmp_path, names):
    """Catches names, settings or values that differ from those of lora.py, which the oracle below tests with peft."""
    base = make_base(tmp_path / "base")
    trained = lora_run(tmp_path / "run", base, dmd_state(tmp_path / "base", rank=3, alpha=1.5), names=names)
    for role, name in (("student", names[0]), ("student_ema", names[2])):
        out = tmp_path / role
        assert export_peft(tmp_path / "run", out, role=role) == (role, 3)
        assert_same(load_file(out / "adapter_model.safetensors"), peft_state(trained, name))
        assert json.loads((out / "adapter_config.json").read_text()) == peft_config(
            trained, base_model=str(tmp_path / "base"))
        files = ["adapter_config.json", "adapter_model.safetensors"]
        assert sorted(os.listdir(out)) == [*files, "export.json"]
        assert list(read_export(out)["files"]) == files and read_export(out)["format"] == "peft"


@pytest.mark.parametrize("kind", ["mlp2d", "dit"])
def test_peft_loads_the_adapter(tmp_path, kind):
    """Catches whatever another library reads differently: peft only warns about names that it does not know."""
    peft = pytest.importorskip("peft")
    base = make_base(tmp_path / "base", kind)
    trained = lora_run(tmp_path / "run", base, dmd_state(tmp_path / "base", rank=3, alpha=1.5), kind=kind)
    assert main(["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--format", "peft"]) == 0
    theirs = peft.PeftModel.from_pretrained(base.double(), tmp_path / "out").double()
    with use(trained.double(), "student_ema"):
        torch.testing.assert_close(theirs(*batch(kind)), trained(*batch(kind)), rtol=0, atol=1e-6)
    with theirs.disable_adapter():
        before = theirs(*batch(kind))
    assert (theirs(*batch(kind)) - before).abs().max() > 0.05  # control
    merged = theirs.merge_and_unload()
    export_hf(tmp_path / "run", tmp_path / "whole")
    for name, tensor in tensors_of(tmp_path / "whole").items():
        torch.testing.assert_close(merged.get_parameter(name).float(), tensor, rtol=0, atol=1e-6)


def test_an_exported_student_can_be_the_base_of_the_next_run(tmp_path):
    """Catches its export.json in the copy, which would describe other weights."""
    base = make_base(tmp_path / "base")
    full_run(tmp_path / "run", base, dmd_state(tmp_path / "base"))
    export_hf(tmp_path / "run", tmp_path / "first")
    roles = full_run(tmp_path / "next", base, dmd_state(tmp_path / "first", student_steps=1))
    export_hf(tmp_path / "next", tmp_path / "second", role="student")
    assert_same(tensors_of(tmp_path / "second"), dict(roles["student"].named_parameters()))
    assert read_export(tmp_path / "second")["sampling"]["steps"] == 1


# --- verification ---------------------------------------------------------------------------------------------------

def test_a_changed_export_is_refused(tmp_path):
    """Catches a flipped bit that safetensors loads without a word, a config of another model, and a planted index."""
    base = make_base(tmp_path / "base")
    full_run(tmp_path / "run", base, dmd_state(tmp_path / "base"))

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    changes = {"model.safetensors": flip, "config.json": flip, "model.safetensors.index.json": Path.touch,
               "other.safetensors": Path.touch, "adapter_config.json": Path.touch}
    for name, change in changes.items():
        out = tmp_path / f"out-{name}"
        export_hf(tmp_path / "run", out)
        read_export(out)  # control
        change(out / name)
        with pytest.raises(ValueError, match=f"{name}: does not have the sha256 that export.json records"):
            read_export(out)
    (tmp_path / "out-config.json" / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json: does not have the sha256"):
        read_export(tmp_path / "out-config.json")
    for content, message in ((b"{", "not valid JSON"), (b"[]", "expected a JSON object"), (b"{}", "lists no files")):
        (out / "export.json").write_bytes(content)
        with pytest.raises(ValueError, match=f"export.json: .*{message}"):
            read_export(out)


# --- refusals -------------------------------------------------------------------------------------------------------

def refuse(capsys, *arguments) -> str:
    """The one line that a failing command prints."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("export: ") and captured.err.count("\n") == 1
    return captured.err


def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys):
    """Catches exports of the teacher or the fake score, of untrained or broken roles, and over the wrong base."""
    base = make_base(tmp_path / "base")
    state = dmd_state(tmp_path / "base")
    full_run(tmp_path / "full", base, state)
    lora_run(tmp_path / "lora", base, dmd_state(tmp_path / "base", rank=2))
    for role in SUCCESSES:
        full_run(tmp_path / f"no-{role}", base, dmd_state(tmp_path / "base", successes={role: 0}))
    broken = deepcopy(base)
    broken.blocks[0].fc1.weight[0, 0] = float("inf")
    full_run(tmp_path / "inf", broken, state)
    lora_run(tmp_path / "lora-inf", broken, dmd_state(tmp_path / "base", rank=2))
    make_base(tmp_path / "dit", "dit")
    other = deepcopy(base)
    for parameter in other.parameters():
        parameter.mul_(1.01)
    write_model(tmp_path / "other", other, dict(other.named_parameters()), dtype=torch.float32)
    lora_run(tmp_path / "lora-nan", base, dmd_state(tmp_path / "base", rank=2, alpha=1e300))
    listing, out = sorted(os.listdir(tmp_path)), ("--out", tmp_path / "out")
    untrained = "has had no successful step"
    cases = [
        (("full", "--role", "teacher"), "role 'teacher' is not exported; choose one of student, student_ema"),
        (("full", "--role", "fake_score"), "role 'fake_score' is not exported"),
        (("full", "--role", "discriminator"), "role 'discriminator' is not exported"),
        (("no-student",), f"role student {untrained}"), (("no-fake_score",), f"role fake_score {untrained}"),
        (("no-fake_score", "--role", "student"), f"role fake_score {untrained}"),
        (("full", "--format", "peft"), "holds all parameters of student_ema, no LoRA adapter; choose --format hf"),
        (("full", "--base", tmp_path / "dit"), "does not fit its base model"),
        (("inf",), "student_ema.blocks.0.fc1.weight has values that are not finite in torch.float32"),
        (("lora-nan",), "student_ema.blocks.0.fc1.weight has values that are not finite in torch.float32"),
        (("lora", "--base", tmp_path / "other"), "other: does not hold the weights that the adapters of"),
        (("lora", "--format", "peft", "--base", tmp_path / "other"), "other: does not hold the weights"),
        (("lora", "--base", tmp_path / "gone"), "gone: the base model of role student_ema is not there"),
    ]
    for (run, *arguments), message in cases:
        assert message in refuse(capsys, "--checkpoint", tmp_path / run, *out, *arguments), (run, arguments)
        assert sorted(os.listdir(tmp_path)) == listing
    os.rename(tmp_path / "base", tmp_path / "moved")  # control: the same weights in another place
    assert main(["--checkpoint", str(tmp_path / "lora"), *map(str, out), "--base", str(tmp_path / "moved")]) == 0
    assert re.fullmatch(r"wrote student_ema of step 3 to .*out\n", capsys.readouterr().out)
