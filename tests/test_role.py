# SPDX-License-Identifier: Apache-2.0
"""run_phase against an unsharded float64 reference, its errors, and the gradient-ownership guard."""
from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distill_core.fsdp import gather_into, global_grad_norm, reshard, shard
from distill_core.lora import inject
from distill_core.ownership import GradientOwnershipError, owns
from distill_core.phases import lr_at
from distill_core.role import (PhaseLoss, Role, RoleSpec, adamw, check_plan, restore_role, role_state, role_tensors,
                               run_phase)

SAMPLES = [(torch.randn(5, generator=torch.Generator().manual_seed(i)), 1 + i % 3) for i in range(12)]  # input, count


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # 7 and 3 rows: uneven on 2 and 4 ranks


def make_role(module: nn.Module, group=None, **counters) -> Role:
    optimizer = adamw(module.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    return Role("student", module, group, group, optimizer, lambda step: 0.1, **counters)


def summed(module):
    """Loss numerators and explicit counts: a global mean over counts."""
    def compute(batch):
        out = module(torch.stack([x for x, _ in batch]) if batch else torch.zeros(1, 5))
        if not batch:
            return PhaseLoss(out.sum() * 0, 0, normalizer=0)
        counts = torch.tensor([float(count) for _, count in batch])
        return PhaseLoss((out.square().sum(1) * counts).sum(), len(batch), normalizer=float(counts.sum()))
    return compute


def averaged(module):
    """A plain mean over the samples of the micro-batch."""
    def compute(batch):
        out = module(torch.stack([x for x, _ in batch]) if batch else torch.zeros(1, 5))
        return PhaseLoss(out.square().sum(1).mean() if batch else out.sum() * 0, len(batch))
    return compute


def reference(weighted: bool, max_grad_norm: float):
    """One AdamW step on the whole batch in one piece, in float64, by torch's own clip."""
    module = net().double()
    out = module(torch.stack([x for x, _ in SAMPLES]).double()).square().sum(1)
    counts = torch.tensor([float(count) for _, count in SAMPLES], dtype=torch.float64) if weighted else torch.ones(12)
    loss = (out * counts).sum() / counts.sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
    adamw(module.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01).step()
    return loss.item(), norm.item(), [p.detach().float() for p in module.parameters()]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_ranks, cuts", [(1, 1), (1, 5), (2, 3), (4, 2), (4, 4)])
def test_the_step_does_not_depend_on_ranks_or_micro_batches(weighted, num_ranks, cuts):
    """Catches means of means, gradients averaged by the number of ranks, ragged tails weighted like full batches."""
    want_loss, want_norm, want = reference(weighted, 0.5)

    def body(rank):
        module = net()
        if dist.is_initialized():
            shard(module, [[module[0]], [module[2]]], init_device_mesh("cpu", (num_ranks,)))
        role = make_role(module, dist.group.WORLD)
        mine = SAMPLES[rank::num_ranks] if rank else SAMPLES[::num_ranks]
        batches = [mine[i::cuts] for i in range(cuts)]  # uneven, some empty
        result = run_phase(role, batches, (summed if weighted else averaged)(module), roles=[role], max_grad_norm=0.5)
        plain = net(1)
        gather_into(module, plain)
        return result, [p.detach() for p in plain.parameters()]

    for result, parameters in run_ranks(body, num_ranks):
        assert result.applied
        assert result.loss == pytest.approx(want_loss, rel=1e-6) and result.grad_norm == pytest.approx(want_norm, rel=1e-5)
        for got, expected in zip(parameters, want):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_one_ranks_nan_skips_the_step_on_all_and_leaves_no_trace():
    """Catches a skip decided locally (ranks then differ for ever) and a NaN that survives into the next step."""
    def body(rank):
        module = net()
        shard(module, [[module[0]], [module[2]]], init_device_mesh("cpu", (2,)))
        role = make_role(module, dist.group.WORLD)
        before = [p.detach().to_local().clone() for p in module.parameters()]

        def poisoned(batch):
            loss = summed(module)(batch)
            return loss._replace(value=loss.value * (math.nan if rank == 1 else 1.0))

        batches = [SAMPLES[rank::2]]
        skipped = run_phase(role, batches, poisoned, roles=[role], max_grad_norm=1.0)
        unchanged = all(torch.equal(p.to_local(), old) for p, old in zip(module.parameters(), before))
        applied = run_phase(role, batches, summed(module), roles=[role], max_grad_norm=1.0)
        return skipped.applied, unchanged, role_state(role), applied

    for skipped, unchanged, state, applied in run_ranks(body, 2):
        assert not skipped and unchanged and applied.applied
        assert state == {"successes": 1, "skips": 1, "skips_in_a_row": 0}


FAULTS = {"missing": lambda module: [module(torch.ones(2, 5)), None][1],  # every rank runs the forward, as FSDP2 needs
          "scalar": lambda module: PhaseLoss(module(torch.ones(2, 5)).sum(1), 2, 2.0),
          "detached": lambda module: PhaseLoss(module(torch.ones(2, 5)).sum().detach(), 1, 1.0),
          "normalizer": lambda module: PhaseLoss(module(torch.ones(2, 5)).sum(), 1, -1.0),
          "some ranks": lambda module: PhaseLoss(module(torch.ones(2, 5)).sum(), 1, None)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_loss_on_one_rank_raises_on_all(fault):
    """Catches a rank that stops alone and leaves the others in a collective until the timeout."""
    def body(rank):
        module = net()
        shard(module, [[module[0]], [module[2]]], init_device_mesh("cpu", (2,)))
        role = make_role(module, dist.group.WORLD)
        compute = (lambda batch: FAULTS[fault](module)) if rank == 1 else summed(module)
        try:
            run_phase(role, [SAMPLES], compute, roles=[role], max_grad_norm=1.0)
        except ValueError as error:
            return str(error)

    messages = run_ranks(body, 2, timeout_s=10)
    assert messages[0] == messages[1] and fault in messages[0]


def test_unequal_numbers_of_micro_batches_and_an_empty_batch_are_refused():
    """Catches uneven FSDP forwards, which hang, and a step whose normalizer is zero everywhere."""
    def body(rank):
        module = net()
        shard(module, [[module[0]], [module[2]]], init_device_mesh("cpu", (2,)))
        role, messages = make_role(module, dist.group.WORLD), []
        for batches in ([SAMPLES] * (1 + rank), [[]]):
            try:
                run_phase(role, batches, summed(module), roles=[role], max_grad_norm=1.0)
            except ValueError as error:
                messages.append(str(error))
        return messages

    for messages in run_ranks(body, 2, timeout_s=10):
        assert "between 1 and 2 micro-batches" in messages[0] and "normalizer is 0" in messages[1]


def test_grad_norm_with_an_empty_shard():
    """Catches statistics on a rank whose shard has no rows (3 rows on 4 ranks)."""
    def body(rank):
        module = nn.Linear(5, 3)
        torch.manual_seed(0)
        nn.init.normal_(module.weight), nn.init.normal_(module.bias)
        shard(module, [], init_device_mesh("cpu", (4,)))
        module(torch.ones(2, 5)).sum().backward()
        return float(global_grad_norm(module.parameters(), dist.group.WORLD))

    assert run_ranks(body, 4) == [pytest.approx(math.sqrt(15 * 4 + 3 * 4))] * 4


def test_a_skip_does_not_advance_the_schedule_and_only_matrices_decay():
    """Catches warm-up that runs on through skipped steps, and weight decay on norms and biases or on nothing."""
    role = make_role(net())
    role.lr, learning_rates = (lambda step: 0.1 + step), []
    for poison in (1.0, math.nan, math.nan, 1.0):
        def compute(batch, factor=poison):
            loss = summed(role.module)(batch)
            return loss._replace(value=loss.value * factor)
        learning_rates.append(run_phase(role, [SAMPLES], compute, roles=[role], max_grad_norm=1.0).lr)
    assert learning_rates == [0.1, 1.1, 1.1, 1.1] and role_state(role) == {"successes": 2, "skips": 2, "skips_in_a_row": 0}
    decays = {p.dim(): group["weight_decay"] for group in role.optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.01, 1: 0.0}


# --- ownership ------------------------------------------------------------------------------------------------------

def two_roles():
    student, critic = make_role(net()), Role("critic", net(1))
    return student, critic


def test_a_leaked_gradient_is_named():
    """Catches gradients that flow into another role and would train it with the wrong objective."""
    student, critic = two_roles()
    x = torch.ones(2, 5)
    with owns(student, [student, critic]):
        student.module(x).sum().backward()  # its own: fine
    with pytest.raises(GradientOwnershipError, match=r"student phase.*critic\.0\.weight"):
        with owns(student, [student, critic]):
            (student.module(x).sum() + critic.module(x).sum()).backward()


def test_zero_gradients_are_dropped_and_modes_restored_on_exceptions():
    """Catches a guard that fires on `loss * 0`, and one that leaves a module in train mode after an error."""
    student, critic = two_roles()
    with owns(student, [student, critic]):
        (student.module(torch.ones(2, 5)).sum() + 0 * critic.module(torch.ones(2, 5)).sum()).backward()
    assert all(p.grad is None for p in critic.module.parameters())
    student.module.eval()
    with pytest.raises(KeyError):
        with owns(student, [student, critic]):
            student.module.train()
            critic.module.eval()
            raise KeyError
    assert not student.module.training and critic.module.training


def test_scopes_nest():
    """Catches an inner scope that judges by the outer scope's owner."""
    student, critic = two_roles()
    other = make_role(critic.module)
    other.name = "critic"
    with owns(student, [student, other]):
        with owns(other, [other]):
            other.module(torch.ones(2, 5)).sum().backward()
        other.optimizer.zero_grad()
        student.module(torch.ones(2, 5)).sum().backward()


# --- schedule and state ---------------------------------------------------------------------------------------------

def test_schedules():
    """Catches warm-up that starts at 0 (a wasted step), off-by-one ends and a floor that is not reached."""
    settings = {"lr": 2.0, "warmup_steps": 4, "max_steps": 12, "min_lr_frac": 0.25}
    assert [lr_at(s, schedule="constant", **settings) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = [lr_at(s, schedule="linear", **settings) for s in (4, 8, 12, 99)]
    assert linear == [2.0, 1.25, 0.5, 0.5]
    cosine = [lr_at(s, schedule="cosine", **settings) for s in (4, 8, 12)]
    assert cosine == pytest.approx([2.0, 1.25, 0.5])
    with pytest.raises(ValueError, match="schedule"):
        lr_at(9, schedule="step", **settings)


def test_state_restored_before_the_first_step_continues_bit_for_bit():
    """Catches optimizer moments or AdamW's step count that a resume leaves at zero."""
    straight, other = make_role(net()), make_role(net(1))
    for _ in range(2):
        run_phase(straight, [SAMPLES], summed(straight.module), roles=[straight], max_grad_norm=1.0)
    for name, tensor in role_tensors(straight).items():
        role_tensors(other)[name].copy_(tensor)
    restore_role(other, role_state(straight))
    for role in (straight, other):
        run_phase(role, [SAMPLES], summed(role.module), roles=[role], max_grad_norm=1.0)
    for a, b in zip(straight.module.parameters(), other.module.parameters()):
        assert torch.equal(a, b)
    restore_role(other, role_state(straight) | {"successes": 7})  # negative control: the step count matters
    for role in (straight, other):
        run_phase(role, [SAMPLES], summed(role.module), roles=[role], max_grad_norm=1.0)
    assert not torch.equal(straight.module[0].weight, other.module[0].weight)


def test_reshard_frees_gathered_parameters():
    """Catches parameters() that are plain, stale tensors because a forward has left them gathered."""
    def body(rank):
        module = net()
        shard(module, [[module[0]], [module[2]]], init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            module(torch.ones(1, 5))
        module[0].unshard()
        plain = not hasattr(module[0].weight, "to_local")
        reshard(module)
        return plain, hasattr(module[0].weight, "to_local")

    assert run_ranks(body, 2) == [(True, True)] * 2


# --- plan and adapters of one base ----------------------------------------------------------------------------------

PLAN = {"trained": ["student", "fake_score"], "frozen": ["teacher", "student_ema"]}
SHARED = [RoleSpec("student", "base", "a", "optim.a"), RoleSpec("teacher", "base"),
          RoleSpec("fake_score", "base", "b", "optim.b"), RoleSpec("student_ema", "base", "c")]
APART = [RoleSpec(spec.name, spec.name, None, spec.optimizer) for spec in SHARED]


def test_sound_plans_pass():
    """Catches a check that refuses what is right: four trees, adapters of one base, adapters in trees of their own."""
    for plan in (SHARED, APART, [spec._replace(tree=spec.name) for spec in SHARED]):
        check_plan(plan, **PLAN)


@pytest.mark.parametrize("plan, place, change, message", [
    (APART, 1, {"optimizer": "optim.t"}, "role teacher: is frozen and takes no optimizer"),
    (APART, 2, {"optimizer": None}, "role fake_score: is trained and needs an optimizer"),
    (APART, 2, {"optimizer": "optim.a"}, "roles student and fake_score share the optimizer optim.a"),
    (APART, 3, {"tree": "student"}, "roles student and student_ema have the same weights"),
    (APART, 3, {"tree": "student", "adapter": "c"}, "role student: would train the base that other roles share"),
    (SHARED, 2, {"adapter": "a"}, "roles student and fake_score have the same adapter a"),
    (SHARED, 2, {"adapter": None}, "roles teacher and fake_score have the same weights"),
    (SHARED, 3, {"name": "student"}, "exactly student, fake_score, teacher, student_ema are needed, each once"),
    (APART, 1, {"name": "critic"}, "roles student, critic, fake_score, student_ema: exactly")])
def test_unsound_plans_are_refused_in_one_line(plan, place, change, message):
    """Catches two roles that train one weight, an average that an optimizer owns, a base that moves under its roles."""
    plan = list(plan)
    plan[place] = plan[place]._replace(**change)
    with pytest.raises(ValueError, match=message) as caught:
        check_plan(plan, **PLAN)
    assert "\n" not in str(caught.value)


def shared_base() -> dict[str, Role]:
    """Student and fake score train an adapter each of one module, the average has a third and the teacher none."""
    module = net()
    inject(module, ["0", "2"], rank=2, alpha=2.0, adapters=("student", "fake_score", "student_ema"))
    for index, (_, parameter) in enumerate(module.named_parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    roles = {name: Role(name, module, adapter=name) for name in ("student", "fake_score", "student_ema")}
    for name in ("student", "fake_score"):
        roles[name].optimizer = torch.optim.SGD([p for _, p in roles[name].named_weights()], lr=0.1)
        roles[name].lr = lambda step: 0.1
    return roles | {"teacher": Role("teacher", module)}


def test_roles_of_one_base_own_their_adapters_alone():
    """Catches an optimizer over the base or over another role's adapter, and a frozen role that owns anything."""
    roles = shared_base()
    owned = {name: {own for own, _ in role.named_trainable()} for name, role in roles.items()}
    assert owned["teacher"] == owned["student_ema"] == set()
    assert owned["student"] == {f"{layer}.lora_{side}.student" for layer in (0, 2) for side in "AB"}
    assert not owned["student"] & owned["fake_score"]
    assert [name for name, _ in roles["student_ema"].named_weights()] == [
        f"{layer}.lora_{side}.student_ema" for layer in (0, 2) for side in "AB"]
    before = {name: p.detach().clone() for name, p in roles["teacher"].module.named_parameters()}

    def compute(batch):
        with roles["student"].scope():
            return PhaseLoss(roles["student"].module(batch).square().mean(), len(batch))

    assert run_phase(roles["student"], [torch.ones(2, 5)], compute, roles=list(roles.values()), max_grad_norm=1.0).applied
    moved = {name for name, p in roles["teacher"].module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == owned["student"]


def test_a_scope_is_the_roles_own_and_is_restored():
    """Catches a forward of another role's adapter, a teacher in train mode, and an adapter left active by an error."""
    roles, x = shared_base(), torch.ones(2, 5)
    module = roles["teacher"].module
    outputs = {}
    for name, role in roles.items():
        with role.scope():
            outputs[name] = module(x)
            assert module.training == (role.optimizer is not None)
        assert module.training and module[0].active is None
    assert len({out.sum().item() for out in outputs.values()}) == 4
    torch.testing.assert_close(outputs["teacher"], net_of(module)(x))
    with roles["student"].scope():
        with pytest.raises(KeyError), roles["teacher"].scope():
            raise KeyError
        assert module.training and module[0].active == "student"


def net_of(module: nn.Module) -> nn.Module:
    """The base alone, as a plain module."""
    plain = net()
    plain.load_state_dict({name: value for name, value in module.state_dict().items() if "lora" not in name})
    return plain


@pytest.mark.parametrize("difference", ["key", "adapter", "none"])
def test_ranks_that_run_different_phases_are_stopped(difference):
    """Catches gradients of two adapters or exit steps added up: FSDP does not mind where shapes agree."""
    def body(rank):
        module = net()
        shard(module, [[module[0]], [module[2]]], init_device_mesh("cpu", (2,)))
        role = make_role(module, dist.group.WORLD)
        role.name = f"student {rank}" if difference == "adapter" else "student"
        try:
            return run_phase(role, [SAMPLES], summed(module), roles=[role], max_grad_norm=1.0,
                             key=rank if difference == "key" else 7).applied
        except AssertionError as error:
            return str(error)

    found = run_ranks(body, 2, timeout_s=10)
    assert found == [True, True] if difference == "none" else all("ranks disagree on the phase" in each for each in found)
