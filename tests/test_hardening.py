# SPDX-License-Identifier: Apache-2.0
"""All that a hostile file achieves is a refusal: in one line, at once, before memory is taken for it."""
from __future__ import annotations

import ast
import importlib.util
import json
import os
import struct
import sys
import zipfile
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fuzz import deadline, prepare_report, write_tokenizer
from tiny import write_lm
from tiny_dmd import write_flow, write_samples

from distill_core import config, data, report
from distill_core.adapters import read_adapter
from distill_core.build import check_folder, load_flow, load_lm
from distill_core.export import _copy_small_files, read_export
from distill_core.safetensors_io import load_into, open_folder, write_folder

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("train_*.py"), *(ROOT / "distill_core").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])


def refusal(read, *args, **kwargs) -> str:
    """The message of a one-line ValueError that comes within 5 s."""
    with deadline(5.0), pytest.raises(ValueError) as caught:
        read(*args, **kwargs)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000, message
    return message


# --- no way to run code ---------------------------------------------------------------------------------------------

# What the project imports. None of it is there to open a network, run programs or unpickle; exceptions are below.
MODULES = set("""
    __future__ argparse base64 bisect codecs collections collections.abc concurrent concurrent.futures contextlib
    dataclasses datetime difflib errno fcntl fnmatch functools gc hashlib html importlib importlib.metadata
    importlib.util itertools json logging math operator os os.path pathlib random re resource secrets shlex shutil
    signal stat statistics struct sys threading time traceback typing unicodedata zipfile zlib
    jinja2 jinja2.nodes jinja2.sandbox jinja2.utils jinja2.visitor numpy numpy.lib numpy.lib.format numpy.random
    safetensors safetensors.torch tokenizers yaml yaml.resolver
    torch torch.autograd torch.autograd.function torch.backends torch.backends.mkldnn torch.cuda torch.distributed
    torch.distributed.device_mesh torch.distributed.distributed_c10d torch.distributed.fsdp torch.distributed.tensor
    torch.linalg torch.nn torch.nn.functional torch.nn.init torch.nn.utils torch.nn.utils.rnn torch.optim torch.random
    torch.special torch.testing torch.testing._internal torch.testing._internal.distributed
    torch.testing._internal.distributed.fake_pg torch.utils torch.utils.checkpoint""".split())
ONLY = {"concurrent.futures": {"Future", "wait"}, "importlib": {"metadata", "util"}, "importlib.util": {"find_spec"},
        "importlib.metadata": {"version"}}
NAMES = {"torch.load", "torch.save", "os.system", "os.popen", "os.fork", "os.forkpty", "numpy.load", "yaml.load",
         "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
         "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.CLoader", "yaml.CFullLoader",
         "yaml.CUnsafeLoader", "sys.modules", "sys.meta_path", "sys.path_hooks", "sys._getframe", "gc.get_objects",
         "gc.get_referrers", "gc.get_referents", "operator.attrgetter", "operator.methodcaller",
         "typing.get_type_hints"}
BUILTINS = {"eval", "exec", "compile", "__import__", "__builtins__", "__loader__", "__spec__", "vars", "globals",
            "locals", "breakpoint"}
UNSAFE_ATTRIBUTES = {"__builtins__", "__globals__", "__subclasses__", "__loader__", "__spec__", "__getattribute__",
                     "__code__", "__reduce__", "__reduce_ex__", "__import__"}
KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}
STARTS = ("os.exec", "os.spawn", "os.posix_spawn")


def dangers(source: str) -> list[str]:
    """Whatever in a source could unpickle, evaluate, import by name, run a program or open the network."""
    tree = ast.parse(source)
    names = imported_names(tree)
    used = [*names.values(), *(full for node in ast.walk(tree) if (full := full_name(node, names)))]
    found = [name for name in used if name in NAMES or name.startswith(STARTS) or has_unknown_module(name)]
    found += [name for name in names.values() if not name.startswith("distill_core.") and not is_listed(name)]
    found += [name for name in used if name.rpartition(".")[2].endswith(("_object", "_object_list"))]
    found += [name for name in used if name.rpartition(".")[2] in UNSAFE_ATTRIBUTES]
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        full = full_name(node, names)
        if names_module(full, names) and not isinstance(parents[id(node)], ast.Attribute):
            found.append(f"{full} not before a dot")      # t = torch, getattr(torch, name), torch.__dict__ ...
        elif isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            found.append(node.id)
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS and not is_false(node.value):
            found.append(node.arg)
        elif isinstance(node, ast.Constant) and node.value in {*KEYWORDS, *UNSAFE_ATTRIBUTES, "__dict__"} - {"shell"}:
            found.append(node.value)
        elif full.endswith(".__dict__") and names_module(full.removesuffix(".__dict__"), names):
            found.append(full)
    return found


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Name in the file -> what it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
    return names


