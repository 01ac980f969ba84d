# SPDX-License-Identifier: Apache-2.0
"""The DMD script itself on forked ranks: gradients of any layout against float64, skips, cadence, resume, bad input."""
from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from test_checkpoint import rewrite_manifest
from test_configs import hollow_weights
from test_torchrun import finish, torchrun
from tiny import whole
from tiny_dmd import STORAGES, move_apart, plain_role, role_value, worst_gap, write_config, write_flow, write_samples
from torch.utils.checkpoint import noop_context_fn

import train_dmd
from distill_core import config as cfg
from distill_core import fsdp, ownership, sample
from distill_core import role as role_module
from distill_core.adapters import read_adapter
from distill_core.build import load_flow
from distill_core.checkpoint import open_checkpoint, read_tensor
from distill_core.data import batch_at, read_conditions, read_latents
from distill_core.flow import few_step_states
from distill_core.fsdp import local
from distill_core.lora import use
from distill_core.metrics import Metrics, read_jsonl
from distill_core.models.dit import DiT, dit_config
from distill_core.noise import normal, uniform
from distill_core.ownership import GradientOwnershipError
from distill_core.role import Role, run_phase
from distill_core.run import StopRequest, open_run
from distill_core.topology import make_groups, plan_ranks

CPU = torch.device("cpu")
TRAINED = ("student", "fake_score")


def micro(size: int) -> dict[str, int]:
    """Samples of a micro-batch, for write_config."""
    return {f"dmd__{role}_micro_batch_size_per_gpu": size for role in TRAINED}


def live(path, num_ranks: int, body, overrides=(), *, timeout_s: int = 20):
    """[body(job, world)] of every rank."""
    def on_rank(rank):
        job = train_dmd.prepare(cfg.load(path, overrides), num_ranks)
        return body(job, make_groups(plan_ranks(num_ranks, num_ranks, []), CPU, job.config.topology.timeout_s))

    return run_ranks(on_rank, num_ranks, timeout_s=timeout_s)


def build(job, world, *, apart: bool = True):
    run = train_dmd.build_run(job, world, logging.getLogger("test"))
    if apart:
        move_apart(run.roles.values(), job.config.teacher.path)
    return run


def with_dmd(job, **changes):
    """The job with other dmd options, past the checks of a config."""
    dmd = dataclasses.replace(job.config.dmd, **changes)
    return dataclasses.replace(job, config=dataclasses.replace(job.config, dmd=dmd))


@contextmanager
def replaced(name: str, value, module=train_dmd):
    """Another function in the script for a while; a forked rank's own affair."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield before
    finally:
        setattr(module, name, before)


def gradients_of(run, role: str, attempt):
    """(result, whole gradients by name) of an attempt, as the optimizer is given them; no weight moves."""
    owner, found = run.roles[role], {}

    def keep() -> None:
        found.update({name: whole(p.grad).clone() for name, p in owner.named_trainable() if p.grad is not None})

    owner.optimizer.step = keep
    return attempt(), found


def student_attempt(run):
    return train_dmd.train_student(run, Metrics())


def fake_attempt(run):
    return train_dmd.train_fake_score(run, Metrics(), train_dmd.fake_batches(run, 0))


AT = {"cycle": 1, "attempt": 7, "position": 20}  # anywhere but at the start; the labels come from two epochs


def go_to_the_middle(run) -> None:
    for name, value in AT.items():
        setattr(run, name, value)


# --- gradients ------------------------------------------------------------------------------------------------------

class Reference:
    """The two losses in float64 on plain modules, written out; the noises are the run's own."""

    def __init__(self, config) -> None:
        dmd, self.config = config.dmd, config
        self.adapter = read_adapter(config.teacher.path)
        self.nets = {role: plain_role(role, config) for role in ("teacher", "student", "fake_score")}
        self.ids = torch.arange(dmd.student_batch_size)
        labels = read_conditions(config.data.conditions)
        self.labels = labels[batch_at(AT["position"], dmd.student_batch_size, len(labels), config.seed)]
        self.none = torch.full_like(self.labels, self.adapter.num_classes)

    def noise(self, stream: str):
        return normal(self.adapter.latent_shape, self.ids, seed=self.config.seed, stream=stream,
                      step=AT["attempt"]).double()

    def times(self, stream: str):
        """Law "clamp" with T = 1000."""
        s = ((uniform(self.ids, seed=self.config.seed, stream=stream, step=AT["attempt"]) * 1000).ceil() - 1) / 1000
        shift = self.config.dmd.score_timestep_shift
        return (shift * s / (1 + (shift - 1) * s)).clamp(0.02, 0.98).double()

    def net(self, role: str, x, s, labels=None):
        return self.nets[role][0](x, s, self.labels if labels is None else labels)

    def column(self, s):
        return s.view(-1, *[1] * len(self.adapter.latent_shape))

    def rollout(self, exit_step: int):
        num_steps, x = self.config.dmd.student_steps, self.noise("initial noise")
        for step in range(exit_step + 1):
            s, after = 1 - step / num_steps, 1 - (step + 1) / num_steps
            x0 = x - s * self.net("student", x, torch.full((len(x),), s, dtype=torch.float64))
            x = (1 - after) * x0.detach() + after * self.noise(f"rollout {step + 1}")
        return x0

    def student(self, exit_step: int, *, scale: float | None = None):
        """[B] losses, whose gradient is g / numel."""
        scale = self.config.dmd.teacher_guidance_scale if scale is None else scale
        x, s = self.rollout(exit_step), self.times("student time")
        s1 = self.column(s)
        with torch.no_grad():
            x_s = (1 - s1) * x + s1 * self.noise("score noise")
            with_class, without = self.net("teacher", x_s, s), self.net("teacher", x_s, s, self.none)
            x0_real = x_s - s1 * (without + scale * (with_class - without))
            x0_fake = x_s - s1 * self.net("fake_score", x_s, s)
            g = (x0_fake - x0_real) / self.column((x - x0_real).abs().flatten(1).mean(1))
        return (x * g).flatten(1).mean(1)

    def fake_score(self, exit_step: int):
        with torch.no_grad():
            x = self.rollout(exit_step)
        s, noise = self.times("fake_score time"), self.noise("fake noise")
        v = self.net("fake_score", (1 - self.column(s)) * x + self.column(s) * noise, s)
        return (v - (noise - x)).square().flatten(1).mean(1)

    def gradients(self, role: str, loss):
        leaves = self.nets[role][1]
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
        return {name: gradient for name, gradient in zip(leaves, found) if gradient is not None}


RAGGED = {1: [[[0, 1, 2, 3], [4, 5]]], 2: [[[0, 1], [2]], [[3], [4, 5]]],
          3: [[[0, 1]], [[2, 3, 4]], [[5]]]}  # ids by rank and micro-batch


