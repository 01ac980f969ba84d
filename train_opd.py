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
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distill_core import checkpoint as ckpt
from distill_core import config as cfg
from distill_core.build import (build_head, build_lm, build_replica, check_folder, common_vocab, load_progress,
                                memory_plan, shard_meta)
from distill_core.data import Prompt, answer_matches, batch_at, load_tokenizer, read_prompts
from distill_core.fsdp import gather_into, local_bytes, num_parameters
from distill_core.generate import Sample, generate
from distill_core.losses_kl import (forward_kl_full, forward_kl_topk, reverse_kl_full, reverse_kl_sampled,
                                    reverse_kl_topk)
from distill_core.metrics import Console, Journal, Metrics, human_bytes, human_count, read_jsonl, table
from distill_core.models.lm import LMConfig
from distill_core.phases import lr_at
from distill_core.report import write_report
from distill_core.role import (PhaseLoss, PhaseResult, Role, adamw, restore_role, role_state, role_tensors,
                               run_phase)
from distill_core.rollout import MicroBatch, deal, pack, plan_batches, record_batch, record_samples, score_ahead
from distill_core.run import StopRequest, check_run_dir, lock_run, mark, open_run, parse_args, report_failure
from distill_core.safetensors_io import open_folder, weights_digest
from distill_core.teacher import InlineTeacher, Links, RemoteTeacher, Reply, Shape, serve
from distill_core.topk_logprobs import head_logprobs, sparse_head_logits
from distill_core.topology import (Pulse, RankPlan, World, agree_equal, agree_max, device_memory, env_rank,
                                   make_groups, peak_memory, pick_device, plan_ranks, start, stop)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROBE_TOKENS = 16
MAX_PROBE_TILT = 0.02

# Keys that may change between a run and its resumption without changing what is computed.
FREE_KEYS = ("name", "run_root", "max_steps", "device", "student.path", "student.activation_checkpointing",
             "teacher.path", "teacher.name", "teacher.chunk_size", "teacher.param_offload", "topology.", "data.train",
             "data.eval", "rollout.batch_size", "loss.chunk_size", "train.micro_batch_tokens", "eval.", "probe.",
             "alarms.", "checkpoint.", "metrics.")


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
    teacher_digest: str
    notes: list[str]  # for the start block


def prepare(config: cfg.OPDConfig, world_size: int, local_world_size: int) -> Job:
    """Read config.json files, headers, tokenizers and prompts; ValueError of one line for what a user can mend."""
    cfg.check_world(config, world_size)
    run_dir = Path(config.run_root) / config.name
    check_run_dir(run_dir)
    plan = plan_ranks(world_size, local_world_size, [config.topology.teacher_ranks])
    student_lm, teacher_lm = check_folder(config.student.path), check_folder(config.teacher.path)
    tokenizer = shared_tokenizer(config)
    vocab_size = common_vocab(student_lm, teacher_lm, tokenizer.num_ids)
    stop_ids = tokenizer.stop_ids if config.rollout.stop_ids is None else config.rollout.stop_ids
    check_ids(config, vocab_size, stop_ids)
    train, notes = read_split(config, "data.train", config.data.train, tokenizer, vocab_size)
    held_out = []
    if config.eval.every:
        held_out, more = read_split(config, "data.eval", (config.data.eval,), tokenizer, vocab_size)
        held_out, notes = held_out[:config.eval.num_prompts], notes + more
    check_prompts(config, train, held_out, tokenizer)
    if student_lm.vocab_size != teacher_lm.vocab_size:
        notes.append(f"vocabulary cut to the first {vocab_size} rows of heads with {student_lm.vocab_size} (student) "
                     f"and {teacher_lm.vocab_size} (teacher): the others are padding beyond both tokenizers")
    if not stop_ids:
        notes.append("no stop id is known: every response runs to max_new_tokens (set rollout.stop_ids)")
    longest = config.data.max_prompt_tokens + max(config.rollout.max_new_tokens, config.eval.max_new_tokens)
    if longest > min(student_lm.max_length, teacher_lm.max_length):
        notes.append(f"warning: up to {longest} tokens, beyond max_position_embeddings of {student_lm.max_length} "
                     f"(student) and {teacher_lm.max_length} (teacher), for which they were trained")
    job = Job(config, plan, run_dir, tokenizer, train, held_out, student_lm, teacher_lm, vocab_size, tuple(stop_ids),
              weights_digest(open_folder(config.teacher.path)), notes + cfg.warnings(config))
    saved = ckpt.peek(run_dir / "checkpoints")
    if saved is not None:  # refused here already, before anything of the earlier run is touched
        ckpt.compare_fingerprints(saved["fingerprints"], fingerprints(job), config.checkpoint.allow_drift)
    return job


