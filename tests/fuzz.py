# SPDX-License-Identifier: Apache-2.0
"""Mutated input files: each must be refused in one line that names its place, or be read correctly.

    python tests/fuzz.py --cases 2000 --seed 0                    # every kind of file: about 10 minutes on one core
    python tests/fuzz.py --kind config --seed 0 --case 17         # one case again, with its traceback

A case is a pure function of (kind, seed, number). Anything else than a ValueError of one line is a fault: another
exception, more than DEADLINE_S of work, more than MEMORY_BYTES more address space, weights that are not finite or not
those of the file, or a target that a refused load has changed. `test_fuzz.py` runs a few cases of every kind.
"""
from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny import write_lm  # noqa: E402
from tiny_dmd import write_flow, write_samples  # noqa: E402

from distill_core import checkpoint, config, data, export, report, sample  # noqa: E402
from distill_core.adapters import read_adapter  # noqa: E402
from distill_core.build import load_flow, load_lm  # noqa: E402

DEADLINE_S = 5.0
MEMORY_BYTES = 4 << 30
MAX_MESSAGE_CHARS = 2000
DEEP = 100_000


# --- mutations ------------------------------------------------------------------------------------------------------

class Pairs(list):
    """A JSON object as (key, value) pairs, so that a key can come twice."""


class Raw(str):
    """Text that goes into a JSON file as it is."""


ODD_VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, -2**63, 10**30, 1e308, 1e-320, -0.0,
    0.5, "", "x", "0", "1e-5", "null", "\x00", "a\nb", "\u2028", "\u202e", "../x", "/etc/passwd", "x" * 100_000, [],
    Pairs(), [[]], [0] * 5000, [None], ["x"], Pairs([("x", 1)]), Pairs([("x", None), ("x", None)]), Raw("NaN"),
    Raw("-Infinity"), Raw("1e999"), Raw("9" * 5000), Raw('"\\ud800"'), Raw("[" * DEEP), Raw("[" * DEEP + "]" * DEEP),
    Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("01"), Raw("'x'"), Raw("1" * 20)]
