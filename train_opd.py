# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation of a language model: the student samples, a frozen teacher scores the student's own top-K tokens
at every position, and the student minimises the reverse KL on that support.

    torchrun --standalone --nproc_per_node=3 train_opd.py --config configs/quickstart.yaml optim.lr=1e-4
    python train_opd.py --config configs/quickstart.yaml --check       # config, data and file headers; exit code 2
    python train_opd.py --config configs/quickstart.yaml --dry-run     # build the job at its world size, without weights

The last ranks serve the teacher (topology.teacher_ranks; 0: it is sharded over the student ranks), the others train. The
same command again resumes from the newest checkpoint. Every option: distill_core/config.py.

Legend: B rows, T tokens, N response positions, K top ids, D hidden size, V vocabulary.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_core import checkpoint as ckpt
from distill_core import config as cfg
from distill_core.build import (build_head, build_lm, build_replica, check_folder, common_vocab, memory_plan, shard_meta)
from distill_core.data import Prompt, answer_matches, batch_at, load_tokenizer, read_prompts
from distill_core.fsdp import gather_into, local_bytes, num_parameters
from distill_core.generate import Sample, generate
from distill_core.losses_kl import (forward_kl_full, forward_kl_topk, reverse_kl_full, reverse_kl_sampled,
                                    reverse_kl_topk, topk_diagnostics)
from distill_core.metrics import Console, JsonlWriter, Metrics, human_bytes, human_count, read_jsonl, table
from distill_core.models.lm import LMConfig
from distill_core.phases import lr_at
from distill_core.report import write_report
from distill_core.role import (PhaseLoss, PhaseResult, Role, adamw, restore_role, role_state, role_tensors, run_phase)
from distill_core.rollout import MicroBatch, deal, pack, plan_batches, repetition_frac
from distill_core.run import StopRequest, mark, open_run, report_failure
from distill_core.teacher import InlineTeacher, Links, RemoteTeacher, Reply, Shape, serve
from distill_core.topk_logprobs import head_logprobs, sparse_head_logits
from distill_core.topology import (RankPlan, World, agree_max, env_rank, make_groups, pick_device, plan_ranks, start, stop)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROBE_TOKENS = 16

# Keys that may change between a run and its resumption without changing what is computed.
FREE_KEYS = ("name", "run_root", "max_steps", "device", "student.path", "student.activation_checkpointing", "teacher.path",
             "teacher.name", "teacher.chunk_size", "teacher.param_offload", "topology.", "data.train", "data.eval",
             "rollout.batch_size", "loss.chunk_size", "train.micro_batch_tokens", "eval.", "probe.", "alarms.",
             "checkpoint.", "metrics.")


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
    teacher_lm: LMConfig
    vocab_size: int  # rows of both heads that are compared
    stop_ids: tuple[int, ...]
    notes: list[str]  # for the start block


def prepare(config: cfg.OPDConfig, world_size: int, local_world_size: int) -> Job:
    """Read config.json files, headers, tokenizers and prompts; ValueError of one line for anything a user can mend."""
    cfg.check_world(config, world_size)
    plan = plan_ranks(world_size, local_world_size, [config.topology.teacher_ranks])
    student_lm, teacher_lm = check_folder(config.student.path), check_folder(config.teacher.path)
    tokenizer, other = (load_tokenizer(path, config.data.tokenizer) for path in (config.student.path, config.teacher.path))
    if tokenizer.fingerprint != other.fingerprint:
        raise ValueError(f"student.path {config.student.path} and teacher.path {config.teacher.path} have different tokenizers: "
                         "their token ids do not mean the same (choose models of one tokenizer family)")
    vocab_size = common_vocab(student_lm, teacher_lm, tokenizer.num_ids)
    if config.loss.top_k > vocab_size:
        raise ValueError(f"loss.top_k: {config.loss.top_k} exceeds the vocabulary of {vocab_size} (lower it)")
    stop_ids = tokenizer.stop_ids if config.rollout.stop_ids is None else config.rollout.stop_ids
    outside = [token for token in stop_ids if token >= vocab_size]
    if outside:
        raise ValueError(f"rollout.stop_ids: {outside} are outside the vocabulary of {vocab_size}")
    train, notes = read_split(config, config.data.train, tokenizer, vocab_size, "data.train")
    held_out = []
    if config.eval.every:
        held_out, more = read_split(config, (config.data.eval,), tokenizer, vocab_size, "data.eval")
        held_out, notes = held_out[:config.eval.num_prompts], notes + more
        if any(prompt.answer is not None for prompt in held_out) and not tokenizer.has_text:
            raise ValueError(f"data.eval: {config.data.eval} has answers, but {config.student.path} has no tokenizer.json to turn "
                             "responses into text (add it, or remove the answers)")
    if len(train) < config.train.prompts_per_step:
        raise ValueError(f"data.train: {len(train)} prompts are fewer than train.prompts_per_step = "
                         f"{config.train.prompts_per_step} (lower it or add prompts)")
    if student_lm.vocab_size != teacher_lm.vocab_size:
        notes.append(f"vocabulary cut to the first {vocab_size} rows of heads with {student_lm.vocab_size} (student) and "
                     f"{teacher_lm.vocab_size} (teacher): the others are padding beyond both tokenizers")
    if not stop_ids:
        notes.append("no stop id is known: every response runs to max_new_tokens (set rollout.stop_ids)")
    return Job(config, plan, Path(config.run_root) / config.name, tokenizer, train, held_out, student_lm, teacher_lm,
               vocab_size, tuple(stop_ids), notes + cfg.warnings(config))


