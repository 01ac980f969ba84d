# SPDX-License-Identifier: Apache-2.0
"""The config tree of train_opd.py: every option, its default, unit and meaning; a strict YAML loader with overrides.

A file is a YAML mapping whose first key is `job: opd`. Keys left out take the defaults below; `name`, `max_steps`,
`student.path`, `teacher.path` and `data.train` have none. Relative paths are relative to the current directory.
Values are read by the type of their field, not by YAML's guess: `1e-6` is a float, `off` is no text, `010` no integer.

    config = load("configs/quickstart.yaml", ["optim.lr=1e-5", "rollout.stop_ids=[0, 2]"])
    config.optim.lr                    # 1e-05
    print("\n".join(differences(config)), to_yaml(config))

    python -m distill_core.config configs/quickstart.yaml optim.lr=1e-5     # prints the resolved config; needs no torch
"""
import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

MAX_FILE_BYTES = 64 * 1024
MAX_DEPTH = 8
Dtype = Literal["float32", "bfloat16"]


class ConfigError(ValueError):
    """A config the user has to change. The message is one line: place, dotted path, what is wrong (remedy)."""


# ---------------------------------------------------------------------------------------------------------------------
# Options
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
    dtype: Dtype = "float32"                 # dtype of the weights and of the forward; logits are float32 always
    chunk_size: int = 1024                   # token positions whose logits exist at a time on a teacher rank
    param_offload: bool = False              # keep the sharded weights in CPU memory between forwards (CUDA only)


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    world_size: int | None = None            # ranks the file is meant for: used by --dry-run; null = as launched
    teacher_ranks: int = 1                   # ranks that only serve the teacher; 0 = inline, sharded over the students
    timeout_s: int = 1800                    # longest wait for another rank, in seconds, before the job ends; must
                                             # exceed the time that loading either model takes


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


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    mode: Literal["reverse_kl_topk", "forward_kl_topk", "reverse_kl_full", "forward_kl_full",
                  "reverse_kl_sampled"] = "reverse_kl_topk"    # KL(student || teacher) on the student's own top-K
    top_k: int = 16                          # K of the top-K modes, at least 2
    chunk_size: int = 1024                   # token positions whose logits exist at a time on a student rank
    log_prob_min_clamp: float | None = None  # lower bound of the teacher's renormalised log-probs (nats), e.g. -10
    advantage_clip: float | None = None      # reverse_kl_sampled: bound of |advantage| (nats); null = none


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    prompts_per_step: int = 64               # prompts of an optimizer step, over all ranks
    micro_batch_tokens: int = 8192           # tokens of a forward/backward on a rank; changes memory, not results


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
class CheckpointConfig:
    every: int = 20                          # steps between checkpoints; 0 = only at the end and on a stop signal
    keep_last: int = 2                       # newest checkpoints that stay
    keep_every: int = 0                      # checkpoints of steps divisible by this stay for ever; 0 = none do
    allow_drift: tuple[str, ...] = ()        # fingerprint keys that may differ on resume; recorded in the next manifest


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    log_every: int = 1                       # steps between console lines; metrics.jsonl gets every step
    samples: int = 4                         # sample texts written per evaluation


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
    teacher: TeacherConfig
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
# Entry points
# ---------------------------------------------------------------------------------------------------------------------

def load(path: str | Path, overrides: Sequence[str] = ()) -> OPDConfig:
    """The checked config of a YAML file with `a.b=c` overrides on top, the last one winning; raises ConfigError."""
    source = str(path)
    tree = _parse(_read_text(path), source)
    if not isinstance(tree, dict) or next(iter(tree), None) != "job":
        raise ConfigError(f"{source}: the first key must be `job` (start the file with the line: job: opd)")
    for override in overrides:
        _apply(tree, override)
    _check_job(tree["job"])
    config = _build(OPDConfig, tree, "")
    check(config)
    return config