def names_module(full: str, names: dict[str, str]) -> bool:
    """Whether a dotted name is that of a module, given what the file imports."""
    return full.partition(".")[0] in {name.partition(".")[0] for name in names.values()} and is_module(full)


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """"torch.load" of t.load after `import torch as t`; "?.load" of an attribute of something else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{full_name(node.value, names) or '?'}.{node.attr}" if isinstance(node, ast.Attribute) else ""


@lru_cache(maxsize=None)
def is_module(name: str) -> bool:
    """Whether a listed name, or one right below a listed name, is that of a module, be it imported already or not."""
    if name in MODULES or name.rpartition(".")[0] not in MODULES:
        return name in MODULES
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ImportError:      # the listed one is no package
        return False


def is_listed(name: str) -> bool:
    """Whether a name is that of one of MODULES, or of a part of one that is allowed and no other module."""
    parent, _, last = name.rpartition(".")
    allowed = parent in MODULES and last != "*" and last in ONLY.get(parent, {last})
    return name in MODULES or (allowed and not is_module(name))


def has_unknown_module(name: str) -> bool:
    """Whether a dotted name that begins in one of MODULES goes on to a module or a part that is not allowed."""
    ends = [i for i, letter in enumerate(name + ".") if letter == "."]
    return any(name[:start] in MODULES and not is_listed(name[:end]) for start, end in pairwise(ends))


def is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_can_run_code_of_others(path):
    """Catches a way for a downloaded folder, a checkpoint or a peer's bytes to run code, and any use of the network."""
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import marshal, json", "import shelve", "import dill as d",
    "import ctypes", "torch.load(x)", "import torch as t\nt.load(x)", "from torch import load", "torch.save(x, y)",
    "import torch.distributed.checkpoint", "from torch.distributed import checkpoint as dcp", "eval('1')", "f = exec",
    "compile(x, y, 'exec')", "__import__('os')", "import builtins", "dist.broadcast_object_list(x)",
    "torch.distributed.all_gather_object(a, b)", "dist.gather_object(a)", "dist.scatter_object_list(a, b)",
    "from torch.distributed import send_object_list", "import socket\nsocket.create_connection(x)",
    "from socket import socket", "import socket as s\ns.socket()", "import urllib.request",
    "from urllib import request", "import requests", "import http.client",
    "from huggingface_hub import snapshot_download", "AutoModel.from_pretrained(x, trust_remote_code=True)",
    "options = {'trust_remote_code': True}", "import importlib\nimportlib.import_module(name)",
    "from importlib import import_module", "subprocess.run(x, shell=True)", "subprocess.run(x, shell=flag)",
    "os.system('x')", "from os import popen", "import os\nos.execv(a, b)", "yaml.load(x)",
    "yaml.load(x, Loader=yaml.SafeLoader)", "import yaml as y\ny.unsafe_load(x)", "class L(yaml.Loader): pass",
    "np.load(x, allow_pickle=True)", "import numpy as np\nnp.load(x)", "import torch\nt = torch\nt.load(x)",
    "import torch\ngetattr(torch, 'load')(x)", "import torch\ngetattr(torch, name)(x)", "vars(torch)['load'](x)",
    "import torch\n[torch][0].load(x)", "import torch\ntorch.__dict__['load'](x)", "from torch import *",
    "from os.path import *", "torch.jit.load(x)", "import torch\ntorch.jit.load(x)", "from torch import jit",
    "import torch.jit as j", "import torch\ntorch.export.load(x)", "import torch\ntorch.ops.load_library(x)",
    "import torch\ntorch.classes.load_library(x)", "import torch\nu = torch.utils\nu.cpp_extension.load(x)",
    "import torch.utils.cpp_extension", "from torch.utils import cpp_extension", "from torch.utils.data import Dataset",
    "from torch.distributed import rpc", "import torch.distributed as dist\ndist.rpc.init_rpc(x)",
    "import torch.multiprocessing", "import torch\ntorch.hub.load(x)", "from torch import serialization",
    "import subprocess\nsubprocess.getoutput(x)", "import subprocess\nsubprocess.run(**{'shell': True})",
    "from subprocess import Popen\nPopen(x, -1, None, None, None, None, None, True, True)",
    "import importlib.util\nimportlib.util.spec_from_file_location(x)", "import importlib\nimportlib.__import__(x)",
    "from importlib.util import module_from_spec", "from importlib.metadata import entry_points", "import pkgutil",
    "import pydoc", "from pydoc import locate", "import timeit", "import pty", "import logging.config",
    "from logging import config", "import logging\nlogging.config.dictConfig(x)", "import multiprocessing",
    "from concurrent.futures import ProcessPoolExecutor", "import concurrent.futures as c\nc.ProcessPoolExecutor()",
    "globals()['__builtins__']", "x['__builtins__']", "__builtins__['eval']", "f.__globals__['os']", "locals()",
    "().__class__.__base__.__subclasses__()", "getattr(x, '__globals__')", "import numpy\nnumpy.lib.npyio.load(x)",
    "import numpy as np\nnp.lib.format.read_array(x, allow_pickle=True)", "from numpy.lib import npyio",
    "import sys\nsys.modules['os']", "from sys import modules", "import operator\noperator.methodcaller('load')",
    "from . import x", "import yaml\nyaml.CUnsafeLoader(x)", "import os\nos.fork()", "from os import execv"])
