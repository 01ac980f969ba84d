# SPDX-License-Identifier: Apache-2.0
"""pictures.py: the files are read back by a decoder of our own (and by PIL where there is one)."""
from __future__ import annotations

import struct
import time
import zlib

import numpy as np
import pytest
import torch

from distill_core import pictures
from distill_core.pictures import image_grid, picture_of, scatter, write_png

MAGENTA = [255, 0, 255]
GREY = [128, 128, 128]


def decode_png(data: bytes) -> np.ndarray:
    """uint8 [H, W, channels] of an 8-bit PNG, by the standard: signature, checksums, all five row filters."""
    assert data[:8] == bytes([0x89, 0x50, 0x4E, 0x47, 0x0D, 0x0A, 0x1A, 0x0A])
    chunks, at = [], 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        content = data[at + 8:at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length:at + 12 + length])[0] == zlib.crc32(kind + content), kind
        chunks.append((kind, content))
        at += 12 + length
    assert at == len(data) and chunks[0][0] == b"IHDR" and chunks[-1] == (b"IEND", b"")
    width, height, depth, color, compression, filters, interlace = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, compression, filters, interlace) == (8, 0, 0, 0)
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    raw = zlib.decompress(b"".join(content for kind, content in chunks if kind == b"IDAT"))
    assert len(raw) == height * (1 + width * channels)
    rows = np.frombuffer(raw, np.uint8).reshape(height, -1)
    above, decoded = np.zeros(width * channels, np.uint8), []
    for row in rows:
        above = _unfilter(row[0], row[1:], above, channels)
        decoded.append(above)
    return np.stack(decoded).reshape(height, width, channels)


def _unfilter(kind: int, row: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    out = np.zeros_like(row)
    for i, value in enumerate(row.tolist()):
        left, corner = (int(out[i - step]), int(above[i - step])) if i >= step else (0, 0)
        up = int(above[i])
        paeth = min((left, up, corner), key=lambda p: abs(left + up - corner - p))
        out[i] = (value + (0, left, up, (left + up) // 2, paeth)[kind]) % 256
    return out


# ---------------------------------------------------------------------------------------------------------------------
# PNG

@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7), (1, 1, 3), (1, 300), (300, 1, 3)])
def test_png_round_trip(shape, tmp_path):
    """Catches rows and columns swapped, a missing filter byte, a wrong colour type or checksum."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_png(tmp_path / "a.png", torch.from_numpy(pixels))
    data = (tmp_path / "a.png").read_bytes()
    assert np.array_equal(decode_png(data).squeeze(-1) if len(shape) == 2 else decode_png(data), pixels)
    with pytest.raises(AssertionError):  # control: a bit more or less is seen
        decode_png(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])


def test_png_is_what_pil_reads(tmp_path):
    """Catches a file that only the decoder above takes."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    write_png(tmp_path / "a.png", pixels[::-1])  # not contiguous
    with image.open(tmp_path / "a.png") as opened:
        assert opened.mode == "RGB" and np.array_equal(np.asarray(opened), pixels[::-1])


def test_png_is_replaced_whole(tmp_path, monkeypatch):
    """Catches a file written in place: a report made meanwhile, or a kill, would see half of it."""
    path = tmp_path / "a.png"
    write_png(path, np.zeros((2, 2), np.uint8))
    before = path.read_bytes()

    def crash(source, destination):
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(pictures.os, "replace", crash)
        with pytest.raises(OSError, match="killed"):
            write_png(path, np.ones((2, 2), np.uint8))
    assert path.read_bytes() == before
    write_png(path, np.ones((2, 2), np.uint8))
    assert decode_png(path.read_bytes()).max() == 1


@pytest.mark.parametrize("picture", [np.zeros((2, 2, 3)), np.zeros((2, 2, 4), np.uint8), np.zeros((2, 2, 2), np.uint8),
                                     np.zeros((0, 2, 3), np.uint8), np.zeros(4, np.uint8)])
def test_png_refuses_what_it_cannot_hold(picture, tmp_path):
    """Catches floats truncated to bytes and channel counts that shift every row."""
    with pytest.raises(ValueError, match=r"a.png: a PNG needs uint8 \[H, W\] or \[H, W, 3\], got"):
        write_png(tmp_path / "a.png", picture)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Grid

