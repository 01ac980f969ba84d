# SPDX-License-Identifier: Apache-2.0
"""Distribution-matching distillation (DMD2) of a flow model: a student of few steps learns to draw the samples that a
frozen teacher of many steps draws. A fake score, trained on the student's own samples, tells where they lie too dense.

    torchrun --standalone --nproc_per_node=2 train_dmd.py --config configs/dmd_digits.yaml dmd.student_steps=1
    python train_dmd.py --config configs/dmd_digits.yaml --check     # config, data and file headers; exit code 2
    python train_dmd.py --config configs/dmd_digits.yaml --dry-run   # build the job at its world size, no weights

A cycle is one attempt to train the student, then dmd.fake_update_ratio attempts to train the fake score (and, with
gan.weight, the discriminator after each of those). All ranks do the same on their share of the samples. The same
command again resumes from the newest checkpoint. Every option: distill_core/config.py.

Legend: B samples; x [B, *latent_shape], s [B] noise level (1 is noise), g gradient of the student's loss.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_core import checkpoint as ckpt
from distill_core import config as cfg
from distill_core.adapters import Adapter, guided_velocity, predict_x0, read_adapter
from distill_core.build import LoRA, build_flow, check_flow, load_progress, meta_flow, shard_flow
from distill_core.data import batch_at, read_conditions, read_latents
from distill_core.ema import EMA
from distill_core.flow import add_noise, euler_sample, few_step_sample, score_times, student_grid, x0_from_velocity
from distill_core.fsdp import local_bytes, num_parameters, reshard, shard
from distill_core.lora import checkpoint_context_fn
from distill_core.losses_dmd import (dmd_gradient, fake_loss_weight, fake_score_loss_per_sample,
                                     gan_discriminator_loss, gan_generator_losses, gradient_at, noise_bins,
                                     surrogate_per_sample, with_gradient)
from distill_core.metrics import DMD_COLUMNS, Console, Journal, Metrics, human_bytes, human_count, table
from distill_core.models.discriminator import Discriminator
from distill_core.noise import normal, uniform
from distill_core.phases import attempts_of, exit_step_at, lr_at, phase_at
from distill_core.pictures import picture_of, write_png
from distill_core.report import write_report
from distill_core.role import (COUNTERS, PhaseLoss, PhaseResult, Role, RoleSpec, adamw, check_plan, restore_role,
                               role_state, role_tensors, run_phase)
from distill_core.run import (StopRequest, Where, check_run_dir, deadline, fail, lock_run, mark, open_run, parse_args,
                              tell_failure)
from distill_core.safetensors_io import open_folder, weights_digest
from distill_core.topology import (Pulse, World, agree_equal, device_memory, env_rank, make_groups, peak_memory,
                                   pick_device, plan_ranks, start, step_verdict, stop)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BIN_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MEMORY_REMEDY = ("lower dmd.student_micro_batch_size_per_gpu or dmd.fake_score_micro_batch_size_per_gpu, set "
                 "dmd.activation_checkpointing=true, or start more ranks")

# Keys that may change between a run and its resumption without changing what is computed.
FREE_KEYS = ("name", "run_root", "max_cycles", "device", "teacher.path", "topology.", "data.conditions", "data.latents",
             "dmd.student_micro_batch_size_per_gpu", "dmd.fake_score_micro_batch_size_per_gpu", "dmd.export_role",
             "dmd.convention", "dmd.activation_checkpointing", "eval.", "checkpoint.", "metrics.")


# ---------------------------------------------------------------------------------------------------------------------
# What a run is, read and checked on every rank before any process group exists

@dataclass(frozen=True)
class Job:
    config: cfg.DMDConfig
    world_size: int
    run_dir: Path
    adapter: Adapter
    plan: tuple[RoleSpec, ...]
    labels: Tensor | None = None  # [N] int64: the conditions
    latents: Tensor | None = None  # [M, *latent_shape], real samples for the discriminator, with
    latent_labels: Tensor | None = None  # [M]
    teacher_digest: str = ""
    notes: Sequence[str] = ()  # for the start block

    @property
    def grid(self) -> list[float]:
        """Noise levels of the student's steps."""
        return self.adapter.student_grid(self.config.dmd.student_steps, self.config.dmd.rollout_timestep_shift)


def prepare(config: cfg.DMDConfig, world_size: int) -> Job:
    """Read config.json, headers, conditions and latents; ValueError of one line for what a user can mend."""
    job = describe(config, world_size)
    check_run_dir(job.run_dir)
    adapter = job.adapter
    check_flow(config.teacher.path, adapter)
    labels = read_conditions(config.data.conditions, num_classes=adapter.num_classes)
    latents = latent_labels = None
    if config.gan.weight > 0:
        latents, latent_labels = read_latents(config.data.latents, num_classes=adapter.num_classes)
        if tuple(latents.shape[1:]) != tuple(adapter.latent_shape):
            raise ValueError(f"data.latents: {config.data.latents} holds samples of shape {list(latents.shape[1:])}, "
                             f"the teacher takes {list(adapter.latent_shape)}")
    notes = [f"data.conditions: {len(labels)} labels of {adapter.num_classes} classes", *cfg.warnings(config)]
    job = dataclasses.replace(job, labels=labels, latents=latents, latent_labels=latent_labels, notes=notes,
                              teacher_digest=weights_digest(open_folder(config.teacher.path)))
    newest = ckpt.newest_state(job.run_dir / "checkpoints")
    if newest is not None:  # refused here already, before anything of the earlier run is touched
        check_saved(job, *newest)
    return job


def describe(config: cfg.DMDConfig, world_size: int) -> Job:
    """The part of the job that needs the teacher's config.json only."""
    cfg.check_world(config, world_size)
    job = Job(config, world_size, Path(config.run_root) / config.name, read_adapter(config.teacher.path),
              plan_roles(config))
    check_adapter_fits(job)
    for tree in {spec.tree for spec in job.plan}:
        meta_tree(job, tree)  # refuses LoRA targets that name no layer
    return job


