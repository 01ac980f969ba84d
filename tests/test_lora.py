# SPDX-License-Identifier: Apache-2.0
"""Adapters against plain torch and peft, the scope that selects them, and two of them on one sharded base."""
from __future__ import annotations

import json
import threading

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError, checkpoint, noop_context_fn

from distill_core.lora import (checkpoint_context_fn, inject, lora_layers, merge, named_adapter, peft_config,
                               peft_state, reset_lora, use)

WIDTH, RANK = 7, 2  # 7 rows on 2 and 3 ranks are uneven; 2 rows on 3 ranks leave one shard empty
TARGETS = ["fc1", "fc2"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH, bias=False)

    def forward(self, x, context_fn=None):
        if context_fn is None:
            return self.block_forward(x)
        return checkpoint(self.block_forward, x, use_reentrant=False, context_fn=context_fn)

    def block_forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x, context_fn=None):
        for block in self.blocks:
            x = block(x, context_fn)
        return self.head(x)


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def adapted(*, zero: bool = False, dtype: torch.dtype = torch.float64) -> Net:
    """A net with the adapters student and fake, B not zero so that they matter."""
    model = make_net(dtype)
    inject(model, TARGETS, rank=RANK, alpha=3.0, adapters=("student", "fake"))
    if not zero:
        for adapter in ("student", "fake"):
            for name, parameter in named_adapter(model, adapter):
                nn.init.normal_(parameter, std=0.3)
    return model


def rows(count: int = 6, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)


# --- one process ----------------------------------------------------------------------------------------------------

def test_a_fresh_adapter_changes_nothing():
    """Catches B that does not start at zero, a base that is trained, and base parameters that change their names."""
    plain, model = make_net(), adapted(zero=True)
    assert torch.equal(model(rows()), plain(rows()))
    with use(model, "student"):
        assert torch.equal(model(rows()), plain(rows()))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name in state if ".lora_" in name} and len(trainable) == 3 * 2 * 2 * 2
    assert state["blocks.0.fc1.lora_A.student"].shape == (RANK, WIDTH)
    assert state["blocks.0.fc1.lora_B.student"].shape == (11, RANK)


def test_an_adapter_adds_its_scaled_product():
    """Catches a wrong scale, transposed factors, and an adapter that answers for another."""
    model = adapted()
    layer, x = model.blocks[1].fc1, rows()
    for adapter in ("student", "fake"):
        delta = 3.0 / RANK * layer.lora_B[adapter] @ layer.lora_A[adapter]
        with use(model, adapter):
            torch.testing.assert_close(layer(x), x @ (layer.weight + delta).T + layer.bias)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 0.05)])
def test_merging_gives_a_plain_model_that_equals_the_active_adapter(dtype, atol):
    """Catches a merge of another adapter, a merge in bf16 arithmetic, and adapter keys left in what is exported."""
    model, x = adapted(dtype=dtype), rows(dtype=dtype)
    with use(model, "fake"):
        want = model(x)
    merged = merge(model, "fake")
    torch.testing.assert_close(merged(x), want, atol=atol, rtol=0)
    assert merged is model and not lora_layers(model)
    assert list(model.state_dict()) == list(make_net().state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_adapters_of_a_bf16_base_are_kept_in_fp32():
    """Catches adapters trained in bf16, where an update of 1e-4 of a weight is rounded away."""
    model = adapted(dtype=torch.bfloat16)
    assert {parameter.dtype for _, parameter in named_adapter(model, "student")} == {torch.float32}
    with use(model, "student"):
        out = model(rows(dtype=torch.bfloat16))
    out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for _, parameter in named_adapter(model, "student"))


def test_scopes_nest_and_restore():
    """Catches a scope that leaves its adapter active after an error, or restores "none" instead of the outer one."""
    model = adapted()

    def active():
        (adapter,) = {layer.active for layer in lora_layers(model).values()}
        return adapter

    with use(model, "student"):
        with pytest.raises(ZeroDivisionError), use(model, None):
            assert active() is None
            with use(model, "fake"):
                assert active() == "fake"
                raise ZeroDivisionError
        assert active() == "student"
    assert active() is None
    with use(model.blocks[0], "fake"):  # a part of the module only
        assert model.blocks[0].fc1.active == "fake" and model.blocks[1].fc1.active is None
    with use(make_net(), None):
        pass


