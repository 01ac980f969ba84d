# SPDX-License-Identifier: Apache-2.0
"""Export: equal to the trained weights in transformers, files copied byte for byte, and every refusal."""
from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distill_core.checkpoint import save
from distill_core.export import export_hf, main
from distill_core.safetensors_io import open_folder, read_tensor, write_folder

FILES = {"tokenizer.json": b'{"a": 1}\r\n', "tokenizer_config.json": b"{}", "merges.txt": b"a b", "LICENSE": b"L",
         "chat_template.jinja": b"{{ x }}", "generation_config.json": b'{"eos_token_id": [1, 2]}'}
NOT_EXPORTED = {"pytorch_model.bin": b"old weights", "modeling_evil.py": b"import os", "model.onnx": b"x"}
CONFIG = {"model_type": "llama", "kept": "\u00e9"}
NAMES = {"model.embed_tokens.weight": (7, 4), "model.norm.weight": (4,), "lm_head.weight": (7, 4)}


def base_folder(folder: Path, config: dict | None = None, *, dtype: torch.dtype = torch.float32) -> Path:
    """A model folder of a few tensors, enough for all that does not need transformers."""
    weights = [(name, torch.zeros(shape, dtype=dtype)) for name, shape in NAMES.items()]
    write_folder(folder, weights, max_shard_bytes=150)
    add_files(folder)
    (folder / "config.json").write_bytes(json.dumps(CONFIG | (config or {})).encode())
    return folder


def add_files(folder: Path) -> None:
    for name, content in {**FILES, **NOT_EXPORTED}.items():
        (folder / name).write_bytes(content)


