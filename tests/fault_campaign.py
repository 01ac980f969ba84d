# SPDX-License-Identifier: Apache-2.0
"""Kill, stop and preempt real runs of both jobs at random times, resume them, and compare with runs left alone.

    OMP_NUM_THREADS=1 python tests/fault_campaign.py --kills 30 --stops 4 --terms 8       # seven minutes on 2 busy cores

Every fault hits a random rank at a random moment, of start-up too. The job must end by itself (a stopped rank is killed
after the others, as torchrun would), and once a run has reached its last step, all metrics of all steps must equal
those of the run that was left alone, bit for bit. Exit code 1, and the folder stays, if anything is otherwise.
"""
from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from test_failures import DEADLINE_S, ROLES, Runs  # noqa: E402  (needs the path above)

from distill_core.metrics import table  # noqa: E402

LIMIT = {"opd": "max_steps", "dmd": "max_cycles"}
STEPS = 20
SAVING = {"every": 3}


@dataclass
class Tally:
    """What has happened to one job."""

    tried: Counter = field(default_factory=Counter)  # by signal and role
    starts: int = 0
    lost: list[int] = field(default_factory=list)  # steps that a start had to do again
    slowest_s: float = 0.0  # from the fault to the end of the last rank
    runs: int = 0
    wrong: list[str] = field(default_factory=list)


def campaign(kind: str, signals: list[int], folder: Path, rng: random.Random) -> Tally:
    """Runs to the end, one after another, until every signal has been sent."""
    tally, limit = Tally(), f"{LIMIT[kind]}={STEPS}"
    straight, began = Runs(kind, folder, "straight", checkpoint=SAVING), time.monotonic()
    codes = straight.start(limit).wait(DEADLINE_S)
    assert not any(codes), f"{kind}: the run that is left alone fails, see {folder}"
    straight_s = time.monotonic() - began
    while signals:
        tally.runs += 1
        runs = Runs(kind, folder, f"run{tally.runs}", checkpoint=SAVING)
        try:
            while not one_start(runs, limit, signals, straight_s, rng, tally):
                pass
        except AssertionError as problem:
            tally.wrong.append(f"{runs.run_dir}: {problem}")
            continue
        if runs.curve() != straight.curve():
            tally.wrong.append(f"{runs.run_dir}: other numbers than {straight.run_dir}")
    return tally


def one_start(runs: Runs, limit: str, signals: list[int], straight_s: float, rng: random.Random, tally: Tally) -> bool:
    """Start, send the next signal at some moment, wait for the end; whether the run is complete."""
    before, victim = max(runs.curve(), default=0), None
    job = runs.start(limit)
    tally.starts += 1
    if signals:
        time.sleep(rng.uniform(0.1, straight_s))
        if alive := job.alive():
            victim, number = rng.choice(alive), signals.pop()
            os.kill(job.pids[victim], number)
            tally.tried[f"{signal.Signals(number).name} to {ROLES[runs.kind][victim]}"] += 1
    sent, stops = time.monotonic(), victim is not None and number == signal.SIGSTOP
    codes = job.wait(DEADLINE_S, leaving=[victim] if stops else [])
    job.kill()
    tally.slowest_s = max(tally.slowest_s, max(job.ended) - sent if victim is not None else 0.0)
    resumed = re.search(r"^(?:resumed from .*/step_(\d+)|fresh run)$", job.output(0), flags=re.MULTILINE)
    if resumed:  # else the signal came during start-up
        tally.lost.append(before - int(resumed[1] or 0))
    if any(codes) and not (runs.run_dir / "error.txt").exists() and max(runs.curve(), default=0) < STEPS:
        assert resumed is None, f"ended with {codes} and told no cause"
    return not any(codes) and (runs.run_dir / "DONE").exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("kills", 30), ("stops", 2), ("terms", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="faults_"))
    signals = [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.stops + [signal.SIGTERM] * args.terms
    rng.shuffle(signals)
    rows, wrong = [], []
    for turn, kind in enumerate(ROLES):
        (folder / kind).mkdir()
        tally = campaign(kind, signals[turn::len(ROLES)], folder / kind, rng)
        wrong += tally.wrong
        rows += [(kind, what, count) for what, count in sorted(tally.tried.items())]
        rows += [(kind, "starts", tally.starts), (kind, "runs completed", tally.runs - len(tally.wrong)),
                 (kind, "most steps done again", max(tally.lost)), (kind, "slowest end, s", round(tally.slowest_s, 1)),
                 (kind, "runs with other numbers, or none", len(tally.wrong))]
    print(table(rows, ("job", "what", "number")), *wrong, sep="\n")
    if not wrong:
        shutil.rmtree(folder)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
