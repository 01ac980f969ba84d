# SPDX-License-Identifier: Apache-2.0
"""Llama, Qwen2 and Qwen3 decoders with Hugging Face parameter names; the forward gives hidden states, not logits.

    config = config_from_hf(json.load(open("model/config.json")), source="model/config.json")
    model = CausalLM(config)
    hidden_BTD = model(tokens_BT)                    # after the final norm; right-padded rows need no mask
    logits_BTV = model.lm_head(hidden_BTD)
    logits_NK = model.lm_head(hidden_ND, lambda hidden, weight_VD: ...)   # any function of the head's weight

The head is its own call because training needs K columns of it, or chunks, never [B, T, V]; the function is passed
*into* the module so that FSDP2's hooks gather the weight around it. The model holds no buffer: rotary frequencies are
computed from the config in each forward, so nothing can be left uninitialised by a meta build or rounded by a cast.

Legend: B batch, T new tokens, S cached positions, D model, V vocabulary, L layers, H query heads, G key/value heads,
R = H / G queries that share a key head, E head dimension, N selected positions.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# --- configuration --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rope:
    """Rotary embedding parameters under the names of config.json; unused ones keep their neutral value."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True


@dataclass(frozen=True)
class LMConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_length: int
    rope: Rope
    tied: bool  # lm_head.weight is model.embed_tokens.weight
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm of each query and key head (Qwen3)


def config_from_hf(raw: dict[str, Any], *, source: str) -> LMConfig:
    """Read a Hugging Face config.json; ValueError naming `source` and the key for whatever is not supported."""
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: expected a JSON object, got {type(raw).__name__}")
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{source}: model_type {model_type!r} is not supported (choose from {', '.join(MODEL_TYPES)})")
    _refuse_unsupported(raw, source)
    heads = _positive_int(raw, "num_attention_heads", source)
    hidden = _positive_int(raw, "hidden_size", source)
    kv_heads = _positive_int(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise ValueError(f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    default_head_dim = 128 if model_type == "qwen3" else hidden // heads
    head_dim = _positive_int(raw, "head_dim", source, default=default_head_dim)
    if head_dim % 2:
        raise ValueError(f"{source}: head_dim {head_dim} must be even for rotary embeddings")
    bias = _flag(raw, "attention_bias", source)
    return LMConfig(
        model_type=model_type, vocab_size=_positive_int(raw, "vocab_size", source), hidden_size=hidden,
        intermediate_size=_positive_int(raw, "intermediate_size", source),
        num_layers=_positive_int(raw, "num_hidden_layers", source, limit=4096), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, rms_norm_eps=_number(raw, "rms_norm_eps", source, default=1e-6),
        max_length=_positive_int(raw, "max_position_embeddings", source, default=2048), rope=_read_rope(raw, source),
        tied=_flag(raw, "tie_word_embeddings", source), qkv_bias=True if model_type == "qwen2" else bias,
        o_bias=False if model_type == "qwen2" else bias, qk_norm=model_type == "qwen3",
        mlp_bias=model_type == "llama" and _flag(raw, "mlp_bias", source))


def _refuse_unsupported(raw: dict[str, Any], source: str) -> None:
    allowed = {  # the values with which a key changes nothing; an absent key counts as the first
        "hidden_act": ("silu",), "attention_dropout": (0, None), "pretraining_tp": (1, None),
        "partial_rotary_factor": (1, None), "quantization_config": (None,), "auto_map": (None, {}),
        "num_experts": (None, 0), "num_local_experts": (None, 0), "n_routed_experts": (None, 0),
        "use_sliding_window": (False, None),
    }
    if raw["model_type"] == "llama":  # it has no switch: a window that is set would be used by some runtimes only
        allowed["sliding_window"] = (None,)
    elif raw.get("sliding_window", 4096) is None:
        del allowed["use_sliding_window"]  # switched on without a width; a width left out is the default one, not none
    for key, values in allowed.items():
        if raw.get(key, values[0]) not in values:
            _refuse(raw, key, source)
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        _refuse(raw, "layer_types", source)


def _refuse(raw: dict[str, Any], key: str, source: str) -> None:
    raise ValueError(f"{source}: {key} = {raw[key]!r} is not supported (only dense {', '.join(MODEL_TYPES)} with full "
                     "attention and silu; use a folder without it)")


def _read_rope(raw: dict[str, Any], source: str) -> Rope:
    """Both spellings: rope_theta + rope_scaling (transformers 4) and rope_parameters (transformers 5)."""
    spellings = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)] or [{}]
    ropes = {_rope_of(values, raw, source) for values in spellings}
    if len(ropes) > 1:
        raise ValueError(f"{source}: rope_scaling and rope_parameters disagree (keep one of the two)")
    return ropes.pop()