def check_adapter_fits(job: Job) -> None:
    """Refuse what would only show in the middle of a run."""
    config, adapter, grid = job.config, job.adapter, job.grid
    if len(grid) != config.dmd.student_steps + 1 or not all(a > b for a, b in zip(grid, grid[1:])):
        raise ValueError(f"dmd.rollout_timestep_shift: {config.dmd.rollout_timestep_shift:g} gives the noise levels "
                         f"{grid}, which do not descend (lower it)")
    if config.gan.weight > 0 and not (hasattr(adapter, "features") and hasattr(adapter, "feature_size")):
        raise ValueError(f"gan.weight: {config.gan.weight:g}, but the adapter {adapter.kind} has no features for a "
                         "discriminator (set gan.weight=0)")
    guided = config.dmd.teacher_guidance_scale != 1
    if guided and config.dmd.cfg_norm == "layer_norm" and adapter.latent_shape[0] == 1:
        raise ValueError("dmd.cfg_norm: layer_norm scales each position to the norm over its channels, of which this "
                         "teacher has one: only signs would be left (set dmd.cfg_norm=scalar or none)")
    if config.eval.every and len(adapter.latent_shape) != 3 and tuple(adapter.latent_shape) != (2,):
        raise ValueError(f"eval.every: samples of shape {list(adapter.latent_shape)} cannot be drawn as a picture (set "
                         "eval.every=0)")
    json.dumps(adapter.state_dict())


def plan_roles(config: cfg.DMDConfig) -> tuple[RoleSpec, ...]:
    """Who lives where: four trees, or one base whose adapters are the roles (the teacher: adapters off)."""
    shared = config.dmd.role_storage == "shared_base_adapters"
    adapters = config.lora.adapters if config.lora.rank else (None, None, None)
    optimizers = {"student": "dmd.student_optim", "fake_score": "dmd.fake_score_optim"}
    names = ("student", "fake_score", "student_ema")
    specs = [RoleSpec(name, "base" if shared else name, adapter, optimizers.get(name))
             for name, adapter in zip(names, adapters, strict=True)]
    specs.insert(1, RoleSpec("teacher", "base" if shared else "teacher"))
    if config.gan.weight > 0:
        specs.append(RoleSpec("discriminator", "discriminator", optimizer="gan"))
    check_plan(specs, trained=[*optimizers, *(["discriminator"] if config.gan.weight > 0 else [])],
               frozen=("teacher", "student_ema"))
    return tuple(specs)


def fingerprints(job: Job) -> dict[str, Any]:
    """What must be equal for a resumed run to continue the same computation, as flat dotted keys."""
    config = job.config
    idle = ("lora.",) * (config.lora.rank == 0) + ("gan.",) * (config.gan.weight == 0)
    flat = cfg.flatten(config, leave_out=FREE_KEYS + idle)
    if {config.dmd.student_optim.schedule, config.dmd.fake_score_optim.schedule} != {"constant"}:
        flat["max_cycles"] = config.max_cycles
    if config.dmd.normalizer == "batch":  # of a micro-batch, as published
        flat["dmd.student_micro_batch_size_per_gpu"] = config.dmd.student_micro_batch_size_per_gpu
    model = json.loads((Path(config.teacher.path) / "config.json").read_text(encoding="utf-8"))
    flat |= {"data.conditions.sha256": digest(job.labels), "teacher.model": model,
             "teacher.weights": job.teacher_digest}
    return flat if job.latents is None else flat | {"data.latents.sha256": digest(job.latents),
                                                    "data.latents.labels": digest(job.latent_labels)}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Roles

@dataclass
class Run:
    job: Job
    world: World
    log: logging.Logger
    roles: dict[str, Role]
    ema: EMA
    cycle: int = 0  # cycles done
    attempt: int = 0  # attempts of student and fake score so far
    position: int = 0  # conditions drawn so far, over all ranks
    evaluated: int = -1  # cycle of the last evaluation
    exits: list[int] = field(default_factory=list)  # exit steps of this cycle's student attempts
    reused: Batch | None = None  # this rank's samples of the student attempt (dmd.fake_batch=reuse_student)
    where: Where = field(default_factory=partial(Where, 0))  # in case this rank fails

    def predict_x0(self, role: str, x_s: Tensor, s: Tensor, condition: Any) -> Tensor:
        """Clean samples that a role predicts; where gradients are enabled, in a way that survives recomputation."""
        with self.roles[role].scope():
            return predict_x0(self.job.adapter, self.roles[role].module, x_s, s, condition, **self.recomputing(role))

    def recomputing(self, role: str) -> dict[str, Any]:
        if not (self.job.config.dmd.activation_checkpointing and torch.is_grad_enabled()):
            return {}
        return {"recompute": True, "context_fn": checkpoint_context_fn(self.roles[role].module)}


def build_run(job: Job, world: World, log: logging.Logger) -> Run:
    config = job.config
    trees = load_trees(job, world)
    if config.gan.weight > 0:
        head = Discriminator(job.adapter.feature_size).to(world.device)
        head.reset_parameters(config.seed)
        shard(head, [], world.student_mesh)
        trees["discriminator"] = head
    roles = {spec.name: build_role(job, world, spec, trees[spec.tree]) for spec in job.plan}
    owned = [id(parameter) for role in roles.values() for _, parameter in role.named_trainable()]
    assert len(set(owned)) == len(owned), "two optimizers own one parameter"
    ema = EMA(by_position(roles["student"]), by_position(roles["student_ema"]))
    return Run(job, world, log, roles, ema)


def load_trees(job: Job, world: World) -> dict[str, nn.Module]:
    """Every tree with the teacher's weights. A rank may take longer than timeout_s: the others see that it goes on."""
    folder, pulse = job.config.teacher.path, Pulse(world.students_control, world.timeout_s / 4)
    progress = load_progress(folder, prints=world.rank == 0, beat=pulse.beat)
    trees = {tree: build_flow(folder, job.adapter, world.student_mesh, world.device, **options, progress=progress)
             for tree, options in tree_options(job).items()}
    pulse.finish()
    return trees


