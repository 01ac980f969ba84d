# SPDX-License-Identifier: Apache-2.0
"""data.py: latents and conditions from .npz files and folders of shards, and the one-line refusals of bad ones."""
from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from distill_core.data import read_conditions, read_latents

DIGITS = Path(__file__).resolve().parent.parent / "examples" / "digits" / "digits.npz"
X = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
LABELS = np.array([2, 0, 1, 2])


def write_npz(path: Path, **arrays) -> Path:
    np.savez(path, **{"x": X, "labels": LABELS} | arrays)
    return path


def write_folder(folder: Path, *shards: dict, index: list | None = None) -> Path:
    folder.mkdir()
    lines = []
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"part-{number}.safetensors")
        lines.append({"file": f"part-{number}.safetensors", "count": len(next(iter(shard.values())))})
    (folder / "index.jsonl").write_text("\n".join(json.dumps(line) for line in (index or lines)) + "\n")
    return folder


def refusal(path, read=read_latents, **arguments) -> str:
    """The message with which a file is refused; always one line that begins with a path."""
    with pytest.raises(ValueError) as caught:
        read(path, **arguments)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 400, message
    return message


# --- what is read ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_npz(tmp_path, dtype):
    """Catches values that change on the way, a byte order that is not the machine's, and wrong dtypes."""
    path = write_npz(tmp_path / "a.npz", x=X.astype(dtype), labels=LABELS.astype(np.uint8))
    x, labels = read_latents(path, num_classes=3)
    assert (x.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert torch.equal(x, torch.from_numpy(X)) and labels.tolist() == LABELS.tolist()
    assert torch.equal(read_conditions(str(path)), labels)


def test_integers_are_scaled(tmp_path):
    """Catches bytes that are read as values from 0 to 255, whatever the file meant."""
    path = write_npz(tmp_path / "a.npz", x=X.astype(np.uint8), scale=0.5, offset=np.float32(-1))
    assert torch.equal(read_latents(path)[0], torch.from_numpy(X) * 0.5 - 1)
    assert "uint8 without scale and offset" in refusal(write_npz(tmp_path / "b.npz", x=X.astype(np.uint8), scale=0.5))
    assert "scale: expected one finite number" in refusal(write_npz(tmp_path / "c.npz", scale=np.ones(1)))


def test_shards_in_the_order_of_the_index(tmp_path):
    """Catches an order of names on disk, a lost shard, and labels that a missing x keeps from being read."""
    def shard(start, stop):
        return {"x": torch.from_numpy(X[start:stop]).bfloat16(), "labels": torch.from_numpy(LABELS[start:stop])}

    index = [{"file": "part-1.safetensors", "count": 1}, {"file": "part-0.safetensors", "count": 3}]
    folder = write_folder(tmp_path / "a", shard(1, 4), shard(0, 1), index=index)
    x, labels = read_latents(folder)
    assert torch.equal(x, torch.from_numpy(X)) and labels.tolist() == LABELS.tolist() and x.dtype == torch.float32
    only_labels = write_folder(tmp_path / "b", {"labels": torch.tensor([4, 5])})
    assert read_conditions(only_labels).tolist() == [4, 5]
    assert "holds no x (it has: labels)" in refusal(only_labels)


def test_the_shipped_digits():
    """Catches a data file that was changed: its size, range and class counts are published."""
    x, labels = read_latents(DIGITS, num_classes=10)
    assert x.shape == (1797, 1, 8, 8) and (x.min(), x.max()) == (-1, 1) and torch.equal((x * 8).round(), x * 8)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


# --- what is refused ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arrays, reason", [
    ({"labels": LABELS[:3]}, "expected numbers [N, ...] with N = 3"),
    ({"labels": LABELS.astype(np.float32)}, "labels: expected class numbers [N], got torch.float32 [4]"),
    ({"labels": LABELS[:, None]}, "labels: expected class numbers [N], got torch.int64 [4, 1]"),
    ({"labels": np.array([], dtype=int), "x": X[:0]}, "labels: expected class numbers [N], got torch.int64 [0]"),
    ({"labels": np.array([0, -1, 0, 0])}, "labels[1]: -1 is no class"),
    ({"labels": np.array([0, 0, 0, 2**40])}, "labels[3]: 1099511627776 is no class"),
    ({"x": np.where(X == 7, np.nan, X)}, "x[1]: holds NaN or infinity"),
    ({"x": np.full((4, 2), 1e300)}, "x[0]: holds NaN or infinity"),
    ({"x": X.astype(complex)}, "x: expected numbers, got complex128"),
    ({"x": np.array([None] * 4)}, "Object arrays cannot be loaded"),
    ({"x": LABELS.astype(np.float32)}, "x: expected numbers [N, ...] with N = 4 as in labels, got torch.float32 [4]"),
])
def test_bad_arrays(tmp_path, arrays, reason):
    """Catches data that train nonsense or fail later with a traceback."""
    assert reason in refusal(write_npz(tmp_path / "a.npz", **arrays))