def shared_tokenizer(config: cfg.OPDConfig) -> Any:
    """The student's tokenizer, once it is known that the teacher's gives every id the same meaning."""
    student, teacher = (load_tokenizer(path, config.data.tokenizer)
                        for path in (config.student.path, config.teacher.path))
    if config.data.tokenizer == "byte":
        for path in (config.student.path, config.teacher.path):
            if (Path(path) / "tokenizer.json").exists():
                raise ValueError(f"data.tokenizer: byte, but {path} has a tokenizer.json: its ids are not bytes (set "
                                 "data.tokenizer=auto)")
    if student.fingerprint != teacher.fingerprint:
        raise ValueError(f"student.path {config.student.path} and teacher.path {config.teacher.path} have different "
                         "tokenizers: their token ids do not mean the same (choose models of one tokenizer family)")
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
        if prompt.teacher not in (None, config.teacher.name):
            raise ValueError(f"{prompt.source}: teacher {prompt.teacher!r} is not configured (teacher.name is "
                             f"{config.teacher.name!r})")
    return prompts, [f"{key}: {counts.read} prompts read, {counts.dropped} dropped and {counts.cut} cut for length"]


def fingerprints(job: Job) -> dict[str, Any]:
    """What must be equal for a resumed run to continue the same computation, as flat dotted keys."""
    flat = cfg.flatten(job.config, leave_out=FREE_KEYS)
    if job.config.optim.schedule != "constant":
        flat["max_steps"] = job.config.max_steps
    prompts = hashlib.sha256(json.dumps([prompt.ids for prompt in job.train]).encode()).hexdigest()
    return flat | {"data.train.sha256": prompts, "tokenizer.sha256": job.tokenizer.fingerprint,
                   "student.model": repr(job.student_lm), "teacher.model": repr(job.teacher_lm),
                   "teacher.weights": job.teacher_digest,
                   "vocab_size": job.vocab_size, "stop_ids": list(job.stop_ids)}


# ---------------------------------------------------------------------------------------------------------------------
# Teacher: ranks of its own, or inline

def teacher_stages(config: cfg.OPDConfig) -> list[str]:
    """Folders that the teacher side serves in turn: for the start-up probe the student's own, then the real one."""
    return [config.student.path] * config.probe.enabled + [config.teacher.path]


def serve_teacher(job: Job, world: World) -> None:
    """The whole life of a teacher rank."""
    config, dtype = job.config.teacher, DTYPES[job.config.teacher.dtype]
    index = job.plan.teacher_of(world.rank)
    for folder in teacher_stages(job.config):
        progress = load_progress(folder, prints=world.rank == job.plan.teachers[index][0])
        model = build_lm(folder, world.teacher_meshes[index], world.device, dtype=dtype, trainable=False,
                         offload=config.param_offload, progress=progress)
        shape = Shape(job.vocab_size, model.config.hidden_size, dtype)
        serve(model, links_of(job, world, index), shape, chunk_size=config.chunk_size)
        del model
        gc.collect()  # FSDP modules are reference cycles: without this the probe's weights stay beside the teacher's


