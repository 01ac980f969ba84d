# SPDX-License-Identifier: Apache-2.0
"""report.py on made-up runs: what the page shows, what it survives, how large and how slow it is."""
from __future__ import annotations

import base64
import json
import math
import os
import random
import re
import stat
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from distill_core import report
from distill_core.metrics import JsonlWriter
from distill_core.pictures import write_png

def train_values(step: int, num_steps: int, noise: random.Random) -> dict[str, float]:
    """Plausible metrics of one step: a student that nears its teacher."""
    left = math.exp(-4 * step / num_steps)
    roll_s, wait_s, train_s = 1.9 + 0.2 * noise.random(), 0.15 * noise.random(), 1.2 + 0.1 * noise.random()
    length = 9 + 4 * left + noise.random()
    return {
        "loss": 0.05 + 0.7 * left * noise.uniform(0.85, 1.15), "grad_norm": 0.4 + 2 * left * noise.uniform(0.6, 1.6),
        "lr": 1e-3 * min(1.0, step / (0.1 * num_steps)), "student_mass": 0.995 - 0.02 * left * noise.random(),
        "teacher_mass": 0.99 - 0.2 * left * noise.uniform(0.9, 1.1), "overlap_ratio": 0.92 - 0.3 * left,
        "overlap_token_advantage": -0.01 - 0.4 * left * noise.random(), "student_entropy": 0.3 + 0.8 * left,
        "teacher_entropy": 0.28 + 0.25 * left * noise.random(), "response_length": length,
        "truncated_frac": max(0.0, 0.2 * left - 0.01), "repetition_frac": 0.05 * left, "tokens": round(length * 64),
        "logprob_gap": 1e-6 * noise.random(), "staleness": 0.0, "step_applied": True, "skipped_steps": 0,
        "time/teacher_busy_s": 0.8 * wait_s,
        "time/step_s": roll_s + wait_s + train_s + 0.1, "time/roll_s": roll_s, "time/teacher_wait_s": wait_s,
        "time/train_s": train_s, "time/other_s": 0.1, "tokens_per_s": 64 * length / (roll_s + wait_s + train_s),
        "memory_peak_bytes": 1.3e9 + 1e8 * left}


def eval_values(step: int, num_steps: int) -> dict[str, float]:
    left = math.exp(-4 * step / num_steps)
    return {"eval/exact_match": 0.97 - 0.6 * left, "eval/mean_at_n": 0.96 - 0.6 * left,
            "eval/pass_at_n": 0.99 - 0.3 * left, "eval/reverse_kl_full": 0.04 + 0.68 * left,
            "eval/response_length": 9 + 4 * left, "eval/truncated_frac": 0.1 * left, "eval/time_s": 3.2}


def fake_run(folder: Path, num_steps: int = 60, eval_every: int = 10) -> Path:
    """A run folder as train_opd.py leaves it, resumed in the middle, with a skipped step and an alarm."""
    noise, samples = random.Random(0), folder / "samples"
    samples.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"job: opd\nname: quickstart\nmax_steps: {num_steps}\ndevice: cpu\n"
                                        "student: {path: models/student}\nteacher: {path: models/teacher}\n")
    (folder / "command.txt").write_text("torchrun --nproc_per_node=3 train_opd.py --config configs/quickstart.yaml\n")
    writer = JsonlWriter(folder / "metrics.jsonl", resumed_step=-1)
    start = {"event": "start", "message": "fresh", "device": "cpu", "torch": "2.13.0", "python": "3.11.2",
             "ranks": "2 students + 1 teacher",
             "changed": ["optim.lr=0.001 (default 1e-06)", "loss.top_k=8 (default 16)"]}
    writer.write(0, start, kind="event")
    for step in range(num_steps + 1):
        values = train_values(step, num_steps, noise)
        if step == num_steps // 2:
            writer.write(step, {"event": "resumed", "message": f"from checkpoint step_{step:08d}"}, kind="event")
        if step == round(0.7 * num_steps):
            values.update(loss=math.nan, grad_norm=math.inf, step_applied=False)
            writer.write(step, {"event": "alarm", "message": "truncated_frac 0.93 > 0.9"}, kind="event")
        if step > 0:
            writer.write(step, values)
        if step % eval_every == 0:
            writer.write(step, eval_values(step, num_steps), kind="eval")
            write_samples(samples, step, correct=step > num_steps / 3)
    writer.close()
    return folder