def read_split(config: cfg.OPDConfig, paths: Sequence[str], tokenizer: Any, vocab_size: int,
               key: str) -> tuple[list[Prompt], list[str]]:
    """Prompts of one split and a line that says what was read, dropped or cut."""
    prompts, counts = read_prompts(paths, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens,
                                   long_prompts=config.data.long_prompts)
    for prompt in prompts:
        if max(prompt.ids) >= vocab_size:
            raise ValueError(f"{prompt.source}: token id {max(prompt.ids)} is outside the vocabulary of {vocab_size}")
        if prompt.teacher not in (None, config.teacher.name):
            raise ValueError(f"{prompt.source}: teacher {prompt.teacher!r} is not configured (there is {config.teacher.name!r})")
    return prompts, [f"{key}: {counts.read} prompts read, {counts.dropped} dropped and {counts.cut} cut for length"]


def fingerprints(job: Job) -> dict[str, Any]:
    """What must be equal for a resumed run to continue the same computation, as flat dotted keys."""
    flat: dict[str, Any] = {}

    def visit(value: Any, key: str) -> None:
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                visit(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
        elif not key.startswith(FREE_KEYS):
            flat[key] = list(value) if isinstance(value, tuple) else value

    visit(job.config, "")
    if job.config.optim.schedule != "constant":
        flat["max_steps"] = job.config.max_steps
    prompts = hashlib.sha256(json.dumps([prompt.ids for prompt in job.train]).encode()).hexdigest()
    return flat | {"data.train.sha256": prompts, "tokenizer.sha256": job.tokenizer.fingerprint, "vocab_size": job.vocab_size,
                   "student.model": repr(job.student_lm), "teacher.model": repr(job.teacher_lm), "stop_ids": list(job.stop_ids)}


# ---------------------------------------------------------------------------------------------------------------------
# Teacher: ranks of its own, or inline

def teacher_stages(config: cfg.OPDConfig) -> list[str]:
    """Folders that the teacher side serves one after the other: the student's own for the start-up probe, then the real one."""
    return [config.student.path] * config.probe.enabled + [config.teacher.path]


def serve_teacher(job: Job, world: World) -> None:
    """The whole life of a teacher rank."""
    teacher, dtype = job.config.teacher, DTYPES[job.config.teacher.dtype]
    index = job.plan.teacher_of(world.rank)
    for folder in teacher_stages(job.config):
        model = build_lm(folder, world.teacher_meshes[index], world.device, dtype=dtype, trainable=False,
                         offload=teacher.param_offload, progress=load_progress(world.rank == job.plan.teachers[index][0], folder))
        shape = Shape(job.vocab_size, model.config.hidden_size, dtype)
        serve(model, links_of(job, world, index), shape, chunk_size=teacher.chunk_size)
        del model


def connect_teacher(job: Job, world: World, folder: str, lm: LMConfig) -> InlineTeacher | RemoteTeacher:
    """The student ranks' side of one stage."""
    teacher, dtype, temperature = job.config.teacher, DTYPES[job.config.teacher.dtype], job.config.rollout.temperature
    if not job.plan.has_servers:
        model = build_lm(folder, world.student_mesh, world.device, dtype=dtype, trainable=False, offload=teacher.param_offload,
                         progress=load_progress(world.rank == 0, folder))
        return InlineTeacher(model, vocab_size=job.vocab_size, temperature=temperature, chunk_size=teacher.chunk_size)
    head = build_head(folder, world.student_mesh, world.device, dtype=dtype)
    return RemoteTeacher(links_of(job, world, 0), Shape(job.vocab_size, lm.hidden_size, dtype), head, temperature=temperature)


def links_of(job: Job, world: World, index: int) -> Links:
    return Links(world.rank, job.plan.students, job.plan.teachers[index], world.control, world.teachers_control[index],
                 world.device, world.timeout_s)


def load_progress(prints: bool, folder: str) -> Any:
    """A progress callback that says every 10 s how far a long load is."""
    last = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if prints and time.monotonic() - last[0] > 10:
            print(f"loading {folder}: {human_bytes(done)} of {human_bytes(total)} on this rank", flush=True)
            last[0] = time.monotonic()

    return progress


def score_ahead(teacher: InlineTeacher | RemoteTeacher, batches: Sequence[MicroBatch], *, own_k: int,
                want_hidden: bool) -> Iterator[Reply]:
    """The teacher's replies in order, the next batch always being scored while the caller works on this one.

    Column 0 of the reply's logits is the sampled token, the others are the student's top-K ids.
    """
    handles: deque[Any] = deque()
    for batch in batches:
        ids_NK = torch.cat([batch.targets_N[:, None], batch.ids_NK], dim=1)
        handles.append(teacher.request(batch.tokens_BT, batch.lengths_B, batch.starts_B, ids_NK=ids_NK, own_k=own_k,
                                       want_hidden=want_hidden))
        if len(handles) == 2:
            yield handles.popleft().result()
    while handles:
        yield handles.popleft().result()


# ---------------------------------------------------------------------------------------------------------------------
# Student ranks: the objects of a run

@dataclass
class Run:
    job: Job
    world: World
    student: Role
    replica: nn.Module  # plain copy of the student for sampling: no collective inside decode
    log: logging.Logger
    teacher: InlineTeacher | RemoteTeacher | None = None
    step: int = 0  # attempts so far
    position: int = 0  # prompts drawn so far, over all ranks
    alarmed: set[str] = dataclasses.field(default_factory=set)  # alarms that are on: each is told once

    @property
    def index(self) -> int:
        """This rank's place among the student ranks."""
        return self.job.plan.students.index(self.world.rank)

    @property
    def roles(self) -> list[Role]:
        return [self.student, Role("teacher", self.teacher.head if isinstance(self.teacher, RemoteTeacher) else self.teacher.model)]


def build_student(job: Job, world: World, log: logging.Logger) -> Run:
    config, optim = job.config, job.config.optim
    model = build_lm(config.student.path, world.student_mesh, world.device, dtype=torch.float32, trainable=True,
                     compute_dtype=DTYPES[config.student.dtype], progress=load_progress(world.rank == 0, config.student.path))
    optimizer = adamw(model, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    schedule = partial(lr_at, lr=optim.lr, schedule=optim.schedule, warmup_steps=optim.warmup_steps,
                       max_steps=config.max_steps, min_lr_frac=optim.min_lr_frac)
    student = Role("student", model, world.student_mesh.get_group(), world.students_control, optimizer, schedule)
    replica = build_replica(job.student_lm, world.device, rollout_dtype(config), vocab_size=job.vocab_size)
    gather_into(model, replica)
    return Run(job, world, student, replica, log)


def rollout_dtype(config: cfg.OPDConfig) -> torch.dtype:
    return DTYPES[config.rollout.dtype or config.student.dtype]


# ---------------------------------------------------------------------------------------------------------------------
# One step: sample, score, train

def sample_prompts(run: Run) -> list[Sample]:
    """This rank's samples of the next prompts_per_step prompts."""
    config, rollout = run.job.config, run.job.config.rollout
    indices = batch_at(run.position, config.train.prompts_per_step, len(run.job.train), config.seed)
    prompts = [run.job.train[index].ids for index in indices]
    mine = deal([len(prompt) for prompt in prompts], len(run.job.plan.students))[run.index]
    sample_ids = [(run.position + i) * rollout.samples_per_prompt + j for i in mine for j in range(rollout.samples_per_prompt)]
    return generate(run.replica, [prompts[i] for i in mine], max_new_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, stop_ids=run.job.stop_ids,
                    n=rollout.samples_per_prompt, seed=config.seed, step=run.step, sample_ids=sample_ids,
                    capture_top_k=config.loss.top_k, batch_size=rollout.batch_size, keepalive=run.teacher.keepalive)


def make_batches(run: Run, samples: Sequence[Sample]) -> list[MicroBatch]:
    """Micro-batches within the token budget; as many on every rank as the rank with the most needs."""
    budget = run.job.config.train.micro_batch_tokens
    mine = len(plan_batches([len(s.prompt) + len(s.tokens) for s in samples], budget))
    num_batches = int(agree_max(run.world.students_control, max(mine, 1))[0])
    return pack(samples, token_budget=budget, num_batches=num_batches, top_k=run.job.config.loss.top_k, device=run.world.device)


def train_step(run: Run, batches: Sequence[MicroBatch], metrics: Metrics) -> tuple[PhaseResult, float]:
    """One optimizer step; also the seconds this rank has waited for the teacher."""
    config, waited = run.job.config, [0.0]
    replies = score_ahead(run.teacher, batches, own_k=config.loss.top_k, want_hidden=config.loss.mode.endswith("_full"))

    def compute(batch: MicroBatch) -> PhaseLoss:
        began = time.monotonic()
        reply = next(replies)
        waited[0] += time.monotonic() - began
        hidden_BTD = run.student.module(batch.tokens_BT, recompute=config.student.activation_checkpointing)
        loss_N, logits_NK = position_losses(run, batch, reply, hidden_BTD.flatten(0, 1)[batch.rows_N])
        record_batch(metrics, batch, reply, loss_N, logits_NK)
        return PhaseLoss(loss_N.sum(), len(batch.starts_B), normalizer=batch.num_positions)

    result = run_phase(run.student, batches, compute, roles=run.roles, max_grad_norm=config.optim.max_grad_norm)
    gather_into(run.student.module, run.replica)
    return result, waited[0]


def position_losses(run: Run, batch: MicroBatch, reply: Reply, hidden_ND: Tensor) -> tuple[Tensor, Tensor | None]:
    """Loss of every response position, and the student's logits at its captured ids where the mode has them."""
    loss, vocab, temperature = run.job.config.loss, run.job.vocab_size, run.job.config.rollout.temperature
    head = run.student.module.lm_head
    if loss.mode == "reverse_kl_topk":
        logits_NK = head(hidden_ND, lambda h, w: sparse_head_logits(h, w[:vocab], batch.ids_NK)) / temperature
        return reverse_kl_topk(logits_NK, reply.logits_NK[:, 1:], log_prob_min_clamp=loss.log_prob_min_clamp), logits_NK
    if loss.mode == "forward_kl_topk":
        logits_NK = head(hidden_ND, lambda h, w: sparse_head_logits(h, w[:vocab], reply.own_ids_NK.long())) / temperature
        return forward_kl_topk(logits_NK, reply.own_logits_NK), None
    if loss.mode == "reverse_kl_sampled":
        logits_N1, lse_N = head(hidden_ND, lambda h, w: head_logprobs(
            h, w[:vocab], batch.targets_N[:, None], chunk_size=loss.chunk_size, temperature=temperature))
        return reverse_kl_sampled(logits_N1[:, 0] - lse_N, reply.logits_NK[:, 0] - reply.lse_N, clip=loss.advantage_clip), None
    full = {"reverse_kl_full": reverse_kl_full, "forward_kl_full": forward_kl_full}[loss.mode]
    return full_vocabulary(run, full, hidden_ND, reply), None


def full_vocabulary(run: Run, divergence: Any, hidden_ND: Tensor, reply: Reply) -> Tensor:
    """`divergence` over the whole vocabulary, [N], with both heads gathered once around the chunked computation."""
    vocab, settings = run.job.vocab_size, {"chunk_size": run.job.config.loss.chunk_size,
                                           "temperature": run.job.config.rollout.temperature}
    return run.student.module.lm_head(hidden_ND, lambda h, w: run.teacher.head(
        reply.hidden_ND, lambda teacher_h, teacher_w: divergence(h, w[:vocab], teacher_h, teacher_w[:vocab], **settings)))


def record_batch(metrics: Metrics, batch: MicroBatch, reply: Reply, loss_N: Tensor, logits_NK: Tensor | None) -> None:
    """Sums over this micro-batch's positions; the means over the global batch are taken in Metrics.reduce."""
    count = batch.num_positions
    diagnostics = topk_diagnostics(batch.ids_NK, batch.topk_logprobs_NK, teacher_logits_NK=reply.logits_NK[:, 1:],
                                   teacher_lse_N=reply.lse_N, teacher_ids_NK=reply.own_ids_NK)
    for name, value_N in diagnostics._asdict().items():
        metrics.mean(name, value_N.sum(), count)
    metrics.mean("student_entropy", batch.entropy_N.sum(), count)
    metrics.mean("teacher_entropy", reply.entropy_N.sum(), count)
    metrics.mean("sampled_kl", (batch.logprobs_N - (reply.logits_NK[:, 0] - reply.lse_N)).sum(), count)
    metrics.total("teacher_nonfinite", reply.num_nonfinite)
    metrics.total("tokens", count)
    if logits_NK is not None:  # how far the training forward is from what was sampled from: 0 if truly on-policy
        trained, sampled = logits_NK.detach().log_softmax(-1), batch.topk_logprobs_NK.log_softmax(-1)
        metrics.mean("logprob_gap", (sampled.exp() * (trained - sampled).abs()).sum(), count)


def record_samples(metrics: Metrics, samples: Sequence[Sample]) -> None:
    metrics.mean("response_length", sum(len(s.tokens) for s in samples), len(samples))
    metrics.mean("truncated_frac", sum(not s.finished for s in samples), len(samples))
    metrics.mean("repetition_frac", sum(repetition_frac(s.tokens) for s in samples), len(samples))


# ---------------------------------------------------------------------------------------------------------------------
# Start-up probe and evaluation

def probe(run: Run) -> str:
    """Let the teacher side serve the student's own weights: what it answers must be what the student computes itself.

    Three paths are compared on the same tokens: the sampling replica, the training forward and the teacher service. If
    the first two agree, it is the service that is wrong (a shift, a temperature, a dtype); else it is the student side.
    """
    config, world = run.job.config, run.world
    prompts = [run.job.train[(2 * run.index + i) % len(run.job.train)].ids[:64] for i in range(2)]
    samples = generate(run.replica, prompts, max_new_tokens=PROBE_TOKENS, temperature=config.rollout.temperature,
                       sample_ids=[2 * run.index, 2 * run.index + 1], seed=config.seed, capture_top_k=config.loss.top_k)
    [batch] = pack(samples, token_budget=1 << 30, num_batches=1, top_k=config.loss.top_k, device=world.device)
    [reply] = score_ahead(run.teacher, [batch], own_k=config.loss.top_k, want_hidden=False)
    with torch.no_grad():
        hidden_ND = run.student.module(batch.tokens_BT).flatten(0, 1)[batch.rows_N]
        logits_NK, _ = run.student.module.lm_head(hidden_ND, lambda h, w: head_logprobs(
            h, w[:run.job.vocab_size], batch.ids_NK, chunk_size=config.loss.chunk_size, temperature=config.rollout.temperature))
    service = reverse_kl_topk(logits_NK, reply.logits_NK[:, 1:]).mean()
    sampling = reverse_kl_topk(logits_NK, batch.topk_logprobs_NK).mean()
    served, sampled = agree_max(world.students_control, float(service.nan_to_num(torch.inf)), float(sampling.nan_to_num(torch.inf)))
    dtypes = {config.student.dtype, config.teacher.dtype, config.rollout.dtype or config.student.dtype}
    limit = config.probe.max_kl_fp32 if dtypes == {"float32"} else config.probe.max_kl_bf16
    found = f"KL(student || its own weights served as teacher) = {served:.2e}, against its sampler {sampled:.2e}, limit {limit:.0e}"
    if max(served, sampled) > limit:
        side = "the student's training forward and its sampler disagree" if sampled > limit else "the teacher side disagrees"
        raise ValueError(f"start-up probe: {side}: {found} (a bug or a dtype problem; probe.max_kl_bf16 sets the bf16 limit)")
    return f"start-up probe passed: {found}"


def evaluate(run: Run) -> dict[str, float]:
    """Fresh samples on the held-out prompts: reverse KL over the whole vocabulary, lengths, exact match where answers exist."""
    config, began = run.job.config, time.monotonic()
    mine = deal([len(prompt.ids) for prompt in run.job.held_out], len(run.job.plan.students))[run.index]
    prompts, n = [run.job.held_out[index] for index in mine], config.eval.n
    samples = generate(run.replica, [prompt.ids for prompt in prompts], max_new_tokens=config.eval.max_new_tokens,
                       temperature=config.eval.temperature, top_p=config.eval.top_p, stop_ids=run.job.stop_ids, n=n,
                       seed=config.seed + 1, step=run.step, sample_ids=[index * n + j for index in mine for j in range(n)],
                       capture_top_k=config.loss.top_k, batch_size=config.rollout.batch_size, keepalive=run.teacher.keepalive)
    metrics = Metrics()
    record_kl(run, samples[::n], metrics)
    texts = [text_of(run.job.tokenizer, without_stop(sample, run.job.stop_ids)) for sample in samples]
    correct = [None if prompt.answer is None else answer_matches(texts[i * n + j], prompt.answer, config.eval.answer_pattern)
               for i, prompt in enumerate(prompts) for j in range(n)]
    graded = [correct[i * n:(i + 1) * n] for i, prompt in enumerate(prompts) if prompt.answer is not None]
    metrics.mean("eval/exact_match", sum(rows[0] for rows in graded), len(graded))
    metrics.mean("eval/mean_at_n", sum(sum(rows) / n for rows in graded), len(graded))
    metrics.mean("eval/pass_at_n", sum(any(rows) for rows in graded), len(graded))
    metrics.mean("eval/response_length", sum(len(s.tokens) for s in samples), len(samples))
    metrics.mean("eval/truncated_frac", sum(not s.finished for s in samples), len(samples))
    metrics.peak("eval/time_s", time.monotonic() - began)
    write_samples(run, prompts, samples, texts, correct)
    return metrics.reduce(run.world.students_control)


def record_kl(run: Run, samples: Sequence[Sample], metrics: Metrics) -> None:
    """KL(student || teacher) per token, at the training temperature, on one sample of each prompt."""
    run.student.module.eval()
    batches = make_batches(run, samples)
    replies = score_ahead(run.teacher, batches, own_k=run.job.config.loss.top_k, want_hidden=True)
    for batch in batches:
        reply = next(replies)
        with torch.no_grad():
            hidden_ND = run.student.module(batch.tokens_BT).flatten(0, 1)[batch.rows_N]
            kl_N = full_vocabulary(run, reverse_kl_full, hidden_ND, reply)
        metrics.mean("eval/reverse_kl_full", kl_N.sum(), batch.num_positions)


def without_stop(sample: Sample, stop_ids: Sequence[int]) -> list[int]:
    return [token for token in sample.tokens if token not in stop_ids]


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decoded, or the ids themselves where the folder has no tokenizer and the data consists of ids."""
    return tokenizer.decode(ids) if tokenizer.has_text else " ".join(map(str, ids))


def write_samples(run: Run, prompts: Sequence[Prompt], samples: Sequence[Sample], texts: Sequence[str],
                  correct: Sequence[bool | None]) -> None:
    """The logger rank's first samples, for people to read."""
    if run.world.rank != 0:
        return
    folder, n = run.job.run_dir / "samples", run.job.config.eval.n
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": text_of(run.job.tokenizer, prompts[i // n].ids), "response": texts[i], "answer": prompts[i // n].answer,
             "correct": correct[i], "finished": samples[i].finished, "length": len(samples[i].tokens)}
            for i in range(min(run.job.config.metrics.samples, len(samples)))]
    (folder / f"step_{run.step:08d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint and resume

def save_checkpoint(run: Run, resumed_from: Path | None) -> Path:
    state = {"job": "opd", "step": run.step, "position": run.position, "roles": {"student": role_state(run.student)},
             "config": json.loads(json.dumps(dataclasses.asdict(run.job.config))), "fingerprints": fingerprints(run.job),
             "allowed_drift": list(run.job.config.checkpoint.allow_drift), "torch": torch.__version__}
    keep = run.job.config.checkpoint
    return ckpt.save(run.job.run_dir / "checkpoints", run.step, role_tensors(run.student), state,
                     group=run.world.students_control, keep_last=keep.keep_last, keep_every=keep.keep_every,
                     resumed_from=resumed_from)


def resume(run: Run) -> Path | None:
    """Continue from the newest checkpoint that verifies; None in a fresh run."""
    found = ckpt.find_latest(run.job.run_dir / "checkpoints", group=run.world.students_control)
    if found is None:
        return None
    ckpt.compare_fingerprints(found.state["fingerprints"], fingerprints(run.job), run.job.config.checkpoint.allow_drift)
    ckpt.load(found, role_tensors(run.student), group=run.world.students_control)
    restore_role(run.student, found.state["roles"]["student"])
    run.step, run.position = found.state["step"], found.state["position"]
    gather_into(run.student.module, run.replica)
    return found.folder


# ---------------------------------------------------------------------------------------------------------------------
# The loop

def train(job: Job, world: World, log: logging.Logger, stop_request: StopRequest) -> None:
    """The whole life of a student rank."""
    config, is_logger = job.config, world.rank == 0
    log.info(start_block(job, world))
    run = build_student(job, world, log)
    if config.probe.enabled:
        run.teacher = connect_teacher(job, world, config.student.path, job.student_lm)
        log.info(probe(run))
        run.teacher.stop()
    run.teacher = connect_teacher(job, world, config.teacher.path, job.teacher_lm)
    resumed_from = resume(run)
    log.info(f"resumed from {resumed_from}" if resumed_from else "fresh run")
    writer = JsonlWriter(job.run_dir / "metrics.jsonl", resumed_step=run.step if resumed_from else -1) if is_logger else None
    if is_logger:
        writer.write(run.step, {"event": "resumed" if resumed_from else "start", "device": str(world.device),
                                "message": f"from {resumed_from.name}" if resumed_from else "", "torch": torch.__version__,
                                "ranks": job.plan.world_size, "changed": cfg.differences(config)}, kind="event")
    console, saved, alarmed, stopped = Console(config.max_steps), resumed_from, False, False
    if config.eval.every and config.eval.at_start and not resumed_from:
        log_eval(run, writer, evaluate(run))

    while run.step < config.max_steps and not stopped:
        values = step_once(run)
        log_step(run, writer, console, values)
        alarmed = check_alarms(run, values, writer)
        stopped = bool(agree_max(world.students_control, alarmed or stop_request.wanted())[0])
        last = stopped or run.step == config.max_steps
        if config.eval.every and (run.step % config.eval.every == 0 or last) and not stopped:
            log_eval(run, writer, evaluate(run))
        if last or (config.checkpoint.every and run.step % config.checkpoint.every == 0):
            saved = save_checkpoint(run, resumed_from)
        run.teacher.keepalive()

    run.teacher.stop()
    if is_logger:
        writer.close()
        write_report(job.run_dir)
        log.info(end_block(run, saved))
    if alarmed:
        raise RuntimeError(f"stopped by an alarm at step {run.step}; checkpoint {saved} is kept")
    if is_logger:
        mark(job.run_dir, "PREEMPTED" if stopped else "DONE")


def step_once(run: Run) -> dict[str, float]:
    """Sample, score, train, measure; the global metrics of the step, equal on all ranks."""
    metrics, times = Metrics(), [time.monotonic()]
    samples = sample_prompts(run)
    record_samples(metrics, samples)
    times.append(time.monotonic())
    result, waited_s = train_step(run, make_batches(run, samples), metrics)
    times.append(time.monotonic())
    run.step, run.position = run.step + 1, run.position + run.job.config.train.prompts_per_step
    roll_s, rest_s, step_s = times[1] - times[0], times[2] - times[1], times[2] - times[0]
    for name, seconds in {"step": step_s, "roll": roll_s, "teacher_wait": waited_s, "train": rest_s - waited_s}.items():
        metrics.peak(f"time/{name}_s", seconds)
    metrics.peak("memory_peak_bytes", peak_memory(run.world.device))
    values = metrics.reduce(run.world.students_control)
    return values | {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, "step_applied": int(result.applied),
                     "skipped_steps": run.student.skips, "tokens_per_s": values["tokens"] / values["time/step_s"]}


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_alarms(run: Run, values: dict[str, float], writer: JsonlWriter | None) -> bool:
    """Warn about values beyond their limits; True if one of them shall stop the run. The same on every rank."""
    alarms, nan = run.job.config.alarms, float("nan")
    gap = abs(values.get("student_entropy", nan) - values.get("teacher_entropy", nan))
    checks = [("student_mass", alarms.student_mass, -values.get("student_mass", nan), -1),
              ("entropy_gap", alarms.entropy_gap, gap, 1),
              ("truncated_frac", alarms.truncated_frac, values.get("truncated_frac", nan), 1),
              ("repetition_frac", alarms.repetition_frac, values.get("repetition_frac", nan), 1),
              ("teacher_nonfinite", alarms.teacher_nonfinite, values.get("teacher_nonfinite", nan), 1)]
    stops = False
    for name, alarm, value, sign in checks:
        if alarm.limit is None or not value > sign * alarm.limit:
            run.alarmed.discard(name)
            continue
        stops = stops or alarm.action == "stop"
        if name not in run.alarmed:
            side = "above" if sign > 0 else "below"
            log_event(run, writer, "alarm", f"{name} = {sign * value:.4g} is {side} its limit {alarm.limit:.4g}")
        run.alarmed.add(name)
    return stops


def log_step(run: Run, writer: JsonlWriter | None, console: Console, values: dict[str, float]) -> None:
    if writer is None:
        return
    writer.write(run.step, values)
    if not values["step_applied"]:
        log_event(run, writer, "skip", f"loss {values['loss']:.4g} or gradient norm {values['grad_norm']:.4g} is not finite")
    if run.step % run.job.config.metrics.log_every == 0 or run.step == run.job.config.max_steps:
        run.log.info(console.row(run.step, values))


def log_event(run: Run, writer: JsonlWriter | None, event: str, message: str) -> None:
    if writer is not None:
        run.log.warning(f"step {run.step}: {event}: {message}")
        writer.write(run.step, {"event": event, "message": message}, kind="event")


def log_eval(run: Run, writer: JsonlWriter | None, values: dict[str, float]) -> None:
    if writer is not None:
        writer.write(run.step, values, kind="eval")
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in values.items())
        run.log.info(f"evaluation at step {run.step}: {shown}")
        write_report(run.job.run_dir)


