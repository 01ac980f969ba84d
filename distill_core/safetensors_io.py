# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face weight folders: checked headers, slice reads into plain or sharded parameters, shards.

A folder holds `model.safetensors`, or `model-0000i-of-0000N.safetensors` with `model.safetensors.index.json` =
{"metadata": {"total_size": bytes}, "weight_map": {name: file}}. A safetensors file is an 8-byte little-endian header
length, a JSON header {name: {"dtype", "shape", "data_offsets"}}, then the data (github.com/huggingface/safetensors).

    index = open_folder("SmolLM2-135M")                        # reads headers only
    load_into(index, dict(model.named_parameters()))           # each rank reads only the rows that it owns
    write_folder("copy", ((name, read_tensor(index, name)) for name in index.entries), max_shard_bytes=2**30)
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_JSON_BYTES = 100 * 10**6  # as safetensors allows a header


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: file (a base name in the folder), dtype, shape."""
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorIndex:
    """A validated folder. `entries` is in reading order: file by file, by offset."""
    folder: Path
    entries: dict[str, Entry]


# ---------------------------------------------------------------------------------------------------------------------
# Read

def open_folder(folder: str | Path) -> TensorIndex:
    """Validates a folder without reading tensor data. The index wins over a single file; stray shards are ignored.

    ValueError, naming the file: nothing to load, bad or duplicate JSON, a shard name that leaves the folder, a missing
    or truncated shard, an index and shards that disagree, a dtype other than F64 / F32 / F16 / BF16. Symbolic links are
    followed (the Hugging Face cache consists of them). `metadata.total_size` is not compared: published ones are stale.
    """
    folder = Path(folder)
    if os.path.lexists(folder / INDEX):
        weight_map = _read_weight_map(folder / INDEX)
        shards = {file: _read_header(folder / file) for file in sorted(set(weight_map.values()))}
        _check_weight_map(folder / INDEX, weight_map, shards)
    elif os.path.lexists(folder / SINGLE):
        shards = {SINGLE: _read_header(folder / SINGLE)}
    else:
        raise ValueError(f"{folder}: holds neither {INDEX} nor {SINGLE}; give a folder in Hugging Face format")
    entries = {name: entry for shard in shards.values() for name, entry in shard.items()}
    if not entries:
        raise ValueError(f"{folder}: holds no tensors; download it again")
    return TensorIndex(folder, entries)


def check_tensors(index: TensorIndex, tensors: dict[str, Tensor], *,
                  allow_extra: Callable[[str], bool] | None = None) -> None:
    """The checks of `load_into` alone: names and shapes of `tensors`, which may be on the meta device."""
    missing = [name for name in tensors if name not in index.entries]
    if missing:
        raise ValueError(f"{index.folder}: lacks {_listed(missing)}; does its config.json describe these weights?")
    extra = [name for name in index.entries if name not in tensors and not (allow_extra and allow_extra(name))]
    if extra:
        raise ValueError(f"{index.folder}: has {_listed(extra)} that the model has not; "
                         f"does its config.json describe these weights?")
    wrong = [f"{shown(name)} is {list(index.entries[name].shape)} in {index.entries[name].file}, {list(tensor.shape)} "
             f"in the model" for name, tensor in tensors.items() if index.entries[name].shape != tuple(tensor.shape)]
    if wrong:
        raise ValueError(f"{index.folder}: {len(wrong)} shape(s) differ: {'; '.join(wrong[:4])}; "
                         f"does its config.json describe these weights?")


@torch.no_grad()
def load_into(index: TensorIndex, tensors: dict[str, Tensor], *, allow_extra: Callable[[str], bool] | None = None,
              progress: Callable[[int, int], None] | None = None) -> None:
    """Copies (and casts) the folder's tensors in place into `tensors`, which are plain tensors or DTensors.

    A DTensor is Shard(0) on a 1-D mesh (uneven and empty shards included): its rank reads its own rows only. One tensor
    is read at a time and no collective is used. Before anything is read, names and shapes must agree, or ValueError; a
    name that only the folder has is refused unless `allow_extra(name)`, e.g. `lambda name: name == "lm_head.weight"`
    for a tied model. `progress(done_bytes, total_bytes)` is called after each tensor with what this rank reads.
    """
    check_tensors(index, tensors, allow_extra=allow_extra)
    parts = {name: _local_part(name, tensors[name]) for name in index.entries if name in tensors}
    num_bytes = {name: local.numel() * index.entries[name].dtype.itemsize for name, (local, _) in parts.items()}
    done_bytes, total_bytes = 0, sum(num_bytes.values())
    for name, (local, start) in parts.items():
        _read_rows(index, name, local, start)
        done_bytes += num_bytes[name]
        if progress is not None:
            progress(done_bytes, total_bytes)


def weights_digest(index: TensorIndex) -> str:
    """sha256 over names, shapes, dtypes and the first and last rows of every tensor: seconds for any size of model.

    It tells models of one architecture apart (training changes every tensor); it is no proof against tampering.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(index.entries.items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        with safe_open(index.folder / entry.file, framework="pt") as file:
            source = file.get_slice(name)
            last = entry.shape[0] - 1 if entry.shape else 0
            rows = [source[...]] if len(entry.shape) < 2 else [source[:1], source[last:last + 1]]
        for part in rows:
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_tensor(index: TensorIndex, name: str) -> Tensor:
    """One whole tensor on CPU, in the dtype of its file."""
    entry = index.entries[name]
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    _read_rows(index, name, tensor, 0)
    return tensor


def read_json(path: Path, *, remedy: str = "download it again") -> dict[str, Any]:
    """The JSON object of a file, read strictly.

    ValueError, naming the file and the remedy: not readable, no regular file (a pipe would never end), larger than
    MAX_JSON_BYTES, not UTF-8, nested too deeply, a duplicate key, NaN, Infinity or a number that overflows, no object.
    """
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise ValueError(f"{path}: is no regular file, or a broken link; {remedy}")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path}: is larger than {MAX_JSON_BYTES} bytes; {remedy}")
        return _parse_json(path, path.read_bytes(), remedy)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: no 'weight_map' of tensor names; download it again")
    for name, file in weight_map.items():
        # A path here would let a downloaded folder make us open any file: refused before anything is opened.
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", file, re.ASCII):
            raise ValueError(f"{path}: {shown(name)} is said to be in {str(file)[:100]!r}, which is not the plain name "
                             f"of a .safetensors file beside the index; get the folder from a source that you trust")
    return weight_map


