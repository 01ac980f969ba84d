# SPDX-License-Identifier: Apache-2.0
"""Folders into plain and sharded models: equal weights on uneven ranks, nothing uninitialised, bad folders refused."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_dmd
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors import safe_open
from tiny import VOCAB, write_lm, whole
from tiny_dmd import MODELS, write_flow
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from distill_core.adapters import read_adapter
from distill_core import generate as generate_module
from distill_core.build import (LoRA, build_flow, build_head, build_lm, build_replica, check_flow, check_folder,
                                common_vocab, kv_bytes, largest_batch, load_flow, load_lm, memory_plan, meta_flow,
                                read_lm_config)
from distill_core.fsdp import gather_into
from distill_core.lora import use
from distill_core.safetensors_io import write_folder

VARIANTS = {"tied": {}, "untied": {"tie_word_embeddings": False}, "qwen3": {"model_type": "qwen3", "head_dim": 8,
            "attention_bias": True}, "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False}}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sharded_equals_plain(tmp_path, variant, num_ranks):
    """Catches rows of the wrong rank, a tie lost by materialising, buffers left as garbage, an embedding read twice."""
    folder = write_lm(tmp_path / "lm", **VARIANTS[variant])
    assert len(list(folder.glob("*.safetensors"))) > 1
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = load_lm(folder)
    with torch.no_grad():
        want = plain.lm_head(plain(tokens))

    def body(rank):
        mesh, cpu = init_device_mesh("cpu", (num_ranks,)), torch.device("cpu")
        model = build_lm(folder, mesh, cpu, dtype=torch.float32, trainable=True)
        head = build_head(folder, mesh, cpu, dtype=torch.float32)
        replica = build_replica(model.config, cpu, torch.float32, vocab_size=VOCAB - 3)
        gather_into(model, replica)
        with torch.no_grad():
            hidden = model(tokens)
            return model.lm_head(hidden), head(hidden), replica.lm_head(replica(tokens)), len(list(model.buffers()))

    for logits, by_head, cut, num_buffers in run_ranks(body, num_ranks):
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_head, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cut, want[..., :VOCAB - 3], rtol=1e-5, atol=1e-5)
        assert num_buffers == 0


def test_bf16_storage_and_fp32_masters_with_bf16_compute():
    """Catches master weights silently rounded to the compute dtype, and gradients reduced in bf16."""
    def body(rank, folder):
        mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
        model = build_lm(folder, mesh, cpu, dtype=torch.float32, trainable=True, compute_dtype=torch.bfloat16)
        hidden = model(torch.ones(1, 4, dtype=torch.long))
        model.lm_head(hidden).float().sum().backward()
        parameter = model.model.layers[0].mlp.up_proj.weight
        group = model.model.layers[0]._get_fsdp_state()._fsdp_param_group
        return hidden.dtype, parameter.dtype, parameter.grad.dtype, group._reduce_dtype

    import tempfile
    with tempfile.TemporaryDirectory() as place:
        folder = write_lm(Path(place) / "lm")
        for result in run_ranks(lambda rank: body(rank, folder), 2):
            assert result == (torch.bfloat16, torch.float32, torch.float32, torch.float32)


def corrupt(folder: Path, fault: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    if fault == "missing shard":
        (folder / shard).unlink()
    elif fault == "leaves the folder":
        index["weight_map"]["model.norm.weight"] = "../other.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif fault == "wrong shape":
        raw = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 50}
        (folder / "config.json").write_text(json.dumps(raw))
    elif fault == "unknown rope":
        raw = json.loads((folder / "config.json").read_text()) | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}
        (folder / "config.json").write_text(json.dumps(raw))
    elif fault == "no head":
        raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(raw))
    elif fault == "bad json":
        (folder / "config.json").write_text("{")
    elif fault == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize("fault, message", [
    ("missing shard", "safetensors: is missing"), ("leaves the folder", r"\.\./other"), ("wrong shape", "mlp.*proj.weight"),
    ("unknown rope", "longrope"), ("no head", "lm_head.weight"), ("bad json", "not valid JSON"), ("no config", "config.json")])
def test_bad_folders_are_refused_before_any_weight_is_read(tmp_path, fault, message):
    """Catches a model that trains from uninitialised or foreign weights because a file was missing or did not fit."""
    folder = write_lm(tmp_path / "lm")
    assert check_folder(folder) == read_lm_config(folder)
    corrupt(folder, fault)
    with pytest.raises(ValueError, match=message) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_nan_weights_are_refused_by_name(tmp_path):
    """Catches a broken download that is a valid safetensors file."""
    folder = write_lm(tmp_path / "lm")
    weights = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    weights["model.norm.weight"][3] = float("nan")
    write_folder(tmp_path / "new", weights.items())
    (tmp_path / "new" / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="model.norm.weight holds NaN"):
        load_lm(tmp_path / "new")


def test_vocabularies_of_different_sizes(tmp_path):
    """Catches logits compared across different vocabularies: cut only where the extra rows are beyond every token id."""
    small, large = (read_lm_config(write_lm(tmp_path / str(v), vocab_size=v)) for v in (257, 288))
    assert common_vocab(small, large, 257) == common_vocab(large, small, 257) == 257
    assert common_vocab(large, large, None) == 288
    with pytest.raises(ValueError, match="ids up to 257"):
        common_vocab(small, large, 258)
    with pytest.raises(ValueError, match="no tokenizer.json"):
        common_vocab(small, large, None)


def test_memory_plan_counts_what_is_really_allocated(tmp_path):
    """Catches a start-up table that promises a fit which the run then exceeds: weights, moments and replica are exact."""
    config = read_lm_config(write_lm(tmp_path / "lm"))
    model = load_lm(tmp_path / "lm")
    total = sum(p.numel() for p in model.parameters())
    settings = dict(student_dtype=torch.bfloat16, rollout_dtype=torch.bfloat16, teacher_dtype=torch.bfloat16, offload=False,
                    recompute=True, batch_rows=3, row_tokens=20, micro_batch_tokens=64, vocab_size=VOCAB, chunk_size=8)
    plan = memory_plan(config, config, num_students=2, num_servers=4, **settings)
    assert plan["student"]["weights"] == 4 * total // 2 and plan["student"]["optimizer"] == 8 * total // 2
    assert plan["student"]["rollout replica"] == 2 * total and plan["teacher"]["teacher shard"] == 2 * total // 4
    inline = memory_plan(config, config, num_students=2, num_servers=0, **settings)
    assert set(inline) == {"student"} and inline["student"]["teacher shard"] == 2 * total // 2


@pytest.mark.parametrize("rows, n, most_tokens", [(3, 1, 16384), (5, 2, 16384), (6, 1, 20), (2, 1, 3)])
def test_kv_bytes_are_those_of_a_rollout(tmp_path, monkeypatch, rows, n, most_tokens):
    """Catches a planned batch that does not fit: rows and prompts read ahead are counted as they are allocated."""
    monkeypatch.setattr(generate_module, "PREFILL_TOKENS", most_tokens)
    config, caches = read_lm_config(write_lm(tmp_path / "lm")), []
    replica = build_replica(config, torch.device("cpu"), torch.bfloat16, vocab_size=VOCAB)
    gather_into(load_lm(tmp_path / "lm"), replica)
    make_cache = replica.make_cache
    monkeypatch.setattr(replica, "make_cache", lambda *sizes: caches.append(make_cache(*sizes)) or caches[-1])
    generate_module.generate(replica, [[1] * 9, [2] * 4, [3], [4] * 2] * 2, max_new_tokens=6, n=n, batch_size=rows)
    sizes = dict(row_tokens=9 + 6, prompt_tokens=9, samples_per_prompt=n)
    needed = kv_bytes(config, torch.bfloat16, rows=rows, **sizes)
    assert needed == sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
    assert largest_batch(config, torch.bfloat16, needed, **sizes) == rows
    assert largest_batch(config, torch.bfloat16, needed - 1, **sizes) == rows - 1
    assert largest_batch(config, torch.bfloat16, 1, **sizes) == 0


def test_a_replica_is_refilled_in_place(tmp_path):
    """Catches new weights that do not reach the fused memory, or that move it away from under captured graphs."""
    write_lm(tmp_path / "old", seed=1), write_lm(tmp_path / "new", seed=2)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))

    def body(rank):
        mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
        old, new = (build_lm(tmp_path / name, mesh, cpu, dtype=torch.float32, trainable=True)
                    for name in ("old", "new"))
        replica = build_replica(old.config, cpu, torch.float32, vocab_size=VOCAB)
        gather_into(old, replica)
        addresses = [p.data_ptr() for p in replica.parameters()]
        gather_into(new, replica)
        assert [p.data_ptr() for p in replica.parameters()] == addresses
        fused = replica.model.layers[1].self_attn.qkv.weight
        assert torch.equal(fused[32:48], whole(new.model.layers[1].self_attn.k_proj.weight))
        return replica.lm_head(replica(tokens))

    plain = load_lm(tmp_path / "new")
    for logits in run_ranks(body, 2):
        torch.testing.assert_close(logits, plain.lm_head(plain(tokens)).detach(), rtol=1e-5, atol=1e-5)


def test_gathering_takes_one_collective_a_layer(tmp_path):
    """Catches an all-gather for each matrix, hidden ones of DTensors too: with many small ones, latency is what a refresh
    costs."""
    write_lm(tmp_path / "lm")

    def body(rank):
        mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
        model = build_lm(tmp_path / "lm", mesh, cpu, dtype=torch.float32, trainable=True)
        replica = build_replica(model.config, cpu, torch.bfloat16, vocab_size=VOCAB)
        with CommDebugMode() as counter:
            gather_into(model, replica)
        return counter.get_total_counts()

    assert run_ranks(body, 2) == [4, 4], "two layers, the embedding with its head, the final norm"


# --- flow models ----------------------------------------------------------------------------------------------------

ADAPTERS = LoRA({"student": True, "student_ema": False}, ("fc1", "fc2"), rank=2, alpha=2.0, seed=3)


def flow_batch(adapter):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, *adapter.latent_shape, generator=generator), torch.rand(5, generator=generator), torch.arange(5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sharded_flow_models_equal_plain_ones(tmp_path, kind, num_ranks):
    """Catches rows of the wrong rank, adapters that do not start as no-ops, and masks set after the first forward."""
    folder = write_flow(tmp_path / kind, kind)
    adapter = read_adapter(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    x, s, labels = flow_batch(adapter)
    plain = load_flow(folder, adapter)
    with torch.no_grad():
        want = plain(x, s, labels)
    assert not plain.training

    def body(rank):
        mesh, found = init_device_mesh("cpu", (num_ranks,)), []
        for lora, trainable in ((None, True), (None, False), (ADAPTERS, False)):
            module = build_flow(folder, adapter, mesh, torch.device("cpu"), dtype=torch.float32, trainable=trainable, lora=lora)
            with torch.no_grad(), use(module, "student" if lora else None):
                out = module(x, s, labels)
            found.append((out, {name for name, p in module.named_parameters() if p.requires_grad}))
        adapters = {name: whole(p) for name, p in module.named_parameters()
                    if "lora" in name}
        return found, adapters

    names = {name for name, _ in plain.named_parameters()}
    for found, adapters in run_ranks(body, num_ranks):
        for out, _ in found:
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
        assert [trained for _, trained in found[:2]] == [names, set()]
        assert found[2][1] == {name for name in adapters if name.endswith(".student")} != set()
        for path in [name.removesuffix(".lora_A.student") for name in adapters if name.endswith("lora_A.student")]:
            own, other = (adapters[f"{path}.lora_A.{name}"] for name in ADAPTERS.adapters)
            assert not torch.equal(own, other) and not adapters[f"{path}.lora_B.student"].any()
            assert own.abs().max() <= own.shape[1]**-0.5 and own.std() > 0.1 * own.shape[1]**-0.5


def test_adapters_are_the_same_at_any_world_size_and_differ_by_seed(tmp_path):
    """Catches adapters drawn per shard, or all from one seed whatever the config says."""
    folder = write_flow(tmp_path / "flow")
    adapter = read_adapter(folder)

    def body(rank, num_ranks, seed):
        module = build_flow(folder, adapter, init_device_mesh("cpu", (num_ranks,)), torch.device("cpu"), trainable=False,
                            dtype=torch.bfloat16, compute_dtype=torch.bfloat16, lora=ADAPTERS._replace(seed=seed))
        dtypes = {"lora" in name: p.dtype for name, p in module.named_parameters()}
        return module.blocks[1].fc1.lora_A["student"].full_tensor(), dtypes

    (one, dtypes), *_ = run_ranks(lambda rank: body(rank, 1, 3), 1)
    assert dtypes == {False: torch.bfloat16, True: torch.float32}, "a bf16 base, adapters that an optimizer can train"
    assert all(torch.equal(one, other) for other, _ in run_ranks(lambda rank: body(rank, 2, 3), 2))
    assert not any(torch.equal(one, other) for other, _ in run_ranks(lambda rank: body(rank, 1, 4), 1))


@pytest.mark.parametrize("fault, message", [("missing shard", "safetensors: is missing"), ("wrong shape", "embedder.weight"),
                                            ("fewer blocks", "blocks.2"), ("more blocks", "blocks.3")])
def test_bad_flow_folders_are_refused_before_any_weight_is_read(tmp_path, fault, message):
    """Catches a teacher that is not what its config.json says."""
    folder = write_flow(tmp_path / "flow")
    check_flow(folder, read_adapter(folder))
    changes = {"wrong shape": {"hidden_size": 9}, "fewer blocks": {"depth": 2}, "more blocks": {"depth": 4}}.get(fault, {})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    if fault == "missing shard":
        sorted(folder.glob("model-*"))[0].unlink()
    with pytest.raises(ValueError, match=message) as caught:
        check_flow(folder, read_adapter(folder))
    assert "\n" not in str(caught.value)


def test_adapters_on_layers_that_do_not_exist_are_refused(tmp_path):
    """Catches LoRA targets that adapt nothing: known without any weight."""
    adapter = read_adapter(write_flow(tmp_path / "flow"))
    assert all(p.is_meta for p in meta_flow(adapter, dtype=torch.float32, trainable=False, lora=ADAPTERS).parameters())
    with pytest.raises(ValueError, match="fc9"):
        meta_flow(adapter, dtype=torch.float32, trainable=False, lora=ADAPTERS._replace(targets=("fc9",)))


def test_nan_in_a_flow_model_is_refused_by_name(tmp_path, monkeypatch):
    """Catches a broken download that is a valid safetensors file."""
    monkeypatch.setattr(tiny_dmd, "random_values", lambda key, shape, scale: torch.full(shape, float("nan")))
    folder = write_flow(tmp_path / "flow")
    check_flow(folder, read_adapter(folder))
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        load_flow(folder, read_adapter(folder))


def test_a_flow_module_with_a_buffer_is_refused(tmp_path):
    """Catches a position table that a meta build leaves as garbage, on each rank its own."""
    class Buffered:
        latent_shape = (2,)

        def build(self):
            module = torch.nn.Linear(2, 2)
            module.register_buffer("table", torch.ones(2), persistent=False)
            return module

    with pytest.raises(ValueError, match="buffer table would be left uninitialised"):
        check_flow(write_flow(tmp_path / "flow"), Buffered())
