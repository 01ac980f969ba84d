# SPDX-License-Identifier: Apache-2.0
"""Pictures of samples without an image library: a grid of images, a scatter of 2-D points, and a PNG writer.

    write_png("samples/step_00000100.png", picture_of(x, columns=8))              # picks by the shape of x

PNG (ISO/IEC 15948): 8 bits a channel, grey or RGB, one IDAT chunk, every row unfiltered.

Shapes: N samples, C channels, H, W rows and columns of pixels; a picture is uint8 [H, W, 3].
"""
from __future__ import annotations

import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MIN_CELL = 32  # pixels: picture_of enlarges smaller images to at least this size
GAP = 2  # pixels between the images of a grid
BAD = (255, 0, 255)  # magenta: not a finite number
GREY, INK = (128, 128, 128), (16, 36, 104)


def picture_of(x: Tensor, *, columns: int) -> Tensor:
    """uint8 [H, W, 3]: a grid of images for x [N, C, H, W], enlarged to 32 pixels or more; a scatter for x [N, 2]."""
    if x.ndim == 2 and x.shape[1] == 2:
        return scatter(x)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"a picture needs samples [N, C, H, W] or points [N, 2], got {list(x.shape)}")
    return image_grid(x, columns=columns, scale=math.ceil(MIN_CELL / min(x.shape[2:])))


def image_grid(x: Tensor, *, columns: int, low: float = -1.0, high: float = 1.0, scale: int = 1) -> Tensor:
    """uint8 [H, W, 3]: the images x [N, C, H, W] row by row, each pixel drawn as a square of `scale` pixels.

    One channel is shown as grey and three as colour, from black at `low` to white at `high`; values beyond are clamped.
    Any other number of channels is a latent, which has no colours of its own: its first three channels become red,
    green and blue, each stretched from its 1st to its 99th percentile over this x, so grids do not compare in colour.
    A pixel with a value that is not finite, in any channel, is magenta.
    """
    if x.ndim != 4 or 0 in x.shape or columns < 1 or scale < 1:
        raise ValueError(f"a grid needs x [N, C, H, W], columns and scale of at least 1, got {list(x.shape)}, "
                         f"{columns} and {scale}")
    x = x.detach().float().cpu()
    is_bad_NHW = ~x.isfinite().all(dim=1)
    levels = (x - low) / (high - low) if x.shape[1] in (1, 3) else _stretched(x)
    cells = (levels * 255).clamp(0, 255).round().byte().permute(0, 2, 3, 1).expand(-1, -1, -1, 3).clone()
    cells[is_bad_NHW] = torch.tensor(BAD, dtype=torch.uint8)
    cells = cells.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    return _tiled(cells, min(columns, len(cells)))


def _stretched(x: Tensor) -> Tensor:
    """[N, 3, H, W]: the first channels (black where there are only two) with their 1st to 99th percentile as 0 to 1."""
    levels = torch.zeros(len(x), 3, *x.shape[2:])
    for channel in range(min(3, x.shape[1])):
        values = x[:, channel]
        finite = values[values.isfinite()]
        if len(finite):
            low, high = np.percentile(finite.numpy(), [1, 99])  # torch.quantile takes 16M elements at most
            levels[:, channel] = (values - low) / max(high - low, 1e-12)
    return levels


def _tiled(cells: Tensor, columns: int) -> Tensor:
    """uint8 [N, H, W, 3] -> one picture with grey between the cells and in the places that are left over."""
    num, height, width, _ = cells.shape
    rows = math.ceil(num / columns)
    canvas = _filled((rows * columns, height + GAP, width + GAP), GREY)
    canvas[:num, :height, :width] = cells
    canvas = canvas.unflatten(0, (rows, columns)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    return canvas[:-GAP, :-GAP]


def scatter(points_N2: Tensor, *, size: int = 256, extent: float | None = None) -> Tensor:
    """uint8 [size, size, 3]: dots of 3 x 3 pixels on white, the darker the more points fall there (log scale).

    x runs to the right and y upwards, both over [-extent, extent], with grey lines at 0; points beyond are drawn at the
    edge. extent None: the next of 1, 2, 3, 5, 10, ... so that pictures of like samples share it. If any point is not
    finite, the picture has a magenta border.
    """
    if points_N2.ndim != 2 or points_N2.shape[1] != 2:
        raise ValueError(f"a scatter needs points [N, 2], got {list(points_N2.shape)}")
    points = points_N2.detach().double().cpu()
    finite = points[points.isfinite().all(dim=1)]
    extent = _round_extent(finite) if extent is None else extent
    picture = _filled((size, size), (255, 255, 255))
    picture[size // 2], picture[:, size // 2] = 224, 224
    counts = _dot_counts(finite / extent, size)
    darkness = torch.where(counts > 0, 0.3 + 0.7 * (counts.log1p() / counts.max().log1p().clamp_min(1e-9)), 0.0)
    mixed = torch.lerp(picture.float(), torch.tensor(INK).float().expand_as(picture), darkness[:, :, None])
    picture = mixed.round().byte()
    if len(finite) < len(points):
        for edge in (picture[:3], picture[-3:], picture[:, :3], picture[:, -3:]):
            edge[:] = torch.tensor(BAD, dtype=torch.uint8)
    return picture


def _dot_counts(places_N2: Tensor, size: int) -> Tensor:
    """[size, size]: points in the 3 x 3 pixels around each pixel; places in [-1, 1], y upwards."""
    pixels = ((places_N2.clamp(-1, 1) + 1) / 2 * (size - 1)).round().long()
    counts = torch.bincount((size - 1 - pixels[:, 1]) * size + pixels[:, 0], minlength=size * size)
    return 9 * F.avg_pool2d(counts.float().reshape(1, 1, size, size), 3, stride=1, padding=1)[0, 0]


def _round_extent(points_N2: Tensor) -> float:
    largest = max(float(points_N2.abs().max()) if len(points_N2) else 0.0, 1e-6)
    power = 10.0 ** math.floor(math.log10(largest))
    return next(factor * power for factor in (1, 2, 3, 5, 10) if factor * power >= largest)


def _filled(shape: tuple[int, ...], color: tuple[int, int, int]) -> Tensor:
    return torch.tensor(color, dtype=torch.uint8).expand(*shape, 3).clone()


def write_png(path: str | Path, picture: Tensor | np.ndarray) -> None:
    """Write uint8 [H, W, 3] (RGB) or [H, W] (grey) as a PNG file, which is replaced atomically."""
    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)) or not pixels.size:
        raise ValueError(f"{path}: a PNG needs uint8 [H, W] or [H, W, 3], got {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes())) + _chunk(b"IEND", b"")
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    os.replace(temporary, path)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