def _check_weight_map(path: Path, weight_map: dict[str, str], shards: dict[str, dict[str, Entry]]) -> None:
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ValueError(f"{path.parent / file}: lacks tensor {shown(name)}, which {path.name} lists; "
                             f"download it again")
    for file, shard in shards.items():
        for name in shard:
            if weight_map.get(name) != file:
                raise ValueError(f"{path.parent / file}: holds tensor {shown(name)}, which {path.name} "
                                 f"places in {weight_map.get(name, 'no file')}; index and shards are not of one model")


def _read_header(path: Path) -> dict[str, Entry]:
    """Tensor names of one file in the order of their data."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: is missing, or no regular file; download it again")
    try:
        with safe_open(path, framework="pt"):  # checks the header's length, all offsets and the length of the file
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: is not a whole safetensors file ({shown(str(error), 200)}); download it "
                         f"again") from None
    with open(path, "rb") as file:
        header = _parse_json(path, file.read(int.from_bytes(file.read(8), "little")), "download it again")
    header.pop("__metadata__", None)
    for name, fields in header.items():
        if fields["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {shown(name)} has dtype {fields['dtype']}; use weights in "
                             f"{', '.join(DTYPES)}")
    return {name: Entry(path.name, DTYPES[fields["dtype"]], tuple(fields["shape"]))
            for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"])}


def _parse_json(path: Path, raw: bytes, remedy: str) -> dict[str, Any]:
    """A JSON object; what Python and safetensors resolve silently, or Python adds to JSON, is refused."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}; {remedy}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"duplicate key '{shown(key)}'")
        values[key] = value
    return values


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def shown(text: str, length: int = 100) -> str:
    """Foreign text for a message, in one line of bounded length."""
    text = text if len(text) <= length else text[:length] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _listed(names: list[str]) -> str:
    return f"{len(names)} tensor(s) ({', '.join(map(shown, names[:4]))}{', ...' if len(names) > 4 else ''})"


