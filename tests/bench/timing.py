# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: a row of the table, times of functions that take turns, peak memory, machine and versions.

    first_s, second_s = fastest_s([first, second], rounds=3)
    print_rows([Row("sum", "loop", first_s / second_s, f"{first_s:.3f} s / {second_s:.3f} s", reach="<= 0.5")])
"""
from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler, before it is loaded

import torch
from torch.profiler import ProfilerActivity, profile

PACKAGES = ("torch", "numpy", "safetensors", "transformers")


@dataclass(frozen=True)
class Row:
    """One line of the table. ratio: ours / theirs, or theirs / ours where `reach` begins with >=."""

    what: str
    against: str
    ratio: float | None  # None: not measured, `measured` says why
    measured: str  # absolute numbers, ours first
    reach: str = ""  # such as "<= 0.6"; empty: nothing to reach

    @property
    def verdict(self) -> str:
        if self.ratio is None or not self.reach:
            return ""
        sign, limit = self.reach.split()
        reached = self.ratio <= float(limit) if sign == "<=" else self.ratio >= float(limit)
        return "reached" if reached else "MISSED"


def print_rows(rows: Sequence[Row]) -> None:
    """Two lines a row: the second one has the absolute numbers."""
    for row in rows:
        ratio = "     -" if row.ratio is None else f"{row.ratio:6.3g}"
        print(f"{ratio} x  {row.reach or '-':8} {row.verdict:8} {row.what}  |  against {row.against}")
        print(f"{'':28}{row.measured}", flush=True)


def append_results(path: Path, rows: Iterable[Row], **facts: object) -> None:
    """One JSON object a row, with date, machine, versions and `facts`."""
    common = {"date": datetime.datetime.now().isoformat(timespec="minutes"), **machine(), **versions(), **facts}
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**common, **asdict(row), "verdict": row.verdict}) + "\n")


def machine() -> dict[str, object]:
    """load: running processes before the benchmark, which is 0 on a quiet machine."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
               platform.processor() or platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def fastest_s(fns: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Fastest of `rounds` for each function, the functions taking turns; one unmeasured round first."""
    return [min(times) for times in turns_s(fns, rounds)]


def turns_s(fns: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each function in each round; they take turns, so that a busy machine slows all of them."""
    times: list[list[float]] = [[] for _ in fns]
    for index in range(rounds + 1):
        for which, fn in enumerate(fns):
            seconds = seconds_of(fn)
            if index:
                times[which].append(seconds)
    return times


def seconds_of(fn: Callable[[], object]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def peak_extra_bytes(fn: Callable[[], object]) -> int:
    """Highest sum of live CPU allocations made by `fn`, its result included: temporaries inside a kernel count too, the
    noise of resident-set sizes does not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = fn()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak

