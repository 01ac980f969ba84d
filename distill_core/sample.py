# SPDX-License-Identifier: Apache-2.0
"""Draws samples from a flow teacher or a distilled student.

    python -m distill_core.sample --export FOLDER --out samples.npz --num 4000 --png grid.png
    python -m distill_core.sample --export examples/digits/teacher --out teacher.npz --steps 50 --guidance 2

A folder with an export.json (`distill_core.export` wrote it) is a student: it takes the few steps that it was trained
for, through the function that training simulates them with, after the sha256 of its files have been checked. If it is a
LoRA adapter, its base is where export.json says, or --base. Any other model folder is a teacher: Euler steps along its
velocity, guided with --guidance. Sample i depends on the seed and on i, not on --num or --batch-size (but for rounding
that differs with the number of rows). FILE gets `x` [N, *latent_shape] in fp32 and `labels` [N] in int64.

Legend: B samples of a batch, N samples in all; x [B, *latent_shape]; s [B] noise level, 1 is noise.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distill_core import flow
from distill_core.adapters import Adapter, guided_velocity, predict_x0, read_adapter
from distill_core.build import load_flow
from distill_core.export import ADAPTER_CONFIG, ADAPTER_WEIGHTS, RECORD, read_export
from distill_core.lora import inject, merge, peft_state
from distill_core.noise import normal
from distill_core.pictures import picture_of, write_png
from distill_core.safetensors_io import open_folder, shown, weights_digest
from distill_core.topology import pick_device

MODES = ("euler", "sde", "ode")
CFG_NORMS = ("none", "layer_norm", "scalar")
TEACHER_STEPS = 50
MAX_STEPS, MAX_NUM, MAX_BATCH_SIZE = 10_000, 1_000_000, 65_536
MAX_COLUMNS, MAX_IMAGES = 20, 100  # of a grid
NOISE_STEP = -1  # as in the grids of a run: its attempts count from 0, so these noises were never trained on


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn. mode: "sde" or "ode" are a student's (flow.few_step_sample), "euler" is a teacher's.

    guidance, cfg_norm: as in flow.guide, with the null condition; a student has learnt them.
    """
    steps: int
    mode: str = "euler"
    shift: float = 1.0
    guidance: float = 1.0
    cfg_norm: str = "none"

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"steps must be 1 to {MAX_STEPS}, got {self.steps!r}")
        for name in ("shift", "guidance"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name, choices in (("mode", MODES), ("cfg_norm", CFG_NORMS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(choices)}")
        if self.mode != "euler" and (self.guidance != 1.0 or self.cfg_norm != "none"):
            raise ValueError("guidance: a student has learnt the guided teacher (sample it without)")

    def grid(self, adapter: Adapter) -> list[float]:
        """Noise levels from 1 to 0, steps + 1 of them."""
        levels = flow.student_grid if self.mode == "euler" else adapter.student_grid
        return levels(self.steps, self.shift)


# ---------------------------------------------------------------------------------------------------------------------
# Load

def load_student(folder: str | Path, *, base: str | Path | None = None) -> tuple[Adapter, nn.Module, Sampling]:
    """An exported student: its adapter, the module in fp32 on CPU with LoRA merged, and how it was trained to sample.

    base: the model that a LoRA adapter belongs to, if it is no longer where export.json says. ValueError: a file that
    was changed after the export, other weights in the base, a malformed export.json.
    """
    folder = Path(folder)
    record = read_export(folder)
    if record.get("format") == "peft":
        base = _checked_base(folder, record, base)
        adapter = read_adapter(base)
        module = _with_lora(folder, load_flow(base, adapter))
    else:
        if base is not None:
            raise ValueError(f"--base: {folder} holds whole weights and needs no base")
        adapter = read_adapter(folder)
        module = load_flow(folder, adapter)
    return adapter, module, _recorded_sampling(folder, record, adapter)


def _checked_base(folder: Path, record: dict[str, Any], base: str | Path | None) -> Path:
    try:
        path, digest = record["base"]["path"], record["base"]["weights"]
    except (KeyError, TypeError):
        raise ValueError(f"{folder / RECORD}: does not say which base the adapter belongs to; export again") from None
    base = Path(path if base is None else base)
    if not base.is_dir():
        raise ValueError(f"{base}: the base model of {folder} is not there; give its folder with --base")
    if weights_digest(open_folder(base)) != digest:
        raise ValueError(f"{base}: does not hold the weights that {folder} was trained on; give their folder with "
                         f"--base")
    return base


def _with_lora(folder: Path, module: nn.Module) -> nn.Module:
    """The adapter's settings and weights are files whose hashes have been checked."""
    config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    inject(module, config["target_modules"], rank=config["r"], alpha=config["lora_alpha"])
    saved, wanted = load_file(folder / ADAPTER_WEIGHTS), peft_state(module, "default")
    assert saved.keys() == wanted.keys(), f"{folder}: {sorted(saved.keys() ^ wanted.keys())[:4]}"
    for name, tensor in wanted.items():
        tensor.copy_(saved[name])
    return merge(module, "default")


def _recorded_sampling(folder: Path, record: dict[str, Any], adapter: Adapter) -> Sampling:
    try:
        recorded = record["sampling"]
        sampling = Sampling(recorded["steps"], recorded["mode"], recorded["shift"])
        if sampling.mode == "euler":
            raise ValueError("mode 'euler' is a teacher's")
        adapter.load_state_dict(recorded["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / RECORD}: sampling: {shown(str(error), 200)}; export again") from None
    return sampling


# ---------------------------------------------------------------------------------------------------------------------
# Draw

@torch.no_grad()
def draw(adapter: Adapter, module: nn.Module, labels_N: Tensor, sampling: Sampling, *, seed: int = 0,
         batch_size: int = 256) -> Tensor:
    """[N, *latent_shape] in fp32 on CPU, drawn on the module's device: one sample for each label."""
    device = next(module.parameters()).device
    batches = []
    for ids_B in torch.arange(len(labels_N)).split(batch_size):
        x = _draw_batch(adapter, module, ids_B.to(device), labels_N[ids_B].to(device), sampling, seed)
        batches.append(x.float().cpu())
    return torch.cat(batches)


def _draw_batch(adapter: Adapter, module: nn.Module, ids_B: Tensor, labels_B: Tensor, sampling: Sampling,
                seed: int) -> Tensor:
    condition, null = adapter.conditioning(labels_B)
    grid = sampling.grid(adapter)

    def noise(stream: str) -> Tensor:
        return normal(adapter.latent_shape, ids_B, seed=seed, stream=stream, step=NOISE_STEP)

    if sampling.mode == "euler":
        return flow.euler_sample(lambda x, s: guided_velocity(adapter, module, x, s, condition, null,
                                                              scale=sampling.guidance, norm=sampling.cfg_norm),
                                 noise("initial noise"), grid)
    return flow.few_step_sample(lambda x, s: predict_x0(adapter, module, x, s, condition), noise("initial noise"), grid,
                                mode=sampling.mode, noise_at=lambda k: noise(f"rollout {k}"))


def labels_of(num: int, classes: Sequence[int]) -> Tensor:
    """[num] int64: the classes in turn."""
    return torch.tensor(classes, dtype=torch.int64)[torch.arange(num) % len(classes)]


# ---------------------------------------------------------------------------------------------------------------------
# Command

def run(args: argparse.Namespace) -> None:
    for path in (args.out, args.png):  # before the work, not after it
        if path is not None and os.path.lexists(path):
            raise ValueError(f"{path}: exists; choose another name or remove it")
    device = pick_device(args.device)
    adapter, module, sampling = _load(args)
    classes = _classes(args.labels, adapter.num_classes)
    levels = ", ".join(f"{level:.4g}" for level in sampling.grid(adapter)[:9])
    print(f"{args.num} samples of shape {list(adapter.latent_shape)}: {sampling.steps} steps ({sampling.mode}) at "
          f"noise levels {levels}{', ...' * (sampling.steps > 8)}", flush=True)
    labels = labels_of(args.num, classes)
    x = draw(adapter, module.to(device), labels, sampling, seed=args.seed, batch_size=args.batch_size)
    if not x.isfinite().all():
        raise ValueError(f"{args.export}: gives samples that are not finite; export an earlier checkpoint")
    picture = _picture(x, len(classes)) if args.png else None
    write_samples(args.out, x, labels)
    print(f"wrote {args.out}")
    if picture is not None:
        write_png(args.png, picture)
        print(f"wrote {args.png}")


def _load(args: argparse.Namespace) -> tuple[Adapter, nn.Module, Sampling]:
    folder = Path(args.export)
    asked = {name: value for name, value in (("steps", args.steps), ("mode", args.mode), ("guidance", args.guidance),
                                             ("cfg_norm", args.cfg_norm)) if value is not None}
    if (folder / RECORD).exists():
        adapter, module, sampling = load_student(folder, base=args.base)
        return adapter, module, replace(sampling, **asked)
    for option, value in (("--mode", args.mode), ("--base", args.base)):
        if value is not None:
            raise ValueError(f"{option}: {folder} has no {RECORD}, so it is a teacher, which has no {option[2:]}")
    sampling = replace(Sampling(TEACHER_STEPS), **asked)
    adapter = read_adapter(folder)
    return adapter, load_flow(folder, adapter), sampling


def _classes(text: str, num_classes: int) -> list[int]:
    if text == "all":
        return list(range(num_classes))
    classes = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if not all(0 <= label < num_classes for label in classes):
        raise ValueError(f"--labels {text}: expected all, or classes 0 to {num_classes - 1} separated by commas")
    return classes


def _picture(x: Tensor, num_classes: int) -> Tensor:
    """Each class in columns of its own where there are few; points are all in one picture."""
    columns = num_classes * max(1, 10 // num_classes) if num_classes <= MAX_COLUMNS else 10
    return picture_of(x if x.dim() == 2 else x[:MAX_IMAGES // columns * columns], columns=columns)


def write_samples(path: str | Path, x: Tensor, labels: Tensor) -> None:
    """A new .npz file, which has its name only once all of it is on disk; missing folders are made."""
    path = Path(path)
    os.makedirs(path.parent, exist_ok=True)
    staging = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        with open(staging, "xb") as file:
            np.savez(file, x=x.numpy(), labels=labels.numpy())
            file.flush()
            os.fsync(file.fileno())
        if os.path.lexists(path):
            raise ValueError(f"{path}: exists; choose another name or remove it")
        os.rename(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distill_core.sample", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--export", required=True, metavar="FOLDER", help="exported student, or model folder of a teacher")
    add("--out", required=True, metavar="FILE", help="new .npz file with x and labels")
    add("--num", type=int, default=64, help="samples (default: 64)")
    add("--labels", default="all", help="classes in turn, as 0,1,2 (default: all)")
    add("--steps", type=int, help=f"default: those the student was trained for; of a teacher {TEACHER_STEPS}")
    add("--mode", choices=("sde", "ode"), help="student: between its steps, fresh noise or an Euler step")
    add("--guidance", type=float, help="teacher: scale s of u + s (c - u), u = no condition (default: 1, unguided)")
    add("--cfg-norm", choices=CFG_NORMS, help="teacher: rescales what is guided (default: none)")
    add("--base", metavar="FOLDER", help="of an exported LoRA adapter (default: where its export.json says)")
    add("--seed", type=int, default=0)
    add("--batch-size", type=int, default=256, help="samples at a time (default: 256)")
    add("--png", metavar="FILE", help=f"also a picture, of the first {MAX_IMAGES} images or of all points")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def _check(args: argparse.Namespace) -> None:
    for name, value, low, high in (("--num", args.num, 1, MAX_NUM), ("--seed", args.seed, 0, 2**63 - 1),
                                   ("--batch-size", args.batch_size, 1, MAX_BATCH_SIZE)):
        if not low <= value <= high:
            raise ValueError(f"{name} {value}: expected {low} to {high}")
    for name, path, suffix in (("--out", args.out, ".npz"), ("--png", args.png, ".png")):
        if path is not None and Path(path).suffix != suffix:
            raise ValueError(f"{name} {path}: expected the name of a {suffix} file")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _check(args)
        run(args)
    except (ValueError, OSError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
