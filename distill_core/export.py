# SPDX-License-Identifier: Apache-2.0
"""Writes a role of a checkpoint as a Hugging Face folder that transformers, vLLM and others load.

    python -m distill_core.export --checkpoint runs/NAME --out NAME-hf

DIR is a run folder, its checkpoints folder (then the newest checkpoint that verifies is taken) or one step folder. The
weights get the names of the base model and, unless --dtype is given, its dtypes; every small file beside the base's
weights (config, tokenizer, licence) is copied. One process on CPU holds one shard at a time, and the checkpoint is only
read.
"""
from __future__ import annotations

import argparse
import fnmatch
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill_core.checkpoint import MANIFEST, STEP_NAME, Checkpoint, find_latest, open_checkpoint, read_tensor
from distill_core.safetensors_io import TensorIndex, check_tensors, open_folder, write_folder

FORMATS = ("hf",)
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "*.md", "LICENSE*", "NOTICE*")
NOT_COPIED = ("*.index.json", "adapter_config.json", ".*")  # they describe weight files that the copy does not have


def export_hf(checkpoint: str | Path, out: str | Path, *, role: str = "student", dtype: str | None = None,
              base: str | Path | None = None) -> Checkpoint:
    """Writes `role` of `checkpoint` to the new folder `out`; returns the checkpoint that was exported.

    checkpoint: run, checkpoints or step folder. dtype: "float32" | "bfloat16"; None keeps each tensor's dtype of the
    base model. base: the folder that training started from, if it is no longer where the checkpoint's config says.
    ValueError: unverified checkpoint, unknown role, a role that was never updated, existing `out`, unfitting base.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise ValueError(f"{out}: exists; choose another --out or remove it")
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ValueError(f"--dtype {dtype}: choose one of {', '.join(EXPORT_DTYPES)}")
    found = _find(Path(checkpoint))
    if out.resolve().is_relative_to(found.folder.resolve()):
        raise ValueError(f"{out}: lies in the checkpoint {found.folder}; choose another --out")
    _check_role(found, role)
    index = open_folder(_base_folder(found, role, base))
    names = _names_to_write(found, index, role)
    staging = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    try:
        write_folder(staging, _converted(found, index, names, role, dtype))
        _copy_small_files(index.folder, staging, dtype)
        os.rename(staging, out)
        _sync(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return found


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


def _check_role(checkpoint: Checkpoint, role: str) -> None:
    roles = checkpoint.state.get("roles", {})
    if role not in roles:
        raise ValueError(f"{checkpoint.folder}: has no role {role!r}; choose one of {', '.join(roles) or 'none'}")
    if not roles[role]["successes"]:
        raise ValueError(f"{checkpoint.folder}: role {role} has had no successful step, so it equals its base model; "
                         f"export a later checkpoint")


def _base_folder(checkpoint: Checkpoint, role: str, base: str | Path | None) -> Path:
    folder = Path(base if base is not None else checkpoint.state["config"][role]["path"])
    if not folder.is_dir():
        raise ValueError(f"{folder}: the base model of role {role} is not there; give its folder with --base")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); give another --base") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object; give another --base")
    return value


def _names_to_write(checkpoint: Checkpoint, index: TensorIndex, role: str) -> list[str]:
    """Names of the base model, in its order. A base may repeat a tied head or hold buffers: these are not written."""
    weights = {name.removeprefix(f"{role}."): torch.empty(saved.shape, device="meta")
               for name, saved in checkpoint.tensors.items()
               if name.startswith(f"{role}.") and not name.startswith(f"{role}.optimizer.")}
    tied = _read_json(index.folder / "config.json").get("tie_word_embeddings")
    try:
        check_tensors(index, weights, allow_extra=lambda name: name.endswith("rotary_emb.inv_freq")
                      or (bool(tied) and name == "lm_head.weight"))
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: does not fit its base model ({error}); give the folder that training "
                         f"started from with --base") from None
    return [name for name in index.entries if name in weights]


def _converted(checkpoint: Checkpoint, index: TensorIndex, names: Sequence[str], role: str,
               dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        target = EXPORT_DTYPES[dtype] if dtype else index.entries[name].dtype
        tensor = read_tensor(checkpoint, f"{role}.{name}").to(target)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{checkpoint.folder}: {role}.{name} has values that are not finite in {target}; export "
                             f"an earlier checkpoint, or with --dtype float32")
        yield name, tensor


def _copy_small_files(source: Path, out: Path, dtype: str | None) -> None:
    """Byte for byte, but for the dtype that config.json names."""
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch.fnmatch(path.name, pattern) for pattern in COPIED)
        if wanted and path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in NOT_COPIED):
            content = path.read_bytes()
            if path.name == "config.json" and dtype is not None:
                content = _with_dtype(content, dtype)
            _write(out / path.name, content)
    _sync(out)


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
    parser.add_argument("--role", default="student", help="role to export (default: student)")
    parser.add_argument("--format", default="hf", help="hf, the only one so far: full weights")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: as in the base model)")
    parser.add_argument("--base", metavar="DIR", help="base model (default: where the checkpoint's config says)")
    args = parser.parse_args(argv)
    try:
        if args.format not in FORMATS:
            raise ValueError(f"--format {args.format}: choose one of {', '.join(FORMATS)}; there are no adapters yet")
        found = export_hf(args.checkpoint, args.out, role=args.role, dtype=args.dtype, base=args.base)
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.role} of step {found.step} to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
