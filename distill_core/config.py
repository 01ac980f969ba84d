# SPDX-License-Identifier: Apache-2.0
"""The config trees of train_opd.py and train_dmd.py: every option, its default, unit and meaning; a strict YAML loader
with overrides.

A file is a YAML mapping whose first key is `job: opd` (OPDConfig) or `job: dmd` (DMDConfig). Keys left out take the
defaults below; those marked "required" have none. Relative paths are relative to the current directory.
Values are read by the type of their field, not by YAML's guess: `1e-6` is a float, `off` is no text, `010` no integer.

    config = load("configs/quickstart.yaml", ["optim.lr=1e-5", "rollout.stop_ids=[0, 2]"])
    config.optim.lr                    # 1e-05
    print("\n".join(differences(config)), to_yaml(config))

    python -m distill_core.config configs/quickstart.yaml optim.lr=1e-5     # prints the resolved config; needs no torch
"""
import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

MAX_FILE_BYTES = 64 * 1024
MAX_DEPTH = 8
Dtype = Literal["float32", "bfloat16"]
Convention = Literal["dmd2", "causvid", "self_forcing", "fastgen", "fastvideo", "rcm", "lightx2v", "verl_omni"]
ScoreTimes = Literal["clamp", "inside", "ceil"]


class ConfigError(ValueError):
    """A config the user has to change. The message is one line: place, dotted path, what is wrong (remedy)."""


# ---------------------------------------------------------------------------------------------------------------------
# Options of both jobs
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 1e-6                         # peak learning rate of AdamW
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0                # decoupled
    max_grad_norm: float = 1.0               # the gradient is scaled down to this global L2 norm
    schedule: Literal["constant", "linear", "cosine"] = "constant"    # after the warm-up, down to min_lr_frac * lr
    warmup_steps: int = 0                    # steps of linear warm-up from 0
    min_lr_frac: float = 0.0                 # last learning rate of linear and cosine, as a fraction of lr


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 20                          # steps (job dmd: cycles) between checkpoints; 0 = at the end and on a stop
    keep_last: int = 2                       # newest checkpoints that stay
    keep_every: int = 0                      # checkpoints of steps (cycles) divisible by this stay for ever; 0 = none
    allow_drift: tuple[str, ...] = ()        # fingerprint keys that may differ on resume; recorded in the next manifest
    max_minutes: float | None = None         # then save and stop as if preempted; leave time for a step and a save
    max_skips_in_a_row: int = 10             # updates of a role skipped in a row, as not finite; then save and fail


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    log_every: int = 1                       # steps (cycles) between console lines; metrics.jsonl gets every one
    samples: int = 4                         # job opd: sample texts written per evaluation
    mass_every: int = 10                     # job opd: steps between looks at the teacher's whole vocabulary (masses,
                                             # overlap, entropy); a default step reads only the K ids. 0 = never


# ---------------------------------------------------------------------------------------------------------------------
# Options of job opd
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    path: str                                # model folder in Hugging Face format; required
    dtype: Dtype = "float32"                 # compute dtype; master weights and optimizer state are always float32
    activation_checkpointing: bool = False   # recompute each block in backward: less memory, about 1/3 more compute


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    path: str                                # model folder in Hugging Face format; required
    name: str = "teacher"                    # what the `teacher` key of a data line refers to
    ranks: int | None = None                 # ranks that only serve it, 0 = inline; null = topology.teacher_ranks
    dtype: Dtype = "float32"                 # dtype of the weights and of the forward; logits are float32 always
    chunk_size: int = 1024                   # token positions whose logits exist at a time on a teacher rank
    param_offload: bool = False              # keep the sharded weights in CPU memory between forwards (CUDA only)


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    world_size: int | None = None            # ranks the file is meant for: used by --dry-run; null = as launched
    teacher_ranks: int = 1                   # ranks that only serve the teacher; 0 = inline, sharded over the students
    timeout_s: int = 1800                    # longest silence of another rank, in seconds, before the job ends; must
                                             # exceed the time to write or hash one checkpoint


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...]                   # JSONL file or list of files, read in this order; required
    eval: str | None = None                  # JSONL file of held-out prompts; null = no evaluation (eval.every=0)
    tokenizer: Literal["auto", "byte"] = "auto"       # auto = the student folder's; byte = built in, needs no files
    max_prompt_tokens: int = 512             # longer prompts are treated as long_prompts says
    long_prompts: Literal["drop", "cut"] = "drop"     # drop = leave out; cut = keep the end; both are counted


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    temperature: float = 1.0                 # of sampling, and of student and teacher in the loss
    top_p: float = 1.0                       # nucleus: smallest set of tokens with this mass; 1 = off
    top_k: int = 0                           # sample among that many most likely tokens; 0 = off
    max_new_tokens: int = 256                # response tokens per sample, the stop token included
    batch_size: int = 64                     # rows decoded at a time on a rank
    samples_per_prompt: int = 1              # responses sampled for each prompt of a step
    dtype: Dtype | None = None               # dtype of the decoding replica; null = student.dtype
    stop_ids: tuple[int, ...] | None = None  # token ids that end a response; null = from the model folder; [] = none
    balance: Literal["static", "shared_counter"] = "static"   # who samples what: dealt by length, so that a resume is
                                             # bit-exact; or a rank that is done takes more, for very unequal lengths
    updates_per_rollout: int = 1             # steps whose prompts are sampled at once, each sample being trained on
                                             # once; 1 = all are on-policy
    async_depth: int = 0                     # 1 = sample for the next steps before training on these, with weights that
                                             # are one rollout older, so that teacher ranks score during sampling


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    mode: Literal["reverse_kl_topk", "generalized_kl_topk", "tail_bucket_kl_topk", "jsd_topk", "forward_kl_topk",
                  "reverse_kl_topk_unnormalized", "reverse_kl_full", "forward_kl_full",
                  "reverse_kl_sampled"] = "reverse_kl_topk"    # see distill_core/losses_kl.py
    top_k: int = 16                          # K of the top-K modes, at least 2
    chunk_size: int = 1024                   # token positions whose logits exist at a time on a student rank
    log_prob_min_clamp: float | None = None  # lower bound of the teacher's renormalised log-probs (nats), e.g. -10
    advantage_clip: float | None = None      # reverse_kl_sampled: bound of |advantage| (nats); null = none
    jsd_beta: float = 0.5                    # jsd_topk: weight of the teacher in the mixture; see losses_kl.jsd_topk
    token_fraction: float = 1.0              # share of each response's tokens that are scored and trained on, those of
                                             # highest student entropy; the others cost no head, teacher's or student's
    importance_clip: float | None = None     # weight each token by min(p_now / p_sampled, this), for samples of older
                                             # weights (costs the student's whole vocabulary); null = no weights


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    prompts_per_step: int = 64               # prompts of an optimizer step, over all ranks
    micro_batch_tokens: int = 8192           # tokens of a forward/backward on a rank; changes memory, not results


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int = 20                          # steps between evaluations; 0 = never
    at_start: bool = True                    # also evaluate before the first step
    num_prompts: int = 64                    # the first so many prompts of data.eval
    n: int = 1                               # samples per prompt, for mean@n and pass@n
    temperature: float = 0.7                 # 0 = greedy
    top_p: float = 0.95
    max_new_tokens: int = 256
    answer_pattern: str | None = None        # regex: group 1 of its last match is the answer; null = the whole response


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    enabled: bool = True                     # at start, serve the student's own weights as teacher: its KL must be 0
    max_kl_fp32: float = 1e-6                # nats per token, when student and teacher both compute in float32
    max_kl_bf16: float = 5e-3                # nats per token, when one of them computes in bfloat16


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    limit: float | None                      # threshold; null = alarm off
    action: Literal["warn", "stop"] = "warn"


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    student_mass: AlarmConfig = AlarmConfig(limit=0.5)       # below: the student's probability of its own top-K
    entropy_gap: AlarmConfig = AlarmConfig(limit=3.0)        # above: |student - teacher| entropy, nats per token
    truncated_frac: AlarmConfig = AlarmConfig(limit=0.9)     # above: fraction of responses cut at max_new_tokens
    repetition_frac: AlarmConfig = AlarmConfig(limit=0.5)    # above: fraction of responses that repeat themselves
    teacher_nonfinite: AlarmConfig = AlarmConfig(limit=0.0, action="stop")    # above: number of NaN or inf values


