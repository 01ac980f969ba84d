# SPDX-License-Identifier: Apache-2.0
"""Class-conditional residual MLP on points of the plane that predicts the velocity of a noise path.

    config = MLP2DConfig(hidden_size=64, depth=2, num_classes=8)
    model = MLP2D(config)
    v_BX = model(x_BX, s_B, labels_B)            # x = (1 - s) x0 + s noise; v = noise - x0, so s = 1 is noise
    guided = model(x_BX, s_B, torch.full_like(labels_B, config.null_class))

The smallest model that distillation can be tried and tested on: it takes and gives what the DiT does. There is no label
dropout inside: who trains a teacher replaces labels by the null class. The model holds no buffer, so nothing can be
left uninitialised by a meta build.

Legend: B batch, X the two coordinates, D model.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

NUM_COORDINATES = 2
NUM_FREQUENCIES = 64  # width of the sinusoidal time embedding
ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


@dataclass(frozen=True)
class MLP2DConfig:
    hidden_size: int
    depth: int
    num_classes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 < value < 2**31:  # bool is an int to isinstance
                raise ValueError(f"mlp2d {field.name} must be a positive int, got {value!r}")

    @property
    def null_class(self) -> int:
        """The label that stands for no condition."""
        return self.num_classes


def config_from_json(raw: Any, *, source: str) -> MLP2DConfig:
    """A config.json that holds the fields of MLP2DConfig and possibly a `model_type`.

    ValueError naming `source` and the key for whatever is unknown, missing or out of range.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(raw).__name__}")
    if raw.get("model_type", "mlp2d") != "mlp2d":
        raise ValueError(f"{source}: model_type {raw['model_type']!r} is not mlp2d")
    values = {key: value for key, value in raw.items() if key != "model_type"}
    known = {field.name for field in fields(MLP2DConfig)}
    if values.keys() != known:
        raise ValueError(f"{source}: unknown keys {sorted(values.keys() - known)}, missing keys "
                         f"{sorted(known - values.keys())} (an mlp2d has {', '.join(sorted(known))})")
    try:
        return MLP2DConfig(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def time_embedding(s_B: Tensor) -> Tensor:
    """cos and sin of s at NUM_FREQUENCIES / 2 angular frequencies from 10 down to nearly 0.01, fp32 (float64 kept)."""
    wide = torch.promote_types(s_B.dtype, torch.float32)
    exponents = torch.arange(NUM_FREQUENCIES // 2, device=s_B.device, dtype=wide) / (NUM_FREQUENCIES // 2)
    angles = 10.0 * s_B.to(wide)[:, None] * torch.exp(-math.log(1000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedder(nn.Module):
    def __init__(self, config: MLP2DConfig) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(NUM_FREQUENCIES, config.hidden_size), nn.SiLU(),
                                 nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, s_B: Tensor) -> Tensor:
        return self.mlp(time_embedding(s_B).to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    def __init__(self, config: MLP2DConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.hidden_size)  # the last row: no condition

    def forward(self, labels_B: Tensor) -> Tensor:
        return self.embedding_table(labels_B)


class Block(nn.Module):
    """x + fc2(silu(fc1(modulated LayerNorm of x)))"""

    def __init__(self, config: MLP2DConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.fc2 = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.modulation = nn.Linear(config.hidden_size, 2 * config.hidden_size)

    def forward(self, x_BD: Tensor, condition_BD: Tensor, recompute: bool, context_fn: ContextFn) -> Tensor:
        if recompute:  # inside the module, so that FSDP2's hooks stay outside of the recomputation
            return checkpoint(self.block_forward, x_BD, condition_BD, use_reentrant=False, context_fn=context_fn)
        return self.block_forward(x_BD, condition_BD)

    def block_forward(self, x_BD: Tensor, condition_BD: Tensor) -> Tensor:
        shift_BD, scale_BD = self.modulation(F.silu(condition_BD)).chunk(2, dim=1)
        normed_BD = F.layer_norm(x_BD, x_BD.shape[-1:]) * (1 + scale_BD) + shift_BD
        return x_BD + self.fc2(F.silu(self.fc1(normed_BD)))


class MLP2D(nn.Module):
    def __init__(self, config: MLP2DConfig) -> None:
        super().__init__()
        self.config = config
        self.x_embedder = nn.Linear(NUM_COORDINATES, config.hidden_size)
        self.t_embedder = TimestepEmbedder(config)
        self.y_embedder = LabelEmbedder(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_layer = nn.Linear(config.hidden_size, NUM_COORDINATES)

    def forward(self, x_BX: Tensor, s_B: Tensor, labels_B: Tensor, *, recompute: bool = False,
                context_fn: ContextFn = noop_context_fn, features: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Velocity [B, 2] in the parameters' dtype.

        s_B: noise level of each sample, 0 (data) to 1 (noise), fp32 or float64. labels_B: 0 .. num_classes - 1, or
        num_classes for no condition. recompute: activation checkpointing of every block under `context_fn`.
        features: index of a block whose output [B, 1, D] is returned as well, for a discriminator head.
        """
        self._check(x_BX, s_B, labels_B)
        condition_BD = self.t_embedder(s_B) + self.y_embedder(labels_B)
        x_BD = self.x_embedder(x_BX.to(self.x_embedder.weight.dtype))
        for index, block in enumerate(self.blocks):
            x_BD = block(x_BD, condition_BD, recompute, context_fn)
            if index == features:
                features_B1D = x_BD[:, None].clone()  # FSDP2 warns of a view
        v_BX = self.final_layer(x_BD)
        return v_BX if features is None else (v_BX, features_B1D)

    def _check(self, x_BX: Tensor, s_B: Tensor, labels_B: Tensor) -> None:
        if (tuple(x_BX.shape[1:]) != (NUM_COORDINATES,) or s_B.shape != x_BX.shape[:1]
                or labels_B.shape != x_BX.shape[:1]):
            raise ValueError(f"mlp2d takes x [B, {NUM_COORDINATES}], s [B], labels [B]; got {list(x_BX.shape)}, "
                             f"{list(s_B.shape)}, {list(labels_B.shape)}")
        if s_B.dtype not in (torch.float32, torch.float64):  # 8 bits would move the noise level by up to 0.4 %
            raise ValueError(f"mlp2d takes s in float32, got {s_B.dtype} (under FSDP2 mixed precision: shard with "
                             "cast_forward_inputs=False)")

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Modules to shard together; embeddings and final layer are the root's."""
        return [[block] for block in self.blocks]
