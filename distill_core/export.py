# SPDX-License-Identifier: Apache-2.0
"""Writes a role of a checkpoint as a folder that other programs load: whole weights, or a LoRA adapter.

    python -m distill_core.export --checkpoint runs/NAME --out NAME-hf
    python -m distill_core.export --checkpoint runs/NAME --out NAME-lora --format peft     # lora.rank > 0

DIR is a run folder, its checkpoints folder (then the newest checkpoint that verifies is taken) or one step folder. One
process on CPU holds one shard at a time, and the checkpoint is only read.

hf: the names of the base model and, unless --dtype is given, its dtypes, adapters merged into it; every small file
beside the base's weights (config, tokenizer, licence) is copied. peft: adapter_model.safetensors, adapter_config.json.
A job dmd folder also gets export.json: role, cycle, successful steps, base model, how to sample (`distill_core.sample`
reads it; the levels are the adapter's student_grid(steps, shift)), and the sha256 of each file that makes the model.
"""
from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from distill_core.checkpoint import MANIFEST, STEP_NAME, Checkpoint, find_latest, open_checkpoint
from distill_core.checkpoint import read_tensor as read_saved
from distill_core.lora import inject, merged_weight, peft_config
from distill_core.safetensors_io import (TensorIndex, check_tensors, open_folder, read_json, read_tensor, shown,
                                         weights_digest, write_folder)

FORMATS = ("hf", "peft")
DMD_ROLES = ("student", "student_ema")
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RECORD, ADAPTER_WEIGHTS, ADAPTER_CONFIG = "export.json", "adapter_model.safetensors", "adapter_config.json"
HASHED = ("config.json", ADAPTER_CONFIG, "*.safetensors", "*.safetensors.index.json")
COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "*.md", "LICENSE*", "NOTICE*")
NOT_COPIED = ("*.index.json", ADAPTER_CONFIG, RECORD, ".*")  # they describe weight files that the copy does not have
CHUNK_BYTES = 16 << 20


class Exported(NamedTuple):
    role: str
    step: int


@dataclass(frozen=True)
class _Source:
    """A role of a verified checkpoint over its base model.

    layers: adapted layer -> name of its adapter; empty where the checkpoint holds all parameters of the role.
    """
    checkpoint: Checkpoint
    role: str
    index: TensorIndex
    layers: dict[str, str]

    def factor(self, path: str, side: str) -> Tensor:
        """lora_A [R, in] or lora_B [out, R] of a layer."""
        return read_saved(self.checkpoint, f"{self.role}.{path}.{side}.{self.layers[path]}")


# ---------------------------------------------------------------------------------------------------------------------
# Write

def export_hf(checkpoint: str | Path, out: str | Path, *, role: str | None = None, dtype: str | None = None,
              base: str | Path | None = None) -> Exported:
    """Writes the whole weights of a role of `checkpoint` to the new folder `out`.

    checkpoint: run, checkpoints or step folder. role: None is the student, of a job dmd its dmd.export_role. dtype:
    "float32" | "bfloat16"; None keeps each tensor's dtype of the base model. base: the folder that training started
    from, if it is no longer where the checkpoint's config says. ValueError: unverified checkpoint, unknown role, a role
    that was never updated, values that are not finite, existing `out`, unfitting base.
    """
    source = _open_source(checkpoint, out, role, dtype, base)
    names = list(source.index.entries) if source.layers else _names_to_write(source)
    is_dmd = _is_dmd(source.checkpoint)
    with _staged(Path(out)) as staging:
        write_folder(staging, _whole_weights(source, names, dtype))
        _copy_small_files(source.index.folder, staging, None if is_dmd else dtype)  # a flow model's names no dtype
        if is_dmd:
            _write_record(source, staging, "hf")
    return Exported(source.role, source.checkpoint.step)


