# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: what is refused and why, exact slice loads on uneven ranks, the writer against safetensors."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from distill_core.safetensors_io import INDEX, load_into, open_folder, read_tensor, write_folder


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"embed.weight": torch.randn(7, 4), "norm.weight": torch.randn(1), "a.bias": torch.randn(2),
            "head.weight": torch.randn(10, 3), "scale": torch.randn(())}


def two_shards(folder: Path) -> Path:
    """weights() in the layout that transformers writes, by the safetensors library itself."""
    folder.mkdir()
    parts = {"model-00001-of-00002.safetensors": ["embed.weight", "norm.weight"],
             "model-00002-of-00002.safetensors": ["a.bias", "head.weight", "scale"]}
    for file, names in parts.items():
        save_file({name: weights()[name] for name in names}, folder / file, metadata={"format": "pt"})
    write_index(folder, {name: file for file, names in parts.items() for name in names})
    return folder


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, msg=name)


# --- open_folder ----------------------------------------------------------------------------------------------------

def test_both_layouts_load_exactly(tmp_path):
    """Catches a loader that handles only one layout, or confuses files or rows."""
    (tmp_path / "single").mkdir()
    save_file(weights(), tmp_path / "single" / "model.safetensors")
    for folder in (two_shards(tmp_path / "shards"), tmp_path / "single"):
        index, target = open_folder(folder), zeros_like(weights())
        load_into(index, target)
        assert_same(target, weights())
        assert_same({name: read_tensor(index, name) for name in index.entries}, weights())


def test_index_wins_and_stray_shards_are_ignored(tmp_path):
    """Catches globbing: a consolidated or leftover file beside the shards must not be read."""
    folder = two_shards(tmp_path / "m")
    wrong = {name: tensor + 1 for name, tensor in weights().items()}
    save_file(wrong, folder / "model.safetensors")
    save_file(wrong, folder / "model-00003-of-00003.safetensors")
    target = zeros_like(weights())
    load_into(open_folder(folder), target)
    assert_same(target, weights())


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x.safetensors", "x.bin",
                                  "", 3, None, "x.safetensors\n"])
def test_shard_names_that_leave_the_folder_are_refused_before_open(tmp_path, monkeypatch, file):
    """Catches os.path.join with a path from a downloaded file. The outer file exists; only the index may open."""
    folder = two_shards(tmp_path / "m")
    save_file(weights(), tmp_path / "x.safetensors")
    write_index(folder, dict.fromkeys(weights(), file))
    monkeypatch.setattr("distill_core.safetensors_io.safe_open", lambda *args, **kwargs: pytest.fail("opened a shard"))
    with pytest.raises(ValueError, match="plain name"):
        open_folder(folder)


def test_index_and_shards_must_agree(tmp_path):
    """Catches uninitialised weights: a missing shard, a key that its shard lacks, a key that the index lacks."""
    folder = two_shards(tmp_path / "m")
    good = json.loads((folder / INDEX).read_text())["weight_map"]
    first, second = sorted(set(good.values()))
    cases = [(good | {"more": "model-00009-of-00009.safetensors"}, "model-00009-of-00009.safetensors: is missing"),
             (good | {"more": first}, f"{first}: lacks tensor more"),
             ({name: file for name, file in good.items() if name != "a.bias"}, f"{second}: holds tensor a.bias"),
             (good | {"a.bias": first}, f"{first}: lacks tensor a.bias"),
             ({}, "no 'weight_map'")]
    for weight_map, message in cases:
        write_index(folder, weight_map)
        with pytest.raises(ValueError, match=message):
            open_folder(folder)
    write_index(folder, good)
    assert open_folder(folder).entries.keys() == weights().keys()  # control: the unbroken folder opens


def test_duplicate_keys_are_refused(tmp_path):
    """Catches json.loads and safetensors, which both take one of the two values without a word."""
    folder = two_shards(tmp_path / "m")
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"a.bias"', '"scale"'))
    with pytest.raises(ValueError, match="duplicate key 'scale'"):
        open_folder(folder)
    entry = '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{entry},{entry}}}".encode()
    raw_file(tmp_path / "d", header)
    with safe_open(tmp_path / "d" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["w"]  # control: the library itself accepts it
    with pytest.raises(ValueError, match="model.safetensors: not valid JSON .duplicate key 'w'"):
        open_folder(tmp_path / "d")


def raw_file(folder: Path, header: bytes, *, length: int | None = None, data: bytes = bytes(4)) -> None:
    folder.mkdir(exist_ok=True)
    size = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + header + data)


