# SPDX-License-Identifier: Apache-2.0
"""The flow transformer against an independent functional form of SiT, under recomputation, adapters and sharding."""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distill_core.lora import checkpoint_context_fn, inject, lora_layers, named_adapter, use
from distill_core.models.dit import DiT, DiTConfig, config_from_json, dit_config, position_embedding, time_embedding

TINY = DiTConfig(hidden_size=24, depth=3, num_heads=3, input_size=6, patch_size=2, channels=2, num_classes=5)


def scrambled(config: DiTConfig = TINY, dtype: torch.dtype = torch.float64) -> DiT:
    """Random weights everywhere: at its own initialisation the model is 0 and would pass any comparison."""
    torch.manual_seed(0)
    model = DiT(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batch(size: int = 6, dtype: torch.dtype = torch.float64, config: DiTConfig = TINY):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, config.channels, config.input_size, config.input_size, generator=generator, dtype=dtype)
    s = torch.rand(size, generator=generator, dtype=torch.float64)
    return x, s, torch.arange(size) % (config.num_classes + 1)


# --- shapes and names -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size, millions", [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
def test_published_sizes_on_meta(size, millions):
    """Catches a wrong width, a missing part, or a buffer that a meta build would leave uninitialised."""
    with torch.device("meta"):
        model = DiT(dit_config(size, patch_size=2, input_size=32, channels=4, num_classes=1000))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    assert not list(model.buffers()) and all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.dim() > 0 and parameter.is_contiguous() for parameter in model.parameters())
    assert len(model.fsdp_units()) == model.config.depth


def test_parameter_names_and_shapes_are_those_of_sit():
    """Catches a renamed or reshaped parameter, which published weights would no longer fit."""
    size, wide = 24, 96
    linear = {"attn.qkv": (3 * size, size), "attn.proj": (size, size), "mlp.fc1": (wide, size), "mlp.fc2": (size, wide),
              "adaLN_modulation.1": (6 * size, size)}
    layers = {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in linear.items()}
    layers |= {"x_embedder.proj": (size, 2, 2, 2), "t_embedder.mlp.0": (size, 256), "t_embedder.mlp.2": (size, size),
               "final_layer.linear": (8, size), "final_layer.adaLN_modulation.1": (2 * size, size)}
    want = {f"{name}.weight": shape for name, shape in layers.items()}
    want |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    want |= {"y_embedder.embedding_table.weight": (6, size)}
    assert {name: tuple(tensor.shape) for name, tensor in DiT(TINY).state_dict().items()} == want


