# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks measure with: a wrong clock or sum would go unnoticed in a table of ratios."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
from timing import Row, append_results, fastest_s, peak_extra_bytes, turns_s


@pytest.mark.parametrize("ratio, reach, verdict", [
    (0.08, "<= 0.08", "reached"), (0.09, "<= 0.08", "MISSED"), (2.0, ">= 2.0", "reached"), (1.9, ">= 2.0", "MISSED"),
    (float("nan"), "<= 1.0", "MISSED"), (None, "<= 1.0", ""), (5.0, "", "")])
def test_verdicts(ratio, reach, verdict):
    """Catches a goal compared the wrong way round, and a NaN or a missing peer that counts as success."""
    assert Row("ours", "theirs", ratio, "", reach).verdict == verdict


def test_sides_take_turns_and_the_first_round_does_not_count():
    """Catches rounds of one side after the other, which a busy minute would favour, and a warm-up that is counted."""
    calls = []
    first, second = turns_s([lambda: calls.append("a"), lambda: calls.append("b")], rounds=3)
    assert "".join(calls) == "ab" * 4 and len(first) == len(second) == 3
    assert fastest_s([lambda: None], rounds=2)[0] < 0.1


def test_peak_memory_counts_temporaries_but_not_what_was_there():
    """Catches a peak that is only the result's size, or that of everything alive."""
    before = torch.ones(4_000_000)
    peak = peak_extra_bytes(lambda: (before[:1_000_000] * 2).sum())
    assert 4_000_000 <= peak < 4_100_000, "one temporary of 4 MB"


def test_results_are_one_json_object_a_row(tmp_path):
    """Catches rows without the machine, versions and date that make a number comparable, and lost earlier ones."""
    path = tmp_path / "results.jsonl"
    for _ in range(2):
        append_results(path, [Row("what", "peer", 0.5, "1 s / 2 s", "<= 0.6")], scale=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 and lines[0]["verdict"] == "reached" and lines[0]["scale"] == 1
    assert {"date", "cpu", "cores", "load", "python", "torch", "what", "against", "ratio", "measured"} <= set(lines[0])
