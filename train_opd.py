# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation of a language model: the student samples, a frozen teacher scores the student's own top-K
tokens at every position, and the student minimises the reverse KL on that support.

    torchrun --standalone --nproc_per_node=3 train_opd.py --config configs/quickstart.yaml optim.lr=1e-4
    python train_opd.py --config configs/quickstart.yaml --check     # config, data and file headers; exit code 2
    python train_opd.py --config configs/quickstart.yaml --dry-run   # build the job at its world size, no weights

The last ranks serve the teacher (topology.teacher_ranks; 0: it is sharded over the student ranks), the others train.
The same command again resumes from the newest checkpoint. Every option: distill_core/config.py.

Legend: B rows, T tokens, N response positions, K top ids, D hidden size, V vocabulary; h, w: hidden states and head.
"""
from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_core import checkpoint as ckpt
from distill_core import config as cfg
from distill_core.build import (build_head, build_lm, build_replica, check_folder, common_vocab, load_progress,
                                largest_batch, memory_plan, shard_meta)
from distill_core.data import Prompt, answer_matches, batch_at, load_tokenizer, read_prompts
from distill_core.fsdp import gather_into, local_bytes, num_parameters
from distill_core.generate import Engine, Sample
from distill_core.losses_kl import (forward_kl_full, forward_kl_topk, generalized_kl_topk, importance_weight, jsd_topk,
                                    reverse_kl_full, reverse_kl_sampled, reverse_kl_topk, reverse_kl_topk_unnormalized,
                                    tail_bucket_kl_topk)
from distill_core.metrics import Console, Journal, Metrics, human_bytes, human_count, read_jsonl, table
from distill_core.models.lm import LMConfig
from distill_core.phases import lr_at
from distill_core.report import write_report
from distill_core.role import (COUNTERS, PhaseLoss, PhaseResult, Role, adamw, restore_role, role_state, role_tensors,
                               run_phase)
from distill_core.rollout import MicroBatch, Packer, Row, claim, collate, deal, plan_batches, record_batch, record_samples
from distill_core.run import (StopRequest, Where, check_run_dir, deadline, fail, lock_run, mark, open_run, parse_args,
                              tell_failure)
from distill_core.safetensors_io import open_folder, weights_digest
from distill_core.teacher import (Handle, InlineTeacher, Links, RemoteTeacher, Reply, Request, Shape, Teachers,
                                  serve)
from distill_core.topk_logprobs import head_logprobs, sparse_head_logits
from distill_core.topology import (Pulse, RankPlan, World, agree_equal, agree_max, device_memory, env_rank,
                                   make_groups, peak_memory, pick_device, plan_ranks, shared_counter, start,
                                   step_verdict, stop)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Losses on the whole-vocabulary probabilities of single tokens.
WHOLE_VOCABULARY = ("generalized_kl_topk", "tail_bucket_kl_topk", "reverse_kl_topk_unnormalized",
                    "reverse_kl_sampled")
PROBE_TOKENS = 16
MAX_PROBE_TILT = 0.02
MEMORY_REMEDY = ("lower train.micro_batch_tokens, rollout.batch_size or the chunk sizes, set "
                 "student.activation_checkpointing=true, or start more ranks")

# Keys that may change between a run and its resumption without changing what is computed.
FREE_KEYS = ("name", "run_root", "max_steps", "device", "student.path", "student.activation_checkpointing",
             "teacher.path", "teacher.name", "teacher.ranks", "teacher.chunk_size", "teacher.param_offload",
             "topology.", "data.train", "rollout.balance", "data.eval", "rollout.batch_size", "loss.chunk_size",
             "train.micro_batch_tokens", "eval.", "probe.", "alarms.", "checkpoint.", "metrics.")


# ---------------------------------------------------------------------------------------------------------------------
# What a run is, read and checked on every rank before any process group exists

@dataclass(frozen=True)
class Job:
    config: cfg.OPDConfig
    plan: RankPlan
    run_dir: Path
    tokenizer: Any
    train: list[Prompt]
    held_out: list[Prompt]
    student_lm: LMConfig
    teacher_lms: tuple[LMConfig, ...]  # one a teacher
    vocab_size: int  # rows of all heads that are compared
    stop_ids: tuple[int, ...]
    teacher_digests: tuple[str, ...]
    notes: list[str]  # for the start block

    @property
    def teachers(self) -> tuple[cfg.TeacherConfig, ...]:
        return cfg.teachers_of(self.config)

    def route(self, prompt: Prompt) -> int:
        """Index of the teacher of a prompt; lines need not name the only one."""
        return 0 if prompt.teacher is None else [teacher.name for teacher in self.teachers].index(prompt.teacher)


def prepare(config: cfg.OPDConfig, world_size: int, local_world_size: int) -> Job:
    """Read config.json files, headers, tokenizers and prompts; ValueError of one line for what a user can mend."""
    cfg.check_world(config, world_size)
    run_dir = Path(config.run_root) / config.name
    check_run_dir(run_dir)
    plan = plan_ranks(world_size, local_world_size, cfg.teacher_ranks_of(config))
    folders = [teacher.path for teacher in cfg.teachers_of(config)]
    student_lm, teacher_lms = check_folder(config.student.path), tuple(check_folder(folder) for folder in folders)
    tokenizer = shared_tokenizer(config, folders)
    vocab_size = min(common_vocab(student_lm, teacher_lm, tokenizer.num_ids) for teacher_lm in teacher_lms)
    stop_ids = tokenizer.stop_ids if config.rollout.stop_ids is None else config.rollout.stop_ids
    check_ids(config, vocab_size, stop_ids)
    train, notes = read_split(config, "data.train", config.data.train, tokenizer, vocab_size)
    held_out = []
    if config.eval.every:
        held_out, more = read_split(config, "data.eval", (config.data.eval,), tokenizer, vocab_size)
        held_out, notes = held_out[:config.eval.num_prompts], notes + more
    check_prompts(config, train, held_out, tokenizer)
    sizes = sorted({lm.vocab_size for lm in (student_lm, *teacher_lms)})
    if len(sizes) > 1:
        notes.append(f"vocabulary cut to the first {vocab_size} rows of heads with {' and '.join(map(str, sizes))}: "
                     "the others are padding beyond all tokenizers")
    if not stop_ids:
        notes.append("no stop id is known: every response runs to max_new_tokens (set rollout.stop_ids)")
    longest = row_tokens(config)
    limit = min(lm.max_length for lm in (student_lm, *teacher_lms))
    if longest > limit:
        notes.append(f"warning: up to {longest} tokens, beyond the {limit} (max_position_embeddings) for which student "
                     "or teacher was trained")
    digests = tuple(weights_digest(open_folder(folder)) for folder in folders)
    job = Job(config, plan, run_dir, tokenizer, train, held_out, student_lm, teacher_lms, vocab_size, tuple(stop_ids),
              digests, notes + cfg.warnings(config))
    newest = ckpt.newest_state(run_dir / "checkpoints")
    if newest is not None:  # refused here already, before anything of the earlier run is touched
        check_saved(job, *newest)
    return job


def shared_tokenizer(config: cfg.OPDConfig, teachers: Sequence[str]) -> Any:
    """The student's tokenizer, once it is known that the teachers' give every id the same meaning."""
    student = load_tokenizer(config.student.path, config.data.tokenizer)
    for path in (config.student.path, *teachers):
        if config.data.tokenizer == "byte" and (Path(path) / "tokenizer.json").exists():
            raise ValueError(f"data.tokenizer: byte, but {path} has a tokenizer.json: its ids are not bytes (set "
                             "data.tokenizer=auto)")
        if load_tokenizer(path, config.data.tokenizer).fingerprint != student.fingerprint:
            raise ValueError(f"student.path {config.student.path} and teacher.path {path} have different tokenizers: "
                             "their token ids do not mean the same (choose models of one tokenizer family)")
    return student


def check_ids(config: cfg.OPDConfig, vocab_size: int, stop_ids: Sequence[int]) -> None:
    if config.loss.top_k > vocab_size:
        raise ValueError(f"loss.top_k: {config.loss.top_k} exceeds the vocabulary of {vocab_size} (lower it)")
    outside = [token for token in stop_ids if token >= vocab_size]
    if outside:
        place = "rollout.stop_ids" if config.rollout.stop_ids else f"the end-of-text ids of {config.student.path}"
        raise ValueError(f"{place}: {outside} are outside the vocabulary of {vocab_size} (set rollout.stop_ids)")


def check_prompts(config: cfg.OPDConfig, train: Sequence[Prompt], held_out: Sequence[Prompt], tokenizer: Any) -> None:
    if len(train) < config.train.prompts_per_step:
        raise ValueError(f"data.train: {len(train)} prompts are fewer than train.prompts_per_step = "
                         f"{config.train.prompts_per_step} (lower it or add prompts)")
    if any(prompt.answer is not None for prompt in held_out) and not tokenizer.has_text:
        raise ValueError(f"data.eval: {config.data.eval} has answers, but responses cannot be turned into text (put "
                         f"tokenizer.json into {config.student.path}, pip install -r requirements-text.txt)")


def read_split(config: cfg.OPDConfig, key: str, paths: Sequence[str], tokenizer: Any,
               vocab_size: int) -> tuple[list[Prompt], list[str]]:
    """Prompts of one split and a line that says what was read, dropped or cut."""
    prompts, counts = read_prompts(paths, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens,
                                   long_prompts=config.data.long_prompts)
    for prompt in prompts:
        if max(prompt.ids) >= vocab_size:
            raise ValueError(f"{prompt.source}: token id {max(prompt.ids)} is outside the vocabulary of {vocab_size}")
        names = [teacher.name for teacher in cfg.teachers_of(config)]
        if prompt.teacher not in (None, *names):
            raise ValueError(f"{prompt.source}: teacher {prompt.teacher!r} is not configured (there is "
                             f"{', '.join(map(repr, names))})")
        if prompt.teacher is None and len(names) > 1:
            raise ValueError(f"{prompt.source}: has no `teacher` key, but there are {len(names)} teachers (name one of "
                             f"{', '.join(map(repr, names))})")
    return prompts, [f"{key}: {counts.read} prompts read, {counts.dropped} dropped and {counts.cut} cut for length"]


def fingerprints(job: Job) -> dict[str, Any]:
    """What must be equal for a resumed run to continue the same computation, as flat dotted keys."""
    flat = cfg.flatten(job.config, leave_out=FREE_KEYS)
    if job.config.optim.schedule != "constant":
        flat["max_steps"] = job.config.max_steps
    if job.config.rollout.async_depth:
        flat["checkpoint.every"] = job.config.checkpoint.every  # the rollout after a checkpoint is not sampled ahead
    prompts = hashlib.sha256(json.dumps([(prompt.ids, job.route(prompt)) for prompt in job.train]).encode()).hexdigest()
    for index, (lm, digest) in enumerate(zip(job.teacher_lms, job.teacher_digests)):
        section = "teacher" if len(job.teachers) == 1 else f"teachers[{index}]"
        flat |= {f"{section}.model": repr(lm), f"{section}.weights": digest}
    return flat | {"data.train.sha256": prompts, "tokenizer.sha256": job.tokenizer.fingerprint,
                   "student.model": repr(job.student_lm), "vocab_size": job.vocab_size, "stop_ids": list(job.stop_ids)}


# ---------------------------------------------------------------------------------------------------------------------
# Teacher: ranks of its own, or inline

def serve_teacher(job: Job, world: World, stop_request: StopRequest | None = None,
                  where: Where | None = None) -> None:
    """The whole life of a teacher rank."""
    where, pulse = where or Where(world.rank), loading(world)
    index = job.plan.teacher_of(world.rank)
    teacher = job.teachers[index]
    # For the start-up probe it serves the student's own folder first.
    for folder in [job.config.student.path] * job.config.probe.enabled + [teacher.path]:
        where.phase = "load"
        progress = load_progress(folder, prints=world.rank == job.plan.teachers[index][0], beat=pulse.beat)
        model = build_lm(folder, world.teacher_meshes[index], world.device, dtype=DTYPES[teacher.dtype],
                         trainable=False, offload=teacher.param_offload, progress=progress)
        shape = Shape(job.vocab_size, model.config.hidden_size, DTYPES[teacher.dtype])
        pulse.finish()
        where.phase = "serve"
        serve(model, links_of(job, world, index), shape, chunk_size=teacher.chunk_size,
              stop_wanted=stop_request.wanted if stop_request else lambda: False)
        del model
        gc.collect()  # FSDP modules are reference cycles: without this the probe's weights stay beside the teacher's


def loading(world: World) -> Pulse:
    """A load may take longer than timeout_s: the other ranks, teachers and students, see that it goes on."""
    return Pulse(world.control, world.timeout_s / 4)


def connect_teachers(job: Job, world: World, *, probing: bool) -> Teachers:
    """The student ranks' side; `probing`: every teacher serves the student's own weights."""
    pulse = loading(world)
    teachers = Teachers([connect_teacher(job, world, index, job.config.student.path if probing else teacher.path, pulse)
                         for index, teacher in enumerate(job.teachers)])
    pulse.finish()
    teachers.open()
    return teachers


def connect_teacher(job: Job, world: World, index: int, folder: str, pulse: Pulse) -> InlineTeacher | RemoteTeacher:
    teacher, temperature = job.teachers[index], job.config.rollout.temperature
    dtype = DTYPES[teacher.dtype]
    head = build_head(folder, world.student_mesh, world.device, dtype=dtype)
    if not job.plan.is_inline(index):
        shape = Shape(job.vocab_size, head.in_features, dtype)
        return RemoteTeacher(links_of(job, world, index), shape, head, temperature=temperature)
    model = build_lm(folder, world.student_mesh, world.device, dtype=dtype, trainable=False,
                     offload=teacher.param_offload,
                     progress=load_progress(folder, prints=world.rank == 0, beat=pulse.beat))
    return InlineTeacher(model, head, vocab_size=job.vocab_size, temperature=temperature, chunk_size=teacher.chunk_size)


def links_of(job: Job, world: World, index: int) -> Links:
    return Links(world.rank, job.plan.students, job.plan.teachers[index], world.control, world.teachers_control[index],
                 world.device, world.timeout_s)


# ---------------------------------------------------------------------------------------------------------------------
# Student ranks: the objects of a run

@dataclass
class Run:
    job: Job
    world: World
    log: logging.Logger
    student: Role
    replica: nn.Module  # plain copy of the student for sampling: no collective inside decode
    engine: Engine  # samples from the replica
    teachers: Teachers | None = None
    step: int = 0  # attempts so far
    position: int = 0  # prompts drawn so far, over all ranks
    rolled_s: float = 0.0  # spent on sampling since the last step
    evaluated: int = -1  # step of the last evaluation
    replicated: int = -1  # updates that the replica has seen
    alarms_on: set[str] = dataclasses.field(default_factory=set)  # each is told once, when it goes on
    where: Where = dataclasses.field(default_factory=partial(Where, 0))  # in case this rank fails

    @property
    def index(self) -> int:
        """This rank's place among the student ranks."""
        return self.job.plan.students.index(self.world.rank)

    def pulse(self) -> Pulse:
        """What keeps the teachers and the ranks that finish early from taking a rank that samples for dead."""
        return Pulse(self.world.students_control, self.world.timeout_s / 4, self.teachers.progress)

    def sampler(self) -> Engine:
        """The engine, its replica refreshed in place: a collective where the student's weights have changed."""
        if self.replicated != self.student.successes:
            gather_into(self.student.module, self.replica)
            self.replicated = self.student.successes
        return self.engine

    @property
    def roles(self) -> list[Role]:
        """Everything that a gradient could leak into."""
        frozen = [teacher.head if isinstance(teacher, RemoteTeacher) else teacher.model for teacher in self.teachers]
        return [self.student, *(Role("teacher", module) for module in frozen)]


