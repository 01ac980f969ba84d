# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: order of writing, damage, saving in the background, resharding, agreement of ranks, retention."""
from __future__ import annotations

import datetime
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from distill_core import checkpoint as checkpoint_module
from distill_core.checkpoint import (Saver, check_counts, check_state, compare_fingerprints, find_latest, load,
                                     newest_state, open_checkpoint, read_tensor, save)

SHAPES = {"embed": (7, 4), "one_row": (1, 3), "two_rows": (2,), "wide": (10, 3), "no_row": (0, 2)}


def values(step: int) -> dict[str, Tensor]:
    """Global values of all tensors at a step: every dtype kind, odd row counts, scalars."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors | {"wide": tensors["wide"].bfloat16(), "plain": torch.randn(3, generator=generator).double(),
                      "scalar": torch.tensor(float(step)), "bytes": torch.arange(step, step + 5, dtype=torch.uint8)}


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, msg=name)


def assert_resumes(root: Path, step: int) -> None:
    found = find_latest(root)
    assert found.step == step and found.state == {"step": step} and found.folder == root / f"step_{step:08d}"
    target = blank()
    load(found, target)
    assert_same(target, values(step))


def save_steps(root: Path, *steps: int, **options) -> None:
    for step in steps:
        save(root, step, values(step), {"step": step}, **options)


def sharded(full: Tensor, world_size: int, rank: int) -> Tensor:
    """This rank's part of a tensor in the way of FSDP2; small ones stay plain, as 0-d tensors must."""
    if full.ndim == 0 or full.dtype in (torch.float64, torch.uint8):
        return full.clone()
    chunks = list(full.chunk(world_size)) if len(full) else []
    local = chunks[rank].clone() if rank < len(chunks) else full.new_empty(0, *full.shape[1:])
    return DTensor.from_local(local, init_device_mesh("cpu", (world_size,)), (Shard(0),), run_check=False,
                              shape=full.shape, stride=full.stride())


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


# --- writing --------------------------------------------------------------------------------------------------------

def raising(error: BaseException):
    def call(*args, **kwargs):
        raise error
    return call