def test_the_search_for_dangers_finds_them(source):
    """Control for the one above."""
    assert dangers(source)


def test_the_search_for_dangers_leaves_the_rest_alone():
    """Control: names that only look like it. Also catches a search that reads no files."""
    fine = ("import re, torch, yaml, importlib.metadata\nimport torch.nn.functional as F\nfrom torch import nn\n"
            "model.eval()\nre.compile('x')\ntorch.compile(f)\nF.relu(nn.Linear(1, 1)(x))\ntorch.nn.init.zeros_(x)\n"
            "yaml.safe_load(x)\nload(x)\nself.load(x)\nrun(['x'], shell=False)\ngetattr(config, field.name)\n"
            "importlib.metadata.version('x')\nio.save(x)\nrequests = [1]\nrequests.get(x)\nclass C:\n    eval: int = 1")
    assert dangers(fine) == []
    assert {"train_opd.py", "data.py", "lm.py"} <= {path.name for path in SOURCES}


# --- files that are none, or too large -----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """One valid input of every kind."""
    folder = tmp_path_factory.mktemp("place")
    write_lm(folder / "lm", vocab_size=61)
    write_flow(folder / "flow")
    write_tokenizer(folder / "tokens")
    write_samples(folder / "x.npz", 5, (2,))
    (folder / "shards").mkdir()
    (folder / "shards" / "index.jsonl").write_text('{"file": "a.safetensors", "count": 4}\n')
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "config.yaml").write_text("job: opd\nname: x\nmax_steps: 9\nstudent: {path: a}\nteacher: {path: b}\n"
                                        "data: {train: c}\neval: {every: 0}\n")
    (folder / "lm" / "export.json").write_text("{}")
    (folder / "run").mkdir()
    prepare_report(folder / "run")
    return folder


def prompts(path: Path) -> object:
    return data.read_prompts(path, data.ByteTokenizer(), max_prompt_tokens=9, long_prompts="drop")


def tokens(folder: Path) -> data.Tokenizer:
    return data.load_tokenizer(folder, "auto")


def in_folder(read):
    """Reads the file by way of its folder."""
    return lambda path: read(path.parent)


READERS = {  # file -> what reads it
    "config.yaml": config.load, "train.jsonl": prompts, "x.npz": data.read_latents,
    "shards/index.jsonl": in_folder(data.read_latents), "tokens/tokenizer.json": in_folder(tokens),
    "tokens/tokenizer_config.json": in_folder(tokens), "tokens/generation_config.json": in_folder(tokens),
    "lm/config.json": in_folder(load_lm), "lm/model.safetensors.index.json": in_folder(load_lm),
    "lm/model-00001-of-00002.safetensors": in_folder(load_lm), "lm/export.json": in_folder(read_export),
    "flow/config.json": in_folder(read_adapter), "run/metrics.jsonl": in_folder(report.read_run)}