def write_samples(folder: Path, step: int, *, correct: bool) -> None:
    pairs = [("17+25=", "42", "43"), ("8*7=", "56", "54"), ("90-34=", "56", "66"), ("(3+4)*6=", "42", "27")]
    lines = [{"prompt": prompt, "answer": answer, "response": answer if correct else wrong, "correct": correct,
              "finished": correct or prompt != "8*7=", "kl": 0.03 if correct else 0.81, "length": 3}
             for prompt, answer, wrong in pairs]
    (folder / f"step_{step:08d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def page_of(folder: Path) -> str:
    return report.write_report(folder).read_text(encoding="utf-8")


def train_only(folder: Path, lines: list[dict]) -> Path:
    """A run folder with nothing but these metrics."""
    folder.mkdir(exist_ok=True)
    writer = JsonlWriter(folder / "metrics.jsonl", resumed_step=-1)
    for step, line in enumerate(lines, start=1):
        writer.write(step, line)
    writer.close()
    return folder


def plot_of(page: str, title: str) -> str:
    """The figure with that title, or an empty string."""
    figures = re.findall(r"<figure>.*?</figure>", page, re.S)
    return next((figure for figure in figures if f"<strong>{title}" in figure), "")


class Checker(HTMLParser):
    """Every tag is closed in order; keeps tag names and what a browser would load."""

    VOID = {"meta", "br", "img"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.feed(page)
        assert not self.open_tags, self.open_tags

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")], attrs
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open_tags and self.open_tags.pop() == tag, f"</{tag}> closes {self.open_tags}"


def test_whole_run(tmp_path):
    """Catches a plot, headline, mark or text that fell out of the page, unbalanced tags, and anything loaded."""
    page = page_of(fake_run(tmp_path / "run"))
    checker = Checker(page)
    assert "script" not in checker.tags and checker.loads == [] and "http://" not in page and "https://" not in page
    for plots in report.OPD_SECTIONS.values():
        for plot in plots:
            assert plot_of(page, plot.title), plot.title
    for text in ("37.0% &rarr;</s> 95.9%", "+58.9 points since step 0", "0.72 &rarr;</s> 0.0525", "step 60 of 60",
                 "<i>torch</i>2.13.0", "<i>student</i>models/student", "2 students + 1 teacher", "17+25=",
                 "expected answer <code>42</code>", "optim.lr=0.001 (default 1e-06)", "--nproc_per_node=3",
                 "truncated_frac 0.93 &gt; 0.9", "resumed: 1", "skipped step: 1", "alarm: 1"):
        assert text in page, text
    assert page.isascii()


def test_marks_stand_at_their_steps(tmp_path):
    """Catches event lines at the wrong place (step 30 of 0..60 is the middle of every plot), and a skip told twice."""
    run = fake_run(tmp_path / "run")
    loss = plot_of(page_of(run), "Loss")
    middle = (report.Frame.left + report.Frame.right) // 2
    assert re.search(rf'<g class="mark resumed"><title>step 30: from checkpoint.*?<path d="M{middle} ', loss)
    assert '<g class="mark alarm"><title>step 42: truncated' in loss
    assert '<g class="mark skip"><title>step 42: skipped step' in loss  # told by step_applied alone
    writer = JsonlWriter(run / "metrics.jsonl", resumed_step=60)
    writer.write(42, {"event": "skip", "message": "gradient norm is inf"}, kind="event")
    page = page_of(run)
    assert "step 42: gradient norm is inf" in plot_of(page, "Loss") and "skipped step: 1<" in page


def test_texts_of_the_run_cannot_become_markup(tmp_path):
    """Catches script injection from model output, settings or event messages, and bytes that break the page."""
    bad = "</pre><script>alert(1)</script>\x00\x07\x1b[31m\x85\ud800 & \"quoted\" 'text'"
    run = fake_run(tmp_path / "run")
    (run / "config.yaml").write_text('job: opd\nname: "</title><script>x</script>"\n')
    sample = {"prompt": bad, "response": bad, "answer": bad, "correct": True, "kl": None, "length": bad}
    (run / "samples" / "step_00000070.jsonl").write_text(json.dumps(sample) + "\n")
    writer = JsonlWriter(run / "metrics.jsonl", resumed_step=60)
    writer.write(60, {"event": "alarm", "message": bad, "device": bad}, kind="event")
    writer.write(60, {"event": "start", "message": bad, "device": bad, "changed": [bad]}, kind="event")
    writer.write(60, {"<script>y</script>": 1.0})
    page = page_of(run)
    assert "script" not in Checker(page).tags
    assert page.count("&lt;script&gt;alert(1)") >= 8 and "&lt;script&gt;y" in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    assert r"\x00\x07\x1b[31m\x85\ud800 &amp; &quot;quoted&quot;" in page


def test_one_step(tmp_path):
    """Catches a division by the width of an empty range: the first evaluation comes before there are two points."""
    noise = random.Random(0)
    page = page_of(train_only(tmp_path / "run", [train_values(1, 1, noise)]))
    Checker(page)
    assert plot_of(page, "Loss").count("<circle") == 2  # the point, and the one that the pointer shows
    assert plot_of(page, "Time per step") and "nan" not in page


def test_no_steps_and_no_folder(tmp_path, capsys):
    """Catches a page that fails before the first step, and a traceback where one line should name the remedy."""
    assert "No steps yet." in page_of(train_only(tmp_path / "run", []))
    assert report.main([str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nowhere/metrics.jsonl: no such file (give the folder of a run" in error


def test_missing_metrics_leave_their_plots_out(tmp_path):
    """Catches empty frames: no answers in the data means no exact match, no teacher ranks means no wait."""
    page = page_of(train_only(tmp_path / "run", [{"loss": 1.0 / step, "grad_norm": math.nan} for step in range(1, 9)]))
    assert plot_of(page, "Loss") and page.count("<figure>") == 1
    assert "Evaluation" not in page and "Training time" not in page


def test_gaps(tmp_path):
    """Catches a line drawn through NaN, and NaN that cannot be seen; the control has neither gap nor tick."""
    losses = [{"loss": 1.0 / step} for step in range(1, 9)]
    straight = plot_of(page_of(train_only(tmp_path / "a", losses)), "Loss")
    losses[3] = {"loss": math.nan}
    broken = plot_of(page_of(train_only(tmp_path / "b", losses)), "Loss")

    def pieces(figure: str) -> int:
        return re.search(r'class="line c0" d="([^"]*)"', figure)[1].count("M")

    assert (pieces(straight), straight.count("not a finite number")) == (1, 0)
    assert (pieces(broken), broken.count("not a finite number")) == (2, 1)


def test_buckets_keep_spikes_means_and_gaps():
    """Catches thinning by taking every n-th point, which hides the spike one looks for."""
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 77.0)
    points[10_000:12_000] = [(step, math.nan) for step in range(10_000, 12_000)]
    curve = report.curve_of("x", points)
    assert len(curve.buckets) == 100 and max(bucket.high for bucket in curve.buckets) == 77.0
    spiked = next(bucket for bucket in curve.buckets if bucket.high == 77.0)
    assert spiked.low == 1.0 and spiked.mean == pytest.approx(1.076) and abs(spiked.step - 54_321) <= 1000
    assert [bucket.step for bucket in curve.buckets if math.isnan(bucket.mean)] == [10_500, 11_500]


def test_hundred_thousand_steps_stay_small(tmp_path):
    """Catches a page that grows with the run until no browser opens it."""
    noise = random.Random(0)
    line = {**train_values(1, 10, noise), "kind": "train", "time": 0.0}
    lines = [{**line, "step": step, "loss": noise.random(), "step_applied": step % 3 > 0} for step in range(100_000)]
    evals = [{**eval_values(step, 100_000), "step": step} for step in range(0, 100_000, 500)]
    events = [{"step": step, "event": "alarm", "message": "m" * 200} for step in range(0, 100_000, 10)]
    samples = [(step, {"prompt": "p" * 10_000, "response": "r" * 50_000}) for step in range(0, 100_000, 500)]
    page = report.render(report.Run(tmp_path, {}, "", "", lines, evals, events, samples))
    assert len(page) < 2_000_000
    assert "(48,200 characters left out)" in page


def test_ten_thousand_steps_are_fast(tmp_path):
    """Catches a page that holds up the training at each evaluation: at most 1 s of processor time."""
    run = fake_run(tmp_path / "run", num_steps=10_000, eval_every=500)
    start_s = time.process_time()
    report.write_report(run)
    assert time.process_time() - start_s < 1.0


def test_torn_and_damaged_lines(tmp_path):
    """Catches a report that fails on the line being written, and one that leaves damaged history out in silence."""
    run = fake_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "kind": "tr')
    assert "step 60 of 60" in page_of(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 62, "kind": "train", "loss": 1.0}) + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:\d+: not JSON"):
        report.write_report(run)


def test_page_is_replaced_whole(tmp_path, monkeypatch):
    """Catches a page written in place: a reader, or a kill in between, would get half of it; also a 0600 mode."""
    run = fake_run(tmp_path / "run")
    before = page_of(run)
    assert stat.S_IMODE((run / "report.html").stat().st_mode) & 0o044 == 0o044 & ~current_umask()

    def crash(source, destination):
        raise OSError("killed")

    monkeypatch.setattr(report.os, "replace", crash)
    (run / "config.yaml").write_text("name: other\n")
    with pytest.raises(OSError, match="killed"):
        report.write_report(run)
    assert (run / "report.html").read_text() == before


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_same_curves_and_unknown_metrics(tmp_path):
    """Catches three equal lines over each other at n = 1, and metrics of one's own that are never shown."""
    run = train_only(tmp_path / "run", [{"loss": 1.0, "my_metric": float(n)} for n in range(4)])
    writer = JsonlWriter(run / "metrics.jsonl", resumed_step=4)
    for step in (0, 4):
        values = dict.fromkeys(("eval/exact_match", "eval/mean_at_n", "eval/pass_at_n"), 0.1 * step)
        writer.write(step, values, kind="eval")
    page = page_of(run)
    assert plot_of(page, "Exact match").count('class="line') == 1
    assert "Further metrics" in page and plot_of(page, "my_metric")
    assert "pass@n" not in page


def test_a_spike_turns_the_axis_logarithmic():
    """Catches a single bad step that flattens everything else onto the axis; the control stays linear."""
    spiked = report.frame_of([1.0] * 50 + [1e4], report.Span(0, 50))
    assert spiked.is_log and spiked.y_ticks() == [1.0, 10.0, 100.0, 1e3, 1e4]
    assert spiked.y(1.0) == spiked.bottom and spiked.y(1e4) == spiked.top
    assert not report.frame_of([1.0] * 50 + [9.0], report.Span(0, 50)).is_log
    assert not report.frame_of([0.0] * 50 + [1e4], report.Span(0, 50)).is_log  # no logarithm of 0


@pytest.mark.parametrize("exponent", range(-9, 12))
def test_ticks_are_few_round_and_inside(exponent):
    """Catches rulers with 1 or 100 ticks, or with ticks such as 0.30000000000000004."""
    noise = random.Random(exponent)
    for _ in range(50):
        low = noise.uniform(-2, 2) * 10.0 ** exponent
        high = low + noise.uniform(0.5, 4) * 10.0 ** exponent
        ticks = report.nice_ticks(low, high)
        assert 2 <= len(ticks) <= 6 and all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in ticks)
        assert all(len(report.tick(tick)) <= 9 for tick in ticks)
    assert [report.tick(value) for value in (0.1 + 0.2, 12_000, 1.5e6, 2e-6)] == ["0.3", "12,000", "1.5M", "2e-06"]


def test_stacked_times_add_up(tmp_path):
    """Catches areas that are drawn over each other instead of on top, and shares that are not shares of the whole."""
    lines = [{"time/roll_s": 3.0, "time/teacher_wait_s": 0.0, "time/train_s": 1.0} for _ in range(5)]
    figure = plot_of(page_of(train_only(tmp_path / "run", lines)), "Time per step")
    frame = report.frame_of([4.0] * 5, report.Span(1, 5), from_zero=True)
    areas = re.findall(r'class="area c(\d)" d="M[\d.]+ ([\d.]+)V([\d.]+)', figure)
    assert areas == [("0", f"{frame.y(0):.1f}", f"{frame.y(3):.1f}"), ("1", f"{frame.y(3):.1f}", f"{frame.y(4):.1f}")]
    assert "rollout <b>75%</b>" in figure and "train <b>25%</b>" in figure and "teacher wait" not in figure


def test_samples_follow_a_prompt_through_the_run(tmp_path):
    """Catches samples out of order, first or last step left out, and text files that are not shown."""
    run = fake_run(tmp_path / "run")
    (run / "samples" / "step_00000005.txt").write_text("a plain text <sample>")
    first = run / "samples" / "step_00000000.jsonl"
    first.write_text('{"prompt": "asked once", "response": "x"}\n' + first.read_text())
    (run / "samples" / "notes.md").write_text("not a sample")
    page = page_of(run)
    article = next(text for text in re.findall(r"<article>.*?</article>", page, re.S) if "8*7=" in text)
    steps = re.findall(r"<th>step (\d+)", article)
    assert steps == ["0", "20", "40", "60"] and article.count("wrong</small>") == 2 and "cut</small>" in article
    assert "a plain text &lt;sample&gt;" in page
    assert page.index("8*7=") < page.index("asked once")  # prompts of the newest evaluation come first
    assert "not a sample" not in page


def test_command_line(tmp_path, capsys):
    """Catches a command that writes elsewhere than it says."""
    run = fake_run(tmp_path / "run")
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").is_file() and sorted(path.name for path in run.iterdir()) == [
        "command.txt", "config.yaml", "metrics.jsonl", "report.html", "samples"]


# ---------------------------------------------------------------------------------------------------------------------
# Distillation of a flow model

def dmd_values(cycle: int, num_cycles: int, noise: random.Random) -> dict[str, float]:
    """Plausible metrics of one cycle of train_dmd.py; the first five are warm-up cycles without a student attempt."""
    left = math.exp(-4 * cycle / num_cycles)
    values = {"student/update_applied": 0, "student/steps": max(0, cycle - 5), "student/skip_nonfinite": 0,
              "fake_score/update_applied": 5, "fake_score/steps": 5 * cycle, "fake_score/skip_nonfinite": 0,
              "fake_score/grad_norm": 1 + noise.random(), "fake_score/lr": 2e-6, "time/fake_score_s": 0.5,
              "time/student_s": 0.0, "time/cycle_s": 0.7, "samples_per_s": 540.0, "memory_peak_bytes": 2.5 * 2**30}
    names = ["fake_score/loss"]
    if cycle > 5:
        exit_step = noise.randrange(4)
        names += ["dmd/gradient_norm", "dmd/teacher_fake_gap"]
        values |= {"dmd/loss": 0.3, "dmd/normalizer": 0.6, "dmd/nonfinite": 0, "student/sample_mean": -0.4,
                   "student/sample_std": 0.44 - 0.1 * left, "student/grad_norm": 3 * noise.random(),
                   "student/lr": 2e-6, "student/update_applied": 1, "time/student_s": 0.2,
                   **{f"dmd/rollout_exit/{step}": int(step == exit_step) for step in range(4)}}
    for name in names:
        bins = {f"{name}/{b / 5:.1f}-{(b + 1) / 5:.1f}": (0.2 + left) * (b + noise.random()) for b in range(5)}
        values |= {name: sum(bins.values()) / 5, **bins}
    return values


def dmd_run(folder: Path, num_cycles: int = 60, eval_every: int = 5) -> Path:
    """A run folder as train_dmd.py leaves it, with pictures of one grey tone each."""
    noise, samples = random.Random(0), folder / "samples"
    samples.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"job: dmd\nname: digits\nmax_cycles: {num_cycles}\ndevice: cpu\n"
                                        "teacher: {path: examples/digits/teacher}\ndmd: {student_steps: 4}\n")
    writer = JsonlWriter(folder / "metrics.jsonl", resumed_step=-1)
    writer.write(0, {"event": "start", "message": "fresh run", "device": "cpu"}, kind="event")
    for steps in (4, 50):
        write_png(samples / f"teacher_{steps}_steps.png", np.full((34, 50), steps, np.uint8))
    for cycle in range(num_cycles + 1):
        if cycle > 0:
            writer.write(cycle, dmd_values(cycle, num_cycles, noise))
        if cycle % eval_every == 0:
            teacher = {} if cycle else {"eval/teacher_std": 0.44}
            writer.write(cycle, {"eval/sample_std": 0.3 + 0.002 * cycle, "eval/sample_mean": -0.4, **teacher,
                                 "eval/time_s": 1.0}, kind="eval")
            write_png(samples / f"step_{cycle:08d}.png", np.full((34, 50), (100 + cycle) % 256, np.uint8))
    writer.write(12, {"event": "skip", "message": "student skipped"}, kind="event")
    writer.close()
    return folder


