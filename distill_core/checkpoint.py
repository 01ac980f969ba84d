# SPDX-License-Identifier: Apache-2.0
"""Atomic, verified, reshardable checkpoints made of safetensors and JSON.

    root/step_00000100/shard_00000.safetensors ...   one file a rank: the rows it owns of every tensor
    root/step_00000100/manifest.json                 step, size and sha256 of each file, the state, its own sha256
    root/latest                                      name of the newest folder: for people and scripts, never read here

A folder is staged as `.tmp-step_00000100-TOKEN` and renamed once every byte is on disk, so that a crash at any point
leaves the older folders as they were; a folder is chosen only after all its hashes have been checked. `group` is a gloo
group whose ranks all make the same calls, None a single process. Ranks exchange JSON bytes, never pickled objects.

    checkpoint = find_latest(root, group=control)          # None in a fresh run
    compare_fingerprints(checkpoint.state["fingerprints"], fingerprints_now, allow_drift=())
    load(checkpoint, dict(model.named_parameters()), group=control)
    saver = Saver(root, group=control, keep_last=2)
    saver.start(100, dict(model.named_parameters()), {"fingerprints": fingerprints_now})   # train on after a copy
    saver.poll()                                           # after every step; saver.finish() before the end
"""
from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

FORMAT_VERSION = 1
MANIFEST, LATEST = "manifest.json", "latest"
STEP_NAME = re.compile(r"step_(\d{8})")
STALE_NAME = re.compile(r"\.(tmp|trash)-(step_\d{8}|latest|probe)-[0-9a-f]{8}")
CHUNK_BYTES, MAX_MESSAGE_BYTES, MAX_MANIFEST_BYTES = 16 << 20, 1 << 30, 64 << 20
MAX_COUNT = 10**15  # of updates, samples ...: exact in int64 and float64
FAILED, RUNNING, DONE = -1, 0, 1  # a thread's status; the lowest of all ranks counts
WAIT_S = 0.5  # between two looks at the other ranks
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}

log = logging.getLogger("distill")


@dataclass(frozen=True)
class SavedTensor:
    """dtype and global shape of a tensor, and its pieces in row order: (first row, number of rows, file)."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[tuple[int, int, str]]


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest and hashes have been checked. `state` is what `save` was given, by way of JSON."""
    folder: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, SavedTensor]


# ---------------------------------------------------------------------------------------------------------------------
# Save