def connect_teacher(job: Job, world: World, folder: str, lm: LMConfig) -> InlineTeacher | RemoteTeacher:
    """The student ranks' side of one stage."""
    config, dtype = job.config.teacher, DTYPES[job.config.teacher.dtype]
    temperature = job.config.rollout.temperature
    head = build_head(folder, world.student_mesh, world.device, dtype=dtype)
    if not job.plan.has_servers:
        model = build_lm(folder, world.student_mesh, world.device, dtype=dtype, trainable=False,
                         offload=config.param_offload, progress=load_progress(folder, prints=world.rank == 0))
        return InlineTeacher(model, head, vocab_size=job.vocab_size, temperature=temperature,
                             chunk_size=config.chunk_size)
    shape = Shape(job.vocab_size, lm.hidden_size, dtype)
    return RemoteTeacher(links_of(job, world, 0), shape, head, temperature=temperature)


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
    teacher: InlineTeacher | RemoteTeacher | None = None
    step: int = 0  # attempts so far
    position: int = 0  # prompts drawn so far, over all ranks
    evaluated: int = -1  # step of the last evaluation
    sampling: Pulse | None = None  # from the start of a rollout until its batches are made
    alarms_on: set[str] = dataclasses.field(default_factory=set)  # each is told once, when it goes on

    @property
    def index(self) -> int:
        """This rank's place among the student ranks."""
        return self.job.plan.students.index(self.world.rank)

    def start_sampling(self) -> Pulse:
        """What keeps the teacher and the ranks that finish early from taking a rank that samples for dead."""
        self.sampling = Pulse(self.world.students_control, self.world.timeout_s / 4, self.teacher.keepalive)
        return self.sampling

    @property
    def roles(self) -> list[Role]:
        """Everything that a gradient could leak into."""
        frozen = self.teacher.head if isinstance(self.teacher, RemoteTeacher) else self.teacher.model
        return [self.student, Role("teacher", frozen)]


def build_student(job: Job, world: World, log: logging.Logger) -> Run:
    config, optim = job.config, job.config.optim
    model = build_lm(config.student.path, world.student_mesh, world.device, dtype=torch.float32, trainable=True,
                     compute_dtype=DTYPES[config.student.dtype],
                     progress=load_progress(config.student.path, prints=world.rank == 0))
    schedule = partial(lr_at, lr=optim.lr, schedule=optim.schedule, warmup_steps=optim.warmup_steps,
                       max_steps=config.max_steps, min_lr_frac=optim.min_lr_frac)
    student = Role("student", model, world.student_mesh.get_group(), world.students_control,
                   student_optimizer(config, model), schedule)
    replica = build_replica(job.student_lm, world.device, rollout_dtype(config), vocab_size=job.vocab_size)
    gather_into(model, replica)
    return Run(job, world, log, student, replica)


def student_optimizer(config: cfg.OPDConfig, model: nn.Module) -> torch.optim.Optimizer:
    optim = config.optim
    return adamw(model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)


def rollout_dtype(config: cfg.OPDConfig) -> torch.dtype:
    return DTYPES[config.rollout.dtype or config.student.dtype]


# ---------------------------------------------------------------------------------------------------------------------
# One step: sample, score, train

def sample_prompts(run: Run) -> list[Sample]:
    """This rank's samples of the next prompts_per_step prompts."""
    config, rollout = run.job.config, run.job.config.rollout
    indices = batch_at(run.position, config.train.prompts_per_step, len(run.job.train), config.seed)
    prompts, n = [run.job.train[index].ids for index in indices], rollout.samples_per_prompt
    mine = deal([len(prompt) for prompt in prompts], len(run.job.plan.students))[run.index]
    return generate(run.replica, [prompts[i] for i in mine], max_new_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k,
                    stop_ids=run.job.stop_ids, n=n, seed=config.seed, step=run.step,
                    sample_ids=[(run.position + i) * n + j for i in mine for j in range(n)],
                    capture_top_k=config.loss.top_k, batch_size=rollout.batch_size, keepalive=run.start_sampling().beat)


def make_batches(run: Run, samples: Sequence[Sample]) -> list[MicroBatch]:
    """Micro-batches within the token budget; as many on every rank as the rank with the most needs."""
    run.sampling.finish()
    budget = run.job.config.train.micro_batch_tokens
    mine = len(plan_batches([len(s.prompt) + len(s.tokens) for s in samples], budget))
    num_batches = int(agree_max(run.world.students_control, max(mine, 1))[0])
    return pack(samples, token_budget=budget, num_batches=num_batches, top_k=run.job.config.loss.top_k,
                device=run.world.device)