@dataclass(frozen=True, kw_only=True)
class OPDConfig:
    job: Literal["opd"] = "opd"
    name: str                                # letters, digits, . _ -; the run folder is run_root/name; required
    run_root: str = "runs"
    seed: int = 0                            # of the data order and of sampling
    max_steps: int                           # optimizer steps; required
    device: Literal["auto", "cpu", "cuda"] = "auto"          # auto = cuda where there is one
    deterministic: bool = False              # deterministic kernels: slower on CUDA
    student: StudentConfig
    teacher: TeacherConfig | None = None     # either this, or
    teachers: tuple[TeacherConfig, ...] = ()                 # several, to which the `teacher` key of data lines routes
    topology: TopologyConfig = TopologyConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    probe: ProbeConfig = ProbeConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()


# ---------------------------------------------------------------------------------------------------------------------
# Options of job dmd
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class DMDTeacherConfig:
    path: str                                # model folder; student and fake score start as copies of it; required
    dtype: Dtype = "float32"                 # dtype of its weights and forward; scores and losses are float32 always


@dataclass(frozen=True, kw_only=True)
class DMDDataConfig:
    conditions: str                          # .npz with labels, or a folder of safetensors and index.jsonl; required
    latents: str | None = None               # the same with real samples: only gan.weight > 0 needs them


@dataclass(frozen=True, kw_only=True)
class DMDTopologyConfig:
    world_size: int | None = None            # ranks the file is meant for: used by --dry-run; null = as launched
    timeout_s: int = 600                     # longest wait for another rank, in seconds, before the job ends; must
                                             # exceed a checkpoint's saving, not the loading of the model


@dataclass(frozen=True, kw_only=True)
class DMDMethodConfig:
    convention: Convention | None = None     # a published code base: its row of PRESETS takes the place of the defaults
    recipe: Literal["dmd2"] = "dmd2"
    profile: Literal["distribution_only"] = "distribution_only"       # adversarial terms: gan.weight
    # Each role a sharded module of its own, or one frozen base with LoRA adapters for student, fake score and EMA:
    role_storage: Literal["colocated_independent", "shared_base_adapters"] = "colocated_independent"
    sample_source: Literal["offline"] = "offline"             # conditions are read from data.conditions
    fake_update_ratio: int = 5               # fake-score attempts that follow each student attempt: one cycle
    fake_warmup_cycles: int = 0              # first cycles, which train the fake score only
    fake_batch: Literal["fresh", "reuse_student"] = "fresh"   # new samples, or for the first attempt the student's own
    student_batch_size: int = 64             # samples of a student attempt, over all ranks
    fake_score_batch_size: int = 64          # samples of a fake-score attempt, over all ranks
    student_micro_batch_size_per_gpu: int = 16        # samples of a forward/backward; changes memory, not results
    fake_score_micro_batch_size_per_gpu: int = 16
    loss_normalizer: float | None = None     # divides the summed loss in place of the number of samples; null = mean
    student_steps: int = 4                   # denoising steps of the student, in training and in sampling
    rollout: Literal["sde", "ode"] = "sde"   # between steps: noise anew with fresh noise, or an Euler step
    exit_step: Literal["uniform", "last", "round_robin"] = "uniform"  # the step of a rollout that is trained
    rollout_timestep_shift: float = 1.0      # m of m s / (1 + (m - 1) s) on the student's grid; 1 = even steps
    teacher_guidance_scale: float = 1.0      # s of u + s (c - u), u = null condition; 1 = unguided, one teacher pass
    cfg_norm: Literal["none", "layer_norm", "scalar"] = "none"        # rescales the guided teacher to the norm of c
    # mean |x - x0_teacher|, by which the gradient is divided: of each sample, at least normalization_epsilon; the same
    # plus normalization_epsilon; or one of a whole micro-batch, whose size then changes results:
    normalizer: Literal["sample", "sample_add", "batch"] = "sample"
    normalization_epsilon: float = 1e-6
    # Noise levels of the student's loss. clamp: U{0 ... T-1} / T, shifted, clamped to [score_sigma_min,
    # score_sigma_max]; ceil: the same on U{1 ... T} / T; inside: uniform on the k / T in that range, shifted, clamped:
    score_times: ScoreTimes = "clamp"
    score_time_per: Literal["sample", "batch"] = "sample"     # batch = one level for all samples of an attempt
    score_discrete_steps: int = 1000         # T; 0 = continuous
    score_sigma_min: float = 0.02            # 0 = data, 1 = noise
    score_sigma_max: float = 0.98
    score_timestep_shift: float = 1.0        # as rollout_timestep_shift, on the score times
    # What the fake score's squared error is taken of: the flow velocity, x0, the noise, x0 as EDM weighs it, or the
    # velocity of a variance-preserving path; a weight on the first, by noise level:
    fake_loss: Literal["flow", "x0", "eps", "edm", "vp_v"] = "flow"
    fake_times: ScoreTimes | None = None     # noise levels of the fake score's loss; here and in the next three
    fake_sigma_min: float | None = None      # null = as the student's
    fake_sigma_max: float | None = None
    fake_timestep_shift: float | None = None
    student_optim: OptimConfig = OptimConfig(lr=2e-6, betas=(0.0, 0.999), weight_decay=0.01, max_grad_norm=10.0)
    fake_score_optim: OptimConfig = OptimConfig(lr=2e-6, betas=(0.0, 0.999), weight_decay=0.01, max_grad_norm=10.0)
    ema_decay: float = 0.999                 # of the student's average, once per applied student step
    ema_start_step: int = 0                  # applied student steps until which the average is a copy
    export_role: Literal["student_ema", "student"] = "student_ema"    # whose weights are sampled and exported
    dtype: Dtype = "float32"                 # compute dtype; master weights, EMA and optimizer state are always float32
    activation_checkpointing: bool = False   # recompute each block in backward: less memory, about 1/3 more compute


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    rank: int = 0                            # of the adapters of student and fake score; 0 = all parameters are trained
    alpha: float | None = None               # the adapter is scaled by alpha / rank; null = rank
    targets: tuple[str, ...] | None = None   # linear layers, by name or its end; null = the architecture's own list
    adapters: tuple[str, str, str] = ("student", "fake_score", "student_ema")     # names of the three roles' adapters


