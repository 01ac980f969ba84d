# SPDX-License-Identifier: Apache-2.0
"""Prompts, latents and their conditions from files, a data order that is a pure function of (seed, epoch, index), and
access to tokenizers.

A line of a prompt file is a JSON object with exactly one of
    "prompt":     text, encoded exactly as given: no BOS or other token is added, special tokens spelled in it count
    "messages":   [{"role": ..., "content": ...}, ...], rendered by the model folder's chat template
    "prompt_ids": token ids
and optionally "answer" (text; evaluation only) and "teacher" (the name of the teacher that scores this prompt).

    tokenizer = load_tokenizer("models/student", "auto")      # or load_tokenizer(None, "byte"): needs no files
    prompts, counts = read_prompts("train.jsonl", tokenizer, max_prompt_tokens=512, long_prompts="drop")
    for step in range(10):
        batch = [prompts[i] for i in batch_at(step * 64, 64, len(prompts), seed=0)]

Latents and conditions of a flow model are samples with a class label each, in one of two forms, both without pickle:
    FILE.npz      arrays `x` [N, ...] and `labels` [N]
    FOLDER        index.jsonl, a line {"file": "NAME.safetensors", "count": N} for each shard, in order; a shard holds
                  tensors `x` and `labels`
Numbers `scale` and `offset` beside `x`, which an x of integers must have, say that the values are x * scale + offset.

    labels = read_conditions("latents", num_classes=1000)     # int64 [N]; x is not read and may be absent
    x, labels = read_latents("digits.npz")                    # fp32 [N, ...] and int64 [N]

Text needs the `tokenizers` package and chat templates `jinja2`, each imported at its first use: token ids need neither.
All errors are ValueErrors of one line that names the file, and the line in it.
"""
from __future__ import annotations

import codecs
import dataclasses
import difflib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, MappingView, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MAX_LINE_BYTES = 8 * 2**20         # of a prompt file: some 10^6 token ids
MAX_JSON_BYTES = 256 * 2**20       # of a file in a model folder: the largest tokenizer.json known has 35 MB
MAX_RENDERED_CHARS = 8 * 2**20
MAX_TEMPLATE_CHARS = 2**18         # of a chat template: they have up to 30,000
MAX_TEMPLATE_WORK = 2**27          # of a chat template, for one conversation: characters that it reads and writes
MAX_TEMPLATE_BITS = 4096           # of a number in a chat template
ITEM_WORK, CALL_WORK, ROUND_WORK = 32, 100, 1000    # what an element, a call and a round of a loop count as in it
# What a chat template can call: filters, tests, methods. The CHEAP ones do not read their operands to the end; the
# MULTIPLYING ones can take time or memory in proportion to the product of their operands' sizes.
CHEAP_FILTERS = ("length", "count", "default", "d", "first", "last")
FILTERS = ("replace", "join", "trim", "indent", "abs", "capitalize", "dictsort", "float", "int", "items", "list",
           "lower", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "string", "title",
           "unique", "upper")
CHEAP_TESTS = ("defined", "undefined", "none", "boolean", "true", "false", "string", "number", "integer", "float",
               "mapping", "sequence", "iterable", "callable", "sameas")
TESTS = ("in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge",
         ">=")
METHODS = ("replace", "join", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition",
           "startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "lower", "upper", "title",
           "capitalize", "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower",
           "get", "items", "keys", "values")
MULTIPLYING = ("replace", "join", "trim", "strip", "lstrip", "rstrip", "indent")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    answer: str | None = None     # for exact match in evaluation; training code must not read it
    teacher: str | None = None    # None = the only or first teacher
    source: str = ""              # "file:line", for messages


@dataclass(frozen=True)
class PromptCounts:
    read: int       # lines with a prompt, over all files
    dropped: int    # of these: left out, as longer than max_prompt_tokens
    cut: int        # of these: lost their beginning, as longer than max_prompt_tokens