def draw_ragged(run, batch_size: int, micro_batch_size: int):
    """`draw` where ranks and micro-batches have unequal shares, which no config can ask for."""
    indices = torch.tensor(batch_at(run.position, batch_size, len(run.job.labels), run.job.config.seed))
    return [train_dmd.Batch(run.attempt, torch.tensor(ids), run.job.labels[indices[ids]])
            for ids in RAGGED[run.job.world_size][run.world.rank]]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_equal_plain_float64(tmp_path, ranks, storage):
    """Catches gradients that depend on ranks, shards, storage, recomputation or the cut into micro-batches, and any
    mistake of rollout, noising, guidance, normaliser or target that a curve would not show."""
    path = write_config(tmp_path, "dit", dmd__student_steps=4, dmd__exit_step="round_robin", dmd__fake_update_ratio=4,
                        dmd__student_optim__max_grad_norm=1e9, dmd__fake_score_optim__max_grad_norm=1e9,
                        **STORAGES[storage])
    settings = [(recompute, cut, None) for recompute in (False, True) for cut in (1, 2, "ragged")]
    if ranks != 2:  # what costs time and has been tried: cuts do not depend on how a forward is differentiated
        settings = settings[:2] + settings[-1:]
    settings.append((True, "ragged", 4.0))

    def body(job, world):
        run, found = build(job, world), {}
        for recompute, cut, count in settings:
            size = 6 if cut == "ragged" else cut
            run.job = with_dmd(job, activation_checkpointing=recompute, student_micro_batch_size_per_gpu=size,
                               fake_score_micro_batch_size_per_gpu=size, loss_normalizer=count)
            with replaced("draw", draw_ragged if cut == "ragged" else train_dmd.draw):
                for role, attempt in (("student", student_attempt), ("fake_score", fake_attempt)):
                    go_to_the_middle(run)
                    found[recompute, cut, count, role] = gradients_of(run, role, lambda: attempt(run))
        return found

    reference = Reference(cfg.load(path))
    losses = {"student": reference.student(1), "fake_score": reference.fake_score(0)}
    want = {role: reference.gradients(role, loss.mean()) for role, loss in losses.items()}
    for found in live(path, ranks, body):
        for (recompute, cut, count, role), (result, got) in found.items():
            assert result.applied, (recompute, cut, role)
            scaled = want[role] if count is None else {name: g * 6 / count for name, g in want[role].items()}
            assert worst_gap(got, scaled) < 1e-5, (recompute, cut, count, role)
        fake_loss = losses["fake_score"].mean().item()
        assert found[True, "ragged", None, "fake_score"][0].loss == pytest.approx(fake_loss, rel=1e-5)
    # negative controls: the comparison sees a wrong guidance, a wrong exit, a mean of means and a sample that is lost
    def seen(role, loss):
        return worst_gap(got_of[role], reference.gradients(role, loss)) > 1e-3

    got_of = {role: found[True, "ragged", None, role][1] for role in TRAINED}
    means = torch.tensor([1 / 4] * 4 + [1 / 2] * 2) / 2
    assert seen("student", reference.student(1, scale=1.9).mean()) and seen("student", reference.student(2).mean())
    assert seen("student", (reference.student(1) * means).sum()) and seen("fake_score", reference.fake_score(1).mean())
    assert seen("fake_score", reference.fake_score(0)[:5].mean())


def test_both_storages_give_the_same_updates(tmp_path):
    """Catches a storage that trains, averages or initialises otherwise: adapters on one base or on copies of it."""
    found = []
    for storage in ("lora", "shared"):
        path = write_config(tmp_path, dmd__ema_start_step=2, **micro(3), **STORAGES[storage])

        def body(job, world):
            run = build(job, world, apart=False)
            values = [train_dmd.train_cycle(run) for _ in range(3)]
            return copies(train_dmd.run_tensors(run)), [stable(each) for each in values]

        found.append(live(path, 2, body)[0])
    (lora, lora_values), (shared, shared_values) = found
    assert lora.keys() == shared.keys() and all(torch.equal(lora[name], shared[name]) for name in lora)
    assert lora_values == shared_values and lora_values[2]["student/steps"] == 3
    moved = [name for name in lora if ".optimizer." not in name and "lora_B" in name and lora[name].abs().max() > 1e-3]
    assert len(moved) == 3 * 3 * 3, "student, fake score and EMA have all left the base"
    student, average = lora["student.blocks.0.fc1.lora_B.student"], lora["student_ema.blocks.0.fc1.lora_B.student_ema"]
    assert not torch.equal(student, average)


@pytest.mark.parametrize("storage", STORAGES)
def test_every_optimizer_owns_the_weights_of_its_role_alone(tmp_path, storage):
    """Catches an optimizer over the base, a frozen role or another's adapter: decay and moments would move those."""
    path = write_config(tmp_path, gan__weight=0.1, data__latents=str(tmp_path / "mlp2d.npz"), **STORAGES[storage])

    def body(job, world):
        run = build(job, world)
        owned = {role.name: {id(p) for group in role.optimizer.param_groups for p in group["params"]}
                 for role in train_dmd.trained(run)}
        own = {role.name: {id(p) for _, p in role.named_weights()} for role in train_dmd.trained(run)}
        sets = [{id(p) for _, p in run.roles["student_ema"].named_weights()}, *owned.values()]
        return owned == own, list(owned), len(set.union(*sets)) == sum(map(len, sets))

    assert live(path, 1, body) == [(True, ["student", "fake_score", "discriminator"], True)]


def copies(tensors) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).clone() for name, tensor in tensors.items()}


def stable(values: dict) -> dict:
    """Metrics without those that differ between any two runs."""
    return {name: value for name, value in values.items()
            if not name.startswith(("time", "eval/time", "samples_per_s", "memory"))}


# --- roles that run between a forward and its backward --------------------------------------------------------------

@pytest.mark.parametrize("storage", STORAGES)
def test_other_roles_between_forward_and_backward_change_no_bit(tmp_path, storage):
    """Catches teacher and fake forwards that disturb the student's pending graph or what its recomputation runs."""
    path = write_config(tmp_path, dmd__activation_checkpointing=True, dmd__student_micro_batch_size_per_gpu=2,
                        dmd__student_batch_size=8, **STORAGES[storage])

    def body(job, world):
        run, known = build(job, world), []

        def alone():
            """The same attempt without any forward of another role."""
            exit_step, values = train_dmd.exit_step_of(run, "student", run.cycle), iter(known)

            def compute(batch):
                x = train_dmd.rollout(run, "student", batch, exit_step)
                return train_dmd.phase_loss(run, surrogate(x, next(values)), 8)

            return run_phase(run.roles["student"], train_dmd.draw(run, 8, 2), compute, roles=list(run.roles.values()),
                             max_grad_norm=10.0)

        go_to_the_middle(run)
        surrogate = train_dmd.surrogate_per_sample
        with replaced("surrogate_per_sample", lambda x, g: known.append(g) or surrogate(x, g)):
            _, together = gradients_of(run, "student", lambda: student_attempt(run))
        found = []
        for factor in (1, -1):  # negative control: other values
            known[:] = [factor * g for g in known]
            go_to_the_middle(run)
            found.append(gradients_of(run, "student", alone)[1])
        return together, *found

    for together, apart, other in live(path, 2, body):
        assert together.keys() == apart.keys() and all(torch.equal(together[name], apart[name]) for name in apart)
        assert not any(torch.equal(together[name], other[name]) for name in other)