def test_damaged_and_empty_files_are_named(tmp_path):
    """Catches a half download, a Git LFS pointer, an absurd header length, and a folder without weights."""
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    raw_file(tmp_path / "m", header)
    assert open_folder(tmp_path / "m").entries["w"].shape == (1,)  # control
    damaged = [dict(header=header, data=bytes(3)), dict(header=header, data=bytes(5)),
               dict(header=header, length=2**63), dict(header=header, length=3),
               dict(header=b"version https://git-lfs.github.com/spec/v1"), dict(header=b"[]"), dict(header=b"")]
    for case in damaged:
        raw_file(tmp_path / "m", **case)
        with pytest.raises(ValueError, match="model.safetensors: "):
            open_folder(tmp_path / "m")
    raw_file(tmp_path / "m", b"{}", data=b"")
    with pytest.raises(ValueError, match="no tensors"):
        open_folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="model.safetensors: "):
        open_folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither"):
        open_folder(tmp_path / "m")


def test_quantised_weights_are_refused(tmp_path):
    """Catches int8 codes copied into float parameters as if they were weights."""
    (tmp_path / "m").mkdir()
    save_file({"w": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match="tensor w has dtype I8"):
        open_folder(tmp_path / "m")


def test_the_link_farm_of_the_hub_cache_opens(tmp_path):
    """Catches an over-strict path check: the Hugging Face cache has links to ../../blobs."""
    (tmp_path / "snap").mkdir()
    for path in two_shards(tmp_path / "blobs").iterdir():
        (tmp_path / "snap" / path.name).symlink_to(path)
    assert open_folder(tmp_path / "snap").entries.keys() == weights().keys()


# --- load_into ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_are_cast_to_the_target(tmp_path, dtype):
    """Catches reinterpreted bytes: a bf16 file in fp32 parameters, and back."""
    source = {name: tensor.to(dtype) for name, tensor in weights().items()}
    write_folder(tmp_path / "m", source.items())
    for target_dtype in (torch.float32, torch.bfloat16, torch.float64):
        target = {name: torch.zeros_like(tensor, dtype=target_dtype) for name, tensor in source.items()}
        load_into(open_folder(tmp_path / "m"), target)
        assert_same(target, {name: tensor.to(target_dtype) for name, tensor in source.items()})


def test_names_and_shapes_are_refused_before_any_write(tmp_path):
    """Catches strict=False: random weights left in place, or half the model filled when the error comes."""
    index = open_folder(two_shards(tmp_path / "m"))
    whole = zeros_like(weights())
    without_head = {name: tensor for name, tensor in whole.items() if name != "head.weight"}
    cases = [(whole | {"lm_head.weight": torch.zeros(1)}, "lacks 1 tensor.s. .lm_head.weight."),
             (without_head, "has 1 tensor.s. .head.weight. that the model has not"),
             (whole | {"embed.weight": torch.zeros(4, 7)},
              r"embed.weight is \[7, 4\] in model-00001-of-00002.safetensors, \[4, 7\] in the model")]
    for target, message in cases:
        with pytest.raises(ValueError, match=message):
            load_into(index, target)
        assert not any(tensor.any() for tensor in target.values())
    load_into(index, without_head, allow_extra=lambda name: name == "head.weight")
    assert_same(without_head, {name: weights()[name] for name in without_head})


def test_parameters_that_require_grad_and_progress(tmp_path):
    """Catches an in-place copy that autograd refuses or records, and a progress that does not end at its total."""
    index = open_folder(two_shards(tmp_path / "m"))
    target = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in weights().items()}
    seen = []
    load_into(index, target, progress=lambda done, total: seen.append((done, total)))
    assert_same({name: p.detach() for name, p in target.items()}, weights())
    assert all(p.grad_fn is None for p in target.values())
    total = sum(tensor.nbytes for tensor in weights().values())
    assert len(seen) == len(target) and seen == sorted(seen) and seen[-1] == (total, total)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_uneven_and_empty_shards_get_their_rows(tmp_path, world_size):
    """Catches wrong chunk arithmetic (7, 1, 2 and 10 rows on 2 and 3 ranks) and a rank that reads more than its own."""
    folder = two_shards(tmp_path / "m")

    def body(rank: int) -> tuple[dict[str, torch.Tensor], int]:
        mesh = init_device_mesh("cpu", (world_size,))
        target = {}
        for name, tensor in weights().items():
            chunks = list(tensor.chunk(world_size)) if tensor.ndim else []
            local = chunks[rank] if rank < len(chunks) else tensor.new_empty(0, *tensor.shape[1:])
            target[name] = torch.zeros(()) if not tensor.ndim else DTensor.from_local(
                torch.zeros_like(local), mesh, (Shard(0),), shape=tensor.shape, stride=tensor.stride(), run_check=False)
        read_bytes = []
        load_into(open_folder(folder), target, progress=lambda done, total: read_bytes.append(done))
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in target.items()}
        return full, read_bytes[-1]

    results = run_ranks(body, world_size)
    for full, _ in results:
        assert_same(full, weights())
    whole = sum(tensor.nbytes for tensor in weights().values())
    assert sum(num for _, num in results) == whole + 4 * (world_size - 1)  # the 0-d tensor is not sharded