ODD_BYTES = [
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\n\n", b"\x1b[31m", b"\xe2\x80\xa8", b"NaN", b"Infinity",
    b"1e999", b'"', b"\\", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"[" * DEEP, b"{" * DEEP, b"- " * 1000,
    b"&a ", b"*a", b"<<: ", b"!!python/object/apply:os.system ", b"!!int ", b"%TAG ! tag:", b"--- ", b"? ", b"| ",
    b"> ", b"# ", b"{{ ", b"}}", b"{% ", b"%}", b"{% for i in range(99999) %}", b"{% endfor %}", b"{% if ",
    b"{% raw %}", b"9" * 5000, b"\xf0\x9f\x98\x80", b"\t"]


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    """One to three changes anywhere."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        raw = _change_bytes(rng, raw)
    return raw


def _change_bytes(rng: random.Random, raw: bytes) -> bytes:
    start = rng.randrange(len(raw) + 1)
    stop = min(len(raw), start + rng.choice((1, 1, 2, 8, 64)))
    head, part, tail, odd = raw[:start], raw[start:stop], raw[stop:], rng.choice(ODD_BYTES)
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in part[:1]) + part[1:]
    whole = rng.choice((b"", b"\x00" * 64, raw * 2, raw[::-1], b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"),
                        raw.decode("utf-8", "replace").encode("utf-16")))
    return rng.choice((head + flipped + tail, head + rng.randbytes(len(part)) + tail, head + odd + part + tail,
                       head + odd + tail, head + tail, head + part + part + tail, head, whole))


def mutate_json(rng: random.Random, raw: bytes) -> bytes:
    """One to three changes of values or keys of a JSON text; the rest stays as it is."""
    tree = json.loads(raw, object_pairs_hook=Pairs)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        _change(rng, rng.choice([node for node in _nodes(tree) if node] or [tree]))
    return _text(tree).encode("utf-8", "surrogatepass")


def _nodes(tree: Any) -> Iterator[list]:
    if isinstance(tree, list):
        yield tree
        for item in tree:
            yield from _nodes(item[1] if isinstance(tree, Pairs) else item)


def _change(rng: random.Random, node: list) -> None:
    if not node:
        return
    i, is_object = rng.randrange(len(node)), isinstance(node, Pairs)
    key, value = node[i] if is_object else (None, node[i])
    odd = copy.deepcopy(rng.choice(ODD_VALUES)) if rng.random() < 0.7 else _nudge(rng, value)
    change = rng.choice(("value", "value", "value", "remove", "repeat", "swap", "key"))
    if change == "value":
        node[i] = (key, odd) if is_object else odd
    elif change == "remove":
        del node[i]
    elif change == "repeat":
        node.insert(rng.randrange(len(node) + 1), (key, rng.choice((value, odd))) if is_object else value)
    elif change == "swap":
        j = rng.randrange(len(node))
        if is_object:
            node[i], node[j] = (node[i][0], node[j][1]), (node[j][0], node[i][1])
        else:
            node[i], node[j] = node[j], node[i]
    elif is_object:
        node[i] = (rng.choice((key[:-1], key.upper(), f"{key}x", f"x.{key}", f"{key}\n", f"\x1b{key}", "", "\u202e",
                               "k" * 5000, "__class__")), value)


def _nudge(rng: random.Random, value: Any) -> Any:
    """Something near: these get further into a reader than the odd values do."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value)))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e30, value / 1e30, int(value), str(value)))
    if isinstance(value, str):
        return rng.choice((value[:-1], value + "x", value.upper(), [value], f"{value}\n", value * 2))
    return rng.choice(([value], value[:1], value * 2)) if isinstance(value, list) else value


def _text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {_text(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(_text, tree)) + "]"
    return json.dumps(tree)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """Of a JSON text."""
    return rng.choice((mutate_bytes, mutate_json, mutate_json))(rng, raw)


def mutate_lines(rng: random.Random, raw: bytes) -> bytes:
    """Of a file of JSON lines: mostly one of them."""
    lines = raw.splitlines()
    i = rng.randrange(len(lines))
    lines[i] = mutate_json(rng, lines[i])
    return rng.choice((b"\n".join(lines), b"\n".join(lines), mutate_bytes(rng, raw)))


def mutate_safetensors(rng: random.Random, raw: bytes) -> bytes:
    """The length, the header (with the right length for what it has become) or the body."""
    length = int.from_bytes(raw[:8], "little")
    header, body = raw[8:8 + length], raw[8 + length:]
    part = rng.choice(("length", "header", "header", "header", "body", "any"))
    if part == "length":
        length = rng.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1, length + 1, length - 1, 99_999_999, 100_000_001))
        return length.to_bytes(8, "little") + header + body
    if part == "any":
        return mutate_bytes(rng, raw)
    if part == "body" and rng.random() < 0.7:
        start, noise = 8 + length + rng.randrange(len(body)), rng.randbytes(rng.choice((1, 4, 64)))
        return (raw[:start] + noise + raw[start + len(noise):])[:len(raw)]
    header = mutate(rng, header)
    return len(header).to_bytes(8, "little") + header + body


# --- kinds of files -------------------------------------------------------------------------------------------------
# prepare(folder) makes whole files once; read(rng, folder) changes one of them (changed() restores it) and reads it.