def tree_options(job: Job) -> dict[str, dict[str, Any]]:
    """Arguments of build_flow for each tree of the plan. A trained tree without adapters has fp32 master weights."""
    config, compute_dtype, options = job.config, DTYPES[job.config.dmd.dtype], {}
    for spec in job.plan:
        if spec.tree == "discriminator":
            continue
        mine = [other for other in job.plan if other.tree == spec.tree]
        adapters = {other.adapter: other.optimizer is not None for other in mine if other.adapter}
        if adapters:
            lora = LoRA(adapters, config.lora.targets or job.adapter.lora_targets, config.lora.rank,
                        config.lora.alpha or config.lora.rank, config.seed)
            options[spec.tree] = {"dtype": compute_dtype, "trainable": False, "compute_dtype": compute_dtype,
                                  "lora": lora}
        elif spec.name == "teacher":
            options[spec.tree] = {"dtype": DTYPES[config.teacher.dtype], "trainable": False}
        else:
            options[spec.tree] = {"dtype": torch.float32, "trainable": spec.optimizer is not None,
                                  "compute_dtype": compute_dtype}
    return options


def build_role(job: Job, world: World, spec: RoleSpec, module: nn.Module) -> Role:
    alone = job.world_size == 1  # then there is nothing to agree on
    role = Role(spec.name, module, None if alone else world.student_mesh.get_group(),
                None if alone else world.students_control, adapter=spec.adapter)
    if spec.optimizer is None:
        return role
    optim, horizon = optimizer_options(job.config)[spec.name]
    role.optimizer = adamw([parameter for _, parameter in role.named_weights()], lr=optim.lr, betas=optim.betas,
                           eps=optim.eps, weight_decay=optim.weight_decay)
    role.lr = partial(lr_at, lr=optim.lr, schedule=optim.schedule, warmup_steps=optim.warmup_steps, max_steps=horizon,
                      min_lr_frac=optim.min_lr_frac)
    return role


def optimizer_options(config: cfg.DMDConfig) -> dict[str, tuple[cfg.OptimConfig, int]]:
    """Options and horizon, in updates, of each trained role. Each schedule advances on its own role's updates."""
    dmd = config.dmd
    fakes = config.max_cycles * dmd.fake_update_ratio
    return {"student": (dmd.student_optim, config.max_cycles - dmd.fake_warmup_cycles),
            "fake_score": (dmd.fake_score_optim, fakes),
            "discriminator": (dataclasses.replace(dmd.fake_score_optim, lr=config.gan.lr), fakes)}


def by_position(role: Role) -> dict[str, Tensor]:
    """A role's weights under names that do not contain its adapter's, to pair the student's with its average's."""
    reshard(role.module)
    return {name.removesuffix(f".{role.adapter}"): weight for name, weight in role.named_weights()}


# ---------------------------------------------------------------------------------------------------------------------
# Samples of an attempt

class Batch(NamedTuple):
    """A micro-batch of this rank. ids: places in the attempt's global batch, from which all its noise derives."""

    attempt: int
    ids: Tensor  # [B] int64
    labels: Tensor  # [B] int64
    x: Tensor | None = None  # [B, ...] clean samples where they exist already


def draw(run: Run, batch_size: int, micro_batch_size: int) -> list[Batch]:
    """This rank's micro-batches of the next `batch_size` conditions."""
    share = batch_size // run.job.world_size
    ids = torch.arange(run.world.rank * share, (run.world.rank + 1) * share)
    indices = torch.tensor(batch_at(run.position, batch_size, len(run.job.labels), run.job.config.seed))
    run.position += batch_size
    labels = run.job.labels[indices[ids]]
    return list(cut(Batch(run.attempt, ids.to(run.world.device), labels.to(run.world.device)), micro_batch_size))


def cut(batch: Batch, size: int) -> Iterator[Batch]:
    for first in range(0, len(batch.ids), size):
        piece = slice(first, first + size)
        yield Batch(batch.attempt, batch.ids[piece], batch.labels[piece], None if batch.x is None else batch.x[piece])


def gaussian(run: Run, batch: Batch, stream: str) -> Tensor:
    """[B, *latent_shape] fp32: independent of ranks and micro-batches."""
    return normal(run.job.adapter.latent_shape, batch.ids, seed=run.job.config.seed, stream=stream, step=batch.attempt)


def rollout(run: Run, role: str, batch: Batch, exit_step: int) -> Tensor:
    """[B, ...] the clean samples at `exit_step`; gradients, where enabled, through the last prediction alone."""
    condition, _ = run.job.adapter.conditioning(batch.labels)
    return few_step_sample(lambda x, s: run.predict_x0(role, x, s, condition), gaussian(run, batch, "initial noise"),
                           run.job.grid, mode=run.job.config.dmd.rollout, exit_step=exit_step,
                           noise_at=lambda step: gaussian(run, batch, f"rollout {step}"))


def student_times(run: Run, batch: Batch) -> Tensor:
    """[B] noise levels at which teacher and fake score are compared."""
    return noise_levels(run, batch, "student")


def fake_times(run: Run, batch: Batch) -> Tensor:
    """[B] noise levels at which the fake score is trained; by default by the law of the student's."""
    return noise_levels(run, batch, "fake_score")


def noise_levels(run: Run, batch: Batch, role: str) -> Tensor:
    dmd = run.job.config.dmd
    ids = batch.ids if dmd.score_time_per == "sample" else torch.zeros_like(batch.ids)
    u = uniform(ids, seed=run.job.config.seed, stream=f"{role} time", step=batch.attempt)
    return score_times(u, **cfg.score_time_law(dmd, role))


# ---------------------------------------------------------------------------------------------------------------------
# The student's phase

