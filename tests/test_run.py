# SPDX-License-Identifier: Apache-2.0
"""The run folder: stop requests, markers, the lock of a running job, how failures are told."""
from __future__ import annotations

import os
import signal

import pytest

from distill_core import run


@pytest.fixture(autouse=True)
def restore_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop_and_its_echo_is_the_same_request(tmp_path, monkeypatch, number):
    """Catches a worker killed without a checkpoint because the signal came directly and again through torchrun."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    stop = run.StopRequest(tmp_path)
    assert not stop.wanted()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert stop.wanted() and exits == []
    monkeypatch.setattr(run, "REPEAT_S", -1.0)  # as if the next one came later
    os.kill(os.getpid(), number)
    assert exits == [128 + number]


def test_a_stop_file_counts_unless_an_earlier_run_has_obeyed_it(tmp_path):
    """Catches a stop asked for during start-up that the start erases, and an old one that ends every new start."""
    (tmp_path / "STOP").touch()
    run.open_run(tmp_path, "x: 1\n", 0).handlers.clear()
    assert run.StopRequest(tmp_path).wanted()
    (tmp_path / "PREEMPTED").touch()
    (tmp_path / "error.txt").write_text("old")
    run.open_run(tmp_path, "x: 1\n", 0).handlers.clear()
    assert not run.StopRequest(tmp_path).wanted()
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml", "command.txt", "log_rank0.txt"}


def test_a_second_job_in_the_same_folder_is_refused(tmp_path):
    """Catches two jobs that overwrite each other's metrics and checkpoints."""
    lock = run.lock_run(tmp_path)
    with pytest.raises(ValueError, match="another job is running"):
        run.lock_run(tmp_path)
    lock.close()
    run.lock_run(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused_early(tmp_path):
    """Catches a run that trains for hours and then cannot save."""
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(ValueError, match="not a folder that can be written"):
            run.check_run_dir(bad)
    run.check_run_dir(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_user_errors_are_one_line_and_ours_carry_a_traceback(tmp_path, capsys):
    """Catches a traceback for a typo, a bug told without one, and an error that hides behind a failing report."""
    for is_user_error in (True, False):
        run.report_failure(ValueError("bad\nvalue"), tmp_path / "run", rank=1, role="student", is_user_error=is_user_error)
        err = capsys.readouterr().err
        assert err.startswith("error: rank 1 (student): bad value\n") and ("ValueError" in err) != is_user_error
    assert (tmp_path / "run/error.txt").read_text().count("error: rank 1") == 2
    (tmp_path / "file").write_text("")
    run.report_failure(ValueError("cause"), tmp_path / "file", rank=0, role="student", is_user_error=True)
    assert "cause" in capsys.readouterr().err