class Kind(NamedTuple):
    prepare: Callable[[Path], Any]
    read: Callable[[random.Random, Path, Any], None]


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """The file with another content, for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def check_weights(module: torch.nn.Module, expected: dict[str, torch.Tensor] | None = None) -> None:
    """All finite; equal to those expected, where a change cannot have touched them."""
    found = weights_of(module)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values()), "weights that are not finite"
    assert expected is None or (found.keys() == expected.keys() and all(torch.equal(found[name], expected[name])
                                                                        for name in found)), "other weights"


def prepare_config(folder: Path) -> list[tuple[bytes, bytes]]:
    """(YAML text, the same as JSON) of every shipped config."""
    texts = [path.read_bytes() for path in sorted((HERE.parent / "configs").glob("*.yaml"))]
    (folder / "config.yaml").write_bytes(texts[0])
    return [(text, json.dumps(yaml.safe_load(text)).encode()) for text in texts]


def read_config(rng: random.Random, folder: Path, texts: list[tuple[bytes, bytes]]) -> None:
    as_yaml, as_json = rng.choice(texts)
    overrides = []
    if rng.random() < 0.3:
        override = rng.choice((b"optim.lr=1e-5", b"rollout.stop_ids=[0, 2]", b"name='x'", b"dmd.convention=rcm",
                               b"dmd.student_optim.betas=[0, 0.9]", b'data.train=["a", "b"]'))
        overrides = [mutate_bytes(rng, override).decode("utf-8", "surrogateescape")]
    content = rng.choice((as_json, mutate_bytes(rng, as_yaml), mutate_json(rng, as_json), mutate(rng, as_json)))
    with changed(folder / "config.yaml", content):
        read = config.load(folder / "config.yaml", overrides)
    config.differences(read), config.warnings(read), config.flatten(read)
    with changed(folder / "config.yaml", config.to_yaml(read).encode("utf-8")):
        assert config.load(folder / "config.yaml") == read, "the resolved config reads as another one"


def prepare_prompts(folder: Path) -> data.Tokenizer:
    write_tokenizer(folder / "model")
    rows = [{"prompt": "hello world", "answer": "7"}, {"prompt_ids": [3, 4, 5, 6], "teacher": "a"},
            {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello \u00e9"}]},
            {"prompt": "lower", "answer": None}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data.load_tokenizer(folder / "model", "auto")


def read_prompts(rng: random.Random, folder: Path, tokenizer: data.Tokenizer) -> None:
    path = folder / "train.jsonl"
    with changed(path, mutate_lines(rng, path.read_bytes())):
        prompts, counts = data.read_prompts(path, tokenizer, max_prompt_tokens=64,
                                            long_prompts=rng.choice(("cut", "drop")))
    assert len(prompts) == counts.read - counts.dropped > 0
    assert all(type(i) is int and 0 <= i < tokenizer.num_ids for prompt in prompts for i in prompt.ids)
    assert all(0 < len(prompt.ids) <= 64 and isinstance(prompt.answer, str | None) for prompt in prompts)


def write_tokenizer(folder: Path) -> None:
    """Byte-pair encoding over a few letters, as the tokenizers package and we read it, with a chat template."""
    vocab = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz ", "he", "ll", "hell", "lo", "er"]
    folder.mkdir()
    tokenizer = {
        "version": "1.0", "padding": None,
        "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
        "added_tokens": [
            {"id": i, "content": vocab[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for i in range(3)],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": " ?[a-z]+"}, "behavior": "Isolated", "invert": False},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                                    {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteFallback"},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(vocab)},
                  "merges": ["h e", "l l", "he ll", "l o", "e r"]}}
    template = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ bos_token + m.content | trim }}{% else %}"
                "{{ '<' ~ m.role ~ '>' }}{{ m.content[:20] }}{% endif %}{{ '\\n' * 2 }}{% endfor %}"
                "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    tokenizer_config = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": template,
                        "model_max_length": 10**30}
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config,
             "special_tokens_map.json": {"unk_token": "<unk>", "eos_token": "</s>"},
             "generation_config.json": {"eos_token_id": [2, 1], "temperature": 0.6}, "config.json": {"eos_token_id": 2}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def prepare_tokenizer(folder: Path) -> None:
    write_tokenizer(folder / "model")


def read_tokenizer(rng: random.Random, folder: Path, _: None) -> None:
    names = ["tokenizer.json"] * 4 + ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    path = folder / "model" / rng.choice(names)
    with changed(path, mutate(rng, path.read_bytes())):
        use_tokenizer(data.load_tokenizer(folder / "model", "auto"))


def use_tokenizer(tokenizer: data.Tokenizer) -> None:
    ids = tokenizer.encode("hello lower world \u00e9 </s>")
    # An encoder that gives ids beyond its own vocabulary would be caught at the embedding at the latest.
    assert all(type(i) is int and 0 <= i < tokenizer.num_ids for i in ids), "ids beyond the vocabulary"
    tokenizer.decode(ids)
    assert all(type(i) is int and i >= 0 for i in tokenizer.stop_ids)
    text = tokenizer.render_chat([{"role": "system", "content": "be kind "}, {"role": "user", "content": "hello"}])
    assert isinstance(text, str) and len(text) <= data.MAX_RENDERED_CHARS
    tokenizer.encode(text)


TEMPLATE_PIECES = (
    "{% for i in range(9999) %}", "{% for m in messages %}", "{% endfor %}", "{{ m }}", "{{ m.content }}",
    "{% set x = [0] * 99 %}", "{% set x = 'ab' %}", "{{ x }}", "{% set x = x ~ x %}", "{{ x * 99999 }}",
    "{{ 9 ** 99 }}", "{{ x ** x }}", "{{ x.__class__ }}", "{{ x | attr('__init__') }}", "{% macro f(n) %}",
    "{% endmacro %}", "{{ f(3) }}", "{{ f(f) }}", "{% call f(1) %}", "{% endcall %}", "{{ range(99999) | list }}",
    "{{ messages | tojson(indent=2) }}", "{% if messages %}", "{% else %}", "{% endif %}",
    "{{ raise_exception('no') }}", "{% include 'x' %}", "{% import 'x' as y %}", "{% filter upper %}",
    "{% endfilter %}", "{{ loop.index }}", "{% break %}", "{{ cycler(1, 2).next() }}", "{{ namespace(x=1).x }}",
    "{{ lipsum(2) }}", "{% generation %}", "{% endgeneration %}", "{{ joiner('') }}", "{{ '%s' % x }}",
    "{{ '{0.x}'.format(x) }}", "{{ undefined.y }}", "{{ 1 / 0 }}")


def read_template(rng: random.Random, folder: Path, _: None) -> None:
    path = folder / "model" / "tokenizer_config.json"
    values = json.loads(path.read_bytes())
    soup = "".join(rng.choice(TEMPLATE_PIECES) for _ in range(rng.randint(1, 8)))
    changed_text = mutate_bytes(rng, values["chat_template"].encode()).decode("utf-8", "replace")
    values["chat_template"] = rng.choice((soup, soup + values["chat_template"], changed_text))
    with changed(path, json.dumps(values).encode()):
        use_tokenizer(data.load_tokenizer(folder / "model", "auto"))


def prepare_lm(folder: Path) -> dict[str, torch.Tensor]:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    return weights_of(load_lm(write_lm(folder / "model", vocab_size=61, rope_parameters=rope)))


def read_lm_index(rng: random.Random, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    path = folder / "model" / "model.safetensors.index.json"
    with changed(path, mutate(rng, path.read_bytes())):
        check_weights(load_lm(folder / "model"), weights)


def read_lm_config(rng: random.Random, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    path = folder / "model" / "config.json"
    with changed(path, mutate(rng, path.read_bytes())):
        check_weights(load_lm(folder / "model"), weights)


def read_lm_weights(rng: random.Random, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    path = rng.choice(sorted((folder / "model").glob("*.safetensors")))
    before, after = path.read_bytes(), mutate_safetensors(rng, path.read_bytes())
    with changed(path, after):
        model = load_lm(folder / "model")
    check_weights(model)
    start = 8 + int.from_bytes(before[:8], "little")
    if after[:start] == before[:start]:  # then each tensor is what its bytes say, and no other one has changed
        header = json.loads(before[8:start])
        found = weights_of(model)
        for name in weights:
            first, last = header.get(name, {"data_offsets": (0, 0)})["data_offsets"]
            if before[start + first:start + last] == after[start + first:start + last]:
                assert torch.equal(found[name], weights[name]), f"{name} has changed without a change of its bytes"


def prepare_flow(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: weights_of(load_flow(path, read_adapter(path))) for kind in ("dit", "mlp2d")
            for path in [write_flow(folder / kind, kind)]}


def read_flow_config(rng: random.Random, folder: Path, weights: dict[str, dict[str, torch.Tensor]]) -> None:
    kind = rng.choice(("dit", "mlp2d"))
    path = folder / kind / "config.json"
    with changed(path, mutate(rng, path.read_bytes())):
        check_weights(load_flow(folder / kind, read_adapter(folder / kind)), weights[kind])


def prepare_export(folder: Path) -> dict[str, torch.Tensor]:
    model = write_flow(folder / "student", "mlp2d")
    record = {"format": "hf", "job": "dmd", "role": "student", "cycle": 3, "successes": {"student": 3, "fake_score": 9},
              "base": {"path": "teacher", "weights": "0" * 64, "config": "0" * 64}, "files": export._hashes(model),
              "sampling": {"steps": 4, "mode": "sde", "shift": 1.5, "guidance": None, "state": {}}}
    (model / "export.json").write_text(json.dumps(record))
    return weights_of(load_flow(model, read_adapter(model)))


def read_export(rng: random.Random, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    path = folder / "student" / "export.json"
    with changed(path, mutate(rng, path.read_bytes())):
        _, module, sampling = sample.load_student(folder / "student")
    check_weights(module, weights)
    assert sampling.mode in ("sde", "ode") and sampling.steps >= 1


def prepare_latents(folder: Path) -> None:
    write_samples(folder / "x.npz", 5, (3, 2, 2))
    np.savez_compressed(folder / "small.npz", x=np.ones((4, 2), np.int8), labels=np.arange(4), scale=0.5, offset=1.0)
    (folder / "shards").mkdir()
    raw = {"x": torch.ones(4, 2), "labels": torch.arange(4)}
    save_file(raw, folder / "shards" / "a.safetensors")
    (folder / "shards" / "index.jsonl").write_text('{"file": "a.safetensors", "count": 4}\n')


def read_latents(rng: random.Random, folder: Path, _: None) -> None:
    name = rng.choice(("x.npz", "small.npz", "shards/a.safetensors", "shards/index.jsonl"))
    raw = (folder / name).read_bytes()
    change = {"npz": mutate_bytes, "safetensors": mutate_safetensors, "jsonl": mutate}[name.rpartition(".")[2]]
    with changed(folder / name, change(rng, raw)):
        x, labels = data.read_latents(folder / name.split("/")[0], num_classes=10)
    assert x.dtype == torch.float32 and x.isfinite().all() and len(x) == len(labels) > 0 and int(labels.max()) < 10


def checkpoint_tensors(value: float) -> dict[str, torch.Tensor]:
    return {"student.w": torch.full((3, 5), value), "student.b": torch.full((3,), value, dtype=torch.bfloat16),
            "step": torch.tensor(7), "student.e": torch.full((0, 2), value)}


def prepare_checkpoint(folder: Path) -> None:
    for step in (1, 2):
        state = {"step": step, "fingerprints": {"a": 1, "b": [1, 2]}, "config": {"name": "x"},
                 "roles": {"student": {"successes": 1}}}
        checkpoint.save(folder / "checkpoints", step, checkpoint_tensors(float(step)), state)


def read_checkpoint(rng: random.Random, folder: Path, _: None) -> None:
    """Damage: the newest folder is refused and the older one taken, or what is read is exactly what was saved."""
    step = folder / "checkpoints" / "step_00000002"
    path = step / rng.choice(("manifest.json", "shard_00000.safetensors"))
    change = mutate_safetensors if path.suffix == ".safetensors" else mutate
    with changed(path, change(rng, path.read_bytes())):
        found = checkpoint.find_latest(folder / "checkpoints")
        assert found is not None and found.step in (1, 2)
        load_checkpoint(found, float(found.step))
        checkpoint.newest_state(folder / "checkpoints")
        opened = checkpoint.open_checkpoint(step)
    load_checkpoint(opened, 2.0)


def load_checkpoint(found: checkpoint.Checkpoint, value: float | None) -> None:
    target, before = checkpoint_tensors(9.0), checkpoint_tensors(9.0)
    try:
        checkpoint.load(found, target)
    except ValueError:
        assert all(torch.equal(target[name], before[name]) for name in target), "half loaded"
        raise
    if value is not None:
        expected = checkpoint_tensors(value)
        assert all(torch.equal(target[name], expected[name]) for name in target), "other values"


def read_signed_checkpoint(rng: random.Random, folder: Path, _: None) -> None:
    """Malice: hashes and sizes are right, contents are not."""
    step = folder / "checkpoints" / "step_00000002"
    shard, manifest = step / "shard_00000.safetensors", step / "manifest.json"
    files = {"shard": shard.read_bytes(), "manifest": manifest.read_bytes()}
    if rng.random() < 0.5:
        files["shard"] = rng.choice((mutate_rows, mutate_safetensors))(rng, files["shard"])
        tree = json.loads(files["manifest"])
        tree["files"][shard.name] = {"size": len(files["shard"]), "sha256": hashlib.sha256(files["shard"]).hexdigest()}
        files["manifest"] = json.dumps(tree).encode()
    else:
        files["manifest"] = mutate_json(rng, files["manifest"])
    files["manifest"] = signed(files["manifest"])
    with changed(shard, files["shard"]), changed(manifest, files["manifest"]):
        checkpoint.newest_state(folder / "checkpoints")
        checkpoint.find_latest(folder / "checkpoints")
        load_checkpoint(checkpoint.open_checkpoint(step), None)


def signed(raw: bytes) -> bytes:
    """The manifest with the digest of its content, where it is JSON at all."""
    try:
        tree = json.loads(raw)
        tree.pop("sha256", None)
        return json.dumps({**tree, "sha256": checkpoint._manifest_digest(tree)}).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return raw


def mutate_rows(rng: random.Random, raw: bytes) -> bytes:
    """The JSON text inside the metadata of a shard, which says where its rows belong."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    header["__metadata__"]["rows"] = mutate(rng, header["__metadata__"]["rows"].encode()).decode("utf-8", "replace")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length:]


