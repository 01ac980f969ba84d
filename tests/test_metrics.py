# SPDX-License-Identifier: Apache-2.0
"""metrics.py: reduction over ranks, metrics.jsonl, console rows, tables and units."""
from __future__ import annotations

import json
import math
import os
import random
import resource

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distill_core import metrics
from distill_core.metrics import Console, JsonlWriter, Metrics, read_jsonl


# ---------------------------------------------------------------------------------------------------------------------
# Reduction

def test_mean_is_weighted_by_the_global_count():
    """Catches a mean of means: ranks with 1, 10 and 100 tokens must not weigh the same."""
    values = {0: [4.0], 1: [1.0] * 10, 2: [0.5] * 100}

    def body(rank: int) -> dict[str, float]:
        step = Metrics()
        for value in values[rank]:  # one micro-batch a token
            step.mean("loss", torch.tensor(value), 1)
        return step.reduce()

    results = run_ranks(body, 3)
    everything = [value for rank_values in values.values() for value in rank_values]
    mean_of_means = (4.0 + 1.0 + 0.5) / 3
    assert results[0] == results[1] == results[2]
    assert results[0]["loss"] == pytest.approx(sum(everything) / len(everything), abs=1e-12)
    assert results[0]["loss"] != pytest.approx(mean_of_means, abs=0.1)


def test_kinds_and_empty_counts_across_ranks():
    """Catches a NaN of a rank without tokens (0 / 0) reaching the others, and a metric without any token as NaN."""
    def body(rank: int) -> dict[str, float]:
        step = Metrics()
        step.mean("loss", float("nan") if rank == 0 else 6.0, 0 if rank == 0 else 3)
        step.mean("never", torch.tensor(float("nan")), 0)
        step.total("tokens", torch.tensor(2**24 + 1 + rank))  # not representable in fp32
        step.peak("memory", 10 * rank)
        step.peak("memory", 5)
        return step.reduce()

    for result in run_ranks(body, 2):
        assert result == {"loss": 2.0, "tokens": 2 * 2**24 + 3, "memory": 10.0}
        assert list(result) == ["loss", "tokens", "memory"]


def test_one_collective_and_only_in_the_given_group():
    """Catches one collective a metric, and a reduction over the world where student ranks alone were meant."""
    def body(rank: int) -> tuple[int, dict[str, float]]:
        students = dist.new_group([0, 1])
        calls, all_gather = [], dist.all_gather
        metrics.dist.all_gather = lambda *args, **kwargs: (calls.append(1), all_gather(*args, **kwargs))
        step = Metrics()
        for name in "abcdef":
            step.mean(name, rank + 1.0, 1)
        return (0, {}) if rank == 2 else (step.reduce(students), len(calls))[::-1]

    results = run_ranks(body, 3)
    assert results[0] == results[1] == (1, dict.fromkeys("abcdef", 1.5))


@pytest.mark.parametrize("odd", [("mean", ["loss", "x"]), ("mean", ["loss"]), ("total", ["loss", "y"])])
def test_ranks_that_record_different_names_all_raise(odd):
    """Catches numbers added to those of another metric: gloo itself checks neither order nor size."""
    kind, names = odd

    def body(rank: int) -> str:
        step = Metrics()
        for name in (names if rank == 1 else ["loss", "y"]):
            if kind == "total" and rank == 1:
                step.total(name, 1.0)
            else:
                step.mean(name, 1.0, 1)
        try:
            step.reduce()
        except RuntimeError as error:
            return str(error)
        return ""

    for message in run_ranks(body, 2):
        assert f"rank 1 of the group recorded {len(names)} names, rank 0 2" in message
        assert "\n" not in message


def test_one_process_needs_no_group():
    """Catches a leaf that only runs under torchrun; also: tensors with a graph, and NaN that must stay visible."""
    step = Metrics()
    weight = torch.tensor(3.0, requires_grad=True)
    step.mean("loss", weight * 2, torch.tensor(4))
    step.mean("bad", float("nan"), 2)
    step.peak("peak", float("nan"))
    step.peak("peak", 1.0)
    first, second = step.reduce(), step.reduce()
    assert first["loss"] == second["loss"] == 1.5  # reducing twice does not add twice
    assert math.isnan(first["bad"]) and math.isnan(first["peak"])


def test_sums_do_not_lose_small_values():
    """Catches fp32 sums: 10,000 micro-batches of 0.1 give 999.9 there."""
    step = Metrics()
    for _ in range(10_000):
        step.mean("x", 0.1, 1e-4)
    assert step.reduce()["x"] == pytest.approx(1000.0, abs=1e-9)


