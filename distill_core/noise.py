# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are pure functions of counters: nothing to save, and the same however a batch is cut over ranks.

    noise = normal((4, 32, 32), ids_B, seed=0, stream="rollout 0", step=17)        # [B, 4, 32, 32], fp32
    u_B = uniform(ids_B, seed=0, stream="score time", step=17)                     # [B] in (0, 1]

A number depends on (seed, stream, step, the sample's id in the global batch, its place in the sample) and on nothing
else. Different streams of one step are independent. The bits are the same on every device; a normal is a rounded
function of them (Box and Muller 1958) and may differ between devices in its last digit.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def uniform(ids_B: Tensor, *, seed: int, stream: str, step: int) -> Tensor:
    """[B] in (0, 1], fp32 on the device of ids_B, which is int64."""
    return _fraction(_shift_right(_keys(ids_B, seed, stream, step), 32))


def normal(shape: Sequence[int], ids_B: Tensor, *, seed: int, stream: str, step: int) -> Tensor:
    """[B, *shape] standard normal, fp32 on the device of ids_B, which is int64; at most 6.77 in size."""
    size = math.prod(shape)
    pairs = torch.arange((size + 1) // 2, device=ids_B.device)
    bits = _mix((_keys(ids_B, seed, stream, step)[:, None] ^ pairs) + _signed(0x9E3779B97F4A7C15))
    radius = (-2.0 * _fraction(_shift_right(bits, 32)).log()).sqrt()
    angle = 2.0 * math.pi * _fraction(bits & 0xFFFFFFFF)
    both = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return both[:, :size].reshape(len(ids_B), *shape)


def _keys(ids_B: Tensor, seed: int, stream: str, step: int) -> Tensor:
    """Words absorbed one by one by the finaliser of splitmix64 (Steele, Lea, Flood 2014), modulo 2^64 (signed)."""
    state = torch.zeros((), dtype=torch.int64, device=ids_B.device)
    for word in (_signed(seed), zlib.crc32(stream.encode()), _signed(step), ids_B):
        state = _mix((state ^ word) + _signed(0x9E3779B97F4A7C15))  # without the constant, zeros would stay zeros
    return state


def _fraction(bits: Tensor) -> Tensor:
    """32 bits to (0, 1]: never 0, whose logarithm the normals take."""
    return (bits.float() + 0.5) * 2.0**-32


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word
