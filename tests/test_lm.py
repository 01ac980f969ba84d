# SPDX-License-Identifier: Apache-2.0
"""models/lm.py against transformers on random tiny models: logits, gradients, cache, memory, refusals."""
from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distill_core.models import lm

V, T = 97, 96
BASE = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False)
LINEAR = {"factor": 4.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}


def v4(kind: str, **values: object) -> dict:
    return {"rope_theta": 500.0, "rope_scaling": {"rope_type": kind, **values}}


def v5(kind: str, **values: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


CASES = {
    "llama": {"model_type": "llama"},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": None},
    "llama-mqa-head_dim": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 12},
    "llama-tied-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-eps": {"model_type": "llama", "rms_norm_eps": 1e-2},
    "llama-default-v4": {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": None},
    "llama-default-v5": {"model_type": "llama", **v5("default")},
    "llama-linear-v4": {"model_type": "llama", **v4("linear", **LINEAR)},
    "llama-linear-v4-type": {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": {"type": "linear", **LINEAR}},
    "llama-linear-v5": {"model_type": "llama", **v5("linear", **LINEAR)},
    "llama-llama3-v4": {"model_type": "llama", **v4("llama3", **LLAMA3)},
    "llama-llama3-v5": {"model_type": "llama", **v5("llama3", **LLAMA3), "tie_word_embeddings": True},
    "llama-llama3-top-level": {"model_type": "llama", **v4("llama3", **LLAMA3), "original_max_position_embeddings": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied-window-off": {"model_type": "qwen2", "tie_word_embeddings": True, **WINDOW_OFF},
    "qwen2-window-null": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
    "qwen2-yarn-v4": {"model_type": "qwen2", **v4("yarn", **YARN)},
    "qwen2-yarn-v5": {"model_type": "qwen2", **v5("yarn", **YARN)},
    "qwen2-yarn-no-original": {"model_type": "qwen2", **v5("yarn", factor=4.0)},
    "qwen2-yarn-betas": {"model_type": "qwen2", **v5("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, truncate=False)},
    "qwen2-yarn-factor": {"model_type": "qwen2", **v5("yarn", **YARN, attention_factor=0.7)},
    "qwen2-yarn-mscale": {"model_type": "qwen2", **v5("yarn", **YARN, mscale=1.5, mscale_all_dim=0.8)},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-head_dim-128": {"model_type": "qwen3"},
    "qwen3-bias-tied": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3-yarn-window-off": {"model_type": "qwen3", "head_dim": 8, **v4("yarn", **YARN), **WINDOW_OFF},
}


def ours(raw: dict) -> lm.LMConfig:
    return lm.config_from_hf(BASE | raw, source="config.json")


def reference(raw: dict, seed: int = 0) -> torch.nn.Module:
    """The transformers model of a config.json, with weights large enough that attention is far from uniform."""
    transformers = pytest.importorskip("transformers")
    raw = json.loads(json.dumps(BASE | raw))
    config = transformers.AutoConfig.for_model(**raw)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, seed)
    return model


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        torch.nn.init.normal_(parameter, mean, 0.2, generator=generator)
    return model


def copy_of(hf: torch.nn.Module, config: lm.LMConfig) -> lm.CausalLM:
    model = lm.CausalLM(config)
    model.load_state_dict(hf.state_dict(), strict=True)
    return model


def tiny(**raw: object) -> lm.CausalLM:
    return randomize(lm.CausalLM(ours({"model_type": "llama", **raw})))


def tokens(batch: int = 3, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def logit_gap(raw: dict, config: lm.LMConfig) -> float:
    hf = reference(raw)
    model = copy_of(hf, config)
    with torch.no_grad():
        return (model.lm_head(model(tokens())) - hf(tokens()).logits).abs().max().item()


# --- the same function as transformers ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_transformers(name):
    """Catches any wrong bias, norm, head split, head tie, activation, epsilon, mask or rotary formula."""
    hf = reference(CASES[name])
    model = copy_of(hf, ours(CASES[name]))
    targets = tokens(seed=2)
    for module, logits in ((hf, hf(tokens()).logits), (model, model.lm_head(model(tokens())))):
        module.logits = logits.detach()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(model.logits, hf.logits, atol=1e-4, rtol=0)
    expected = dict(hf.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected), "parameter names are those of the reference"
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[key].grad, atol=1e-5, rtol=1e-4), key


@pytest.mark.parametrize("name", CASES)
def test_config_survives_a_round_trip_through_transformers(name):
    """Catches a key that transformers writes another way than people do: the full dump must read as the same config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(BASE | CASES[name])))
    dumped = json.loads(config.to_json_string(use_diff=False))
    assert lm.config_from_hf(dumped, source="dump") == ours(CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if "yarn" in name or "linear" in name or "llama3" in name])
def test_rotary_tables_equal_transformers_far_out(name):
    """Catches a frequency that is only slightly wrong: at position 100,000 the angle is off by radians."""
    hf = reference(CASES[name])
    positions = torch.tensor([[0, 1, 63, 64, 255, 4096, 100_000]])
    cos, sin = lm.rope_tables(ours(CASES[name]), positions, torch.float32)
    expected_cos, expected_sin = hf.model.rotary_emb(torch.zeros(1), positions)
    torch.testing.assert_close(cos[:, 0], expected_cos, atol=2e-2, rtol=0)  # one ulp of an angle of 1e5 is 8e-3
    torch.testing.assert_close(sin[:, 0, :6], expected_sin[:, :6], atol=1e-3, rtol=0)


def test_a_planted_fault_shows(monkeypatch):
    """Negative controls: each of these faults is far above the tolerance of the comparison with transformers."""
    def gap(name: str, **changes: object) -> float:
        return logit_gap(CASES[name], dataclasses.replace(ours(CASES[name]), **changes))

    def rope_gap(name: str, **changes: object) -> float:
        return gap(name, rope=dataclasses.replace(ours(CASES[name]).rope, **changes))

    assert max(gap(name) for name in ("llama", "llama-eps", "llama-llama3-v5", "qwen2-yarn-v5")) < 1e-4
    assert gap("llama-eps", rms_norm_eps=1e-5) > 1e-1
    assert rope_gap("llama-default-v4", theta=10000.0) > 1e-1
    assert rope_gap("llama-llama3-v5", high_freq_factor=3.0) > 1e-1
    assert rope_gap("qwen2-yarn-v5", attention_factor=1.0) > 1e-1
    assert rope_gap("qwen2-yarn-betas", truncate=True) > 1e-1
    assert rope_gap("qwen2-yarn-betas", beta_slow=1.0) > 1e-1
    with monkeypatch.context() as patch:
        patch.setattr(lm, "rotate", rotate_interleaved)
        assert gap("llama") > 1e-1
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "repeat_interleave", lambda x, repeat, dim: torch.cat([x] * repeat, dim=dim))
        assert gap("llama") > 1e-1, "query heads must share key heads in runs, not in turns"


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + swapped * sin


def test_bf16_runs_and_stays_near_fp32():
    """Catches a tensor left in fp32 by a norm or by the rotary tables (SDPA refuses mixed types) and a bf16 norm."""
    model, hf = tiny(), reference({"model_type": "llama"})
    with torch.no_grad():
        exact = model.lm_head(model(tokens()))
        model, hf = model.bfloat16(), hf.bfloat16()
        rounded, expected = model.lm_head(model(tokens())), hf(tokens()).logits
    assert rounded.dtype == torch.bfloat16
    error, reference_error = (rounded - exact).float().abs().mean(), (expected - exact).float().abs().mean()
    assert error < 1.2 * reference_error, (error, reference_error)
    norm, hidden = model.model.norm, torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(norm(hidden), hf.model.norm(hidden)), "statistics in fp32, the weight applied in bf16"
    model(tokens()).float().sum().backward()
    assert all(p.grad.isfinite().all() for name, p in model.named_parameters() if name != "lm_head.weight")


def test_float64_is_kept():
    """Catches a cast to fp32 that would make references in float64 worthless."""
    model = tiny().double()
    assert model.lm_head(model(tokens())).dtype == torch.float64


# --- right padding, cache -------------------------------------------------------------------------------------------

def test_right_padding_is_invisible():
    """Catches attention that looks at padding: real positions are bit-equal whatever the padding holds."""
    model, batch = tiny(), tokens()
    other = batch.clone()
    other[1, 40:] = (other[1, 40:] + 1) % V
    with torch.no_grad():
        assert torch.equal(model(batch)[1, :40], model(other)[1, :40])


def decode(model: lm.CausalLM, cache: lm.KVCache, rows: list[Tensor], starts: list[int], num_steps: int,
           first_span: int) -> Tensor:
    """Logits [B, steps, V] of feeding rows[i][starts[i]:] token by token, each through a window just long enough."""
    steps = []
    for t in range(num_steps):
        fed = torch.stack([row[start + t] for row, start in zip(rows, starts)])[:, None]
        window = cache.window(len(rows), first_span + t)
        steps.append(model.lm_head(model(fed, window)))
        window.lengths_B += 1
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-mha", "llama-mqa-head_dim", "qwen2-yarn-v5", "qwen3"])
@torch.no_grad()
def test_cached_decode_equals_full_forward(name, fused):
    """Catches wrong positions after a padded prefill, padding left in the cache, and a wrong mask or head grouping."""
    model, batch, starts = randomize(lm.CausalLM(ours(CASES[name]))), tokens(), [40, 17, 1]
    full = model.lm_head(model(batch))
    if fused:
        model.fuse()
    cache = model.make_cache(4, 40 + 50)  # one row more than is used
    prefill = model.lm_head(model(batch[:, :40], cache.window(3, 40)))
    torch.testing.assert_close(prefill, full[:, :40], atol=1e-5, rtol=0)
    cache.lengths_B[:3] = torch.tensor(starts)
    decoded = decode(model, cache, list(batch), starts, 50, 41)
    for row, start in enumerate(starts):
        torch.testing.assert_close(decoded[row], full[row, start:start + 50], atol=1e-5, rtol=0)
    assert not cache.k[:, 3].any() and not cache.lengths_B[3]


@torch.no_grad()
def test_rows_are_put_into_other_places():
    """Catches a copy that forgets the length or a layer, and stale positions of the row that stood there before."""
    model, batch, starts = tiny(), tokens(), [40, 17, 25]
    source, cache = model.make_cache(3, 45), model.make_cache(3, 60)
    model(batch[:, :40], source.window(3, 40))
    source.lengths_B.copy_(torch.tensor(starts))
    decode(model, source, list(batch), starts, 3, 41)
    cache.k.fill_(7.0), cache.v.fill_(7.0)
    picked, tails = [2, 0, 2], tokens(seed=5)
    for row, place in enumerate(picked[:2]):
        cache.put(row, source, place, starts[place] + 3)
    cache.put(2, cache, 0, starts[2] + 3)  # within one cache
    rows = [torch.cat([batch[place, :starts[place] + 3], tails[i]]) for i, place in enumerate(picked)]
    decoded = decode(model, cache, rows, [starts[place] + 3 for place in picked], 10, 44)
    for i, place in enumerate(picked):
        full = model.lm_head(model(rows[i][None]))[0]
        torch.testing.assert_close(decoded[i], full[starts[place] + 3:][:10], atol=1e-5, rtol=0)
    assert not torch.equal(decoded[0], decoded[2]), "the two copies of row 2 go on apart"


@torch.no_grad()
def test_unwritten_cache_positions_are_zero():
    """Catches an uninitialised cache: a masked position has weight 0, but 0 * NaN is NaN (shown by planting one)."""
    model = tiny()
    results = []
    for planted in (None, float("nan")):
        cache = model.make_cache(2, 20)
        assert not cache.k.any() and not cache.v.any()
        model(tokens(2, 8), cache)
        cache.lengths_B.copy_(torch.tensor([8, 2]))
        if planted is not None:
            cache.k[..., 8:, :] = cache.v[..., 8:, :] = planted
        results.append(decode(model, cache, list(tokens(2, 20)), [8, 2], 6, 14)[1])
    assert results[0].isfinite().all() and not results[1].isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes, the backward's included."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_no_square_of_the_length_in_memory():
    """Catches a [T, T] mask or score matrix at 8,192 tokens, forward or backward; the control shows one."""
    length = 8192
    model = tiny(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2,
                 num_key_value_heads=1)
    with LargestTensor() as seen:
        model(tokens(1, length)).sum().backward()
    assert seen.numel <= length * V < length**2 // 50
    q = torch.randn(1, 2, 512, 8, requires_grad=True)
    with LargestTensor() as seen:
        (q @ q.transpose(-1, -2)).softmax(-1).sum().backward()
    assert seen.numel == 2 * 512**2


# --- training forms -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3"])
def test_recompute_gives_bit_equal_gradients(name):
    """Catches checkpointing that recomputes something else, or nothing at all (each layer must run twice)."""
    gradients, runs = {}, {False: 0, True: 0}
    for recompute in (False, True):
        model = randomize(lm.CausalLM(ours(CASES[name])))
        counted = model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, key=recompute: runs.update({key: runs[key] + 1}))
        model.lm_head(model(tokens(), recompute=recompute)).logsumexp(-1).sum().backward()
        counted.remove()
        gradients[recompute] = {key: p.grad for key, p in model.named_parameters()}
    assert runs == {False: 1, True: 2}
    for key, gradient in gradients[False].items():
        assert torch.equal(gradient, gradients[True][key]), key


def test_head_gives_its_weight_to_a_function():
    """Catches a head that hands out something else than its (tied) weight: K columns must equal the full product."""
    model, ids = tiny(tie_word_embeddings=True), torch.tensor([3, 50, 96])
    hidden = model(tokens())
    columns = model.lm_head(hidden, lambda hidden_BTD, weight_VD: hidden_BTD @ weight_VD[ids].T)
    torch.testing.assert_close(columns, model.lm_head(hidden)[..., ids])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_meta_build_leaves_nothing_to_initialise():
    """Catches a buffer, which a meta build leaves uninitialised, and a head untied by the materialisation."""
    with torch.device("meta"):
        model = lm.CausalLM(ours({"model_type": "qwen3", "tie_word_embeddings": True}))
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    model.tie()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_fsdp_units_hold_every_parameter_once():
    """Catches a parameter sharded twice or forgotten, and a tied head apart from its embedding."""
    for tied in (False, True):
        model = tiny(tie_word_embeddings=tied)
        units = [{id(p) for module in unit for p in module.parameters()} for unit in model.fsdp_units()]
        assert sum(map(len, units)) == len(set().union(*units))
        left = {name for name, p in model.named_parameters() if id(p) not in set().union(*units)}
        assert left == {"model.norm.weight"}


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen2", "qwen3-bias-tied"])
@torch.no_grad()
def test_fused_weights_are_the_named_ones(name):
    """Catches a fused product of other weights: after new ones are copied into the names, it must give their logits."""
    model, other = randomize(lm.CausalLM(ours(CASES[name]))), randomize(lm.CausalLM(ours(CASES[name])), seed=1)
    names, want = list(dict(model.named_parameters())), model.lm_head(model(tokens()))
    fused = model.fuse()
    assert fused is model and list(dict(model.named_parameters())) == names
    torch.testing.assert_close(model.lm_head(model(tokens())), want, atol=1e-5, rtol=0)
    addresses = [p.data_ptr() for p in model.parameters()]
    for parameter, new in zip(model.parameters(), other.parameters()):
        parameter.copy_(new)
    torch.testing.assert_close(model.lm_head(model(tokens())), other.lm_head(other(tokens())), atol=1e-5, rtol=0)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    model.double()
    with pytest.raises(AssertionError, match="fuse it again"):
        model(tokens())


# --- refusals -------------------------------------------------------------------------------------------------------

REFUSED = [  # (what is changed in a good config.json, what the message names)
    ({"model_type": "mistral"}, "model_type 'mistral'"),
    ({"model_type": None}, "model_type None"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
    ({"num_experts": 8}, "num_experts = 8"),
    ({"num_local_experts": 8}, "num_local_experts = 8"),
    ({"n_routed_experts": 64}, "n_routed_experts = 64"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
    ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"pretraining_tp": 2}, "pretraining_tp"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (v5("default", partial_rotary_factor=0.5), "partial_rotary_factor"),
    ({"sliding_window": 64}, "sliding_window = 64"),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),  # the width has a default
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": 5}, "layer_types"),
    (v4("dynamic", factor=2.0), "rope_type 'dynamic'"),
    (v5("longrope", factor=2.0), "rope_type 'longrope'"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type 'mrope'"),
    ({"rope_scaling": "linear"}, "rotary parameters"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}, "rotary parameters"),
    (v4("linear", factor=2.0) | v5("linear", factor=4.0), "rope_scaling and rope_parameters"),
    (v4("linear"), "factor"),
    (v4("linear", factor="2"), "factor"),
    (v4("linear", factor=float("nan")), "factor"),
    (v4("llama3", factor=8.0, high_freq_factor=4.0), "low_freq_factor"),
    (v4("llama3", **LLAMA3 | {"high_freq_factor": 1.0}), "high_freq_factor"),
    (v4("yarn", **YARN, beta_fast="x"), "beta_fast"),
    (v4("yarn", **YARN, attention_factor=float("nan")), "attention_factor"),
    (v4("yarn", **YARN, mscale="x", mscale_all_dim=1.0), "mscale"),
    (v4("yarn", factor=4.0, original_max_position_embeddings=0.5), "original_max_position_embeddings"),
    ({"rope_theta": 1.0}, "rope_theta"),
    ({"rope_theta": "1e6"}, "rope_theta"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": -32}, "hidden_size"),
    ({"hidden_size": 32.0}, "hidden_size"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": 3}, "head_dim"),
    ({"vocab_size": True}, "vocab_size"),
    ({"vocab_size": 2**31}, "vocab_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ({"attention_bias": 1}, "attention_bias"),
]


@pytest.mark.parametrize("change, named", REFUSED)
def test_unsupported_is_refused_by_name(change, named):
    """Catches a config that would load and run as another model; the message is one line with the file and the key."""
    with pytest.raises(ValueError) as error:
        ours({"model_type": "llama"} | change)
    assert str(error.value).startswith("config.json: ") and named in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_is_no_object_is_refused():
    """Catches an AttributeError on a config.json that holds a list."""
    with pytest.raises(ValueError, match="config.json: expected a JSON object, got list"):
        lm.config_from_hf([], source="config.json")


def test_neutral_values_are_accepted():
    """Catches refusals of what published folders carry: nulls, transformers' defaults, unknown keys, both spellings."""
    neutral = {"pretraining_tp": None, "partial_rotary_factor": None, "attention_dropout": 0,
               "quantization_config": None, "auto_map": {}, "num_experts": 0, "rope_interleaved": False,
               "layer_types": ["full_attention"] * 2, "transformers.js_config": {"dtype": "q4"},
               "attention_bias": None, "head_dim": None}
    assert ours({"model_type": "llama", **neutral}) == ours({"model_type": "llama"})
    assert ours({"model_type": "llama", **v4("linear", **LINEAR), **v5("linear", **LINEAR)}).rope.factor == 4.0
