# SPDX-License-Identifier: Apache-2.0
"""The average against its closed form, its start, and local shards: uneven, empty, moved by FSDP2, resumed."""
from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distill_core.ema import EMA

DECAY = 0.9


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """7 and 2 output rows: on 3 ranks uneven shards, and an empty one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def move(parameters: dict[str, torch.Tensor], step: int) -> None:
    """A stand-in for an optimizer step, the same whatever the sharding."""
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.1 * step)


def run(parameters: dict[str, torch.Tensor], ema: EMA, steps, start_step: int) -> None:
    for step in steps:
        move(parameters, step)
        ema.update(step, DECAY, start_step)


def expected(start_step: int, num_steps: int) -> dict[str, torch.Tensor]:
    """Closed form in float64: the student is w + 0.1 (1 + ... + n) after n steps."""
    average = {}
    for name, tensor in net().state_dict().items():
        student = ema = tensor.double()
        for step in range(1, num_steps + 1):
            student = student + 0.1 * step
            ema = student if step < start_step else DECAY * ema + (1 - DECAY) * student
        average[name] = ema
    return average


@pytest.mark.parametrize("start_step", [0, 1, 2, 3, 4, 9])
def test_copy_until_the_start_step_then_the_average(start_step):
    """Catches an off-by-one at the start step, and an average that forgets the copy it started from."""
    parameters = dict(net().named_parameters())
    ema = EMA(parameters)
    run(parameters, ema, range(1, 5), start_step)
    for name, want in expected(start_step, 4).items():
        torch.testing.assert_close(ema.shadow[name].double(), want, rtol=1e-6, atol=1e-6)
        assert torch.equal(ema.shadow[name], parameters[name]) == (start_step > 4)


def test_starts_as_an_exact_copy_of_its_own():
    """Catches a shadow that shares memory with the student, or that an optimizer could train."""
    parameters = dict(net().named_parameters())
    ema = EMA(parameters)
    assert all(torch.equal(ema.shadow[name], parameter) for name, parameter in parameters.items())
    assert not any(tensor.requires_grad for tensor in ema.shadow.values())
    before = {name: tensor.clone() for name, tensor in ema.shadow.items()}
    move(parameters, 1)
    assert all(torch.equal(ema.shadow[name], tensor) for name, tensor in before.items())


def test_a_given_shadow_is_overwritten_and_written_in_place():
    """Catches an EMA role (a module, an adapter) that starts from its own values or is replaced by other tensors."""
    student, average = net(), net()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.fill_(torch.nan)
    ema = EMA(dict(student.named_parameters()), dict(average.named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(average.parameters(), student.parameters()))
    run(dict(student.named_parameters()), ema, range(1, 5), 0)
    for name, want in expected(0, 4).items():
        torch.testing.assert_close(average.get_parameter(name).double(), want, rtol=1e-6, atol=1e-6)


def test_a_bf16_model_is_averaged_in_fp32():
    """Catches an average kept in bf16: at decay .999 it would never move (negative control below)."""
    model = net(torch.bfloat16)
    parameters = {"weight": model[0].weight}
    ema = EMA(parameters)
    start = ema.shadow["weight"].clone()
    with torch.no_grad():
        model[0].weight.add_(0.25)
    narrow = start.bfloat16()
    for step in range(1, 101):
        ema.update(step, 0.999)
        narrow.lerp_(model[0].weight.detach(), 0.001)
    done = (ema.shadow["weight"] - start).mean() / (model[0].weight.detach().float() - start).mean()
    assert ema.shadow["weight"].dtype == torch.float32 and float(done) == pytest.approx(1 - 0.999**100, rel=1e-3)
    assert (narrow == start.bfloat16()).float().mean() > 0.5
    assert EMA({"w": torch.ones(2, dtype=torch.float64)}).shadow["w"].dtype == torch.float64


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_refuses_a_decay_out_of_range(decay):
    """Catches an average that runs away."""
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\]"):
        EMA({"w": torch.ones(2)}).update(1, decay)


def test_refuses_a_shadow_that_does_not_fit():
    """Catches another model's parameters, other shapes and a bf16 shadow."""
    source = {"a": torch.ones(2, 3)}
    for shadow, message in (({"b": torch.ones(2, 3)}, "names differ"), ({"a": torch.ones(3, 2)}, "a has shape"),
                            ({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, "must be torch.float32")):
        with pytest.raises(ValueError, match=message):
            EMA(source, shadow)


# --- shards ---------------------------------------------------------------------------------------------------------

def sharded(num_ranks: int, *, meta: bool = False) -> nn.Sequential:
    with torch.device("meta" if meta else "cpu"):
        model = net()
    mesh = init_device_mesh("cpu", (num_ranks,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().full_tensor() for name, tensor in tensors.items()}


def test_uneven_and_empty_shards():
    """Catches global shapes invented from local ones, and arithmetic that fails on a rank without rows."""
    def body(rank):
        model = sharded(3)
        parameters = dict(model.named_parameters())
        ema = EMA(parameters)
        run(parameters, ema, range(1, 5), 2)
        return whole(ema.shadow), [tensor.to_local().shape[0] for tensor in ema.shadow.values()]

    results = run_ranks(body, 3)
    assert results[0][1] == [3, 3, 1, 1] and results[2][1] == [1, 1, 0, 0]
    for averages, _ in results:
        for name, want in expected(2, 4).items():
            torch.testing.assert_close(averages[name].double(), want, rtol=1e-6, atol=1e-6)


def test_follows_parameters_that_get_other_memory():
    """Catches views taken at the start, which a module that is moved later (here out of a meta build) leaves behind."""
    def body(rank):
        student, average = sharded(3, meta=True), sharded(3, meta=True)
        ema = EMA(dict(student.named_parameters()), dict(average.named_parameters()))
        with torch.no_grad():
            for model, value in ((student, 2.0), (average, 1.0)):
                model.to_empty(device="cpu")
                for parameter in model.parameters():
                    parameter.fill_(value)
                model(torch.ones(2, 5))  # FSDP2 settles its padded shards at the first forward
        ema.update(1, DECAY)
        return whole(dict(average.named_parameters()))

    for averages in run_ranks(body, 3):
        for tensor in averages.values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, 1.1))


def test_refuses_a_gathered_source():
    """Catches an EMA built after a forward that left the parameters gathered: it would average whole copies."""
    def body(rank):
        model = sharded(2)
        shadow = EMA(dict(model.named_parameters())).shadow
        for module in (model, model[0], model[2]):
            module.unshard()
        with pytest.raises(ValueError, match="reshard before building"):
            EMA(dict(model.named_parameters()), shadow)

    run_ranks(body, 2)


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("start_step", [0, 3])
def test_resume_is_exact(stop, start_step):
    """Catches state outside of `shadow`: a stop, also during the copies before start_step, must change no bit."""
    parameters = dict(net().named_parameters())
    straight = EMA(parameters)
    run(parameters, straight, range(1, 6), start_step)

    parameters = dict(net().named_parameters())
    stopped = EMA(parameters)
    run(parameters, stopped, range(1, stop + 1), start_step)
    saved = {name: tensor.clone() for name, tensor in stopped.shadow.items()}
    resumed_parameters = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    resumed = EMA(resumed_parameters)
    for name, tensor in resumed.shadow.items():
        tensor.copy_(saved[name])
    run(resumed_parameters, resumed, range(stop + 1, 6), start_step)
    assert all(torch.equal(resumed.shadow[name], tensor) for name, tensor in straight.shadow.items())