def test_grid_by_hand():
    """Catches images filled in column by column, H and W or channels mixed up, and a wrong grey scale."""
    x = torch.full((3, 3, 1, 2), -1.0)
    x[0, 0, 0, 1] = 1.0  # first image: its right pixel red
    x[1, 1] = 0.0  # second: half green
    x[2] = 5.0  # third: beyond white
    grid = image_grid(x, columns=2)
    black, red, green, white = [0, 0, 0], [255, 0, 0], [0, 128, 0], [255, 255, 255]
    assert grid.dtype == torch.uint8 and grid.tolist() == [
        [black, red, GREY, GREY, green, green], [GREY] * 6, [GREY] * 6, [white, white, GREY, GREY, GREY, GREY]]
    assert image_grid(x, columns=9).shape == (1, 3 * 2 + 2 * 2, 3)  # no empty columns


@pytest.mark.parametrize("scale", [1, 2, 5])
def test_enlarged_pixels_are_squares(scale):
    """Catches smoothing, and an enlargement of one side only."""
    x = torch.rand(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    small, large = image_grid(x, columns=1), image_grid(x, columns=1, scale=scale)
    assert np.array_equal(np.kron(small.numpy(), np.ones((scale, scale, 1), np.uint8)), large.numpy())
    assert (small[..., 0] == small[..., 1]).all() and (small[..., 0] == small[..., 2]).all()  # grey
    expected = ((x[0, 0] + 1) / 2 * 255).round()
    assert torch.equal(small[..., 0].float(), expected)


def test_low_and_high():
    """Catches a range that is fixed at -1 ... 1."""
    x = torch.tensor([0.0, 4.0, 8.0, 16.0]).reshape(1, 1, 1, 4)
    assert image_grid(x, columns=1, low=0.0, high=16.0)[0, :, 0].tolist() == [0, 64, 128, 255]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_magenta(channels, bad):
    """Catches NaN shown as black and infinities as white, which look like images; also NaN that spoils the others."""
    x = torch.randn(2, channels, 4, 4, generator=torch.Generator().manual_seed(1))
    clean = image_grid(x, columns=2)
    drawn = min(channels, 3)
    x[1, drawn - 1, 2, 3] = bad
    grid = image_grid(x, columns=2)
    assert grid[2, 4 + 2 + 3].tolist() == MAGENTA
    is_bad = (grid == torch.tensor(MAGENTA)).all(-1)
    assert int(is_bad.sum()) == 1
    # The stretch of a latent's channel has one value fewer to go by, nothing else may change.
    assert (grid.int() - clean.int())[~is_bad].abs().max() <= (8 if channels == 4 else 0)
    assert image_grid(torch.full_like(x, bad), columns=2)[0, 0].tolist() == MAGENTA


def test_latents_show_three_stretched_channels():
    """Catches latents clamped to -1 ... 1 (all black or white), and one channel's range used for all."""
    ramp = torch.linspace(0, 1, 10_000).reshape(1, 100, 100)
    x = torch.stack([ramp * 1000, ramp.flip(2) * 1e-3, 7 + ramp * 0, ramp * 9], dim=1)  # [1, 4, 100, 100]
    x[0, 0, 0, 0] = -1e6  # an outlier
    red, green, blue = image_grid(x, columns=1).float().unbind(-1)
    expected = ((ramp[0] - 0.01) / 0.98).clamp(0, 1) * 255
    assert (red - expected).abs()[1:].max() <= 2
    assert (green - expected.flip(1)).abs().max() <= 2
    assert blue.unique().numel() == 1
    two = image_grid(x[:, :2], columns=1)
    assert two[..., 1].float().sub(green).abs().max() <= 1 and two[..., 2].max() == 0


@pytest.mark.parametrize(("size", "cell"), [((8, 8), 32), ((5, 5), 35), ((32, 32), 32), ((64, 48), (64, 48)),
                                            ((4, 16), (32, 128))])
def test_small_images_are_enlarged(size, cell):
    """Catches 8 x 8 digits the size of a full stop, and large images blown up."""
    height, width = (cell, cell) if isinstance(cell, int) else cell
    assert picture_of(torch.zeros(6, 1, *size), columns=3).shape == (2 * height + 2, 3 * width + 4, 3)


def test_picture_of_picks_by_shape_and_refuses_others():
    """Catches points taken for an image, and a traceback from deep inside for a sequence model's samples."""
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(2))
    assert torch.equal(picture_of(x, columns=3), scatter(x))
    for shape in [(4, 3), (4, 3, 8), (0, 1, 8, 8), (2, 1, 3, 8, 8)]:
        with pytest.raises(ValueError, match=r"samples \[N, C, H, W\] or points \[N, 2\], got \[" + str(shape[0])):
            picture_of(torch.zeros(shape), columns=2)
    for arguments in [dict(columns=0), dict(columns=2, scale=0)]:
        with pytest.raises(ValueError, match="columns and scale of at least 1"):
            image_grid(torch.zeros(1, 1, 8, 8), **arguments)