def test_distillation_page(tmp_path):
    """Catches a plot that fell out of a dmd page, steps where cycles are meant, and plots or headlines of the other."""
    page = page_of(dmd_run(tmp_path / "run"))
    assert "script" not in Checker(page).tags and page.isascii()
    for title, plots in report.DMD_SECTIONS.items():
        for plot in plots:
            assert bool(plot_of(page, plot.title)) == (title != "Adversarial terms"), plot.title
    for text in ("Distribution matching distillation &middot; cycle 60 of 60", "since cycle 0", "median cycle 0.7s",
                 "<span>Samples per second</span><b>540</b>", "<i>student_steps</i>4", "<th>cycle</th>",
                 "<title>cycle 12: student skipped</title>", 'aria-label="Fake loss by cycle"'):
        assert text in page, text
    assert not re.search(r"\bstep [0-9]", page), "a step that should be a cycle"
    for other in ("Exact match", "Tokens per second", "Further metrics", "nan"):
        assert other not in page, other
    assert plot_of(page, "Loss").count('text-anchor="end">cycle</text>') == 1


def test_noise_bins_share_a_plot(tmp_path):
    """Catches bins in plots of their own or missing, and curves without a color."""
    page = page_of(dmd_run(tmp_path / "run"))
    for title in ("Gradient |g|", "Teacher-fake gap", "Fake loss"):
        figure = plot_of(page, title)
        assert figure.count('class="line') == 6
        labels = re.findall(r"<i></i>([^<]*) <b>", figure)
        assert labels == ["all", "0.0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1.0"], labels
    assert set(re.findall(r"\bc(\d+)\b", page)) <= set(re.findall(r"\.c(\d+)\b", report.CSS))


