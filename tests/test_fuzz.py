# SPDX-License-Identifier: Apache-2.0
"""A short run of fuzz.py over every kind of file, and controls that show what its verdicts are worth."""
from __future__ import annotations

import random
import time

import fuzz
import pytest
import torch
from fuzz import KINDS, Fault, Kind, outcome

NUM_CASES = 60


@pytest.mark.parametrize("kind", KINDS)
def test_each_case_is_refused_in_one_line_or_read(tmp_path, kind):
    """Catches a traceback, a hang, a half-loaded model, gigabytes taken for a damaged file. More: python fuzz.py."""
    _skip_without_packages(kind)
    counts = fuzz.run(kind, tmp_path / "files", seed=0, cases=range(NUM_CASES))
    assert counts["refused"] > 0 and counts.total() == NUM_CASES, counts


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_are_read(tmp_path, monkeypatch, kind):
    """Control: without mutations the same cases are read, so that none is refused for a reason of its own."""
    _skip_without_packages(kind)
    for change in ("mutate", "mutate_bytes", "mutate_json", "mutate_lines", "mutate_safetensors", "mutate_rows"):
        monkeypatch.setattr(fuzz, change, lambda rng, raw: raw)
    monkeypatch.setattr(fuzz, "TEMPLATE_PIECES", ("x",))
    counts = fuzz.run(kind, tmp_path / "files", seed=0, cases=range(8))
    assert counts == {"read": 8}, counts


def test_mutations_are_many_and_replay():
    """Catches a mutator that hardly changes anything, and cases that cannot be seen again from their numbers."""
    raw = b'{"a": {"b": [1, 2.5, "x", null, true]}, "c": "d"}'
    for change in (fuzz.mutate_bytes, fuzz.mutate_json, fuzz.mutate):
        first, again = ([change(random.Random(f"x {seed} {case}"), raw) for case in range(300)] for seed in (0, 0))
        assert first == again and len(set(first)) > 150 and first.count(raw) < 60, change


@pytest.mark.parametrize("fault, named", [
    (lambda: {}["x"], "KeyError"), (lambda: 1 / 0, "ZeroDivisionError"), (lambda: time.sleep(9), "Hang"),
    (lambda: _spin(), "Hang"), (lambda: _swallow_everything(), "Hang"), (lambda: torch.empty(2**40), "RuntimeError"),
    (lambda: bytearray(2**40), "MemoryError"), (lambda: _refuse("FOLDER/x: two\nlines"), "a bad message"),
    (lambda: _refuse("wrong"), "a bad message"), (lambda: _refuse("FOLDER/x: " + "long " * 999), "a bad message"),
    (lambda: fuzz.check_weights(torch.nn.Linear(1, 1), {}), "other weights"),
    (lambda: fuzz.check_weights(_not_finite()), "not finite")])
def test_every_sort_of_fault_is_one(tmp_path, monkeypatch, fault, named):
    """Control: each of the ends that a case must not have is reported, with the words that replay it."""
    def read(rng, folder, prepared):
        try:
            fault()
        except ValueError as error:
            raise ValueError(str(error).replace("FOLDER", str(folder))) from None

    monkeypatch.setitem(KINDS, "planted", Kind(lambda folder: None, read))
    monkeypatch.setattr(fuzz, "DEADLINE_S", 0.1)
    with pytest.raises(Fault, match=f"(?s)--kind 'planted' --seed 3 --case 4: .*{named}"):
        fuzz.run("planted", tmp_path / "files", seed=3, cases=range(4, 5))


def test_a_good_refusal_is_none(tmp_path, monkeypatch):
    """Control for the one above."""
    monkeypatch.setitem(KINDS, "planted", Kind(lambda folder: None, lambda rng, folder, _: _refuse(f"{folder}/x: bad")))
    assert outcome("planted", tmp_path, None, seed=0, case=0) == "refused"


def _refuse(message: str) -> None:
    raise ValueError(message)


def _spin() -> None:
    while True:
        pass


def _swallow_everything() -> None:
    """As a reader does that takes a foreign package's errors, whatever they are, for those of the file."""
    while True:
        try:
            time.sleep(9)
        except Exception:
            pass


def _not_finite() -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(module.weight, float("nan"))
    return module


def _skip_without_packages(kind: str) -> None:
    if kind in ("prompts", "tokenizer", "template"):
        pytest.importorskip("tokenizers")
        pytest.importorskip("jinja2")
