# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M: a published model's weights, tokenizer and chat template through the same code as everything else."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_torchrun import finish, torchrun

from distill_core.build import load_lm
from distill_core.data import load_tokenizer, read_prompts
from distill_core.metrics import read_jsonl

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/real_model"))


@pytest.fixture(scope="module")
def folders() -> tuple[Path, Path]:
    """(teacher, student), made once and cached; a failure to make them is a failure, not a skip."""
    from make_smollm2 import ensure
    return ensure(ROOT)


def test_logits_and_prompts_equal_transformers(folders):
    """Catches a detail that random tiny models do not have: real rotary base, real norms, real merges, the real template."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(folders[0]), load_lm(folders[0])
    own_tokenizer, file = load_tokenizer(folders[0], "auto"), ROOT / "tests/real_model/prompts_eval.jsonl"
    prompts, _ = read_prompts(file, own_tokenizer, max_prompt_tokens=512, long_prompts="drop")
    messages = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    for prompt, chat in zip(prompts, messages, strict=True):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert list(prompt.ids) == tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        for prompt in prompts[:4]:
            tokens = torch.tensor([prompt.ids])
            torch.testing.assert_close(ours.lm_head(ours(tokens)), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_two_steps_of_the_real_run(folders, tmp_path):
    """Catches a real run that does not start, does not start where it should, or does not learn from its first steps."""
    overrides = ["name=two_steps", f"run_root={tmp_path}", "max_steps=2", "eval.num_prompts=2", "eval.max_new_tokens=16",
                 "rollout.max_new_tokens=16", "checkpoint.every=0"]
    code, out, err = finish(torchrun(ROOT / "configs/opd_smollm2_cpu.yaml", 2, *overrides), 400)
    assert code == 0, err[-3000:]
    lines = read_jsonl(tmp_path / "two_steps/metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    first, last = [line["eval/reverse_kl_full"] for line in lines if line["kind"] == "eval"]
    assert len(steps) == 2 and all(line["step_applied"] and line["logprob_gap"] < 1e-3 for line in steps)
    assert 0.4 < first < 1.5, "the damaged student starts at about 0.75 nats a token"
    assert last < first + 0.2 and "start-up probe passed" in out