def test_equal_curves_of_two_roles_are_both_named(tmp_path):
    """Catches one role's curve left out because the other's is the same, as if that role had no learning rate."""
    run = train_only(tmp_path / "run", [{"student/lr": 2e-6, "fake_score/lr": 2e-6}] * 3)
    (run / "config.yaml").write_text("job: dmd\n")
    assert re.findall(r"<i></i>([^<]*) <b>", plot_of(page_of(run), "Learning rate")) == ["student", "fake score"]


def test_exits_are_shares_of_all_attempts(tmp_path):
    """Catches exits drawn over each other, and a share that counts warm-up cycles."""
    lines = [{"dmd/rollout_exit/0": 0, "dmd/rollout_exit/1": 0}] * 2
    lines += [{"dmd/rollout_exit/0": 1, "dmd/rollout_exit/1": 3}] * 4
    run = train_only(tmp_path / "run", lines)
    (run / "config.yaml").write_text("job: dmd\n")
    figure = plot_of(page_of(run), "Rollout exits")
    assert "exit 0 <b>25%</b>" in figure and "exit 1 <b>75%</b>" in figure and figure.count('class="area') == 2


def test_the_teachers_std_is_a_line_through_the_run(tmp_path):
    """Catches the measure at the start shown as a lone dot, which nothing can be compared with."""
    figure = plot_of(page_of(dmd_run(tmp_path / "run")), "Std of samples")
    heights = re.findall(r'class="line c1" d="M[\d.]+ ([\d.]+)h0((?:L[\d.]+ [\d.]+)*)"', figure)
    (first, rest), = heights
    assert rest.count("L") == 12 and set(re.findall(r"L[\d.]+ ([\d.]+)", rest)) == {first}