def _rope_of(values: dict[str, Any], raw: dict[str, Any], source: str) -> Rope:
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ValueError(f"{source}: rotary parameters must be one flat object for all layers, got {values!r}")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"{source}: rope_type {kind!r} is not supported (choose from {', '.join(ROPE_TYPES)})")
    if values.get("partial_rotary_factor", 1.0) not in (1, None):
        raise ValueError(f"{source}: partial_rotary_factor {values['partial_rotary_factor']!r} must be 1")
    theta = _number(values, "rope_theta", source, default=_number(raw, "rope_theta", source, default=10000.0))
    if theta <= 1.0:
        raise ValueError(f"{source}: rope_theta must be above 1, got {theta}")
    if kind == "default":
        return Rope(kind, theta)
    factor = _number(values, "factor", source)
    if kind == "linear":
        return Rope(kind, theta, factor)
    key = "original_max_position_embeddings"
    holder = values if raw.get(key) is None else raw  # the top level wins, as in transformers
    original = _positive_int(holder, key, source, default=raw.get("max_position_embeddings"))
    if kind == "llama3":
        low, high = _number(values, "low_freq_factor", source), _number(values, "high_freq_factor", source)
        if high <= low:
            raise ValueError(f"{source}: high_freq_factor {high} must be above low_freq_factor {low}")
        return Rope(kind, theta, factor, low, high, original)
    return Rope(kind, theta, factor, original_length=original, truncate=bool(values.get("truncate", True)),
                beta_fast=_number(values, "beta_fast", source, default=32.0),
                beta_slow=_number(values, "beta_slow", source, default=1.0),
                attention_factor=_yarn_attention_factor(values, factor, source))