def test_misuse_is_refused():
    """Catches a vector taken for a sum, one name used in two ways, and more metrics than the payload holds."""
    step = Metrics()
    with pytest.raises(ValueError, match=r"metric loss: expected a number, got a tensor of shape \(3,\)"):
        step.mean("loss", torch.zeros(3), 1)
    step.total("n", 1)
    with pytest.raises(AssertionError, match="metric n is recorded as total and as peak"):
        step.peak("n", 1)
    for index in range(metrics.MAX_METRICS):
        step.total(f"m{index}", 1)
    with pytest.raises(AssertionError, match="129 metrics in one step"):
        step.reduce()


# ---------------------------------------------------------------------------------------------------------------------
# metrics.jsonl

def test_lines_are_strict_json_and_there_before_close(tmp_path):
    """Catches NaN / Infinity tokens, which other JSON readers refuse, and lines that a kill loses in a buffer."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, resumed_step=-1)
    writer.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-6, "step_applied": False})
    writer.write(1, {"event": "start", "changed": ["a=1"], "nested": {"x": [-float("inf")]}}, kind="event")

    def refuse(token: str):
        raise AssertionError(token)

    first, second = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert first.pop("time") > 1e9
    assert first == {"step": 1, "kind": "train", "loss": None, "grad_norm": None, "lr": 1e-6, "step_applied": False}
    assert second["kind"] == "event" and second["nested"] == {"x": [None]} and second["changed"] == ["a=1"]


def test_resume_cuts_later_steps_and_a_torn_line(tmp_path):
    """Catches curves with a step twice after a resume, and a torn line that swallows the next one."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, resumed_step=-1)
    for step in range(6):
        writer.write(step, {"loss": float(step)})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in read_jsonl(path)] == [0, 1, 2, 3, 4, 5]
    writer = JsonlWriter(path, resumed_step=3)
    writer.write(4, {"loss": 40.0})
    writer.close()
    assert [(line["step"], line["loss"]) for line in read_jsonl(path)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    JsonlWriter(path, resumed_step=-1).close()
    assert path.read_bytes() == b""  # a fresh run
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_line_for_which_there_is_no_room_is_an_error(tmp_path):
    """Catches half a line taken for a whole one: the next one is glued to it, and no start can read the file again."""
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resumed_step=-1)
    writer.write(1, {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 20, before[1]))
    try:  # what the kernel does on a full disk, too: a part of the first write, none of the second
        with pytest.raises(OSError):
            writer.write(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resumed_step=1)
    writer.write(2, {"loss": 2.0})
    writer.close()
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_crash_while_cutting_loses_nothing(tmp_path, monkeypatch):
    """Catches a cut in place: killed half way, the history would be gone."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def crash(source, destination):
        raise OSError("killed")

    monkeypatch.setattr(metrics.os, "replace", crash)
    with pytest.raises(OSError, match="killed"):
        JsonlWriter(path, resumed_step=1)
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize(("text", "message"), [('{"step": 1}\n{"st\n{"step": 2}\n', ":2: not JSON"),
                                               ('{"step": 1}\n[1]\n', ":2: lacks an object"),
                                               ('{"loss": 1}\n', ":1: lacks step")])
def test_damage_elsewhere_is_named_by_line(tmp_path, text, message):
    """Catches a tolerant reader that drops damaged history in silence."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_jsonl(path, required=("step",))


# ---------------------------------------------------------------------------------------------------------------------
# Terminal

@pytest.mark.parametrize("columns", [metrics.OPD_COLUMNS, metrics.DMD_COLUMNS])
def test_rows_stay_aligned_whatever_the_numbers(columns):
    """Catches a wide number (a spike, a slow step, a step beyond the end) that shifts the columns after it."""
    noise = random.Random(0)
    console = Console(20_000, columns=columns, title_every=1000, clock=lambda: noise.uniform(0, 1e9))
    extremes = [0.0, -0.0, 1e-30, -1e-7, 0.99999, 9.99999, 1e5, -1e9, 1e300, float("inf"), float("nan")]
    width = len(console.title())
    for step in [1, 999, 20_000, 10**12] + list(range(2, 200)):
        values = {column.key: noise.choice([*extremes, noise.lognormvariate(0, 9)]) for column in columns}
        values.pop(noise.choice(list(values)))
        row = console.row(step, values).splitlines()[-1]
        assert len(row) == width and row.isascii(), row