def trained(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def run_state(base: Path, successes: int = 3) -> dict:
    return {"roles": {"student": {"successes": successes, "skips": 0}}, "config": {"student": {"path": str(base)}}}


def save_run(run: Path, base: Path, weights: dict[str, Tensor], *, step: int = 3, successes: int = 3) -> Path:
    tensors = {f"student.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"student.optimizer.exp_avg.{name}": torch.ones_like(tensor) for name, tensor in weights.items()}
    return save(run / "checkpoints", step, tensors, run_state(base, successes))


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


def exported(folder: Path) -> dict[str, Tensor]:
    index = open_folder(folder)
    return {name: read_tensor(index, name) for name in index.entries}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, msg=name)


# --- against transformers -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [True, False])
def test_transformers_gives_the_trained_models_logits(tmp_path, tied):
    """Catches wrong names, an lm_head beside a tied embedding, rows lost between shards (checkpoint of 3 ranks)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base", max_shard_size="8KB")
    add_files(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert ("lm_head.weight" in weights) != tied

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        tensors = {f"student.{name}": distribute_tensor(tensor, mesh, (Shard(0),)) for name, tensor in weights.items()}
        save(tmp_path / "run" / "checkpoints", 3, tensors, run_state(tmp_path / "base"), group=dist.group.WORLD)

    run_ranks(body, 3)
    export_hf(tmp_path / "run", tmp_path / "out")
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert set(exported(tmp_path / "out")) == set(weights)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        expected, actual = model(tokens).logits, loaded.eval()(tokens).logits
        before = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert (before - expected).abs().max() > 0.1  # control: the base model would not pass


# --- files and dtypes -----------------------------------------------------------------------------------------------

def test_small_files_are_copied_and_the_checkpoint_is_not_touched(tmp_path):
    """Catches rewritten tokenizer files, old weights or code that travel along, and writes into the checkpoint."""
    base, weights = base_folder(tmp_path / "base"), trained(NAMES)
    folder = save_run(tmp_path / "run", base, weights)
    before = digests(tmp_path / "run")
    for number, source in enumerate((tmp_path / "run", tmp_path / "run" / "checkpoints", folder)):
        out = tmp_path / f"out{number}"
        assert export_hf(source, out).step == 3
        assert_same(exported(out), weights)
        copied = {name: (out / name).read_bytes() for name in os.listdir(out) if not name.startswith("model")}
        assert copied == FILES | {"config.json": (base / "config.json").read_bytes()}
    assert digests(tmp_path / "run") == before
    assert sorted(os.listdir(tmp_path)) == ["base", "out0", "out1", "out2", "run"]  # no staging folder is left


def test_dtypes_are_those_of_the_base_or_as_asked(tmp_path):
    """Catches fp32 master weights exported over a bf16 model, and a config that claims another dtype."""
    weights = trained(NAMES)
    cases = [({"torch_dtype": "bfloat16"}, None, torch.bfloat16, {"torch_dtype": "bfloat16"}),
             ({"torch_dtype": "bfloat16"}, "bfloat16", torch.bfloat16, {"torch_dtype": "bfloat16"}),
             ({"dtype": "bfloat16"}, "float32", torch.float32, {"dtype": "float32"}),
             ({}, "float32", torch.float32, {"torch_dtype": "float32"})]
    for number, (recorded, asked, dtype, expected) in enumerate(cases):
        base = base_folder(tmp_path / f"base{number}", recorded, dtype=torch.bfloat16)
        save_run(tmp_path / f"run{number}", base, weights)
        out = tmp_path / f"out{number}"
        export_hf(tmp_path / f"run{number}", out, dtype=asked)
        assert_same(exported(out), {name: tensor.to(dtype) for name, tensor in weights.items()})
        config = json.loads((out / "config.json").read_text())
        assert config == CONFIG | expected
        same = recorded == expected
        assert ((out / "config.json").read_bytes() == (base / "config.json").read_bytes()) == same


def test_a_base_that_repeats_its_tied_head_is_exported_without_it(tmp_path):
    """Catches a second head: transformers reports shared memory, others load the stale one."""
    base = base_folder(tmp_path / "base", {"tie_word_embeddings": True})
    weights = {name: tensor for name, tensor in trained(NAMES).items() if name != "lm_head.weight"}
    save_run(tmp_path / "run", base, weights)
    export_hf(tmp_path / "run", tmp_path / "out")
    assert_same(exported(tmp_path / "out"), weights)
    [single] = (tmp_path / "out").glob("*.safetensors")  # the index of the base's two shards was not copied
    assert single.name == "model.safetensors" and load_file(single).keys() == weights.keys()


def test_the_newest_whole_checkpoint_of_a_run_is_taken(tmp_path, capsys):
    """Catches an export of a damaged step: a run folder falls back, the step folder itself is an error."""
    base = base_folder(tmp_path / "base")
    save_run(tmp_path / "run", base, trained(NAMES), step=3)
    newest = save_run(tmp_path / "run", base, trained(NAMES), step=4)
    (newest / "shard_00000.safetensors").write_bytes(b"")
    assert export_hf(tmp_path / "run", tmp_path / "out").step == 3
    with pytest.raises(ValueError, match="step_00000004/shard_00000.safetensors: has 0 bytes"):
        export_hf(newest, tmp_path / "other")


# --- refusals -------------------------------------------------------------------------------------------------------

def refuse(capsys, *arguments: str) -> str:
    """The one line that a failing command prints."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("export: ") and captured.err.count("\n") == 1
    return captured.err


def test_refusals_are_one_line_and_leave_nothing(tmp_path, capsys):
    """Catches an export over existing files, of an untrained role, of an unknown one, or into the checkpoint."""
    base = base_folder(tmp_path / "base")
    folder = save_run(tmp_path / "run", base, trained(NAMES))
    untrained = save_run(tmp_path / "untrained", base, trained(NAMES), successes=0)
    save_run(tmp_path / "moved", tmp_path / "gone", trained(NAMES))
    save_run(tmp_path / "nan", base, trained(NAMES) | {"model.norm.weight": torch.full((4,), float("nan"))})
    (tmp_path / "empty").mkdir()
    listing = sorted(os.listdir(tmp_path))
    out = ("--out", tmp_path / "out")
    cases = [((tmp_path / "run", "--out", tmp_path / "empty"), "empty: exists"),
             ((untrained, *out), "role student has had no successful step"),
             ((folder, *out, "--role", "teacher"), "no role 'teacher'; choose one of student"),
             ((folder, *out, "--format", "gguf"), "--format gguf: choose one of hf, peft"),
             ((folder, *out, "--format", "peft"), "holds all parameters of student, no LoRA adapter; choose --format"),
             ((folder, *out, "--dtype", "float16"), "--dtype float16: choose one of float32, bfloat16"),
             ((folder, "--out", folder / "hf"), "lies in the checkpoint"),
             ((tmp_path / "absent", *out), "no such folder"), ((tmp_path / "empty", *out), "holds no step_XXXXXXXX"),
             ((tmp_path / "run" / "checkpoints" / "step_00000009", *out), "cannot be read"),
             ((tmp_path / "moved", *out), "gone: the base model of role student is not there; give its folder with"),
             ((tmp_path / "nan", *out), "student.model.norm.weight has values that are not finite")]
    for (source, *arguments), message in cases:
        assert message in refuse(capsys, "--checkpoint", source, *arguments)
        assert sorted(os.listdir(tmp_path)) == listing and not (folder / "hf").exists()
    remedy = main(["--checkpoint", str(tmp_path / "moved"), *map(str, out), "--base", str(base)])
    assert remedy == 0  # the control, too
    assert_same(exported(tmp_path / "out"), trained(NAMES))


def test_a_base_that_does_not_fit_is_refused(tmp_path):
    """Catches weights of one model under the config of another: a name too many, one too few, another shape."""
    base = base_folder(tmp_path / "base")
    cases = [(trained(NAMES | {"model.more.weight": (2,)}), "lacks 1 tensor.s. .model.more.weight"),
             ({"model.embed_tokens.weight": torch.ones(7, 4), "model.norm.weight": torch.ones(4)},
              "has 1 tensor.s. .lm_head"),
             (trained(NAMES | {"lm_head.weight": (8, 4)}), r"lm_head.weight is \[7, 4\] in model-")]
    for number, (weights, message) in enumerate(cases):
        save_run(tmp_path / f"run{number}", base, weights)
        with pytest.raises(ValueError, match=message):
            export_hf(tmp_path / f"run{number}", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, monkeypatch, capsys):
    """Catches an entry point that needs a process group or a current folder of its own, and a wrong exit code."""
    save_run(tmp_path / "run", base_folder(tmp_path / "base"), trained(NAMES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "distill_core.export")
    monkeypatch.setattr(sys, "argv", ["export.py", "--checkpoint", "run", "--out", "deep/out"])
    for code, out, err in ((0, "wrote student of step 3 to deep/out\n", ""),
                           (2, "", "export: deep/out: exists; choose another --out or remove it\n")):
        with pytest.raises(SystemExit) as caught:
            runpy.run_module("distill_core.export", run_name="__main__")
        assert (caught.value.code, *capsys.readouterr()) == (code, out, err)
    assert_same(exported(tmp_path / "deep" / "out"), trained(NAMES))