def export_peft(checkpoint: str | Path, out: str | Path, *, role: str | None = None, dtype: str | None = None,
                base: str | Path | None = None) -> Exported:
    """Writes the LoRA adapter of a role as peft reads it. Arguments and errors as `export_hf`; dtype None is fp32.

    ValueError for a checkpoint of a run that trained all parameters.
    """
    source = _open_source(checkpoint, out, role, dtype, base)
    if not source.layers:
        raise ValueError(f"--format peft: {source.checkpoint.folder} holds all parameters of {source.role}, no LoRA "
                         f"adapter; choose --format hf")
    config = json.dumps(_adapter_config(source), indent=2).encode() + b"\n"
    tensors = {f"base_model.model.{path}.{side}.weight": _checked(source, f"{path}.{side}", source.factor(path, side),
                                                                  EXPORT_DTYPES[dtype or "float32"])
               for path in source.layers for side in ("lora_A", "lora_B")}
    with _staged(Path(out)) as staging:
        _write(staging / ADAPTER_WEIGHTS, safetensors_bytes(tensors, {"format": "pt"}))
        _write(staging / ADAPTER_CONFIG, config)
        _write_record(source, staging, "peft")
    return Exported(source.role, source.checkpoint.step)


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, which gets that name when the block ends well and vanishes otherwise."""
    staging = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    try:
        os.makedirs(staging)
        yield staging
        _sync(staging)
        os.rename(staging, out)
        _sync(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _names_to_write(source: _Source) -> list[str]:
    """Names of the base model, in its order. A base may repeat a tied head or hold buffers: these are not written."""
    checkpoint, index, role = source.checkpoint, source.index, source.role
    weights = {name: torch.empty(checkpoint.tensors[f"{role}.{name}"].shape, device="meta")
               for name in _own_names(checkpoint, role)}
    tied = read_json(index.folder / "config.json", remedy="give another --base").get("tie_word_embeddings")
    try:
        check_tensors(index, weights, allow_extra=lambda name: name.endswith("rotary_emb.inv_freq")
                      or (bool(tied) and name == "lm_head.weight"))
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: does not fit its base model ({error}); give the folder that training "
                         f"started from with --base") from None
    return [name for name in index.entries if name in weights]


def _whole_weights(source: _Source, names: Sequence[str], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        target = EXPORT_DTYPES[dtype] if dtype else source.index.entries[name].dtype
        yield name, _checked(source, name, _trained(source, name), target)


def _trained(source: _Source, name: str) -> Tensor:
    """One tensor of the role, in at least fp32 where an adapter is merged, so that it is rounded once."""
    if not source.layers:
        return read_saved(source.checkpoint, f"{source.role}.{name}")
    weight, path = read_tensor(source.index, name), name.removesuffix(".weight")
    if path not in source.layers or path == name:
        return weight
    rank, alpha = _rank_and_alpha(source.checkpoint)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return merged_weight(wide, source.factor(path, "lora_A"), source.factor(path, "lora_B"), alpha / rank)


def _checked(source: _Source, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{source.checkpoint.folder}: {source.role}.{name} has values that are not finite in {dtype}; "
                         f"export an earlier checkpoint, or with --dtype float32")
    return tensor


def _adapter_config(source: _Source) -> dict[str, Any]:
    """What lora.peft_config says of a model with these layers; only their list depends on the model."""
    rank, alpha = _rank_and_alpha(source.checkpoint)
    any_model = nn.ModuleDict({"layer": nn.Linear(1, 1)})
    inject(any_model, ["layer"], rank=rank, alpha=alpha)
    return peft_config(any_model, base_model=str(source.index.folder)) | {"target_modules": sorted(source.layers)}


def _write_record(source: _Source, folder: Path, kind: str) -> None:
    state, index = source.checkpoint.state, source.index
    dmd = state["config"]["dmd"]
    record = {
        "format": kind, "job": "dmd", "role": source.role, "cycle": source.checkpoint.step,
        "successes": {role: counts["successes"] for role, counts in state["roles"].items()},
        "base": {"path": str(index.folder), "weights": weights_digest(index),
                 "config": _sha256(index.folder / "config.json")},
        # guidance is a part of what the student has learnt; `state` is what the adapter keeps between samples
        "sampling": {"steps": dmd["student_steps"], "mode": dmd["rollout"], "shift": dmd["rollout_timestep_shift"],
                     "guidance": None, "state": state["sampling"]},
        "files": _hashes(folder),
    }
    _write(folder / RECORD, json.dumps(record, indent=2, allow_nan=False).encode() + b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# What is exported

def _open_source(checkpoint: str | Path, out: str | Path, role: str | None, dtype: str | None,
                 base: str | Path | None) -> _Source:
    """Everything that can be refused before a tensor is read."""
    out = Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out}: exists; choose another --out or remove it")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ValueError(f"--dtype {dtype}: choose one of {', '.join(EXPORT_DTYPES)}")
    found = _find(Path(checkpoint))
    if out.resolve().is_relative_to(found.folder.resolve()):
        raise ValueError(f"{out}: lies in the checkpoint {found.folder}; choose another --out")
    if role is None:
        role = found.state["config"]["dmd"]["export_role"] if _is_dmd(found) else "student"
    _check_role(found, role)
    index = open_folder(_base_folder(found, role, base))
    layers = _adapted_layers(found, role)
    if layers:
        _check_base(found, index)
    return _Source(found, role, index, layers)


def _find(folder: Path) -> Checkpoint:
    if STEP_NAME.fullmatch(folder.name) or (folder / MANIFEST).exists():
        return open_checkpoint(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a run folder or a step folder")
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    found = find_latest(root)
    if found is None:
        raise ValueError(f"{root}: holds no step_XXXXXXXX folder; give a run folder in which a checkpoint was saved")
    return found


def _is_dmd(checkpoint: Checkpoint) -> bool:
    return checkpoint.state.get("job") == "dmd"


def _check_role(checkpoint: Checkpoint, role: str) -> None:
    roles = checkpoint.state.get("roles", {})
    if _is_dmd(checkpoint):
        if role not in DMD_ROLES:
            raise ValueError(f"{checkpoint.folder}: role {role!r} is not exported; choose one of "
                             f"{', '.join(DMD_ROLES)}")
        needed = ("student", "fake_score")  # a student that followed an untrained fake score has learnt nothing
    else:
        if role not in roles:
            raise ValueError(f"{checkpoint.folder}: has no role {role!r}; choose one of {', '.join(roles) or 'none'}")
        needed = (role,)
    for name in needed:
        if not roles[name]["successes"]:
            raise ValueError(f"{checkpoint.folder}: role {name} has had no successful step, so it equals its base "
                             f"model; export a later checkpoint")


def _base_folder(checkpoint: Checkpoint, role: str, base: str | Path | None) -> Path:
    section = "teacher" if _is_dmd(checkpoint) else role
    folder = Path(base if base is not None else checkpoint.state["config"][section]["path"])
    if not folder.is_dir():
        raise ValueError(f"{folder}: the base model of role {role} is not there; give its folder with --base")
    return folder


def _check_base(checkpoint: Checkpoint, index: TensorIndex) -> None:
    if weights_digest(index) != checkpoint.state["fingerprints"]["teacher.weights"]:
        raise ValueError(f"{index.folder}: does not hold the weights that the adapters of {checkpoint.folder} were "
                         f"trained on; give the folder that training started from with --base")


def _own_names(checkpoint: Checkpoint, role: str) -> list[str]:
    """Names of the role's tensors without the optimizer's, and without the role."""
    return [name.removeprefix(f"{role}.") for name in checkpoint.tensors
            if name.startswith(f"{role}.") and not name.startswith(f"{role}.optimizer.")]


def _adapted_layers(checkpoint: Checkpoint, role: str) -> dict[str, str]:
    matches = [re.fullmatch(r"(.+)\.lora_[AB]\.(\w+)", name) for name in _own_names(checkpoint, role)]
    assert all(matches) or not any(matches), f"{checkpoint.folder}: {role} has adapters and other tensors"
    return {match[1]: match[2] for match in matches if match}


def _rank_and_alpha(checkpoint: Checkpoint) -> tuple[int, float]:
    lora = checkpoint.state["config"]["lora"]
    return lora["rank"], lora["rank"] if lora["alpha"] is None else lora["alpha"]


# ---------------------------------------------------------------------------------------------------------------------
# Read

def read_export(folder: str | Path) -> dict[str, Any]:
    """The export.json of a folder, after the sha256 of every file that makes the model has been compared with it.

    ValueError, naming the file: not readable, changed, missing, or a weight file that was not there at the export.
    """
    folder = Path(folder)
    record = read_json(folder / RECORD, remedy="export again")
    recorded, found = record.get("files"), _hashes(folder)
    if not isinstance(recorded, dict):
        raise ValueError(f"{folder / RECORD}: lists no files; export again")
    for name in sorted(recorded.keys() | found.keys()):
        if recorded.get(name) != found.get(name):
            raise ValueError(f"{folder}/{shown(name)}: does not have the sha256 that {RECORD} records; it was changed, "
                             f"added or lost after the export; export again")
    return record


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: _sha256(path) for pattern in HASHED for path in sorted(folder.glob(pattern))}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Files

def _copy_small_files(source: Path, out: Path, dtype: str | None) -> None:
    """Byte for byte, but for the dtype that config.json names.

    A link is followed inside the folder and to the blobs of a Hugging Face cache, or refused: what it leads to would be
    published with the model, and nobody would look for a private key in its README.
    """
    homes = (source.resolve(), source.parent.parent.resolve() / "blobs")
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch.fnmatch(path.name, pattern) for pattern in COPIED)
        if wanted and path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in NOT_COPIED):
            if path.resolve().parent not in homes:
                raise ValueError(f"{path}: is a link out of the model folder; put a copy in its place")
            content = path.read_bytes()
            if path.name == "config.json" and dtype is not None:
                content = _with_dtype(content, dtype)
            _write(out / path.name, content)


def _with_dtype(config: bytes, dtype: str) -> bytes:
    values: dict[str, Any] = json.loads(config)
    keys = [key for key in ("torch_dtype", "dtype") if key in values] or ["torch_dtype"]  # transformers 5 reads both
    if all(values.get(key) == dtype for key in keys):
        return config
    return json.dumps(values | dict.fromkeys(keys, dtype), indent=2, ensure_ascii=False).encode() + b"\n"


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m distill_core.export", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="run folder, or one step folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder to write")
    parser.add_argument("--role", help="role to export (default: student; job dmd: dmd.export_role of its config)")
    parser.add_argument("--format", default="hf", help="hf (default): whole weights; peft: the LoRA adapter alone")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: as in the base model; peft: float32)")
    parser.add_argument("--base", metavar="DIR", help="base model (default: where the checkpoint's config says)")
    args = parser.parse_args(argv)
    try:
        if args.format not in FORMATS:
            raise ValueError(f"--format {args.format}: choose one of {', '.join(FORMATS)}")
        write = export_hf if args.format == "hf" else export_peft
        exported = write(args.checkpoint, args.out, role=args.role, dtype=args.dtype, base=args.base)
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"wrote {exported.role} of step {exported.step} to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