class Saver:
    """Saves in the background: what `start` is given is copied, then written by a thread while training goes on.

    All ranks of the group make the same calls. An error on any rank is raised on all and leaves the published folders
    as they were; one in a thread comes out of the second `poll` after it, or of `finish`. One save at a time.

    root: written to on construction, so that a read-only or unshared folder is a ValueError before training starts.
    keep_last, keep_every, resumed_from: after each save, complete folders are removed other than the newest `keep_last`
    that verify (0 keeps all), the multiples of `keep_every` (0: none), the one just written and `resumed_from`.
    """

    def __init__(self, root: str | Path, *, group: dist.ProcessGroup | None = None, keep_last: int = 0,
                 keep_every: int = 0, resumed_from: Path | None = None) -> None:
        self.published: Path | None = None  # the newest save that is complete
        self._root, self._group, self._keep_last, self._keep_every = Path(root), group, keep_last, keep_every
        self._resumed = {resumed_from.name} if resumed_from else set()
        self._verdicts = dict.fromkeys(self._resumed, True)  # folder -> whether it verifies, as far as is known
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._task: Future | None = None  # what the thread does: writes the staged shard, later tidies up
        self._vote: _Vote | None = None  # on how far the threads of all ranks are
        self._staging: Path | None = None
        self._manifest: dict[str, Any] = {}
        _probe(self._root, group)

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that the copy takes; it is kept from one save to the next."""
        return self._buffer.nbytes

    def start(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Returns root/step_{step:08d}, which will exist once `poll` or `finish` has published it.

        tensors: plain ones are equal on all ranks and written by the first; DTensors are Shard(0) on a 1-D mesh over
        the group (uneven and empty shards included). They may be changed as soon as this returns. state: JSON-able,
        rank 0's counts; tuples come back as lists. If the step exists with this state and verifies, nothing is written;
        what else has its name is moved aside. Waits for an earlier save in flight.
        """
        self.finish()
        _agree_on_request(step, tensors, state, self._group)
        final, state = self._root / f"step_{step:08d}", json.loads(json.dumps(state))
        if _on_first(lambda: _records(final, state), self._group) and _verifies(final, self._group):
            self.published, self._verdicts[final.name] = final, True
            return final
        self._manifest = {"format_version": FORMAT_VERSION, "step": step, "world_size": _size(self._group),
                          "state": state}
        self._staging = Path(_on_first(lambda: str(_make_staging(self._root, final.name)), self._group))
        try:
            _together(lambda: self._launch(tensors), self._group)
        except BaseException:
            self._abandon()
            raise
        return final

    @torch.no_grad()
    def _launch(self, tensors: dict[str, Tensor]) -> None:
        rank = _rank(self._group)
        header, parts = _layout(tensors, rank)
        self._buffer = _copy_to_host(parts, self._buffer)
        path, buffers = self._staging / f"shard_{rank:05d}.safetensors", [header, memoryview(self._buffer.numpy())]
        self._task = _in_thread(lambda: _write_shard(path, buffers))

    def poll(self, wait_s: float = 0.0) -> bool:
        """Publishes what is in flight once every rank has written its part; whether something still is in flight.

        wait_s: how long to wait for this rank's disk; for the other ranks, a call does not wait. While something is in
        flight they agree on one number in the course of the step that follows; otherwise nothing is exchanged.
        """
        if self._task is None:
            return False
        wait([self._task], timeout=wait_s)
        lowest, self._vote = self._vote.result() if self._vote else RUNNING, None
        if lowest == RUNNING:
            self._vote = _Vote(_status(self._task), self._group)
            return True
        task, self._task = self._task, None
        try:  # where a rank failed the threads of others may still run: they are not waited for
            files = _together(lambda: task.result() if task.done() else None, self._group)
            if self._staging is not None:
                self._publish_staged(files)
        except BaseException:
            self._abandon()
            raise
        return self._task is not None

    def finish(self) -> Path | None:
        """Waits until nothing is in flight; the newest published folder."""
        while self.poll(WAIT_S):  # by turns, since a group's timeout may be shorter than the writing takes
            pass
        return self.published

    def _publish_staged(self, files: list[dict[str, Any]]) -> None:
        manifest = self._manifest | {"files": {f"shard_{number:05d}.safetensors": file
                                               for number, file in enumerate(files)}}
        final = self._root / f"step_{manifest['step']:08d}"
        _on_first(lambda: _publish(self._staging, final, manifest), self._group)
        self.published, self._staging, self._verdicts[final.name] = final, None, True
        self._task = _in_thread(self._tidy if _rank(self._group) == 0 else lambda: None)

    def _tidy(self) -> None:
        _point_latest(self._root, self.published.name)
        try:
            _prune(self._root, keep_last=self._keep_last, keep_every=self._keep_every,
                   protect=self._resumed | {self.published.name}, verdicts=self._verdicts)
        except OSError as error:
            log.warning("could not look for old checkpoints (%s)", error)

    def _abandon(self) -> None:
        if self._staging is not None and _rank(self._group) == 0:
            shutil.rmtree(self._staging, ignore_errors=True)  # the next start clears what a thread may still create
        self._task = self._staging = None
        self._buffer = torch.empty(0, dtype=torch.uint8)  # a thread may still read the old one


def save(root: str | Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], *,
         group: dist.ProcessGroup | None = None, keep_last: int = 0, keep_every: int = 0,
         resumed_from: Path | None = None) -> Path:
    """One save that is waited for; arguments and errors are those of `Saver` and `Saver.start`."""
    saver = Saver(root, group=group, keep_last=keep_last, keep_every=keep_every, resumed_from=resumed_from)
    final = saver.start(step, tensors, state)
    saver.finish()
    return final