def pictures_in(page: str) -> list[tuple[str, int]]:
    """(caption, grey tone) of the embedded pictures."""
    found = re.findall(r'<figcaption>([^<]*)</figcaption><img src="data:image/png;base64,([^"]*)"', page)
    return [(caption, png_tone(base64.b64decode(content))) for caption, content in found]


def png_tone(data: bytes) -> int:
    """First pixel: after signature and IHDR (33 bytes), IDAT's length and name (8 bytes), and the row's filter byte."""
    return zlib.decompressobj().decompress(data[41:])[1]


def test_pictures_of_teacher_and_student(tmp_path):
    """Catches pictures out of order, a first or last one left out, others taken in, and a policy that blocks them."""
    run = dmd_run(tmp_path / "run")
    for name in ("step_x.png", "teacher_best.png", ".step_00000060.png.77", "step_00000060.png.bak"):
        (run / "samples" / name).write_bytes(b"not a picture of ours")
    page = page_of(run)
    shown = pictures_in(page)
    assert shown[:2] == [("teacher, 50 steps", 50), ("teacher, 4 steps", 4)]
    cycles = [int(caption.removeprefix("cycle ")) for caption, _ in shown[2:]]
    assert len(cycles) == 8 and cycles == sorted(set(cycles)) and (cycles[0], cycles[-1]) == (0, 60)
    assert max(b - a for a, b in zip(cycles, cycles[1:])) <= 10 and [tone - 100 for _, tone in shown[2:]] == cycles
    assert all(source.startswith("data:image/png;base64,") for source in Checker(page).loads)
    assert page.count("<img") == 10 and page.count('<div class="pictures">') == 2 and "img-src data:" in page
    assert page.index("teacher, 50 steps") < page.index("Distribution matching</h2>")


