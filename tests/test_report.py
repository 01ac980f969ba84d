# SPDX-License-Identifier: Apache-2.0
"""report.py on made-up runs: what the page shows, what it survives, how large and how slow it is."""
from __future__ import annotations

import json
import math
import os
import random
import re
import stat
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from distill_core import report
from distill_core.metrics import JsonlWriter



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
        "logprob_gap": 1e-6 * noise.random(), "step_applied": True, "skipped_steps": 0,
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

    VOID = {"meta", "br"}

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
    for plots in report.SECTIONS.values():
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
    spiked = report.frame_of([1.0] * 50 + [1e4], (0, 50))
    assert spiked.is_log and spiked.y_ticks() == [1.0, 10.0, 100.0, 1e3, 1e4]
    assert spiked.y(1.0) == spiked.bottom and spiked.y(1e4) == spiked.top
    assert not report.frame_of([1.0] * 50 + [9.0], (0, 50)).is_log
    assert not report.frame_of([0.0] * 50 + [1e4], (0, 50)).is_log  # no logarithm of 0


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
    frame = report.frame_of([4.0] * 5, (1, 5), from_zero=True)
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
