# SPDX-License-Identifier: Apache-2.0
"""Class-conditional flow transformer (DiT, arXiv:2212.09748, adaLN-zero) that predicts the velocity of a noise path.

    config = dit_config("XL", patch_size=2, input_size=32, channels=4, num_classes=1000)    # or DiTConfig(...)
    model = DiT(config)
    v_BCHW = model(x_BCHW, s_B, labels_B)            # x = (1 - s) x0 + s noise; v = noise - x0, so s = 1 is noise
    guided = model(x_BCHW, s_B, torch.full_like(labels_B, config.null_class))

Parameter names and shapes are those of SiT (arXiv:2401.08740), whose weights mean something else: time t = 1 - s,
not multiplied by 1000 (time_scale = 1), velocity -v, and with learn_sigma twice the output channels. There is no label
dropout inside: who trains a teacher replaces labels by the null class. The model holds no buffer and no fixed
parameter: positions are computed in each forward, so nothing can be left uninitialised by a meta build.

Legend: B batch, C channels, H and W height and width of the latent, P patch size, T patches, D model, N heads,
E head dimension.
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

SIZES = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}  # hidden, depth, heads
NUM_FREQUENCIES = 256  # width of the sinusoidal time embedding
ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


# --- configuration --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class DiTConfig:
    hidden_size: int
    depth: int
    num_heads: int
    input_size: int  # H and W
    patch_size: int
    channels: int
    num_classes: int
    mlp_ratio: float = 4.0
    time_scale: float = 1000.0  # s * time_scale enters the sinusoidal embedding

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = int if field.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**31:  # NaN fails too
                raise ValueError(f"DiT {field.name} must be a positive {field.type}, got {value!r}")
        if self.hidden_size % self.num_heads or self.hidden_size % 4:
            raise ValueError(f"DiT hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads} and "
                             "of 4 (sine and cosine of two coordinates)")
        if self.input_size % self.patch_size:
            raise ValueError(f"DiT input_size {self.input_size} must be a multiple of patch_size {self.patch_size}")

    @property
    def null_class(self) -> int:
        """The label that stands for no condition."""
        return self.num_classes


def dit_config(size: str, *, patch_size: int, input_size: int, channels: int, num_classes: int) -> DiTConfig:
    """The published sizes: S 33M, B 130M, L 458M, XL 675M parameters with 1000 classes."""
    if size not in SIZES:
        raise ValueError(f"DiT size {size!r}: choose from {', '.join(SIZES)}")
    hidden, depth, heads = SIZES[size]
    return DiTConfig(hidden, depth, heads, input_size, patch_size, channels, num_classes)


def config_from_json(raw: Any, *, source: str) -> DiTConfig:
    """A config.json that holds the fields of DiTConfig (`dataclasses.asdict` writes it) and possibly a `model_type`.

    ValueError naming `source` and the key for whatever is unknown, missing or out of range.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(raw).__name__}")
    if raw.get("model_type", "dit") != "dit":
        raise ValueError(f"{source}: model_type {raw['model_type']!r} is not dit")
    values = {key: value for key, value in raw.items() if key != "model_type"}
    known = {field.name for field in fields(DiTConfig)}
    required = known - {"mlp_ratio", "time_scale"}
    if values.keys() - known or required - values.keys():
        raise ValueError(f"{source}: unknown keys {sorted(values.keys() - known)}, missing keys "
                         f"{sorted(required - values.keys())} (a DiT has {', '.join(sorted(known))})")
    try:
        return DiTConfig(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


# --- embeddings -----------------------------------------------------------------------------------------------------

def time_embedding(times_B: Tensor, size: int) -> Tensor:
    """cos and sin at `size` / 2 frequencies from 1 down to nearly 1e-4: [B, size], fp32 (float64 kept)."""
    wide = torch.promote_types(times_B.dtype, torch.float32)
    exponents = torch.arange(size // 2, device=times_B.device, dtype=wide) / (size // 2)
    angles = times_B.to(wide)[:, None] * torch.exp(-math.log(10000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def position_embedding(side: int, size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Fixed 2-D sine-cosine embedding [side * side, size] of patches in row-major order: column first, then row."""
    exponents = torch.arange(size // 4, device=device, dtype=torch.float64) / (size // 4)
    angles = torch.arange(side, device=device, dtype=torch.float64)[:, None] * 10000.0**-exponents
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)  # [side, size / 2]
    columns, rows = axis.expand(side, -1, -1), axis[:, None].expand(-1, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1).to(dtype)


class PatchEmbed(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.channels, config.hidden_size, config.patch_size, stride=config.patch_size)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.proj(x_BCHW.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)
        side, size = x_BCHW.shape[-1] // self.proj.stride[0], x_BTD.shape[-1]
        return x_BTD + position_embedding(side, size, device=x_BTD.device, dtype=x_BTD.dtype)


class TimestepEmbedder(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.scale = config.time_scale
        self.mlp = nn.Sequential(nn.Linear(NUM_FREQUENCIES, config.hidden_size), nn.SiLU(),
                                 nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, s_B: Tensor) -> Tensor:
        return self.mlp(time_embedding(s_B * self.scale, NUM_FREQUENCIES).to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.hidden_size)  # the last row: no condition

    def forward(self, labels_B: Tensor) -> Tensor:
        return self.embedding_table(labels_B)


# --- layers ---------------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BNTE, k_BNTE, v_BNTE = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q_BNTE, k_BNTE, v_BNTE).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        inner = int(config.hidden_size * config.mlp_ratio)
        self.fc1 = nn.Linear(config.hidden_size, inner)
        self.fc2 = nn.Linear(inner, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BTD), approximate="tanh"))


def modulate(x_BTD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """LayerNorm without its own weight, then the scale and shift that the condition gives."""
    return F.layer_norm(x_BTD, x_BTD.shape[-1:], eps=1e-6) * (1 + scale_BD[:, None]) + shift_BD[:, None]


class Block(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.hidden_size, 6 * config.hidden_size))

    def forward(self, x_BTD: Tensor, condition_BD: Tensor, recompute: bool, context_fn: ContextFn) -> Tensor:
        if recompute:  # inside the module, so that FSDP2's hooks stay outside of the recomputation
            return checkpoint(self.block_forward, x_BTD, condition_BD, use_reentrant=False, context_fn=context_fn)
        return self.block_forward(x_BTD, condition_BD)

    def block_forward(self, x_BTD: Tensor, condition_BD: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(condition_BD).chunk(6, dim=1)
        x_BTD = x_BTD + gate_a[:, None] * self.attn(modulate(x_BTD, shift_a, scale_a))
        return x_BTD + gate_m[:, None] * self.mlp(modulate(x_BTD, shift_m, scale_m))


class FinalLayer(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, config.patch_size**2 * config.channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(config.hidden_size, 2 * config.hidden_size))

    def forward(self, x_BTD: Tensor, condition_BD: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition_BD).chunk(2, dim=1)
        return self.linear(modulate(x_BTD, shift, scale))


class DiT(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.x_embedder = PatchEmbed(config)
        self.t_embedder = TimestepEmbedder(config)
        self.y_embedder = LabelEmbedder(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """DiT's initialisation from torch's global generator: every block starts as the identity, the output is 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))  # a view: as for a linear layer
        nn.init.zeros_(self.x_embedder.proj.bias)
        for embedding in (self.y_embedder.embedding_table, self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(embedding.weight, std=0.02)
        for layer in (*self.blocks, self.final_layer):
            nn.init.zeros_(layer.adaLN_modulation[1].weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def forward(self, x_BCHW: Tensor, s_B: Tensor, labels_B: Tensor, *, recompute: bool = False,
                context_fn: ContextFn = noop_context_fn, features: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Velocity [B, C, H, W] in the parameters' dtype.

        s_B: noise level of each sample, 0 (data) to 1 (noise), fp32 or float64. labels_B: 0 .. num_classes - 1, or
        num_classes for no condition. recompute: activation checkpointing of every block under `context_fn`.
        features: index of a block whose output [B, T, D] is returned as well, for a discriminator head.
        """
        self._check(x_BCHW, s_B, labels_B)
        assert features is None or 0 <= features < self.config.depth, f"no block {features} of {self.config.depth}"
        condition_BD = self.t_embedder(s_B) + self.y_embedder(labels_B)
        x_BTD = self.x_embedder(x_BCHW)
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, condition_BD, recompute, context_fn)
            if index == features:
                features_BTD = x_BTD
        v_BCHW = self._unpatchify(self.final_layer(x_BTD, condition_BD))
        return v_BCHW if features is None else (v_BCHW, features_BTD)

    def _check(self, x_BCHW: Tensor, s_B: Tensor, labels_B: Tensor) -> None:
        shape = (self.config.channels, self.config.input_size, self.config.input_size)
        if tuple(x_BCHW.shape[1:]) != shape or s_B.shape != x_BCHW.shape[:1] or labels_B.shape != x_BCHW.shape[:1]:
            raise ValueError(f"DiT takes x [B, {', '.join(map(str, shape))}], s [B], labels [B]; got "
                             f"{list(x_BCHW.shape)}, {list(s_B.shape)}, {list(labels_B.shape)}")
        if s_B.dtype not in (torch.float32, torch.float64):  # 8 bits would move the noise level by up to 0.4 %
            raise ValueError(f"DiT takes s in float32, got {s_B.dtype} (under FSDP2 mixed precision: shard with "
                             "cast_forward_inputs=False)")

    def _unpatchify(self, patches_BTO: Tensor) -> Tensor:
        """[B, T, P * P * C] -> [B, C, H, W]"""
        side, patch = self.config.input_size // self.config.patch_size, self.config.patch_size
        grid = patches_BTO.unflatten(-1, (patch, patch, -1)).unflatten(1, (side, side))  # B, row, column, P, P, C
        return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3).clone()  # FSDP2 warns of a view

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Modules to shard together; embeddings and final layer are the root's."""
        return [[block] for block in self.blocks]
