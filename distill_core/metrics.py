# SPDX-License-Identifier: Apache-2.0
"""Training metrics: one collective, one JSON line and one aligned console row a step.

A token mean over the global batch is sum / count with both added over ranks first, never a mean of means.
`metrics.jsonl` holds one JSON object a line: {"step": 3, "time": unix seconds, "kind": "train", "loss": 0.71, ...}.

    metrics = Metrics()
    metrics.mean("loss", loss_sum, num_tokens)           # once per micro-batch, sums add up
    metrics.peak("memory_peak_bytes", peak_bytes)
    values = metrics.reduce(group)                       # {"loss": 0.71, ...}, the same on every rank
    journal.training(step, values, shown=True)           # journal = Journal(run_dir, log, Console(max_steps), ...)
"""
from __future__ import annotations

import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MAX_METRICS = 128  # the payload has this fixed size: gloo does not notice ranks that send different sizes


# ---------------------------------------------------------------------------------------------------------------------
# Reduction over ranks

class Entry(NamedTuple):
    kind: str  # mean | total | peak
    value: Tensor  # fp64 scalar: sum (mean, total) or largest value (peak) so far
    count: Tensor  # fp64 scalar: what a mean is divided by


class Metrics:
    """Numbers of one step on one rank; `reduce` makes them global. Make a new one for each step.

    Values are Python numbers or scalar tensors on any device; tensors stay there, without a sync, until `reduce`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def mean(self, name: str, value_sum: float | Tensor, count: float | Tensor) -> None:
        """Add to a weighted mean: sum of values and their number (tokens, rows). A value at count 0 is ignored."""
        value, count = _scalar(name, value_sum), _scalar(name, count)
        count = count.to(value.device)
        # A rank or micro-batch without tokens may well hold 0 / 0, which must not reach the others.
        self._add(name, Entry("mean", torch.where(count == 0, torch.zeros_like(value), value), count))

    def total(self, name: str, value: float | Tensor) -> None:
        """Add to a sum over calls and ranks (tokens, skipped steps)."""
        self._add(name, Entry("total", _scalar(name, value), _scalar(name, 1)))

    def peak(self, name: str, value: float | Tensor) -> None:
        """Keep the largest value over calls and ranks (memory, durations)."""
        self._add(name, Entry("peak", _scalar(name, value), _scalar(name, 1)))

    def reduce(self, group: dist.ProcessGroup | None = None, *,
               device: torch.device | str = "cpu") -> dict[str, float]:
        """Global values in the order of recording, equal bit for bit on every rank; one all-gather of 2 KiB a rank.

        Every rank of the group calls this with the same names and kinds in the same order (RuntimeError on all ranks
        otherwise). A mean whose global count is 0 is left out. `device` is one that the group's backend can send from.
        """
        rows = _gather_rows(self._payload().to(device), group)  # [ranks, 2 + 2 * MAX_METRICS]
        self._check_agreement(rows)
        sums, peaks = rows.sum(0).tolist(), rows.amax(0).tolist()
        result = {}
        for slot, (name, entry) in enumerate(self._entries.items(), start=2):
            count = sums[slot + MAX_METRICS]
            if entry.kind == "peak":
                result[name] = peaks[slot]
            elif entry.kind == "total":
                result[name] = sums[slot]
            elif count != 0:
                result[name] = sums[slot] / count
        return result

    def _add(self, name: str, new: Entry) -> None:
        old = self._entries.get(name)
        if old is not None:
            assert old.kind == new.kind, f"metric {name} is recorded as {old.kind} and as {new.kind}"
            value = torch.maximum(old.value, new.value) if new.kind == "peak" else old.value + new.value
            new = Entry(new.kind, value, old.count + new.count)
        self._entries[name] = new

    def _payload(self) -> Tensor:
        """fp64 row of this rank: checksum of names and kinds, their number, values (padded), counts (padded)."""
        entries, num = self._entries, len(self._entries)
        assert num <= MAX_METRICS, f"{num} metrics in one step, more than MAX_METRICS = {MAX_METRICS}"
        row = torch.zeros(2 + 2 * MAX_METRICS, dtype=torch.float64)
        row[0] = zlib.crc32("\n".join(f"{entry.kind} {name}" for name, entry in entries.items()).encode())
        row[1] = num
        for slot, entry in enumerate(entries.values(), start=2):
            row[slot], row[slot + MAX_METRICS] = entry.value, entry.count
        return row

    def _check_agreement(self, rows: Tensor) -> None:
        odd = [rank for rank, row in enumerate(rows.tolist()) if row[:2] != rows[0, :2].tolist()]
        if odd:
            raise RuntimeError(f"metrics: rank {odd[0]} of the group recorded {int(rows[odd[0], 1])} names, rank 0 "
                               f"{int(rows[0, 1])}, and they differ (record the same names in the same order on every "
                               f"rank); this rank's: {', '.join(self._entries)}")


def _scalar(name: str, value: float | Tensor) -> Tensor:
    scalar = torch.as_tensor(value, dtype=torch.float64).detach()
    if scalar.numel() != 1:
        raise ValueError(f"metric {name}: expected a number, got a tensor of shape {tuple(scalar.shape)}")
    return scalar.reshape(())


def _gather_rows(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all ranks on the CPU. A gather, since one all-reduce cannot both add and take the maximum."""
    if not dist.is_initialized():
        return row.unsqueeze(0).cpu()
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return torch.stack(rows).cpu()