def build_student(job: Job, world: World, log: logging.Logger) -> Run:
    config, optim = job.config, job.config.optim
    model = build_lm(config.student.path, world.student_mesh, world.device, dtype=torch.float32, trainable=True,
                     compute_dtype=DTYPES[config.student.dtype],
                     progress=load_progress(config.student.path, prints=world.rank == 0, beat=loading(world).beat))
    schedule = partial(lr_at, lr=optim.lr, schedule=optim.schedule, warmup_steps=optim.warmup_steps,
                       max_steps=config.max_steps, min_lr_frac=optim.min_lr_frac)
    student = Role("student", model, world.student_mesh.get_group(), world.students_control,
                   student_optimizer(config, model), schedule)
    replica = build_replica(job.student_lm, world.device, rollout_dtype(config), vocab_size=job.vocab_size)
    return Run(job, world, log, student, replica, Engine(replica))


def student_optimizer(config: cfg.OPDConfig, model: nn.Module) -> torch.optim.Optimizer:
    optim = config.optim
    return adamw(model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)


def rollout_dtype(config: cfg.OPDConfig) -> torch.dtype:
    return DTYPES[config.rollout.dtype or config.student.dtype]


# ---------------------------------------------------------------------------------------------------------------------
# Sampling, with the teachers scoring what has finished