@dataclass(frozen=True, kw_only=True)
class GANConfig:
    weight: float = 0.0                      # of the adversarial term in the student's loss; 0 = no discriminator
    discriminator_weight: float = 1.0        # of the discriminator's loss in the fake-score phase
    lr: float = 1e-4                         # learning rate of the discriminator head


@dataclass(frozen=True, kw_only=True)
class DMDEvalConfig:
    every: int = 100                         # cycles between sample grids; 0 = never
    num_samples: int = 64                    # samples of a grid
    guidance_scale: float | None = None      # of the teacher's samples beside it; null = dmd.teacher_guidance_scale
    num_teacher_steps: int = 50              # Euler steps of the teacher's reference grid; 0 = none


@dataclass(frozen=True, kw_only=True)
class DMDConfig:
    job: Literal["dmd"] = "dmd"
    name: str                                # letters, digits, . _ -; the run folder is run_root/name; required
    run_root: str = "runs"
    seed: int = 0                            # of the conditions' order, noises, score times and exit steps
    max_cycles: int                          # cycles, dmd.fake_warmup_cycles included; required
    device: Literal["auto", "cpu", "cuda"] = "auto"          # auto = cuda where there is one
    deterministic: bool = False              # deterministic kernels: slower on CUDA
    teacher: DMDTeacherConfig
    data: DMDDataConfig
    topology: DMDTopologyConfig = DMDTopologyConfig()
    dmd: DMDMethodConfig = DMDMethodConfig()
    lora: LoRAConfig = LoRAConfig()
    gan: GANConfig = GANConfig()
    eval: DMDEvalConfig = DMDEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()


Config = OPDConfig | DMDConfig


# ---------------------------------------------------------------------------------------------------------------------
# Published conventions
# ---------------------------------------------------------------------------------------------------------------------

# What dmd.convention fills in, key by key, where neither the file nor the command line says otherwise. Guidance scales
# are in our form u + s (c - u). No code base but those with an epsilon bounds its normaliser; 1e-12 stands for none.
# Beyond these keys they differ in what is not imitated here: precision (DMD2, CausVid, Self-Forcing and rCM take the
# loss in float64; here fp32) and non-finite values (rCM drops the whole sample; here entries, as in the others).
PRESETS: dict[str, dict[str, Any]] = {
    # DMD2, main/sd_guidance.py and experiments/sdxl: u + 8 (c - u); randint(20, 981) and, for the fake score, an
    # unclamped randint(0, 1000), on the VP schedule; its index 0, not free of noise, is the level .001 here. The
    # first of the five fake updates of a cycle is on the student's own samples, the others are on new ones. SD1.5: 1.75
    # and 1:10. ImageNet-64, main/edm: 1 (unguided), fake_loss edm, on the times of a Karras schedule.
    "dmd2": dict(
        normalizer="sample", normalization_epsilon=1e-12, teacher_guidance_scale=8.0, cfg_norm="none",
        score_times="inside", score_time_per="sample", score_discrete_steps=1000, score_sigma_min=0.02,
        score_sigma_max=0.98, score_timestep_shift=1.0, fake_loss="eps", fake_times="clamp", fake_sigma_min=0.001,
        fake_sigma_max=1.0, fake_timestep_shift=1.0, fake_update_ratio=5, fake_batch="reuse_student"),
    # CausVid, causvid/dmd.py: 3.5 of c + s' (c - u) is 4.5 here. 14 % of its score times are exactly .98.
    "causvid": dict(
        normalizer="sample", normalization_epsilon=1e-12, teacher_guidance_scale=4.5, cfg_norm="none",
        score_times="clamp", score_time_per="sample", score_discrete_steps=1000, score_sigma_min=0.02,
        score_sigma_max=0.98, score_timestep_shift=8.0, fake_loss="flow", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=5, fake_batch="fresh"),
    # Self-Forcing, model/dmd.py: 3.0 of c + s' (c - u) is 4.0 here. 9 % of its score times are exactly .98.
    "self_forcing": dict(
        normalizer="sample", normalization_epsilon=1e-12, teacher_guidance_scale=4.0, cfg_norm="none",
        score_times="clamp", score_time_per="sample", score_discrete_steps=1000, score_sigma_min=0.02,
        score_sigma_max=0.98, score_timestep_shift=5.0, fake_loss="flow", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=5, fake_batch="fresh"),
    # FastGen, fastgen/methods/common_loss.py and its Wan experiment: c + (5 - 1) (c - u), which is 5 here. Times are
    # uniform in [.001, .999] before the shift. It updates student or fake score, hence 1:4 at its frequency of 5.
    "fastgen": dict(
        normalizer="sample_add", normalization_epsilon=1e-6, teacher_guidance_scale=5.0, cfg_norm="none",
        score_times="inside", score_time_per="sample", score_discrete_steps=0, score_sigma_min=0.001,
        score_sigma_max=0.999, score_timestep_shift=5.0, fake_loss="x0", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=4, fake_batch="fresh"),
    # FastVideo, train/methods/distribution_matching/dmd2.py and its Wan configs: 4.5 of u + s (c - u); the 3.5 of its
    # documents, of c + w (c - u), is the same. One normaliser and one score time for a whole batch: a sample's share of
    # the gradient depends on the others', so learning rates do not carry over.
    "fastvideo": dict(
        normalizer="batch", normalization_epsilon=1e-12, teacher_guidance_scale=4.5, cfg_norm="none",
        score_times="clamp", score_time_per="batch", score_discrete_steps=1000, score_sigma_min=0.02,
        score_sigma_max=0.98, score_timestep_shift=8.0, fake_loss="flow", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=5, fake_batch="fresh"),
    # rCM, t2v_model_distill_rcm.py: u + 5 (c - u) (its first revisions: c + 5 (c - u), 6 here). Times are unclamped. It
    # updates student or fake score, hence 1:4. On TrigFlow's path cos t, sin t the error of x0 over sin^2 t is that of
    # the VP velocity. Both losses are sums over a sample, the student's without the 1/2: Adam does not see it, but a
    # max_grad_norm does.
    "rcm": dict(
        normalizer="sample", normalization_epsilon=1e-5, teacher_guidance_scale=5.0, cfg_norm="none",
        score_times="clamp", score_time_per="sample", score_discrete_steps=0, score_sigma_min=0.0001,
        score_sigma_max=1.0, score_timestep_shift=5.0, fake_loss="vp_v", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=4, fake_batch="fresh"),
    # LightX2V, lightx2v_train/trainers/dmd and its Qwen-Image config: u + 4 (c - u) of the velocity, rescaled.
    "lightx2v": dict(
        normalizer="sample", normalization_epsilon=1e-12, teacher_guidance_scale=4.0, cfg_norm="layer_norm",
        score_times="ceil", score_time_per="sample", score_discrete_steps=1000, score_sigma_min=0.02,
        score_sigma_max=1.0, score_timestep_shift=5.0, fake_loss="flow", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=2, fake_batch="fresh"),
    # verl-omni, workers/config/diffusion/dmd.py: u + 4 (c - u) of the velocity, rescaled.
    "verl_omni": dict(
        normalizer="sample", normalization_epsilon=1e-6, teacher_guidance_scale=4.0, cfg_norm="layer_norm",
        score_times="clamp", score_time_per="sample", score_discrete_steps=1000, score_sigma_min=0.02,
        score_sigma_max=0.98, score_timestep_shift=3.0, fake_loss="flow", fake_times=None, fake_sigma_min=None,
        fake_sigma_max=None, fake_timestep_shift=None, fake_update_ratio=2, fake_batch="fresh"),
}


