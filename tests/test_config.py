# SPDX-License-Identifier: Apache-2.0
"""config.py: strict loading, overrides, messages, checks between keys, and a fuzz that knows only one-line errors."""
import dataclasses
import random
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from distill_core import config as config_module
from distill_core.config import (ConfigError, DMDConfig, OPDConfig, check, check_world, convention_lines, differences,
                                 flatten, load, score_time_law, to_yaml, warnings)

MINIMAL = """\
job: opd
name: run-1
max_steps: 60
student: {path: models/student}
teacher: {path: models/teacher}
data: {train: train.jsonl, eval: eval.jsonl}
"""
DMD = """\
job: dmd
name: run-1
max_cycles: 60
teacher: {path: models/teacher}
data: {conditions: labels.npz}
"""
ROOT = Path(config_module.__file__).parent.parent


@pytest.fixture
def write(tmp_path):
    """write(text or bytes) -> path of a config file."""
    def write_file(content):
        path = tmp_path / "job.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
    return write_file


def refusal(path, overrides=()):
    """The message with which load refuses a file; always one line."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 1000, message
    return message


# ---- loading

def test_defaults_and_types(write):
    """Catches a default that drifts from the documented tree, and a wrong field type."""
    config = load(write(MINIMAL))
    assert config.data.train == ("train.jsonl",) and config.student.path == "models/student"
    assert (config.optim.lr, config.optim.betas, config.loss.mode, config.loss.top_k) == (
        1e-6, (0.9, 0.95), "reverse_kl_topk", 16)
    assert (config.rollout.temperature, config.rollout.stop_ids, config.teacher.chunk_size) == (1.0, None, 1024)
    assert config.alarms.teacher_nonfinite.action == "stop" and config.alarms.student_mass.limit == 0.5
    assert config.probe.max_kl_bf16 == 5e-3 and config.topology.teacher_ranks == 1


def test_yaml_floats_without_a_dot(write):
    """Catches PyYAML's reading of 1e-6 as text. Control: PyYAML does read it as text."""
    assert yaml.safe_load("lr: 1e-6") == {"lr": "1e-6"}
    for text in ("1e-5", "1.0e-5", "'1e-5'", "0.00001", "1E-5", "+1e-05"):
        assert load(write(MINIMAL + f"optim: {{lr: {text}}}\n")).optim.lr == 1e-5
    assert load(write(MINIMAL + "optim: {max_grad_norm: 2}\n")).optim.max_grad_norm == 2.0


def test_overrides(write):
    """Catches overrides that lose the file's other keys of a section, and lists or nulls read as text."""
    path = write(MINIMAL + "optim: {lr: 1e-4, eps: 1e-7}\nalarms: {student_mass: {action: stop}}\n")
    config = load(path, ["optim.lr=1e-5", "optim.lr=2e-5", "rollout.stop_ids=[0, 2]", "data.eval=null", "eval.every=0",
                         "data.train=[a.jsonl, 'b c.jsonl']", "deterministic=true", r"eval.answer_pattern=#### (\d+)"])
    assert (config.optim.lr, config.optim.eps) == (2e-5, 1e-7)
    assert config.rollout.stop_ids == (0, 2) and config.data.eval is None and config.deterministic is True
    assert config.data.train == ("a.jsonl", "b c.jsonl")
    assert config.eval.answer_pattern == r"#### (\d+)"    # as YAML this would be a comment
    assert config.alarms.student_mass.limit == 0.5 and config.alarms.student_mass.action == "stop"


def test_round_trip(write):
    """Catches text that to_yaml writes and load reads differently: quoting, floats, null, empty lists, non-ASCII."""
    overrides = ['name="1e5"', "optim.lr=3e-7", "rollout.stop_ids=[]", "loss.advantage_clip=2",
                 "data.train=[\"off\", 'a: b', 'x # y', caf\u00e9.jsonl]", r"eval.answer_pattern='= *(-?\d+)'",
                 "run_root=" + "long folder " * 20 + "end"]
    config = load(write(MINIMAL), overrides)
    assert config.name == "1e5" and config.data.train[0] == "off"
    assert load(write(to_yaml(config))) == config
    assert to_yaml(load(write(to_yaml(config)))) == to_yaml(config)


def test_differences(write):
    """Catches a start block that hides a changed key or lists unchanged ones."""
    config = load(write(MINIMAL), ["optim.lr=1e-5", "optim.betas=[0.9, 0.99]", "alarms.student_mass.limit=null",
                                   "deterministic=true", "seed=0"])
    assert differences(config) == [
        "deterministic=true (default false)", "data.eval=eval.jsonl (default null)", "optim.lr=1e-05 (default 1e-06)",
        "optim.betas=[0.9, 0.99] (default [0.9, 0.95])", "alarms.student_mass.limit=null (default 0.5)"]


def test_job_selects_the_class(write):
    """Catches a DMD file, or one for another tool, that is trained as OPD."""
    assert type(load(write(MINIMAL))) is OPDConfig and type(load(write(DMD))) is DMDConfig
    assert "max_steps: unknown key" in refusal(write(MINIMAL.replace("job: opd", "job: dmd")))
    assert "max_cycles: unknown key" in refusal(write(DMD), ["job=opd"])
    assert "expected opd or dmd, got 'sft'" in refusal(write(MINIMAL.replace("job: opd", "job: sft")))
    assert "expected opd or dmd" in refusal(write(DMD.replace("job: dmd", "job: [dmd]")))
    assert "first key" in refusal(write("name: x\n" + MINIMAL.replace("name: run-1\n", "")))
    assert "first key" in refusal(write("")) and "first key" in refusal(write("- job"))