def train_step(run: Run, batches: Sequence[MicroBatch], metrics: Metrics) -> tuple[PhaseResult, float]:
    """One optimizer step; also the seconds this rank has waited for the teacher."""
    config, waited_s = run.job.config, 0.0
    replies = score_ahead(run.teacher, batches, own_k=config.loss.top_k,
                          want_hidden=config.loss.mode.endswith("_full"))

    def compute(batch: MicroBatch) -> PhaseLoss:
        nonlocal waited_s
        began = time.monotonic()
        reply = next(replies)
        waited_s += time.monotonic() - began
        hidden_BTD = run.student.module(batch.tokens_BT, recompute=config.student.activation_checkpointing)
        loss_N, logits_NK = position_losses(run, batch, reply, hidden_BTD.flatten(0, 1)[batch.rows_N])
        record_batch(metrics, batch, reply, logits_NK)
        return PhaseLoss(loss_N.sum(), len(batch.starts_B), normalizer=batch.num_positions)

    result = run_phase(run.student, batches, compute, roles=run.roles, max_grad_norm=config.optim.max_grad_norm)
    gather_into(run.student.module, run.replica)
    return result, waited_s


def position_losses(run: Run, batch: MicroBatch, reply: Reply, hidden_ND: Tensor) -> tuple[Tensor, Tensor | None]:
    """Loss of every response position, and the student's logits at its captured ids where the mode has them."""
    loss, vocab, temperature = run.job.config.loss, run.job.vocab_size, run.job.config.rollout.temperature
    head = run.student.module.lm_head
    if loss.mode == "reverse_kl_topk":
        logits_NK = head(hidden_ND, lambda h, w: sparse_head_logits(
            h, cut(w, vocab), batch.ids_NK, deterministic=run.job.config.deterministic)) / temperature
        teacher_NK = reply.logits_NK[:, 1:]
        return reverse_kl_topk(logits_NK, teacher_NK, log_prob_min_clamp=loss.log_prob_min_clamp), logits_NK
    if loss.mode == "forward_kl_topk":
        logits_NK = head(hidden_ND, lambda h, w: sparse_head_logits(
            h, cut(w, vocab), reply.own_ids_NK, deterministic=run.job.config.deterministic)) / temperature
        return forward_kl_topk(logits_NK, reply.own_logits_NK), None
    if loss.mode == "reverse_kl_sampled":
        logits_N1, lse_N = head(hidden_ND, lambda h, w: head_logprobs(
            h, cut(w, vocab), batch.targets_N[:, None], chunk_size=loss.chunk_size, temperature=temperature))
        teacher_N = reply.logits_NK[:, 0] - reply.lse_N
        return reverse_kl_sampled(logits_N1[:, 0] - lse_N, teacher_N, clip=loss.advantage_clip), None
    if loss.mode == "reverse_kl_full":
        return full_vocabulary(run, reverse_kl_full, hidden_ND, reply), None
    assert loss.mode == "forward_kl_full", loss.mode
    return full_vocabulary(run, forward_kl_full, hidden_ND, reply), None


def full_vocabulary(run: Run, divergence: Callable[..., Tensor], hidden_ND: Tensor, reply: Reply) -> Tensor:
    """`divergence` over the whole vocabulary, [N], with both heads gathered once around the chunked computation."""
    vocab, config = run.job.vocab_size, run.job.config

    def with_both_heads(h: Tensor, w: Tensor) -> Tensor:
        return run.teacher.head(reply.hidden_ND, lambda teacher_h, teacher_w: divergence(
            h, cut(w, vocab), teacher_h, cut(teacher_w, vocab), chunk_size=config.loss.chunk_size,
            temperature=config.rollout.temperature))

    return run.student.module.lm_head(hidden_ND, with_both_heads)


def cut(weight_VD: Tensor, vocab_size: int) -> Tensor:
    """The rows that both heads share; where that is all of them the weight itself: a slice costs a copy in backward."""
    return weight_VD if len(weight_VD) == vocab_size else weight_VD[:vocab_size]


# ---------------------------------------------------------------------------------------------------------------------
# Start-up probe and evaluation