def _local_part(name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a tensor, and the global row at which that begins."""
    assert not tensor.is_meta, f"{name} is on the meta device: materialise it before loading"
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, local = tensor.device_mesh, tensor.to_local()
    assert mesh.ndim == 1 and tensor.placements == (Shard(0),), f"{name}: {tensor.placements} on {mesh}"
    # The rule of torch.chunk, which DTensor and FSDP2 follow: full chunks first, then a short one, then empty ones.
    chunk = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, tensor.shape[0])
    assert local.shape[0] == min(chunk, tensor.shape[0] - start), f"{name}: {local.shape} at row {start} of {chunk}"
    return local, start


def _read_rows(index: TensorIndex, name: str, local: Tensor, start: int) -> None:
    """Fills `local` from the rows that begin at `start`.

    The file is opened for each tensor since pages of a memory map count as this process's memory until it is closed.
    """
    if local.numel() == 0:
        return
    with safe_open(index.folder / index.entries[name].file, framework="pt") as file:
        source = file.get_slice(name)
        local.copy_(source[start:start + local.shape[0]] if local.ndim else source[...])


# ---------------------------------------------------------------------------------------------------------------------
# Write

def write_folder(folder: str | Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int = 4 << 30) -> None:
    """Writes tensors, drawn one by one and kept until their shard is full, as a Hugging Face folder.

    One `model.safetensors` if it fits max_shard_bytes, else numbered shards and an index (a tensor above the limit has
    a shard to itself). Everything is fsynced, with mode 0666 less the umask. The shards get their names only when all
    are written, and the index comes last: a folder cut short by a crash is refused by `open_folder`. ValueError if the
    folder already holds files, a name comes twice or there are no tensors.
    """
    folder = Path(folder)
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise ValueError(f"{folder}: already holds files; choose another folder")
    shards: dict[Path, list[str]] = {}
    total_bytes = 0
    try:
        for shard in _full_shards(tensors, max_shard_bytes):
            part = folder / f".part-{len(shards) + 1:05d}"
            shards[part] = list(shard)
            total_bytes += sum(tensor.nbytes for tensor in shard.values())
            _write_file(part, _serialize(shard))
        if not shards:
            raise ValueError(f"{folder}: no tensors to write")
        _name_shards(folder, shards, total_bytes)
    except BaseException:
        for part in shards:
            part.unlink(missing_ok=True)
        raise


def _full_shards(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    seen: set[str] = set()
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} comes twice; write a tied tensor once")
        assert not isinstance(tensor, DTensor), f"{name} is a DTensor: gather it first"
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > max_shard_bytes:
            yield shard
            shard.clear()  # frees the memory here and in the caller's loop
        seen.add(name)
        shard[name] = tensor.detach().cpu().contiguous()
    if shard:
        yield shard


def _name_shards(folder: Path, shards: dict[Path, list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        os.rename(*shards, folder / SINGLE)
    else:
        weight_map = {}
        for number, (part, names) in enumerate(shards.items(), start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            os.rename(part, folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_file(folder / INDEX, [json.dumps(index, indent=2, sort_keys=True).encode()])
    _sync_folder(folder)


def _serialize(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The header, then each tensor's bytes without a copy. Wide dtypes first, so that every tensor is aligned."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without this
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in names:
            raise ValueError(f"tensor {name}: {tensor.dtype} cannot be written; cast it to one of {', '.join(DTYPES)}")
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # safetensors' own writer: 0600, no fsync
    try:
        for buffer in buffers:
            view = memoryview(buffer)
            while len(view):
                view = view[os.write(descriptor, view):]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