def read_prompts(paths: str | Path | Iterable[str | Path], tokenizer: Tokenizer, *, max_prompt_tokens: int,
                 long_prompts: Literal["drop", "cut"]) -> tuple[list[Prompt], PromptCounts]:
    """All prompts of one or more JSONL files, in order.

    A prompt of more than `max_prompt_tokens` tokens is left out ("drop") or keeps its end ("cut"); both are counted.
    Raises ValueError for a malformed line, and when no prompt is left.
    """
    assert long_prompts in ("drop", "cut") and max_prompt_tokens >= 1, (long_prompts, max_prompt_tokens)
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    prompts = [_parse_line(line, source, tokenizer) for path in paths for source, line in _lines(path)]
    num_long = sum(len(prompt.ids) > max_prompt_tokens for prompt in prompts)
    if long_prompts == "cut":
        kept = [dataclasses.replace(prompt, ids=prompt.ids[-max_prompt_tokens:]) for prompt in prompts]
        counts = PromptCounts(len(prompts), dropped=0, cut=num_long)
    else:
        kept = [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens]
        counts = PromptCounts(len(prompts), dropped=num_long, cut=0)
    if not kept:
        raise ValueError(f"{', '.join(map(str, paths))}: no prompts left: {counts.read} read, {counts.dropped} dropped "
                         f"as longer than max_prompt_tokens={max_prompt_tokens} (raise it, or set long_prompts to cut)")
    return kept, counts


def _lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """("file:line", bytes) of each line that is not blank, without a byte order mark."""
    _refuse_special(path)
    try:
        with open(path, "rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise ValueError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes (one JSON object per line)")
                if line := (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror} (check the data paths)") from None