def probe(run: Run) -> str:
    """Let the teacher side serve the student's own weights: its answers must be what the student computes itself.

    Three paths are compared on the same tokens: the sampling replica, the training forward and the teacher service.
    If the first two agree, the service is wrong (a shift, a temperature, a dtype); else the student side is.
    """
    config, world = run.job.config, run.world
    prompts = [run.job.train[(2 * run.index + i) % len(run.job.train)].ids[:64] for i in range(2)]
    samples = generate(run.replica, prompts, max_new_tokens=PROBE_TOKENS, temperature=config.rollout.temperature,
                       sample_ids=[2 * run.index, 2 * run.index + 1], seed=config.seed,
                       capture_top_k=config.loss.top_k)
    [batch] = pack(samples, token_budget=1 << 30, num_batches=1, top_k=config.loss.top_k, device=world.device)
    [reply] = score_ahead(run.teacher, [batch], own_k=config.loss.top_k, want_hidden=False)
    with torch.no_grad():
        hidden_ND = run.student.module(batch.tokens_BT).flatten(0, 1)[batch.rows_N]
        logits_NK, _ = run.student.module.lm_head(hidden_ND, lambda h, w: head_logprobs(
            h, cut(w, run.job.vocab_size), batch.ids_NK, chunk_size=config.loss.chunk_size,
            temperature=config.rollout.temperature))
        kls = [reverse_kl_topk(logits_NK, other_NK).mean().nan_to_num(torch.inf)
               for other_NK in (reply.logits_NK[:, 1:], batch.topk_logprobs_NK)]
    scale = temperature_ratio(logits_NK, reply.logits_NK[:, 1:])
    return judge_probe(config, *agree_max(world.students_control, *map(float, kls), abs(scale - 1.0)))


def temperature_ratio(logits_NK: Tensor, other_NK: Tensor) -> float:
    """Slope of `other` against `logits` within each position: 1 / 1.1 for a temperature of 1.1 on that side.

    Rounding to bf16 makes single logits noisy, and small KLs with them, but not the slope over all of them.
    """
    own, other = (x - x.mean(dim=-1, keepdim=True) for x in (logits_NK, other_NK))
    return float((own * other).sum() / own.square().sum())