# ---- messages

@pytest.mark.parametrize("override, parts", [
    ("optim.learning=1", ["optim.learning: unknown key"]),
    ("optim.weigth_decay=1", ["did you mean optim.weight_decay?"]),
    ("rollout.max_tokens=8", ["did you mean rollout.max_new_tokens?"]),
    ("lr=1e-5", ["did you mean optim.lr?"]),
    ("rolout.top_p=0.5", ["did you mean rollout?"]),
    ("fsdp_mode=no-shard", ["fsdp_mode: unknown key"]),
    ("optim.lr=fast", ["optim.lr", "'fast'", "a finite number"]),
    ("optim.lr=nan", ["optim.lr", "a finite number"]),
    ("optim.lr=.inf", ["optim.lr", "a finite number"]),
    ("optim.lr=1e999", ["optim.lr", "overflows"]),
    ("optim.lr=1_0", ["optim.lr"]),
    ("optim.lr=true", ["optim.lr", "'true'"]),
    ("max_steps=true", ["max_steps", "an integer"]),
    ("max_steps=1.5", ["max_steps", "an integer"]),
    ("max_steps=1e3", ["max_steps", "an integer"]),
    ("max_steps=010", ["max_steps", "an integer"]),
    ("max_steps=1:30", ["max_steps", "an integer"]),
    ("max_steps=" + "9" * 5000, ["max_steps", "an integer"]),
    ("max_steps=null", ["max_steps", "got null"]),
    ("max_steps=[3]", ["max_steps", "got a list"]),
    ("deterministic=1", ["deterministic", "true or false"]),
    ("deterministic=null", ["deterministic", "got null"]),
    ("name=off", ["name", "reads this as bool", '"off"']),
    ("name=2024-01-01", ["name", "timestamp"]),
    ("name=12", ["name", "reads this as int"]),
    ('name="a\\nb"', ["name", "printable"]),
    ('name=""', ["name", "empty"]),
    ("eval.answer_pattern=", ["eval.answer_pattern", "no value"]),
    ("loss.mode=reverse_kl", ["loss.mode", "nearest: loss.mode=reverse_kl_topk"]),
    ("data.long_prompts=off", ["data.long_prompts", "drop, cut"]),
    ("loss={mode: x}", ["loss", "a whole section"]),
    ("loss=3", ["loss", "a whole section", "loss.KEY"]),
    ("loss.mode.x=3", ["loss.mode"]),
    ("optim.betas=[0.9]", ["optim.betas", "2 values"]),
    ("rollout.stop_ids=[1, x]", ["rollout.stop_ids[1]"]),
    ("data.train=[a", ["not valid YAML"]),
    ("optim", ["not an override"]),
    ("optim..lr=1", ["not an override"]),
    ("=1", ["not an override"]),
])
def test_messages_of_overrides(write, override, parts):
    """Catches a bad value that is accepted, or refused without naming key, value and what to do."""
    message = refusal(write(MINIMAL + "optim: {eps: 1e-8}\nloss: {top_k: 16}\n"), [override])
    assert all(part in message for part in parts), message
    assert "(" in message, message    # the remedy


@pytest.mark.parametrize("text, parts", [
    (MINIMAL + "optim:\n  lr: 1\n  lrr: 2\n", [":9: optim.lrr", "did you mean optim.lr?"]),
    (MINIMAL + "seed: 1\nseed: 2\n", [":8: duplicate key 'seed'"]),
    (MINIMAL + "optim: {lr: 1, lr: 2}\n", ["duplicate key 'lr'"]),
    (MINIMAL + "seed: fast\n", [":7: seed", "'fast'"]),
    (MINIMAL + "eval:\n", [":7: eval: no value"]),
    (MINIMAL + "eval: null\n", ["eval: expected a section"]),
    (MINIMAL + "eval: {answer_pattern: #### (.*)\n}\n", ["eval.answer_pattern: no value"]),
    (MINIMAL + "on: 1\n", ["on: unknown key"]),
    (MINIMAL + "run_root: &a runs\nname2: *a\n", ["aliases"]),
    (MINIMAL + "<<: {seed: 1}\n", ["<<: unknown key"]),
    (MINIMAL + "run_root: !!python/object/apply:os.system [id]\n", ["tags"]),
    (MINIMAL + "run_root: !!str 3\n", ["tags"]),
    (MINIMAL + "? [a, b]\n: 3\n", ["a key is not plain text"]),
    (MINIMAL + "seed: " + "[" * 20000 + "\n", ["nested"]),
    (MINIMAL + "seed: " + "{a: " * 5000 + "\n", ["nested"]),
    (MINIMAL + "---\njob: opd\n", ["more than one YAML document"]),
    (MINIMAL + "\tseed: 1\n", [":7: not valid YAML"]),
    (MINIMAL + "run_root: a: b\n", [":7: not valid YAML"]),
    (MINIMAL + 'run_root: "\\UFFFFFFFF"\n', ["not valid YAML"]),
    (MINIMAL + 'run_root: "\\ud800"\n', ["printable"]),
    (MINIMAL + "run_root: \x07\n", ["not valid YAML"]),
    (MINIMAL + "#" * 70000, ["larger than"]),
    (MINIMAL.encode() + b"run_root: \xff\n", ["not UTF-8"]),
    (MINIMAL.replace("student: {path: models/student}\n", ""), ["student.path: required"]),
    (MINIMAL.replace("path: models/teacher", ""), ["teacher.path: required"]),
    (MINIMAL.replace("max_steps: 60\n", ""), ["max_steps: required"]),
    (MINIMAL.replace("train: train.jsonl, ", ""), ["data.train: required"]),
    (MINIMAL.replace("train: train.jsonl", "train: []"), ["data.train", "empty"]),
])
def test_messages_of_files(write, text, parts):
    """Catches YAML that is taken differently from how it looks, bombs, and errors without their line."""
    message = refusal(write(text))
    assert all(part in message for part in parts), message