def test_fsdp_parameters_are_filled_in_place(tmp_path):
    """Catches a copy into a temporary of a DTensor: FSDP2 would go on with uninitialised shards."""
    torch.manual_seed(1)
    expected = {name: torch.randn(shape) for name, shape in {"weight": (5, 3), "bias": (5,)}.items()}
    write_folder(tmp_path / "m", expected.items())

    def body(rank: int) -> torch.Tensor:
        with torch.device("meta"):
            layer = torch.nn.Linear(3, 5)
        fully_shard(layer, mesh=init_device_mesh("cpu", (3,)))
        layer.to_empty(device="cpu")
        load_into(open_folder(tmp_path / "m"), dict(layer.named_parameters()))
        return layer(torch.ones(2, 3)).detach()

    for out in run_ranks(body, 3):
        torch.testing.assert_close(out, torch.nn.functional.linear(torch.ones(2, 3), **expected))


PEAK_OF_A_LOAD = """
import sys, torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from pathlib import Path
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from distill_core.safetensors_io import load_into, open_folder

def peak_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

folder, keep_maps = Path(sys.argv[1]), sys.argv[2] == "True"
dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
mesh = init_device_mesh("cpu", (2,))
target = {f"w{i}": DTensor.from_local(torch.empty(32, 1 << 15), mesh, (Shard(0),), run_check=False) for i in range(16)}
index, before = open_folder(folder), peak_mib()
maps = [safe_open(path, "pt") for path in folder.glob("*.safetensors") if keep_maps]
for name, file in ((name, file) for file in maps for name in file.keys()):
    file.get_slice(name)[32:].sum()
load_into(index, target)
assert all((target[f"w{i}"].to_local() == i).all() for i in range(16))
print(peak_mib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_peak_memory_is_shard_plus_largest_tensor(tmp_path):
    """Catches a load by way of the whole model, and memory maps kept open (their pages count as ours).

    In a process of its own: a fork of a long test run inherits freed memory, in which a load does not show.
    """
    tensors = {f"w{i}": torch.full((64, 1 << 15), float(i)) for i in range(16)}  # 8 MiB each, 128 MiB in all
    write_folder(tmp_path / "m", tensors.items(), max_shard_bytes=64 << 20)

    def peak_mib(keep_maps: bool) -> float:
        command = [sys.executable, "-c", PEAK_OF_A_LOAD, str(tmp_path / "m"), str(keep_maps)]
        return float(subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, check=True, text=True,
                                    capture_output=True).stdout)

    bound = 1.1 * 64 + 8
    assert 60 < peak_mib(keep_maps=False) <= bound
    assert peak_mib(keep_maps=True) > bound  # control: it would show


# --- write_folder ---------------------------------------------------------------------------------------------------

def test_single_file_is_what_the_library_reads(tmp_path):
    """Catches a wrong header, padding or offset of our own serialiser, and metadata that transformers insists on."""
    source = weights() | {"transposed": torch.randn(3, 2).half().T, "b": torch.randn(5).bfloat16(),
                          "d": torch.ones(2).double(), "none": torch.ones(0, 3)}
    write_folder(tmp_path / "m", source.items())
    assert os.listdir(tmp_path / "m") == ["model.safetensors"]
    assert_same(load_file(tmp_path / "m" / "model.safetensors"), source)
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_and_index(tmp_path):
    """Catches off-by-one shard names, a limit that is exceeded, and a total_size that is not the sum."""
    source = {f"w{i}": torch.full((10,), float(i)) for i in range(7)} | {"large": torch.ones(50)}
    write_folder(tmp_path / "m", source.items(), max_shard_bytes=100)
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in source.values())
    merged = {}
    for file in files:
        part = load_file(tmp_path / "m" / file)
        assert sum(tensor.nbytes for tensor in part.values()) <= 100 or list(part) == ["large"]
        assert all(index["weight_map"][name] == file for name in part)
        merged |= part
    assert_same(merged, source)
    target = zeros_like(source)
    load_into(open_folder(tmp_path / "m"), target)
    assert_same(target, source)


def test_files_have_the_mode_of_the_umask(tmp_path):
    """Catches the library's 0600: nobody else on a shared file system could read the export."""
    for umask, file_mode, folder_mode in ((0o022, 0o644, 0o755), (0o027, 0o640, 0o750)):
        before = os.umask(umask)
        try:
            folder = tmp_path / f"{umask}"
            write_folder(folder, weights().items(), max_shard_bytes=64)
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == folder_mode
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {file_mode}