def judge_probe(config: cfg.OPDConfig, served: float, sampled: float, tilt: float) -> str:
    """served, sampled: KL in nats per token of the training forward against the teacher service and the sampler; tilt:
    how far the ratio of the service's temperature to the student's is from 1."""
    dtypes = {config.student.dtype, config.teacher.dtype, config.rollout.dtype or config.student.dtype}
    limit = config.probe.max_kl_fp32 if dtypes == {"float32"} else config.probe.max_kl_bf16
    found = (f"KL of the student against its own weights served as teacher {served:.2e}, against its sampler "
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
    config, began = run.job.config, time.monotonic()
    mine = deal([len(prompt.ids) for prompt in run.job.held_out], len(run.job.plan.students))[run.index]
    prompts, n = [run.job.held_out[index] for index in mine], config.eval.n
    samples = generate(run.replica, [prompt.ids for prompt in prompts], max_new_tokens=config.eval.max_new_tokens,
                       temperature=config.eval.temperature, top_p=config.eval.top_p, stop_ids=run.job.stop_ids, n=n,
                       seed=config.seed + 1, step=run.step,
                       sample_ids=[index * n + j for index in mine for j in range(n)],
                       capture_top_k=config.loss.top_k, batch_size=config.rollout.batch_size,
                       keepalive=run.start_sampling().beat)
    metrics = Metrics()
    record_kl(run, samples[::n], metrics)
    texts = [text_of(run, [token for token in sample.tokens if token not in run.job.stop_ids]) for sample in samples]
    record_answers(run, prompts, texts, metrics)
    metrics.mean("eval/response_length", sum(len(s.tokens) for s in samples), len(samples))
    metrics.mean("eval/truncated_frac", sum(not s.finished for s in samples), len(samples))
    metrics.peak("eval/time_s", time.monotonic() - began)
    if run.world.rank == 0:
        write_samples(run, prompts, samples, texts)
    run.evaluated = run.step
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

def save_checkpoint(run: Run, resumed_from: Path | None) -> Path:
    config = run.job.config
    state = {"job": "opd", "step": run.step, "position": run.position, "evaluated": run.evaluated,
             "roles": {"student": role_state(run.student)},
             "config": dataclasses.asdict(config), "fingerprints": fingerprints(run.job),
             "allowed_drift": list(config.checkpoint.allow_drift), "torch": torch.__version__}
    return ckpt.save(run.job.run_dir / "checkpoints", run.step, role_tensors(run.student), state,
                     group=run.world.students_control, keep_last=config.checkpoint.keep_last,
                     keep_every=config.checkpoint.keep_every, resumed_from=resumed_from)


def resume(run: Run) -> Path | None:
    """Continue from the newest checkpoint that verifies; None in a fresh run."""
    group = run.world.students_control
    found = ckpt.find_latest(run.job.run_dir / "checkpoints", group=group)
    if found is None:
        return None
    ckpt.compare_fingerprints(found.state["fingerprints"], fingerprints(run.job), run.job.config.checkpoint.allow_drift)
    ckpt.load(found, role_tensors(run.student), group=group)
    restore_role(run.student, found.state["roles"]["student"])
    run.step, run.position, run.evaluated = (found.state[key] for key in ("step", "position", "evaluated"))
    gather_into(run.student.module, run.replica)
    return found.folder


# ---------------------------------------------------------------------------------------------------------------------
# The loop

def train(job: Job, world: World, log: logging.Logger, stop_request: StopRequest) -> None:
    """The whole life of a student rank."""
    config = job.config
    log.info(start_block(job, world))
    run = build_student(job, world, log)
    if config.probe.enabled:
        run.teacher = connect_teacher(job, world, config.student.path, job.student_lm)
        log.info(probe(run))
        run.teacher.stop()
        run.teacher = None  # freed before the real one is built
        gc.collect()
    run.teacher = connect_teacher(job, world, config.teacher.path, job.teacher_lm)
    saved = resumed_from = resume(run)
    journal, alarmed, stopped = open_journal(run, resumed_from), False, False
    if evaluation_due(run):  # also one that a stop request has cut off
        log_evaluation(run, journal)

    while run.step < config.max_steps and not stopped:
        values = step_once(run)
        log_step(run, journal, values)
        alarmed = check_alarms(run, values, journal)
        stopped = bool(agree_max(world.students_control, alarmed or stop_request.wanted())[0])
        last = run.step == config.max_steps
        if evaluation_due(run) and (last or not stopped):
            log_evaluation(run, journal)
        if last or stopped or (config.checkpoint.every and run.step % config.checkpoint.every == 0):
            saved = save_checkpoint(run, resumed_from)
        run.teacher.keepalive()

    run.teacher.stop()
    journal.close()
    if world.rank == 0:
        write_report(job.run_dir)
        log.info(end_block(run, saved))
    if alarmed:
        raise RuntimeError(f"stopped by an alarm at step {run.step}; checkpoint {saved} is kept")
    if world.rank == 0:
        mark(job.run_dir, "DONE" if run.step >= config.max_steps else "PREEMPTED")


def evaluation_due(run: Run) -> bool:
    config = run.job.config
    planned = config.eval.at_start if run.step == 0 else run.step % max(1, config.eval.every) == 0
    return bool(config.eval.every) and run.evaluated != run.step and (planned or run.step == config.max_steps)


def step_once(run: Run) -> dict[str, float]:
    """Sample, score, train, measure; the global metrics of the step, equal on all ranks."""
    metrics, began = Metrics(), time.monotonic()
    samples = sample_prompts(run)
    record_samples(metrics, samples)
    rolled = time.monotonic()
    result, waited_s = train_step(run, make_batches(run, samples), metrics)
    ended = time.monotonic()
    run.step, run.position = run.step + 1, run.position + run.job.config.train.prompts_per_step
    for name, seconds in {"step": ended - began, "roll": rolled - began, "teacher_wait": waited_s,
                          "train": ended - rolled - waited_s}.items():
        metrics.peak(f"time/{name}_s", seconds)
    metrics.peak("memory_peak_bytes", peak_memory(run.world.device))
    values = metrics.reduce(run.world.students_control)
    return values | {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr,
                     "step_applied": int(result.applied), "skipped_steps": run.student.skips,
                     "tokens_per_s": values["tokens"] / values["time/step_s"]}


def check_alarms(run: Run, values: dict[str, float], journal: Journal) -> bool:
    """Warn about values beyond their limits; True if one of them shall stop the run. The same on every rank."""
    nan = float("nan")  # compares as false: a metric that the step does not have raises no alarm
    signed = {"student_mass": -values.get("student_mass", nan),  # alarms when it falls
              "entropy_gap": abs(values.get("student_entropy", nan) - values.get("teacher_entropy", nan))}
    stops = False
    for field in dataclasses.fields(run.job.config.alarms):
        name, alarm = field.name, getattr(run.job.config.alarms, field.name)
        value = signed.get(name, values.get(name, nan))
        sign = -1 if name == "student_mass" else 1
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


def log_step(run: Run, journal: Journal, values: dict[str, float]) -> None:
    config = run.job.config
    journal.training(run.step, values, shown=run.step % config.metrics.log_every == 0 or run.step == config.max_steps)
    if not values["step_applied"]:
        journal.event(run.step, "skip", f"loss {values['loss']:.4g} or gradient norm {values['grad_norm']:.4g} is not "
                                        "finite")


def log_evaluation(run: Run, journal: Journal) -> None:
    journal.evaluation(run.step, evaluate(run))
    if run.world.rank == 0:
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
                       row_tokens=config.data.max_prompt_tokens + max(
                           config.rollout.max_new_tokens, config.eval.max_new_tokens if config.eval.every else 0),
                       micro_batch_tokens=config.train.micro_batch_tokens, vocab_size=job.vocab_size,
                       chunk_size=max(config.loss.chunk_size, config.teacher.chunk_size))