@dataclass(frozen=True)
class Scored:
    """A micro-batch and the teachers' answer to it, on its way."""

    batch: MicroBatch
    handle: Handle
    through: int  # the number of requests whose answers all ranks wait for before any trains on this one


@dataclass(frozen=True)
class Rollout:
    """The samples of the next updates_per_rollout steps on this rank; as many micro-batches as on any other."""

    samples: list[list[Sample]]  # of each update
    batches: list[list[Scored]]
    sampled_at: int  # the step whose weights have sampled


def roll(run: Run) -> Rollout:
    """Sample from the next prompts; a micro-batch is scored as soon as it is full, while other rows still decode."""
    config, began, pulse, run.where.phase = run.job.config, time.monotonic(), run.pulse(), "rollout"
    size, num_updates = config.train.prompts_per_step, config.rollout.updates_per_rollout
    indices = batch_at(run.position, size * num_updates, len(run.job.train), config.seed)
    prompts, n = [run.job.train[index] for index in indices], config.rollout.samples_per_prompt
    own_k = config.loss.top_k if looks_at_vocabulary(run) else 0
    rollout = Rollout([[] for _ in range(num_updates)], [[] for _ in range(num_updates)], run.step)
    packers = [Packer(config.train.micro_batch_tokens) for _ in range(num_updates)]

    def submit(update: int, groups: Sequence[Sequence[Row]]) -> None:
        rollout.batches[update].extend(score(run, rows, own_k=own_k) for rows in groups)

    for place, sample in start_sampling(run, prompts, pulse):
        update = place // (size * n)
        rollout.samples[update].append(sample)
        submit(update, packers[update].add(Row(sample, run.job.route(prompts[place // n]))))
    for update, packer in enumerate(packers):
        submit(update, packer.rest())
    pulse.finish()
    counts = agree_max(run.world.students_control, *(max(len(batches), 1) for batches in rollout.batches))
    for update, count in enumerate(counts):
        submit(update, [[]] * (int(count) - len(rollout.batches[update])))
    wait_alike(run, rollout)
    run.position += size * num_updates
    run.rolled_s += time.monotonic() - began
    return rollout


def wait_alike(run: Run, rollout: Rollout) -> None:
    """Requests are made as samples finish, so a rank may have asked about another update first than its peers have."""
    numbers = [item.handle.number for batches in rollout.batches for item in batches]
    through = iter(itertools.accumulate(agree_max(run.world.students_control, *numbers), max))
    for batches in rollout.batches:
        batches[:] = [dataclasses.replace(item, through=int(next(through))) for item in batches]


def start_sampling(run: Run, prompts: Sequence[Prompt], pulse: Pulse) -> Iterator[tuple[int, Sample]]:
    """Samples of this rank's part of the prompts as they finish; place = samples_per_prompt * (index of the prompt) +
    the sample's number."""
    config, rollout, n = run.job.config, run.job.config.rollout, run.job.config.rollout.samples_per_prompt
    ids, num_ranks = [prompt.ids for prompt in prompts], len(run.job.plan.students)
    parts = []
    for first in range(0, len(ids), config.train.prompts_per_step):
        update = ids[first:first + config.train.prompts_per_step]
        parts.append([[first + i for i in part] for part in deal([len(prompt) for prompt in update], num_ranks)])
    dealt = [sum((part[rank] for part in parts), []) for rank in range(num_ranks)]
    batch_size, queue = rollout.batch_size, dealt[run.index]
    if rollout.balance == "shared_counter":
        batch_size = min(batch_size, max(1, n * (len(queue) // 2)))  # a larger one would claim before it has sampled
        queue = claim(dealt, run.index, shared_counter(f"rollout {run.position}"))
    return run.sampler().stream(ids, max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature,
                         top_p=rollout.top_p, top_k=rollout.top_k, stop_ids=run.job.stop_ids, n=n, seed=config.seed,
                         step=run.position // config.train.prompts_per_step,
                         sample_ids=range(run.position * n, (run.position + len(ids)) * n),
                         capture_top_k=config.loss.top_k, batch_size=batch_size, queue=queue, keepalive=pulse.beat)


def looks_at_vocabulary(run: Run) -> bool:
    """Whether the teachers go through their whole vocabulary for the next rollout: masses and some losses need that."""
    config = run.job.config
    every, first = config.metrics.mass_every, run.position // config.train.prompts_per_step
    is_due = every > 0 and any(step % every == 0 for step in range(first, first + config.rollout.updates_per_rollout))
    return is_due or config.loss.mode in (*WHOLE_VOCABULARY, "forward_kl_topk")


def score(run: Run, rows: Sequence[Row], *, own_k: int, for_evaluation: bool = False) -> Scored:
    """Collate and ask. Column 0 of the ids is the sampled token, the others are the student's top K."""
    loss = run.job.config.loss
    batch = collate(rows, top_k=loss.top_k, token_fraction=1.0 if for_evaluation else loss.token_fraction,
                    device=run.world.device)
    request = Request(batch.tokens_BT, batch.lengths_B, batch.counts_B, batch.positions_N, columns(batch, batch.ids_NK),
                      own_k, want_hidden=for_evaluation or loss.mode.endswith("_full"))
    handle = run.teachers.request(request, batch.route_B)
    return Scored(batch, handle, handle.number)


def columns(batch: MicroBatch, ids_NK: Tensor) -> Tensor:
    return torch.cat([batch.targets_N[:, None], ids_NK], dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step

class Times(NamedTuple):
    """Seconds of one step on this rank."""

    waited: float  # for the teachers
    taught: float  # that the teachers have computed meanwhile, or before


def train_step(run: Run, scored: Sequence[Scored], metrics: Metrics) -> tuple[PhaseResult, Times]:
    """One optimizer step on micro-batches whose answers are on their way."""
    config, times = run.job.config, Times(0.0, 0.0)
    names = [teacher.name for teacher in run.job.teachers]

    def compute(item: Scored) -> PhaseLoss:
        nonlocal times
        batch, began = item.batch, time.monotonic()
        reply = run.teachers.result(item.handle, item.through)
        times = Times(times.waited + time.monotonic() - began, times.taught + reply.busy_s)
        hidden_BTD = run.student.module(batch.tokens_BT, recompute=config.student.activation_checkpointing)
        loss_N, logits_NK = position_losses(run, batch, reply, hidden_BTD.flatten(0, 1)[batch.rows_N])
        record_batch(metrics, batch, reply, logits_NK, names)
        return PhaseLoss(loss_N.sum(), len(batch.counts_B), normalizer=batch.num_positions)

    result = run_phase(run.student, scored, compute, roles=run.roles, max_grad_norm=config.optim.max_grad_norm)
    return result, times


def position_losses(run: Run, batch: MicroBatch, reply: Reply, hidden_ND: Tensor) -> tuple[Tensor, Tensor | None]:
    """Loss of every scored position, and the student's logits at its captured ids where the mode has them."""
    loss = run.job.config.loss
    if loss.mode.endswith("_full"):
        divergence = reverse_kl_full if loss.mode == "reverse_kl_full" else forward_kl_full
        return full_vocabulary(run, divergence, batch, hidden_ND, reply), None
    is_forward = loss.mode == "forward_kl_topk"
    logits_NK, lse_N = student_logits(run, hidden_ND, columns(batch, reply.own_ids_NK if is_forward else batch.ids_NK))
    sampled_N, logits_NK = logits_NK[:, 0], logits_NK[:, 1:]
    teacher_NK = reply.own_logits_NK if is_forward else reply.logits_NK[:, 1:]
    if loss.mode == "reverse_kl_topk":
        loss_N = reverse_kl_topk(logits_NK, teacher_NK, log_prob_min_clamp=loss.log_prob_min_clamp)
    elif loss.mode == "jsd_topk":
        loss_N = jsd_topk(logits_NK, teacher_NK, beta=loss.jsd_beta)
    elif is_forward:
        loss_N = forward_kl_topk(logits_NK, teacher_NK)
    elif loss.mode == "reverse_kl_sampled":
        loss_N = reverse_kl_sampled(sampled_N - lse_N, reply.logits_NK[:, 0] - reply.lse_N, clip=loss.advantage_clip)
    else:
        mass_aware = {"generalized_kl_topk": generalized_kl_topk, "tail_bucket_kl_topk": tail_bucket_kl_topk,
                      "reverse_kl_topk_unnormalized": reverse_kl_topk_unnormalized}[loss.mode]
        loss_N = mass_aware(logits_NK, teacher_NK, lse_N, reply.lse_N)
    if loss.importance_clip is not None:
        loss_N = loss_N * importance_weight(sampled_N - lse_N, batch.logprobs_N, clip=loss.importance_clip)
    return loss_N, None if is_forward else logits_NK


def student_logits(run: Run, hidden_ND: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor | None]:
    """(logits at the ids, logsumexp over the vocabulary or None): only some losses need to go through all of it."""
    config, vocab = run.job.config, run.job.vocab_size
    temperature, head = config.rollout.temperature, run.student.module.lm_head
    if config.loss.mode in WHOLE_VOCABULARY or config.loss.importance_clip is not None:
        return head(hidden_ND, lambda h, w: head_logprobs(
            h, cut(w, vocab), ids_NK, config.loss.chunk_size, temperature))
    return head(hidden_ND, lambda h, w: sparse_head_logits(
        h, cut(w, vocab), ids_NK, deterministic=config.deterministic)) / temperature, None


def full_vocabulary(run: Run, divergence: Callable[..., Tensor], batch: MicroBatch, hidden_ND: Tensor,
                    reply: Reply) -> Tensor:
    """`divergence` over the whole vocabulary, [N], with both heads gathered once around the chunked computation."""
    vocab, config = run.job.vocab_size, run.job.config

    def against(index: int, teacher: InlineTeacher | RemoteTeacher, h: Tensor, w: Tensor) -> Tensor:
        return teacher.head(reply.hidden[index], lambda teacher_h, teacher_w: divergence(
            h, cut(w, vocab), teacher_h, cut(teacher_w, vocab), chunk_size=config.loss.chunk_size,
            temperature=config.rollout.temperature))

    def with_all_heads(h: Tensor, w: Tensor) -> Tensor:
        places = [(batch.route_N == index).nonzero().squeeze(1) for index in range(len(run.job.teachers))]
        losses = [against(index, teacher, h[places[index]], w) for index, teacher in enumerate(run.teachers)]
        return torch.cat(losses)[torch.cat(places).argsort()]

    return run.student.module.lm_head(hidden_ND, with_all_heads)


def cut(weight_VD: Tensor, vocab_size: int) -> Tensor:
    """The rows that both heads share; where that is all of them the weight itself: a slice costs a copy in backward."""
    return weight_VD if len(weight_VD) == vocab_size else weight_VD[:vocab_size]


# ---------------------------------------------------------------------------------------------------------------------
# Start-up probe and evaluation

def probe(run: Run) -> str:
    """Let every teacher side serve the student's own weights: its answers must be what the student computes itself."""
    return "\n".join(probe_teacher(run, index) for index in range(len(run.job.teachers)))


def probe_teacher(run: Run, index: int) -> str:
    """Three paths are compared on the same tokens: the sampling replica, the training forward and the teacher service.

    If the first two agree, the service is wrong (a shift, a temperature, a dtype); else the student side is.
    """
    config, world = run.job.config, run.world
    prompts = [run.job.train[(2 * run.index + i) % len(run.job.train)].ids[:64] for i in range(2)]
    samples = in_order(run.sampler().stream(
        prompts, max_new_tokens=PROBE_TOKENS, temperature=config.rollout.temperature, seed=config.seed,
        sample_ids=[2 * run.index, 2 * run.index + 1], capture_top_k=config.loss.top_k))
    scored = score(run, [Row(sample, index) for sample in samples], own_k=config.loss.top_k, for_evaluation=True)
    batch, reply = scored.batch, run.teachers.result(scored.handle, scored.through)
    with torch.no_grad():
        hidden_ND = run.student.module(batch.tokens_BT).flatten(0, 1)[batch.rows_N]
        logits_NK, _ = run.student.module.lm_head(hidden_ND, lambda h, w: head_logprobs(
            h, cut(w, run.job.vocab_size), batch.ids_NK, chunk_size=config.loss.chunk_size,
            temperature=config.rollout.temperature))
        kls = [reverse_kl_topk(logits_NK, other_NK).mean().nan_to_num(torch.inf)
               for other_NK in (reply.logits_NK[:, 1:], batch.topk_logprobs_NK)]
    scale = temperature_ratio(logits_NK, reply.logits_NK[:, 1:])
    found = agree_max(world.students_control, *map(float, kls), abs(scale - 1.0))
    return judge_probe(config, run.job.teachers[index], *found)


def in_order(stream: Iterator[tuple[int, Sample]]) -> list[Sample]:
    return [sample for _, sample in sorted(stream, key=lambda item: item[0])]


def temperature_ratio(logits_NK: Tensor, other_NK: Tensor) -> float:
    """Slope of `other` against `logits` within each position: 1 / 1.1 for a temperature of 1.1 on that side.

    Rounding to bf16 makes single logits noisy, and small KLs with them, but not the slope over all of them.
    """
    own, other = (x - x.mean(dim=-1, keepdim=True) for x in (logits_NK, other_NK))
    return float((own * other).sum() / own.square().sum())


def judge_probe(config: cfg.OPDConfig, teacher: cfg.TeacherConfig, served: float, sampled: float,
                tilt: float) -> str:
    """served, sampled: KL in nats per token of the training forward against the teacher service and the sampler; tilt:
    how far the ratio of the service's temperature to the student's is from 1."""
    dtypes = {config.student.dtype, teacher.dtype, config.rollout.dtype or config.student.dtype}
    limit = config.probe.max_kl_fp32 if dtypes == {"float32"} else config.probe.max_kl_bf16
    found = (f"KL of the student against its own weights served by {teacher.name} {served:.2e}, against its sampler "
             f"{sampled:.2e}, limit {limit:.0e}")
    if sampled > limit:
        raise ValueError(f"start-up probe: the student's training forward and its sampler disagree: {found}")
    if tilt > MAX_PROBE_TILT:
        raise ValueError(f"start-up probe: the teacher side disagrees: its temperature is off by {tilt:.1%}: {found}")
    if served > limit:
        raise ValueError(f"start-up probe: the teacher side disagrees with both the student's forwards: {found} "
                         "(probe.max_kl_bf16 is the limit where bfloat16 is used)")
    return f"start-up probe passed: {found}"


def evaluate(run: Run) -> dict[str, float]:
    """Fresh samples on held-out prompts: whole-vocabulary reverse KL, lengths, exact match where there are answers."""
    config, began, pulse = run.job.config, time.monotonic(), run.pulse()
    mine = sorted(deal([len(prompt.ids) for prompt in run.job.held_out], len(run.job.plan.students))[run.index])
    prompts, n = [run.job.held_out[index] for index in mine], config.eval.n
    samples = in_order(run.sampler().stream(
        [prompt.ids for prompt in prompts], max_new_tokens=config.eval.max_new_tokens,
        temperature=config.eval.temperature, top_p=config.eval.top_p, stop_ids=run.job.stop_ids, n=n,
        seed=config.seed + 1, step=run.step, sample_ids=[index * n + j for index in mine for j in range(n)],
        capture_top_k=config.loss.top_k, batch_size=config.rollout.batch_size, keepalive=pulse.beat))
    pulse.finish()
    metrics = Metrics()
    record_kl(run, [Row(sample, run.job.route(prompt)) for sample, prompt in zip(samples[::n], prompts)], metrics)
    texts = [text_of(run, [token for token in sample.tokens if token not in run.job.stop_ids]) for sample in samples]
    record_answers(run, prompts, texts, metrics)
    metrics.mean("eval/response_length", sum(len(s.tokens) for s in samples), len(samples))
    metrics.mean("eval/truncated_frac", sum(not s.finished for s in samples), len(samples))
    metrics.peak("eval/time_s", time.monotonic() - began)
    if run.world.rank == 0:
        write_samples(run, prompts, samples, texts)
    run.evaluated = run.step
    return metrics.reduce(run.world.students_control)


def record_kl(run: Run, rows: Sequence[Row], metrics: Metrics) -> None:
    """KL(student || teacher) per token, at the training temperature, on one sample of each prompt."""
    run.student.module.eval()
    plan = plan_batches([row.num_tokens for row in rows], run.job.config.train.micro_batch_tokens)
    num_batches = int(agree_max(run.world.students_control, max(len(plan), 1))[0])
    groups = [[rows[i] for i in batch] for batch in plan] + [[]] * (num_batches - len(plan))
    for item in [score(run, group, own_k=run.job.config.loss.top_k, for_evaluation=True) for group in groups]:
        batch, reply = item.batch, run.teachers.result(item.handle, item.through)
        with torch.no_grad():
            hidden_ND = run.student.module(batch.tokens_BT).flatten(0, 1)[batch.rows_N]
            kl_N = full_vocabulary(run, reverse_kl_full, batch, hidden_ND, reply)
        metrics.mean("eval/reverse_kl_full", kl_N.sum(), batch.num_positions)
        if len(run.job.teachers) > 1:
            for index, teacher in enumerate(run.job.teachers):
                mine_N = batch.route_N == index
                metrics.mean(f"eval/reverse_kl_full/{teacher.name}", kl_N[mine_N].sum(), mine_N.sum())


def record_answers(run: Run, prompts: Sequence[Prompt], texts: Sequence[str], metrics: Metrics) -> None:
    """exact_match: the first sample; mean@n, pass@n: all n samples of a prompt. Absent where no prompt has answers."""
    n = run.job.config.eval.n
    graded = [[is_correct(run, prompt, text) for text in texts[i * n:(i + 1) * n]]
              for i, prompt in enumerate(prompts) if prompt.answer is not None]
    metrics.mean("eval/exact_match", sum(correct[0] for correct in graded), len(graded))
    metrics.mean("eval/mean_at_n", sum(sum(correct) / n for correct in graded), len(graded))
    metrics.mean("eval/pass_at_n", sum(any(correct) for correct in graded), len(graded))


def is_correct(run: Run, prompt: Prompt, text: str) -> bool | None:
    """None where the data has no answer."""
    return None if prompt.answer is None else answer_matches(text, prompt.answer, run.job.config.eval.answer_pattern)


def text_of(run: Run, ids: Sequence[int]) -> str:
    """Decoded, or the ids themselves where the folder has no tokenizer and the data consists of ids."""
    return run.job.tokenizer.decode(ids) if run.job.tokenizer.has_text else " ".join(map(str, ids))


def write_samples(run: Run, prompts: Sequence[Prompt], samples: Sequence[Sample], texts: Sequence[str]) -> None:
    """The first samples of this rank, for people to read."""
    folder, n = run.job.run_dir / "samples", run.job.config.eval.n
    folder.mkdir(exist_ok=True)
    rows = []
    for i, sample in enumerate(samples[:run.job.config.metrics.samples]):
        prompt = prompts[i // n]
        rows.append({"prompt": text_of(run, prompt.ids), "response": texts[i], "answer": prompt.answer,
                     "correct": is_correct(run, prompt, texts[i]), "finished": sample.finished,
                     "length": len(sample.tokens)})
    (folder / f"step_{run.step:08d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint and resume

def open_saver(run: Run, resumed_from: Path | None) -> ckpt.Saver:
    keep = run.job.config.checkpoint
    return ckpt.Saver(run.job.run_dir / "checkpoints", group=run.world.students_control, keep_last=keep.keep_last,
                      keep_every=keep.keep_every, resumed_from=resumed_from)


def start_saving(run: Run, saver: ckpt.Saver) -> None:
    """Copy the state and write it in the background; it is published at a later step."""
    config = run.job.config
    finish_saving(run, saver)
    state = {"job": "opd", "step": run.step, "position": run.position, "evaluated": run.evaluated,
             "roles": {"student": role_state(run.student)},
             "config": dataclasses.asdict(config), "fingerprints": fingerprints(run.job),
             "allowed_drift": list(config.checkpoint.allow_drift), "torch": torch.__version__}
    saver.start(run.step, role_tensors(run.student), state)


def finish_saving(run: Run, saver: ckpt.Saver) -> Path | None:
    """Wait until what is being written is published, telling the teachers that this rank is alive."""
    while saver.poll(0.5):
        run.teachers.progress()
    return saver.finish()


def check_saved(job: Job, manifest: Path, state: dict[str, Any]) -> None:
    """ValueError of one line unless the job can continue from this state, before any weight is touched."""
    ckpt.check_state(state, job="opd", tables=("fingerprints",), source=manifest)
    ckpt.compare_fingerprints(state["fingerprints"], fingerprints(job), job.config.checkpoint.allow_drift)
    counters = [f"roles.student.{counter}" for counter in COUNTERS]
    ckpt.check_counts(state, ("step", "position", "evaluated", *counters), source=manifest)


def resume(run: Run) -> Path | None:
    """Continue from the newest checkpoint that verifies; None in a fresh run."""
    group = run.world.students_control
    found = ckpt.find_latest(run.job.run_dir / "checkpoints", group=group, beat=run.teachers.progress)
    if found is None:
        return None
    check_saved(run.job, found.folder / ckpt.MANIFEST, found.state)
    ckpt.load(found, role_tensors(run.student), group=group, beat=run.teachers.progress)
    restore_role(run.student, found.state["roles"]["student"])
    run.step, run.position, run.evaluated = (found.state[key] for key in ("step", "position", "evaluated"))
    return found.folder


# ---------------------------------------------------------------------------------------------------------------------
# The loop

def build_run(job: Job, world: World, log: logging.Logger, where: Where) -> Run:
    """The student with its teachers, after the start-up probe."""
    where.phase = "load"
    run = build_student(job, world, log)
    run.where = where
    if job.config.probe.enabled:
        run.teachers = connect_teachers(job, world, probing=True)
        where.phase = "probe"
        log.info(probe(run))
        run.teachers.stop()
        run.teachers = None  # freed before the real ones are built
        gc.collect()
        where.phase = "load"
    run.teachers = connect_teachers(job, world, probing=False)
    return run


def train(job: Job, world: World, log: logging.Logger, stop_request: StopRequest, where: Where | None = None) -> None:
    """The whole life of a student rank."""
    config, where = job.config, where or Where(world.rank)
    log.info(start_block(job, world))
    run = build_run(job, world, log, where)
    where.phase = "resume"
    resumed_from = resume(run)
    saver = open_saver(run, resumed_from)
    journal, alarmed, stopped, ahead = open_journal(run, resumed_from), False, False, None
    where.step, problem = run.step, None
    if evaluation_due(run):  # also one that a stop request has cut off
        log_evaluation(run, journal)

    while run.step < config.max_steps and (ahead is not None or not stopped):
        rollout = ahead or roll(run)
        next_step = run.step + config.rollout.updates_per_rollout
        may_roll_ahead = config.rollout.async_depth and not stopped and not checkpoint_due(run, next_step)
        ahead = roll(run) if may_roll_ahead else None
        where.phase = "save"
        saver.poll()  # here too, for what is written to be published before the step ends
        for update in range(config.rollout.updates_per_rollout):
            where.step = run.step + 1
            values = step_once(run, rollout, update)
            problem = log_step(run, journal, values) or problem
            alarmed = check_alarms(run, values, journal) or alarmed
        verdict = step_verdict(world.students_control, step=run.step, error=problem, abort=alarmed or is_stuck(run),
                               stop=stop_request.wanted() or run.teachers.stop_wanted)
        stopped = verdict.stop or verdict.abort or stopped
        last = run.step == config.max_steps
        if evaluation_due(run) and (last or not stopped):
            log_evaluation(run, journal)
        where.phase = "save"
        saver.poll()
        if checkpoint_due(run, run.step) or (stopped and ahead is None):
            start_saving(run, saver)
        run.teachers.progress()

    where.phase = "save"
    saved = finish_saving(run, saver) or resumed_from
    where.phase = "end"
    run.teachers.stop()
    journal.close()
    if world.rank == 0:
        write_report(job.run_dir)
        log.info(end_block(run, saved))
    if is_stuck(run):
        raise ValueError("student: loss or gradient norm was not finite "
                         f"{config.checkpoint.max_skips_in_a_row} times in a row (checkpoint.max_skips_in_a_row); "
                         f"{saved} is kept (look at the first skip in metrics.jsonl; lower the learning rate)")
    if alarmed:
        raise RuntimeError(f"stopped by an alarm at step {run.step}; checkpoint {saved} is kept")
    if world.rank == 0:
        mark(job.run_dir, "DONE" if run.step >= config.max_steps else "PREEMPTED")


def is_stuck(run: Run) -> bool:
    """Nothing can be expected of the student any more; the same on every rank."""
    return run.student.skips_in_a_row >= run.job.config.checkpoint.max_skips_in_a_row


def evaluation_due(run: Run) -> bool:
    config = run.job.config
    planned = config.eval.at_start if run.step == 0 else passes(run, run.step, config.eval.every)
    return bool(config.eval.every) and run.evaluated != run.step and (planned or run.step == config.max_steps)


def checkpoint_due(run: Run, step: int) -> bool:
    """Whether the rollout that ends at `step` is followed by a checkpoint, apart from those of a stop."""
    return step == run.job.config.max_steps or passes(run, step, run.job.config.checkpoint.every)


def passes(run: Run, step: int, every: int) -> bool:
    """Whether a multiple of `every` is among the steps of the rollout that ends at `step`."""
    return every > 0 and step // every > (step - run.job.config.rollout.updates_per_rollout) // every


def step_once(run: Run, rollout: Rollout, update: int) -> dict[str, float]:
    """Train on one update's part of a rollout, measure; the global metrics of the step, equal on all ranks."""
    metrics, began, run.where.phase = Metrics(), time.monotonic(), "train"
    record_samples(metrics, rollout.samples[update])
    metrics.peak("staleness", run.step - rollout.sampled_at)
    result, times = train_step(run, rollout.batches[update], metrics)
    took_s = time.monotonic() - began
    for name, seconds in {"step": run.rolled_s + took_s, "roll": run.rolled_s, "teacher_wait": times.waited,
                          "train": took_s - times.waited, "teacher_busy": times.taught}.items():
        metrics.peak(f"time/{name}_s", seconds)
    metrics.peak("memory_peak_bytes", peak_memory(run.world.device))
    run.step, run.rolled_s = run.step + 1, 0.0
    values = metrics.reduce(run.world.students_control)
    return values | {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr,
                     "step_applied": int(result.applied), "skipped_steps": run.student.skips,
                     "tokens_per_s": values["tokens"] / values["time/step_s"]}


def check_alarms(run: Run, values: dict[str, float], journal: Journal) -> bool:
    """Warn about values beyond their limits; True if one of them shall stop the run. The same on every rank."""
    nan = float("nan")
    signed = {"student_mass": -values.get("student_mass", nan),  # alarms when it falls
              "entropy_gap": abs(values.get("student_entropy", nan) - values.get("teacher_entropy", nan))}
    stops = False
    for field in dataclasses.fields(run.job.config.alarms):
        name, alarm = field.name, getattr(run.job.config.alarms, field.name)
        value = signed.get(name, values.get(name, nan))
        sign = -1 if name == "student_mass" else 1
        if math.isnan(value):  # not measured at this step: an alarm that is on stays on
            continue
        if alarm.limit is None or not value > sign * alarm.limit:
            run.alarms_on.discard(name)
            continue
        stops = stops or alarm.action == "stop"
        if name not in run.alarms_on:
            side = "below" if sign < 0 else "above"
            journal.event(run.step, "alarm", f"{name} = {sign * value:.4g} is {side} its limit {alarm.limit:.4g}")
        run.alarms_on.add(name)
    return stops


def open_journal(run: Run, resumed_from: Path | None) -> Journal:
    facts = {"device": str(run.world.device), "torch": torch.__version__, "ranks": run.job.plan.world_size,
             "changed": cfg.differences(run.job.config)}
    return Journal(run.job.run_dir, run.log, Console(run.job.config.max_steps), writes=run.world.rank == 0,
                   step=run.step, resumed_from=resumed_from, facts=facts)


def log_step(run: Run, journal: Journal, values: dict[str, float]) -> OSError | None:
    """A full disk is for all ranks to hear of together, in the verdict on this step."""
    config = run.job.config
    try:
        journal.training(run.step, values,
                         shown=run.step % config.metrics.log_every == 0 or run.step == config.max_steps)
        if not values["step_applied"]:
            journal.event(run.step, "skip", f"loss {values['loss']:.4g} or gradient norm {values['grad_norm']:.4g} is "
                                            "not finite")
    except OSError as error:
        return error
    return None


def log_evaluation(run: Run, journal: Journal) -> None:
    run.where.phase = "evaluate"
    journal.evaluation(run.step, evaluate(run))
    if run.world.rank == 0:
        write_report(run.job.run_dir)


# ---------------------------------------------------------------------------------------------------------------------
# Start and end blocks, dry run

def job_memory(job: Job) -> dict[str, dict[str, int]]:
    """Bytes by part for a rank of the student and of each teacher that has ranks of its own."""
    first, *others = [teacher_memory(job, index) for index in range(len(job.teachers))]
    ranks = {"student": first.pop("student")} | {job.teachers[0].name: parts for parts in first.values()}
    for teacher, plan in zip(job.teachers[1:], others):
        ranks["student"] |= {f"{teacher.name}: {part}": size for part, size in plan.pop("student").items()
                             if "teacher" in part}
        ranks |= {teacher.name: parts for parts in plan.values()}
    return ranks


def teacher_memory(job: Job, index: int) -> dict[str, dict[str, int]]:
    """The memory plan of student and one teacher."""
    config, teacher = job.config, job.teachers[index]
    return memory_plan(job.student_lm, job.teacher_lms[index], num_students=len(job.plan.students),
                       num_servers=0 if job.plan.is_inline(index) else len(job.plan.teachers[index]),
                       student_dtype=DTYPES[config.student.dtype], rollout_dtype=rollout_dtype(config),
                       teacher_dtype=DTYPES[teacher.dtype], offload=teacher.param_offload,
                       recompute=config.student.activation_checkpointing, batch_rows=config.rollout.batch_size,
                       row_tokens=row_tokens(config), prompt_tokens=config.data.max_prompt_tokens,
                       samples_per_prompt=config.rollout.samples_per_prompt, micro_batch_tokens=config.train.micro_batch_tokens, vocab_size=job.vocab_size,
                       chunk_size=max(config.loss.chunk_size, teacher.chunk_size))


def row_tokens(config: cfg.OPDConfig) -> int:
    """The longest that a sampled row may get."""
    return config.data.max_prompt_tokens + max(config.rollout.max_new_tokens,
                                               config.eval.max_new_tokens if config.eval.every else 0)


def check_memory(job: Job, available: int) -> None:
    """Refuse before loading what cannot fit."""
    for role, parts in job_memory(job).items():
        needed, largest = sum(parts.values()), max(parts, key=parts.__getitem__)
        if needed > available:
            remedy = "more ranks, bfloat16, a smaller train.micro_batch_tokens, student.activation_checkpointing"
            if role == "student" and (fits := largest_rollout(job, available - needed + parts["KV cache"])) > 0:
                remedy = f"rollout.batch_size={fits} would fit; or {remedy}"
            raise ValueError(f"a {role} rank needs about {human_bytes(needed)} of {human_bytes(available)}; largest "
                             f"part: {largest}, {human_bytes(parts[largest])} ({remedy})")


def largest_rollout(job: Job, available: int) -> int:
    """rollout.batch_size whose keys and values fit into so many bytes."""
    config = job.config
    return largest_batch(job.student_lm, rollout_dtype(config), max(available, 0), row_tokens=row_tokens(config),
                         prompt_tokens=config.data.max_prompt_tokens,
                         samples_per_prompt=config.rollout.samples_per_prompt)


def start_block(job: Job, world: World) -> str:
    config, plan = job.config, job.plan
    roles = [("student", span(plan.students), config.student.path, config.student.dtype, "yes")]
    roles += [(teacher.name, "inline" if plan.is_inline(index) else span(plan.teachers[index]), teacher.path,
               teacher.dtype, "no") for index, teacher in enumerate(job.teachers)]
    memory = [(role, part, human_bytes(size)) for role, parts in job_memory(job).items()
              for part, size in [*parts.items(), ("all", sum(parts.values()))]]
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    return "\n".join([
        f"on-policy distillation '{config.name}': {plan.world_size} ranks, {world.device.type}, "
        f"torch {torch.__version__}",
        "", table(roles, ("role", "ranks", "folder", "compute", "trained")),
        "", table(memory, ("rank of", "memory of a rank (estimate)", "size")),
        "", f"each step: {config.train.prompts_per_step} prompts, {samples} samples, at most "
            f"{human_count(samples * config.rollout.max_new_tokens)} new tokens; loss {config.loss.mode}, "
            f"K {config.loss.top_k}",
        "differs from the defaults: " + (", ".join(cfg.differences(config)) or "nothing"), *job.notes, ""])


def span(ranks: Sequence[int]) -> str:
    contiguous = len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if contiguous else ",".join(map(str, ranks))


def end_block(run: Run, saved: Path | None) -> str:
    run_dir, done = run.job.run_dir, run.step >= run.job.config.max_steps
    evals = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["kind"] == "eval"]
    rows = [(name, *("nan" if line[name] is None else f"{line[name]:.4g}" for line in (evals[0], evals[-1])))
            for name in (evals[0] if evals else {}) if name.startswith("eval/") and name in evals[-1]]
    lines = [f"{'done' if done else 'stopped'} at step {run.step}: {run.student.successes} updates, "
             f"{run.student.skips} skipped"]
    if rows:
        lines += ["", table(rows, ("held-out prompts", f"step {evals[0]['step']}", f"step {evals[-1]['step']}")), ""]
    lines += split_of_time(run.job, [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["kind"] == "train"])
    lines += [f"report: {run_dir / 'report.html'}",
              "export: " + shlex.join(["python", "-m", "distill_core.export", "--checkpoint", str(saved), "--out",
                                       str(run_dir / "export")])]
    return "\n".join(lines if done else [*lines, "the same command again continues from here"])


def split_of_time(job: Job, steps: Sequence[dict[str, Any]]) -> list[str]:
    """Where the time of a step goes, and how many ranks would share it evenly between student and teachers."""
    if not steps:
        return []
    roll, wait, train, taught = (sum(line[f"time/{name}_s"] for line in steps) / len(steps)
                                 for name in ("roll", "teacher_wait", "train", "teacher_busy"))
    lines = [f"mean step: roll {roll:.2f} s, wait {wait:.2f} s, train {train:.2f} s; teacher busy {taught:.2f} s"]
    servers = job.plan.world_size - len(job.plan.students)
    work, taught_work = (roll + train) * len(job.plan.students), taught * servers
    if servers and work + taught_work > 0:
        best = min(max(1, round(job.plan.world_size * taught_work / (work + taught_work))), job.plan.world_size - 1)
        lines += [f"teacher ranks: {servers} of {job.plan.world_size}; by these times {best} would keep students and "
                  f"teachers equally busy" + (" (as it is)" if best == servers else "")]
    return lines


def dry_run(config: cfg.OPDConfig) -> None:
    """Build every role at the intended world size on a fake process group: all shapes and groups, no weights."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

    world_size = config.topology.world_size or env_rank()[1]
    job = prepare(config, world_size, min(world_size, 8))
    leaders = [ranks[0] for index, ranks in enumerate(job.plan.teachers) if not job.plan.is_inline(index)]
    for rank in (0, *leaders):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
        world = make_groups(job.plan, torch.device("cpu"), config.topology.timeout_s)
        if world.is_student:
            print(start_block(job, world))
        for role, model in dry_models(job, world).items():
            print(f"rank {rank}: {role} with {human_count(num_parameters(model))} parameters, "
                  f"{human_bytes(local_bytes(model.parameters()))} in its shards")
        dist.destroy_process_group()
    num_students = len(job.plan.students)
    print(f"dry run passed: {world_size} ranks ({num_students} student, {world_size - num_students} teacher)")


def dry_models(job: Job, world: World) -> dict[str, nn.Module]:
    """What this rank would hold, sharded over its mesh but without storage; the student with its optimizer."""
    models, config = {}, job.config
    if world.is_student:
        models["student"] = shard_meta(job.student_lm, world.student_mesh, dtype=torch.float32, trainable=True,
                                       compute_dtype=DTYPES[config.student.dtype])
        student_optimizer(config, models["student"])
    for index, teacher in enumerate(job.teachers):
        if world.teacher_meshes[index] is not None:
            models[teacher.name] = shard_meta(job.teacher_lms[index], world.teacher_meshes[index],
                                              dtype=DTYPES[teacher.dtype], trainable=False)
    return models


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def main() -> int:
    args, (rank, world_size, local_world_size) = parse_args(__doc__), env_rank()
    run_dir = None
    try:
        config = cfg.load(args.config, args.overrides, job="opd")
        if args.dry_run:
            dry_run(config)
            return 0
        if args.check:
            intended = config.topology.world_size or max(world_size, sum(cfg.teacher_ranks_of(config)) + 1)
            job = prepare(config, intended, min(intended, 8))
            print(f"{args.config}: ok; {len(job.train)} training and {len(job.held_out)} evaluation prompts")
            return 0
        run_dir = Path(config.run_root) / config.name
        job = prepare(config, world_size, local_world_size)
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
        # warn_only: torch refuses cumsum on CUDA, which sampling needs
        torch.use_deterministic_algorithms(True, warn_only=True)
    roles = ["student" if rank in job.plan.students else "teacher" for rank in range(job.plan.world_size)]
    where = Where(env_rank()[0], roles)
    try:
        log = open_run(job.run_dir, cfg.to_yaml(job.config), where.rank)
        # Teacher ranks outlive a signal too: they tell the students, who end their service after the step.
        stop_request = StopRequest(job.run_dir, job.config.checkpoint.max_minutes)
        with deadline(2 * job.config.topology.timeout_s, "not all ranks have started", where, job.run_dir):
            world = start(job.plan, device, job.config.topology.timeout_s)
        everything = json.dumps([fingerprints(job), cfg.flatten(job.config)], sort_keys=True)
        agree_equal(world.control, everything, "config, data or model")
        if world.is_student:
            train(job, world, log, stop_request, where)
        else:
            serve_teacher(job, world, stop_request, where)
        stop(world)
        return 0
    except BaseException as error:  # Ctrl-C too
        fail(error, where, job.run_dir, memory_remedy=MEMORY_REMEDY)


if __name__ == "__main__":
    sys.exit(main())