def train_student(run: Run, metrics: Metrics) -> PhaseResult:
    """One attempt: sample with gradient at one step, noise, compare teacher and fake score, update, average."""
    config, student = run.job.config, run.roles["student"]
    exit_step = exit_step_of(run, "student", run.cycle)
    batches = draw(run, config.dmd.student_batch_size, config.dmd.student_micro_batch_size_per_gpu)
    kept: list[Tensor] = []

    def compute(batch: Batch) -> PhaseLoss:
        x = rollout(run, "student", batch, exit_step)
        kept.append(x.detach())
        return phase_loss(run, student_losses(run, batch, x, metrics), config.dmd.student_batch_size)

    result = run_phase(student, batches, compute, roles=list(run.roles.values()),
                       max_grad_norm=config.dmd.student_optim.max_grad_norm, key=exit_step)
    if result.applied:
        run.ema.update(student.successes, config.dmd.ema_decay, config.dmd.ema_start_step)
    if config.dmd.fake_batch == "reuse_student":
        run.reused = Batch(run.attempt, *(torch.cat(parts) for parts in zip(*((b.ids, b.labels) for b in batches))),
                           torch.cat(kept))
    run.exits.append(exit_step)
    return result


def student_losses(run: Run, batch: Batch, x: Tensor, metrics: Metrics) -> Tensor:
    """[B] the surrogate whose gradient is that of KL(student || teacher) between noised samples."""
    dmd = run.job.config.dmd
    s = student_times(run, batch)
    with torch.no_grad():
        x_s = add_noise(x.detach(), gaussian(run, batch, "score noise"), s)
        condition, null = run.job.adapter.conditioning(batch.labels)
        with run.roles["teacher"].scope():
            v = guided_velocity(run.job.adapter, run.roles["teacher"].module, x_s, s, condition, null,
                                scale=dmd.teacher_guidance_scale, norm=dmd.cfg_norm)
        x0_real, x0_fake = x0_from_velocity(x_s, v, s), run.predict_x0("fake_score", x_s, s, condition)
        gradient = dmd_gradient(x.detach(), x0_real, x0_fake, dmd.normalization_epsilon, dmd.normalizer)
    losses = surrogate_per_sample(x, gradient.g)
    record_gradient(metrics, gradient, x.detach(), x0_real - x0_fake, s)
    metrics.mean("dmd/loss", losses.detach().sum(), len(losses))
    if run.job.config.gan.weight > 0:
        losses = losses + run.job.config.gan.weight * generator_losses(run, batch, x, gradient.g, metrics)
    return losses


def record_gradient(metrics: Metrics, gradient: Any, x: Tensor, gap: Tensor, s: Tensor) -> None:
    num = len(x)
    size_B, gap_B = (each.flatten(1).square().mean(1).sqrt() for each in (gradient.g, gap))
    metrics.mean("dmd/normalizer", gradient.normaliser_B.mean() * num, num)
    metrics.total("dmd/nonfinite", gradient.num_nonfinite)
    metrics.mean("student/sample_mean", x.mean() * num, num)
    metrics.mean("student/sample_square", x.square().mean() * num, num)
    record_bins(metrics, "dmd/gradient_norm", size_B, s)
    record_bins(metrics, "dmd/teacher_fake_gap", gap_B, s)


def record_bins(metrics: Metrics, name: str, values_B: Tensor, s_B: Tensor) -> None:
    """A mean over samples, and one over those of each range of noise levels."""
    sums, counts = noise_bins(values_B, s_B, BIN_EDGES)
    metrics.mean(name, sums.sum(), len(values_B))
    for index, (low, high) in enumerate(zip(BIN_EDGES, BIN_EDGES[1:])):
        metrics.mean(f"{name}/{low:.1f}-{high:.1f}", sums[index], counts[index])


def exit_step_of(run: Run, role: str, turn: int) -> int:
    dmd = run.job.config.dmd
    return exit_step_at(turn, num_steps=dmd.student_steps, rule=dmd.exit_step, seed=run.job.config.seed, stream=role)


def phase_loss(run: Run, losses: Tensor, batch_size: int) -> PhaseLoss:
    """The mean over samples; or, with a loss_normalizer, the sum divided by that count."""
    count = run.job.config.dmd.loss_normalizer
    if count is None:
        return PhaseLoss(losses.mean(), len(losses))
    return PhaseLoss(losses.sum(), len(losses), normalizer=count * len(losses) / batch_size)


# ---------------------------------------------------------------------------------------------------------------------
# The fake score's phase

def train_fake_score(run: Run, metrics: Metrics, batches: Sequence[Batch]) -> PhaseResult:
    """One attempt: a denoising step on samples of the student, so that it knows where they lie now."""
    config, fake = run.job.config, run.roles["fake_score"]

    def compute(batch: Batch) -> PhaseLoss:
        return phase_loss(run, fake_losses(run, batch, metrics), config.dmd.fake_score_batch_size)

    return run_phase(fake, batches, compute, roles=list(run.roles.values()),
                     max_grad_norm=config.dmd.fake_score_optim.max_grad_norm, key=run.attempt)


@torch.no_grad()
def fake_batches(run: Run, index: int) -> list[Batch]:
    """Micro-batches with samples of the student: new ones, or for the first attempt of a cycle the student's own.

    index: the attempt's place among those of the fake score in its cycle.
    """
    dmd = run.job.config.dmd
    size, micro = dmd.fake_score_batch_size, dmd.fake_score_micro_batch_size_per_gpu
    reuses = dmd.fake_batch == "reuse_student"
    if reuses and index == 0:
        return [batch._replace(attempt=run.attempt) for batch in cut(run.reused, micro)]
    exit_step = exit_step_of(run, "fake_score", run.cycle * (dmd.fake_update_ratio - reuses) + index - reuses)
    return [batch._replace(x=rollout(run, "student", batch, exit_step)) for batch in draw(run, size, micro)]