def _in_thread(action: Callable[[], Any]) -> Future:
    """The future of action(), run in a thread that keeps no failing process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # raised by result(), in the main thread
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class _Vote:
    """The lowest of the values that the ranks give; it is found while they go on."""

    def __init__(self, value: int, group: dist.ProcessGroup | None) -> None:
        self._lowest = torch.tensor([value])
        self._work = None
        if group is not None:
            self._work = dist.all_reduce(self._lowest, dist.ReduceOp.MIN, group=group, async_op=True)

    def result(self) -> int:
        if self._work is not None:
            self._work.wait()
        return int(self._lowest)


def _status(task: Future) -> int:
    if not task.done():
        return RUNNING
    return DONE if task.exception() is None else FAILED


def _probe(root: Path, group: dist.ProcessGroup | None) -> None:
    """ValueError on all ranks unless rank 0 can create root and folders in it, and every rank files in those."""
    def refuse(error: OSError) -> ValueError:
        return ValueError(f"{root}: checkpoints cannot be written there ({error.strerror}); choose a folder that every "
                          "rank can write to")

    def create() -> str:
        try:
            return str(_make_staging(root, "probe"))
        except OSError as error:
            raise refuse(error) from None

    def touch() -> None:
        try:
            os.close(os.open(folder / f"{_rank(group)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError as error:
            raise refuse(error) from None

    folder = Path(_on_first(create, group))
    try:
        _together(touch, group)
    finally:
        if _rank(group) == 0:
            _delete(folder)


def _agree_on_request(step: int, tensors: dict[str, Tensor], state: dict[str, Any],
                      group: dist.ProcessGroup | None) -> None:
    def describe() -> str:
        if not 0 <= step < 10**8:
            raise ValueError(f"step {step} does not fit the name step_XXXXXXXX")
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the state of step {step} cannot be written as JSON ({error})") from None
        for name, tensor in tensors.items():
            _local_part(name, tensor)
            assert not isinstance(tensor, DTensor) or tensor.device_mesh.size() == _size(group), f"{name}: other mesh"
        kinds = [(name, str(t.dtype), list(t.shape), isinstance(t, DTensor)) for name, t in tensors.items()]
        return hashlib.sha256(json.dumps([step, sorted(kinds)]).encode()).hexdigest()

    requests = _together(describe, group)
    assert len(set(requests)) == 1, f"ranks save different steps or tensors (rank {_rank(group)}: step {step})"


def _make_staging(root: Path, name: str) -> Path:
    """A fresh folder on the file system of root; what dead runs have left is cleared first."""
    if not root.is_dir():
        os.makedirs(root, exist_ok=True)
        _sync_folder(root.parent)
    for entry in os.listdir(root):
        if STALE_NAME.fullmatch(entry):
            _delete(root / entry)
    staging = root / f".tmp-{name}-{secrets.token_hex(4)}"
    os.mkdir(staging)
    return staging


def _layout(tensors: dict[str, Tensor], rank: int) -> tuple[bytes, list[Tensor]]:
    """What precedes the data in this rank's file, and its rows of the tensors in the order of their data.

    Safetensors: header length, JSON header, data. A 0-d tensor is stored as one row. Wide dtypes first, to be aligned.
    """
    parts, rows = {}, {}
    for name, tensor in tensors.items():
        local, start = _local_part(name, tensor)
        if rank == 0 or (isinstance(tensor, DTensor) and local.numel()):
            parts[name] = local.reshape(1) if local.ndim == 0 else local
            rows[name] = {"shape": list(tensor.shape), "start": start}
    ordered = sorted(parts.items(), key=lambda item: (-item[1].itemsize, item[0]))
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "rows": json.dumps(rows)}}
    offset = 0
    for name, part in ordered:
        header[name] = {"dtype": dtypes[part.dtype], "shape": list(part.shape),
                        "data_offsets": [offset, offset + part.nbytes]}
        offset += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [part for _, part in ordered]


def _copy_to_host(parts: list[Tensor], buffer: Tensor) -> Tensor:
    """[bytes] the parts one after the other, in `buffer` if it has the right size."""
    num_bytes = sum(part.nbytes for part in parts)
    if buffer.numel() != num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
    offset = 0
    for part in parts:
        buffer[offset:offset + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        offset += part.nbytes
    return buffer


def _write_shard(path: Path, buffers: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes a file and checks it as a resume would: older checkpoints are removed because this one is good."""
    record = _write_file(path, buffers)
    _check_file(path, **record)
    return record


def _write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes a new file, on disk when this returns, with mode 0666 less the umask: {"size", "sha256"}."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for buffer in buffers:
            for start in range(0, len(buffer), CHUNK_BYTES):
                chunk = memoryview(buffer)[start:start + CHUNK_BYTES]
                digest.update(chunk)
                size += len(chunk)
                while len(chunk):
                    chunk = chunk[os.write(descriptor, chunk):]
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk: say which
    finally:
        os.close(descriptor)
    return {"size": size, "sha256": digest.hexdigest()}