def check_memory(job: Job, available: int) -> None:
    """Refuse before loading what cannot fit."""
    for role, parts in job_memory(job).items():
        needed, largest = sum(parts.values()), max(parts, key=parts.__getitem__)
        if needed > available:
            raise ValueError(f"a {role} rank needs about {human_bytes(needed)} of {human_bytes(available)}; largest "
                             f"part: {largest}, {human_bytes(parts[largest])} (more ranks, bfloat16, a smaller "
                             "rollout.batch_size or train.micro_batch_tokens, student.activation_checkpointing)")


def start_block(job: Job, world: World) -> str:
    config, plan = job.config, job.plan
    servers = span(plan.teachers[0]) if plan.has_servers else "inline"
    roles = [("student", span(plan.students), config.student.path, config.student.dtype, "yes"),
             ("teacher", servers, config.teacher.path, config.teacher.dtype, "no")]
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
    lines += [f"report: {run_dir / 'report.html'}",
              "export: " + shlex.join(["python", "-m", "distill_core.export", "--checkpoint", str(saved), "--out",
                                       str(run_dir / "export")])]
    return "\n".join(lines if done else [*lines, "the same command again continues from here"])


def dry_run(config: cfg.OPDConfig) -> None:
    """Build every role at the intended world size on a fake process group: all shapes and groups, no weights."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend "fake")

    world_size = config.topology.world_size or env_rank()[1]
    job = prepare(config, world_size, min(world_size, 8))
    servers = job.plan.teachers[0] if job.plan.has_servers else ()
    for rank in (0, *servers[:1]):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
        world = make_groups(job.plan, torch.device("cpu"), config.topology.timeout_s)
        if world.is_student:
            print(start_block(job, world))
        for role, model in dry_models(job, world).items():
            print(f"rank {rank}: {role} with {human_count(num_parameters(model))} parameters, "
                  f"{human_bytes(local_bytes(model.parameters()))} in its shards")
        dist.destroy_process_group()
    print(f"dry run passed: {world_size} ranks ({len(job.plan.students)} student, {len(servers)} teacher)")


def dry_models(job: Job, world: World) -> dict[str, nn.Module]:
    """What this rank would hold, sharded over its mesh but without storage; the student with its optimizer."""
    models, config = {}, job.config
    if world.is_student:
        models["student"] = shard_meta(job.student_lm, world.student_mesh, dtype=torch.float32, trainable=True,
                                       compute_dtype=DTYPES[config.student.dtype])
        student_optimizer(config, models["student"])
    if not world.is_student or not job.plan.has_servers:
        models["teacher"] = shard_meta(job.teacher_lm, world.teacher_meshes[0], dtype=DTYPES[config.teacher.dtype],
                                       trainable=False)
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
            intended = config.topology.world_size or max(world_size, config.topology.teacher_ranks + 1)
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
        report_failure(error, run_dir, rank=rank, role="before start", is_user_error=True)
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
    rank = env_rank()[0]
    role = "student" if rank in job.plan.students else "teacher"
    try:
        log = open_run(job.run_dir, cfg.to_yaml(job.config), rank)
        stop_request = StopRequest(job.run_dir)  # teacher ranks outlive a signal too: the students end their service
        world = start(job.plan, device, job.config.topology.timeout_s)
        everything = json.dumps([fingerprints(job), cfg.flatten(job.config)], sort_keys=True)
        agree_equal(world.control, everything, "config, data or model")
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