def test_alias_bomb_costs_nothing(write):
    """Catches a billion laughs, which loads in no time as shared references and explodes when it is printed."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    assert "aliases" in refusal(write("job: opd\n" + bomb))


def test_unreadable_files(tmp_path):
    """Catches a traceback for a wrong path."""
    for path in (tmp_path / "none.yaml", tmp_path, "a\0b"):
        assert "cannot be read" in refusal(path)


def test_byte_order_mark_and_crlf(write):
    """Catches a file from a Windows editor that is refused or read with \\r in its values."""
    assert load(write(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())) == load(write(MINIMAL))


# ---- checks

@pytest.mark.parametrize("overrides, parts", [
    (["loss.top_k=1"], ["loss.top_k", "or more"]),
    (["loss.top_k=1", "loss.mode=reverse_kl_full"], ["loss.top_k"]),
    (["rollout.temperature=0"], ["rollout.temperature", "> 0"]),
    (["rollout.top_p=0"], ["rollout.top_p"]),
    (["rollout.top_p=1.5"], ["rollout.top_p"]),
    (["rollout.max_new_tokens=0"], ["rollout.max_new_tokens", ">= 1"]),
    (["rollout.stop_ids=[-1]"], ["rollout.stop_ids"]),
    (["teacher.param_offload=true", "device=cpu"], ["teacher.param_offload", "device"]),
    (["topology.world_size=2", "topology.teacher_ranks=2"], ["topology.teacher_ranks"]),
    (["topology.teacher_ranks=-1"], ["topology.teacher_ranks"]),
    (["eval.every=-1"], ["eval.every"]),
    (["data.eval=null"], ["data.eval", "eval.every"]),
    (["optim.warmup_steps=60"], ["optim.warmup_steps", "max_steps"]),
    (["optim.betas=[0.9, 1.0]"], ["optim.betas"]),
    (["optim.lr=0"], ["optim.lr"]),
    (["loss.log_prob_min_clamp=1"], ["loss.log_prob_min_clamp"]),
    (["loss.advantage_clip=-1"], ["loss.advantage_clip"]),
    (["alarms.student_mass.limit=2"], ["alarms.student_mass.limit"]),
    (["max_steps=0"], ["max_steps"]),
    (["eval.answer_pattern=("], ["eval.answer_pattern", "regex"]),
    ([r"eval.answer_pattern=\d+"], ["eval.answer_pattern", "group"]),
    (["eval.answer_pattern=" + "(" * 5000], ["eval.answer_pattern"]),
    (["name=.."], ["name"]),
    (["name=a/b"], ["name"]),
    (["name=a b"], ["name"]),
])
def test_checks_between_keys(write, overrides, parts):
    """Catches a config that would fail, or train nothing, hours later."""
    message = refusal(write(MINIMAL), overrides)
    assert all(part in message for part in parts), message


def test_checks_allow_what_is_legal(write):
    """Control for the one above: the borders of the ranges are not refused."""
    load(write(MINIMAL), ["loss.mode=reverse_kl_full", "loss.top_k=2", "eval.temperature=0", "rollout.stop_ids=[]",
                          "teacher.param_offload=true", "topology.teacher_ranks=0", "topology.world_size=1",
                          "optim.warmup_steps=59", "alarms.student_mass.limit=null", "eval.top_p=1"])
    load(write(MINIMAL), ["data.eval=null", "eval.every=0"])


def test_every_number_has_a_range():
    """Catches a new number that nobody bounded."""
    bounded = {path for _, _, paths in config_module._RANGES for path in paths}
    fields = dict([*all_fields(OPDConfig), *all_fields(DMDConfig)])
    numbers = {path for path, kind in fields.items() if "int" in str(kind) or "float" in str(kind)}
    assert numbers - {"student.dtype", "teacher.dtype", "rollout.dtype", "dmd.dtype"} == bounded


def all_fields(kind, prefix=""):
    for field in dataclasses.fields(kind):
        section = config_module._section(field.type)
        if section is None:
            yield prefix + field.name, field.type
        elif not str(field.type).startswith("tuple"):  # the teachers' keys are those of the one teacher
            yield from all_fields(section, f"{prefix}{field.name}.")


def test_check_runs_on_edited_configs(write):
    """Catches checks that only happen while parsing: NaN set from code passes every `x < limit`."""
    config = load(write(MINIMAL))
    check(config)
    with pytest.raises(ConfigError, match="optim.lr"):
        check(dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=float("nan"))))


def test_check_world(write):
    """Catches a world without a student."""
    config = load(write(MINIMAL), ["topology.teacher_ranks=2"])
    check_world(config, 3)
    for world_size in (1, 2):
        with pytest.raises(ConfigError, match="topology.teacher_ranks.*inline"):
            check_world(config, world_size)
    check_world(load(write(MINIMAL), ["topology.teacher_ranks=0"]), 1)


def test_warnings(write):
    """Catches an option that is ignored in silence. Control: the defaults warn of nothing."""
    path = write(MINIMAL)
    assert warnings(load(path)) == []
    assert warnings(load(path, ["loss.log_prob_min_clamp=-10", "optim.min_lr_frac=0.1", "optim.schedule=cosine"])) == []
    for overrides, keys in [
        (["loss.mode=forward_kl_full", "loss.log_prob_min_clamp=-10", "loss.top_k=8"],
         ["loss.top_k", "loss.log_prob_min_clamp"]),
        (["loss.advantage_clip=1"], ["loss.advantage_clip"]),
        (["optim.min_lr_frac=0.1"], ["optim.min_lr_frac"]),
        (["eval.every=0", "eval.n=4"], ["data.eval", "eval.n"]),
        (["eval.temperature=0", "eval.n=4"], ["eval.n"]),
        (["loss.mode=reverse_kl_sampled", "rollout.top_p=0.9"], ["rollout.top_p"]),
        (["data.eval=train.jsonl"], ["data.eval"]),
    ]:
        lines = warnings(load(path, overrides))
        assert [line.split("=")[0].split()[0] for line in lines] == keys, lines


# ---- job dmd

def test_dmd_defaults(write):
    """Catches a default of the published recipe that drifts, and optimizer defaults of OPD under DMD's roles."""
    config = load(write(DMD))
    dmd = config.dmd
    assert (dmd.recipe, dmd.profile, dmd.sample_source) == ("dmd2", "distribution_only", "offline")
    assert (dmd.role_storage, dmd.fake_batch, dmd.rollout, dmd.exit_step, dmd.cfg_norm, dmd.export_role) == (
        "colocated_independent", "fresh", "sde", "uniform", "none", "student_ema")
    assert (dmd.fake_update_ratio, dmd.student_steps, dmd.loss_normalizer) == (5, 4, None)
    assert (dmd.score_discrete_steps, dmd.score_sigma_min, dmd.score_sigma_max, dmd.normalization_epsilon) == (
        1000, 0.02, 0.98, 1e-6)
    for optim in (dmd.student_optim, dmd.fake_score_optim):
        assert (optim.lr, optim.betas, optim.weight_decay, optim.max_grad_norm) == (2e-6, (0.0, 0.999), 0.01, 10.0)
    assert (config.lora.rank, config.gan.weight, config.eval.every, config.checkpoint.every) == (0, 0.0, 100, 20)
    assert warnings(config) == [] and differences(config) == []


def test_conventions_fill_in_what_is_not_set(write):
    """Catches a preset that overrides the user, leaves a key at its default, or does not survive to_yaml."""
    text = DMD + "dmd:\n  convention: causvid\n  score_timestep_shift: 1.0\n"
    config = load(write(text), ["dmd.fake_update_ratio=2", "dmd.fake_sigma_max=null"])
    dmd, preset = config.dmd, config_module.PRESETS["causvid"]
    assert {key: getattr(dmd, key) for key in preset} == preset | {"score_timestep_shift": 1.0, "fake_update_ratio": 2}
    assert load(write(to_yaml(config))) == config
    assert differences(config) == ["dmd.convention=causvid (default null)", "dmd.fake_update_ratio=2 (default 5)",
                                   "dmd.score_timestep_shift=1.0 (default 8.0)"]
    assert load(write(DMD), ["dmd.convention=causvid"]).dmd.teacher_guidance_scale == 4.5    # no section in the file
    # null, whether written or not, is the defaults; a dumped file keeps its values under another name
    assert load(write(DMD), ["dmd.convention=null"]) == load(write(DMD))
    other = load(write(to_yaml(config)), ["dmd.convention=dmd2"])
    assert other.dmd == dataclasses.replace(dmd, convention="dmd2") and convention_lines(other) != []


@pytest.mark.parametrize("name", config_module.PRESETS)
def test_every_preset_is_whole_and_legal(write, name):
    """Catches a preset that forgets a key, which would then follow the default, and one that check refuses."""
    assert tuple(config_module.PRESETS) == get_args(config_module.Convention)
    assert list(config_module.PRESETS[name]) == list(config_module.PRESETS["dmd2"])
    config = load(write(DMD), [f"dmd.convention={name}"])
    assert config.dmd == dataclasses.replace(config_module.DMDMethodConfig(), convention=name,
                                             **config_module.PRESETS[name])
    assert differences(config) == [f"dmd.convention={name} (default null)"]
    assert load(write(to_yaml(config))) == config
    assert all(line.isascii() and len(line) < 120 for line in convention_lines(config))


def test_convention_lines(write):
    """Catches a start block that hides what a convention means here, or what was set against it."""
    assert convention_lines(load(write(DMD))) == []
    lines = convention_lines(load(write(DMD), ["dmd.convention=causvid"]))
    assert lines == ["convention causvid",
                     "  teacher: u + 4.5 (c - u), the same as c + 3.5 (c - u); norm none",
                     "  normaliser: sample, epsilon 1e-12",
                     "  score times: clamp [0.02, 0.98], k / 1000, shift 8, one per sample",
                     "  fake score: flow loss, times clamp [0.02, 0.98], k / 1000, shift 8",
                     "  student:fake = 1:5 attempts per cycle, fake batch fresh"]
    lines = convention_lines(load(write(DMD), ["dmd.convention=fastgen", "dmd.fake_loss=flow"]))
    assert lines[0] == "convention fastgen, but fake_loss=flow (not x0)" and "flow loss" in lines[4]
    assert "continuous" in lines[3] and "1:4" in lines[5]


def test_score_time_law(write):
    """Catches a fake score that takes the student's times although it has its own, and the reverse."""
    dmd = load(write(DMD), ["dmd.score_times=ceil", "dmd.score_timestep_shift=3", "dmd.fake_sigma_max=1"]).dmd
    student = dict(law="ceil", discrete_steps=1000, shift=3.0, low=0.02, high=0.98)
    assert score_time_law(dmd, "student") == student and score_time_law(dmd, "fake_score") == student | {"high": 1.0}
    dmd = load(write(DMD), ["dmd.convention=dmd2"]).dmd
    assert score_time_law(dmd, "fake_score") == dict(law="clamp", discrete_steps=1000, shift=1.0, low=0.001, high=1.0)
    assert score_time_law(dmd, "student")["law"] == "inside"