def score_time_law(dmd: DMDMethodConfig, role: Literal["student", "fake_score"]) -> dict[str, Any]:
    """The keyword arguments of flow.score_times for that role's loss."""
    law = {"law": dmd.score_times, "discrete_steps": dmd.score_discrete_steps, "shift": dmd.score_timestep_shift,
           "low": dmd.score_sigma_min, "high": dmd.score_sigma_max}
    if role == "fake_score":
        own = {"law": dmd.fake_times, "shift": dmd.fake_timestep_shift,
               "low": dmd.fake_sigma_min, "high": dmd.fake_sigma_max}
        law |= {name: value for name, value in own.items() if value is not None}
    return law


def convention_lines(config: DMDConfig) -> list[str]:
    """What dmd.convention stands for in this run, for the start block; empty without one."""
    dmd, name = config.dmd, config.dmd.convention
    if name is None:
        return []
    changed = [f"{key}={_show(getattr(dmd, key))} (not {_show(value)})"
               for key, value in PRESETS[name].items() if getattr(dmd, key) != value]
    scale = dmd.teacher_guidance_scale
    return [f"convention {name}" + (f", but {', '.join(changed)}" if changed else ""),
            f"  teacher: u + {scale:g} (c - u), the same as c + {scale - 1:g} (c - u); norm {dmd.cfg_norm}",
            f"  normaliser: {dmd.normalizer}, epsilon {dmd.normalization_epsilon:g}",
            f"  score times: {_law_text(dmd, 'student')}, one per {dmd.score_time_per}",
            f"  fake score: {dmd.fake_loss} loss, times {_law_text(dmd, 'fake_score')}",
            f"  student:fake = 1:{dmd.fake_update_ratio} attempts per cycle, fake batch {dmd.fake_batch}"]


def _law_text(dmd: DMDMethodConfig, role: Literal["student", "fake_score"]) -> str:
    law = score_time_law(dmd, role)
    grid = f"k / {law['discrete_steps']}" if law["discrete_steps"] else "continuous"
    return f"{law['law']} [{law['low']:g}, {law['high']:g}], {grid}, shift {law['shift']:g}"


# ---------------------------------------------------------------------------------------------------------------------
# Entry points
# ---------------------------------------------------------------------------------------------------------------------

def load(path: str | Path, overrides: Sequence[str] = (), *, job: str | None = None) -> Config:
    """The checked config of a YAML file with `a.b=c` overrides on top, the last one winning; raises ConfigError.

    `job` is the only job that the caller takes; None = any.
    """
    source = str(path)
    tree = _parse(_read_text(path), source)
    if not isinstance(tree, dict) or next(iter(tree), None) != "job":
        raise ConfigError(f"{source}: the first key must be `job` "
                          "(start the file with the line: job: opd, or job: dmd)")
    for override in overrides:
        _apply(tree, override)
    kind = _job_class(tree["job"], job)
    _check_keys(kind, tree, "", tuple(_option_paths(kind)))
    _fill_in_convention(tree)
    config = _build(kind, tree, "")
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The whole config as YAML text that `load` reads back to an equal config."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def differences(config: Config) -> list[str]:
    """What differs from the defaults, as `optim.lr=1e-05 (default 1e-06)`; required keys, having none, are left out.

    With dmd.convention, the values of its preset are the defaults.
    """
    return [f"{path}={_show(value)} (default {_show(default)})"
            for path, value, default in _leaves(config) if default is not MISSING and value != default]