def to_yaml(config: OPDConfig) -> str:
    """The whole config as YAML text that `load` reads back to an equal config."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def differences(config: OPDConfig) -> list[str]:
    """What differs from the defaults, as `optim.lr=1e-05 (default 1e-06)`; required keys, having none, are left out."""
    return [f"{path}={_show(value)} (default {_show(default)})"
            for path, value, default in _leaves(config) if default is not MISSING and value != default]


def flatten(config: OPDConfig, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """JSON values by dotted path, without the paths that start with one of `leave_out`: the basis of fingerprints."""
    return {path: _plain(value) for path, value, _ in _leaves(config) if not path.startswith(leave_out)}


def check(config: OPDConfig) -> None:
    """Raise ConfigError for values out of range and for keys that contradict each other."""
    _check_ranges(config)
    _check_name(config.name)
    _check_answer_pattern(config.eval.answer_pattern)
    if not config.data.train:
        raise ConfigError("data.train: the list is empty (name at least one JSONL file)")
    if config.loss.top_k < 2:
        raise ConfigError(f"loss.top_k: {config.loss.top_k} is too small: one token renormalises to probability 1, so "
                          "loss and diagnostics would be empty (set loss.top_k=2 or more)")
    if config.optim.warmup_steps >= config.max_steps:
        raise ConfigError(f"optim.warmup_steps: {config.optim.warmup_steps} leaves nothing of max_steps="
                          f"{config.max_steps} (set it below max_steps)")
    if config.teacher.param_offload and config.device == "cpu":
        raise ConfigError("teacher.param_offload: needs a GPU to offload from, but device is cpu "
                          "(set teacher.param_offload=false)")
    if config.eval.every > 0 and config.data.eval is None:
        raise ConfigError(f"data.eval: null while eval.every is {config.eval.every} "
                          "(set data.eval=FILE, or eval.every=0 for no evaluation)")
    if config.topology.world_size is not None:
        check_world(config, config.topology.world_size)


def check_world(config: OPDConfig, world_size: int) -> None:
    """Raise ConfigError unless `world_size` ranks leave at least one for the student."""
    teacher_ranks = config.topology.teacher_ranks
    if teacher_ranks >= world_size:
        raise ConfigError(f"topology.teacher_ranks: {teacher_ranks} leaves no rank for the student in a world of "
                          f"{world_size} (start more ranks, or set topology.teacher_ranks=0 for an inline teacher)")


def warnings(config: OPDConfig) -> list[str]:
    """One line for each option that was set but has no effect, or not the one that it seems to have."""
    loss, greedy_eval = config.loss, config.eval.temperature == 0
    changed = [path for path, value, default in _leaves(config) if value != default]
    idle = [("loss.top_k", not loss.mode.endswith("_topk"), f"loss.mode={loss.mode} takes no top-K"),
            ("loss.log_prob_min_clamp", loss.mode != "reverse_kl_topk", f"loss.mode={loss.mode} ignores it"),
            ("loss.advantage_clip", loss.mode != "reverse_kl_sampled", f"loss.mode={loss.mode} has no advantage"),
            ("optim.min_lr_frac", config.optim.schedule == "constant", "optim.schedule=constant never decays"),
            ("checkpoint.keep_every", config.checkpoint.every == 0, "checkpoint.every=0 saves only at the end"),
            ("eval.n", greedy_eval, "eval.temperature=0 gives n equal samples"),
            ("eval.top_p", greedy_eval, "eval.temperature=0 is greedy")]
    idle += [(path, config.eval.every == 0, "eval.every=0 never evaluates")
             for path in changed if path == "data.eval" or path.startswith("eval.") and path != "eval.every"]
    lines = [f"{path} has no effect: {reason}" for path, is_idle, reason in idle if is_idle and path in changed]
    if loss.mode == "reverse_kl_sampled" and (config.rollout.top_p < 1 or config.rollout.top_k > 0):
        lines.append("rollout.top_p and rollout.top_k bias loss.mode=reverse_kl_sampled, which assumes untruncated "
                     "samples")
    if config.data.eval in config.data.train:
        lines.append(f"data.eval={config.data.eval} is also in data.train: its prompts are not held out")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------

_RANGES = (
    (">= 0", lambda x: x >= 0, (
        "seed", "topology.teacher_ranks", "rollout.top_k", "optim.weight_decay", "optim.warmup_steps", "eval.every",
        "eval.temperature", "alarms.entropy_gap.limit", "alarms.teacher_nonfinite.limit", "checkpoint.every",
        "checkpoint.keep_every", "metrics.samples")),
    (">= 1", lambda x: x >= 1, (
        "max_steps", "teacher.chunk_size", "topology.world_size", "topology.timeout_s", "data.max_prompt_tokens",
        "rollout.max_new_tokens", "rollout.batch_size", "rollout.samples_per_prompt", "loss.top_k", "loss.chunk_size",
        "train.prompts_per_step", "train.micro_batch_tokens", "eval.num_prompts", "eval.n", "eval.max_new_tokens",
        "checkpoint.keep_last", "metrics.log_every")),
    ("> 0", lambda x: x > 0, (
        "rollout.temperature", "loss.advantage_clip", "optim.lr", "optim.eps", "optim.max_grad_norm",
        "probe.max_kl_fp32", "probe.max_kl_bf16")),
    ("< 0", lambda x: x < 0, ("loss.log_prob_min_clamp",)),
    ("at most 604800 (a week)", lambda x: x <= 604800, ("topology.timeout_s",)),
    ("at most 1000000", lambda x: x <= 1_000_000, ("topology.world_size", "topology.teacher_ranks")),
    ("0 or at least 0.001", lambda x: x == 0 or x >= 0.001, ("rollout.temperature", "eval.temperature")),
    ("in (0, 1]", lambda x: 0 < x <= 1, ("rollout.top_p", "eval.top_p")),
    ("in [0, 1]", lambda x: 0 <= x <= 1, (
        "optim.min_lr_frac", "alarms.student_mass.limit", "alarms.truncated_frac.limit",
        "alarms.repetition_frac.limit")),
    ("two numbers in [0, 1)", lambda xs: all(0 <= x < 1 for x in xs), ("optim.betas",)),
    ("a list of ids >= 0", lambda xs: all(x >= 0 for x in xs), ("rollout.stop_ids",)),
)


def _check_ranges(config: OPDConfig) -> None:
    leaves = {path: (value, default) for path, value, default in _leaves(config)}
    for expectation, holds, paths in _RANGES:
        for path in paths:
            value, default = leaves[path]
            if value is not None and not holds(value):
                remedy = f"set {path}" if default is MISSING else f"the default is {path}={_show(default)}"
                raise ConfigError(f"{path}: must be {expectation}, got {_show(value)} ({remedy})")


def _check_name(name: str) -> None:
    """The name becomes a folder under run_root, so it must not lead out of it."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
        raise ConfigError(f"name: '{_clip(name)}' cannot name a run folder (use letters, digits, '.', '_' and '-')")


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

