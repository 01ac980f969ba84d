# SPDX-License-Identifier: Apache-2.0
"""Every shipped config is dry-run at its intended world size, over folders with the real shapes and no bytes."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import write_prompts

import train_opd
from distill_core import config as cfg
from distill_core.models.lm import CausalLM, config_from_hf

ROOT = Path(__file__).resolve().parent.parent
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "max_position_embeddings": 40960, "hidden_act": "silu", "sliding_window": None,
         "use_sliding_window": False, "attention_bias": False, "eos_token_id": 151645}
SHAPES = {
    "Qwen3-1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                           "tie_word_embeddings": True},
    "Qwen3-8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                         "tie_word_embeddings": False},
    "1.5B": {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu",
             "max_position_embeddings": 131072, "sliding_window": 4096, "use_sliding_window": False,
             "tie_word_embeddings": False, "eos_token_id": 151643},
    "smollm2": {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000,
                "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 2},
}


def hollow_folder(folder: Path, raw: dict) -> None:
    """A folder as a release has it, with a true header over a sparse file: gigabytes that take no disk."""
    with torch.device("meta"):
        model = CausalLM(config_from_hf(raw, source=str(folder)))
    hollow_weights(folder, dict(model.named_parameters()))
    (folder / "config.json").write_text(json.dumps(raw))


def hollow_weights(folder: Path, parameters: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, parameter in parameters.items():
        end = offset + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def shape_of(path: str) -> dict:
    return next(raw for name, raw in SHAPES.items() if name in path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("opd_*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_dry_run_at_their_world_size(tmp_path, monkeypatch, capsys, path):
    """Catches a config that names an option wrongly, or whose rank plan, shards or memory do not work out."""
    config = cfg.load(path)
    write_prompts(tmp_path / "prompts.jsonl", 400)
    overrides = [f"data.train={tmp_path / 'prompts.jsonl'}", f"data.eval={tmp_path / 'prompts.jsonl'}", f"run_root={tmp_path}"]
    for role in ("student", "teacher"):
        hollow_folder(tmp_path / role, shape_of(getattr(config, role).path))
        overrides.append(f"{role}.path={tmp_path / role}")
    monkeypatch.setattr(sys, "argv", ["train_opd.py", "--config", str(path), "--dry-run", *overrides])
    assert train_opd.main() == 0
    shown = capsys.readouterr().out
    assert f"dry run passed: {config.topology.world_size} ranks" in shown and "KV cache" in shown
    if config.topology.teacher_ranks:
        assert f"rank {config.topology.world_size - config.topology.teacher_ranks}: teacher with" in shown


def test_the_cluster_configs_carry_the_published_settings():
    """Catches drift of the reference recipe: K 16, chunk 1024, lr 1e-6, batch 64, n 1, T 1.0, prompt 512, response 7680."""
    for name in ("opd_qwen3_1.7b_from_8b", "opd_dsr1_1.5b"):
        c = cfg.load(ROOT / f"configs/{name}.yaml")
        assert (c.loss.top_k, c.loss.chunk_size, c.teacher.chunk_size, c.optim.lr) == (16, 1024, 1024, 1e-6)
        assert (c.train.prompts_per_step, c.rollout.samples_per_prompt, c.rollout.temperature) == (64, 1, 1.0)
        assert (c.data.max_prompt_tokens, c.rollout.max_new_tokens, c.topology.world_size) == (512, 7680, 8)