def test_recomputation_runs_the_adapter_of_the_forward(tmp_path):
    """Catches activation checkpointing that recomputes with whatever adapter is active at backward time."""
    path = write_config(tmp_path, dmd__activation_checkpointing=True, dmd__student_micro_batch_size_per_gpu=3,
                        **STORAGES["shared"])

    def body(job, world):
        run, phase_loss = build(job, world), train_dmd.phase_loss

        def leave_another_active(*args):
            use(run.roles["student"].module, "fake_score").__enter__()
            return phase_loss(*args)

        def attempt():
            go_to_the_middle(run)
            return gradients_of(run, "student", lambda: student_attempt(run))[1]

        clean = attempt()
        with replaced("phase_loss", leave_another_active):
            other_active = attempt()
            with replaced("checkpoint_context_fn", lambda module: noop_context_fn):
                return clean, other_active, attempt()

    for clean, other_active, unscoped in live(path, 2, body):
        assert clean.keys() == other_active.keys() and all(torch.equal(clean[n], other_active[n]) for n in clean)
        assert worst_gap(unscoped, clean) > 1e-2, "negative control: wrong gradients, and no error"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_leak_into_the_fake_score_is_named(tmp_path, storage):
    """Catches a student's loss that trains the fake score too, which would then agree with whatever is wrong."""
    path = write_config(tmp_path, **STORAGES[storage])

    def body(job, world):
        run, losses_of = build(job, world), train_dmd.student_losses

        def leaking(run, batch, x, metrics):
            s = torch.full((len(x),), 0.5)
            return losses_of(run, batch, x, metrics) + run.predict_x0("fake_score", x, s, batch.labels).mean(1)

        with replaced("student_losses", leaking), pytest.raises(GradientOwnershipError) as caught:
            student_attempt(run)
        return str(caught.value)

    for message in live(path, 2, body):
        assert message.startswith("the student phase gave gradients to parameters it does not own: fake_score.blocks.0")
        assert ("lora_A.fake_score" in message) == (storage != "full")


# --- what is not finite ---------------------------------------------------------------------------------------------

def poison(fault: str, world):
    """Replaces a function of the script on the last rank, for both roles."""
    bad = math.nan if world.rank == world.plan.world_size - 1 else 1.0
    phase_loss, gaussian = train_dmd.phase_loss, train_dmd.gaussian

    def spoiled_loss(run, losses, batch_size):
        loss = phase_loss(run, losses, batch_size)
        return loss._replace(value=loss.value * bad)

    def spoiled_gradient(run, losses, batch_size):
        losses.register_hook(lambda gradient: gradient * bad)
        return phase_loss(run, losses, batch_size)

    def spoiled_input(run, batch, stream):
        noise = gaussian(run, batch, stream)
        if stream in ("initial noise", "fake noise"):
            noise[-1, 0] *= bad
        return noise

    return {"loss": ("phase_loss", spoiled_loss), "gradient": ("phase_loss", spoiled_gradient),
            "input": ("gaussian", spoiled_input)}[fault]


@pytest.mark.parametrize("storage, batch", [("full", "reuse_student"), ("lora", "fresh"), ("shared", "reuse_student")])
def test_one_ranks_nan_skips_on_all_ranks_and_leaves_no_trace(tmp_path, storage, batch):
    """Catches a skip decided locally, moments, averages or schedules that a skip moves, and an attempt made again."""
    path = write_config(tmp_path, max_cycles=10, dmd__fake_batch=batch, dmd__student_optim__schedule="linear",
                        dmd__fake_score_optim__schedule="linear", **micro(3), **STORAGES[storage])

    def everything(run):
        counts = [role.optimizer.state[p]["step"].clone() for role in train_dmd.trained(run)
                  for _, p in role.named_trainable()]
        return [local(t).clone() for t in train_dmd.run_tensors(run).values()] + counts

    def body(job, world):
        run, found = build(job, world), []
        found.append(train_dmd.train_cycle(run))
        for fault in ("loss", "gradient", "input"):
            before = everything(run)
            with replaced(*poison(fault, world)):
                values = train_dmd.train_cycle(run)
            same = all(map(torch.equal, before, everything(run)))
            found.append(values | {"same": same})
        found.append(train_dmd.train_cycle(run))
        return found, run.cycle, run.attempt, run.position, not all(map(torch.equal, before, everything(run)))

    for (first, *skipped, last), cycle, attempt, position, moved in live(path, 2, body):
        assert cycle == 5 and attempt == 15 and position == 6 * (10 if batch == "reuse_student" else 15) and moved
        for number, values in enumerate(skipped, start=1):
            assert values["same"]
            assert values["student/update_applied"] == values["fake_score/update_applied"] == 0
            assert (values["student/skip_nonfinite"], values["fake_score/skip_nonfinite"]) == (number, 2 * number)
            assert (values["student/steps"], values["fake_score/steps"]) == (1, 2)
        assert (last["student/steps"], last["fake_score/steps"], last["student/update_applied"]) == (2, 4, 1)
        assert [values["student/lr"] for values in (first, *skipped, last)] == pytest.approx(
            [0.02] + 4 * [0.02 * 0.9]), "of 10 updates, one is done"
        assert [values["fake_score/lr"] for values in (first, *skipped, last)] == pytest.approx(
            [0.03 * (1 - done / 20) for done in (1, 2, 2, 2, 3)])
        assert all(math.isfinite(last[name]) for name in ("dmd/loss", "fake_score/loss", "student/grad_norm"))


# --- training inputs are sampling inputs ----------------------------------------------------------------------------