@pytest.mark.parametrize("name", READERS)
def test_pipes_folders_and_devices_are_refused_at_once(place, name):
    """Catches a reader that waits for the other end of a pipe, or reads /dev/zero until memory ends."""
    path, aside = place / name, place / "aside"
    os.rename(path, aside)
    try:
        for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path),
                     lambda path: os.symlink(path, path)):
            make(path)
            if name == "x.npz" and path.is_dir():
                os.rmdir(path)  # a folder is the other form of latents
                continue
            assert str(path) in refusal(READERS[name], path)
            os.rmdir(path) if path.is_dir() else os.unlink(path)
    finally:
        os.rename(aside, path)


@pytest.mark.parametrize("name", [name for name in READERS if not name.endswith(("metrics.jsonl", ".npz"))])
def test_large_files_are_refused_unread(place, name):
    """Catches 20 GB of text read into memory (the file is sparse)."""
    path = place / name
    before = path.read_bytes()
    try:
        os.truncate(path, 20 << 30)
        assert str(path) in refusal(READERS[name], path)
    finally:
        path.write_bytes(before)


BAD_JSON = {
    "empty": b"", "NUL": b"\x00" * 9, "duplicate key": b'{"x": 1, "x": 1}',
    "duplicate key inside": b'{"a": [{"x": 1, "x": 2}]}', "NaN": b'{"x": NaN}', "infinite": b'{"x": -Infinity}',
    "overflow": b'{"x": 1e999}', "huge integer": b'{"x": ' + b"9" * 5000 + b"}", "deep list": b"[" * 100_000,
    "deep object": b'{"x":' * 100_000 + b"1" + b"}" * 100_000, "no UTF-8": b'{"x": "\xff"}',
    "UTF-16": '{"x": 1}'.encode("utf-16"), "no object": b"[1]", "number": b"7", "cut": b'{"x": ', "two": b"{} {}"}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith("json") or name == "shards/index.jsonl"])
def test_json_is_read_strictly_everywhere(place, name, content):
    """Catches what Python's json lets pass or ends with a traceback, in each of the places that read JSON."""
    path = place / name
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        assert str(path) in refusal(READERS[name], path)
    finally:
        path.write_bytes(before)


