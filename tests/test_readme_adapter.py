# SPDX-License-Identifier: Apache-2.0
"""The README's diff for an architecture of one's own, applied to a copy of the project and run there."""
from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distill_core.metrics import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("distill_core", "train_dmd.py", "examples/digits/digits.npz")

TRAIN = """
import json, math, os, torch
from safetensors.torch import save_file
from distill_core.data import read_latents
from distill_core.digit_net import DigitNet

torch.manual_seed(0)
net = DigitNet()
x0, labels = read_latents("examples/digits/digits.npz")
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(600):  # as such networks are trained, without a word of flow.py
    picked, noise, angle = torch.randint(len(x0), (128,)), torch.randn(128, 1, 8, 8), torch.rand(128, 1, 1, 1)
    alpha, sigma = (angle * math.pi / 2).cos(), (angle * math.pi / 2).sin()
    known = labels[picked].masked_fill(torch.rand(128) < 0.1, 10)
    v = net(alpha * x0[picked] + sigma * noise, alpha, sigma, known).view_as(noise)
    optimizer.zero_grad()
    (v - (alpha * noise - sigma * x0[picked])).square().mean().backward()
    optimizer.step()
os.makedirs("models/digit_net")
save_file(net.state_dict(), "models/digit_net/model.safetensors")
with open("models/digit_net/config.json", "w") as file:
    json.dump({"model_type": "digit_net"}, file)
"""

SABOTAGE = """
type(adapter).to_velocity = lambda self, raw, x_s, s: raw  # v of the wrong path
type(adapter).to_x0 = lambda self, raw, x_s, s: x_s - s.reshape(-1, 1, 1, 1) * raw
try:
    check_adapter(adapter, load_flow("models/digit_net", adapter), x0[:256], labels[:256])
except ValueError as error:
    print(error)
"""

EXPORT_AND_SAMPLE = """
from distill_core import export, sample
assert export.main(["--checkpoint", "runs/shared", "--out", "export"]) == 0
assert sample.main(["--export", "export", "--out", "samples.npz", "--num", "20"]) == 0
"""


def readme_blocks() -> tuple[str, str]:
    """(the diff, the Python that follows it)"""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(diff|python)\n(.*?)^```$", text, re.M | re.S)
    [at] = [at for at, (kind, body) in enumerate(blocks) if kind == "diff" and "b/distill_core/adapters.py" in body]
    assert blocks[at + 1][0] == "python"
    return blocks[at][1], blocks[at + 1][1]


# --- a strict `patch` -----------------------------------------------------------------------------------------------

def apply_strictly(diff: str, folder: Path) -> None:
    """Where git is not installed, and to see that git guesses nothing: old lines must be found exactly once."""
    for part in re.split(r"^--- .*\n", diff, flags=re.M)[1:]:
        name, body = part.split("\n", 1)
        path = folder / name.removeprefix("+++ b/")
        text = path.read_text() if path.exists() else ""
        for hunk in re.split(r"^@@ .*\n", body, flags=re.M)[1:]:
            old, new = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] in kept) for kept in (" -", " +"))
            assert text.count(old) == 1 or old == text == "", f"{path.name} has {text.count(old)} times:\n{old}"
            text = text.replace(old, new) if old else new
        path.write_text(text)


def apply(diff: str, folder: Path) -> None:
    if shutil.which("git"):
        done = subprocess.run(["git", "apply", "-"], input=diff, cwd=folder, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    else:
        apply_strictly(diff, folder)


def copy_project(folder: Path) -> Path:
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def sources(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}


def test_the_diff_is_short_and_fits_the_project_as_it_is(tmp_path):
    """Catches a README that has rotted, a diff that fits by fuzz only, and one longer than promised."""
    diff, _ = readme_blocks()
    lines = diff.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120 and diff.isascii(), (len(lines), max(map(len, lines)))
    by_git, strictly = copy_project(tmp_path / "git"), copy_project(tmp_path / "strict")
    before = sources(by_git)
    apply(diff, by_git)
    apply_strictly(diff, strictly)
    after = sources(by_git)
    assert after == sources(strictly)
    assert {name for name in after if after[name] != before.get(name)} == {
        "distill_core/digit_net.py", "distill_core/adapters.py"}
    adapters = "distill_core/adapters.py"
    added = set(after[adapters].splitlines()) - set(before[adapters].splitlines())
    assert len(added) <= 3, added
    (strictly / "distill_core/digit_net.py").unlink()
    (strictly / adapters).write_text(before[adapters].replace("from distill_core.models import dit, mlp2d\n", ""))
    with pytest.raises(AssertionError, match="has 0 times"):  # negative control: a project that has moved on
        apply_strictly(diff, strictly)


# --- run in the copy ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project with the diff and a model folder of the new network."""
    folder = copy_project(tmp_path_factory.mktemp("project"))
    diff, check = readme_blocks()
    apply(diff, folder)
    shown = run(folder, "-c", TRAIN + check + "print('passed')\n" + SABOTAGE)
    verdict = shown.splitlines()
    assert verdict[0] == "passed" and verdict[1].startswith("adapter digit_net: the prediction at s = "), shown
    return folder


def run(folder: Path, *arguments: str) -> str:
    """What Python printed, in the copy and with its modules."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, text=True, capture_output=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def write_config(folder: Path, name: str, **dmd) -> Path:
    tree = {"job": "dmd", "name": name, "max_cycles": 3, "device": "cpu", "teacher": {"path": "models/digit_net"},
            "data": {"conditions": "examples/digits/digits.npz"},
            "dmd": {"fake_update_ratio": 2, "student_batch_size": 8, "fake_score_batch_size": 8,
                    "student_micro_batch_size_per_gpu": 4, "fake_score_micro_batch_size_per_gpu": 4, "student_steps": 2,
                    "teacher_guidance_scale": 2.0, "student_optim": {"lr": 1e-4}, "fake_score_optim": {"lr": 1e-4},
                    **dmd},
            "eval": {"every": 3, "num_samples": 10, "num_teacher_steps": 4}, "checkpoint": {"every": 0}}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def check_run(run_dir: Path, cycles: list[int]) -> None:
    lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == cycles and (run_dir / "DONE").exists()
    for line in lines:
        assert (line["student/update_applied"], line["fake_score/update_applied"], line["dmd/nonfinite"]) == (1, 2, 0)
        assert all(math.isfinite(line[name]) and line[name] > 0 for name in ("student/grad_norm", "fake_score/loss"))
    assert (run_dir / "samples" / f"step_{cycles[-1]:08d}.png").exists()


@pytest.mark.slow
def test_it_trains_in_full_and_resumes(copy):
    """Catches an adapter that the script cannot train, and one that the next process takes for another."""
    config = str(write_config(copy, "full"))
    run(copy, "train_dmd.py", "--config", config, "max_cycles=2")
    assert "resumed from" in run(copy, "train_dmd.py", "--config", config)
    check_run(copy / "runs/full", [1, 2, 3])


@pytest.mark.slow
def test_it_trains_as_adapters_of_one_base_and_samples(copy):
    """Catches LoRA targets, recomputation, an export or a sampler that only the built-in networks can do."""
    config = str(write_config(copy, "shared", role_storage="shared_base_adapters", activation_checkpointing=True))
    run(copy, "train_dmd.py", "--config", config, "lora.rank=2")
    check_run(copy / "runs/shared", [1, 2, 3])
    shown = run(copy, "-c", EXPORT_AND_SAMPLE)
    assert (copy / "samples.npz").exists() and "20 samples of shape [1, 8, 8]: 2 steps" in shown