# ---------------------------------------------------------------------------------------------------------------------
# metrics.jsonl

class JsonlWriter:
    """Appends complete, flushed JSON lines to a file.

    On opening, lines of steps after `resumed_step` and a torn last line are cut (atomically), so that a resumed run
    has no step twice. A fresh run passes -1, which empties the file.
    """

    def __init__(self, path: str | Path, *, resumed_step: int) -> None:
        path = Path(path)
        if path.exists():
            _cut_after(path, resumed_step)
        self._file = path.open("ab", buffering=0)  # no buffer: a line is complete, or torn at the end of the file

    def write(self, step: int, values: dict[str, Any], *, kind: str = "train") -> None:
        """One line: step, time, kind (train | eval | event) and the values; NaN and infinities become null.

        OSError where there is no room for all of it.
        """
        line = {"step": step, "time": round(time.time(), 3), "kind": kind, **_finite_or_null(values)}
        rest = json.dumps(line, allow_nan=False).encode() + b"\n"
        while rest:  # a full disk takes a part without an error
            rest = rest[self._file.write(rest):]

    def close(self) -> None:
        self._file.close()


class Journal:
    """What a run tells while it goes on: lines in its metrics.jsonl, rows on the terminal. One rank `writes`."""

    def __init__(self, run_dir: str | Path, log: logging.Logger, console: Console, *, writes: bool, step: int,
                 resumed_from: Path | None, facts: dict[str, Any]) -> None:
        """facts: fields of the first event beside its message, such as the device."""
        self._log, self._console, self._writer = log, console, None
        if not writes:
            return
        self._writer = JsonlWriter(Path(run_dir) / "metrics.jsonl", resumed_step=step if resumed_from else -1)
        message = f"resumed from {resumed_from}" if resumed_from else "fresh run"
        log.info(message)
        event = {"event": "resumed" if resumed_from else "start", "message": message}
        self._writer.write(step, event | facts, kind="event")

    def training(self, step: int, values: dict[str, float], *, shown: bool) -> None:
        if self._writer is not None:
            self._writer.write(step, values)
            if shown:
                self._log.info(self._console.row(step, values))

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.write(step, values, kind="eval")
            listed = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in values.items())
            self._log.info(f"evaluation at {self._console.unit} {step}: {listed}")

    def event(self, step: int, event: str, message: str) -> None:
        if self._writer is not None:
            self._log.warning(f"{self._console.unit} {step}: {event}: {message}")
            self._writer.write(step, {"event": event, "message": message}, kind="event")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_jsonl(path: str | Path, *, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; a torn last line (a killed writer) is left out, another bad one is a ValueError."""
    raw_lines = Path(path).read_bytes().splitlines()
    lines = []
    for number, raw in enumerate(raw_lines, start=1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            if number == len(raw_lines):
                break
            raise ValueError(f"{path}:{number}: not JSON ({str(error)[:100]}); delete that line") from None
        missing = [key for key in required if key not in line] if isinstance(line, dict) else ["an object"]
        if missing:
            raise ValueError(f"{path}:{number}: lacks {missing[0]}; delete that line")
        lines.append(line)
    return lines


def _cut_after(path: Path, last_step: int) -> None:
    kept = [json.dumps(line) + "\n" for line in read_jsonl(path, required=("step",)) if line["step"] <= last_step]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------------------------------
# Terminal

class Column(NamedTuple):
    title: str
    key: str  # name of the metric
    width: int
    style: str  # fixed: 12.34 | number: 0.0012, then 1.2e-05 | exponent: 1.20e-05 | count: 12.3k
    decimals: int = 4
    scale: float = 1.0


OPD_COLUMNS = (
    Column("loss", "loss", 8, "number"),
    Column("S mass", "student_mass", 6, "fixed"),
    Column("T mass", "teacher_mass", 6, "fixed"),
    Column("overlap", "overlap_ratio", 7, "fixed"),
    Column("entropy", "student_entropy", 7, "fixed"),
    Column("length", "response_length", 7, "fixed", decimals=1),
    Column("trunc %", "truncated_frac", 7, "fixed", decimals=1, scale=100.0),
    Column("grad", "grad_norm", 8, "number"),
    Column("lr", "lr", 8, "exponent"),
    Column("roll s", "time/roll_s", 7, "fixed", decimals=2),
    Column("wait s", "time/teacher_wait_s", 7, "fixed", decimals=2),
    Column("train s", "time/train_s", 7, "fixed", decimals=2),
    Column("teach s", "time/teacher_busy_s", 7, "fixed", decimals=2),
    Column("tok/s", "tokens_per_s", 6, "count"),
)
DMD_COLUMNS = (
    Column("|g|", "dmd/gradient_norm", 8, "number"),
    Column("gap", "dmd/teacher_fake_gap", 8, "number"),
    Column("fake loss", "fake_score/loss", 9, "number"),
    Column("x std", "student/sample_std", 6, "fixed"),
    Column("S grad", "student/grad_norm", 8, "number"),
    Column("F grad", "fake_score/grad_norm", 8, "number"),
    Column("lr", "student/lr", 8, "exponent"),
    Column("student s", "time/student_s", 9, "fixed", decimals=2),
    Column("fake s", "time/fake_score_s", 6, "fixed", decimals=2),
    Column("cycle s", "time/cycle_s", 7, "fixed", decimals=2),
    Column("samples/s", "samples_per_s", 9, "count"),
)


class Console:
    """Aligned rows of a run, for one rank to print: S = student, T = teacher, F = fake score, eta = time left.

    `unit` is what a step is called. The eta rests on a moving average of the time between rows (so evaluations count),
    which leaves out the first step.
    """

    def __init__(self, max_steps: int, *, columns: Sequence[Column] = OPD_COLUMNS, unit: str = "step",
                 title_every: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_steps, self._columns, self._title_every, self._clock = max_steps, columns, title_every, clock
        self.unit, self._step_title = unit, f"{unit}/max"
        self._num_rows = 0
        self._last: tuple[int, float] | None = None  # step and time of the row before
        self._step_s = self._weight = 0.0  # moving average, and the weight it has gathered (bias correction)

    def row(self, step: int, values: dict[str, float]) -> str:
        """The row of a step, without a final newline; every `title_every` rows the title line stands before it."""
        cells = [self._step_cell(step), *(_cell(column, values.get(column.key)) for column in self._columns),
                 fit_text(self._eta(step), 6)]
        titled = self._num_rows % self._title_every == 0
        self._num_rows += 1
        return (self.title() + "\n" if titled else "") + " ".join(cells)

    def title(self) -> str:
        titles = [column.title.rjust(column.width) for column in self._columns]
        return " ".join([self._step_title.rjust(self._step_width()), *titles, "eta".rjust(6)])

    def _step_width(self) -> int:
        return max(2 * len(str(self._max_steps)) + 1, len(self._step_title))

    def _step_cell(self, step: int) -> str:
        return fit_text(f"{step}/{self._max_steps}", self._step_width())

    def _eta(self, step: int) -> str:
        now_s, last = self._clock(), self._last
        self._last = (step, now_s)
        if last is not None and step > last[0]:
            self._step_s = 0.9 * self._step_s + 0.1 * (now_s - last[1]) / (step - last[0])
            self._weight = 0.9 * self._weight + 0.1
        if self._weight == 0.0:
            return "-"
        return human_time(max(self._max_steps - step, 0) * self._step_s / self._weight)


def _cell(column: Column, value: float | None) -> str:
    if value is None:
        return "-".rjust(column.width)
    if column.style == "count":
        return fit_text(human_count(value * column.scale), column.width)
    return fit_number(value * column.scale, column.width, style=column.style, decimals=column.decimals)


def fit_number(value: float, width: int, *, style: str = "number", decimals: int = 4) -> str:
    """Right-aligned in exactly `width` characters, with as many decimals (at most `decimals`) as fit; #### if none."""
    fixed = [f"{value:.{digits}f}" for digits in range(decimals, -1, -1)]
    exponent = [f"{value:.{digits}e}" for digits in (2, 1, 0)]
    is_tiny = value != 0 and abs(value) < 10.0 ** (1 - decimals)  # fixed point would keep less than two digits
    candidates = exponent if style == "exponent" or (style == "number" and is_tiny) else fixed + exponent
    return next((text for text in candidates if len(text) <= width), "#" * width).rjust(width)


def fit_text(text: str, width: int) -> str:
    return text.rjust(width) if len(text) <= width else "#" * width


def table(rows: Sequence[Sequence[object]], titles: Sequence[str]) -> str:
    """Aligned text table with a rule under the titles; columns of numbers are right-aligned, others left-aligned."""
    columns = list(zip(titles, *[[str(cell) for cell in row] for row in rows], strict=True))
    aligned = []
    for title, *cells in columns:
        width = max(map(len, [title, *cells]))
        is_number = bool(cells) and all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
        lines = [title, "-" * width, *cells]
        aligned.append([line.rjust(width) if is_number else line.ljust(width) for line in lines])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def human_count(value: float) -> str:
    """Three digits and a decimal unit: 950, 12.3k, 135M, 1.72B."""
    if not math.isfinite(value):
        return str(value)
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            break
        value /= 1000
    else:
        unit = "T"
    if unit == "" and float(value).is_integer():
        return str(int(value))
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}{unit}"


def human_bytes(value: float) -> str:
    """Binary units: 512 B, 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.995:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def human_time(seconds: float) -> str:
    """At most six characters up to 9999 days: 4.2s, 37s, 3m05s, 1h02m, 2d03h, 412d."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if hours == 0:
        return f"{minutes}m{whole % 60:02d}s"
    if days == 0:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{days}d{hours % 24:02d}h" if days < 100 else f"{days}d"