def flatten(config: Config, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """JSON values by dotted path, without the paths that start with one of `leave_out`: the basis of fingerprints."""
    return {path: _plain(value) for path, value, _ in _leaves(config) if not _rule_of(path).startswith(leave_out)}


def check(config: Config) -> None:
    """Raise ConfigError for values out of range and for keys that contradict each other."""
    _check_ranges(config)
    _check_name(config.name)
    if isinstance(config, OPDConfig):
        _check_opd(config)
    else:
        _check_dmd(config)
    _check_warmup_steps(config)
    if config.topology.world_size is not None:
        check_world(config, config.topology.world_size)


def check_world(config: Config, world_size: int) -> None:
    """Raise ConfigError unless the job fits on `world_size` ranks: opd needs one for the student, dmd even batches."""
    if isinstance(config, OPDConfig):
        _check_student_ranks(sum(teacher_ranks_of(config)), world_size)
    else:
        _check_batches(config.dmd, world_size)


def teachers_of(config: OPDConfig) -> tuple[TeacherConfig, ...]:
    """The one teacher, or all of several."""
    return config.teachers if config.teacher is None else (config.teacher,)


def teacher_ranks_of(config: OPDConfig) -> list[int]:
    """How many ranks serve each teacher; 0 = inline."""
    return [config.topology.teacher_ranks if teacher.ranks is None else teacher.ranks
            for teacher in teachers_of(config)]


def warnings(config: Config) -> list[str]:
    """One line for each option that was set but has no effect, or not the one that it seems to have."""
    is_opd = isinstance(config, OPDConfig)
    changed = [path for path, value, default in _leaves(config) if value != default]
    idle = _idle_opd(config) if is_opd else _idle_dmd(config)
    idle += [(f"{path}.min_lr_frac", optim.schedule == "constant", f"{path}.schedule=constant never decays")
             for path, optim, _ in _optimizers(config)]
    idle += [("checkpoint.keep_every", config.checkpoint.every == 0, "checkpoint.every=0 saves only at the end")]
    idle += [(path, config.eval.every == 0, "eval.every=0 never evaluates")
             for path in changed if path.startswith("eval.") and path != "eval.every"]
    lines = [f"{path} has no effect: {reason}" for path, is_idle, reason in idle if is_idle and path in changed]
    return lines + (_surprises_opd(config) if is_opd else _surprises_dmd(config))


def _idle_opd(config: OPDConfig) -> list[tuple[str, bool, str]]:
    """(option, whether nothing reads it, why) of job opd."""
    loss, greedy_eval = config.loss, config.eval.temperature == 0
    on_policy = config.rollout.updates_per_rollout == 1 and config.rollout.async_depth == 0
    return [("loss.top_k", "_topk" not in loss.mode, f"loss.mode={loss.mode} takes no top-K"),
            ("loss.log_prob_min_clamp", loss.mode != "reverse_kl_topk", f"loss.mode={loss.mode} ignores it"),
            ("loss.advantage_clip", loss.mode != "reverse_kl_sampled", f"loss.mode={loss.mode} has no advantage"),
            ("loss.jsd_beta", loss.mode != "jsd_topk", f"loss.mode={loss.mode} has no mixture"),
            ("loss.importance_clip", on_policy, "every sample is of the weights that are trained"),
            ("topology.teacher_ranks", all(teacher.ranks is not None for teacher in teachers_of(config)),
             "every teacher has ranks of its own"),
            ("eval.n", greedy_eval, "eval.temperature=0 gives n equal samples"),
            ("eval.top_p", greedy_eval, "eval.temperature=0 is greedy"),
            ("data.eval", config.eval.every == 0, "eval.every=0 never evaluates")]


def _idle_dmd(config: DMDConfig) -> list[tuple[str, bool, str]]:
    """(option, whether nothing reads it, why) of job dmd."""
    dmd, no_lora, no_gan = config.dmd, config.lora.rank == 0, config.gan.weight == 0
    one_step, student_steps = dmd.student_steps == 1, config.max_cycles - dmd.fake_warmup_cycles
    return [("dmd.rollout", one_step, "dmd.student_steps=1 starts from pure noise, nothing is simulated"),
            ("dmd.exit_step", one_step, "dmd.student_steps=1 leaves one step to train"),
            ("dmd.rollout_timestep_shift", one_step, "dmd.student_steps=1 has the grid 1, 0 at any shift"),
            ("dmd.cfg_norm", dmd.teacher_guidance_scale == 1, "dmd.teacher_guidance_scale=1 guides nothing"),
            ("dmd.ema_start_step", dmd.ema_decay == 0, "dmd.ema_decay=0 makes the EMA a copy all the time"),
            ("dmd.ema_decay", dmd.ema_start_step > student_steps,
             f"dmd.ema_start_step={dmd.ema_start_step} is past the last of {student_steps} student steps"),
            ("lora.alpha", no_lora, "lora.rank=0 trains all parameters"),
            ("lora.targets", no_lora, "lora.rank=0 trains all parameters"),
            ("lora.adapters", no_lora, "lora.rank=0 trains all parameters"),
            ("data.latents", no_gan, "gan.weight=0 needs no real samples"),
            ("gan.discriminator_weight", no_gan, "gan.weight=0 has no discriminator"),
            ("gan.lr", no_gan, "gan.weight=0 has no discriminator"),
            ("metrics.samples", True, "job dmd writes grids of eval.num_samples"),
            ("metrics.mass_every", True, "job dmd has no vocabulary")]


def _surprises_opd(config: OPDConfig) -> list[str]:
    lines = []
    if config.loss.mode == "reverse_kl_sampled" and (config.rollout.top_p < 1 or config.rollout.top_k > 0):
        lines.append("rollout.top_p and rollout.top_k bias loss.mode=reverse_kl_sampled, which assumes untruncated "
                     "samples")
    if config.loss.mode == "reverse_kl_topk_unnormalized":
        lines.append("loss.mode=reverse_kl_topk_unnormalized moves mass out of the top-K and collapses: it is there to "
                     "be studied (train with reverse_kl_topk, generalized_kl_topk or tail_bucket_kl_topk)")
    if config.rollout.async_depth == 1 and all(ranks == 0 for ranks in teacher_ranks_of(config)):
        lines.append("rollout.async_depth=1 makes samples older and gains nothing: no teacher has ranks of its own "
                     "that could work meanwhile")
    if config.rollout.async_depth == 1:
        lines.append("rollout.async_depth=1 samples anew after each checkpoint, and after a stop: a run that was "
                     "stopped between checkpoints is not the undisturbed one bit for bit")
    if config.rollout.balance == "shared_counter":
        lines.append("rollout.balance=shared_counter deals prompts by speed: a resumed run is not bit-exact")
    if config.data.eval in config.data.train:
        lines.append(f"data.eval={config.data.eval} is also in data.train: its prompts are not held out")
    return lines


def _surprises_dmd(config: DMDConfig) -> list[str]:
    lines = []
    if config.dmd.ema_decay == 1:
        lines.append("dmd.ema_decay=1 never moves the average once it is no copy: student_ema is not the trained "
                     "student")
    if config.dmd.normalizer == "batch":
        lines.append("dmd.normalizer=batch is one of a micro-batch: dmd.student_micro_batch_size_per_gpu changes "
                     "results")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------

def _of_optimizers(*keys: str) -> tuple[str, ...]:
    sections = ("optim", "dmd.student_optim", "dmd.fake_score_optim")
    return tuple(f"{section}.{key}" for section in sections for key in keys)


_RANGES = (    # of both jobs; an option that a job does not have is passed over
    (">= 0", lambda x: x >= 0, (
        "seed", "topology.teacher_ranks", "rollout.top_k", "eval.every", "eval.temperature", "alarms.entropy_gap.limit",
        "alarms.teacher_nonfinite.limit", "checkpoint.every", "checkpoint.keep_every", "metrics.samples",
        "metrics.mass_every", "teacher.ranks",
        *_of_optimizers("weight_decay", "warmup_steps"),
        "dmd.fake_warmup_cycles", "dmd.score_discrete_steps", "dmd.ema_start_step", "lora.rank", "gan.weight",
        "eval.num_teacher_steps")),
    (">= 1", lambda x: x >= 1, (
        "max_steps", "teacher.chunk_size", "topology.world_size", "topology.timeout_s", "data.max_prompt_tokens",
        "rollout.max_new_tokens", "rollout.batch_size", "rollout.samples_per_prompt", "loss.top_k", "loss.chunk_size",
        "rollout.updates_per_rollout", "loss.importance_clip",
        "train.prompts_per_step", "train.micro_batch_tokens", "eval.num_prompts", "eval.n", "eval.max_new_tokens",
        "checkpoint.keep_last", "checkpoint.max_skips_in_a_row", "metrics.log_every",
        "max_cycles", "dmd.fake_update_ratio", "dmd.student_batch_size", "dmd.fake_score_batch_size",
        "dmd.student_micro_batch_size_per_gpu", "dmd.fake_score_micro_batch_size_per_gpu", "dmd.student_steps",
        "dmd.rollout_timestep_shift", "dmd.score_timestep_shift", "dmd.fake_timestep_shift", "eval.num_samples")),
    ("> 0", lambda x: x > 0, (
        "checkpoint.max_minutes",
        "rollout.temperature", "loss.advantage_clip", "probe.max_kl_fp32", "probe.max_kl_bf16",
        *_of_optimizers("lr", "eps", "max_grad_norm"),
        "dmd.loss_normalizer", "dmd.teacher_guidance_scale", "dmd.normalization_epsilon", "lora.alpha",
        "gan.discriminator_weight", "gan.lr", "eval.guidance_scale")),
    ("< 0", lambda x: x < 0, ("loss.log_prob_min_clamp",)),
    ("0 or 1", lambda x: x in (0, 1), ("rollout.async_depth",)),
    ("at most 604800 (a week)", lambda x: x <= 604800, ("topology.timeout_s",)),
    ("at most 1000000", lambda x: x <= 1_000_000, ("topology.world_size", "topology.teacher_ranks", "teacher.ranks")),
    ("0 or at least 0.001", lambda x: x == 0 or x >= 0.001, ("rollout.temperature", "eval.temperature")),
    ("in (0, 1]", lambda x: 0 < x <= 1, (
        "rollout.top_p", "eval.top_p", "loss.token_fraction", "dmd.score_sigma_min", "dmd.score_sigma_max",
        "dmd.fake_sigma_min", "dmd.fake_sigma_max")),
    ("in [0, 1]", lambda x: 0 <= x <= 1, (
        "loss.jsd_beta", "alarms.student_mass.limit", "alarms.truncated_frac.limit", "alarms.repetition_frac.limit",
        *_of_optimizers("min_lr_frac"), "dmd.ema_decay")),
    ("two numbers in [0, 1)", lambda xs: all(0 <= x < 1 for x in xs), _of_optimizers("betas")),
    ("a list of ids >= 0", lambda xs: all(x >= 0 for x in xs), ("rollout.stop_ids",)),
)


def _check_ranges(config: Config) -> None:
    leaves: dict[str, list[tuple[str, Any, Any]]] = {}
    for path, value, default in _leaves(config):
        leaves.setdefault(_rule_of(path), []).append((path, value, default))
    for expectation, holds, rules in _RANGES:
        for path, value, default in [leaf for rule in rules for leaf in leaves.get(rule, [])]:
            if value is not None and not holds(value):
                remedy = f"set {path}" if default is MISSING else f"the default is {path}={_show(default)}"
                raise ConfigError(f"{path}: must be {expectation}, got {_show(value)} ({remedy})")


def _rule_of(path: str) -> str:
    """Each of several teachers is under the rules of the one."""
    return re.sub(r"^teachers\[\d+\]", "teacher", path)


def _check_name(name: str) -> None:
    """The name becomes a folder under run_root, so it must not lead out of it."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
        raise ConfigError(f"name: '{_clip(name)}' cannot name a run folder (use letters, digits, '.', '_' and '-')")


def _optimizers(config: Config) -> list[tuple[str, OptimConfig, int]]:
    """(dotted path, options, most steps that it makes in the run) of every optimizer with a section of its own."""
    if isinstance(config, OPDConfig):
        return [("optim", config.optim, config.max_steps)]
    dmd = config.dmd
    return [("dmd.student_optim", dmd.student_optim, config.max_cycles - dmd.fake_warmup_cycles),
            ("dmd.fake_score_optim", dmd.fake_score_optim, config.max_cycles * dmd.fake_update_ratio)]


def _check_warmup_steps(config: Config) -> None:
    limit = "max_steps" if isinstance(config, OPDConfig) else "max_cycles"
    for path, optim, num_steps in _optimizers(config):
        if optim.warmup_steps >= num_steps:
            raise ConfigError(f"{path}.warmup_steps: {optim.warmup_steps} leaves nothing of the {num_steps} steps that "
                              f"{limit}={getattr(config, limit)} gives (set it below {num_steps})")


def _check_opd(config: OPDConfig) -> None:
    _check_answer_pattern(config.eval.answer_pattern)
    if not config.data.train:
        raise ConfigError("data.train: the list is empty (name at least one JSONL file)")
    if config.max_steps % config.rollout.updates_per_rollout:
        raise ConfigError(f"max_steps: {config.max_steps} is not divisible by rollout.updates_per_rollout="
                          f"{config.rollout.updates_per_rollout} (all steps of a rollout are made)")
    if config.loss.importance_clip is not None and config.loss.mode.endswith("_full"):
        raise ConfigError(f"loss.importance_clip: not with loss.mode={config.loss.mode} (set it to null, or take a "
                          "top-K mode)")
    if config.loss.top_k < 2:
        raise ConfigError(f"loss.top_k: {config.loss.top_k} is too small: one token renormalises to probability 1, so "
                          "loss and diagnostics would be empty (set loss.top_k=2 or more)")
    _check_teachers(config)
    if config.eval.every > 0 and config.data.eval is None:
        raise ConfigError(f"data.eval: null while eval.every is {config.eval.every} "
                          "(set data.eval=FILE, or eval.every=0 for no evaluation)")


def _check_teachers(config: OPDConfig) -> None:
    teachers = teachers_of(config)
    if (config.teacher is None) == (not config.teachers):
        raise ConfigError("teacher: set either teacher (one) or teachers (a list of several), with a path each")
    names = [teacher.name for teacher in teachers]
    for name in names:
        if names.count(name) > 1 or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise ConfigError(f"teachers: '{_clip(name)}' is not a name that only one teacher has (give each teacher a "
                              "name of letters, digits, '.', '_' and '-')")
    if config.device == "cpu" and any(teacher.param_offload for teacher in teachers):
        raise ConfigError("teacher.param_offload: needs a GPU to offload from, but device is cpu "
                          "(set teacher.param_offload=false)")


def _check_student_ranks(teacher_ranks: int, world_size: int) -> None:
    if teacher_ranks >= world_size:
        raise ConfigError(f"topology.teacher_ranks: {teacher_ranks} leaves no rank for the student in a world of "
                          f"{world_size} (start more ranks, or set topology.teacher_ranks=0 for an inline teacher)")


def _check_dmd(config: DMDConfig) -> None:
    dmd = config.dmd
    if config.max_cycles <= dmd.fake_warmup_cycles:
        raise ConfigError(f"max_cycles: {config.max_cycles} ends before the student's first step, which follows "
                          f"dmd.fake_warmup_cycles={dmd.fake_warmup_cycles} (set max_cycles above it)")
    if config.gan.weight > 0 and config.data.latents is None:
        raise ConfigError(f"data.latents: null, but gan.weight={config.gan.weight} compares with real samples "
                          "(set data.latents=PATH, or gan.weight=0)")
    _check_storage(config)
    _check_score_times(dmd, "student")
    _check_score_times(dmd, "fake_score")
    _check_reuse(dmd)
    _check_batches(dmd, 1)


def _check_storage(config: DMDConfig) -> None:
    dmd, lora = config.dmd, config.lora
    is_shared = dmd.role_storage == "shared_base_adapters"
    if is_shared and lora.rank == 0:
        raise ConfigError("lora.rank: 0, but dmd.role_storage=shared_base_adapters keeps each role as a LoRA adapter "
                          "(set lora.rank=32, say, or dmd.role_storage=colocated_independent)")
    if is_shared and config.teacher.dtype != dmd.dtype:
        raise ConfigError(f"teacher.dtype: {config.teacher.dtype}, but dmd.dtype={dmd.dtype}, and in dmd.role_storage="
                          "shared_base_adapters the teacher is the base of all roles "
                          f"(set teacher.dtype={dmd.dtype})")
    if lora.targets == ():
        raise ConfigError("lora.targets: the list is empty (name layers, or set null for the architecture's own list)")
    if len(set(lora.adapters)) < len(lora.adapters):
        raise ConfigError(f"lora.adapters: {_clip(_show(lora.adapters))} gives two roles one name, hence one adapter "
                          "(give student, fake score and EMA names of their own)")
    for name in lora.adapters:
        if not (name.isascii() and name.isidentifier()):
            raise ConfigError(f"lora.adapters: '{_clip(name)}' cannot name an adapter (use letters, digits and _)")


def _check_score_times(dmd: DMDMethodConfig, role: Literal["student", "fake_score"]) -> None:
    law = score_time_law(dmd, role)
    low, high, num_steps = law["low"], law["high"], law["discrete_steps"]
    keys = {key: f"dmd.score_{key}" if role == "student" or getattr(dmd, f"fake_{key}") is None else f"dmd.fake_{key}"
            for key in ("times", "sigma_min", "sigma_max")}
    if low >= high:
        raise ConfigError(f"{keys['sigma_min']}: {low} is not below {keys['sigma_max']}={high} "
                          "(the defaults are 0.02 and 0.98)")
    if law["law"] == "inside" and num_steps and math.ceil(low * num_steps) > math.floor(high * num_steps):
        raise ConfigError(f"{keys['times']}: inside, but no k / {num_steps} lies in [{low}, {high}] "
                          "(raise dmd.score_discrete_steps, or set it to 0)")


def _check_reuse(dmd: DMDMethodConfig) -> None:
    if dmd.fake_batch != "reuse_student":
        return
    if dmd.fake_warmup_cycles > 0:
        raise ConfigError(f"dmd.fake_batch: reuse_student, but the dmd.fake_warmup_cycles={dmd.fake_warmup_cycles} "
                          "have no student batch (set dmd.fake_batch=fresh, or dmd.fake_warmup_cycles=0)")
    if dmd.fake_score_batch_size != dmd.student_batch_size:
        raise ConfigError(f"dmd.fake_score_batch_size: {dmd.fake_score_batch_size}, but dmd.fake_batch=reuse_student "
                          f"takes the student's samples (set dmd.fake_score_batch_size={dmd.student_batch_size})")


def _check_batches(dmd: DMDMethodConfig, num_ranks: int) -> None:
    """Every rank has the same number of full micro-batches."""
    for role in ("student", "fake_score"):
        batch_key, micro_key = f"{role}_batch_size", f"{role}_micro_batch_size_per_gpu"
        batch, micro_batch = getattr(dmd, batch_key), getattr(dmd, micro_key)
        unit = num_ranks * micro_batch
        if batch % unit:
            ranks = f"{num_ranks} ranks x " if num_ranks > 1 else ""
            raise ConfigError(f"dmd.{batch_key}: {batch} is not divisible by {ranks}dmd.{micro_key}={micro_batch} "
                              f"(set dmd.{batch_key}={max(1, round(batch / unit)) * unit}, or another dmd.{micro_key})")


def _check_answer_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"eval.answer_pattern: '{_clip(pattern)}' is not a valid regex: {error} "
                          "(Python syntax; quote it in YAML)") from None
    if num_groups == 0:
        raise ConfigError(f"eval.answer_pattern: '{_clip(pattern)}' has no group "
                          r"(put the answer in parentheses, e.g. 'answer: (\d+)')")


# ---------------------------------------------------------------------------------------------------------------------
# YAML text to a tree: dict, list and _Scalar only
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Scalar:
    """A value as written. YAML's own guess at its type is not taken: `1e-6` would be text, and `off` a boolean."""
    text: str
    is_plain: bool    # not quoted
    where: str        # "file:line" or "command line"


def _read_text(path: str | Path) -> str:
    try:
        if os.path.lexists(path) and not os.path.isfile(path):    # a pipe or a terminal would be waited for without end
            raise ValueError("it is no regular file, or a broken link")
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start} (save it as UTF-8)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error} "
                          "(check the path of the config file)") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes (is it a config file?)")
    return text