def test_dmd_overrides_and_differences(write):
    """Catches a role's optimizer that loses its own defaults when one key of it is set, and values that do not survive
    being written."""
    config = load(write(DMD), ["dmd.student_optim.lr=1e-4", "dmd.loss_normalizer=256", "lora.rank=8",
                               "lora.targets=qkv"])
    assert config.dmd.student_optim.betas == (0.0, 0.999) and config.dmd.fake_score_optim.lr == 2e-6
    assert config.dmd.loss_normalizer == 256.0 and config.lora.targets == ("qkv",)
    assert differences(config) == [
        "dmd.loss_normalizer=256.0 (default null)", "dmd.student_optim.lr=0.0001 (default 2e-06)",
        "lora.rank=8 (default 0)", "lora.targets=[qkv] (default null)"]
    assert load(write(to_yaml(config))) == config
    flat = flatten(config, leave_out=("name", "dmd.fake_score_optim"))
    assert flat["dmd.student_optim.betas"] == [0.0, 0.999] and "name" not in flat
    assert not any(path.startswith("dmd.fake_score_optim") for path in flat)


def test_load_for_one_job(write):
    """Catches train_opd.py that starts on a DMD file and dies of a missing attribute. Control: its own job passes."""
    assert load(write(DMD), job="dmd") == load(write(DMD))
    for text, job, other in ((DMD, "opd", "dmd"), (MINIMAL, "dmd", "opd")):
        with pytest.raises(ConfigError, match=f"expected {job}, got {other}.*train_{other}.py"):
            load(write(text), job=job)