def sit(weights: dict[str, torch.Tensor], config: DiTConfig, x, t, labels) -> torch.Tensor:
    """SiT's forward written again, with loops for patches and positions, from the paper's description."""
    def linear(name: str, value):
        return F.linear(value, weights[f"{name}.weight"], weights[f"{name}.bias"])

    size, patch, side = config.hidden_size, config.patch_size, config.input_size // config.patch_size
    kernel = weights["x_embedder.proj.weight"].flatten(1)
    tokens = []
    for row in range(side):
        for column in range(side):
            pixels = x[:, :, row * patch:(row + 1) * patch, column * patch:(column + 1) * patch].flatten(1)
            angles = [[place / 10000 ** (4 * i / size) for i in range(size // 4)] for place in (column, row)]
            position = [f(a) for axis in angles for f in (math.sin, math.cos) for a in axis]
            tokens.append(pixels @ kernel.T + weights["x_embedder.proj.bias"] + x.new_tensor(position))
    h = torch.stack(tokens, 1)
    angles = torch.stack([t * 10000 ** (-i / 128) for i in range(128)], 1)
    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))
    c = F.silu(c + weights["y_embedder.embedding_table.weight"][labels])

    def normed(value, shift, scale):
        centred = value - value.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift

    for i in range(config.depth):
        m = linear(f"blocks.{i}.adaLN_modulation.1", c)[:, None].chunk(6, -1)
        q, k, v = linear(f"blocks.{i}.attn.qkv", normed(h, m[0], m[1])).chunk(3, -1)
        heads = []
        for q_head, k_head, v_head in zip(*(part.chunk(config.num_heads, -1) for part in (q, k, v))):
            scores = q_head @ k_head.transpose(1, 2) / math.sqrt(size // config.num_heads)
            heads.append(scores.softmax(-1) @ v_head)
        h = h + m[2] * linear(f"blocks.{i}.attn.proj", torch.cat(heads, -1))
        inner = linear(f"blocks.{i}.mlp.fc1", normed(h, m[3], m[4]))
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        h = h + m[5] * linear(f"blocks.{i}.mlp.fc2", inner)
    m = linear("final_layer.adaLN_modulation.1", c)[:, None].chunk(2, -1)
    out, image = linear("final_layer.linear", normed(h, m[0], m[1])), torch.empty_like(x)
    for token in range(side * side):  # the last axis is (row in patch, column in patch, channel)
        row, column = divmod(token, side)
        image[:, :, row * patch:(row + 1) * patch, column * patch:(column + 1) * patch] = (
            out[:, token].view(-1, patch, patch, config.channels).permute(0, 3, 1, 2))
    return image


@pytest.mark.parametrize("time_scale", [1.0, 1000.0])
def test_equals_sit(time_scale):
    """Catches swapped axes, a wrong order of the six modulations, of sine and cosine or of a patch's pixels."""
    config = dataclasses.replace(TINY, time_scale=time_scale)
    model = scrambled(config)
    x, s, labels = batch()
    want = sit(model.state_dict(), config, x, s * time_scale, labels)
    torch.testing.assert_close(model(x, s, labels), want, rtol=1e-8, atol=1e-8)


def test_starts_at_zero_from_the_global_generator():
    """Catches an output layer that is not zero (adaLN-zero) and an initialisation that a seed does not fix."""
    torch.manual_seed(3)
    model = DiT(TINY)
    torch.manual_seed(3)
    again = DiT(TINY)
    x, s, labels = batch(dtype=torch.float32)
    assert torch.equal(model(x, s, labels), torch.zeros_like(x))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert model.blocks[0].attn.qkv.weight.std() > 0 and model.x_embedder.proj.weight.std() > 0
    assert not any(parameter.any() for name, parameter in model.named_parameters() if name.endswith(".bias"))


def test_deterministic_and_independent_samples():
    """Catches dropout (of labels, say) left in the model, and samples of a batch that see each other."""
    model = scrambled().train()
    x, s, labels = batch()
    out = model(x, s, labels)
    assert torch.equal(model(x, s, labels), out) and torch.equal(model.eval()(x, s, labels), out)
    for i in range(len(x)):
        torch.testing.assert_close(model(x[i:i + 1], s[i:i + 1], labels[i:i + 1]), out[i:i + 1])


def test_embeddings_are_finite_and_distinguish_their_arguments():
    """Catches noise levels or patches that look alike to the model, such as a time scale lost in rounding."""
    times = time_embedding(torch.linspace(0, 1, 200) * 1000, 256)
    assert times.dtype == torch.float32 and torch.cdist(times, times).fill_diagonal_(9).min() > 0.1
    places = position_embedding(16, 384, device=torch.device("cpu"), dtype=torch.float32)
    assert places.shape == (256, 384) and torch.cdist(places, places).fill_diagonal_(9).min() > 0.1


REFUSED = {
    "heads": ({"num_heads": 5}, "multiple of num_heads 5"),
    "width": ({"hidden_size": 30, "num_heads": 3}, "and of 4"),
    "patch": ({"patch_size": 4}, "input_size 6 must be a multiple of patch_size 4"),
    "zero": ({"depth": 0}, "depth must be a positive int, got 0"),
    "float": ({"depth": 2.0}, "depth must be a positive int"),
    "bool": ({"channels": True}, "channels must be a positive int"),
    "nan": ({"time_scale": float("nan")}, "time_scale must be a positive float"),
    "unknown": ({"dept": 3}, r"unknown keys \['dept'\], missing keys \[\]"),
    "type": ({"model_type": "llama"}, "'llama' is not dit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_refuses(case):
    """Catches a config.json that builds another model than its weights belong to."""
    changes, message = REFUSED[case]
    raw = dataclasses.asdict(TINY)
    assert config_from_json(raw | {"model_type": "dit"}, source="config.json") == TINY
    with pytest.raises(ValueError, match=f"^config.json: .*{message}"):
        config_from_json(raw | changes, source="config.json")
    with pytest.raises(ValueError, match=r"missing keys \['depth'\]"):
        config_from_json({key: value for key, value in raw.items() if key != "depth"}, source="config.json")
    with pytest.raises(ValueError, match="choose from S, B, L, XL"):
        dit_config("M", patch_size=2, input_size=32, channels=4, num_classes=10)


def test_forward_refuses_what_would_broadcast():
    """Catches a latent of another size, one noise level for a whole batch, and noise levels rounded to 8 bits."""
    model = scrambled(dtype=torch.float32)
    x, s, labels = batch(dtype=torch.float32)
    for args, message in (((x[..., :4], s, labels), "DiT takes x"), ((x, s[:1], labels), "DiT takes x"),
                          ((x, s, labels[:1]), "DiT takes x"), ((x, s.bfloat16(), labels), "s in float32")):
        with pytest.raises(ValueError, match=message):
            model(*args)
    with pytest.raises(AssertionError, match="no block 3"):
        model(x, s, labels, features=3)


# --- learning -------------------------------------------------------------------------------------------------------

TOY = DiTConfig(hidden_size=32, depth=2, num_heads=2, input_size=4, patch_size=2, channels=1, num_classes=2)
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)


def toy_data(labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Class 0 is a bright left half, class 1 its negative."""
    pattern = torch.tensor([1.0, 1.0, -1.0, -1.0]).expand(1, 4, 4)
    noise = torch.randn(len(labels), 1, 4, 4, generator=generator)
    return pattern * (1 - 2 * labels).view(-1, 1, 1, 1) + 0.1 * noise


def velocity_loss(predict, x0, s, labels, noise) -> torch.Tensor:
    s_wide = s.view(-1, 1, 1, 1)
    return (predict((1 - s_wide) * x0 + s_wide * noise, s, labels) - (noise - x0)).square().mean()


@pytest.fixture(scope="module")
def trained() -> tuple[DiT, list[float]]:
    """A toy teacher with label dropout: about 2 s."""
    torch.manual_seed(0)
    model, generator, losses = DiT(TOY), torch.Generator().manual_seed(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        labels = torch.randint(2, (32,), generator=generator)
        x0 = toy_data(labels, generator)
        given = torch.where(torch.rand(32, generator=generator) < 0.2, TOY.null_class, labels)
        s, noise = torch.rand(32, generator=generator), torch.randn(x0.shape, generator=generator)
        loss = velocity_loss(model, x0, s, given, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def test_learns_two_modes(trained):
    """Catches a model that does not train; 2 is the loss of a zero output, x0 and noise having variance 1."""
    _, losses = trained
    assert losses[0] == pytest.approx(2.0, abs=0.15) and sum(losses[-20:]) / 20 < 0.8


def test_the_null_class_differs_from_a_class(trained):
    """Catches a null class that is never looked up: guidance would then do nothing."""
    model, _ = trained
    generator = torch.Generator().manual_seed(2)
    x, s = torch.randn(16, 1, 4, 4, generator=generator), torch.full((16,), 0.9)
    with torch.no_grad():
        zero, one, null = (model(x, s, torch.full((16,), label)) for label in (0, 1, TOY.null_class))
    assert (zero - null).abs().mean() > 0.2 and (one - null).abs().mean() > 0.2
    assert (zero - one)[..., 0].mean() < -0.3  # v = noise - x0, and x0 of the left half is 2 higher in class 0


def losses_at(predict, s: float, *, on_data: bool = True) -> float:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(64) % 2
    x0, fake, noise = toy_data(labels, generator), *(torch.randn(64, 1, 4, 4, generator=generator) for _ in range(2))
    with torch.no_grad():
        return float(velocity_loss(predict, x0 if on_data else fake, torch.full((64,), s), labels, noise))


def negated(predict):
    return lambda x, s, labels: -predict(x, s, labels)


def reversed_in_time(predict):
    return lambda x, s, labels: predict(x, 1 - s, labels)


def test_loss_on_data_is_below_loss_on_noise_at_every_level(trained):
    """Catches a flipped sign (negative control). It does not see a flipped time: the next test does."""
    def below(predict):
        return [losses_at(predict, s) < losses_at(predict, s, on_data=False) for s in LEVELS]

    model, _ = trained
    assert all(below(model)) and not any(below(negated(model)))


def test_the_models_own_convention_fits_best_at_every_level(trained):
    """Catches flipped signs and times: each flip of the model must fit worse (controls: flipped models)."""
    def fits_best(predict):
        flips = (negated(predict), reversed_in_time(predict), negated(reversed_in_time(predict)))
        return [all(losses_at(predict, s) < losses_at(flip, s) for flip in flips) for s in LEVELS if s != 0.5]

    model, _ = trained
    assert all(fits_best(model))
    assert not any(fits_best(negated(model)) + fits_best(reversed_in_time(model)))


# --- recomputation, features, adapters, shards ----------------------------------------------------------------------

def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in model.named_parameters() if p.grad is not None}


def test_recomputation_changes_no_bit():
    """Catches a checkpointed block that computes something else than the plain one."""
    results = []
    for recompute in (False, True):
        model = scrambled()
        out = model(*batch(), recompute=recompute)
        out.square().mean().backward()
        results.append((out, gradients(model)))
    (plain, want), (again, got) = results
    assert torch.equal(plain, again) and len(want) == len(list(scrambled().parameters()))
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def shard(model: DiT, num_ranks: int, **policy) -> DiT:
    mesh = init_device_mesh("cpu", (num_ranks,))
    for (unit,) in [*model.fsdp_units(), [model]]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, **policy)
    return model


def test_features_alone_train_a_head_under_sharding():
    """Catches features taken by a hook, whose backward fails under FSDP2 unless the velocity is in the loss too."""
    def grads(model, x, s, labels, recompute):
        v, features = model(x, s, labels, features=1, recompute=recompute)
        assert v.shape == x.shape and features.shape == (len(x), 9, 24)
        features.square().mean().backward()
        return gradients(model)

    want = grads(scrambled(), *batch(), False)
    assert not any(name.startswith("blocks.2") for name in want) and "blocks.1.mlp.fc2.weight" in want

    def body(rank):
        mine = [part.chunk(2)[rank] for part in batch()]
        return [grads(shard(scrambled(), 2), *mine, recompute) for recompute in (False, True)]

    for results in run_ranks(body, 2):
        for got in results:
            assert got.keys() == want.keys()
            for name, gradient in want.items():
                torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12)


def adapted() -> DiT:
    model = scrambled()
    inject(model, ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"], rank=2, alpha=2.0, adapters=("student", "fake"))
    for name, parameter in [*named_adapter(model, "student"), *named_adapter(model, "fake")]:
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_adapters_on_a_sharded_checkpointed_model(num_ranks):
    """Catches a context_fn that does not reach the blocks: another adapter is active when the backward recomputes."""
    def grads(model, x, s, labels, recompute):
        with use(model, "student"):
            out = model(x, s, labels, recompute=recompute, context_fn=checkpoint_context_fn(model))
        with use(model, "fake"):
            out.square().mean().backward()
        return gradients(model)

    want = grads(adapted(), *batch(), False)
    assert len(want) == 3 * 4 * 2 and len(lora_layers(adapted())) == 12

    def body(rank):
        return grads(shard(adapted(), num_ranks), *(part.chunk(num_ranks)[rank] for part in batch()), True)

    for got in run_ranks(body, num_ranks):
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


def test_bf16_under_sharding_keeps_the_noise_level_exact():
    """Catches FSDP2's own cast of the inputs, which would round s to 8 bits before the time embedding."""
    def body(rank):
        x, s, labels = batch(dtype=torch.float32)
        s = s.float()
        want = scrambled(dtype=torch.float32)(x, s, labels)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        right = shard(scrambled(dtype=torch.float32), 2, mp_policy=policy)
        out = right(x, s, labels, recompute=True)
        out.float().square().mean().backward()
        policy = dataclasses.replace(policy, cast_forward_inputs=True)  # FSDP2's default
        wrong = shard(scrambled(dtype=torch.float32), 2, mp_policy=policy)
        with pytest.raises(ValueError, match="cast_forward_inputs=False"):
            wrong(x, s, labels)
        error = (out.float() - want).norm() / want.norm()
        return out.dtype, float(error), {gradient.dtype for gradient in gradients(right).values()}

    for dtype, error, grad_dtypes in run_ranks(body, 2):
        assert dtype == torch.bfloat16 and error < 0.05 and grad_dtypes == {torch.float32}
