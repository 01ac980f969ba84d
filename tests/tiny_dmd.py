# SPDX-License-Identifier: Apache-2.0
"""Tiny flow teachers, conditions, latents and configs of job dmd, and the weights and roles that its tests compare.

Widths are odd where the architecture lets them, so that shards are uneven over 2 and 3 ranks and some are empty.
"""
from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call

from distill_core.adapters import make_adapter, read_adapter
from distill_core.build import load_flow
from distill_core.fsdp import local
from distill_core.safetensors_io import write_folder

NUM_CLASSES = 4
MODELS = {  # time_scale 8 is exact in fp32: the float64 references see the same noise level
    "dit": {"model_type": "dit", "hidden_size": 20, "depth": 2, "num_heads": 5, "input_size": 2, "patch_size": 1,
            "channels": 3, "num_classes": NUM_CLASSES, "mlp_ratio": 1.25, "time_scale": 8.0},
    "mlp2d": {"model_type": "mlp2d", "hidden_size": 7, "depth": 3, "num_classes": NUM_CLASSES}}
STORAGES = {
    "full": {},
    "lora": {"lora__rank": 2},
    "shared": {"lora__rank": 2, "dmd__role_storage": "shared_base_adapters"}}


def random_values(key: str, shape: torch.Size, scale: float) -> Tensor:
    """A pure function of its arguments."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def write_flow(folder: Path, kind: str = "mlp2d", *, seed: int = 0, **changes) -> Path:
    """A random model folder: no weight is 0, as a fresh DiT's are, or any comparison would pass."""
    raw = MODELS[kind] | changes
    module = make_adapter(raw, source="tiny").build()
    weights = [(name, random_values(f"{seed} {name}", p.shape, 0.2 if p.dim() > 1 else 0.1))
               for name, p in module.named_parameters()]
    write_folder(folder, weights, max_shard_bytes=4000)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_samples(path: Path, count: int, shape: tuple[int, ...] | None = None, *, seed: int = 0) -> Path:
    """Labels, and with a shape real samples."""
    rng = np.random.default_rng(seed)
    arrays = {"labels": rng.integers(0, NUM_CLASSES, count)}
    if shape is not None:
        arrays["x"] = rng.standard_normal((count, *shape)).astype(np.float32)
    np.savez(path, **arrays)
    return path


def write_config(folder: Path, kind: str = "mlp2d", **changes) -> Path:
    """A config over a tiny teacher in `folder`; `changes` are dotted keys with __ for the dot."""
    if not (folder / kind).exists():
        write_flow(folder / kind, kind)
        write_samples(folder / "labels.npz", 23)
        write_samples(folder / f"{kind}.npz", 17, read_adapter(folder / kind).latent_shape, seed=1)
    tree = {
        "job": "dmd", "name": "tiny", "run_root": str(folder / "runs"), "max_cycles": 4, "device": "cpu",
        "teacher": {"path": str(folder / kind)}, "topology": {"timeout_s": 20},
        "data": {"conditions": str(folder / "labels.npz")},
        "dmd": {"fake_update_ratio": 2, "student_batch_size": 6, "fake_score_batch_size": 6,
                "student_micro_batch_size_per_gpu": 1, "fake_score_micro_batch_size_per_gpu": 1, "student_steps": 3,
                "teacher_guidance_scale": 2.0, "score_timestep_shift": 3.0, "ema_decay": 0.75,
                "student_optim": {"lr": 0.02}, "fake_score_optim": {"lr": 0.03}},
        "eval": {"every": 0}, "checkpoint": {"every": 0}}
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


# --- distinct roles -------------------------------------------------------------------------------------------------
# Student and fake score start as the teacher, where every gradient of the student is 0: tests move them apart.

def role_value(role: str, name: str, start: Tensor) -> Tensor:
    """The value, in fp32, that tests give to a weight of a role; `start`: the teacher's, 0 for an adapter."""
    return start + random_values(f"{role} {name}", start.shape, 0.1)


@torch.no_grad()
def move_apart(roles, folder: Path) -> None:
    """All roles but the teacher get weights of their own, on whatever shards they live."""
    base = dict(load_flow(folder, read_adapter(folder)).named_parameters())
    for role in [role for role in roles if role.name != "teacher"]:
        for name, parameter in role.named_weights():
            value = role_value(role.name, name, base[name] if name in base else torch.zeros(parameter.shape))
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            local(parameter).copy_(local(value))


def plain_role(role: str, config) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], dict[str, Tensor]]:
    """(velocity(x, s, labels), trained leaves by name) of a role in float64: no shards, no adapters, no scopes.

    A LoRA role is the base with W + alpha / rank B A in place of W.
    """
    adapter = read_adapter(config.teacher.path)
    module = load_flow(config.teacher.path, adapter, torch.float64)
    base = {name: p.detach() for name, p in module.named_parameters()}
    weights, leaves = dict(base), {}

    def leaf(name: str, start: Tensor) -> Tensor:
        leaves[name] = role_value(role, name, start.float()).double().requires_grad_()
        return leaves[name]

    if role != "teacher" and not config.lora.rank:
        weights = {name: leaf(name, start) for name, start in base.items()}
    elif role != "teacher":
        own = dict(zip(("student", "fake_score", "student_ema"), config.lora.adapters))[role]
        for path, layer in module.named_modules():
            if isinstance(layer, nn.Linear) and path.endswith(adapter.lora_targets):
                down = leaf(f"{path}.lora_A.{own}", torch.zeros(config.lora.rank, layer.in_features))
                up = leaf(f"{path}.lora_B.{own}", torch.zeros(layer.out_features, config.lora.rank))
                scale = (config.lora.alpha or config.lora.rank) / config.lora.rank
                weights[f"{path}.weight"] = base[f"{path}.weight"] + scale * (up @ down)
    return lambda x, s, labels, **options: functional_call(module, weights, (x, s, labels), options), leaves


def worst_gap(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest |got - want| / |want| of all named tensors."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max(float((got[name].double() - want[name]).norm() / want[name].norm()) for name in want)