def test_values_depend_on_the_seed_alone():
    """Catches an initialisation that moves the global generator, or differs between storages and adapter names."""
    model, other = adapted(zero=True), make_net()
    inject(other, TARGETS, rank=RANK, alpha=1.0)
    before = torch.get_rng_state()
    reset_lora(model, "fake", seed=5)
    reset_lora(other, "default", seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    for (_, a), (_, b) in zip(named_adapter(model, "fake"), named_adapter(other, "default"), strict=True):
        assert torch.equal(a, b)
    first, second = model.blocks[0].fc1.lora_A, model.blocks[1].fc1.lora_A
    assert not torch.equal(first["fake"], first["student"]) and not torch.equal(first["fake"], second["fake"])
    for name in TARGETS:  # uniform up to 1 / sqrt(in)
        layers = [layer for path, layer in lora_layers(model).items() if path.endswith(name)]
        largest = max(layer.lora_A["fake"].abs().max() * layer.in_features**0.5 for layer in layers)
        assert 0.9 < largest <= 1


def shared_layer_net():
    model = make_net()
    model.blocks[1].fc1 = model.blocks[0].fc1
    return model


REFUSED = {
    "no layer": ((make_net, ["fc9"]), {}, "'fc9' names no layer .*blocks.0.fc1"),
    "half a name": ((make_net, ["c1"]), {}, "'c1' names no layer"),
    "one of two": ((make_net, ["fc1", "typo"]), {}, "'typo' names no layer"),
    "no linear": ((make_net, ["blocks.0"]), {}, "blocks.0, a Block, not an nn.Linear"),
    "a string": ((make_net, "fc1"), {}, "must be a list of layer names, got 'fc1'"),
    "nothing": ((make_net, []), {}, "must be a list"),
    "rank 0": ((make_net, TARGETS), {"rank": 0}, "rank must be an integer of at least 1, got 0"),
    "rank 2.0": ((make_net, TARGETS), {"rank": 2.0}, "rank must be"),
    "alpha": ((make_net, TARGETS), {"alpha": float("nan")}, "alpha must be a positive number, got nan"),
    "twice": ((adapted, TARGETS), {}, "has LoRA adapters already"),
    "same name": ((make_net, TARGETS), {"adapters": ("a", "a")}, "different names"),
    "name as string": ((make_net, TARGETS), {"adapters": "default"}, "list of different names"),
    "dotted name": ((make_net, TARGETS), {"adapters": ("a.b",)}, "different names"),
    "no name": ((make_net, TARGETS), {"adapters": ()}, "different names"),
    "shared layer": ((shared_layer_net, TARGETS), {}, "one layer by two paths"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inject_refuses(case):
    """Catches targets that match nothing (nothing would train), and half-done injections."""
    (make, targets), changes, message = REFUSED[case]
    model = make()
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        inject(model, targets, **{"rank": 2, "alpha": 1.0} | changes)
    assert "\n" not in str(error.value) and list(model.state_dict()) == before


def test_unknown_adapters_are_refused():
    """Catches a typo in a role's adapter, which would run the base alone."""
    model = adapted()
    for call in (lambda: use(model, "studnt"), lambda: merge(model, "studnt"), lambda: named_adapter(model, "studnt"),
                 lambda: reset_lora(model, "studnt", seed=0), lambda: peft_state(model, "studnt")):
        with pytest.raises(ValueError, match="'studnt' does not exist .choose from fake, student"):
            call()
    with pytest.raises(ValueError, match="no adapters .call inject first"):
        use(make_net(), "student")


def test_a_subclass_of_linear_is_refused():
    """Catches an adapter on a head that uses its weight in its own way, where it would be bypassed silently."""
    model = make_net()
    model.head = type("Head", (nn.Linear,), {})(WIDTH, 5)
    with pytest.raises(ValueError, match="head, a Head, not an nn.Linear"):
        inject(model, ["head"], rank=2, alpha=1.0)


# --- peft -----------------------------------------------------------------------------------------------------------

def test_peft_loads_what_we_write(tmp_path):
    """Catches wrong key names, a wrong scale or transposed factors: peft only warns and keeps its own values."""
    peft = pytest.importorskip("peft")
    model, x = adapted(dtype=torch.float32), rows(dtype=torch.float32)
    with use(model, "fake"):
        want = model(x)
    state = peft_state(model, "fake")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(model, base_model=str(tmp_path))))
    theirs = peft.PeftModel.from_pretrained(make_net(torch.float32), tmp_path)
    torch.testing.assert_close(theirs(x), want)
    assert not torch.allclose(want, make_net(torch.float32)(x), atol=1e-2)
    written = peft.get_peft_model_state_dict(theirs)
    assert written.keys() == state.keys() and all(torch.equal(written[name], tensor) for name, tensor in state.items())


def test_peft_names():
    """Catches a change of the names on disk where peft is not installed to tell."""
    model = adapted()
    state = peft_state(model, "student")
    assert set(state) == {f"base_model.model.blocks.{i}.{layer}.lora_{side}.weight"
                          for i in range(3) for layer in TARGETS for side in "AB"}
    assert torch.equal(state["base_model.model.blocks.2.fc2.lora_B.weight"], model.blocks[2].fc2.lora_B["student"])
    config = peft_config(model, base_model="folder")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (RANK, 3.0, False)
    assert config["target_modules"] == sorted(f"blocks.{i}.{layer}" for i in range(3) for layer in TARGETS)
    json.dumps(config)


# --- recomputation and sharding -------------------------------------------------------------------------------------

def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    flat_got, flat_want = (torch.cat([tensors[name].flatten() for name in want]) for tensors in (got, want))
    return float((flat_got - flat_want).norm() / flat_want.norm())


def loss_of(model: nn.Module, x: torch.Tensor, context_fn) -> torch.Tensor:
    with use(model, "student"):
        return model(x, context_fn).square().mean()


def backward_here(loss: torch.Tensor) -> None:
    loss.backward()


def backward_in_thread(loss: torch.Tensor) -> None:
    failures = []

    def body() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


BACKWARDS = {"same thread": backward_here, "second thread": backward_in_thread}


def student_gradients(model, x, context_fn, backward, active="fake") -> dict[str, torch.Tensor]:
    """Gradients of the student's loss with `active` set while the backward runs."""
    loss = loss_of(model, x, context_fn)
    with use(model, active):
        backward(loss)
        assert all(layer.active == active for layer in lora_layers(model).values()), "recomputation left its adapter"
    return gradients(model)


@pytest.mark.parametrize("thread", BACKWARDS)
@pytest.mark.parametrize("active", ["student", "fake", None])
def test_recomputation_uses_the_adapter_of_the_forward(thread, active):
    """Catches recomputation with whatever is active at backward time: wrong gradients without an error."""
    want = student_gradients(adapted(), rows(), None, backward_here, "student")
    model = adapted()
    got = student_gradients(model, rows(), checkpoint_context_fn(model), BACKWARDS[thread], active)
    assert got.keys() == want.keys() == {name for name, _ in named_adapter(model, "student")}
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_negative_control_recomputation_without_the_captured_adapter():
    """Shows that the test above can fail: silently wrong gradients under the same names, or an error of torch."""
    want = student_gradients(adapted(), rows(), None, backward_here, "student")
    assert relative_error(student_gradients(adapted(), rows(), noop_context_fn, backward_here), want) > 0.1
    with pytest.raises(CheckpointError):
        student_gradients(adapted(), rows(), noop_context_fn, backward_here, None)


def test_two_forwards_with_different_adapters_in_one_backward_twice():
    """Catches one captured adapter for all forwards, and a scope that can be entered only once (retain_graph)."""
    def grads(context_fn_of):
        model = adapted()
        with use(model, "student"):
            a = model(rows(), context_fn_of(model))
        with use(model, "fake"):
            b = model(a.tanh() @ torch.ones(5, WIDTH, dtype=a.dtype), context_fn_of(model))
        loss = (a.mean() + b).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    want, got = grads(lambda model: None), grads(checkpoint_context_fn)
    assert len(want) == 24 and all(torch.equal(got[name], gradient) for name, gradient in want.items())


def sharded(num_ranks: int, **policy) -> Net:
    model = adapted()
    shard(model, num_ranks, **policy)
    return model


def shard(model: Net, num_ranks: int, **policy) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, **policy)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_adapters_on_one_sharded_checkpointed_base(num_ranks):
    """Catches adapters that FSDP2 mixes or recomputes wrongly: gradients against the unsharded, unchecked reference."""
    want = student_gradients(adapted(), rows(), None, backward_here, "student")

    def body(rank):
        x = rows().chunk(num_ranks)[rank]
        model = sharded(num_ranks)
        results = [student_gradients(model, x, checkpoint_context_fn(model), backward_here)]
        model.zero_grad(set_to_none=True)
        results.append(student_gradients(model, x, checkpoint_context_fn(model), backward_in_thread, None))
        model.zero_grad(set_to_none=True)
        with use(model, "fake"):
            model(x).sum().backward()
        fake_names = sorted(gradients(model))
        return results, fake_names, student_gradients(sharded(num_ranks), x, noop_context_fn, backward_here)

    for results, fake_names, control in run_ranks(body, num_ranks):
        for got in results:
            assert got.keys() == want.keys()
            for name, gradient in want.items():
                torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-12)
        assert fake_names == sorted(name for name, _ in named_adapter(adapted(), "fake"))
        assert relative_error(control, want) > 0.1  # negative control: without the captured adapter


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_other_roles_between_forward_and_backward_change_no_bit(num_ranks):
    """Catches teacher and fake forwards that disturb the student's pending graph: DMD runs both before its backward."""
    def grads(model, x, disturb):
        with use(model, "student"):
            out = model(x, checkpoint_context_fn(model))
        if disturb:
            with torch.no_grad():
                for adapter in (None, "fake", None):
                    with use(model, adapter):
                        model(x * 0.5)
        out.square().mean().backward()
        return gradients(model)

    def body(rank):
        x = rows().chunk(num_ranks)[rank]
        make = (lambda: sharded(num_ranks)) if num_ranks > 1 else adapted
        return grads(make(), x, False), grads(make(), x, True)

    for calm, disturbed in run_ranks(body, num_ranks):
        assert calm.keys() == disturbed.keys() and len(calm) == 12
        assert all(torch.equal(disturbed[name], gradient) for name, gradient in calm.items())