def fake_losses(run: Run, batch: Batch, metrics: Metrics) -> Tensor:
    """[B] weighted errors of the fake score's velocity."""
    adapter, role, s = run.job.adapter, run.roles["fake_score"], fake_times(run, batch)
    noise = gaussian(run, batch, "fake noise")
    x_s = add_noise(batch.x, noise, s)
    condition, _ = adapter.conditioning(batch.labels)
    with role.scope():
        raw = adapter.forward(role.module, x_s, s, condition, **run.recomputing("fake_score"))
    losses = fake_score_loss_per_sample(adapter.to_velocity(raw, x_s, s), batch.x, noise)
    losses = losses * fake_loss_weight(s, run.job.config.dmd.fake_loss)
    record_bins(metrics, "fake_score/loss", losses.detach(), s)
    gan = run.job.config.gan
    return losses + gan.discriminator_weight * trunk_losses(run, batch) if gan.weight > 0 else losses


# ---------------------------------------------------------------------------------------------------------------------
# The discriminator (gan.weight > 0): a head on the fake score's hidden states, arXiv 2405.14867

def generator_losses(run: Run, batch: Batch, x: Tensor, g: Tensor, metrics: Metrics) -> Tensor:
    """[B] softplus(-D(x)). Its gradient is taken at x, so that fake score and head, which it passes, receive none."""
    head = run.roles["discriminator"].module
    values, gradient = gradient_at(x, lambda leaf: gan_generator_losses(
        head(features(run, batch, leaf, batch.labels, "gan noise"))))
    weight, num = run.job.config.gan.weight, len(x)
    ratio = weight * gradient.norm() / (g.norm() / g[0].numel()).clamp_min(1e-12)
    metrics.mean("gan/generator_loss", values.sum(), num)
    metrics.mean("gan/gradient_ratio", ratio * num, num)
    return with_gradient(values, gradient, x)


def trunk_losses(run: Run, batch: Batch) -> Tensor:
    """[B] the discriminator's loss as the fake score sees it: through the features, none to the head."""
    head, real = run.roles["discriminator"].module, real_samples(run, batch)

    def through(hidden: Tensor, sign: float) -> Tensor:
        return with_gradient(*gradient_at(hidden, lambda leaf: gan_generator_losses(sign * head(leaf))), hidden)

    return (through(features(run, batch, real.x, real.labels, "gan noise of real"), 1.0)
            + through(features(run, batch, batch.x, batch.labels, "gan noise"), -1.0))


def train_discriminator(run: Run, metrics: Metrics, batches: Sequence[Batch]) -> PhaseResult:
    """One attempt of the head, on the samples that the fake score was trained on and as many real ones."""
    role = run.roles["discriminator"]

    def compute(batch: Batch) -> PhaseLoss:
        real = real_samples(run, batch)
        with torch.no_grad():
            hidden = features(run, batch, batch.x, batch.labels, "gan noise")
            hidden_real = features(run, batch, real.x, real.labels, "gan noise of real")
        loss = gan_discriminator_loss(role.module(hidden_real), role.module(hidden))
        metrics.mean("gan/discriminator_loss", loss.detach() * len(batch.ids), len(batch.ids))
        return PhaseLoss(loss, len(batch.ids))

    return run_phase(role, batches, compute, roles=list(run.roles.values()),
                     max_grad_norm=run.job.config.dmd.fake_score_optim.max_grad_norm, key=run.attempt)


def features(run: Run, batch: Batch, x: Tensor, labels: Tensor, stream: str) -> Tensor:
    """[B, T, D] hidden states of the fake score at x with noise."""
    adapter, role, s = run.job.adapter, run.roles["fake_score"], fake_times(run, batch)
    x_s = add_noise(x, gaussian(run, batch, stream), s)
    with role.scope():
        return adapter.features(role.module, x_s, s, adapter.conditioning(labels)[0], **run.recomputing("fake_score"))


def real_samples(run: Run, batch: Batch) -> Batch:
    """As many real samples as the micro-batch has: a pure function of the attempt."""
    size, device = run.job.config.dmd.fake_score_batch_size, run.world.device
    indices = torch.tensor(batch_at(batch.attempt * size, size, len(run.job.latents), run.job.config.seed + 1))
    mine = indices[batch.ids.cpu()]
    return Batch(batch.attempt, batch.ids, run.job.latent_labels[mine].to(device), run.job.latents[mine].to(device))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation: grids of samples