def test_a_folder_with_files_is_never_touched(tmp_path):
    """Catches an export over another model, also over one with other file names."""
    write_folder(tmp_path / "m", weights().items())
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="already holds files"):
        write_folder(tmp_path / "m", [("other", torch.ones(1))], max_shard_bytes=1)
    assert os.listdir(tmp_path / "m") == ["model.safetensors"]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_a_failed_write_leaves_nothing_to_load(tmp_path):
    """Catches a folder that looks complete although the source of tensors failed, a name came twice, or none came."""
    def failing():
        yield "w", torch.ones(4)
        yield "v", torch.ones(4)
        raise RuntimeError("source")

    cases = [(failing(), RuntimeError, "source"), ([], ValueError, "no tensors"),
             ([("w", torch.ones(4)), ("w", torch.ones(4))], ValueError, "comes twice"),
             ([("w", torch.ones(4)), ("i", torch.ones(4, dtype=torch.int64))], ValueError, "tensor i: torch.int64")]
    for tensors, error, message in cases:
        with pytest.raises(error, match=message):
            write_folder(tmp_path / "m", tensors, max_shard_bytes=4)
        assert os.listdir(tmp_path / "m") == []


def test_everything_is_synced_before_the_last_name(tmp_path, monkeypatch):
    """Catches an index that reaches the disk before the shards that it lists."""
    calls, paths = [], {}
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def spy_open(path, flags, *args):
        descriptor = real_open(path, flags, *args)
        paths[descriptor] = Path(path).name
        return descriptor

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", paths[fd])), real_fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(("rename", Path(b).name)), real_rename(a, b)))
    write_folder(tmp_path / "m", weights().items(), max_shard_bytes=64)
    renames = [i for i, (call, _) in enumerate(calls) if call == "rename"]
    assert len(renames) >= 2 and all(call == "fsync" for call, _ in calls[:renames[0]])
    assert len(calls[:renames[0]]) == len(renames)
    assert calls[-2:] == [("fsync", INDEX), ("fsync", "m")]


def test_one_shard_is_held_at_a_time(tmp_path):
    """Catches a writer that keeps all tensors, or two shards: the source counts which of its arrays are still alive."""
    arrays, most = [], 0

    def source():
        nonlocal most
        for i in range(12):
            array = np.full((10,), i, dtype=np.float32)
            arrays.append(weakref.ref(array))
            most = max(most, sum(ref() is not None for ref in arrays))
            yield f"w{i}", torch.from_numpy(array)

    write_folder(tmp_path / "m", source(), max_shard_bytes=80)
    assert len(open_folder(tmp_path / "m").entries) == 12
    assert most == 3  # a full shard of 2, and the one that is being made