def prepare_report(folder: Path) -> None:
    lines = [{"step": step, "time": 1.7e9 + step, "kind": "train", "loss": 1.0 / step, "grad_norm": 0.5, "lr": 1e-5,
              "tokens": 100, "time/step_s": 2.0, "time/roll_s": 1.0, "time/train_s": 1.0, "tokens_per_s": 50.0,
              "my/metric": 3.0} for step in (1, 2, 3)]
    lines += [{"step": 3, "time": 1.7e9, "kind": "eval", "eval/exact_match": 0.5, "eval/reverse_kl_full": None},
              {"step": 1, "time": 1.7e9, "kind": "event", "event": "start", "changed": ["a=1"], "message": "x",
               "device": "cpu"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(json.dumps({"job": "opd", "name": "x", "max_steps": 9,
                                                    "student": {"path": "a"}}))
    (folder / "command.txt").write_text("train\n")
    (folder / "samples").mkdir()
    sample = {"prompt": "p", "response": "r", "answer": "1", "correct": True, "finished": True, "kl": 0.1, "length": 3}
    (folder / "samples" / "step_00000003.jsonl").write_text(json.dumps(sample) + "\n" + json.dumps(sample) + "\n")


def read_report(rng: random.Random, folder: Path, _: None) -> None:
    path = folder / rng.choice(("metrics.jsonl", "metrics.jsonl", "config.yaml", "samples/step_00000003.jsonl",
                                "command.txt"))
    change = mutate_bytes if path.suffix == ".txt" else mutate_lines
    with changed(path, change(rng, path.read_bytes())):
        page = report.render(report.read_run(folder))
    assert "<script" not in page and page.count("<html") == 1 and page.endswith("</html>\n")


KINDS = {
    "config": Kind(prepare_config, read_config), "prompts": Kind(prepare_prompts, read_prompts),
    "tokenizer": Kind(prepare_tokenizer, read_tokenizer), "template": Kind(prepare_tokenizer, read_template),
    "lm index": Kind(prepare_lm, read_lm_index), "lm config": Kind(prepare_lm, read_lm_config),
    "lm weights": Kind(prepare_lm, read_lm_weights), "flow config": Kind(prepare_flow, read_flow_config),
    "export record": Kind(prepare_export, read_export), "latents": Kind(prepare_latents, read_latents),
    "checkpoint": Kind(prepare_checkpoint, read_checkpoint),
    "signed checkpoint": Kind(prepare_checkpoint, read_signed_checkpoint), "report": Kind(prepare_report, read_report),
}


# --- runs -----------------------------------------------------------------------------------------------------------

class Hang(BaseException):
    """No Exception, so that no reader can take it for its own."""


class Fault(AssertionError):
    """A case that ended in neither of the two ways; the message says how to see it again."""


def outcome(kind: str, folder: Path, prepared: Any, *, seed: int, case: int) -> str:
    """"read" or "refused"; raises Fault for anything else."""
    rng = random.Random(f"{kind} {seed} {case}")
    place = f"--kind '{kind}' --seed {seed} --case {case}"
    try:
        with deadline(DEADLINE_S):
            KINDS[kind].read(rng, folder, prepared)
    except ValueError as error:
        message = str(error)
        is_placed = str(folder) in message or re.match(r"command line(:\d+)?: |[\w.\[\]]+: |.+: unknown key ", message)
        if not (message and message.isprintable() and len(message) <= MAX_MESSAGE_CHARS and is_placed):
            raise Fault(f"{place}: a bad message of {len(message)} characters: {message[:300]!r}") from error
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Fault(f"{place}: {type(error).__name__}: {str(error)[:300]!r}") from error
    return "read"


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Hang after that much processor time, or, for what waits, 12 times as long by the clock: machines are busy."""
    def give_up(*_: object) -> None:
        raise Hang(f"more than {seconds} s")

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, 12 * seconds)}
    before = {number: signal.signal(number, give_up) for number, _ in timers.values()}
    for timer, (_, after) in timers.items():
        signal.setitimer(timer, after)
    try:
        yield
    finally:
        for timer, (number, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextmanager
def bounded_memory(more_bytes: int) -> Iterator[None]:
    """At most that much more address space than there is now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(kind: str, folder: Path, *, seed: int, cases: range, keep_going: bool = False) -> Counter[str]:
    """How many cases of a kind were read and refused, and with keep_going how many are faults, which are printed."""
    folder.mkdir(parents=True)
    prepared = KINDS[kind].prepare(folder)
    counts: Counter[str] = Counter()
    with bounded_memory(MEMORY_BYTES):
        for case in cases:
            try:
                counts[outcome(kind, folder, prepared, seed=seed, case=case)] += 1
            except Fault as fault:
                if not keep_going:
                    raise
                print(fault, flush=True)
                counts["FAULT"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), help="one kind only")
    parser.add_argument("--case", type=int, help="one case only, with its traceback")
    args = parser.parse_args()
    cases = range(args.cases) if args.case is None else range(args.case, args.case + 1)
    torch.set_num_threads(1)
    checkpoint.log.setLevel("ERROR")
    total: Counter[str] = Counter()
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        for kind in [args.kind] if args.kind else KINDS:
            start = time.monotonic()
            counts = run(kind, scratch / kind.replace(" ", "_"), seed=args.seed, cases=cases,
                         keep_going=args.case is None)
            print(f"{kind}: {dict(sorted(counts.items()))}, {time.monotonic() - start:.0f} s", flush=True)
            total += counts
    except Fault:
        traceback.print_exc()
        return 1
    finally:
        shutil.rmtree(scratch)
    return 1 if total["FAULT"] else 0


if __name__ == "__main__":
    sys.exit(main())