def test_row_shows_values_under_their_titles():
    """Catches a value under the title of its neighbour and a fraction printed as if it were per cent."""
    console = Console(60, clock=lambda: 0.0)
    titles, row = console.row(7, {"loss": 0.51236, "truncated_frac": 0.125, "lr": 1e-6, "tokens_per_s": 12_340,
                                  "time/roll_s": 0.001}).splitlines()
    def under(title: str) -> str:
        end = titles.index(title) + len(title)
        return row[:end].split()[-1]

    assert under("step/max") == "7/60" and under("loss") == "0.5124" and under("trunc %") == "12.5"
    assert under("lr") == "1.00e-06" and under("tok/s") == "12.3k" and under("roll s") == "0.00"
    assert under("S mass") == "-" and under("eta") == "-"


def test_cycles_of_a_distillation():
    """Catches rows wider than a terminal, steps where a row is a cycle, and a warm-up cycle (no student) that fails."""
    console = Console(9_999_999, columns=metrics.DMD_COLUMNS, unit="cycle", clock=lambda: 0.0)
    titles, row = console.row(3, {"fake_score/loss": 0.25, "time/fake_score_s": 0.5}).splitlines()
    assert titles.split()[0] == "cycle/max" and row.split()[0] == "3/9999999"
    assert len(row) == len(titles) <= 120
    end = titles.index("fake loss") + len("fake loss")
    assert row[:end].split()[-2:] == ["-", "0.2500"] and row.count(" - ") >= 6
    values = {column.key: 10.0 ** n for n, column in enumerate(metrics.DMD_COLUMNS, start=-4)}
    assert len(console.row(4, values)) == len(titles) and "#" not in console.row(5, values)
    assert all(len(column.title) <= column.width for column in (*metrics.OPD_COLUMNS, *metrics.DMD_COLUMNS))


def test_titles_return_every_n_rows():
    """Catches titles that scroll away, or that come with every row."""
    console = Console(10, title_every=3, clock=lambda: 0.0)
    assert [len(console.row(step, {}).splitlines()) for step in range(1, 8)] == [2, 1, 1, 2, 1, 1, 2]


def test_eta_leaves_out_the_first_step():
    """Catches an eta that starts at hours because the first step compiled and allocated; also after a resume."""
    now_s = 0.0
    console = Console(200, clock=lambda: now_s)
    etas = []
    for step, step_s in ((101, 3000.0), (102, 2.0), (103, 2.0), (110, 14.0)):
        now_s += step_s
        etas.append(console.row(step, {}).split()[-1])
    assert etas == ["-", "3m16s", "3m14s", "3m00s"]


@pytest.mark.parametrize(("value", "style", "shown"), [
    (0.12345, "number", "  0.1235"), (1.2e-5, "number", "1.20e-05"), (123456.78, "number", "123456.8"),
    (1e9, "number", "1.00e+09"), (0.0, "number", "  0.0000"), (1e-5, "fixed", "  0.0000"),
    (0.5, "exponent", "5.00e-01"), (float("nan"), "number", "     nan"), (-1e300, "number", "-1e+300")])
def test_fit_number(value, style, shown):
    """Catches small numbers printed as 0.0000 and wide ones cut."""
    assert metrics.fit_number(value, 8, style=style) == shown.rjust(8)


def test_table_aligns_text_left_and_numbers_right():
    """Catches columns that do not line up and a cell count that differs from the titles'."""
    text = metrics.table([["student", "0-6", "135M"], ["a", "7", "1.72B"]], ["role", "ranks", "parameters"])
    assert text.splitlines() == ["role     ranks  parameters", "-------  -----  ----------",
                                 "student    0-6        135M", "a            7       1.72B"]
    with pytest.raises(ValueError):
        metrics.table([["too", "few"]], ["role", "ranks", "parameters"])


def test_human_units():
    """Catches carries such as 1000k for 1.00M or 60s for 1m00s."""
    counts = {0: "0", 950: "950", 3.5: "3.50", 999.6: "1.00k", 12_345: "12.3k", 999_499: "999k", 999_500: "1.00M",
              134_515_008: "135M", 1.72e9: "1.72B", 5e15: "5000T", float("nan"): "nan"}
    assert {value: metrics.human_count(value) for value in counts} == counts
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 2**20 - 1: "1.00 MiB", 1.5 * 2**30: "1.50 GiB",
             2**45: "32.00 TiB"}
    assert {value: metrics.human_bytes(value) for value in sizes} == sizes
    times = {0: "0.0s", 9.96: "10s", 59.6: "1m00s", 185: "3m05s", 3599.7: "1h00m", 3720: "1h02m", 86_399.9: "1d00h",
             183_600: "2d03h", 412 * 86_400: "412d"}
    assert {value: metrics.human_time(value) for value in times} == times
    assert all(len(metrics.human_time(10 ** (power / 10))) <= 6 for power in range(-30, 90))