def test_everything_is_on_disk_before_the_name_exists(tmp_path, monkeypatch):
    """Catches a missing fsync: of a file, of the staged folder before the rename, of the parent after it."""
    calls, names = [], {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace")}

    def spy_open(path, flags, *args, **kwargs):
        descriptor = real["open"](path, flags, *args, **kwargs)
        names[descriptor] = Path(path).name.split("-")[0]
        if flags & os.O_CREAT:
            calls.append(("create", names[descriptor]))
            assert flags & os.O_EXCL
        return descriptor

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", names[fd])), real["fsync"](fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(("rename", Path(b).name)), real["rename"](a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("replace", Path(b).name)), real["replace"](a, b)))
    (tmp_path / "root").mkdir()
    save_steps(tmp_path / "root", 3)
    assert calls == [("create", "0"), ("create", "shard_00000.safetensors"), ("fsync", "shard_00000.safetensors"),
                     ("create", "manifest.json"), ("fsync", "manifest.json"), ("fsync", ".tmp"),
                     ("rename", "step_00000003"), ("fsync", "root"),
                     ("create", ".tmp"), ("fsync", ".tmp"), ("replace", "latest"), ("fsync", "root")]


def test_a_full_disk_raises_and_leaves_no_rubbish(tmp_path, monkeypatch):
    """Catches an error that is swallowed, and a staged folder that goes on filling the disk."""
    save_steps(tmp_path, 1)
    before = sorted(path.name for path in tmp_path.iterdir())

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(os, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            save_steps(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_resumes(tmp_path, 1)


def test_a_rename_that_worked_but_reports_an_error_is_a_success(tmp_path, monkeypatch):
    """Catches a run that dies on a network file system which repeats a request; a rename that failed still raises."""
    real = os.rename

    def lost_answer(source, target):
        real(source, target)
        raise OSError(errno.ENOENT, "No such file or directory")

    with monkeypatch.context() as inner:
        inner.setattr(os, "rename", lost_answer)
        save_steps(tmp_path, 1)
    assert_resumes(tmp_path, 1)

    with monkeypatch.context() as inner:
        inner.setattr(os, "rename", raising(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            save_steps(tmp_path, 2)
    assert_resumes(tmp_path, 1)


# --- damage ---------------------------------------------------------------------------------------------------------

def test_short_missing_and_stray_files(tmp_path, caplog):
    """Catches a load of what is there: truncated or absent files are named, files that nobody listed are ignored."""
    save_steps(tmp_path, 1, 2)
    folder = tmp_path / "step_00000002"
    (folder / "stray.safetensors").write_bytes(b"rubbish")
    (folder / "shard_00001.safetensors").write_bytes((folder / "shard_00000.safetensors").read_bytes())
    assert_resumes(tmp_path, 2)
    for file in ("shard_00000.safetensors", "manifest.json"):
        good = (folder / file).read_bytes()
        for damaged in (good[:-1], b"", good + b"x", bytes(len(good)), None):
            (folder / file).unlink() if damaged is None else (folder / file).write_bytes(damaged)
            caplog.clear()
            assert_resumes(tmp_path, 1)
            assert file in caplog.text
        (folder / file).write_bytes(good)
    assert_resumes(tmp_path, 2)


def rewrite_manifest(folder: Path, **changes) -> None:
    """A manifest with changed fields and the right digest: what another version, or a forger, would write."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    manifest.update(changes)
    digest = checkpoint_module._manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def test_other_versions_names_and_paths_are_refused(tmp_path):
    """Catches a future format read as if it were ours, a renamed folder, a manifest that points out of the folder."""
    save_steps(tmp_path, 2)
    folder = tmp_path / "step_00000002"
    good = (folder / "manifest.json").read_bytes()
    record = json.loads(good)["files"]["shard_00000.safetensors"]
    cases = [({"format_version": 2}, "format version 2, this code reads 1"), ({"step": 3}, "is of step 3"),
             ({"files": {"../x.safetensors": record}}, "plain name"), ({"files": {"a/b.safetensors": record}}, "plain"),
             ({"files": {}}, "lacks"), ({"files": [1]}, "lacks"), ({"state": None}, "lacks"), ({"step": True}, "lacks"),
             ({"files": {"x.safetensors": {"size": "1", "sha256": ""}}}, "size and sha256"),
             ({"files": {"x.safetensors": 3}}, "size and sha256"), ({"state": {"loss": float("nan")}}, "damaged")]
    for changes, message in cases:
        rewrite_manifest(folder, **changes)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(folder)
        (folder / "manifest.json").write_bytes(good)
    twice = good.decode().replace('"step"', '"step": 2, "step"', 1)
    for text in (twice, "[]", "{}", "null", '{"format_version": 1}', "[" * 100_000, '{"sha256": 1}'):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="manifest.json: "):
            open_checkpoint(folder)
    (folder / "manifest.json").write_bytes(good)
    open_checkpoint(folder)  # control


def rewrite_header(folder: Path, change) -> None:
    """A shard whose header a forger has changed, listed with its right size and hash."""
    path = folder / "shard_00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    rows = json.loads(header["__metadata__"]["rows"])
    change(header, rows)
    if "__metadata__" in header:
        header["__metadata__"]["rows"] = json.dumps(rows)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length:]
    path.write_bytes(data)
    rewrite_manifest(folder, files={path.name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}})


@pytest.mark.parametrize("change", [
    lambda header, rows: header.pop("__metadata__"), lambda header, rows: header.pop("wide"),
    lambda header, rows: rows.update(more={"shape": [1], "start": 0}), lambda header, rows: rows["wide"].pop("start"),
    lambda header, rows: rows["wide"].update(start=1), lambda header, rows: rows["wide"].update(start="0"),
    lambda header, rows: rows["wide"].update(shape=[10**12, 3]), lambda header, rows: rows["wide"].update(shape=[10]),
    lambda header, rows: rows["wide"].update(shape=[10, 10**12]), lambda header, rows: rows["wide"].update(shape=7),
    lambda header, rows: rows.update(wide=None), lambda header, rows: header["wide"].update(dtype="F8_E4M3"),
    lambda header, rows: header["wide"].update(data_offsets=[0, 1]),
])
def test_headers_that_do_not_fit_are_refused_before_any_allocation(tmp_path, change):
    """Catches a traceback, a half-loaded model or terabytes asked for, where hashes are right and headers are not."""
    save_steps(tmp_path, 1, 2)
    rewrite_header(tmp_path / "step_00000002", lambda header, rows: None)
    assert_resumes(tmp_path, 2)  # control
    rewrite_header(tmp_path / "step_00000002", change)
    with pytest.raises(ValueError, match="step_00000002.*(is no shard of a checkpoint|the rows of)") as caught:
        open_checkpoint(tmp_path / "step_00000002")
    assert "\n" not in str(caught.value)
    assert_resumes(tmp_path, 1)


def test_links_are_read_but_never_written_through(tmp_path):
    """Catches a save into a file that a link in the folder points to, and a link taken for damage."""
    save_steps(tmp_path / "root", 1)
    for name in ("shard_00000.safetensors", "manifest.json"):
        path = tmp_path / "root/step_00000001" / name
        path.rename(tmp_path / name)
        path.symlink_to(tmp_path / name)
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "root/latest").unlink()
    (tmp_path / "root/latest").symlink_to(tmp_path / "precious")
    assert_resumes(tmp_path / "root", 1)
    save_steps(tmp_path / "root", 2)
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "root/latest").is_symlink()


def test_nothing_to_resume_is_not_the_same_as_nothing_usable(tmp_path):
    """Catches a run that silently starts afresh over damaged checkpoints, and one that cannot start at all."""
    assert find_latest(tmp_path / "absent") is None and newest_state(tmp_path / "absent") is None
    (tmp_path / ".tmp-step_00000003-0123abcd").mkdir()
    (tmp_path / "step_3").mkdir()
    assert find_latest(tmp_path) is None  # only leftovers, and a name that is not ours
    (tmp_path / "step_00000005").mkdir()
    with pytest.raises(ValueError, match=r"none of 1 checkpoints can be used .newest: .*step_00000005.manifest.json"):
        find_latest(tmp_path)


@pytest.mark.parametrize("text", ["", "garbage\0", "../x", "step_00000001", "step_00000009"])
def test_the_hint_is_never_trusted(tmp_path, text):
    """Catches a resume by way of `latest`: stale, garbled or pointing outside."""
    save_steps(tmp_path, 1, 2)
    (tmp_path / "latest").write_text(text)
    assert_resumes(tmp_path, 2)
    assert newest_state(tmp_path) == (tmp_path / "step_00000002/manifest.json", {"step": 2})


def test_a_hint_that_cannot_be_written_only_warns(tmp_path, caplog):
    """Catches a finished save that fails the run because of a quota error on a pointer file."""
    save_steps(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    save_steps(tmp_path, 2)
    assert "latest could not be updated" in caplog.text
    assert_resumes(tmp_path, 2)


# --- an existing step, retention, modes -----------------------------------------------------------------------------

def test_an_existing_step_is_kept_if_whole_and_moved_aside_if_not(tmp_path, caplog):
    """Catches an overwrite of a published folder, a re-save after a fall-back that cannot publish, and one that is
    dropped because another run's step, or another state's, has the name."""
    save_steps(tmp_path, 1, 2)
    folder = tmp_path / "step_00000002"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert save(tmp_path, 2, values(9), {"step": 2}) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save(tmp_path, 2, values(2), {"step": 2, "position": (1, 2)})
    assert find_latest(tmp_path).state == {"step": 2, "position": [1, 2]}
    [aside] = tmp_path.glob("*unverified*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before and aside.name in caplog.text
    shutil.rmtree(folder)
    aside.rename(folder)
    (folder / "shard_00000.safetensors").write_bytes(b"")
    save_steps(tmp_path, 2)
    assert_resumes(tmp_path, 2)
    [aside] = tmp_path.glob("*unverified*")
    assert aside.name in caplog.text and (aside / "shard_00000.safetensors").read_bytes() == b""


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step_????????"))


def test_retention(tmp_path):
    """Catches off-by-one counts, a lost milestone, and the removal of the checkpoint that the run resumed from."""
    save_steps(tmp_path / "a", *range(1, 8), keep_last=2)
    assert steps_in(tmp_path / "a") == [6, 7]
    save_steps(tmp_path / "b", *range(1, 8), keep_last=1, keep_every=3)
    assert steps_in(tmp_path / "b") == [3, 6, 7]
    save_steps(tmp_path / "c", *range(1, 5))
    assert steps_in(tmp_path / "c") == [1, 2, 3, 4]
    save_steps(tmp_path / "c", 5, keep_last=1, resumed_from=tmp_path / "c" / "step_00000002")
    assert steps_in(tmp_path / "c") == [2, 5]
    assert not list(tmp_path.glob("*/.t*"))


def test_retention_counts_only_complete_checkpoints(tmp_path):
    """Catches half folders that push out the last whole one, and the removal of what is not a whole checkpoint."""
    save_steps(tmp_path, 1, 2)
    for name in ("step_00000007", "step_00000008"):
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "step_00000009")
    (tmp_path / "step_00000009" / "shard_00000.safetensors").write_bytes(b"")
    for name in ("step_1", "step_000000011", "other", ".tmp-other", ".trash-step_00000001", "step_00000001.old"):
        (tmp_path / name).mkdir()
    names = {path.name for path in tmp_path.iterdir()}
    save_steps(tmp_path, 3, keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == names - {"step_00000001"} | {"step_00000003"}


def test_newer_steps_that_do_not_verify_never_push_out_the_one_just_written(tmp_path):
    """Catches retention by number alone: after a fall-back, the newest usable step is not the highest one."""
    save_steps(tmp_path, 3, 8, 9)
    for step in (8, 9):
        path = tmp_path / f"step_{step:08d}" / "shard_00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # the right size, the wrong hash
    resumed = find_latest(tmp_path)
    assert resumed.step == 3
    save_steps(tmp_path, 4, keep_last=2, resumed_from=resumed.folder)
    assert steps_in(tmp_path) == [3, 4, 8, 9]
    assert_resumes(tmp_path, 4)


def test_retention_counts_only_what_verifies(tmp_path):
    """Catches the removal of the last good checkpoint but one: step 2 is complete by its manifest, yet damaged."""
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "step_00000002" / "shard_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    saver = Saver(tmp_path, keep_last=2)
    saver.start(3, values(3), {"step": 3})
    saver.finish()
    assert steps_in(tmp_path) == [1, 2, 3]
    path = tmp_path / "step_00000003" / "shard_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")  # the newest, now
    assert_resumes(tmp_path, 1)
    saver.start(4, values(4), {"step": 4})
    saver.start(5, values(5), {"step": 5})
    saver.finish()
    assert steps_in(tmp_path) == [4, 5]


def test_links_are_not_followed_when_removing(tmp_path, caplog):
    """Catches rmtree through a link: a step folder moved elsewhere must keep its files."""
    save_steps(tmp_path / "root", 1, 2)
    os.rename(tmp_path / "root" / "step_00000001", tmp_path / "elsewhere")
    (tmp_path / "root" / "step_00000001").symlink_to(tmp_path / "elsewhere")
    save_steps(tmp_path / "root", 3, keep_last=1)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["latest", "step_00000003"]
    with pytest.raises(AssertionError):
        checkpoint_module._delete(tmp_path / "elsewhere")


def test_a_failed_removal_only_warns(tmp_path, caplog, monkeypatch):
    """Catches a run that ends because an old checkpoint could not be deleted."""
    save_steps(tmp_path, 1, 2)

    with monkeypatch.context() as inner:
        inner.setattr(shutil, "rmtree", raising(OSError(errno.EBUSY, "Device or resource busy")))
        save_steps(tmp_path, 3, keep_last=1)
    assert "could not remove" in caplog.text
    assert_resumes(tmp_path, 3)
    save_steps(tmp_path, 4, keep_last=1)  # the next save clears the rest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000004"]
    saver = Saver(tmp_path, keep_last=1)
    saver.start(5, values(5), {"step": 5})
    with monkeypatch.context() as inner:
        inner.setattr(os, "listdir", raising(OSError(errno.ESTALE, "Stale file handle")))
        saver.finish()
    assert "could not look for old checkpoints" in caplog.text
    assert_resumes(tmp_path, 5)


def test_modes_follow_the_umask(tmp_path):
    """Catches 0600 files that the rest of the group cannot read."""
    before = os.umask(0o027)
    try:
        save_steps(tmp_path / "root", 1)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "root").rglob("*")}
    assert modes == {"step_00000001": 0o750, "shard_00000.safetensors": 0o640, "manifest.json": 0o640, "latest": 0o640}


def test_requests_that_cannot_be_saved_are_refused(tmp_path):
    """Catches a state that reads back differently (NaN), a step that the name cannot hold, a meta tensor."""
    for step, state, message in ((-1, {}, "step -1"), (10**8, {}, "does not fit"), (1, {"x": float("nan")}, "JSON"),
                                 (1, {"x": torch.ones(1)}, "JSON")):
        with pytest.raises(ValueError, match=message):
            save(tmp_path / "root", step, values(1), state)
    with pytest.raises(AssertionError, match="w: .* meta"):
        save(tmp_path / "root", 1, {"w": torch.empty(1, device="meta")}, {})
    assert not list((tmp_path / "root").iterdir())


# --- in the background ----------------------------------------------------------------------------------------------

class Gate:
    """Holds every shard back until it is opened, on the ranks where it is set up."""

    def __init__(self, monkeypatch) -> None:
        self.opened, real = threading.Event(), checkpoint_module._write_shard

        def write(*args):
            assert self.opened.wait(20)
            return real(*args)

        monkeypatch.setattr(checkpoint_module, "_write_shard", write)


def test_what_is_saved_is_the_state_at_the_call(tmp_path, monkeypatch):
    """Catches a thread that reads parameters, moments or counters while training goes on."""
    gate, saver, state = Gate(monkeypatch), Saver(tmp_path), {"step": 1, "roles": {"student": 7}}
    tensors = values(1)
    assert saver.start(1, tensors, state) == tmp_path / "step_00000001"
    for tensor in tensors.values():
        tensor.zero_()
    state["step"], state["roles"]["student"] = 2, 8
    gate.opened.set()
    assert saver.finish() == tmp_path / "step_00000001"
    found, target = find_latest(tmp_path), blank()
    load(found, target)
    assert_same(target, values(1))
    assert found.state == {"step": 1, "roles": {"student": 7}}


def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    """Catches a poll that waits for the disk, a step that is published before it is written, and a thread that would
    keep a failing process alive."""
    gate, saver = Gate(monkeypatch), Saver(tmp_path)
    assert not saver.poll()
    saver.start(1, values(1), {"step": 1})
    assert all(saver.poll() for _ in range(5)) and saver.poll(0.05)
    assert saver.published is None and find_latest(tmp_path) is None
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "checkpoint")
    gate.opened.set()
    deadline = time.monotonic() + 20
    while saver.published is None and time.monotonic() < deadline:
        saver.poll()
    assert_resumes(tmp_path, 1)
    saver.finish()
    assert (tmp_path / "latest").read_text() == "step_00000001\n"


def test_one_save_is_in_flight_at_most_and_the_copy_is_reused(tmp_path):
    """Catches saves that overtake each other, a staging folder cleared under the thread, memory that grows."""
    saver, sizes, places = Saver(tmp_path, keep_last=2), set(), set()
    for step in range(1, 6):
        saver.start(step, values(step), {"step": step})
        assert len(list(tmp_path.glob(".tmp-step*"))) <= 1 and steps_in(tmp_path)[-2:] == [*range(1, step)][-2:]
        sizes.add(saver.snapshot_bytes)
        places.add(saver._buffer.data_ptr())
    saver.finish()
    assert steps_in(tmp_path) == [4, 5] and not list(tmp_path.glob(".t*"))
    assert sizes == {sum(tensor.nbytes for tensor in values(1).values())} and len(places) == 1
    saver.start(6, {"other": torch.ones(3)}, {})  # another size is no error
    saver.finish()
    assert saver.snapshot_bytes == 12 and find_latest(tmp_path).step == 6


def test_polling_costs_no_collective_when_nothing_is_in_flight(tmp_path):
    """Catches a latency of the slowest rank at every step of training."""
    def body(rank: int) -> list[str]:
        saver = Saver(tmp_path, group=dist.group.WORLD)
        saver.start(1, values(1), {"step": 1})
        saver.finish()
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
                monkeypatch.setattr(dist, name, raising(RuntimeError(name)))
            return [outcome(saver.poll), outcome(saver.finish),
                    outcome(lambda: saver.start(2, values(2), {}))]  # control

    for poll, finish, start in run_ranks(body, 2):
        assert poll == finish == "done" and "all_gather" in start


@pytest.mark.parametrize("surfaces", ["poll", "start", "finish"])
def test_an_error_in_one_ranks_thread_is_raised_on_all(tmp_path, surfaces):
    """Catches a run that trains on without checkpoints: rank 1's disk is full while rank 0 still writes. Afterwards a
    save with the same Saver works, and leaves no rubbish."""
    save_steps(tmp_path, 1)

    def body(rank: int) -> list[str]:
        saver = Saver(tmp_path, group=dist.group.WORLD)
        mine = [{name: sharded(tensor, 2, rank) for name, tensor in values(step).items()} for step in range(4)]
        with pytest.MonkeyPatch.context() as monkeypatch:
            gate = Gate(monkeypatch)
            if rank == 1:
                monkeypatch.setattr(os, "write", raising(OSError(errno.ENOSPC, "No space left")))
                gate.opened.set()
            saver.start(2, mine[2], {"step": 2})
            if rank == 1:
                wait([saver._task])
            dist.barrier()
            call = {"poll": lambda: [saver.poll() for _ in range(2)], "finish": saver.finish,
                    "start": lambda: saver.start(3, mine[3], {"step": 3})}[surfaces]
            first = outcome(call)
            gate.opened.set()
        saver.start(3, mine[3], {"step": 3})
        saver.finish()
        return [first, str(saver.published), outcome(saver.finish)]

    for rank, (first, published, again) in enumerate(run_ranks(body, 2)):
        peers = "" if rank == 1 else "RuntimeError: stopped because rank 1 failed: "
        assert re.match(f"{peers}OSError: .*No space left", first), first
        assert published == str(tmp_path / "step_00000003") and again == "done"
    assert_resumes(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001", "step_00000003"}


def test_a_slow_disk_does_not_run_into_the_timeout_of_the_group(tmp_path):
    """Catches ranks that wait in a collective for the slowest writer: a large save would end the job."""
    def body(rank: int) -> str:
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2))
        with pytest.MonkeyPatch.context() as monkeypatch:
            gate = Gate(monkeypatch)
            saver = Saver(tmp_path, group=group)
            saver.start(1, values(1), {"step": 1})
            threading.Timer(3 * rank, gate.opened.set).start()
            return outcome(saver.finish)

    assert run_ranks(body, 2) == ["done", "done"]
    assert_resumes(tmp_path, 1)


# --- load -----------------------------------------------------------------------------------------------------------

def test_load_refuses_before_any_write(tmp_path):
    """Catches a partial load: a missing, unexpected, reshaped or recast tensor with all the others already copied."""
    save_steps(tmp_path, 1)
    found = find_latest(tmp_path)
    cases = [(blank() | {"more": torch.zeros(1)}, "more is not in the checkpoint"),
             ({name: tensor for name, tensor in blank().items() if name != "plain"}, "plain is only in the checkpoint"),
             (blank() | {"embed": torch.zeros(4, 7)}, r"embed is torch.float32 \[7, 4\] in the check.*\[4, 7\] here"),
             (blank() | {"wide": torch.zeros(10, 3)}, "wide is torch.bfloat16")]
    for target, message in cases:
        with pytest.raises(ValueError, match=message):
            load(found, target)
        assert not any(tensor.any() for tensor in target.values())
    assert_same({name: read_tensor(found, name) for name in found.tensors}, values(1))


def test_tensors_are_aligned_in_the_file(tmp_path):
    """Catches floats behind an odd number of bytes, which readers that map the file cannot use in place."""
    save_steps(tmp_path, 1)
    data = (tmp_path / "step_00000001" / "shard_00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    del header["__metadata__"]
    widths = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1}
    assert length % 8 == 0 and {fields["dtype"] for fields in header.values()} == set(widths)
    assert all(fields["data_offsets"][0] % widths[fields["dtype"]] == 0 for fields in header.values())


def test_parameters_are_filled_in_place(tmp_path):
    """Catches a rebinding: optimizers and replicas hold the old tensors."""
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    save(tmp_path, 1, {"p": parameter, "transposed": torch.arange(6.0).view(2, 3).T}, {})
    target, view = torch.nn.Parameter(torch.zeros(3, 2)), torch.zeros(2, 3)
    load(find_latest(tmp_path), {"p": target, "transposed": view.T})
    assert target.requires_grad and target.grad_fn is None and bool((target == 1).all())
    assert_same({"v": view}, {"v": torch.arange(6.0).view(2, 3)})


def test_resharding_1_2_3_1(tmp_path):
    """Catches wrong offsets for odd row counts and empty shards, rows twice, and a load bound to the world size."""
    def body(rank: int, world_size: int, step: int) -> dict[str, Tensor]:
        group = dist.group.WORLD
        target = {name: sharded(tensor, world_size, rank) for name, tensor in blank().items()}
        found = find_latest(tmp_path, group=group)
        load(found, target, group=group)
        new = {name: sharded(tensor, world_size, rank) for name, tensor in values(step + 1).items()}
        save(tmp_path, step + 1, new, {"step": step + 1}, group=group)
        return gathered(target)

    save_steps(tmp_path, 1)
    for step, world_size in enumerate((2, 3, 1, 3), start=1):
        for loaded in run_ranks(lambda rank: body(rank, world_size, step), world_size):
            assert_same(loaded, values(step))
        assert len(list((tmp_path / f"step_{step + 1:08d}").iterdir())) == world_size + 1
    assert_resumes(tmp_path, 5)


def test_fsdp_and_adamw_continue_bit_for_bit(tmp_path):
    """Catches moments keyed by index, rows lost between FSDP2's padded shards and the files, an average that is not
    resharded: 5 rows on 1, 2, 3 and 1 ranks."""
    def trained(world_size: int, rank: int, steps: range, *, resume: bool, saves: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 5)
        fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=False)
        for p in layer.parameters():
            optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p),
                                  "exp_avg_sq": torch.zeros_like(p)}
        named = dict(layer.named_parameters())
        average = {name: p.detach().clone() for name, p in named.items()}
        tensors = {f"student.{name}": p for name, p in named.items()}
        tensors |= {f"student_ema.{name}": value for name, value in average.items()}
        tensors |= {f"optim.{key}.{name}": value for name, p in named.items()
                    for key, value in optimizer.state[p].items()}
        group = dist.group.WORLD
        if resume:
            load(find_latest(tmp_path, group=group), tensors, group=group)
        for step in steps:
            layer(torch.full((2, 3), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, p in named.items():
                average[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        if saves:
            save(tmp_path, steps.stop, tensors, {}, group=group)
        return {name: t.clone() for name, t in gathered(tensors).items()}

    first = run_ranks(lambda rank: trained(1, rank, range(0, 2), resume=False, saves=True), 1)[0]
    for step, world_size in enumerate((2, 3, 1), start=3):
        for loaded in run_ranks(lambda rank: trained(world_size, rank, range(step, step), resume=True, saves=True),
                                world_size):
            assert_same(loaded, first)
    straight = run_ranks(lambda rank: trained(1, rank, range(0, 4), resume=False, saves=False), 1)[0]
    assert_same(run_ranks(lambda rank: trained(1, rank, range(2, 4), resume=True, saves=False), 1)[0], straight)
    assert not torch.equal(straight["student.weight"], straight["student_ema.weight"])


# --- agreement of ranks ---------------------------------------------------------------------------------------------

def outcome(action) -> str:
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.parametrize("failing, call, error, told", [
    (1, "write", OSError(errno.ENOSPC, "No space left"), "OSError: .*No space left"),
    (0, "write", OSError(errno.ENOSPC, "No space left"), "OSError: .*No space left"),
    (0, "rename", OSError(errno.EIO, "Input/output error"), "OSError: .*Input/output"),
    (0, "mkdir", PermissionError(errno.EACCES, "Permission denied"), "ValueError: .*cannot be written"),
    (2, "fsync", KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
])
def test_one_failing_rank_fails_all_and_leaves_the_old_checkpoint(tmp_path, failing, call, error, told):
    """Catches a hang in the next collective, a rank that believes in a checkpoint that does not exist, rubbish, and
    peers that look like the culprit."""
    save_steps(tmp_path, 1)
    before = sorted(path.name for path in tmp_path.iterdir())

    def body(rank: int) -> list[str]:
        mine = {name: sharded(tensor, 3, rank) for name, tensor in values(2).items()}
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == failing:
                monkeypatch.setattr(os, call, raising(error))
            first = outcome(lambda: save(tmp_path, 2, mine, {"step": 2}, group=dist.group.WORLD))
        dist.barrier()
        listing = sorted(path.name for path in tmp_path.iterdir())
        dist.barrier()
        return [first, str(listing), outcome(lambda: save(tmp_path, 3, mine, {"step": 3}, group=dist.group.WORLD))]

    for rank, (first, listing, second) in enumerate(run_ranks(body, 3)):
        refused, peers = f"ValueError: rank {failing}: ", f"RuntimeError: stopped because rank {failing} failed: "
        assert re.match((refused if call == "mkdir" else "" if rank == failing else peers) + told, first), first
        assert listing == str(before) and second == "done"  # and the ranks are still in step with each other
    assert find_latest(tmp_path).step == 3


def test_ranks_are_named_by_their_global_numbers(tmp_path):
    """Catches the place in the group given for the rank (teachers come first), and a rank that goes on after its
    ValueError while another one ends."""
    def body(rank: int) -> list[str]:
        group = dist.new_group([1, 2])
        errors = {1: ValueError("a bad file"), 2: OSError("a bad disk")}
        return [] if rank == 0 else [
            outcome(lambda: checkpoint_module._together(lambda: failing(rank, errors), group))
            for failing in (lambda rank, errors: raising(errors[rank])(), lambda rank, errors: 1 // (rank - 1),
                            lambda rank, errors: raising(errors[1])() if rank == 1 else 0)]

    _, first, second = run_ranks(body, 3)
    division, refusal = "ZeroDivisionError: integer division or modulo by zero", "ValueError: rank 1: ValueError: a bad"
    assert first == ["RuntimeError: stopped because rank 2 failed: OSError: a bad disk", division, f"{refusal} file"]
    assert second == ["OSError: a bad disk", f"RuntimeError: stopped because rank 1 failed: {division}",
                      f"{refusal} file"]


def test_long_reads_let_the_caller_show_that_it_lives(tmp_path, monkeypatch):
    """Catches minutes of hashing or loading in which nobody hears of this rank, damaged folders included."""
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", 64)
    save_steps(tmp_path, 1, 2)
    shard, beats = tmp_path / "step_00000002/shard_00000.safetensors", []
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")  # found by reading it all
    found = find_latest(tmp_path, beat=lambda: beats.append("hash"))
    assert found.step == 1 and len(beats) == 2 * -(-shard.stat().st_size // 64) + 2
    load(found, blank(), beat=lambda: beats.append("load"))
    assert beats.count("load") == len(blank())


def test_rank_0_decides_what_exists(tmp_path):
    """Catches ranks that each list a network folder and differ: rank 1 sees no folder at all."""
    save_steps(tmp_path, 1)

    def body(rank: int) -> int:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 1:
                monkeypatch.setattr(os, "listdir", lambda path: [])
                monkeypatch.setattr(os.path, "lexists", lambda path: False)
            save(tmp_path, 1, values(1), {"step": 1}, group=dist.group.WORLD)
            return find_latest(tmp_path, group=dist.group.WORLD).step

    assert run_ranks(body, 2) == [1, 1]


def test_a_rank_that_sees_more_than_rank_0(tmp_path):
    """Catches a silent fresh start where rank 0's node has lost the mount; a newer step elsewhere only warns."""
    save_steps(tmp_path, 1, 2)

    def body(rank: int) -> list[str]:
        group, real = dist.group.WORLD, os.listdir
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 0:
                monkeypatch.setattr(os, "listdir", lambda path: [])
            none = outcome(lambda: find_latest(tmp_path, group=group))
            if rank == 0:
                monkeypatch.setattr(os, "listdir", lambda path: [n for n in real(path) if n != "step_00000002"])
            return [none, find_latest(tmp_path, group=group).folder.name]

    for none, older in run_ranks(body, 2):
        assert re.match("ValueError: .*rank 0 sees no checkpoint, another rank sees step_00000002", none)
        assert older == "step_00000001"


def test_damage_seen_by_one_rank_makes_all_fall_back(tmp_path):
    """Catches ranks that resume different steps: the shard of rank 1 is damaged, and only rank 1 hashes it."""
    def body(rank: int) -> list:
        group = dist.group.WORLD
        for step in (1, 2):
            mine = {name: sharded(tensor, 2, rank) for name, tensor in values(step).items()}
            save(tmp_path, step, mine, {"step": step}, group=group)
        if rank == 0:
            path = tmp_path / "step_00000002" / "shard_00001.safetensors"
            path.write_bytes(path.read_bytes()[:-1])
        dist.barrier()
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("distill").addHandler(handler)
        found = find_latest(tmp_path, group=group)
        return [found.step, found.state, records]

    first, second = run_ranks(body, 2)
    assert first[:2] == second[:2] == [1, {"step": 1}]
    assert len(first[2]) == 1 and "shard_00001.safetensors" in first[2][0] and second[2] == []


def test_ranks_that_save_different_things_are_stopped(tmp_path):
    """Catches a rank that is a step ahead, or has other tensors: its file would be mixed in without an error."""
    def body(rank: int) -> list[str]:
        group, more = dist.group.WORLD, {"more": torch.ones(1)} if rank else {}
        return [outcome(lambda: save(tmp_path, 1 + rank, values(1), {}, group=group)),
                outcome(lambda: save(tmp_path, 1, values(1) | more, {}, group=group))]

    for result in run_ranks(body, 2):
        assert all("ranks save different steps or tensors" in text for text in result)
    assert find_latest(tmp_path) is None


# --- fingerprints ---------------------------------------------------------------------------------------------------

def test_fingerprints():
    """Catches a resume under another learning rate or tokenizer, and a message that does not say what differs."""
    same = {"optim": {"lr": 1e-6, "betas": (0.9, 0.95)}, "tokenizer": "ab", "old": 1, "flag": True}
    saved = json.loads(json.dumps(same))
    compare_fingerprints(saved, same, ())
    now = {"optim": {"lr": 2e-6, "betas": (0.9, 0.95)}, "tokenizer": "cd", "new": None, "flag": 1}
    with pytest.raises(ValueError) as caught:
        compare_fingerprints(saved, now, ("tokenizer",))
    message = str(caught.value)
    for part in ("optim.lr: saved 1e-06, now 2e-06", "old: saved 1, now absent", "new: saved absent, now null",
                 "flag: saved true, now 1", "checkpoint.allow_drift='[flag,new,old,optim.lr]'"):
        assert part in message
    assert "betas" not in message and "tokenizer" not in message and "\n" not in message
    compare_fingerprints(saved, now, ("tokenizer", "optim.lr", "old", "new", "flag"))
    with pytest.raises(ValueError, match=r"run: a\\nb: saved 1, now absent; .*'\[a\\nb\]'$"):
        compare_fingerprints({"a\nb": 1}, {}, ())


def test_states_of_other_jobs_and_damaged_ones():
    """Catches a traceback, or weights already changed, where hashes are right and the state is not this job's."""
    good = {"job": "dmd", "step": 3, "evaluated": -1, "fingerprints": {}, "roles": {"student": {"successes": 3}}}
    source, keys = Path("x/manifest.json"), ("step", "evaluated", "roles.student.successes")

    def check(**changes) -> None:
        check_state(good | changes, job="dmd", tables=("fingerprints",), source=source)
        check_counts(good | changes, keys, source=source)

    check()
    check(evaluated=0, step=10**15 - 1)
    bad = [{"job": "opd"}, {"job": None}, {"job": ["a\nb"]}, {"fingerprints": []}, {"fingerprints": None},
           {"roles": None}, {"roles": {}}, {"roles": {"student": 3}}, {"roles": {"student": {"successes": 10**30}}},
           {"evaluated": -2}, *({"step": value} for value in (-1, 10**15, 1.0, True, None, "x", [1]))]
    for changes in bad:
        with pytest.raises(ValueError, match="^x/manifest.json: .*away|^x/manifest.json: .*another name") as caught:
            check(**changes)
        assert "\n" not in str(caught.value)


def test_a_pipe_or_device_in_place_of_a_file_is_refused(tmp_path):
    """Catches a start that waits for ever for a pipe, or reads a device without end."""
    save(tmp_path, 1, {"w": torch.ones(3)}, {})
    folder = tmp_path / "step_00000001"
    for name in ("shard_00000.safetensors", "manifest.json"):
        whole = (folder / name).read_bytes()
        for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
            (folder / name).unlink()
            make(folder / name)
            with pytest.raises(ValueError, match=f"{name}: cannot be read .it is no regular file"):
                open_checkpoint(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(whole)
    open_checkpoint(folder)