def test_byte_order_marks_and_line_ends(place):
    """Catches files of a Windows editor refused where people write them; those of a model folder are not written so."""
    for name in ("config.yaml", "train.jsonl"):
        path = place / name
        before = path.read_bytes()
        expected = READERS[name](path)
        path.write_bytes(b"\xef\xbb\xbf" + before.replace(b"\n", b"\r\n"))
        assert READERS[name](path) == expected
        path.write_bytes(before)
    (place / "bom").mkdir()
    (place / "bom" / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    assert "BOM" in refusal(read_adapter, place / "bom")


# --- claims about sizes ---------------------------------------------------------------------------------------------

def raw_safetensors(header: object, body: bytes = b"\x00" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


BAD_HEADERS = {
    "length beyond the file": struct.pack("<Q", 2**40) + b"{}", "negative length": struct.pack("<q", -1) + b"{}",
    "short": b"\x01",
    "empty": b"", "overlap": raw_safetensors({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
                                              "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
    "hole": raw_safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                             "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
    "beyond the end": raw_safetensors({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}),
    "trailing bytes": raw_safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
    "backwards": raw_safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}),
    "2^62 elements": raw_safetensors({"a": {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 16]}}),
    "2^64 elements": raw_safetensors({"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, b""),
    "negative shape": raw_safetensors({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}),
    "fraction": raw_safetensors({"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}),
    "unknown dtype": raw_safetensors({"a": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}}),
    "codes": raw_safetensors({"a": {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}}),
    "no fields": raw_safetensors({"a": {}}), "no object": raw_safetensors([]), "no tensors": raw_safetensors({}, b""),
    "key twice": raw_safetensors(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
                                 b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "metadata of numbers": raw_safetensors({"__metadata__": {"x": 1},
                                            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "odd name": raw_safetensors({"a\n\x1b[31m" * 999: {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}}),
    "deep": raw_safetensors(b"[" * 100_000, b"")}


@pytest.mark.parametrize("content", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_lie_are_refused(tmp_path, content):
    """Catches a header that makes us allocate what it claims, read one tensor's bytes as another's, or leave a gap."""
    (tmp_path / "model.safetensors").write_bytes(content)
    assert str(tmp_path) in refusal(open_folder, tmp_path)


def test_the_headers_above_are_bad_for_one_reason_each(tmp_path):
    """Control: the same file, told right, opens."""
    content = raw_safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})
    (tmp_path / "model.safetensors").write_bytes(content)
    tensor = torch.ones(4)
    load_into(open_folder(tmp_path), {"a": tensor})
    assert not tensor.any()


@pytest.mark.parametrize("kind, changes", [
    ("lm", {"num_hidden_layers": 10**9}), ("lm", {"num_hidden_layers": 4096}), ("lm", {"vocab_size": 2**31 - 1}),
    ("lm", {"hidden_size": 2**20, "head_dim": 2**30}), ("lm", {"intermediate_size": 2**62}),
    ("lm", {"num_attention_heads": 2**30}), ("dit", {"depth": 10**9}), ("dit", {"hidden_size": 2**30, "num_heads": 1}),
    ("dit", {"num_classes": 2**31 - 2}), ("dit", {"mlp_ratio": 1e9}),
    ("dit", {"input_size": 2**30, "patch_size": 2**30}), ("dit", {"channels": 2**62}), ("mlp2d", {"depth": 2**31 - 1}),
    ("mlp2d", {"hidden_size": 2**31 - 1}), ("mlp2d", {"num_classes": 2**31 - 2})])
def test_a_config_that_claims_absurd_sizes_takes_no_memory(tmp_path, monkeypatch, kind, changes):
    """Catches a model that is allocated, or built layer by layer, before it is compared with the weights beside it."""
    folder = write_lm(tmp_path / "m", vocab_size=61) if kind == "lm" else write_flow(tmp_path / "m", kind)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *args, **kwargs: pytest.fail("allocated"))
    read = load_lm if kind == "lm" else lambda folder: load_flow(folder, read_adapter(folder))
    assert str(folder) in refusal(read, folder)


def test_a_refused_folder_has_filled_nothing(tmp_path):
    """Catches a half-loaded model: the last shard lies, and the target of a load still holds what it held."""
    write_folder(tmp_path / "m", [("a", torch.zeros(4)), ("b", torch.zeros(4))], max_shard_bytes=16)
    last = tmp_path / "m" / "model-00002-of-00002.safetensors"
    targets = {"a": torch.ones(4), "b": torch.ones(5)}
    refusal(lambda: load_into(open_folder(tmp_path / "m"), targets))
    last.write_bytes(last.read_bytes()[:-1])
    refusal(lambda: load_into(open_folder(tmp_path / "m"), {"a": targets["a"], "b": torch.ones(4)}))
    assert all(tensor.eq(1).all() for tensor in targets.values())


def npz(path: Path, header: str, body: bytes = b"\x00" * 8, *, magic: bytes = b"\x93NUMPY\x01\x00") -> Path:
    text = header.encode().ljust(118) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x.npy", "labels.npy"):
            archive.writestr(name, magic + struct.pack("<H", len(text)) + text + body)
    return path


@pytest.mark.parametrize("header", [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 2)}",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (2,)}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "__import__('os')", "{'descr': '<f4', 'shape': (1,)}",
    ""])
def test_arrays_that_claim_more_than_there_is(tmp_path, header):
    """Catches numpy allocating 8 TB for an array of 8 bytes, a pickled object, a header that is a program."""
    assert "x.npz" in refusal(data.read_latents, npz(tmp_path / "x.npz", header))


def test_arrays_of_other_formats(tmp_path):
    """Catches numpy's advice to load pickles, which members without the magic bytes call forth."""
    fine = "{'descr': '<i8', 'fortran_order': False, 'shape': (1,)}"
    assert data.read_conditions(npz(tmp_path / "fine.npz", fine)).tolist() == [0]  # control
    for magic in (b"\x80\x04NUMPY\x01", b"\x93NUMPY\x09\x00"):
        message = refusal(data.read_conditions, npz(tmp_path / "x.npz", fine, magic=magic))
        assert "pickle" not in message and "unsafe" not in message


# --- chat templates -------------------------------------------------------------------------------------------------

def render(folder: Path, template: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return data.load_tokenizer(folder, "auto").render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in [range(99999)] * 9999 recursive %}{{ loop(i) }}{% endfor %}",
    "{% set x = namespace(n=9) %}{% for i in range(99) %}{% set x.n = x.n * x.n %}{% endfor %}",
    "{{ 9 ** 9 ** 9 }}{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 10 }}", "{{ [0] * 10 ** 10 }}", "{{ 10 ** 10 * 'x' }}",
    "{{ (0,) * 10 ** 10 }}",
    "{% for i in range(10 ** 9) %}{% endfor %}", "{% for i in 'x' * 8000000 %}{% endfor %}",
    "{{ lipsum(n=1000000) }}", "{{ cycler(1).next() }}", "{{ joiner('')() }}", "{{ '%3000000000d' % 1 }}",
    "{{ '%*d' % (3000000000, 1) }}", "{{ '%3000000000d' is odd }}", "{{ '%3000000000d' | format(1) }}",
    "{{ '{:3000000000}'.format(1) }}", "{{ ''['format'](1) }}", "{{ '{:3000000000}'.format_map({}) }}",
    "{{ ('a' * 8000000) | wordwrap(1) }}", "{{ ('a.b ' * 2000000) | urlize }}", "{{ 'x' | center(3 * 10 ** 9) }}",
    "{{ range(99999) | slice(99999999) | list }}", "{{ range(9) | batch(10 ** 9, 0) | list }}",
    "{{ messages | tojson(indent=10 ** 9) }}", "{{ messages | tojson(separators=('x' * 99, ':')) }}",
    "{{ 'x' | indent(10 ** 9, true) }}", "{{ 'x'.ljust(3 * 10 ** 9) }}", "{{ 'x'.zfill(3 * 10 ** 9) }}",
    "{{ '\t'.expandtabs(3 * 10 ** 9) }}", "{{ (1).to_bytes(3 * 10 ** 9) }}", "{{ 'x'.encode().center(3 * 10 ** 9) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}", "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}", "{{ ('a' * 1000000) | join('b' * 1000000) }}",
    "{{ ('a' * 1000000).strip('b' * 1000000 ~ 'a') }}", "{{ ('a' * 1000000) | trim('b' * 1000000 ~ 'a') }}",
    "{{ (['a' * 9] * 99999) | map('replace', 'a', 'b' * 99999) | list | length }}",
    "{% macro " + "f" * 99999 + "() %}{% endmacro %}{{ ('a' * 999999) | replace('a', " + "f" * 99999 + ") }}",
    "{{ ([[]] * 9999) | sum(start=[0] * 9999) }}", "{{ ('f' * 8000000) | int(0, 16) }}",
    "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endmacro %}{{ f() | length }}",
    "{% set x %}{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}{% endset %}",
    "{% for i in range(99999) %}" + "{% set s = 1 %}" * 2_000 + "{% endfor %}", "x" * 300_000,
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, 'x' * 999999] %}{% endfor %}",
    *("{% set ns = namespace(x=" + start + ") %}{% for i in range(60) %}{% set ns.x = " + step + " %}{% endfor %}" + end
      for start, step, end in (
          ("'x'", "ns.x ~ ns.x", ""), ("'x'", "ns.x + ns.x", ""), ("['x']", "ns.x + ns.x", ""),
          ("'x'", "[ns.x, ns.x]", "{{ ns.x }}"), ("'x'", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
          ("'x'", "[ns.x, ns.x]", "{{ ns.x | string | length }}"), ("'x'", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
          ("'x'", "(ns.x, ns.x)", "{{ messages[0][ns.x] }}"), ("'x'", "{0: ns.x, 1: ns.x}", "{{ ns.x.items() }}"),
          ("1", "ns.x + 2 ** 4000", "{{ ns.x * ns.x }}"), ("'x'", "[ns.x, ns.x]", "{{ ns.x == ns.x }}"),
          ("'x'", "[ns.x, ns.x]", "{{ ns.x in [1] }}"), ("'x'", "[ns.x, ns.x]", "{{ raise_exception(ns.x) }}"))),
    "{% set x = 'a' * 8000000 %}{% for i in range(9999) %}{% set y = x[1:] %}{% endfor %}",
    "{% set x = 'a' * 8000000 %}{% for i in range(9999) %}{% set y = 'b' in x %}{% endfor %}",
    "{% set x = 'a' * 8000000 %}{% for i in range(9999) %}{% set y = x.split() %}{% endfor %}",
    "{% set x = 'a' * 8000000 %}{% for i in range(9999) %}{% set y = x is in x %}{% endfor %}"])
def test_templates_come_to_an_end(tmp_path, template):
    """Catches a template that runs for hours, or fills the memory, without writing a character."""
    pytest.importorskip("jinja2")
    assert "chat template of" in refusal(render, tmp_path / "m", template)


def test_templates_may_take_the_steps_that_they_need(tmp_path, monkeypatch):
    """Control: the count starts anew for each conversation, and loops and numbers do what they do without it."""
    pytest.importorskip("jinja2")
    template = ("{% for i in range(5) if i > 1 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
                "{% endfor %} {% for a in [] %}{% else %}none{% endfor %} "
                "{{ 2 * 3 }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ 1.5 * 2 }} {{ 2 ** -1 }}")
    monkeypatch.setattr(data, "MAX_TEMPLATE_WORK", 7_000)
    assert render(tmp_path / "m", template) == "1/3,2/3,3/3 none 6 1024 abab 3.0 0.5"
    tokenizer = data.load_tokenizer(tmp_path / "m", "auto")
    for _ in range(3):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    monkeypatch.setattr(data, "MAX_TEMPLATE_WORK", 6_000)
    assert "takes more than 6000" in refusal(render, tmp_path / "m", template)


@pytest.mark.parametrize("template, name", [
    ("{{ 'x' | wordwrap(1) }}", "wordwrap"), ("{{ 'x'.ljust(3) }}", "ljust"), ("{{ '{}'.format(1) }}", "format"),
    ("{{ lipsum() }}", "lipsum"), ("{{ '%d' % 1 }}", "%"), ("{{ 'x' | tojson(indent=17) }}", "indent"),
    ("{{ 2 is odd }}", "odd"), ("{{ messages.append(1) }}", "append"), ("{{ 9 ** 9999 }}", "**")])
def test_what_templates_cannot_use_is_named(tmp_path, template, name):
    """Catches a refusal that leaves its reader to guess which part of a template it is about."""
    pytest.importorskip("jinja2")
    assert name in refusal(render, tmp_path / "m", template).partition("chat template of ")[2]


def test_long_conversations_leave_work_to_spare(tmp_path):
    """Catches a bound that real conversations reach: 1,000 messages of 1,000 characters, 30 KB of template."""
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% set content = m.content | trim %}{% if loop.index0 == messages | length - 1 %}!"
        "{% elif content.startswith('<think>') and '</think>' in content %}{{ content.split('</think>')[-1] }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + content.replace('<|im_end|>', '') ~ '\n' }}{% endif %}"
        "{% endfor %}{# " + "x" * 30_000 + " #}")
    tokenizer = data.load_tokenizer(tmp_path, "auto")
    assert len(tokenizer.render_chat([{"role": "user", "content": "word " * 200}] * 1000)) > 10**6
    assert tokenizer._template.environment.work_left > data.MAX_TEMPLATE_WORK // 4