def test_a_class_that_the_model_does_not_have(tmp_path):
    """Catches an index error on the device, many steps later, for labels of another data set."""
    path = write_npz(tmp_path / "a.npz")
    assert "labels[0]: 2 is no class (the model has 0 to 1)" in refusal(path, num_classes=2)
    assert "labels[0]: 2 is no class (the model has 0 to 1)" in refusal(path, read_conditions, num_classes=2)
    assert read_conditions(path, num_classes=3).tolist() == LABELS.tolist()


def test_bad_files(tmp_path):
    """Catches a file that is missing, cut short, of another kind, or a pickle that would run."""
    assert "cannot be read: No such file" in refusal(tmp_path / "nowhere.npz")
    (tmp_path / "text.npz").write_text("not a zip")
    assert "not an .npz file" in refusal(tmp_path / "text.npz")

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "bomb.npz").write_bytes(pickle.dumps(Bomb()))
    assert "not an .npz file" in refusal(tmp_path / "bomb.npz")
    assert "Object arrays" in refusal(write_npz(tmp_path / "bomb2.npz", x=np.array([Bomb()] * 4, dtype=object)))
    assert not (tmp_path / "ran").exists()
    whole = write_npz(tmp_path / "whole.npz").read_bytes()
    for length in range(0, len(whole), 37):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        refusal(tmp_path / "cut.npz")
    damaged = bytearray(whole)
    damaged[200] ^= 1  # inside x: its checksum fails
    (tmp_path / "damaged.npz").write_bytes(damaged)
    assert "CRC" in refusal(tmp_path / "damaged.npz")


@pytest.mark.parametrize("line, reason", [
    ({"file": "../part-0.safetensors", "count": 2}, "expected the plain name of a .safetensors file"),
    ({"file": "part-0.npz", "count": 2}, "expected the plain name of a .safetensors file"),
    ({"file": "part-9.safetensors", "count": 2}, "No such file"),
    ({"file": "part-0.safetensors", "count": 3}, "expected 3 samples as in index.jsonl, got [2, 3], [2]"),
    ({"file": "part-0.safetensors", "count": True}, "count: expected the number of samples in the shard, got true"),
    ({"file": "part-0.safetensors"}, "expected an object with file and count"),
    ({"file": "cut.safetensors", "count": 2}, "cut.safetensors: "),
    ({"file": "other.safetensors", "count": 2}, "samples have shape [4], those of the first shard [3]"),
])
def test_bad_shards(tmp_path, line, reason):
    """Catches an index that leaves the folder or does not describe its shards."""
    labels = torch.tensor([0, 1])
    shard = {"x": torch.zeros(2, 3), "labels": labels}
    folder = write_folder(tmp_path / "a", shard, index=[{"file": "part-0.safetensors", "count": 2}, line])
    save_file(shard | {"x": torch.zeros(2, 4)}, folder / "other.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "part-0.safetensors").read_bytes()[:-1])
    assert reason in refusal(folder)


def test_a_folder_without_a_usable_index(tmp_path):
    """Catches shards that are taken from a folder whose order and completeness nobody has written down."""
    (tmp_path / "a").mkdir()
    assert "index.jsonl: cannot be read: No such file" in refusal(tmp_path / "a")
    (tmp_path / "a" / "index.jsonl").write_text("\n")
    assert "index.jsonl: names no shard" in refusal(tmp_path / "a")
    (tmp_path / "a" / "index.jsonl").write_text("{\n")
    assert "index.jsonl:1: malformed JSON" in refusal(tmp_path / "a")
