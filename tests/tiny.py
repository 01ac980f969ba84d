# SPDX-License-Identifier: Apache-2.0
"""Tiny model folders, prompts and configs written as a user would have them: several shards, an index, odd sizes."""
from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distill_core.models.lm import CausalLM, config_from_hf
from distill_core.safetensors_io import write_folder

VOCAB = 263  # prime: uneven over any number of ranks; the byte tokenizer uses ids 0 .. 256


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, sharded (then a collective) or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def write_lm(folder: Path, *, seed: int = 0, scale: float = 0.25, vocab_size: int = VOCAB, **changes) -> Path:
    """A random two-layer Llama folder in two or more shards."""
    raw = {"model_type": "llama", "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48,
           "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
           "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
           "eos_token_id": 256, "architectures": ["LlamaForCausalLM"], **changes}
    model = CausalLM(config_from_hf(raw, source="tiny"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=scale, generator=generator) if parameter.dim() > 1 else nn.init.ones_(parameter)
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    write_folder(folder, tensors, max_shard_bytes=40_000)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_prompts(path: Path, count: int, *, seed: int = 0, answers: bool = False) -> Path:
    """Token-id prompts of 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 13, (1,), generator=generator))
        row = {"prompt_ids": torch.randint(32, 127, (length,), generator=generator).tolist()}
        rows.append(row | ({"answer": "7"} if answers else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, **changes) -> Path:
    """A config over tiny models in `folder`; `changes` are dotted keys with __ for the dot."""
    if not (folder / "student").exists():
        write_lm(folder / "student", seed=1)
        write_lm(folder / "teacher", seed=2)
        write_prompts(folder / "train.jsonl", 40)
        write_prompts(folder / "eval.jsonl", 10, seed=5, answers=True)
    tree = {
        "job": "opd", "name": "tiny", "run_root": str(folder / "runs"), "max_steps": 6, "device": "cpu",
        "student": {"path": str(folder / "student")}, "teacher": {"path": str(folder / "teacher"), "chunk_size": 7},
        "topology": {"teacher_ranks": 1, "timeout_s": 20},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "tokenizer": "byte"},
        "rollout": {"max_new_tokens": 6, "batch_size": 4}, "loss": {"top_k": 5, "chunk_size": 9},
        "train": {"prompts_per_step": 8, "micro_batch_tokens": 40}, "optim": {"lr": 1e-3},
        "eval": {"every": 3, "num_prompts": 6, "max_new_tokens": 5}, "checkpoint": {"every": 3}}
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path