@pytest.mark.parametrize("overrides, parts", [
    # what exists
    (["dmd.recipe=dmd"], ["dmd.recipe", "one of dmd2, got 'dmd'"]),
    (["dmd.recipe=self_forcing"], ["dmd.recipe", "one of dmd2"]),
    (["dmd.profile=paper"], ["dmd.profile", "distribution_only"]),
    (["dmd.sample_source=online"], ["dmd.sample_source", "offline"]),
    (["dmd.role_storage=separate"], ["dmd.role_storage", "colocated_independent, shared_base_adapters"]),
    (["dmd.export_role=teacher"], ["dmd.export_role", "student_ema, student"]),
    (["dmd.exit_step=first"], ["dmd.exit_step", "uniform, last, round_robin"]),
    (["dmd.cfg_norm=null"], ["dmd.cfg_norm", "none, layer_norm, scalar"]),
    # keys: hints from the own job only
    (["lr=1"], ["dmd.student_optim.lr or dmd.fake_score_optim.lr or gan.lr?"]),
    (["dmd.discriminator_optim=1"], ["dmd.discriminator_optim: unknown key"]),
    (["dmd.teacher_optim=1"], ["command line: dmd.teacher_optim: the role teacher is frozen", "(remove the key)"]),
    (["dmd.teacher_optim.lr=1e-5"], ["dmd.teacher_optim: the role teacher is frozen and takes no optimizer"]),
    (["dmd.student_ema_optim.lr=1e-5"], ["dmd.student_ema_optim: the role student_ema is frozen"]),
    (["dmd.convention=dmd"], ["dmd.convention", "one of dmd2, causvid, self_forcing, fastgen, fastvideo, rcm, "
                              "lightx2v, verl_omni", "nearest: dmd.convention=dmd2"]),
    (["dmd.normalizer=mean"], ["dmd.normalizer", "sample, sample_add, batch"]),
    (["dmd.score_times=uniform"], ["dmd.score_times", "clamp, inside, ceil"]),
    (["dmd.fake_times=uniform"], ["dmd.fake_times", "clamp, inside, ceil"]),
    (["dmd.score_time_per=rank"], ["dmd.score_time_per", "sample, batch"]),
    (["dmd.fake_loss=v"], ["dmd.fake_loss", "flow, x0, eps, edm, vp_v"]),
    (["lora.adapters=[a, b]"], ["lora.adapters", "a list of 3 values"]),
    (["lora.adapters=null"], ["lora.adapters"]),
    (["dmd.student_optim.lrr=1"], ["did you mean dmd.student_optim.lr?"]),
    (["topology.teacher_ranks=1"], ["topology.teacher_ranks: unknown key"]),
    (["student_steps=1"], ["did you mean dmd.student_steps?"]),
    (["top_k=1"], ["top_k: unknown key", "its section has"]),
    # types
    (["dmd.fake_update_ratio=true"], ["an integer"]),
    (["dmd.fake_update_ratio=1.5"], ["an integer"]),
    (["dmd.ema_decay=nan"], ["a finite number"]),
    (["dmd.score_sigma_max=.inf"], ["a finite number"]),
    (["dmd.student_optim=3"], ["dmd.student_optim: expected a section, got '3'"]),
    # ranges
    (["dmd.fake_update_ratio=0"], ["dmd.fake_update_ratio", ">= 1"]),
    (["dmd.fake_warmup_cycles=-1"], ["dmd.fake_warmup_cycles", ">= 0"]),
    (["dmd.rollout_timestep_shift=0.5"], ["dmd.rollout_timestep_shift", ">= 1"]),
    (["dmd.score_timestep_shift=0.99"], ["dmd.score_timestep_shift", ">= 1"]),
    (["dmd.score_sigma_min=0"], ["dmd.score_sigma_min", "(0, 1]"]),
    (["dmd.score_sigma_max=1.1"], ["dmd.score_sigma_max", "(0, 1]"]),
    (["dmd.fake_sigma_min=0"], ["dmd.fake_sigma_min", "(0, 1]"]),
    (["dmd.fake_sigma_max=1.1"], ["dmd.fake_sigma_max", "(0, 1]"]),
    (["dmd.fake_timestep_shift=0.9"], ["dmd.fake_timestep_shift", ">= 1"]),
    (["eval.num_teacher_steps=-1"], ["eval.num_teacher_steps", ">= 0"]),
    (["dmd.ema_decay=1.01"], ["dmd.ema_decay", "[0, 1]"]),
    (["dmd.ema_decay=-0.1"], ["dmd.ema_decay", "[0, 1]"]),
    (["dmd.ema_start_step=-1"], ["dmd.ema_start_step"]),
    (["dmd.loss_normalizer=0"], ["dmd.loss_normalizer", "> 0"]),
    (["dmd.teacher_guidance_scale=0"], ["dmd.teacher_guidance_scale", "> 0"]),
    (["dmd.normalization_epsilon=0"], ["dmd.normalization_epsilon", "> 0"]),
    (["dmd.student_steps=0"], ["dmd.student_steps"]),
    (["dmd.score_discrete_steps=-1"], ["dmd.score_discrete_steps"]),
    (["dmd.student_batch_size=0"], ["dmd.student_batch_size"]),
    (["dmd.fake_score_micro_batch_size_per_gpu=0"], ["dmd.fake_score_micro_batch_size_per_gpu"]),
    (["dmd.fake_score_optim.betas=[0.0, 1.0]"], ["dmd.fake_score_optim.betas"]),
    (["dmd.student_optim.lr=0"], ["dmd.student_optim.lr", "the default is dmd.student_optim.lr=2e-06"]),
    (["gan.weight=-1"], ["gan.weight"]),
    (["lora.rank=-1"], ["lora.rank"]),
    (["lora.rank=8", "lora.alpha=0"], ["lora.alpha"]),
    (["eval.every=-1"], ["eval.every"]),
    (["max_cycles=0"], ["max_cycles"]),
    # between keys
    (["dmd.role_storage=shared_base_adapters"], ["lora.rank", "shared_base_adapters", "colocated_independent"]),
    (["lora.targets=[]"], ["lora.targets", "empty"]),
    (["dmd.score_sigma_min=0.98"], ["dmd.score_sigma_min", "dmd.score_sigma_max=0.98"]),
    (["dmd.score_sigma_min=0.5", "dmd.score_sigma_max=0.4"], ["dmd.score_sigma_min"]),
    (["dmd.fake_sigma_min=0.5", "dmd.fake_sigma_max=0.4"], ["dmd.fake_sigma_min: 0.5", "dmd.fake_sigma_max=0.4"]),
    (["dmd.fake_sigma_max=0.01"], ["dmd.score_sigma_min: 0.02", "dmd.fake_sigma_max=0.01"]),    # inherits the other
    (["dmd.convention=dmd2", "dmd.score_sigma_min=0.99"], ["dmd.score_sigma_min: 0.99", "dmd.score_sigma_max=0.98"]),
    (["dmd.score_times=inside", "dmd.score_discrete_steps=1"], ["dmd.score_times: inside", "k / 1"]),
    (["dmd.fake_times=inside", "dmd.score_discrete_steps=1"], ["dmd.fake_times: inside", "k / 1"]),
    (["lora.rank=8", "lora.adapters=[a, b, a]"], ["lora.adapters", "[a, b, a]", "two roles one name"]),
    (["lora.adapters=[student, student, ema]"], ["lora.adapters", "two roles one name"]),    # also without LoRA
    (["lora.adapters=[a, b.c, d]"], ["lora.adapters", "'b.c' cannot name an adapter"]),
    (["lora.adapters=[a, b, \u00e9]"], ["lora.adapters", "cannot name an adapter"]),
    (["dmd.role_storage=shared_base_adapters", "lora.rank=8", "dmd.dtype=bfloat16"],
     ["teacher.dtype: float32", "dmd.dtype=bfloat16", "set teacher.dtype=bfloat16"]),
    (["dmd.convention=dmd2", "dmd.fake_warmup_cycles=1"], ["dmd.fake_batch: reuse_student", "dmd.fake_batch=fresh"]),
    (["gan.weight=0.1"], ["data.latents", "gan.weight=0.1"]),
    (["dmd.fake_warmup_cycles=60"], ["max_cycles: 60", "dmd.fake_warmup_cycles=60"]),
    (["dmd.student_optim.warmup_steps=60"], ["dmd.student_optim.warmup_steps", "max_cycles=60"]),
    (["dmd.student_optim.warmup_steps=50", "dmd.fake_warmup_cycles=10"],
     ["dmd.student_optim.warmup_steps", "50 steps"]),
    (["dmd.fake_score_optim.warmup_steps=300"], ["dmd.fake_score_optim.warmup_steps", "300 steps"]),
    (["dmd.student_batch_size=40"],
     ["dmd.student_batch_size: 40", "dmd.student_micro_batch_size_per_gpu=16", "set dmd.student_batch_size=32"]),
    (["dmd.fake_score_batch_size=8"], ["dmd.fake_score_batch_size: 8", "set dmd.fake_score_batch_size=16"]),
    (["topology.world_size=3"], ["dmd.student_batch_size: 64", "3 ranks x ", "set dmd.student_batch_size=48"]),
    (["dmd.fake_batch=reuse_student", "dmd.fake_score_batch_size=32"], ["dmd.fake_score_batch_size", "reuse_student"]),
    (["dmd.fake_batch=reuse_student", "dmd.fake_warmup_cycles=1"], ["dmd.fake_batch", "dmd.fake_warmup_cycles=1"]),
])
def test_messages_of_dmd(write, overrides, parts):
    """Catches a DMD config that would fail, or distil something else, hours later, and hints to keys of job opd."""
    message = refusal(write(DMD), overrides)
    assert all(part in message for part in parts) and "(" in message, message


