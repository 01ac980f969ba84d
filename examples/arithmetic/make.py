# SPDX-License-Identifier: Apache-2.0
"""Makes the quickstart's data, teacher and student: column arithmetic worked out step by step, in bytes.

    python -m examples.arithmetic.make --out NEW_FOLDER        # from the project's root; 4 minutes on one free core

    prompt    456-378=                                two numbers of up to three digits; the result is not negative
    response  [16-8=8,15-7-1=7,4-3-1=0]78<end>        columns from the units up, with carry or borrow, then the answer

A token is a byte; id 256 ends a text. Both models learn from worked solutions of random problems. The teacher is the
larger one and learns until it makes no mistakes; the student is small and stopped early, when it knows the form but
often misreads a digit or a sum. Neither has seen an evaluation prompt, nor its mirror image (b+a for a+b), so that what
they score there is not memory. Everything follows from SEED; another CPU or another torch may round differently.
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill_core.data import ByteTokenizer, answer_matches
from distill_core.generate import generate
from distill_core.models.lm import CausalLM, config_from_hf
from distill_core.safetensors_io import write_folder

SEED = 0
NUM_TRAIN, NUM_EVAL = 4096, 200
SCHEDULE_STEPS, WARMUP_STEPS, BATCH = 1200, 50, 64
HEADS = 4
SLIP = 0.01  # share of the numbers written in training solutions that are wrong, see `solution`
END = 256
SPECIAL_IDS = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
MAX_RESPONSE = 40  # tokens; the longest solution has 33
ANSWER_PATTERN = r"\](\d+)$"
NO_TARGET = -100  # positions that cross_entropy leaves out


@dataclass(frozen=True)
class Recipe:
    """Shape and training of one model: AdamW on BATCH new problems a step, the rate going to 0 at SCHEDULE_STEPS."""

    layers: int
    hidden: int
    intermediate: int
    lr: float
    stop_at: int  # step; a model stopped in mid-schedule still learns easily, one that was annealed has to be unsettled


TEACHER = Recipe(layers=3, hidden=128, intermediate=384, lr=3e-3, stop_at=SCHEDULE_STEPS)
STUDENT = Recipe(layers=2, hidden=64, intermediate=192, lr=4e-3, stop_at=250)


# --- the task -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Problem:
    a: int
    op: str  # + or -
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}{self.op}{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b if self.op == "+" else self.a - self.b)

    @property
    def key(self) -> tuple[str, int, int]:
        """The same for a problem and its mirror image."""
        return self.op, min(self.a, self.b), max(self.a, self.b)


def draw(rng: random.Random) -> Problem:
    """Numbers below 10, 100 and 1000 equally often; in a subtraction the larger one stands first."""
    a, b = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
    op = rng.choice("+-")
    return Problem(max(a, b), op, min(a, b)) if op == "-" else Problem(a, op, b)


def draw_unseen(rng: random.Random, count: int, excluded: set[tuple[str, int, int]]) -> list[Problem]:
    endless = (draw(rng) for _ in itertools.count())
    return list(itertools.islice((problem for problem in endless if problem.key not in excluded), count))


def solution(problem: Problem, rng: random.Random, slip: float) -> str:
    """'[7+5=12,4+8+1=13,3+2+1=6]632' for 347+285; each number of a column is wrong with probability `slip`.

    After a slip the rest follows from what is written: so the teacher knows how to go on after a student's mistake, and
    holds none for impossible, which would drown the rest of the KL.
    """
    def write(value: int, bound: int) -> int:
        return rng.randrange(bound) if rng.random() < slip else value

    width = max(len(str(problem.a)), len(str(problem.b)))
    columns, total, carry = [], 0, 0
    for place, digits in enumerate(zip(reversed(f"{problem.a:0{width}}"), reversed(f"{problem.b:0{width}}"))):
        x, y = (write(int(digit), 10) for digit in digits)
        borrow = problem.op == "-" and x < y + carry
        x += 10 * borrow
        result = write(x + y + carry if problem.op == "+" else x - y - carry, 20 if problem.op == "+" else 10)
        columns.append(f"{x}{problem.op}{y}{problem.op + '1' if carry else ''}={result}")
        carry = int(borrow or result >= 10)
        total += (result if place == width - 1 else result % 10) * 10 ** place
    return f"[{','.join(columns)}]{total}"


# --- models ---------------------------------------------------------------------------------------------------------

def make_batch(problems: list[Problem], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, T] and next-token targets [B, T], set where the target is part of the response."""
    tokens, targets = [], []
    for problem in problems:
        prompt, response = list(problem.prompt.encode()), [*solution(problem, rng, SLIP).encode(), END]
        tokens.append(torch.tensor(prompt + response))
        targets.append(torch.tensor([NO_TARGET] * (len(prompt) - 1) + response + [NO_TARGET]))
    return (pad_sequence(tokens, batch_first=True, padding_value=END),
            pad_sequence(targets, batch_first=True, padding_value=NO_TARGET))