@pytest.mark.parametrize("storage", ["full", "shared"])
@pytest.mark.parametrize("mode", ["sde", "ode"])
def test_training_inputs_equal_the_samplers_bit_for_bit(tmp_path, mode, storage):
    """Catches a student that is trained on other inputs than it meets when it samples: grid, noise, order, exit."""
    path = write_config(tmp_path, "dit", dmd__rollout=mode, dmd__rollout_timestep_shift=3.0, eval__num_samples=7,
                        **STORAGES[storage])

    def body(job, world):
        run, seen, predict = build(job, world), [], train_dmd.predict_x0
        ids = torch.arange(3) + 3 * world.rank
        batch = train_dmd.Batch(sample.NOISE_STEP, ids, ids % 4)

        def watched(adapter, module, x_s, s, *args, **options):
            seen.append((x_s.detach().clone(), s.clone()))
            return predict(adapter, module, x_s, s, *args, **options)

        trained = []
        with replaced("predict_x0", watched):
            for exit_step in range(3):
                seen.clear()
                train_dmd.rollout(run, "student", batch, exit_step)
                trained.append(list(seen))
        with torch.no_grad():
            states = few_step_states(lambda x, s: run.predict_x0("student", x, s, batch.labels),
                                     train_dmd.gaussian(run, batch, "initial noise"), job.grid, mode=mode,
                                     noise_at=lambda k: train_dmd.gaussian(run, batch, f"rollout {k}"))
            states = [x for _, x in states]
        return trained, states, sampled(job, run, batch) if storage == "full" else None

    def sampled(job, run, batch):
        """What sample.py gives to a plain module with the student's weights; its samples are those of an evaluation."""
        module, seen, predict = load_flow(job.config.teacher.path, job.adapter), [], sample.predict_x0
        module.load_state_dict(copies(dict(run.roles["student"].named_weights())))
        evaluated = train_dmd.draw_samples(run, lambda batch: train_dmd.rollout(run, "student", batch, 2))
        drawn = sample.draw(job.adapter, module, sample.labels_of(7, range(4)), sample.Sampling(3, mode, 3.0))
        torch.testing.assert_close(evaluated, drawn, rtol=1e-4, atol=1e-5)

        def watched(adapter, module, x_s, s, *args, **options):
            seen.append((x_s.clone(), s.clone()))
            return predict(adapter, module, x_s, s, *args, **options)

        with replaced("predict_x0", watched, sample), torch.no_grad():
            sample._draw_batch(job.adapter, module, batch.ids, batch.labels, sample.Sampling(3, mode, 3.0), 0)
        return list(seen)

    for trained, states, drawn in live(path, 2, body):
        assert [len(steps) for steps in trained] == [1, 2, 3] and len(states) == 3
        for steps in trained:
            for step, (x, s) in enumerate(steps):
                assert torch.equal(x, states[step])
                assert drawn is None or torch.equal(x, drawn[step][0]) and torch.equal(s, drawn[step][1])
        assert not any(torch.equal(a, b) for a, b in zip(states, states[1:])), "negative control: another step"


# --- cadence --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio, warmup", [(1, 0), (2, 1), (5, 0)])
def test_cadence_counters_and_schedules(tmp_path, ratio, warmup):
    """Catches 1:K read as 1:K - 1, a warm-up that trains the student, a fake schedule on the student's horizon."""
    path = write_config(tmp_path, max_cycles=8, dmd__fake_update_ratio=ratio, dmd__fake_warmup_cycles=warmup,
                        dmd__student_optim__schedule="linear", dmd__fake_score_optim__schedule="linear", **micro(6))

    def body(job, world):
        run, order = build(job, world), []

        def logged(role, attempt):
            def call(run, metrics, *args):
                order.append((role, run.cycle, run.attempt))
                return attempt(run, metrics, *args)
            return call

        with replaced("train_student", logged("student", train_dmd.train_student)):
            with replaced("train_fake_score", logged("fake_score", train_dmd.train_fake_score)):
                return [train_dmd.train_cycle(run) for _ in range(3)], order, run.position, run.attempt

    [(values, order, position, attempt)] = live(path, 1, body)
    want = [(role, cycle) for cycle in range(3) for role in ["student"] * (cycle >= warmup) + ["fake_score"] * ratio]
    assert order == [(role, cycle, number) for number, (role, cycle) in enumerate(want)]
    assert attempt == len(want) and position == 6 * len(want)
    for cycle, line in enumerate(values):
        students, fakes = max(0, cycle + 1 - warmup), (cycle + 1) * ratio
        assert (line["student/steps"], line["fake_score/steps"]) == (students, fakes)
        assert (line["student/update_applied"], line["fake_score/update_applied"]) == (int(cycle >= warmup), ratio)
        assert line["fake_score/lr"] == pytest.approx(0.03 * (1 - (fakes - 1) / (8 * ratio)))
        assert ("student/lr" in line) == ("dmd/loss" in line) == (students > 0)
        if students:
            assert line["student/lr"] == pytest.approx(0.02 * (1 - (students - 1) / (8 - warmup)))


@pytest.mark.parametrize("rule", ["uniform", "last", "round_robin"])
def test_exit_steps_and_reused_batches(tmp_path, rule):
    """Catches ranks that train different steps, a fake attempt on other samples than it should reuse, and conditions
    that are drawn, or noises that are shared, where a batch is reused."""
    path = write_config(tmp_path, dmd__exit_step=rule, dmd__fake_batch="reuse_student", **micro(3))

    def body(job, world):
        run, exits, students, fakes = build(job, world), {True: [], False: []}, [], []
        rollout, train_fake_score = train_dmd.rollout, train_dmd.train_fake_score

        def watched(run, role, batch, exit_step):
            x = rollout(run, role, batch, exit_step)
            if torch.is_grad_enabled():
                students.append((run.cycle, batch.ids, batch.labels, x.detach().clone()))
            exits[torch.is_grad_enabled()].append(exit_step)
            return x

        def fake(run, metrics, batches):
            fakes.append((run.cycle, run.position, batches))
            return train_fake_score(run, metrics, batches)

        with replaced("rollout", watched), replaced("train_fake_score", fake):
            values = [train_dmd.train_cycle(run) for _ in range(4)]
        return exits, students, fakes, values

    first, second = live(path, 2, body)
    assert first[0] == second[0] and [len(steps) for steps in first[0].values()] == [4, 4]
    assert first[0][True] != first[0][False] or rule != "uniform", "each role draws its own"
    for steps in first[0].values():  # of the student, and of the fake score's own batches
        if rule == "uniform":
            assert set(steps) <= {0, 1, 2}
        else:
            assert steps == {"last": [2, 2, 2, 2], "round_robin": [0, 1, 2, 0]}[rule]
    for exits, students, fakes, values in (first, second):
        for cycle, (reused, own) in enumerate(zip(fakes[::2], fakes[1::2])):
            _, ids, labels, x = students[cycle]
            for name, want in (("ids", ids), ("labels", labels), ("x", x)):
                assert torch.equal(torch.cat([getattr(batch, name) for batch in reused[2]]), want)
            assert reused[1] == 12 * cycle + 6 and own[1] == 12 * cycle + 12, "conditions drawn: none for the reused"
            assert {batch.attempt for batch in reused[2]} == {3 * cycle + 1}, "its own noises and noise levels"
            assert not torch.equal(torch.cat([batch.x for batch in own[2]]), x)
            assert values[cycle][f"dmd/rollout_exit/{exits[True][cycle]}"] == 1
            assert sum(values[cycle][f"dmd/rollout_exit/{step}"] for step in range(3)) == 1


@pytest.mark.parametrize("storage", ["full", "shared"])
def test_the_average_follows_applied_updates(tmp_path, storage):
    """Catches an average that starts early or late, moves at a skip or in a warm-up cycle, or is of another role."""
    path = write_config(tmp_path, max_cycles=9, dmd__ema_start_step=3, dmd__fake_warmup_cycles=1,
                        dmd__fake_update_ratio=1, **micro(3), **STORAGES[storage])

    def body(job, world):
        run, rows = build(job, world, apart=False), []
        for cycle in range(7):
            with replaced(*(poison("loss", world) if cycle in (2, 5) else ("draw", train_dmd.draw))):
                train_dmd.train_cycle(run)
            tensors = [torch.cat([whole(t).flatten() for t in train_dmd.by_position(run.roles[role]).values()])
                       for role in ("student", "student_ema")]
            rows.append((run.roles["student"].successes, *tensors))
        return rows

    for rows in live(path, 2, body):
        assert [successes for successes, *_ in rows] == [0, 1, 1, 2, 3, 3, 4]
        average = rows[0][2]
        for before, (successes, student, ema) in zip(rows, rows[1:]):
            if successes > before[0]:
                average = student if successes < 3 else 0.75 * average + 0.25 * student
            torch.testing.assert_close(ema, average, rtol=0, atol=1e-6)
        assert torch.equal(rows[3][1], rows[3][2]) and not torch.allclose(rows[6][1], rows[6][2], atol=1e-4)