def _yarn_attention_factor(values: dict[str, Any], factor: float, source: str) -> float:
    if values.get("attention_factor") is not None:
        return _number(values, "attention_factor", source)
    if not (values.get("mscale") and values.get("mscale_all_dim")):
        return _yarn_scale(factor, 1.0)
    scales = [_yarn_scale(factor, _number(values, key, source)) for key in ("mscale", "mscale_all_dim")]
    return scales[0] / scales[1]


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _number(raw: dict[str, Any], key: str, source: str, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:  # NaN fails too
        raise ValueError(f"{source}: {key} must be a positive number, got {value!r}")
    return float(value)


def _positive_int(raw: dict[str, Any], key: str, source: str, default: int | None = None,
                  limit: int = 2**31 - 1) -> int:
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        raise ValueError(f"{source}: {key} must be an integer from 1 to {limit}, got {value!r}")
    return value


def _flag(raw: dict[str, Any], key: str, source: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{source}: {key} must be true or false, got {value!r}")
    return bool(value)


# --- rotary position embedding --------------------------------------------------------------------------------------

def rope_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Inverse frequencies [E / 2], fp32. yarn: arXiv:2309.00071, section 3.2; llama3: the Llama 3.1 release."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    plain = 1.0 / rope.theta**exponent
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_length * plain / (2 * math.pi)  # rotations over the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
    else:
        keep = 1.0 - _yarn_ramp(rope, head_dim, device)
    return plain / rope.factor * (1.0 - keep) + plain * keep


def _yarn_ramp(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """0 where a dimension turns often enough to be kept, 1 where it is interpolated, linear between."""
    def dim_of(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    return ((torch.arange(head_dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)


def rope_tables(config: LMConfig, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, E], computed in fp32 and rounded once to the compute dtype."""
    frequencies = rope_frequencies(config.rope, config.head_dim, positions_BT.device)
    angles_BTE = torch.cat([positions_BT.float()[..., None] * frequencies] * 2, dim=-1)
    scale = config.rope.attention_factor
    return (angles_BTE.cos() * scale).to(dtype)[:, None], (angles_BTE.sin() * scale).to(dtype)[:, None]


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BHTE.chunk(2, dim=-1)  # Hugging Face keeps the two halves apart (not interleaved)
    return x_BHTE * cos + torch.cat([-second, first], dim=-1) * sin


# --- key/value cache ------------------------------------------------------------------------------------------------

class KVCache:
    """Static cache of L layers: k, v [L, B, G, S, E] and the number of valid positions of each row, written in place.

    A right-padded prefill of empty rows fills positions 0..T-1; the caller then sets `lengths_B` to the true prompt
    lengths, so that decoding overwrites the padding. A forward of one token a row appends it; the caller then counts it
    in `lengths_B`. Attention reads all S positions: decode through a `window` that is just as long as the rows are.
    """

    def __init__(self, k: Tensor, v: Tensor, lengths_B: Tensor) -> None:
        self.k, self.v, self.lengths_B = k, v, lengths_B

    def window(self, num_rows: int, span: int) -> KVCache:
        """The first rows and positions, in the same memory."""
        return KVCache(self.k[:, :num_rows, :, :span], self.v[:, :num_rows, :, :span], self.lengths_B[:num_rows])

    def put(self, row: int, source: KVCache, source_row: int, length: int) -> None:
        """Copy the first `length` positions of a row of `source`, which may be this cache."""
        self.k[:, row, :, :length] = source.k[:, source_row, :, :length]
        self.v[:, row, :, :length] = source.v[:, source_row, :, :length]
        self.lengths_B[row] = length

    def positions(self, num_new: int) -> Tensor:
        """[B, T] positions of the next `num_new` tokens of each row."""
        return self.lengths_B[:, None] + torch.arange(num_new, device=self.k.device)

    def mask(self) -> Tensor:
        """[B, 1, 1, S], added to the scores of one new token a row: minus infinity beyond the token itself."""
        unseen_BS = torch.arange(self.k.shape[3], device=self.k.device) > self.lengths_B[:, None]
        return torch.zeros_like(unseen_BS, dtype=self.k.dtype).masked_fill_(unseen_BS, -math.inf)[:, None, None]

    def update(self, layer: int, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values; returns what the queries attend to."""
        num_new = k_BGTE.shape[2]
        if num_new > 1:
            self.k[layer, :, :, :num_new], self.v[layer, :, :, :num_new] = k_BGTE, v_BGTE
            return k_BGTE, v_BGTE
        rows_B = torch.arange(k_BGTE.shape[0], device=k_BGTE.device)
        self.k[layer, rows_B, :, self.lengths_B] = k_BGTE[:, :, 0]
        self.v[layer, rows_B, :, self.lengths_B] = v_BGTE[:, :, 0]
        return self.k[layer], self.v[layer]


# --- layers ---------------------------------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Statistics in fp32 (float64 kept), the weight applied in the compute dtype as the reference models do."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Fused(NamedTuple):
    """Weights and biases of linear layers of one input, one after another in one memory."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]
    by_onednn: bool


def fuse(*linears: nn.Linear) -> Fused:
    """Move the layers into one memory: their parameters keep their names and become views of it."""
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    for linear, part in zip(linears, weight.split(sizes)):
        linear.weight = nn.Parameter(part, requires_grad=False)
    for linear, part in zip(linears, () if bias is None else bias.split(sizes)):
        linear.bias = nn.Parameter(part, requires_grad=False)
    return Fused(weight, bias, sizes, prefers_onednn(weight))


def prefers_onednn(weight: Tensor) -> bool:
    """On a CPU, for the few rows of a decode step, oneDNN takes 0.6 to 0.9 of the time of torch's default in fp32."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def product(x: Tensor, weight: Tensor, bias: Tensor | None, by_onednn: bool) -> Tensor:
    if by_onednn and x.numel():
        return F.linear(x.to_mkldnn(), weight, bias).to_dense()
    return F.linear(x, weight, bias)


def project(x: Tensor, fused: Fused | None, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """What each layer makes of x: by one product where they are fused."""
    if fused is None:
        return tuple(linear(x) for linear in linears)
    assert fused.weight.data_ptr() == linears[0].weight.data_ptr(), "the model was moved or cast: fuse it again"
    return product(x, fused.weight, fused.bias, fused.by_onednn).split(fused.sizes, dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LMConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.qkv: Fused | None = None
        self.out: Fused | None = None

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        split = (x_BTD.shape[0], x_BTD.shape[1], -1, self.head_dim)
        q, k, v = project(x_BTD, self.qkv, self.q_proj, self.k_proj, self.v_proj)
        q_BHTE = rotate(self.q_norm(q.view(split)).transpose(1, 2), cos, sin)
        k_BGTE = rotate(self.k_norm(k.view(split)).transpose(1, 2), cos, sin)
        v_BGTE = v.view(split).transpose(1, 2)
        if cache is not None:
            k_BGTE, v_BGTE = cache.update(self.layer, k_BGTE, v_BGTE)
        out_BHTE = attend_causal(q_BHTE, k_BGTE, v_BGTE) if mask is None else attend_one(q_BHTE, k_BGTE, v_BGTE, mask)
        return project(out_BHTE.transpose(1, 2).flatten(2), self.out, self.o_proj)[0]


def attend_causal(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> Tensor:
    """Causal attention over right-padded rows: padding is only ever seen by padding, so no [T, T] mask exists."""
    repeat = q_BHTE.shape[1] // k_BGTE.shape[1]
    if repeat > 1:  # enable_gqa falls back to the kernel that stores [T, T] on some devices
        k_BGTE, v_BGTE = k_BGTE.repeat_interleave(repeat, dim=1), v_BGTE.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q_BHTE, k_BGTE, v_BGTE, is_causal=True)


def attend_one(q_BH1E: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask_B11S: Tensor) -> Tensor:
    """One new token a row: the R queries that share a key head stand in the time dimension, so no key is repeated."""
    q_BGRE = q_BH1E.squeeze(2).unflatten(1, (k_BGSE.shape[1], -1))
    return F.scaled_dot_product_attention(q_BGRE, k_BGSE, v_BGSE, attn_mask=mask_B11S).flatten(1, 2).unsqueeze(2)


class MLP(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.gate_up: Fused | None = None
        self.down: Fused | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = project(x_BTD, self.gate_up, self.gate_proj, self.up_proj)
        return project(F.silu(gate) * up, self.down, self.down_proj)[0]


class Block(nn.Module):
    def __init__(self, config: LMConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, mask: Tensor | None,
                recompute: bool) -> Tensor:
        if recompute:  # inside the module, so that FSDP2's hooks stay outside of the recomputation
            return checkpoint(self.layer_forward, x_BTD, cos, sin, None, None, use_reentrant=False)
        return self.layer_forward(x_BTD, cos, sin, cache, mask)

    def layer_forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None,
                      mask: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos, sin, cache, mask)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Decoder(nn.Module):
    """Holds the parameters under the names that Hugging Face gives them (`model.*`); CausalLM runs them."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LMHead(nn.Linear):
    by_onednn = False  # set by CausalLM.fuse

    def forward(self, hidden: Tensor, fn: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Logits of `hidden` [..., D], or `fn(hidden, weight_VD)` while the weight is whole."""
        if fn is not None:
            return fn(hidden, self.weight)
        return product(hidden, self.weight, None, self.by_onednn)


class CausalLM(nn.Module):
    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the embedding with the head where the config says so (again after parameters were replaced)."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None, *, recompute: bool = False) -> Tensor:
        """Hidden states [B, T, D] after the final norm.

        tokens_BT: right-padded ids. cache: filled by this call; the caller then updates `cache.lengths_B`.
        recompute: activation checkpointing, for training without a cache.
        """
        assert cache is None or not recompute, "activation checkpointing is for training, a cache is for sampling"
        num_new = tokens_BT.shape[1]
        every_row = torch.arange(num_new, device=tokens_BT.device)[None]
        positions_BT = every_row if cache is None else cache.positions(num_new)
        x_BTD = self.model.embed_tokens(tokens_BT)
        cos, sin = rope_tables(self.config, positions_BT, x_BTD.dtype)
        mask = None if cache is None or num_new > 1 else cache.mask()
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, cos, sin, cache, mask, recompute)
        return self.model.norm(x_BTD)

    def make_cache(self, batch: int, length: int) -> KVCache:
        """An empty cache of `batch` rows by `length` positions in the parameters' dtype and device.

        Zeros, not uninitialised memory: a masked position has weight 0, and 0 * NaN is NaN.
        """
        weight = self.model.norm.weight
        shape = (self.config.num_layers, batch, self.config.num_kv_heads, length, self.config.head_dim)
        lengths_B = torch.zeros(batch, dtype=torch.long, device=weight.device)
        return KVCache(weight.new_zeros(shape), weight.new_zeros(shape), lengths_B)

    def fuse(self) -> CausalLM:
        """One product each for q, k, v and for gate, up. For a frozen, plain model: parameters keep their names and are
        filled in place; to move or cast the model, do so before."""
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.qkv = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
            mlp.gate_up = fuse(mlp.gate_proj, mlp.up_proj)
            attention.out, mlp.down = fuse(attention.o_proj), fuse(mlp.down_proj)
        self.lm_head.by_onednn = prefers_onednn(self.lm_head.weight)
        return self

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Modules to shard together, innermost first; what is in none of them (the final norm) is the root's."""
        embedding = [[self.model.embed_tokens, self.lm_head]] if self.config.tied else [
            [self.model.embed_tokens], [self.lm_head]]
        return [[layer] for layer in self.model.layers] + embedding