def test_text_that_a_tokenizer_cannot_take(tmp_path):
    """Catches the package's TypeError for half a surrogate pair that a template has written."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    write_tokenizer(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(r"{{ '\ud800' }}")
    (tmp_path / "x.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    tokenizer = data.load_tokenizer(tmp_path / "m", "auto")
    message = refusal(data.read_prompts, tmp_path / "x.jsonl", tokenizer, max_prompt_tokens=9, long_prompts="drop")
    assert "x.jsonl:1: " in message and "cannot encode" in message


def test_a_tokenizer_that_contradicts_itself(tmp_path):
    """Catches a panic of the package's Rust code, which is no Exception, and ids beyond any embedding's rows."""
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    raw = json.loads(path.read_text())
    assert tokens(path.parent).encode("hello")  # control
    raw["post_processor"]["single"].append({"Sequence": {"id": "B", "type_id": 0}})
    path.write_text(json.dumps(raw))
    assert "tokenizer.json: cannot encode the text" in refusal(tokens(path.parent).encode, "hello")
    tokenizer = tokens(path.parent)
    tokenizer._engine = SimpleNamespace(encode=lambda *args, **kwargs: SimpleNamespace(ids=[3, tokenizer.num_ids]))
    assert "its vocabulary ends at" in refusal(tokenizer.encode, "hello")


# --- links and pages ------------------------------------------------------------------------------------------------

def test_an_export_publishes_nothing_from_outside_the_model(tmp_path):
    """Catches a cloned model whose README is a link to a private key, which the export would carry to the public."""
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "hub" / "snapshots" / "main"
    folder.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    (tmp_path / "hub" / "blobs" / "0a1b").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/0a1b")  # the hub's cache looks like this
    (folder / "LICENSE").write_text("free")
    (folder / "LICENSE.txt").symlink_to("LICENSE")
    (tmp_path / "out").mkdir()
    _copy_small_files(folder, tmp_path / "out", None)
    assert sorted(os.listdir(tmp_path / "out")) == ["LICENSE", "LICENSE.txt", "config.json"]  # control
    for i, target in enumerate((tmp_path / "secret", "../../../secret")):
        (folder / "README.md").symlink_to(target)
        (out := tmp_path / f"out{i}").mkdir()
        assert "README.md: is a link out of" in refusal(_copy_small_files, folder, out, None)
        (folder / "README.md").unlink()


def test_weights_may_be_links_but_names_may_not_be_paths(tmp_path):
    """Catches a breach of either half of the policy: links are followed, since caches have them; paths are refused."""
    folder = write_lm(tmp_path / "m", vocab_size=61)
    shard = folder / "model-00001-of-00002.safetensors"
    os.rename(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    check_folder(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    for file in ("../elsewhere", str(tmp_path / "elsewhere.safetensors"), "a/b.safetensors", "..\\b.safetensors",
                 ".safetensors/..", "", ".", "b.safetensors\n", "b\x00.safetensors", "\u00e9.safetensors", "b.bin", 7,
                 None, ["b.safetensors"]):
        content = {"weight_map": index["weight_map"] | {name: file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        assert "not the plain name" in refusal(open_folder, folder), file


def test_a_report_shows_names_as_text(tmp_path):
    """Catches markup from the name of a run, a metric, a path or a folder; a bomb of aliases; values of wrong types."""
    evil = "<img src=x onerror=alert(1)>"
    run = tmp_path / evil.replace("/", "")
    run.mkdir()
    prepare_report(run)
    (run / "config.yaml").write_text(f"job: '{evil}'\nstudent: {{path: '{evil}'}}\ndevice: '{evil}'\n"
                                     f"max_steps: '{evil}'\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, evil: 1.0, "event": evil, "message": evil, "kind": "event"}) + "\n")
        file.write(json.dumps({"step": 4, evil: 1.0, "kind": "train"}) + "\n")
    page = report.render(report.read_run(run))
    assert "<img" not in page and page.count("&lt;img src=x onerror=alert(1)&gt;") >= 5
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)) + "name: *a59\n"
    for bad in (bomb, "[" * 1000, "job: !!python/object/apply:os.system [id]\n? [a]\n: b", "- a"):
        (run / "config.yaml").write_text(bad)
        assert "config.yaml" in refusal(report.read_run, run)
    (run / "config.yaml").write_text("name: x\n")
    for line in ({"step": "1"}, {"step": True}, {"step": -1}, {"step": 2**60}, {"step": 1, "kind": []},
                 {"step": 1, "time": 1e300}, {"step": 1, "loss": 10**400}, {"step": 1, "changed": [1]},
                 {"step": 1, "message": {}}):
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"step": 2}) + "\n")
        assert "metrics.jsonl" in refusal(report.read_run, run)


def test_a_sample_is_finite_however_it_is_stored(tmp_path):
    """Catches NaN in latents, which would spread over all weights in one step."""
    np.savez(tmp_path / "x.npz", x=np.array([[1.0, np.nan]]), labels=np.array([0]))
    assert "x[0]: holds NaN" in refusal(data.read_latents, tmp_path / "x.npz")