def _publish(staging: Path, final: Path, manifest: dict[str, Any]) -> None:
    """The manifest last, then the name."""
    text = json.dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1)
    _write_file(staging / MANIFEST, [text.encode()])
    _sync_folder(staging)
    if os.path.lexists(final):
        aside = final.with_name(f"{final.name}.unverified-{secrets.token_hex(4)}")
        os.rename(final, aside)
        log.warning("moved %s aside to %s: it is unusable, or of another state of the run", final, aside.name)
    try:
        os.rename(staging, final)
    except OSError:
        # A network file system may repeat a request whose answer was lost: then the rename has been done nevertheless.
        if staging.exists() or not final.exists():
            raise
    _sync_folder(final.parent)


def _point_latest(root: Path, name: str) -> None:
    temporary = root / f".tmp-{LATEST}-{secrets.token_hex(4)}"
    try:
        _write_file(temporary, [f"{name}\n".encode()])
        os.replace(temporary, root / LATEST)
        _sync_folder(root)
    except OSError as error:
        log.warning("%s could not be updated (%s); %s itself is complete, and resuming does not need it", root / LATEST,
                    error, name)


def _prune(root: Path, *, keep_last: int, keep_every: int, protect: Collection[str],
           verdicts: dict[str, bool]) -> None:
    """verdicts: what is known of folders by name; those that must be read to be counted are added."""
    if keep_last <= 0:
        return
    num_kept = 0
    for name in _step_names(root):
        if not _is_complete(root / name):
            continue
        if num_kept < keep_last:
            if name not in verdicts:
                verdicts[name] = _verifies(root / name, None)
            num_kept += verdicts[name]
        elif name not in protect and not (keep_every and _step_of(name) % keep_every == 0):
            _remove(root / name)


def _remove(folder: Path) -> None:
    trash = folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}")
    try:
        os.rename(folder, trash)  # no half-deleted folder ever has the name of a checkpoint
    except OSError as error:
        log.warning("could not remove %s (%s)", folder, error)
    else:
        _delete(trash)


def _delete(path: Path) -> None:
    """Deletes a temporary of ours. Only such names are deleted, ever, and links are not followed."""
    assert STALE_NAME.fullmatch(path.name), path
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError as error:
        log.warning("could not remove %s (%s)", path, error)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Find and verify

def find_latest(root: str | Path, *, group: dist.ProcessGroup | None = None,
                beat: Callable[[], None] = lambda: None) -> Checkpoint | None:
    """The newest folder under root that verifies; None if there is none at all. Rank 0 looks and decides.

    Folders that do not verify are passed over with a warning that names the bad file. If none verifies: ValueError,
    since starting afresh would be a surprise. beat: called often while files are read, to tell ranks outside the group
    that this one is alive; no collective of the group may be in it, since ranks call it unequally often.
    """
    root = Path(root)
    names = _names_of_first(root, group)
    problem = ""
    for name in names:
        beat()
        try:
            return open_checkpoint(root / name, group=group, beat=beat)
        except ValueError as error:
            problem = problem or str(error)
            if _rank(group) == 0:
                log.warning("passing over checkpoint %s: %s", name, error)
    if names:
        raise ValueError(f"{root}: none of {len(names)} checkpoints can be used (newest: {problem}); restore one, or "
                         f"move the folder away to start afresh")
    return None


def _names_of_first(root: Path, group: dist.ProcessGroup | None) -> list[str]:
    """Rank 0's listing. A rank that sees more may be right: then a fresh start would be a surprise, too."""
    names, *others = _together(lambda: _step_names(root), group)
    unseen = sorted({name for other in others for name in other} - set(names), reverse=True)
    if unseen and not names:
        raise ValueError(f"{root}: rank 0 sees no checkpoint, another rank sees {unseen[0]}; is it on a file system "
                         "that all nodes share?")
    if unseen and _rank(group) == 0:
        log.warning("%s: another rank sees %s, which rank 0 does not; rank 0 decides", root, unseen[0])
    return names