def _check_job(job: Any) -> None:
    name = job.text if isinstance(job, _Scalar) else "a list or section"
    if name == "dmd":
        raise ConfigError("job: dmd is not available in this version, which has: opd (start the file with: job: opd)")
    if name != "opd":
        raise ConfigError(f"job: expected opd, got '{_clip(name)}' (start the file with: job: opd)")


def _build(kind: type, tree: Any, path: str, default: Any = MISSING) -> Any:
    """A dataclass from a section of the tree; `default` supplies the keys left out, else the class does."""
    if not isinstance(tree, dict):
        raise _unexpected(path, "a section", tree, f"write its keys, indented, below {path}:")
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in tree.items():
        if key not in known:
            raise _unknown_key(path, key, value, known)
    values = {}
    for name, field in known.items():
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
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path, default)
    options = get_args(kind)
    if type(None) in options:
        if isinstance(value, _Scalar) and value.is_plain and _yaml_type(value.text) == "null":
            return None
        kind, = (option for option in options if option is not type(None))
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


def _unknown_key(path: str, key: str, value: Any, siblings: dict[str, Any]) -> ConfigError:
    """Names the nearest key of the section, else keys of that name in other sections, else the section's keys."""
    prefix = f"{path}." if path else ""
    near = [prefix + name for name in difflib.get_close_matches(key[:100], siblings, n=1)]
    near = near or [option for option in _option_paths(OPDConfig) if option.rpartition(".")[2] == key]
    hint = f"did you mean {' or '.join(near)}?" if near else f"its section has: {', '.join(siblings)}"
    where = f"{value.where}: " if isinstance(value, _Scalar) else ""
    return ConfigError(f"{where}{_clip(prefix + key)}: unknown key ({hint})")


def _option_paths(kind: type, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            yield from _option_paths(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _leaves(config: Any, prefix: str = "", defaults: Any = MISSING) -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, default or MISSING) of every option."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if defaults is MISSING else getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.", default)
        else:
            yield prefix + field.name, value, default


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as the dicts and lists that YAML has."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


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