def _parse(text: str, source: str) -> Any:
    """The only document of a YAML text as a tree; None for an empty text."""
    events = _events(text, source)
    next(events)    # start of the stream
    if isinstance(next(events), yaml.StreamEndEvent):
        return None
    tree = _subtree(next(events), events, source, MAX_DEPTH)
    next(events)    # end of the document
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise ConfigError(f"{source}: holds more than one YAML document (remove the second `---`)")
    return tree


def _events(text: str, source: str) -> Iterator[yaml.Event]:
    """YAML events, read lazily: a bomb is refused before it is parsed, and no object is ever built from a tag."""
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}:{line}: not valid YAML: {_clip(error.problem or error.context, 200)} "
                          "(check indentation, colons and quotes)") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:    # PyYAML lets errors of chr() and int() through
        raise ConfigError(f"{source}: not valid YAML: {_clip(' '.join(str(error).split()), 200)} "
                          "(check for control characters and escapes)") from None


def _subtree(event: yaml.Event, events: Iterator[yaml.Event], source: str, depth_left: int) -> Any:
    """The tree that starts with `event`; takes its other events from `events`."""
    where = f"{source}:{event.start_mark.line + 1}"
    if isinstance(event, yaml.AliasEvent):
        raise ConfigError(f"{where}: YAML aliases are not supported (write the value of *{_clip(event.anchor)} again)")
    if event.tag not in (None, "!"):
        raise ConfigError(f"{where}: YAML tags are not supported (remove {_clip(event.tag)})")
    if isinstance(event, yaml.ScalarEvent):
        return _Scalar(event.value, event.style is None, where)
    if depth_left == 0:
        raise ConfigError(f"{where}: nested more than {MAX_DEPTH} levels deep (no option is)")
    if isinstance(event, yaml.MappingStartEvent):
        return _mapping(events, source, depth_left - 1)
    items = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_subtree(event, events, source, depth_left - 1))
    return items