def newest_state(root: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """(the newest readable manifest, its state) without hashing data and without other ranks; None if there is none.

    For refusing a drifted config early: what is loaded in the end is `find_latest`'s choice.
    """
    for name in _step_names(Path(root)):
        try:
            return Path(root) / name / MANIFEST, _read_manifest(Path(root) / name)["state"]
        except ValueError:
            continue  # find_latest will say what is wrong with it
    return None


def open_checkpoint(folder: str | Path, *, group: dist.ProcessGroup | None = None,
                    beat: Callable[[], None] = lambda: None) -> Checkpoint:
    """Verifies one folder, the ranks sharing the hashing. ValueError on all ranks, naming the file, if unusable.

    beat: as for `find_latest`.
    """
    folder = Path(folder)
    manifest = _on_first(lambda: _read_manifest(folder), group)
    mine = sorted(manifest["files"])[_rank(group)::_size(group)]
    _together(lambda: [_check_file(folder / file, **manifest["files"][file], beat=beat) for file in mine], group)
    tensors: dict[str, SavedTensor] = {}
    _together(lambda: tensors.update(_read_headers(folder, sorted(manifest["files"]))), group)
    return Checkpoint(folder, manifest["step"], manifest["state"], tensors)


def _verifies(folder: Path, group: dist.ProcessGroup | None) -> bool:
    try:
        open_checkpoint(folder, group=group)
    except ValueError:
        return False
    return True


def _records(folder: Path, state: dict[str, Any]) -> bool:
    """Whether the folder is a checkpoint with this state."""
    try:
        return _manifest_digest(_read_manifest(folder)["state"]) == _manifest_digest(state)
    except ValueError:
        return False


def _step_names(root: Path) -> list[str]:
    """Newest first."""
    names = os.listdir(root) if root.is_dir() else []
    return sorted((name for name in names if STEP_NAME.fullmatch(name)), reverse=True)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step_"))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        _refuse_special(path)
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError("too large")
        manifest = json.loads(path.read_bytes(), object_pairs_hook=_unique, parse_constant=_refuse_constant,
                              parse_float=_finite)
        version, digest = manifest["format_version"], manifest.pop("sha256")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}), so this is no complete checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path}: is damaged or no manifest of a checkpoint") from None
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"{path}: has format version {_shown(version)}, this code reads {FORMAT_VERSION}; use a newer "
                         "version")
    if digest != _manifest_digest(manifest):
        raise ValueError(f"{path}: does not have the sha256 that it records; it is damaged or was edited")
    _check_manifest(path, manifest)
    return manifest


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    step, state, files = (manifest.get(key) for key in ("step", "state", "files"))
    if type(step) is not int or not isinstance(state, dict) or not isinstance(files, dict) or not files:
        raise ValueError(f"{path}: lacks the step, the state or the files of a checkpoint")
    if STEP_NAME.fullmatch(path.parent.name) and _step_of(path.parent.name) != step:
        raise ValueError(f"{path}: is of step {step}; give the folder its own name back")
    for file, record in files.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}\.safetensors", file):
            raise ValueError(f"{path}: lists {_shown(file)}, which is not the plain name of a .safetensors file")
        if not isinstance(record, dict) or {key: type(value) for key, value in record.items()} != {"size": int,
                                                                                                   "sha256": str}:
            raise ValueError(f"{path}: does not give size and sha256 of {file}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} overflows")
    return float(text)