@pytest.mark.parametrize("text, part", [
    (DMD.replace("max_cycles: 60\n", ""), "max_cycles: required"),
    (DMD.replace("path: models/teacher", ""), "teacher.path: required"),
    (DMD.replace("conditions: labels.npz", ""), "data.conditions: required"),
    (DMD + "student: {path: x}\n", "student: unknown key"),
    (DMD + "dmd:\n  rollouts: sde\n", ":7: dmd.rollouts: unknown key (did you mean dmd.rollout?)"),
])
def test_messages_of_dmd_files(write, text, part):
    """Catches a missing path that is found out by a traceback, and errors without their line."""
    assert part in refusal(write(text))


def test_dmd_allows_what_is_legal(write):
    """Control for the ones above: the borders of the ranges and the combinations next to the refused ones pass."""
    load(write(DMD), ["dmd.fake_update_ratio=1", "dmd.score_sigma_max=1", "dmd.ema_decay=0", "eval.every=0",
                      "dmd.score_discrete_steps=0", "dmd.fake_warmup_cycles=59", "dmd.student_steps=1",
                      "dmd.loss_normalizer=0.5"])
    load(write(DMD), ["dmd.score_times=inside", "dmd.score_discrete_steps=2", "dmd.fake_sigma_max=1",
                      "dmd.fake_timestep_shift=1", "eval.num_teacher_steps=0", "lora.adapters=[a, b, c1]"])
    load(write(DMD), ["dmd.dtype=bfloat16"])
    load(write(DMD), ["dmd.convention=dmd2", "dmd.fake_warmup_cycles=1", "dmd.fake_batch=fresh"])
    load(write(DMD), ["dmd.role_storage=shared_base_adapters", "lora.rank=1", "dmd.ema_decay=1",
                      "dmd.export_role=student"])
    load(write(DMD), ["gan.weight=0.1", "data.latents=latents.npz", "dmd.cfg_norm=none", "topology.world_size=4"])
    load(write(DMD), ["dmd.fake_batch=reuse_student", "dmd.fake_score_optim.warmup_steps=299"])


def test_dmd_check_world(write):
    """Catches ranks with unequal numbers of micro-batches, for either role and whatever the file was meant for."""
    config = load(write(DMD), ["dmd.fake_score_batch_size=128", "topology.world_size=2"])
    for world_size in (1, 2, 4):
        check_world(config, world_size)
    with pytest.raises(ConfigError, match="student_batch_size: 64 .* 8 ranks x .*set dmd.student_batch_size=128"):
        check_world(config, 8)
    with pytest.raises(ConfigError, match="fake_score_batch_size: 96 .* 4 ranks"):
        check_world(dataclasses.replace(config, dmd=dataclasses.replace(config.dmd, fake_score_batch_size=96)), 4)


@pytest.mark.parametrize("overrides, keys", [
    (["dmd.student_steps=1"], []),    # what stands at its default is not reported
    (["dmd.student_steps=1", "dmd.rollout=ode", "dmd.exit_step=last", "dmd.rollout_timestep_shift=3"],
     ["dmd.rollout", "dmd.exit_step", "dmd.rollout_timestep_shift"]),
    (["dmd.student_steps=1", "dmd.exit_step=round_robin"], ["dmd.exit_step"]),
    (["dmd.student_steps=2", "dmd.rollout=ode", "dmd.exit_step=last", "dmd.rollout_timestep_shift=3"], []),
    (["lora.alpha=16", "lora.targets=qkv"], ["lora.alpha", "lora.targets"]),
    (["lora.alpha=16", "lora.targets=qkv", "lora.rank=8"], []),
    (["lora.adapters=[a, b, c]"], ["lora.adapters"]),
    (["lora.adapters=[a, b, c]", "lora.rank=8"], []),
    (["dmd.normalizer=batch"], ["dmd.normalizer"]),
    (["dmd.normalizer=sample_add", "dmd.fake_loss=x0", "dmd.score_time_per=batch"], []),
    (["dmd.convention=lightx2v"], []),
    (["dmd.convention=lightx2v", "dmd.teacher_guidance_scale=1"], []),    # the norm is the preset's, not the user's
    (["dmd.convention=lightx2v", "dmd.teacher_guidance_scale=1", "dmd.cfg_norm=scalar"], ["dmd.cfg_norm"]),
    (["dmd.convention=fastvideo"], ["dmd.normalizer"]),
    (["dmd.cfg_norm=scalar"], ["dmd.cfg_norm"]),
    (["dmd.cfg_norm=scalar", "dmd.teacher_guidance_scale=2"], []),
    (["data.latents=x.npz", "gan.lr=1e-3", "gan.discriminator_weight=2"],
     ["data.latents", "gan.discriminator_weight", "gan.lr"]),
    (["dmd.ema_decay=0.9", "dmd.ema_start_step=61"], ["dmd.ema_decay"]),
    (["dmd.ema_decay=0.9", "dmd.ema_start_step=60"], []),    # the last step is averaged
    (["dmd.ema_decay=0", "dmd.ema_start_step=5"], ["dmd.ema_start_step"]),
    (["dmd.ema_decay=1"], ["dmd.ema_decay"]),
    (["dmd.student_optim.min_lr_frac=0.1", "dmd.student_optim.schedule=linear",
      "dmd.fake_score_optim.min_lr_frac=0.1"], ["dmd.fake_score_optim.min_lr_frac"]),
    (["eval.every=0", "eval.num_samples=4", "eval.guidance_scale=2", "eval.num_teacher_steps=4"],
     ["eval.num_samples", "eval.guidance_scale", "eval.num_teacher_steps"]),
    (["checkpoint.every=0", "checkpoint.keep_every=5"], ["checkpoint.keep_every"]),
    (["metrics.samples=2"], ["metrics.samples"]),
])
def test_dmd_warnings(write, overrides, keys):
    """Catches a DMD option that is ignored in silence, and a warning about one that is not."""
    lines = warnings(load(write(DMD), overrides))
    assert [line.split("=")[0].split()[0] for line in lines] == keys, lines