# --- stop and resume ------------------------------------------------------------------------------------------------

def whole_run(job, world, name: str, *, stop_at: int | None = None) -> None:
    """What train_dmd.py does on each rank after the command line; a stop is asked for after `stop_at` cycles."""
    job = dataclasses.replace(job, run_dir=job.run_dir.with_name(name))
    log = open_run(job.run_dir, cfg.to_yaml(job.config), world.rank)
    log.handlers = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    stop = StopRequest(job.run_dir)
    if stop_at is not None:
        stop.wanted = lambda: world.rank == 0 and len(lines_of(job.run_dir, "train")) == stop_at
    train_dmd.train(job, world, log, stop)


def lines_of(run_dir, *kinds: str) -> list[dict]:
    return [stable(line) for line in read_jsonl(run_dir / "metrics.jsonl") if line["kind"] in kinds]


def saved_tensors(folder) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(folder)
    return {name: read_tensor(saved, name) for name in saved.tensors}


def same_tensors(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def eventful(folder, storage: str, **changes):
    """A config with all that has a state: schedules, an average in its warm-up, reused batches, a discriminator."""
    optim = {f"dmd__{role}_optim__{key}": value for role in TRAINED
             for key, value in (("schedule", "linear"), ("warmup_steps", 2))}
    gan = {"gan__weight": 0.3, "data__latents": str(folder / "mlp2d.npz")}
    return write_config(folder, max_cycles=3, dmd__ema_start_step=2, dmd__fake_batch="reuse_student", **micro(3),
                        eval={"every": 2, "num_samples": 5, "num_teacher_steps": 2},
                        **{**STORAGES[storage], **optim, **gan, **changes})


@pytest.mark.parametrize("storage", STORAGES)
def test_resume_on_fewer_ranks(tmp_path, storage):
    """Catches state bound to a number of ranks: the next cycles must see the same conditions and noises."""
    path, cycles = eventful(tmp_path, storage), ["max_cycles=4"]
    live(path, 2, lambda job, world: whole_run(job, world, "straight"), cycles)
    live(path, 2, lambda job, world: whole_run(job, world, "moved", stop_at=1), cycles)
    live(path, 1, lambda job, world: whole_run(job, world, "moved"), cycles)
    straight, moved = (lines_of(tmp_path / "runs" / name, "train")[1:] for name in ("straight", "moved"))
    assert [line["step"] for line in straight] == [line["step"] for line in moved] == [2, 3, 4]
    for place, tolerance in ((0, 1e-5), (2, 1e-4)):
        for key in ("dmd/loss", "fake_score/loss"):
            assert moved[place][key] == pytest.approx(straight[place][key], abs=tolerance), (place, key)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_straight_run_equals_stop_and_resume(tmp_path, storage):
    """Catches any state that a resume forgets: moments, counters, average, schedules, conditions, noises, head."""
    path = eventful(tmp_path, storage)

    def body(job, world):
        whole_run(job, world, "straight")
        whole_run(job, world, "split", stop_at=1)
        if world.rank == 0:
            shutil.copytree(tmp_path / "runs/split", tmp_path / "runs/forgetful")
        whole_run(job, world, "split")
        if storage == "shared":  # negative control: without AdamW's step counts and the schedules' places
            with replaced("restore_role", lambda role, state: None):
                whole_run(job, world, "forgetful")

    live(path, 2, body)
    runs = tmp_path / "runs"
    assert (runs / "split/DONE").exists() and not (runs / "split/PREEMPTED").exists()
    end = "checkpoints/step_00000003"
    straight, split = (saved_tensors(runs / name / end) for name in ("straight", "split"))
    assert same_tensors(straight, split)
    assert storage != "shared" or not same_tensors(straight, saved_tensors(runs / "forgetful" / end))
    curve = lines_of(runs / "straight", "train", "eval")
    assert curve == lines_of(runs / "split", "train", "eval")
    assert [(line["step"], line["kind"]) for line in curve] == [
        (0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (3, "eval")]
    roles = {"student", "fake_score", "discriminator", "student_ema"}
    assert {name.split(".")[0] for name in straight} == roles, "no teacher, no base"
    assert not any(name.startswith("student_ema.optimizer") for name in straight)
    assert all(".lora_" in name or name.startswith("discriminator") for name in straight) == (storage != "full")
    if storage != "lora":
        resume_on_three_ranks(path, runs / "split", straight, curve)


def resume_on_three_ranks(path, run_dir, straight, curve) -> None:
    """Weights, moments and average bit for bit, and a cycle that continues the curve."""
    (run_dir / "checkpoints/step_00000003").rename(run_dir / "last")
    stopped = saved_tensors(run_dir / "checkpoints/step_00000001")

    def body(job, world):
        run = build(dataclasses.replace(job, run_dir=run_dir), world)
        assert train_dmd.resume(run).name == "step_00000001"
        loaded = copies(train_dmd.run_tensors(run))
        steps = {float(run.roles[role].optimizer.state[p]["step"]) for role in ("fake_score", "discriminator")
                 for _, p in run.roles[role].named_trainable()}
        return loaded, steps, train_dmd.train_cycle(run)

    micro = [f"dmd.{role}_micro_batch_size_per_gpu=2" for role in TRAINED]
    for loaded, steps, values in live(path, 3, body, micro):
        assert same_tensors(loaded, stopped) and not same_tensors(loaded, straight) and steps == {2.0}
        [second] = [line for line in curve if (line["step"], line["kind"]) == (2, "train")]
        for name in ("dmd/loss", "fake_score/loss", "student/grad_norm", "gan/discriminator_loss"):
            assert values[name] == pytest.approx(second[name], rel=1e-4), name


def test_a_run_killed_while_a_save_is_in_flight_continues_from_the_one_before(tmp_path):
    """Catches a half-written step that is resumed, a start that trips over it, and a write that reaches the new run."""
    path = write_config(tmp_path, max_cycles=3, checkpoint={"every": 1}, **STORAGES["shared"])
    held, real_write, real_cycle = threading.Event(), train_dmd.ckpt._write_shard, train_dmd.train_cycle

    def write(shard, buffers):
        if "step_00000002" in shard.parent.name:
            held.wait(20)
        return real_write(shard, buffers)

    def cycle(run, saver):
        if run.cycle == 2:
            raise RuntimeError("killed")
        return real_cycle(run, saver)

    def body(job, world):
        whole_run(job, world, "straight")
        with replaced("_write_shard", write, train_dmd.ckpt), replaced("train_cycle", cycle):
            with pytest.raises(RuntimeError, match="killed"):
                whole_run(job, world, "killed")
        names = {entry.name.split("-")[0] for entry in (tmp_path / "runs/killed/checkpoints").iterdir()}
        torch.distributed.barrier()
        held.set()  # the thread that is left over goes on while the new run saves
        whole_run(job, world, "killed")
        return names

    assert live(path, 2, body) == [{"latest", "step_00000001", ".tmp"}] * 2
    runs, end = tmp_path / "runs", "checkpoints/step_00000003"
    assert lines_of(runs / "killed", "event")[-1]["message"].endswith("step_00000001")
    assert same_tensors(*(saved_tensors(runs / name / end) for name in ("straight", "killed")))
    assert lines_of(runs / "straight", "train") == lines_of(runs / "killed", "train")
    assert {entry.name for entry in (runs / "killed/checkpoints").iterdir()} == {
        "latest", "step_00000001", "step_00000002", "step_00000003"}


def test_a_written_save_is_published_by_the_end_of_the_next_cycle(tmp_path):
    """Catches a crash that costs steps whose checkpoint lies on disk already. Control: without polls half way."""
    path = write_config(tmp_path, max_cycles=3, **micro(6), **STORAGES["shared"])

    def body(job, world):
        run, published = build(job, world, apart=False), []
        for half_way in (True, False):
            saver = train_dmd.open_saver(run, None)
            train_dmd.start_saving(run, saver)
            wait([saver._task])
            train_dmd.train_cycle(run, saver if half_way else None)
            saver.poll()
            published.append(saver.published is not None)
            saver.finish()
        return published

    assert live(path, 1, body) == [[True, False]]


def test_a_foreign_or_damaged_state_is_refused_before_a_resume_changes_weights(tmp_path):
    """Catches a traceback for the checkpoint of another job, or of a state that does not hold together."""
    path = write_config(tmp_path, max_cycles=1, **micro(6), **STORAGES["shared"])
    manifest = tmp_path / "runs/tiny/checkpoints/step_00000001/manifest.json"

    def body(job, world):
        whole_run(job, world, "tiny")
        run, good = build(job, world), manifest.read_bytes()
        before, state = copies(train_dmd.run_tensors(run)), json.loads(good)["state"]
        roles = state["roles"]
        messages = []
        for changes in ({"job": "opd"}, {"fingerprints": [1]}, {"fingerprints": None}, {"roles": None},
                        {"roles": {"student": roles["student"]}}, {"position": "x"}, {"position": -5},
                        {"roles": roles | {"student": roles["student"] | {"successes": 10**30}}}, {"sampling": 3}):
            rewrite_manifest(manifest.parent, state=state | changes)
            for refuse in (lambda: train_dmd.prepare(job.config, 1), lambda: train_dmd.resume(run)):
                with pytest.raises(ValueError) as caught:
                    refuse()
                messages.append(str(caught.value))
        assert same_tensors(before, train_dmd.run_tensors(run)) and run.cycle == 0
        manifest.write_bytes(good)
        train_dmd.resume(run)  # control
        assert not same_tensors(before, train_dmd.run_tensors(run)) and run.cycle == 1
        return messages

    [messages] = live(path, 1, body)
    assert len(messages) == 18
    for message in messages:
        assert message.startswith(f"{manifest}: ") and "\n" not in message, message


def test_drift_is_refused_and_free_keys_are_free(tmp_path):
    """Catches a run that silently continues with another learning rate, adapter, teacher or data."""
    path = write_config(tmp_path, max_cycles=1, **micro(6), **STORAGES["shared"])
    live(path, 1, lambda job, world: whole_run(job, world, "tiny"))

    def refusal(*overrides: str) -> str:
        with pytest.raises(ValueError) as caught:
            train_dmd.prepare(cfg.load(path, overrides), 1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    message = refusal("dmd.student_optim.lr=0.5", "lora.alpha=7")
    assert "dmd.student_optim.lr: saved 0.02, now 0.5" in message and "lora.alpha: saved null, now 7.0" in message
    assert "allow_drift='[dmd.student_optim.lr,lora.alpha]'" in message
    train_dmd.prepare(cfg.load(path, ["lora.alpha=7", "checkpoint.allow_drift=[lora.alpha]"]), 1)
    train_dmd.prepare(cfg.load(path, ["max_cycles=9", "eval.every=1", "dmd.student_micro_batch_size_per_gpu=1",
                                      "dmd.activation_checkpointing=true", "dmd.export_role=student"]), 1)
    (tmp_path / "mlp2d").rename(tmp_path / "moved")
    train_dmd.prepare(cfg.load(path, [f"teacher.path={tmp_path / 'moved'}"]), 1)
    (tmp_path / "moved").rename(tmp_path / "mlp2d")
    assert "max_cycles" in refusal("max_cycles=9", "dmd.student_optim.schedule=linear"), "a schedule needs its end"
    write_flow(tmp_path / "other", seed=3)
    assert "teacher.weights" in refusal(f"teacher.path={tmp_path / 'other'}")
    write_samples(tmp_path / "other.npz", 23, seed=9)
    assert "data.conditions.sha256" in refusal(f"data.conditions={tmp_path / 'other.npz'}")


def test_every_option_is_either_free_or_in_the_fingerprint(tmp_path):
    """Catches an option that changes the computation and may drift silently, and one that locks a run for no reason."""
    free = {"name", "run_root", "max_cycles", "device", "teacher.path", "data.conditions", "data.latents",
            "dmd.student_micro_batch_size_per_gpu", "dmd.fake_score_micro_batch_size_per_gpu", "dmd.export_role",
            "dmd.convention", "dmd.activation_checkpointing"}
    path = write_config(tmp_path, gan__weight=0.1, data__latents=str(tmp_path / "mlp2d.npz"), **STORAGES["shared"])
    job = train_dmd.prepare(cfg.load(path), 1)
    prints, sections = train_dmd.fingerprints(job), ("topology.", "eval.", "checkpoint.", "metrics.")
    for option in cfg.flatten(job.config):
        assert (option in prints) != (option in free or option.startswith(sections)), option
    assert {"data.conditions.sha256", "data.latents.sha256", "data.latents.labels", "teacher.weights"} <= prints.keys()
    batch = train_dmd.prepare(cfg.load(write_config(tmp_path, dmd__normalizer="batch")), 1)
    prints = train_dmd.fingerprints(batch)
    assert prints["dmd.student_micro_batch_size_per_gpu"] == 1
    assert not any(option.startswith(("lora.", "gan.")) for option in prints), "what is not read may change"


# --- discriminator --------------------------------------------------------------------------------------------------

class GANReference(Reference):
    """The adversarial terms in float64, by autograd through everything at once."""

    def __init__(self, config) -> None:
        super().__init__(config)
        width = self.adapter.feature_size
        shapes = {"hidden.weight": (width, width), "hidden.bias": (width,), "score.weight": (1, width),
                  "score.bias": (1,)}
        self.head = {name: role_value("discriminator", name, torch.zeros(shape)).double().requires_grad_()
                     for name, shape in shapes.items()}
        self.nets["discriminator"] = (None, self.head)
        x, labels = read_latents(config.data.latents)
        places = batch_at(AT["attempt"] * len(self.ids), len(self.ids), len(x), config.seed + 1)
        self.real, self.real_labels = x[places].double(), labels[places]

    def logits(self, x, labels, stream: str):
        s = self.times("fake_score time")
        x_s = (1 - self.column(s)) * x + self.column(s) * self.noise(stream)
        hidden = self.nets["fake_score"][0](x_s, s, labels, features=1)[1]
        centred = hidden - hidden.mean(-1, keepdim=True)
        hidden = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        hidden = torch.nn.functional.silu(hidden @ self.head["hidden.weight"].T + self.head["hidden.bias"])
        return (hidden @ self.head["score.weight"].T + self.head["score.bias"]).mean((1, 2))

    def generator(self, exit_step: int):
        return torch.log1p(torch.exp(-self.logits(self.rollout(exit_step), self.labels, "gan noise")))

    def discriminator(self, exit_step: int):
        drawn = self.logits(self.rollout(exit_step).detach(), self.labels, "gan noise")
        real = self.logits(self.real, self.real_labels, "gan noise of real")
        return torch.log1p(torch.exp(drawn)) + torch.log1p(torch.exp(-real))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_adversarial_gradients_equal_plain_float64(tmp_path, ranks, storage):
    """Catches an adversarial term of wrong sign, weight or sample, on another number of ranks, and a head or a fake
    score that the generator's loss trains."""
    path = write_config(tmp_path, "dit", gan__weight=0.7, gan__discriminator_weight=0.4, dmd__exit_step="round_robin",
                        data__latents=str(tmp_path / "dit.npz"), dmd__student_steps=4, dmd__fake_update_ratio=5,
                        dmd__student_optim__max_grad_norm=1e9, dmd__fake_score_optim__max_grad_norm=1e9, **micro(3),
                        dmd__activation_checkpointing=storage == "shared", **STORAGES[storage])

    def body(job, world):
        run, foreign, is_zero = build(job, world), [], ownership._is_zero
        with replaced("_is_zero", lambda gradient: foreign.append(1) or is_zero(gradient), ownership):
            go_to_the_middle(run)
            _, student = gradients_of(run, "student", lambda: student_attempt(run))
            go_to_the_middle(run)
            batches = train_dmd.fake_batches(run, 0)
            fake, head = (gradients_of(run, role, lambda: attempt(run, Metrics(), batches)) for role, attempt in (
                ("fake_score", train_dmd.train_fake_score), ("discriminator", train_dmd.train_discriminator)))
        return {"student": student, "fake_score": fake[1], "discriminator": head[1]}, head[0].loss, len(foreign)

    reference = GANReference(cfg.load(path))
    generator, discriminator = reference.generator(1), reference.discriminator(1)
    losses = {"student": reference.student(1) + 0.7 * generator, "discriminator": discriminator,
              "fake_score": reference.fake_score(1) + 0.4 * discriminator}
    want = {role: reference.gradients(role, loss.mean()) for role, loss in losses.items()}
    for got, loss, num_foreign in live(path, ranks, body):
        for role in want:  # the head's own gradients are small differences between real and drawn
            assert worst_gap(got[role], want[role]) < (3e-5 if role == "discriminator" else 1e-5), role
        assert loss == pytest.approx(discriminator.mean().item(), rel=1e-5)
        assert storage == "shared" or num_foreign == 0, "a gradient, be it 0, for what the phase does not own"
    without = {"student": reference.student(1), "fake_score": reference.fake_score(1), "discriminator": -discriminator}
    for role, loss in without.items():
        assert worst_gap(got[role], reference.gradients(role, loss.mean())) > 1e-3, "negative control"


def test_a_generator_loss_through_the_parameters_is_refused(tmp_path):
    """Catches a detour around the parameters that no longer is one: head and fake score would learn to please."""
    path = write_config(tmp_path, gan__weight=0.7, data__latents=str(tmp_path / "mlp2d.npz"))

    def body(job, world):
        run = build(job, world)

        def straight(run, batch, x, g, metrics):
            head = run.roles["discriminator"].module
            return -head(train_dmd.features(run, batch, x, batch.labels, "gan noise"))

        with replaced("generator_losses", straight):
            with pytest.raises(GradientOwnershipError, match=r"discriminator\.hidden\.bias, .*fake_score\.blocks"):
                student_attempt(run)

    live(path, 1, body)


# --- bfloat16 -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_are_reduced_in_fp32_under_bf16_compute(tmp_path, storage):
    """Catches the reduce dtype that FSDP2 fixes at a module's first forward: sums of ranks rounded to bf16."""
    path = write_config(tmp_path, dmd__dtype="bfloat16", teacher__dtype="bfloat16", **micro(3), **STORAGES[storage])

    def body(job, world):
        run, found = build(job, world), {}
        for role, attempt in (("student", student_attempt), ("fake_score", fake_attempt)):
            reduced = []
            with replaced("scale_grads", lambda parameters, factor: reduced.extend(local(p.grad) for p in parameters),
                          role_module):
                values = attempt(run)
            found[role] = ({g.dtype for g in reduced}, sum(int((g != g.bfloat16()).sum()) for g in reduced),
                           math.isfinite(values.loss))
        return found

    def in_bf16(param_dtype, reduce_dtype, cast_forward_inputs):
        return policy(param_dtype, torch.bfloat16, cast_forward_inputs=cast_forward_inputs)

    for found in live(path, 2, body):
        assert all(dtypes == {torch.float32} and num_fine > 100 and finite
                   for dtypes, num_fine, finite in found.values())
    policy = fsdp.MixedPrecisionPolicy
    with replaced("MixedPrecisionPolicy", in_bf16, fsdp):  # negative control
        for found in live(path, 2, body):
            assert all(num_fine == 0 for _, num_fine, _ in found.values())


# --- bad input ------------------------------------------------------------------------------------------------------

BAD = {
    "frozen role with an optimizer": (["dmd.teacher_optim.lr=1e-5"], "role teacher is frozen and takes no optimizer"),
    "shared storage without LoRA": (["dmd.role_storage=shared_base_adapters"], "lora.rank: 0"),
    "two roles with one adapter": (["lora.rank=2", "lora.adapters=[a,b,a]"], "gives two roles one name"),
    "unknown recipe": (["dmd.recipe=dmd3"], "expected one of dmd2, got 'dmd3'"),
    "unknown profile": (["dmd.profile=regression"], "expected one of distribution_only"),
    "ratio below 1": (["dmd.fake_update_ratio=0"], "dmd.fake_update_ratio: must be >= 1"),
    "shift below 1": (["dmd.score_timestep_shift=0.5"], "dmd.score_timestep_shift: must be >= 1"),
    "sigma range out of order": (["dmd.score_sigma_min=0.5", "dmd.score_sigma_max=0.4"], "dmd.score_sigma_min: 0.5"),
    "GAN without real latents": (["gan.weight=0.1"], "data.latents: null"),
    "batch not divisible": (["topology.world_size=4"], "dmd.student_batch_size: 6 is not divisible by 4 ranks"),
    "EMA decay above 1": (["dmd.ema_decay=1.5"], "dmd.ema_decay: must be in [0, 1]"),
    "missing teacher folder": (["teacher.path=nowhere"], "nowhere"),
    "missing conditions": (["data.conditions=nothing.npz"], "nothing.npz"),
    "label out of range": (["data.conditions=FOLDER/wide.npz"], "wide.npz: labels[1]: 4 is no class"),
    "latents of another shape": (["gan.weight=0.1", "data.latents=FOLDER/wide.npz"], "samples of shape [3]"),
    "teacher of another shape": (["teacher.path=FOLDER/thin"], "thin"),
    "unknown LoRA target": (["lora.rank=2", "lora.targets=[attn.q]"], "LoRA target 'attn.q' names no layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, name):
    """Catches tracebacks, exit code 1, and faults that are only found after the ranks have started."""
    path = write_config(tmp_path)
    labels = [0, 4] if name == "label out of range" else [0, 1]
    np.savez(tmp_path / "wide.npz", labels=np.array(labels), x=np.zeros((2, 3), np.float32))
    write_flow(tmp_path / "thin")
    (tmp_path / "thin/config.json").write_text((tmp_path / "thin/config.json").read_text().replace("7", "9"))
    overrides, message = BAD[name]
    overrides = [override.replace("FOLDER", str(tmp_path)) for override in overrides]
    monkeypatch.setattr(sys, "argv", ["train_dmd.py", "--config", str(path), "--check", *overrides])
    assert train_dmd.main() == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.strip().splitlines()) == 1 and captured.out == ""


def test_check_passes_and_writes_nothing(tmp_path, monkeypatch, capsys):
    """Catches a check that leaves a run folder behind, or that never looks at the files."""
    path = write_config(tmp_path, topology__world_size=3)
    monkeypatch.setattr(sys, "argv", ["train_dmd.py", "--config", str(path), "--check"])
    assert train_dmd.main() == 0 and "23 labels" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_refused_before_loading(tmp_path):
    """Catches an out-of-memory error after minutes of loading."""
    job = train_dmd.prepare(cfg.load(write_config(tmp_path)), 1)
    needed = sum(size for *_, size in train_dmd.role_memory(job))
    with pytest.raises(ValueError, match="a rank needs .* largest part: (student|fake_score)"):
        train_dmd.check_memory(job, needed - 1)
    train_dmd.check_memory(job, needed)


# --- the real thing -------------------------------------------------------------------------------------------------

XL = dit_config("XL", patch_size=2, input_size=32, channels=4, num_classes=1000)


@pytest.mark.parametrize("storage", [[], ["dmd.role_storage=shared_base_adapters", "lora.rank=64"]],
                         ids=["full", "shared"])
def test_the_cluster_config_dry_runs_at_its_world_size(tmp_path, monkeypatch, capsys, storage):
    """Catches a config that names an option wrongly, or whose plan, shards or memory do not work out."""
    folder, path = tmp_path / "dit", Path(train_dmd.__file__).parent / "configs/dmd_dit_xl_256.yaml"
    with torch.device("meta"):
        weights = dict(DiT(XL).named_parameters())
    hollow_weights(folder, weights)
    (folder / "config.json").write_text(json.dumps({"model_type": "dit", **dataclasses.asdict(XL)}))
    write_samples(tmp_path / "labels.npz", 50)
    overrides = [f"teacher.path={folder}", f"data.conditions={tmp_path / 'labels.npz'}", f"run_root={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train_dmd.py", "--config", str(path), "--dry-run", *overrides, *storage])
    assert train_dmd.main() == 0
    shown = capsys.readouterr().out
    assert "dry run passed: 8 ranks" in shown and "student:fake = 1:5 attempts per cycle" in shown
    trees = [line.split(":")[1].split()[0] for line in shown.splitlines() if line.startswith("rank 0:")]
    assert trees == (["base"] if storage else ["student", "teacher", "fake_score", "student_ema"])


@pytest.mark.slow
@pytest.mark.parametrize("storage, by_signal, cycles", [("full", False, 3), ("shared", True, 20)])
def test_a_real_job_is_stopped_continues_and_equals_a_straight_one(tmp_path, storage, by_signal, cycles):
    """Catches what only a launch shows: state that a process keeps, a request to stop that loses a cycle, markers."""
    path = write_config(tmp_path, max_cycles=cycles, dmd__ema_start_step=2, **micro(3), **STORAGES[storage],
                        eval={"every": 2, "num_samples": 4})
    live(path, 2, lambda job, world: whole_run(job, world, "straight"))
    run_dir, metrics = tmp_path / "runs/tiny", tmp_path / "runs/tiny/metrics.jsonl"
    if not by_signal:
        run_dir.mkdir()
        (run_dir / "STOP").touch()
    job = torchrun(path, 2, script="train_dmd.py")
    if by_signal:
        while not (metrics.exists() and '"train"' in metrics.read_text()):
            assert job.poll() is None, finish(job)
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
    code, out, err = finish(job)
    assert (run_dir / "PREEMPTED").exists() and not (run_dir / "DONE").exists(), (out[-2000:], err[-2000:])
    stopped = lines_of(run_dir, "train")[-1]["step"]
    assert 1 <= stopped < cycles and f"stopped at cycle {stopped}" in out
    code, out, err = finish(torchrun(path, 2, script="train_dmd.py"))
    assert code == 0 and f"resumed from {run_dir / f'checkpoints/step_{stopped:08d}'}" in out, err[-2000:]
    assert (run_dir / "DONE").exists() and not (run_dir / "PREEMPTED").exists()
    assert lines_of(run_dir, "train", "eval") == lines_of(tmp_path / "runs/straight", "train", "eval")
    end = f"checkpoints/step_{cycles:08d}"
    assert same_tensors(saved_tensors(run_dir / end), saved_tensors(tmp_path / "runs/straight" / end))


@pytest.mark.parametrize("mean, square, std", [(0.1, 0.01 - 1e-9, 0.0), (1.0, 5.0, 2.0), (0.0, math.nan, math.nan)])
def test_the_std_of_a_collapsed_student_is_a_number(tmp_path, mean, square, std):
    """Catches the root of a variance that rounding made negative: a complex number, and with it the end of the run."""
    job = train_dmd.prepare(cfg.load(write_config(tmp_path)), 1)
    run = train_dmd.Run(job, None, None, {}, None)
    values = {"student/sample_mean": mean, "student/sample_square": square, "time/cycle_s": 1.0}
    run.roles = {name: Role(name, torch.nn.Linear(1, 1)) for name in ("student", "fake_score")}
    found = train_dmd.cycle_values(run, {"student": [], "fake_score": []}, values)["student/sample_std"]
    assert isinstance(found, float) and (math.isnan(found) if math.isnan(std) else abs(found - std) < 1e-6)