def _refuse_special(path: Path) -> None:
    """A pipe would be waited for, a device read without end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _shown(value: Any) -> str:
    """Foreign text for a message: one line of bounded length."""
    text = str(value)[:200]
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, *, size: int, sha256: str, beat: Callable[[], None] = lambda: None) -> None:
    digest = hashlib.sha256()
    try:
        _refuse_special(path)
        actual = os.stat(path).st_size
        if actual != size:
            raise ValueError(f"{path}: has {actual} bytes, its manifest says {size}")
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                beat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path}: does not have the sha256 recorded when it was written; the data is damaged")


def _is_complete(folder: Path) -> bool:
    """A cheap look for retention: the manifest is whole and every file has its size."""
    try:
        files = _read_manifest(folder)["files"]
        return all(os.stat(folder / file).st_size == record["size"] for file, record in files.items())
    except (ValueError, OSError):
        return False


def _read_headers(folder: Path, files: list[str]) -> dict[str, SavedTensor]:
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        try:
            _read_header(folder, file, tensors)
        except (OSError, SafetensorError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder / file}: is no shard of a checkpoint ({type(error).__name__}: "
                             f"{_shown(' '.join(str(error).split()))})") from None
    for name, saved in tensors.items():
        saved.pieces.sort()
        stops = [start + num_rows for start, num_rows, _ in saved.pieces]
        num_rows = saved.shape[0] if saved.shape else 1
        if [0, *stops] != [*(start for start, _, _ in saved.pieces), num_rows]:
            raise ValueError(f"{folder}: the rows of {_shown(name)} in its files are not those of a tensor of shape "
                             f"{_shown(list(saved.shape))}")
    return tensors


def _read_header(folder: Path, file: str, tensors: dict[str, SavedTensor]) -> None:
    """Adds the pieces in one file."""
    with safe_open(folder / file, framework="pt") as shard:
        listed = json.loads(shard.metadata()["rows"])
        if listed.keys() != set(shard.keys()):
            raise ValueError("its list of rows is not of the tensors that it holds")
        for name, rows in listed.items():
            part, shape, start = shard.get_slice(name), tuple(rows["shape"]), rows["start"]
            dtype, (num_rows, *row) = DTYPES[part.get_dtype()], part.get_shape()
            saved = tensors.setdefault(name, SavedTensor(dtype, shape, []))
            if ((saved.dtype, saved.shape) != (dtype, shape) or row != list(shape[1:])
                    or {type(size) for size in (*shape, start)} != {int}):
                raise ValueError(f"{name} does not fit the other files")
            saved.pieces.append((start, num_rows, file))


# ---------------------------------------------------------------------------------------------------------------------
# Load

@torch.no_grad()
def load(checkpoint: Checkpoint, tensors: dict[str, Tensor], *, group: dist.ProcessGroup | None = None,
         beat: Callable[[], None] = lambda: None) -> None:
    """Copies the saved values in place into `tensors`, at any world size; each rank reads only the rows it needs.

    Names, shapes and dtypes must agree exactly, or all ranks raise ValueError before any tensor is written. beat: as
    for `find_latest`.
    """
    def copy() -> None:
        for name, tensor in tensors.items():
            local, start = _local_part(name, tensor)
            _read_rows(checkpoint, name, local, start)
            beat()

    _together(lambda: _check_tensors(checkpoint, tensors), group)
    _together(copy, group)


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """One whole tensor on CPU, from the files that hold its rows."""
    saved = checkpoint.tensors[name]
    tensor = torch.empty(saved.shape, dtype=saved.dtype)
    _read_rows(checkpoint, name, tensor, 0)
    return tensor


def _check_tensors(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    saved = checkpoint.tensors
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in tensors]
    problems += [f"{name} is {saved[name].dtype} {list(saved[name].shape)} in the checkpoint, "
                 f"{tensor.dtype} {list(tensor.shape)} here" for name, tensor in tensors.items() if name in saved
                 and (saved[name].dtype, saved[name].shape) != (tensor.dtype, tuple(tensor.shape))]
    if problems:
        told = _shown("; ".join(problems[:4]))
        raise ValueError(f"{checkpoint.folder}: does not fit this model: {told} ({len(problems)} in "
                         f"all); resume with the config that wrote it")


def _read_rows(checkpoint: Checkpoint, name: str, local: Tensor, start: int) -> None:
    """Fills `local` from the global rows that begin at `start`.

    Files are opened for each tensor since pages of a memory map count as this process's memory until it is closed.
    """
    local = local.view(1) if local.ndim == 0 else local
    for piece_start, num_rows, file in checkpoint.tensors[name].pieces:
        first, last = max(start, piece_start), min(start + local.shape[0], piece_start + num_rows)
        if first < last and local.numel():
            with safe_open(checkpoint.folder / file, framework="pt") as shard:
                rows = shard.get_slice(name)[first - piece_start:last - piece_start]
                local[first - start:last - start].copy_(rows)


def _local_part(name: str, tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a tensor, and the global row at which that begins."""
    assert not tensor.is_meta and tensor.dtype in DTYPES.values(), f"{name}: {tensor.dtype} on {tensor.device}"
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, local = tensor.device_mesh, tensor.to_local()
    assert mesh.ndim == 1 and tensor.placements == (Shard(0),), f"{name}: {tensor.placements} on {mesh}"
    # The rule of torch.chunk, which DTensor and FSDP2 follow: full chunks first, then a short one, then empty ones.
    chunk = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * chunk, tensor.shape[0])
    assert local.shape[0] == min(chunk, tensor.shape[0] - start), f"{name}: {local.shape} at row {start} of {chunk}"
    return local, start