def test_shipped_dmd_configs():
    """Catches a shipped config that does not load, warns, or cannot be run on its ranks, in either storage."""
    digits, xl = (load(ROOT / f"configs/{name}.yaml") for name in ("dmd_digits", "dmd_dit_xl_256"))
    assert warnings(digits) == warnings(xl) == []
    assert (digits.device, digits.dmd.student_steps, digits.dmd.fake_update_ratio) == ("cpu", 4, 2)
    for world_size in (1, 2):
        check_world(digits, world_size)
    assert (xl.topology.world_size, xl.dmd.dtype, xl.dmd.activation_checkpointing) == (8, "bfloat16", True)
    load(ROOT / "configs/dmd_dit_xl_256.yaml", ["dmd.role_storage=shared_base_adapters", "lora.rank=64"])
    for name in config_module.PRESETS:
        assert load(ROOT / "configs/dmd_digits.yaml", [f"dmd.convention={name}"]).dmd.fake_update_ratio == 2    # its own


# ---- command line

def test_command_prints_the_config_without_torch(write):
    """Catches `python -m distill_core.config` that imports torch, prints something load cannot read, or exits 0."""
    script = ("import sys, distill_core.config as c\ncode = c.main(sys.argv[1:])\n"
              "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\nsys.exit(code)")

    def command(*arguments):
        return subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)

    path = str(write(MINIMAL))
    result = command(path, "optim.lr=1e-5", "optim.min_lr_frac=0.5")
    assert result.returncode == 0 and "warning: optim.min_lr_frac" in result.stderr
    assert load(write(result.stdout)).optim.lr == 1e-5
    result = command("configs/dmd_digits.yaml", "dmd.student_steps=2")
    assert result.returncode == 0 and result.stderr == "" and load(write(result.stdout)).dmd.student_steps == 2
    result = command(path, "optim.lrr=1e-5")
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1


# ---- fuzz

FULL = MINIMAL + """\
loss: {mode: reverse_kl_full, top_k: 16, log_prob_min_clamp: null}
rollout:
  temperature: 1.0
  stop_ids: [0, 2]
optim: {lr: 1e-6, betas: [0.9, 0.95], schedule: "cosine"}
eval: {every: 20, answer_pattern: '(\\d+)$'}
alarms: {student_mass: {limit: 0.5, action: warn}}
"""
FULL_DMD = DMD + """\
topology: {world_size: 2}
dmd:
  convention: self_forcing
  recipe: dmd2
  role_storage: shared_base_adapters
  loss_normalizer: null
  teacher_guidance_scale: 1.5
  student_optim: {lr: 1e-6, betas: [0.0, 0.999], schedule: "cosine"}
lora: {rank: 8, targets: [qkv, 'proj'], adapters: [a, b, c]}
gan: {weight: 0.0}
"""
PIECES = ["\n", ":", ": ", "{", "}", "[", "]", "-", "- ", "#", "&a ", "*a", "!!int ", "!", "%", "@", "`", "|", ">",
          "'", '"', "\\", "\t", "\0", "\x85", "\ufeff", "\ud7ff", "null", "~", "true", "off", "nan", ".inf", "1e999",
          "-1", "0", "0x10", "1:30", "<<: ", "? ", "---", "...", ",", "\u00e9", "\\U00110000", "job: dmd", "[" * 30,
          "9" * 400]


def mutate(text, rng):
    """A few seeded edits: insert a piece, delete, repeat, or move a slice."""
    for _ in range(rng.randint(1, 2)):
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        j = min(j, i + rng.choice([1, 3, 30]))
        edits = [text[:i] + rng.choice(PIECES) + text[i:], text[:i] + text[j:], text[:j] + text[i:],
                 text[:i] + text[j:] + text[i:j], text[:i] + rng.choice(PIECES) + text[j:]]
        text = rng.choice(edits)
    return text


@pytest.mark.parametrize("full, override", [(FULL, "optim.lr=1e-5"), (FULL_DMD, "dmd.ema_decay=0.9")],
                         ids=["opd", "dmd"])
def test_fuzz_files_and_overrides(write, full, override):
    """Catches any exception but a one-line ConfigError, and an accepted config that does not survive to_yaml."""
    rng = random.Random(0)
    accepted = refused = 0
    for i in range(600):
        text = mutate(full, rng)
        overrides = [mutate(override, rng)] if i % 3 == 0 else []
        raw = bytearray(text.encode())
        if i % 10 == 0 and raw:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            config = load(write(bytes(raw)), overrides)
        except ConfigError as error:
            refused += 1
            assert str(error) and str(error).isprintable(), (text, str(error))
        else:
            accepted += 1
            warnings(config), differences(config)
            assert load(write(to_yaml(config))) == config, text
    assert accepted > 15 and refused > 300, (accepted, refused)