@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Samples of the role that is exported, from the same noise at every evaluation, as a picture and two numbers."""
    config, began = run.job.config, time.monotonic()
    role = config.dmd.export_role
    samples = {f"step_{run.cycle:08d}": draw_samples(run, lambda batch: rollout(run, role, batch,
                                                                              config.dmd.student_steps - 1))}
    if run.cycle == 0:
        for steps in {config.eval.num_teacher_steps, config.dmd.student_steps} - {0}:
            samples[f"teacher_{steps}_steps"] = draw_samples(run, partial(teacher_samples, run, num_steps=steps))
    if run.world.rank == 0:
        (run.job.run_dir / "samples").mkdir(exist_ok=True)
        for name, x in samples.items():
            write_png(run.job.run_dir / "samples" / f"{name}.png", picture_of(x, columns=columns_of(len(x))))
    x = samples[f"step_{run.cycle:08d}"]
    run.evaluated = run.cycle
    values = {"eval/sample_mean": float(x.mean()), "eval/sample_std": float(x.std(0, correction=0).mean())}
    teacher = samples.get(f"teacher_{config.eval.num_teacher_steps}_steps")
    if teacher is not None:
        values["eval/teacher_std"] = float(teacher.std(0, correction=0).mean())
    return values | {"eval/time_s": time.monotonic() - began}


def draw_samples(run: Run, sample: Callable[[Batch], Tensor]) -> Tensor:
    """[num_samples, *latent_shape] on every rank, on CPU; classes in turn."""
    config, ranks = run.job.config, run.job.world_size
    micro = config.dmd.student_micro_batch_size_per_gpu
    share = -(-config.eval.num_samples // ranks)  # on every rank: forwards are collective
    ids = torch.arange(run.world.rank * share, (run.world.rank + 1) * share, device=run.world.device)
    mine = torch.cat([sample(batch) for batch in cut(Batch(-1, ids, ids % run.job.adapter.num_classes), micro)])
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine.contiguous())
    return torch.cat(everyone)[:config.eval.num_samples].float().cpu()


def teacher_samples(run: Run, batch: Batch, *, num_steps: int) -> Tensor:
    teacher, (condition, null) = run.roles["teacher"], run.job.adapter.conditioning(batch.labels)
    own, dmd = run.job.config.eval.guidance_scale, run.job.config.dmd
    scale = dmd.teacher_guidance_scale if own is None else own
    with teacher.scope():
        return euler_sample(lambda x, s: guided_velocity(run.job.adapter, teacher.module, x, s, condition, null,
                                                         scale=scale, norm=dmd.cfg_norm),
                            gaussian(run, batch, "initial noise"), student_grid(num_steps, 1.0))


def columns_of(num: int) -> int:
    """Of a grid about as wide as high, a multiple of 10 where classes come in tens."""
    return 10 if 10 <= num <= 200 else max(1, round(num**0.5))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint and resume

def run_tensors(run: Run) -> dict[str, Tensor]:
    """Weights and moments of the trained roles and the average; frozen weights never."""
    tensors = {}
    for role in trained(run):
        tensors |= role_tensors(role)
    average = run.roles["student_ema"]
    reshard(average.module)
    return tensors | {f"student_ema.{name}": weight.detach() for name, weight in average.named_weights()}


def trained(run: Run) -> list[Role]:
    return [role for role in run.roles.values() if role.optimizer is not None]


def open_saver(run: Run, resumed_from: Path | None) -> ckpt.Saver:
    keep = run.job.config.checkpoint
    return ckpt.Saver(run.job.run_dir / "checkpoints", group=run.world.students_control, keep_last=keep.keep_last,
                      keep_every=keep.keep_every, resumed_from=resumed_from)


def start_saving(run: Run, saver: ckpt.Saver) -> None:
    config = run.job.config
    state = {"job": "dmd", "step": run.cycle, "attempt": run.attempt, "position": run.position,
             "evaluated": run.evaluated, "roles": {role.name: role_state(role) for role in trained(run)},
             "sampling": run.job.adapter.state_dict(), "config": dataclasses.asdict(config),
             "fingerprints": fingerprints(run.job), "allowed_drift": list(config.checkpoint.allow_drift),
             "torch": torch.__version__}
    saver.start(run.cycle, run_tensors(run), state)


def check_saved(job: Job, manifest: Path, state: dict[str, Any]) -> None:
    """ValueError of one line unless the job can continue from this state, before any weight is touched."""
    ckpt.check_state(state, job="dmd", tables=("fingerprints", "sampling"), source=manifest)
    ckpt.compare_fingerprints(state["fingerprints"], fingerprints(job), job.config.checkpoint.allow_drift)
    counters = [f"roles.{spec.name}.{counter}" for spec in job.plan if spec.optimizer for counter in COUNTERS]
    ckpt.check_counts(state, ("step", "attempt", "position", "evaluated", *counters), source=manifest)


def resume(run: Run) -> Path | None:
    """Continue from the newest checkpoint that verifies; None in a fresh run."""
    group = run.world.students_control
    found = ckpt.find_latest(run.job.run_dir / "checkpoints", group=group)
    if found is None:
        return None
    check_saved(run.job, found.folder / ckpt.MANIFEST, found.state)
    run.job.adapter.load_state_dict(found.state["sampling"])
    ckpt.load(found, run_tensors(run), group=group)
    for role in trained(run):
        restore_role(role, found.state["roles"][role.name])
    run.cycle, run.attempt, run.position, run.evaluated = (
        found.state[key] for key in ("step", "attempt", "position", "evaluated"))
    return found.folder


# ---------------------------------------------------------------------------------------------------------------------
# The loop

def train(job: Job, world: World, log: logging.Logger, stop_request: StopRequest, where: Where | None = None) -> None:
    """The whole life of a rank."""
    config, where = job.config, where or Where(world.rank)
    log.info(start_block(job, world))
    everything = json.dumps([fingerprints(job), cfg.flatten(config)], sort_keys=True)
    agree_equal(world.control, everything, "config, data or teacher")
    where.phase = "load"
    run = build_run(job, world, log)
    run.where, where.phase = where, "resume"
    resumed_from = resume(run)
    saver = open_saver(run, resumed_from)
    where.step = run.cycle
    journal, stopped = open_journal(run, resumed_from), False
    if evaluation_due(run):  # also one that a stop request has cut off
        log_evaluation(run, journal)

    while run.cycle < config.max_cycles and not stopped:
        where.step = run.cycle + 1
        problem = log_cycle(run, journal, train_cycle(run, saver))
        verdict = step_verdict(world.students_control, step=run.cycle, stop=stop_request.wanted(),
                               abort=bool(stuck_roles(run)), error=problem)
        stopped, last = verdict.stop or verdict.abort, run.cycle == config.max_cycles
        if evaluation_due(run) and (last or not stopped):
            log_evaluation(run, journal)
        where.phase = "save"
        saver.poll()
        if last or stopped or (config.checkpoint.every and run.cycle % config.checkpoint.every == 0):
            start_saving(run, saver)

    where.phase = "save"
    saved = saver.finish() or resumed_from
    where.phase = "end"
    journal.close()
    if world.rank == 0:
        write_report(job.run_dir)
        log.info(end_block(run, saved))
    if stuck_roles(run):
        raise ValueError(f"{' and '.join(stuck_roles(run))}: loss or gradient norm was not finite "
                         f"{config.checkpoint.max_skips_in_a_row} times in a row (checkpoint.max_skips_in_a_row); "
                         f"{saved} is kept (look at the first skip in metrics.jsonl; lower the learning rate)")
    if world.rank == 0:
        mark(job.run_dir, "DONE" if run.cycle >= config.max_cycles else "PREEMPTED")


def stuck_roles(run: Run) -> list[str]:
    """Roles of which nothing can be expected any more; the same on every rank."""
    limit = run.job.config.checkpoint.max_skips_in_a_row
    return [role.name for role in trained(run) if role.skips_in_a_row >= limit]


def evaluation_due(run: Run) -> bool:
    every = run.job.config.eval.every
    return bool(every) and run.evaluated != run.cycle and (
        run.cycle % every == 0 or run.cycle == run.job.config.max_cycles)


def train_cycle(run: Run, saver: ckpt.Saver | None = None) -> dict[str, float]:
    """All attempts of one cycle; its global metrics, equal on all ranks. A save in flight is polled in between."""
    dmd, metrics, began = run.job.config.dmd, Metrics(), time.monotonic()
    results: dict[str, list[PhaseResult]] = {role.name: [] for role in trained(run)}
    seconds = dict.fromkeys(results, 0.0)
    run.exits.clear()

    def timed(role: str, attempt: Callable[..., PhaseResult], *args: Any) -> None:
        started, run.where.phase = time.monotonic(), f"train {role}"
        results[role].append(attempt(run, metrics, *args))
        seconds[role] += time.monotonic() - started

    for attempt in attempts_of(run.cycle, dmd.fake_update_ratio, dmd.fake_warmup_cycles):
        phase = phase_at(attempt, dmd.fake_update_ratio, dmd.fake_warmup_cycles)
        if phase.role == "student":
            timed("student", train_student)
            if saver is not None:
                run.where.phase = "save"
                saver.poll()
        else:
            index = phase.index - (run.cycle >= dmd.fake_warmup_cycles)  # among the fake score's, from 0
            started, run.where.phase = time.monotonic(), "rollout"
            batches = fake_batches(run, index)
            seconds["fake_score"] += time.monotonic() - started
            timed("fake_score", train_fake_score, batches)
            if "discriminator" in results:
                timed("discriminator", train_discriminator, batches)
        run.attempt += 1
    run.cycle += 1
    for role, spent in {"cycle": time.monotonic() - began, **seconds}.items():  # of the slowest rank
        metrics.peak(f"time/{role}_s", spent)
    metrics.peak("memory_peak_bytes", peak_memory(run.world.device))
    values = metrics.reduce(run.world.students_control)
    own = cycle_values(run, results, values)
    return values | own


def cycle_values(run: Run, results: dict[str, list[PhaseResult]], values: dict[str, float]) -> dict[str, float]:
    """What every rank knows already."""
    dmd, own = run.job.config.dmd, {}
    for name, attempts in results.items():
        role = run.roles[name]
        if attempts:
            own |= {f"{name}/grad_norm": attempts[-1].grad_norm, f"{name}/lr": attempts[-1].lr}
        own |= {f"{name}/update_applied": sum(result.applied for result in attempts),
                f"{name}/update_skipped": sum(not result.applied for result in attempts),
                f"{name}/steps": role.successes, f"{name}/skip_nonfinite": role.skips}
    if "student/sample_square" in values:  # over the whole batch, however it is cut
        variance = values.pop("student/sample_square") - values["student/sample_mean"]**2
        own["student/sample_std"] = max(variance, 0.0)**0.5  # rounding turns that of equal samples negative; NaN stays
    own |= {f"dmd/rollout_exit/{step}": run.exits.count(step) for step in range(dmd.student_steps)}
    trained_on = len(results["student"]) * dmd.student_batch_size
    trained_on += len(results["fake_score"]) * dmd.fake_score_batch_size
    return own | {"samples_per_s": trained_on / values["time/cycle_s"]}


def open_journal(run: Run, resumed_from: Path | None) -> Journal:
    facts = {"device": str(run.world.device), "torch": torch.__version__, "ranks": run.job.world_size,
             "changed": cfg.differences(run.job.config)}
    console = Console(run.job.config.max_cycles, columns=DMD_COLUMNS, unit="cycle")
    return Journal(run.job.run_dir, run.log, console, writes=run.world.rank == 0, step=run.cycle,
                   resumed_from=resumed_from, facts=facts)


def log_cycle(run: Run, journal: Journal, values: dict[str, float]) -> OSError | None:
    """A full disk is for all ranks to hear of together, in the verdict on this cycle."""
    config = run.job.config
    try:
        journal.training(run.cycle, values,
                         shown=run.cycle % config.metrics.log_every == 0 or run.cycle == config.max_cycles)
        for role in trained(run):
            if values[f"{role.name}/update_skipped"]:
                journal.event(run.cycle, "skip", f"{role.name}: loss or gradient norm is not finite")
    except OSError as error:
        return error
    return None


def log_evaluation(run: Run, journal: Journal) -> None:
    run.where.phase = "evaluate"
    journal.evaluation(run.cycle, evaluate(run))
    if run.world.rank == 0:
        write_report(run.job.run_dir)


# ---------------------------------------------------------------------------------------------------------------------
# Start and end blocks, dry run

def role_memory(job: Job) -> list[tuple[str, int, int, int]]:
    """(role, its weights, those trained, bytes on a rank without activations); a tree counts with its first role."""
    rows, trees = [], {}
    for spec in job.plan:
        size = 0
        if spec.tree not in trees:
            trees[spec.tree] = meta_tree(job, spec.tree)
            size = local_bytes(trees[spec.tree].parameters())
        role = Role(spec.name, trees[spec.tree], adapter=spec.adapter)
        own = sum(weight.numel() for _, weight in role.named_weights())
        trained = own if spec.optimizer else 0
        rows.append((spec.name, own, trained, (size + 12 * trained) // job.world_size))  # fp32 gradient and two moments
    return rows


def meta_tree(job: Job, tree: str) -> nn.Module:
    if tree == "discriminator":
        with torch.device("meta"):
            return Discriminator(job.adapter.feature_size)
    options = tree_options(job)[tree]
    return meta_flow(job.adapter, dtype=options["dtype"], trainable=options["trainable"], lora=options.get("lora"))


def check_memory(job: Job, available: int) -> None:
    """Refuse before loading what cannot fit."""
    rows = role_memory(job)
    needed = sum(row[3] for row in rows)
    if needed > available:
        largest = max(rows, key=lambda row: row[3])
        raise ValueError(f"a rank needs {human_bytes(needed)} without activations, of {human_bytes(available)}; "
                         f"largest part: {largest[0]}, {human_bytes(largest[3])} (more ranks, or "
                         "dmd.role_storage=shared_base_adapters with lora.rank)")


def start_block(job: Job, world: World) -> str:
    config, dmd = job.config, job.config.dmd
    specs = {spec.name: spec for spec in job.plan}
    rows = [(name, specs[name].tree, specs[name].adapter or "-", human_count(own), human_count(tuned),
             specs[name].optimizer or "-", human_bytes(size)) for name, own, tuned, size in role_memory(job)]
    student_cycles = config.max_cycles - dmd.fake_warmup_cycles
    scale = dmd.teacher_guidance_scale
    return "\n".join([
        f"distribution-matching distillation '{config.name}': {job.world_size} ranks, {world.device.type}, "
        f"torch {torch.__version__}, teacher {config.teacher.path} ({job.adapter.kind})",
        "", table(rows, ("role", "tree", "adapter", "weights", "trained", "optimizer", "bytes on a rank")),
        "", f"student:fake = 1:{dmd.fake_update_ratio} attempts per cycle; {student_cycles} student and "
            f"{config.max_cycles * dmd.fake_update_ratio} fake-score attempts in {config.max_cycles} cycles, the first "
            f"{dmd.fake_warmup_cycles} without the student",
        f"student: noise levels {', '.join(f'{level:.4g}' for level in job.grid)}"
        + (f" ({dmd.rollout}, exit {dmd.exit_step})" if dmd.student_steps > 1 else ""),
        f"teacher guidance: u + {scale:g} (c - u), which is c + {scale - 1:g} (c - u)"
        + (", one pass" if scale == 1 else ""), *cfg.convention_lines(config),
        "differs from the defaults: " + (", ".join(cfg.differences(config)) or "nothing"), *job.notes, ""])


def end_block(run: Run, saved: Path | None) -> str:
    run_dir, done = run.job.run_dir, run.cycle >= run.job.config.max_cycles
    rows = [(role.name, role.successes, role.skips) for role in trained(run)]
    lines = [f"{'done' if done else 'stopped'} at cycle {run.cycle}", "",
             table(rows, ("role", "updates", "skipped")), "",
             f"report: {run_dir / 'report.html'}",
             "export: " + shlex.join(["python", "-m", "distill_core.export", "--checkpoint", str(saved), "--out",
                                      str(run_dir / "export")]),
             "sample: " + shlex.join(["python", "-m", "distill_core.sample", "--export", str(run_dir / "export"),
                                      "--out", str(run_dir / "samples.npz")])]
    return "\n".join(lines if done else [*lines, "the same command again continues from here"])


def dry_run(config: cfg.DMDConfig) -> None:
    """Build every role at the intended world size on a fake process group: all shapes and groups, no weights."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

    world_size = config.topology.world_size or env_rank()[1]
    job = describe(config, world_size)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    world = make_groups(plan_ranks(world_size, min(world_size, 8), []), torch.device("cpu"), config.topology.timeout_s)
    print(start_block(job, world))
    trees = {name: shard_flow(job.adapter, world.student_mesh, **options)
             for name, options in tree_options(job).items()}
    if config.gan.weight > 0:
        trees["discriminator"] = Discriminator(job.adapter.feature_size)
        shard(trees["discriminator"], [], world.student_mesh)
    for spec in job.plan:
        build_role(job, world, spec, trees[spec.tree])
    for name, module in trees.items():
        print(f"rank 0: {name} with {human_count(num_parameters(module))} parameters, "
              f"{human_bytes(local_bytes(module.parameters()))} in its shards")
    dist.destroy_process_group()
    print(f"dry run passed: {world_size} ranks")


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def main() -> int:
    args, (rank, world_size, _) = parse_args(__doc__), env_rank()
    run_dir = None
    try:
        config = cfg.load(args.config, args.overrides, job="dmd")
        if args.dry_run:
            dry_run(config)
            return 0
        if args.check:
            job = prepare(config, config.topology.world_size or world_size)
            print("\n".join([f"{args.config}: ok", *cfg.convention_lines(config), *job.notes]))
            return 0
        run_dir = Path(config.run_root) / config.name
        job = prepare(config, world_size)
        device = pick_device(config.device)
        check_memory(job, device_memory(device))
        lock = lock_run(run_dir) if rank == 0 else None
    except ValueError as error:
        if rank != 0:
            time.sleep(5)  # rank 0 most likely fails for the same reason and says so: torchrun then ends this rank
        tell_failure(error, Where(rank), run_dir)
        return 2
    try:
        return launch(job, device)
    finally:
        if lock is not None:
            lock.close()


def launch(job: Job, device: torch.device) -> int:
    """Join the other ranks and live this rank's life; any failure ends the process, and with it the job."""
    if job.config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is only then reproducible
        torch.use_deterministic_algorithms(True, warn_only=True)
    where = Where(env_rank()[0], ["trainer"] * job.world_size)
    try:
        log = open_run(job.run_dir, cfg.to_yaml(job.config), where.rank)
        stop_request = StopRequest(job.run_dir, job.config.checkpoint.max_minutes)
        with deadline(2 * job.config.topology.timeout_s, "not all ranks have started", where, job.run_dir):
            world = start(plan_ranks(job.world_size, env_rank()[2], []), device, job.config.topology.timeout_s)
        train(job, world, log, stop_request, where)
        stop(world)
        return 0
    except BaseException as error:  # Ctrl-C too
        fail(error, where, job.run_dir, memory_remedy=MEMORY_REMEDY)


if __name__ == "__main__":
    sys.exit(main())