def check_state(state: dict[str, Any], *, job: str, tables: Iterable[str], source: Path) -> None:
    """ValueError unless the state that the manifest `source` gives is of this job and has `tables`, by their keys.

    With `compare_fingerprints` and `check_counts`, to be called before any weight is touched.
    """
    if state.get("job") != job:
        raise ValueError(f"{source}: is of the job {_shown(state.get('job', 'unknown'))}, this is {job}; give this run "
                         "another name")
    for key in tables:
        if not isinstance(state.get(key), dict):
            raise ValueError(f"{source}: its state has no table {key}; move this checkpoint away to use another")


def check_counts(state: dict[str, Any], keys: Iterable[str], *, source: Path) -> None:
    """ValueError unless each dotted key of the state is a count from 0 (evaluated: from -1, which is never)."""
    for key in keys:
        value: Any = state
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if type(value) is not int or not (-1 if key == "evaluated" else 0) <= value < MAX_COUNT:
            raise ValueError(f"{source}: its {key} is {_shown(value)}, which is no count; move this checkpoint away to "
                             "use another")


def compare_fingerprints(saved: dict[str, Any], now: dict[str, Any], allow_drift: Collection[str]) -> None:
    """ValueError that lists each key (nested ones dotted) with differing values, unless it is in `allow_drift`."""
    before, after = _flat(saved), _flat(now)
    differing = [key for key in sorted(before.keys() | after.keys())
                 if before.get(key, "absent") != after.get(key, "absent") and key not in allow_drift]
    if differing:
        changes = "; ".join(f"{_shown(key)}: saved {before.get(key, 'absent')}, now {after.get(key, 'absent')}"
                            for key in differing)
        raise ValueError(f"the checkpoint is of another run: {changes}; restore the saved values, or accept the change "
                         f"with checkpoint.allow_drift='[{','.join(map(_shown, differing))}]'")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": (1, 2)}} -> {"a.b": "[1, 2]"}: JSON text, in which a tuple equals the list that it was saved as."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        nested = isinstance(value, dict)
        flat.update(_flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": json.dumps(value)})
    return flat


# ---------------------------------------------------------------------------------------------------------------------
# Agreement between ranks

def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _on_first(action: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Rank 0's action() (JSON-able) on all ranks."""
    return _together(action if _rank(group) == 0 else lambda: None, group)[0]


def _together(action: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Each rank's action() (JSON-able) on all ranks. All reach the exchange; if one fails, all raise.

    If every failure is a ValueError, all ranks raise one that names the first, so that a caller can handle it alike.
    Else a rank that failed raises its own error, the others a RuntimeError that names the rank.
    """
    if group is None:
        return [action()]
    own: BaseException | None = None
    try:
        report = {"value": action()}
    except BaseException as error:  # raised below, when the other ranks know
        own = error
        report = {"error": f"{type(error).__name__}: {error}", "is_value_error": isinstance(error, ValueError)}
    reports = _exchange(report, group)
    if own is not None and not isinstance(own, ValueError):
        raise own
    failed = [(dist.get_global_rank(group, rank), other) for rank, other in enumerate(reports) if "error" in other]
    for rank, other in failed:
        if not other["is_value_error"]:
            raise RuntimeError(f"stopped because rank {rank} failed: {other['error']}") from own
    if failed:
        raise ValueError(f"rank {failed[0][0]}: {failed[0][1]['error']}") from own
    return [other["value"] for other in reports]


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's JSON value, in rank order."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(_size(group))]
    dist.all_gather(sizes, torch.tensor([payload.numel()]), group=group)
    lengths = [int(size) for size in sizes]
    # gloo does not notice that ranks are in different collectives; it returns garbage.
    assert all(0 < length <= MAX_MESSAGE_BYTES for length in lengths), f"message lengths {lengths}: ranks out of step"
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[:payload.numel()] = payload
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(part[:length].numpy().tobytes()) for part, length in zip(gathered, lengths)]