# ---------------------------------------------------------------------------------------------------------------------
# Start and end blocks, dry run

def job_memory(job: Job) -> dict[str, dict[str, int]]:
    config = job.config
    return memory_plan(job.student_lm, job.teacher_lm, num_students=len(job.plan.students),
                       num_servers=len(job.plan.teachers[0]) if job.plan.has_servers else 0,
                       student_dtype=DTYPES[config.student.dtype], rollout_dtype=rollout_dtype(config),
                       teacher_dtype=DTYPES[config.teacher.dtype], offload=config.teacher.param_offload,
                       recompute=config.student.activation_checkpointing, batch_rows=config.rollout.batch_size,
                       row_tokens=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
                       micro_batch_tokens=config.train.micro_batch_tokens, vocab_size=job.vocab_size,
                       chunk_size=max(config.loss.chunk_size, config.teacher.chunk_size))


def device_memory(device: torch.device) -> int:
    """Bytes that one rank may use: its GPU, or its share of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // env_rank()[2]


def check_memory(job: Job, available: int) -> None:
    """Refuse before loading what cannot fit."""
    for role, parts in job_memory(job).items():
        needed = sum(parts.values())
        if needed > available:
            largest = max(parts, key=parts.__getitem__)
            raise ValueError(f"a {role} rank needs about {human_bytes(needed)} of {human_bytes(available)}; largest part: "
                             f"{largest}, {human_bytes(parts[largest])} (more ranks, a smaller rollout.batch_size or "
                             "train.micro_batch_tokens, student.activation_checkpointing, bfloat16)")


def start_block(job: Job, world: World) -> str:
    config, plan = job.config, job.plan
    servers = [rank for ranks in plan.teachers for rank in ranks] if plan.has_servers else []
    roles = [("student", span(plan.students), config.student.path, config.student.dtype, "yes"),
             ("teacher", span(servers) if servers else "inline", config.teacher.path, config.teacher.dtype, "no")]
    memory = [(role, part, human_bytes(size)) for role, parts in job_memory(job).items()
              for part, size in [*parts.items(), ("all", sum(parts.values()))]]
    tokens = config.train.prompts_per_step * config.rollout.samples_per_prompt * config.rollout.max_new_tokens
    lines = [f"on-policy distillation '{config.name}' on {plan.world_size} ranks, {world.device.type}, torch {torch.__version__}",
             "", table(roles, ("role", "ranks", "folder", "compute", "trained")), "",
             table(memory, ("rank of", "memory of a rank (estimate)", "size")), "",
             f"each step: {config.train.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples, at most "
             f"{human_count(tokens)} new tokens; loss {config.loss.mode}, K {config.loss.top_k}",
             "differs from the defaults: " + (", ".join(cfg.differences(config)) or "nothing"), *job.notes, ""]
    return "\n".join(lines)


def span(ranks: Sequence[int]) -> str:
    contiguous = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if contiguous and len(ranks) > 1 else ",".join(map(str, ranks))


def end_block(run: Run, saved: Path | None) -> str:
    run_dir, done = run.job.run_dir, run.step == run.job.config.max_steps
    evals = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["kind"] == "eval"]
    rows = [(name, f"{value:.4g}", f"{evals[-1][name]:.4g}") for name, value in (evals[0] if evals else {}).items()
            if name.startswith("eval/") and name in evals[-1]]
    lines = [f"{'done' if done else 'stopped'} at step {run.step}: {run.student.successes} updates, {run.student.skips} skipped"]
    if rows:
        lines += ["", table(rows, ("held-out prompts", f"step {evals[0]['step']}", f"step {evals[-1]['step']}")), ""]
    lines += [f"report: {run_dir / 'report.html'}",
              f"export: python -m distill_core.export --checkpoint {saved} --out {run_dir / 'export'}"]
    return "\n".join(lines if done else [*lines, "the same command again continues from here"])


def dry_run(config: cfg.OPDConfig) -> None:
    """Build every role at the intended world size on a fake process group: all shapes and groups, no weights."""
    world_size = config.topology.world_size or env_rank()[1]
    job = prepare(config, world_size, min(world_size, 8))
    servers = job.plan.teachers[0] if job.plan.has_servers else ()
    for rank in (0, *servers[:1]):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
        world = make_groups(job.plan, torch.device("cpu"), config.topology.timeout_s)
        if world.is_student:
            print(start_block(job, world))
            model = shard_meta(job.student_lm, world.student_mesh, dtype=torch.float32, trainable=True,
                               compute_dtype=DTYPES[config.student.dtype])
            adamw(model, lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps, weight_decay=config.optim.weight_decay)
        if not servers or not world.is_student:
            mesh = world.teacher_meshes[0]
            model = shard_meta(job.teacher_lm, mesh, dtype=DTYPES[config.teacher.dtype], trainable=False)
        print(f"rank {rank}: {'student' if world.is_student else 'teacher'} with {human_count(num_parameters(model))} parameters, "
              f"{human_bytes(local_bytes(model.parameters()))} in its shards")
        dist.destroy_process_group()
    print(f"dry run passed: {world_size} ranks ({len(job.plan.students)} student, {len(servers)} teacher)")


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--check", action="store_true", help="validate config, data and file headers, then exit")
    parser.add_argument("--dry-run", action="store_true", help="build the job on a fake process group, then exit")
    return parser.parse_intermixed_args()


def main() -> int:
    args, (rank, world_size, local_world_size) = parse_args(), env_rank()
    run_dir = None
    try:
        config = cfg.load(args.config, args.overrides)
        if args.dry_run:
            dry_run(config)
            return 0
        if args.check:
            intended = config.topology.world_size or world_size
            job = prepare(config, intended, min(intended, 8))
            print(f"{args.config}: ok; {len(job.train)} training and {len(job.held_out)} evaluation prompts")
            return 0
        run_dir = Path(config.run_root) / config.name
        job = prepare(config, world_size, local_world_size)
        device = pick_device(config.device)
        check_memory(job, device_memory(device))
    except ValueError as error:
        if rank != 0:
            time.sleep(5)  # rank 0 most likely fails for the same reason and says so: torchrun then ends this rank
        report_failure(error, run_dir, rank=rank, role="before start", is_user_error=True)
        return 2
    return launch(job, device)


def launch(job: Job, device: torch.device) -> int:
    """Join the other ranks and live this rank's life; any failure ends the process, and with it the job."""
    torch.use_deterministic_algorithms(job.config.deterministic)
    rank = env_rank()[0]
    role = "student" if rank in job.plan.students else "teacher"
    try:
        log = open_run(job.run_dir, cfg.to_yaml(job.config), rank)
        stop_request = StopRequest(job.run_dir)  # teacher ranks outlive a signal too: the students end their service
        world = start(job.plan, device, job.config.topology.timeout_s)
        if world.is_student:
            train(job, world, log, stop_request)
        else:
            serve_teacher(job, world)
        stop(world)
        return 0
    except Exception as error:
        report_failure(error, job.run_dir, rank=rank, role=role, is_user_error=isinstance(error, ValueError))
        os._exit(1)  # no clean-up that could wait for peers: they see the closed connection and end too


if __name__ == "__main__":
    sys.exit(main())