def _parse_line(line: bytes, source: str, tokenizer: Tokenizer) -> Prompt:
    try:
        row = _strict_json(_decode(line))
        if not isinstance(row, dict):
            raise ValueError(f"expected a JSON object, got {_kind(row)}")
        if b"\\u" in line and re.search("[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
            raise ValueError("half of a surrogate pair is no text (check the \\u escapes)")
        _check_keys(row)
        ids = _prompt_ids(row, tokenizer)
        return Prompt(tuple(ids), _text(row, "answer"), _text(row, "teacher"), source)
    except ValueError as error:
        raise ValueError(f"{source}: {_one_line(error)}") from None


def _check_keys(row: dict[str, Any]) -> None:
    known = ("prompt", "messages", "prompt_ids", "answer", "teacher")
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(key[:100], known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"a line has: {', '.join(known)}"
            raise ValueError(f"unknown key {key[:60]!r} ({hint})")
    given = [key for key in known[:3] if row.get(key) is not None]    # null counts as absent, as exporters write it
    if len(given) != 1:
        raise ValueError(f"give one of prompt, messages and prompt_ids, got {' and '.join(given) or 'none'}")


def _prompt_ids(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The token ids of a row that has exactly one of prompt, messages and prompt_ids; at least one id."""
    if (ids := row.get("prompt_ids")) is not None:
        _check_ids(ids, tokenizer.num_ids)
    elif (messages := row.get("messages")) is not None:
        _check_messages(messages)
        ids = tokenizer.encode(tokenizer.render_chat(messages))
    else:
        ids = tokenizer.encode(_text(row, "prompt"))
    if not ids:
        raise ValueError("the prompt is empty (a response needs at least one token before it)")
    return ids


def _check_ids(ids: Any, num_ids: int | None) -> None:
    if not isinstance(ids, list):
        raise ValueError(f"prompt_ids: expected a list of token ids, got {_kind(ids)}")
    limit = 2**31 if num_ids is None else num_ids
    for i, token in enumerate(ids):
        if type(token) is not int:    # bool is an int to isinstance
            raise ValueError(f"prompt_ids[{i}]: expected a token id, got {_kind(token)}")
        if not 0 <= token < limit:
            raise ValueError(f"prompt_ids[{i}]: {str(token)[:20]} is no token id (the tokenizer has 0 to {limit - 1})")


def _check_messages(messages: Any) -> None:
    """Other keys than role and content are left to the chat template."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: expected a list of messages, got {_kind(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{i}]: expected an object with role and content, got {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"messages[{i}].{key}: expected text, got {_kind(message.get(key))}")


def _text(row: dict[str, Any], key: str) -> str | None:
    text = row.get(key)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{key}: expected text, got {_kind(text)} (put it in quotes)")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Latents and conditions
# ---------------------------------------------------------------------------------------------------------------------

def read_conditions(path: str | Path, *, num_classes: int | None = None) -> Tensor:
    """The labels [N] of a file or folder, int64, from 0 to num_classes - 1. Raises ValueError for anything else."""
    return torch.cat([_labels(arrays, source, num_classes) for source, arrays in _sample_arrays(path, ("labels",))])


def read_latents(path: str | Path, *, num_classes: int | None = None) -> tuple[Tensor, Tensor]:
    """(x [N, ...] in fp32, labels [N] in int64) of a file or folder. Raises ValueError, also for x not finite."""
    xs, labels = [], []
    for source, arrays in _sample_arrays(path, ("x", "labels"), optional=("scale", "offset")):
        labels.append(_labels(arrays, source, num_classes))
        xs.append(_latents(arrays, source, len(labels[-1])))
        if xs[-1].shape[1:] != xs[0].shape[1:]:
            raise ValueError(f"{source}: samples have shape {list(xs[-1].shape[1:])}, those of the first shard "
                             f"{list(xs[0].shape[1:])} (write all shards alike)")
    return torch.cat(xs), torch.cat(labels)


def _labels(arrays: dict[str, Tensor], source: str, num_classes: int | None) -> Tensor:
    labels = arrays["labels"]
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool or not len(labels):
        raise ValueError(f"{source}: labels: expected class numbers [N], got {labels.dtype} {list(labels.shape)}")
    labels, limit = labels.to(torch.int64), 2**31 if num_classes is None else num_classes
    wrong = (labels < 0) | (labels >= limit)
    if wrong.any():
        i = int(wrong.int().argmax())
        raise ValueError(f"{source}: labels[{i}]: {labels[i]} is no class (the model has 0 to {limit - 1})")
    return labels


def _latents(arrays: dict[str, Tensor], source: str, num_labels: int) -> Tensor:
    x = arrays["x"]
    if x.dim() < 2 or len(x) != num_labels or x.dtype == torch.bool:
        raise ValueError(f"{source}: x: expected numbers [N, ...] with N = {num_labels} as in labels, got {x.dtype} "
                         f"{list(x.shape)}")
    if not x.is_floating_point() and not {"scale", "offset"} <= arrays.keys():
        raise ValueError(f"{source}: x: {x.dtype} without scale and offset (add both: values are x * scale + offset)")
    for name in arrays.keys() & {"scale", "offset"}:
        if arrays[name].dim() or not arrays[name].isfinite():
            raise ValueError(f"{source}: {name}: expected one finite number, got shape {list(arrays[name].shape)}")
    x = x.to(torch.float32) * float(arrays.get("scale", 1.0)) + float(arrays.get("offset", 0.0))
    finite = x.flatten(1).isfinite().all(1)
    if not finite.all():
        raise ValueError(f"{source}: x[{int(finite.int().argmin())}]: holds NaN or infinity (leave the sample out)")
    return x


def _sample_arrays(path: str | Path, names: Sequence[str], optional: Sequence[str] = ()
                   ) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(file, the named arrays) of an .npz or of each shard of a folder."""
    path = Path(path)
    if not os.path.isdir(path):
        yield str(path), _read_npz(path, names, optional)
        return
    shards = [_shard_line(line, source) for source, line in _lines(path / "index.jsonl")]
    if not shards:
        raise ValueError(f"{path / 'index.jsonl'}: names no shard")
    for file, count in shards:
        arrays = _read_shard(path / file, names, optional)
        if {len(arrays[name]) if arrays[name].dim() else 0 for name in names} != {count}:
            raise ValueError(f"{path / file}: {', '.join(names)}: expected {count} samples as in index.jsonl, got "
                             f"{', '.join(str(list(arrays[name].shape)) for name in names)}")
        yield str(path / file), arrays


def _shard_line(line: bytes, source: str) -> tuple[str, int]:
    try:
        row = _strict_json(_decode(line))
    except ValueError as error:
        raise ValueError(f"{source}: {_one_line(error)}") from None
    if not isinstance(row, dict) or row.keys() != {"file", "count"}:
        raise ValueError(f"{source}: expected an object with file and count, got {str(row)[:60]}")
    # A path here would let a downloaded folder make us open any file.
    if not isinstance(row["file"], str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", row["file"], re.ASCII):
        raise ValueError(f"{source}: file: expected the plain name of a .safetensors file, got "
                         f"{str(row['file'])[:60]!r}")
    if type(row["count"]) is not int or row["count"] < 1:
        raise ValueError(f"{source}: count: expected the number of samples in the shard, got {_kind(row['count'])}")
    return row["file"], row["count"]


def _read_shard(path: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, Tensor]:
    _refuse_special(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in _wanted(file.keys(), names, optional)}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: {_one_line(error)}") from None


def _read_npz(path: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, Tensor]:
    _refuse_special(path)
    try:
        if not zipfile.is_zipfile(path):    # numpy would take it for a pickle, and say so
            path.open("rb").close()
            raise ValueError("not an .npz file (or give a folder with an index.jsonl)")
        with zipfile.ZipFile(path) as archive:
            members = {member.removesuffix(".npy"): member for member in archive.namelist()}
            arrays = {name: _read_npy(archive, members[name]) for name in _wanted(members, names, optional)}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror} (check the data paths)") from None
    except (ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: {_one_line(error) or type(error).__name__}") from None
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:
            raise ValueError(f"{path}: {name}: expected numbers, got {array.dtype}")
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in arrays.items()}


def _read_npy(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """An array; numpy would allocate what the header claims before it looks how much there is."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in headers:
            raise ValueError(f"{member}: version {version} of the npy format is not supported")
        shape, _, dtype = headers[version](file)
    if math.prod(shape) * dtype.itemsize > archive.getinfo(member).file_size:
        raise ValueError(f"{member}: is too short for the {dtype} {str(list(shape))[:60]} that its header claims")
    with archive.open(member) as file:
        return np.lib.format.read_array(file)    # which refuses pickles unless told otherwise


def _refuse_special(path: str | Path) -> None:
    """A pipe, a terminal or a device may be waited for without end; a broken link is no file that is merely absent."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}: cannot be read: it is no regular file, or a broken link")


def _wanted(present: Collection[str], names: Sequence[str], optional: Sequence[str]) -> list[str]:
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(f"holds no {' and no '.join(missing)} (it has: {', '.join(sorted(present)) or 'nothing'})")
    return [*names, *(name for name in optional if name in present)]


# ---------------------------------------------------------------------------------------------------------------------
# Order
# ---------------------------------------------------------------------------------------------------------------------

def batch_at(position: int, size: int, num_prompts: int, seed: int) -> list[int]:
    """Prompt indices of the samples position, ..., position + size - 1, counted over all epochs and all ranks.

    Every epoch is its own permutation. The position is the only state, so a run resumes at any world size.
    """
    assert position >= 0 and size >= 1 and num_prompts >= 1, (position, size, num_prompts)
    first_epoch, offset = divmod(position, num_prompts)
    last_epoch = (position + size - 1) // num_prompts
    orders = [_epoch_order(epoch, num_prompts, seed) for epoch in range(first_epoch, last_epoch + 1)]
    return np.concatenate(orders)[offset:offset + size].tolist()


def sample_at(position: int, num_prompts: int, seed: int) -> tuple[int, int]:
    """(epoch, prompt index) of the sample at a position counted over all epochs and all ranks."""
    return position // num_prompts, batch_at(position, 1, num_prompts, seed)[0]


@lru_cache(maxsize=4)  # drawing it takes longer than a step where there are millions
def _epoch_order(epoch: int, num_prompts: int, seed: int) -> np.ndarray:
    """A permutation of range(num_prompts), from raw bits: unlike Generator.permutation, they never change in numpy."""
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_prompts)
    return np.argsort(keys, kind="stable")


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------

def answer_matches(text: str, answer: str, pattern: str | None) -> bool:
    """Whether a response gives the answer, up to surrounding white space.

    With a pattern (a regex with at least one group) group 1 of its last match in the text is compared instead of the
    whole text; no match is a wrong answer.
    """
    if pattern is None:
        return text.strip() == answer.strip()
    found = [match.group(1) for match in re.finditer(pattern, text)]
    return bool(found) and found[-1] is not None and found[-1].strip() == answer.strip()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers: .encode .decode .render_chat .has_text .stop_ids .num_ids .fingerprint
# ---------------------------------------------------------------------------------------------------------------------

def load_tokenizer(folder: str | Path | None, kind: Literal["auto", "byte"]) -> Tokenizer:
    """The built-in byte tokenizer ("byte", which reads no folder), or that of a model folder ("auto")."""
    if kind == "byte":
        return ByteTokenizer()
    if kind != "auto":
        raise ValueError(f"tokenizer: expected auto or byte, got {kind!r}")
    assert folder is not None, "tokenizer auto needs a model folder"
    return FolderTokenizer(Path(folder))


class ByteTokenizer:
    """The UTF-8 bytes of the text are its ids; 256 ends a text. Needs no files and no packages."""

    has_text = True
    stop_ids = (256,)
    num_ids = 257
    fingerprint = "byte-257"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids from 256 on are left out; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        raise ValueError("messages: the byte tokenizer has no chat template (give prompt or prompt_ids)")


class FolderTokenizer:
    """The tokenizer of a Hugging Face model folder. What is no text is read at once, with the standard library.

    stop_ids: eos_token_id of generation_config.json and config.json, and the id of tokenizer_config.json's eos_token.
    num_ids: 1 + the largest id in use; the model's vocabulary may be padded beyond. None without a tokenizer.json.
    fingerprint: equal for two folders whose ids mean the same tokens. None without a tokenizer.json.
    """

    def __init__(self, folder: Path):
        if not os.path.isdir(folder):
            raise ValueError(f"{folder}: no such folder (expected a model in Hugging Face format)")
        self.folder = folder
        self._config = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **self._config})
        vocab = _Vocab.read(folder / "tokenizer.json")
        self.num_ids = 1 + max(vocab.ids.values()) if vocab else None
        self.fingerprint = vocab.fingerprint if vocab else None
        stop_ids = {*_eos_ids(folder / "generation_config.json"), *_eos_ids(folder / "config.json")}
        eos_token = self._special_tokens.get("eos_token")
        if vocab and eos_token in vocab.ids:    # a token that is not in the vocabulary cannot be sampled either
            stop_ids.add(vocab.ids[eos_token])
        self.stop_ids = tuple(sorted(stop_ids))

    @property
    def has_text(self) -> bool:
        """Whether encode and decode work here: there is a tokenizer.json, and the tokenizers package to read it."""
        return self.num_ids is not None and importlib.util.find_spec("tokenizers") is not None

    def encode(self, text: str) -> list[int]:
        """Ids of the text exactly as given: the tokenizer's post-processor adds nothing to it."""
        engine, path = self._engine, self.folder / "tokenizer.json"
        with _foreign_errors(f"{path}: cannot encode the text"):
            ids = engine.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self.num_ids:    # of a part of the file that only the package reads
            raise ValueError(f"{path}: gives token {max(ids)}, but its vocabulary ends at {self.num_ids - 1}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text without special tokens."""
        engine = self._engine
        with _foreign_errors(f"{self.folder / 'tokenizer.json'}: cannot decode token ids"):
            return engine.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The messages as the chat template writes them, up to where the assistant's next message begins."""
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        chunks, num_chars = [], 0
        try:
            self._template.environment.work_left = MAX_TEMPLATE_WORK
            for chunk in self._template.generate(messages=messages, tools=None, documents=None,
                                                 add_generation_prompt=True, **self._special_tokens):
                chunks.append(chunk)
                num_chars += len(chunk)
                if num_chars > MAX_RENDERED_CHARS:
                    raise ValueError(f"the text is longer than {MAX_RENDERED_CHARS} characters")
        except Exception as error:    # a template is a program of somebody else's: it can raise anything
            raise ValueError(f"chat template of {self.folder}: {_one_line(error) or type(error).__name__}") from None
        return "".join(chunks)

    @cached_property
    def _engine(self) -> Any:
        path = self.folder / "tokenizer.json"
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file, and text needs it (give prompt_ids, or use the byte tokenizer)")
        try:
            import tokenizers
        except ImportError:
            raise ValueError("text needs the tokenizers package: pip install -r requirements-text.txt "
                             "(or give prompt_ids)") from None
        with _foreign_errors(f"{path}: not a tokenizer"):
            engine = tokenizers.Tokenizer.from_file(str(path))
        engine.no_truncation()    # both may be stored in the file, and would change prompts silently
        engine.no_padding()
        return engine

    @cached_property
    def _template(self) -> Any:
        path = self.folder / "chat_template.jinja"
        _refuse_special(path)
        if os.path.isfile(path):
            return _compile_template(_decode(_read_bytes(path)))
        template = self._config.get("chat_template")
        if isinstance(template, list):    # several, by name
            template = next((entry.get("template") for entry in template
                             if isinstance(entry, dict) and entry.get("name") == "default"), None)
        if not isinstance(template, str):
            raise ValueError("there is neither chat_template.jinja nor a chat_template in tokenizer_config.json "
                             "(give prompt or prompt_ids)")
        return _compile_template(template)


Tokenizer = FolderTokenizer | ByteTokenizer


@contextmanager
def _foreign_errors(what: str) -> Iterator[None]:
    """Errors of the tokenizers package, which has no types for them, as ValueErrors that begin with `what`."""
    try:
        yield
    except BaseException as error:
        # A panic of its Rust code, which only leaves this text unencoded, is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {_one_line(error)}") from None
        raise


def _compile_template(source: str) -> Any:
    """A chat template with what transformers gives it, in jinja2's sandbox: it reaches its arguments and nothing else.

    Its time and memory are bounded: see _Metered. render_chat sets the `work_left` of each conversation.
    """
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError:
        raise ValueError("chat templates need the jinja2 package: pip install 'jinja2>=3.1.6'") from None
    version = importlib.metadata.version("jinja2")
    if [int(part) for part in re.findall(r"\d+", version)[:3]] < [3, 1, 6]:
        raise ValueError(f"jinja2 {version} has known sandbox escapes: pip install 'jinja2>=3.1.6'")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"the template is longer than {MAX_TEMPLATE_CHARS} characters (is it one?)")
    # {% generation %} marks the assistant's text for training masks and writes nothing itself.
    source = re.sub(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source)
    source = re.sub(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source)
    environment = _bounded_sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.work_left = MAX_TEMPLATE_WORK      # the compiler computes what is constant
    environment.round_work = ROUND_WORK + len(source) // 8    # a round runs all of the template at most
    return environment.from_string(_metered(environment.parse(source)))


def _metered(tree: Any) -> Any:
    """The syntax tree of a template in which all that jinja2 leaves to Python itself goes through metered filters."""
    import jinja2.visitor
    from jinja2 import nodes

    def metered(node: nodes.Expr, name: Literal["counted", "paid", "join"]) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None)

    class Meter(jinja2.visitor.NodeTransformer):
        def visit_For(self, node: nodes.For) -> nodes.For:
            if node.recursive:
                raise ValueError("recursive loops are not supported (write a macro)")
            self.generic_visit(node)
            node.iter = metered(node.iter, "counted")
            return node

        def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:          # {{ name }} writes the name
            if len(node.name) > 100:
                raise ValueError("names of macros are limited to 100 characters")
            return self.generic_visit(node)

        def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:      # a ~ b
            self.generic_visit(node)
            return metered(nodes.List(node.nodes), "join")

        def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:    # == and the like, in
            self.generic_visit(node)
            node.expr = metered(node.expr, "paid")
            for operand in node.ops:
                operand.expr = metered(operand.expr, "paid")
            return node

        def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:    # a[b:c]
            self.generic_visit(node)
            if isinstance(node.arg, nodes.Slice):
                node.node = metered(node.node, "paid")
            return node

        def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:             # {a: b}, which hashes a
            self.generic_visit(node)
            node.key = metered(node.key, "paid")
            return node

    return Meter().visit(tree)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """The filter tojson as transformers has it: jinja2's own escapes HTML."""
    if not (indent is None or indent in range(17)) or (separators and len("".join(separators)) > 16):
        raise ValueError("tojson: indent and separators must be of at most 16 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Metered:
    """Over jinja2's sandbox: every operation pays for the size of its operands and its result.

    Work is counted in characters: an element of a list counts as ITEM_WORK of them for each level that it is nested
    in, a call as CALL_WORK, a round of a loop or a macro as round_work. No value is larger than what was paid for, so
    memory is bounded too. What can take more than in proportion to its operands pays their product (MULTIPLYING) or
    is absent.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    work_left = 0
    round_work = ROUND_WORK

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals = {name: self.globals[name] for name in ("range", "dict")}
        self.globals |= {"namespace": self.namespace, "raise_exception": self.raise_exception}
        self.filters = {**{name: self.metered(name, self.filters[name]) for name in FILTERS},
                        **{name: self.stepped(self.filters[name]) for name in CHEAP_FILTERS},
                        "tojson": self.metered("tojson", _to_json), "counted": self.counted, "paid": self.paid}
        self.filters["safe"] = self.filters["string"]      # nothing is escaped
        self.tests = {**{name: self.metered(name, self.tests[name]) for name in TESTS},
                      **{name: self.stepped(self.tests[name]) for name in CHEAP_TESTS}}
        self.finalize = self.paid      # of all that is written

    def raise_exception(self, message: str) -> None:
        raise ValueError(message)

    def spend(self, work: int) -> None:
        self.work_left -= work
        if self.work_left < 0:
            raise ValueError(f"takes more than {MAX_TEMPLATE_WORK} characters' worth of work")

    def paid(self, value: Any) -> Any:
        self.spend(_weight(value, self.work_left))
        return value

    def pay_for(self, name: str, operands: Collection[Any]) -> None:
        """Of a call: for its operands, or for the product of the first and the largest other one."""
        self.spend(CALL_WORK)
        numbers = int if name in MULTIPLYING else ()
        sizes = [abs(x) if isinstance(x, numbers) else _weight(x, self.work_left) for x in operands]
        self.spend(sum(sizes))
        if name in MULTIPLYING and len(sizes) > 1:
            self.spend((1 + sizes[0]) * max(sizes[1:]))

    def metered(self, name: str, function: Any) -> Any:
        @wraps(function)      # with jinja2's mark on it, which says what it gets before the operands
        def call(*args: Any, **kwargs: Any) -> Any:
            operands = [*args[hasattr(function, "jinja_pass_arg"):], *kwargs.values()]
            self.pay_for(name, operands)
            result = function(*args, **kwargs)
            return self.paid(list(result) if isinstance(result, Iterator) else result)
        return call

    def stepped(self, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.spend(CALL_WORK)
            return function(*args, **kwargs)
        return call

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(self.round_work)
            yield item

    def concat(self, chunks: Iterable[str]) -> str:      # what a macro or a block has written
        return "".join(self.paid(list(chunks)))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        named = [value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")]    # jinja2's
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):      # a method of a text
            self.pay_for(function.__name__, [owner, *args, *named])
        else:                           # a macro, for one
            self.spend(self.round_work)
            self.pay_for("", [*args, *named])
        return self.paid(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise ValueError("text % values is not supported (use ~)")
        if _is_huge(operator, left, right):
            raise ValueError(f"the result of {operator} is too large")
        return self.paid(super().call_binop(context, operator, self.paid(left), self.paid(right)))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.paid(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        known = isinstance(obj, self.namespace) or type(obj).__module__.startswith("jinja2.") or attr in METHODS
        return known and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Format strings can ask for any width: is_safe_attribute refuses them as they are."""


def _bounded_sandbox() -> type:
    import jinja2.sandbox
    import jinja2.utils

    class Namespace(jinja2.utils.Namespace):
        __repr__ = object.__repr__      # its own writes all that it holds, unpaid

    class Environment(_Metered, jinja2.sandbox.ImmutableSandboxedEnvironment):
        namespace = Namespace

    return Environment


def _weight(value: Any, limit: int) -> int:
    """The work that a value stands for: parts that are shared count each time, as they do when it is written.

    Stops beyond `limit`. Of objects that are no data, all that can be written is a short name.
    """
    total, stack = 0, [iter([value])]
    while stack and total <= limit:
        for item in stack[-1]:
            total += ITEM_WORK * (len(stack) - 1)
            if isinstance(item, str):
                total += len(item)
                if len(item) > MAX_RENDERED_CHARS:
                    raise ValueError(f"a text is longer than {MAX_RENDERED_CHARS} characters")
            elif isinstance(item, int):
                total += item.bit_length() // 3
                if item.bit_length() > MAX_TEMPLATE_BITS:
                    raise ValueError(f"a number has more than {MAX_TEMPLATE_BITS} bits")
            elif isinstance(item, dict):
                stack.append(itertools.chain(item.keys(), item.values()))
                break
            elif isinstance(item, (list, tuple, range, MappingView)):
                stack.append(iter(item))
                break
            if total > limit:
                break
        else:
            stack.pop()
    return total


def _is_huge(operator: Literal["*", "**"], left: Any, right: Any) -> bool:
    """Whether left * right or left ** right is a number of thousands of digits, or a text or list beyond any prompt."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits > MAX_TEMPLATE_BITS
    sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
    return operator == "*" and all(isinstance(size, int) for size in sizes) and math.prod(sizes) > MAX_RENDERED_CHARS


# ---------------------------------------------------------------------------------------------------------------------
# Files of a model folder
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Vocab:
    ids: dict[str, int]    # token -> id, added tokens included
    fingerprint: str       # sha256 of vocabulary, merges and added tokens

    @staticmethod
    def read(path: Path) -> _Vocab | None:
        """From a tokenizer.json; None if there is none."""
        _refuse_special(path)
        if not os.path.isfile(path):
            return None
        raw = _read_json(path)
        model, added = raw.get("model"), raw.get("added_tokens") or []
        try:
            vocab, merges = _token_ids(model["vocab"]), [_pair(merge) for merge in model.get("merges") or []]
            added = {token["content"]: token["id"] for token in added}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a tokenizer.json: malformed model.vocab, model.merges or added_tokens "
                             f"({type(error).__name__}: {_one_line(error)})") from None
        ids = {**vocab, **added}
        if not ids or not all(isinstance(token, str) and _is_id(i) for token, i in ids.items()):
            raise ValueError(f"{path}: not a tokenizer.json: model.vocab and added_tokens must give each token an id")
        content = json.dumps([sorted(vocab.items()), merges, sorted(added.items())])
        return _Vocab(ids, hashlib.sha256(content.encode()).hexdigest())


def _token_ids(vocab: Any) -> dict[str, int]:
    """A vocabulary is {token: id}, or for Unigram models [[token, score], ...] in the order of the ids."""
    return dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}


def _pair(merge: Any) -> list[str]:
    """Merges are written "a b" or, since tokenizers 0.20, ["a", "b"]."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [left, right]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and so on as text; each is written as text or as {"content": text}."""
    tokens = {name: config.get(name) for name in SPECIAL_TOKENS}
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _eos_ids(path: Path) -> list[int]:
    ids = _read_json(path).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(map(_is_id, ids)):
        raise ValueError(f"{path}: eos_token_id: expected a token id or a list of them, got {str(ids)[:60]}")
    return ids


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; {} if there is no such file."""
    _refuse_special(path)
    if not os.path.isfile(path):
        return {}
    try:
        value = _strict_json(_decode(_read_bytes(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {_kind(value)}")
    return value


def _read_bytes(path: Path) -> bytes:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES} bytes (is it a model folder?)")
    return path.read_bytes()


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} (save the file as UTF-8)") from None


# ---------------------------------------------------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------------------------------------------------

def _strict_json(text: str) -> Any:
    """JSON without what Python adds to it: duplicate keys, NaN, Infinity and numbers that overflow are errors."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_finite, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON at column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"malformed JSON: duplicate key {key[:60]!r}")
        row[key] = value
    return row


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"malformed JSON: {text[:40]} is not a finite number")
    return number


def _kind(value: Any) -> str:
    """What a JSON value is, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number with a fraction"}
    return names[type(value)] if value or isinstance(value, (int, float)) else f"{names[type(value)]} (empty)"


def _one_line(error: Exception) -> str:
    """A message that comes from elsewhere, in one line of bounded length."""
    text = " ".join(str(error).split())[:300]
    return text if text.isprintable() else text.encode("unicode_escape").decode()