def test_large_pictures_are_linked(tmp_path, monkeypatch):
    """Catches a page of many megabytes; a link must lead from the page to the file."""
    run = dmd_run(tmp_path / "run")
    large = run / "samples" / "step_00000060.png"
    large.write_bytes(large.read_bytes() + bytes(2**20))
    page = page_of(run)
    assert len(page) < 1_000_000 and len(pictures_in(page)) == 9
    link = re.search(r'<figcaption>cycle 60</figcaption><a href="([^"]*)">step_00000060.png</a>'
                     r"<small>1.00 MiB, too large", page)
    assert (run / link[1]).samefile(large)
    sizes = [path.stat().st_size for path in (run / "samples").glob("*.png")]
    monkeypatch.setattr(report, "MAX_PAGE_PICTURE_BYTES", 3 * min(sizes) + min(sizes) // 2)
    page = page_of(run)
    assert [caption for caption, _ in pictures_in(page)] == ["teacher, 50 steps", "teacher, 4 steps", "cycle 0"]
    assert page.count("too large for this page") == 7


def test_adversarial_runs_and_long_runs(tmp_path):
    """Catches the discriminator left out, and a page that holds up training: 2,000 cycles in 1 s."""
    noise = random.Random(0)
    lines = [{**dmd_values(cycle, 2000, noise), "gan/generator_loss": 0.7, "gan/discriminator_loss": 0.6,
              "gan/gradient_ratio": 0.1, "discriminator/grad_norm": 0.5, "time/discriminator_s": 0.1}
             for cycle in range(1, 2001)]
    run = train_only(tmp_path / "run", lines)
    (run / "config.yaml").write_text("job: dmd\n")
    start_s = time.process_time()
    page = page_of(run)
    assert time.process_time() - start_s < 1.0 and len(page) < 1_000_000
    assert plot_of(page, "GAN losses") and plot_of(page, "GAN gradient")
    for title in ("Gradient norm", "Time per cycle"):
        assert "<i></i>discriminator <b>" in plot_of(page, title)