def test_inputs_stay_as_they_are():
    """Catches magenta or clamping written back into the samples, and low precision or a graph that fails."""
    x = torch.randn(2, 3, 8, 8).bfloat16().requires_grad_()
    x.data[0, 0, 0, 0] = float("nan")
    before = x.detach().clone()
    picture_of(x, columns=2)
    assert torch.equal(x.detach().view(torch.int16), before.view(torch.int16))


# ---------------------------------------------------------------------------------------------------------------------
# Scatter

def ink_places(picture: torch.Tensor) -> list[tuple[int, int]]:
    """(row, column) of pixels that are neither white nor on the lines at 0."""
    return [tuple(place) for place in ((picture.float().std(-1) > 5).nonzero()).tolist()]


def test_dots_stand_where_their_points_are():
    """Catches x and y swapped, y downwards, and a scale that is off."""
    picture = scatter(torch.tensor([[1.0, 0.5]]), size=101, extent=2.0)
    assert picture.shape == (101, 101, 3) and picture.dtype == torch.uint8
    # x = 1 is 3/4 of the way to the right, y = .5 is 3/8 of the way down
    assert ink_places(picture) == [(row, column) for row in (37, 38, 39) for column in (74, 75, 76)]


def test_more_points_are_darker_and_single_ones_visible():
    """Catches a picture in which one dense mode hides all others."""
    picture = scatter(torch.cat([torch.zeros(10_000, 2) - 0.5, torch.tensor([[0.5, 0.5]])]), extent=1.0).float()
    dense, single = picture[3 * 64, 64].mean(), picture[64, 3 * 64 - 1].mean()
    assert dense < 70 and dense < single < 200


@pytest.mark.parametrize(("largest", "extent"), [(0.7, 1), (1.0, 1), (1.9, 2), (2.4, 3), (4.0, 5), (7.0, 10),
                                                 (2e-3, 2e-3), (240.0, 300)])
def test_extent_is_a_round_number(largest, extent):
    """Catches pictures of like samples at unlike scales, which cannot be compared."""
    points = torch.tensor([[largest, 0.0], [0.1 * largest, -0.3 * largest]], dtype=torch.float64)
    assert torch.equal(scatter(points), scatter(points, extent=extent))
    assert not torch.equal(scatter(points), scatter(points, extent=1.3 * extent))


def test_points_beyond_and_points_not_finite_are_seen():
    """Catches a diverged sample that falls silently out of the picture; the control has neither."""
    inside = torch.tensor([[0.1, 0.1]])
    assert scatter(inside, extent=1.0)[0, 0].tolist() == [255, 255, 255]
    beyond = scatter(torch.tensor([[0.1, 0.1], [99.0, 0.5]]), extent=1.0)
    assert (64, 255) in ink_places(beyond)
    for bad in (float("nan"), float("inf")):
        picture = scatter(torch.cat([inside, torch.tensor([[bad, 0.0]])]), extent=1.0)
        assert picture[0, 0].tolist() == picture[100, 255].tolist() == picture[255, 9].tolist() == MAGENTA
        assert torch.equal(picture[3:-3, 3:-3], scatter(inside, extent=1.0)[3:-3, 3:-3])
    assert scatter(torch.full((3, 2), float("nan"))).shape == (256, 256, 3)


def test_pictures_are_quick(tmp_path):
    """Catches loops over pixels or points in Python."""
    start_s = time.process_time()
    write_png(tmp_path / "a.png", picture_of(torch.randn(64, 3, 64, 64), columns=8))
    write_png(tmp_path / "b.png", picture_of(torch.randn(100_000, 2), columns=8))
    assert time.process_time() - start_s < 2.0
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png"}