def _mapping(events: Iterator[yaml.Event], source: str, depth_left: int) -> dict[str, Any]:
    tree = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        if not isinstance(event, yaml.ScalarEvent):
            raise ConfigError(f"{source}:{event.start_mark.line + 1}: a key is not plain text (write `key: value`)")
        key = _subtree(event, events, source, depth_left)
        if key.text in tree:
            raise ConfigError(f"{key.where}: duplicate key '{_clip(key.text)}' (remove one of the two)")
        tree[key.text] = _subtree(next(events), events, source, depth_left)
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c` in the tree. c is taken as it is; only lists and quoted text are YAML."""
    path, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", path):
        raise ConfigError(f"command line: '{_clip(override)}' is not an override (write a.b=value, e.g. optim.lr=1e-5)")
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"command line: {path}: {section} is no section (check the dotted path)")
    is_yaml = text.startswith(("[", "{", '"', "'"))
    value = _parse(text, "command line") if is_yaml else _Scalar(text, True, "command line")
    if isinstance(value, dict) or isinstance(tree.get(key), dict):
        raise ConfigError(f"command line: {path}: a whole section cannot be set (set its keys: {path}.KEY=VALUE)")
    tree[key] = value


# ---------------------------------------------------------------------------------------------------------------------
# Tree to dataclasses
# ---------------------------------------------------------------------------------------------------------------------

def _job_class(job: Any, wanted: str | None) -> type:
    name = job.text if isinstance(job, _Scalar) else "a list or section"
    if name not in ("opd", "dmd"):
        raise ConfigError(f"job: expected opd or dmd, got '{_clip(name)}' (start the file with: job: opd, or job: dmd)")
    if wanted not in (None, name):
        raise ConfigError(f"job: expected {wanted}, got {name} (start this file with train_{name}.py)")
    return OPDConfig if name == "opd" else DMDConfig


def _check_keys(kind: type, tree: dict[str, Any], prefix: str, options: tuple[str, ...]) -> None:
    """Refuse keys that the section, and those in it, do not have; `options`: all of the job, for the hint."""
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    for key, value in tree.items():
        if key not in known:
            raise _unknown_key(prefix, key, value, known, options)
        section = _section(known[key])
        for item in value if isinstance(value, list) else [value]:
            if section is not None and isinstance(item, dict):
                _check_keys(section, item, f"{prefix}{key}.", options)


def _section(kind: Any) -> type | None:
    """The dataclass of a field that is a section, an optional one or a list of sections."""
    kinds = [option for option in (kind, *get_args(kind)) if dataclasses.is_dataclass(option)]
    return kinds[0] if kinds else None


def _fill_in_convention(tree: dict[str, Any]) -> None:
    """Add the preset of dmd.convention to the section, for the keys that are not in it."""
    section = tree.get("dmd")
    if isinstance(section, dict) and "convention" in section:
        name = _coerce(section["convention"], Convention | None, "dmd.convention")
        for key, value in PRESETS.get(name, {}).items():
            section.setdefault(key, _Scalar(_show(value), True, f"convention {name}"))


def _build(kind: type, tree: Any, path: str, default: Any = MISSING) -> Any:
    """A dataclass from a section of the tree; `default` supplies the keys left out, else the class does."""
    if not isinstance(tree, dict):
        raise _unexpected(path, "a section", tree, f"write its keys, indented, below {path}:")
    values = {}
    for field in dataclasses.fields(kind):
        name = field.name
        below = f"{path}.{name}" if path else name
        standard = field.default if default is MISSING else getattr(default, name)
        if name in tree:
            values[name] = _coerce(tree[name], field.type, below, standard)
        elif standard is not MISSING:
            values[name] = standard
        elif dataclasses.is_dataclass(field.type):
            values[name] = _build(field.type, {}, below)    # reports which key inside is required
        else:
            raise ConfigError(f"{below}: required, but not given (add it to the file or pass {below}=VALUE)")
    return kind(**values)


def _coerce(value: Any, kind: Any, path: str, default: Any = MISSING) -> Any:
    """The value of one key in the type of its field."""
    if isinstance(value, _Scalar) and value.is_plain and value.text == "":
        raise ConfigError(f"{value.where}: {path}: no value (write null to unset it; quote text that starts with #)")
    options = get_args(kind)
    if type(None) in options:
        if isinstance(value, _Scalar) and value.is_plain and _yaml_type(value.text) == "null":
            return None
        kind, = (option for option in options if option is not type(None))
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path, MISSING if default is None else default)
    if get_origin(kind) is tuple:
        return _coerce_list(value, get_args(kind), path)
    if not isinstance(value, _Scalar):
        raise _unexpected(path, "one value", value, "see the comments in distill_core/config.py")
    if get_origin(kind) is Literal:
        return _choice(value, get_args(kind), path)
    return {bool: _boolean, int: _integer, float: _number, str: _text}[kind](value, path)


def _coerce_list(value: Any, kinds: tuple[Any, ...], path: str) -> tuple:
    """`kinds` is (X, ...) or one type per entry. A lone value counts as a list of one."""
    if isinstance(value, dict):
        raise _unexpected(path, "a list", value, f"write {path}: [a, b]")
    values = value if isinstance(value, list) else [value]
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(values)
    if len(values) != len(kinds):
        raise _unexpected(path, f"a list of {len(kinds)} values", value, f"it has {len(values)}")
    return tuple(_coerce(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(values, kinds)))


def _boolean(value: _Scalar, path: str) -> bool:
    if _yaml_type(value.text) != "bool":
        raise _unexpected(path, "true or false", value, f"e.g. {path}=true")
    return value.text.lower() in ("true", "yes", "on")


def _integer(value: _Scalar, path: str) -> int:
    if not re.fullmatch(r"[+-]?(0|[1-9][0-9_]{0,17})", value.text):
        raise _unexpected(path, "an integer", value, "decimal digits only, at most 18")
    return int(value.text.replace("_", ""))


def _number(value: _Scalar, path: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value.text):
        raise _unexpected(path, "a finite number", value, "e.g. 1e-6, 0.5 or 3")
    number = float(value.text)
    if not math.isfinite(number):
        raise _unexpected(path, "a finite number", value, "it overflows")
    return number


def _text(value: _Scalar, path: str) -> str:
    if value.is_plain and (guess := _yaml_type(value.text)) != "str":
        raise _unexpected(path, "text", value, f'YAML reads this as {guess}; quote it: "{_clip(value.text)}"')
    if not value.text.isprintable():
        raise _unexpected(path, "printable text", value, "remove control characters and line ends")
    if not value.text.strip():
        raise _unexpected(path, "text", value, "it is empty")
    return value.text


def _choice(value: _Scalar, choices: tuple[str, ...], path: str) -> str:
    if value.text not in choices:
        nearest = difflib.get_close_matches(value.text[:100], choices, n=1, cutoff=0.0)[0]
        raise _unexpected(path, "one of " + ", ".join(choices), value, f"nearest: {path}={nearest}")
    return value.text


def _yaml_type(text: str) -> str:
    """What YAML 1.1 takes an unquoted text for: str, bool, int, float, null, timestamp, merge or value."""
    return yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False)).rpartition(":")[2]


# ---------------------------------------------------------------------------------------------------------------------
# Messages and walks
# ---------------------------------------------------------------------------------------------------------------------

def _unexpected(path: str, expectation: str, value: Any, remedy: str) -> ConfigError:
    where, got = "", "a list" if isinstance(value, list) else "a section"
    if isinstance(value, _Scalar):
        is_null = value.is_plain and _yaml_type(value.text) == "null"
        where, got = f"{value.where}: ", "null" if is_null else f"'{_clip(value.text)}'"
    return ConfigError(f"{where}{path}: expected {expectation}, got {got} ({remedy})")


def _unknown_key(prefix: str, key: str, value: Any, siblings: Iterable[str], options: tuple[str, ...]) -> ConfigError:
    """Names the nearest key of the section and keys of that name in other sections, else the section's keys."""
    where = f"{value.where}: " if isinstance(value, _Scalar) else ""
    if prefix + key in ("dmd.teacher_optim", "dmd.student_ema_optim"):
        return ConfigError(f"{where}{prefix}{key}: the role {key.removesuffix('_optim')} is frozen and takes no "
                           "optimizer (remove the key)")
    near = [prefix + name for name in difflib.get_close_matches(key[:100], siblings, n=1)]
    near += [option for option in options if option.rpartition(".")[2] == key]
    hint = f"did you mean {' or '.join(near)}?" if near else f"its section has: {', '.join(siblings)}"
    name = _clip(prefix + key) or "''"
    return ConfigError(f"{where}{name}: unknown key ({hint})")


def _option_paths(kind: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        section = _section(field.type)
        if section is None:
            yield prefix + field.name
        elif get_origin(field.type) is not tuple:
            yield from _option_paths(section, f"{prefix}{field.name}.")


def _leaves(config: Any, prefix: str = "", defaults: Any = MISSING) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, default or MISSING) of every option."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if defaults is MISSING else getattr(defaults, field.name)
        if isinstance(value, DMDMethodConfig):
            default = dataclasses.replace(default, **PRESETS.get(value.convention, {}))
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.", MISSING if default is None else default)
        elif _section(field.type) is not None:
            for index, item in enumerate(value or ()):
                yield from _leaves(item, f"{prefix}{field.name}[{index}].")
        else:
            yield prefix + field.name, value, default


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as the dicts and lists that YAML has."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _show(value: Any) -> str:
    """A value as it would be written in an override."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_show, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _clip(text: str, length: int = 60) -> str:
    """Foreign text for a message: one line of at most about `length` characters."""
    text = text if len(text) <= length else text[:length - 3] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class _Dumper(yaml.SafeDumper):
    """Block style, but lists on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        return super().represent_sequence(tag, sequence, flow_style=True)


def main(arguments: Sequence[str]) -> int:
    """Print the resolved config of FILE with overrides; the exit code is 2 for a config error."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m distill_core.config FILE [a.b=c ...]", file=sys.stderr)
        return 2
    try:
        config = load(arguments[0], arguments[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(to_yaml(config), end="")
    for line in warnings(config):
        print(f"warning: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