def test_meta_build_resets_the_same_values_at_any_number_of_ranks():
    """Catches adapters left uninitialised after to_empty, or drawn per shard so that they depend on the world size."""
    want = adapted(zero=True)
    for seed, adapter in enumerate(("student", "fake")):
        reset_lora(want, adapter, seed=10 + seed)

    def body(rank):
        with torch.device("meta"):
            model = Net().double()
        inject(model, TARGETS, rank=RANK, alpha=3.0, adapters=("student", "fake"))
        shard(model, 3)
        with pytest.raises(ValueError, match="adapters already"):
            inject(model, TARGETS, rank=RANK, alpha=3.0)
        model.to_empty(device="cpu")
        for seed, adapter in enumerate(("student", "fake")):
            for _, parameter in named_adapter(model, adapter):
                nn.init.constant_(parameter, torch.nan)
            reset_lora(model, adapter, seed=10 + seed)
        shards = [p.to_local().numel() for _, p in named_adapter(model, "student")]
        with pytest.raises(ValueError, match="sharded .merge"):
            merge(model, "student")
        return peft_state(model, "student"), peft_state(model, "fake"), min(shards)

    results = run_ranks(body, 3)
    for student, fake, _ in results:
        for adapter, state in (("student", student), ("fake", fake)):
            assert all(torch.equal(state[name], tensor) for name, tensor in peft_state(want, adapter).items())
    assert results[2][2] == 0, "this test is meant to have an empty shard"


def test_a_frozen_bf16_base_under_mixed_precision_keeps_fp32_gradients():
    """Catches the reduce dtype that FSDP2 fixes at the first forward: a bf16 base must not make it bf16."""
    def body(rank):
        model = adapted(dtype=torch.bfloat16)
        shard(model, 2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        with torch.no_grad(), use(model, None):
            model(rows(dtype=torch.bfloat16))  # the teacher first
        loss = loss_of(model, rows(dtype=torch.bfloat16), checkpoint_context_fn(model))
        loss.backward()
        groups = [module._get_fsdp_state()._fsdp_param_group for module in model.blocks]
        return {p.grad.dtype for _, p in named_adapter(model, "student")}, {group._reduce_dtype for group in groups}

    assert run_ranks(body, 2) == [({torch.float32}, {torch.float32})] * 2


def test_a_sharded_module_takes_no_adapters():
    """Catches injection after sharding: FSDP2 would not know the new parameters."""
    def body(rank):
        model = make_net()
        shard(model, 1)
        with pytest.raises(ValueError, match="before fully_shard"):
            inject(model, TARGETS, rank=1, alpha=1.0)

    run_ranks(body, 1)