def hf_config(recipe: Recipe) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257,
        "hidden_size": recipe.hidden, "intermediate_size": recipe.intermediate, "num_hidden_layers": recipe.layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": recipe.hidden // HEADS,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        **SPECIAL_IDS, "torch_dtype": "bfloat16",
    }


def train(recipe: Recipe, name: str, held_out: list[Problem]) -> CausalLM:
    """A model trained on fresh problems, none of them in `held_out`, rounded to bfloat16 as it will be stored."""
    torch.manual_seed(SEED)
    rng, excluded = random.Random(f"{name} {SEED}"), {problem.key for problem in held_out}
    model = CausalLM(config_from_hf(hf_config(recipe), source=name))
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1 if "embed" in key else parameter.shape[1] ** -0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(recipe.stop_at):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / SCHEDULE_STEPS)
        optimizer.param_groups[0]["lr"] = recipe.lr * cosine * min(1.0, (step + 1) / WARMUP_STEPS)
        tokens_BT, targets_BT = make_batch(draw_unseen(rng, BATCH, excluded), rng)
        counted_BT = targets_BT != NO_TARGET
        loss = F.cross_entropy(model.lm_head(model(tokens_BT)[counted_BT]), targets_BT[counted_BT])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"{name} step {step + 1:5d}/{recipe.stop_at}  loss {loss.item():.4f}", flush=True)
    return model.bfloat16().float()


def exact_match(model: CausalLM, problems: list[Problem]) -> float:
    """Share of problems whose greedy response ends in the right answer."""
    tokenizer = ByteTokenizer()
    samples = generate(model, [tokenizer.encode(problem.prompt) for problem in problems],
                       max_new_tokens=MAX_RESPONSE, temperature=0.0, stop_ids=(END,))
    return sum(answer_matches(tokenizer.decode(sample.tokens), problem.answer, ANSWER_PATTERN)
               for sample, problem in zip(samples, problems)) / len(problems)


def write_model(folder: Path, model: CausalLM, recipe: Recipe) -> None:
    write_folder(folder, ((name, parameter.detach().bfloat16()) for name, parameter in model.named_parameters()))
    for file, content in (("config.json", hf_config(recipe)), ("generation_config.json", SPECIAL_IDS)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data, teacher and student of the quickstart.")
    parser.add_argument("--out", type=Path, required=True, help="folder that does not hold a teacher or student yet")
    out = parser.parse_args().out
    torch.set_num_threads(1)  # sums in one order, however many cores there are
    rng = random.Random(SEED)
    held_out = list({problem.key: problem for problem in (draw(rng) for _ in range(2 * NUM_EVAL))}.values())[:NUM_EVAL]
    out.mkdir(parents=True, exist_ok=True)
    training = draw_unseen(rng, NUM_TRAIN, {problem.key for problem in held_out})
    for file, problems in (("eval.jsonl", held_out), ("train.jsonl", training)):
        lines = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n" for problem in problems]
        (out / file).write_text("".join(lines), encoding="utf-8")
    for name, recipe in (("teacher", TEACHER), ("student", STUDENT)):
        model = train(recipe, name, held_out)
        write_model(out / name, model, recipe)
        print(f"{name}: exact match {exact_match(model, held_out):.1%} on eval.jsonl", flush=True)


if __name__ == "__main__":
    main()
