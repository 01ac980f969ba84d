# SPDX-License-Identifier: Apache-2.0
"""launch/: the shell scripts run as they are, with stand-ins for python, torchrun, srun and scontrol first on PATH.

The stand-ins write what they were called with into a file; `work` is a line of shell that torchrun does in place of
training.
"""
from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SBATCH, ONE_NODE = ROOT / "launch" / "opd.sbatch", ROOT / "launch" / "torchrun_1node.sh"
DMD_SBATCH = ROOT / "launch" / "dmd.sbatch"
SCRIPTS = [path for path in sorted([*ROOT.glob("launch/*"), ROOT / ".ci" / "run"]) if path.is_file()]
STAND_INS = {
    "python": f"""
        case "$*" in
            "-m distill_core.config "*)
                printf 'job: %s\\nname: a run\\nrun_root: %s\\ntopology:\\n  world_size: 3\\n' "$JOB" "$HERE" ;;
            *--check) echo "check $*" >>"$HERE/calls"; exit "$CHECK_CODE" ;;
            *) exec {shlex.quote(sys.executable)} "$@" ;;
        esac""",
    "torchrun": """
        echo "torchrun $*" >>"$HERE/calls"
        for word; do echo "<$word>"; done >"$HERE/words"
        eval "$WORK" """,
    "srun": """
        echo "srun $*" >>"$HERE/calls"
        while [[ $1 == --* ]]; do shift; done
        "$@" """,
    "scontrol": """
        echo "scontrol $*" >>"$HERE/calls"
        case "$2" in hostnames) printf 'node7\\nnode8\\n' ;; job) echo "JobId=1 $JOB_STATE" ;; esac""",
}


def start(script: Path, folder: Path, *words: str, work: str = "true", **env: str) -> subprocess.Popen[str]:
    """`script` in a process of its own, with the run folder at folder/'a run'."""
    stand_ins = folder / "bin"
    stand_ins.mkdir(exist_ok=True)
    for name, body in STAND_INS.items():
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stand_ins / name).chmod(0o755)
    base = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "HERE": str(folder), "RUN": str(folder / "a run"),
            "WORK": work, "JOB": "opd", "CHECK_CODE": "0", "JOB_STATE": "JobState=RUNNING", "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "41003", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32"}
    return subprocess.Popen(["bash", str(script), *words], cwd=folder, env=base | env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(script: Path, folder: Path, *words: str, **options: str) -> tuple[int, str]:
    """(exit code, output) of `script`."""
    process = start(script, folder, *words, **options)
    output, _ = process.communicate(timeout=20)
    return process.returncode, output


def calls(folder: Path) -> str:
    path = folder / "calls"
    return path.read_text() if path.exists() else ""


def wait_for(folder: Path, text: str) -> None:
    deadline = time.monotonic() + 15
    while text not in calls(folder):
        assert time.monotonic() < deadline, f"'{text}' was never called: {calls(folder)}"
        time.sleep(0.02)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    """Catches a syntax error in a branch that no other test enters."""
    subprocess.run(["bash", "-n", str(script)], check=True)


# ---------------------------------------------------------------------------------------------------------------------
# opd.sbatch


@pytest.mark.parametrize("job, script", [("opd", SBATCH), ("dmd", DMD_SBATCH)])
def test_sbatch_starts_one_torchrun_a_node(tmp_path, job, script):
    """Catches a wrong rendezvous, lost arguments, a check that knows nothing of the real number of ranks."""
    code, output = run(script, tmp_path, "c.yaml", "name=a run", work='touch "$RUN/DONE"', JOB=job)
    assert code == 0, output
    check, *_, torchrun = (line for line in calls(tmp_path).splitlines() if not line.startswith("scontrol"))
    assert check == f"check train_{job}.py --config c.yaml name=a run topology.world_size=8 --check"
    assert torchrun == ("torchrun --nnodes=2 --nproc_per_node=4 --max-restarts=0 --rdzv-backend=c10d "
                        f"--rdzv-endpoint=node7:11003 --rdzv-id=41003-0 train_{job}.py --config c.yaml name=a run")
    assert "<name=a run>" in (tmp_path / "words").read_text().splitlines()
    assert f"--output={tmp_path}/a run/slurm/41003-0-%N.log" in calls(tmp_path)


def test_sbatch_requeues_after_usr1(tmp_path):
    """Catches a signal that ends the script, or its wait, before the ranks have published their checkpoint."""
    work = 'until [[ -e "$RUN/STOP" ]]; do sleep 0.02; done; sleep 0.2; touch "$RUN/PREEMPTED"; exit 1'

    def requeues(script: Path, folder: Path) -> bool:
        folder.mkdir()
        process = start(script, folder, "c.yaml", work=work)
        wait_for(folder, "torchrun")
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=20)
        return process.returncode == 0 and "scontrol requeue 41003" in calls(folder)

    assert requeues(SBATCH, tmp_path / "as_is")
    broken = tmp_path / "broken.sbatch"  # control: one wait, no loop
    body = (ROOT / "launch/slurm_job.sh").read_text()
    broken.write_text(SBATCH.read_text().replace(
        "source launch/slurm_job.sh", body.replace("[[ $signalled == yes ]] || break", "break")))
    assert not requeues(broken, tmp_path / "control")


def test_sbatch_done_ends_the_chain(tmp_path):
    """Catches a verdict by torchrun's exit code, which is 1 after any signal."""
    code, _ = run(SBATCH, tmp_path, "c.yaml", work='touch "$RUN"/{DONE,PREEMPTED}; exit 1')
    assert code == 0 and "requeue" not in calls(tmp_path)


def test_sbatch_keeps_the_code_of_a_crash(tmp_path):
    """Catches a crash loop, and a DONE of an earlier run in the same folder that hides the crash."""
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "DONE").touch()
    code, output = run(SBATCH, tmp_path, "c.yaml", work="exit 7")
    assert code == 7 and "requeue" not in calls(tmp_path)
    assert "ended without DONE or PREEMPTED (exit code 7)" in output


def test_sbatch_without_a_marker_is_a_failure(tmp_path):
    """Catches ranks that leave early with code 0 and pass for a finished run."""
    assert run(SBATCH, tmp_path, "c.yaml", work="exit 0")[0] == 1


def test_sbatch_gives_up_without_progress(tmp_path):
    """Catches a job that is requeued for ever though no checkpoint is ever added; progress starts the count anew."""
    stop = 'touch "$RUN/PREEMPTED"'
    save = 'mkdir -p "$RUN/checkpoints"; echo step_00000020 >"$RUN/checkpoints/latest"; ' + stop
    codes = [run(SBATCH, tmp_path, "c.yaml", work=work, SLURM_RESTART_COUNT=str(attempt), MAX_IDLE_REQUEUES="1")[0]
             for attempt, work in enumerate((stop, save, stop, stop))]
    assert codes == [0, 0, 0, 1]
    assert calls(tmp_path).count("scontrol requeue") == 3


@pytest.mark.parametrize("work, state", [('touch "$RUN"/{STOP,PREEMPTED}', "RUNNING"),
                                         ('touch "$RUN/PREEMPTED"', "COMPLETING")], ids=["by_hand", "scancel"])
def test_sbatch_leaves_a_stopped_job_stopped(tmp_path, work, state):
    """Catches a job that comes back after a person touched STOP, or after scancel."""
    code, output = run(SBATCH, tmp_path, "c.yaml", work=work, JOB_STATE=f"JobState={state}")
    assert code == 0 and "requeue " not in calls(tmp_path)
    assert "resumes it" in output


@pytest.mark.parametrize("env, cause", [({"SLURM_JOB_ID": "4; touch x"}, "SLURM_JOB_ID is '4; touch x'"),
                                        ({"SLURM_GPUS_ON_NODE": ""}, "set NPROC=N"),
                                        ({"SLURM_SUBMIT_DIR": "/"}, "submit from there")],
                         ids=["job_id", "gpus", "folder"])
def test_sbatch_refuses_in_one_line(tmp_path, env, cause):
    """Catches a job id or rank count that is used unchecked."""
    code, output = run(SBATCH, tmp_path, "c.yaml", **env)
    assert code == 2 and cause in output and len(output.splitlines()) == 1
    assert "srun" not in calls(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# torchrun_1node.sh


def test_one_node_passes_everything_on(tmp_path):
    """Catches lost quoting, a rank count other than the config's, a config that is looked for in another folder."""
    code, output = run(ONE_NODE, tmp_path, "c.yaml", "name=a run")
    assert code == 0, output
    command = f"train_opd.py --config {tmp_path}/c.yaml name=a run"
    assert calls(tmp_path).splitlines() == [
        f"check {command} topology.world_size=3 --check",
        f"torchrun --standalone --nproc_per_node=3 --max-restarts=0 {command}"]
    assert "<name=a run>" in (tmp_path / "words").read_text().splitlines()


@pytest.mark.parametrize("script", [SBATCH, ONE_NODE], ids=lambda path: path.name)
def test_a_failing_check_never_reaches_torchrun(tmp_path, script):
    """Catches a bad config that starts ranks; and an old run's markers that are removed by a run that never starts."""
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "DONE").touch()
    code, _ = run(script, tmp_path, "c.yaml", CHECK_CODE="2")
    assert code == 2 and "torchrun" not in calls(tmp_path)
    assert (tmp_path / "a run" / "DONE").exists()


def test_one_node_keeps_the_exit_code(tmp_path):
    """Catches a failed training that passes for a good one."""
    assert run(ONE_NODE, tmp_path, "c.yaml", work="exit 7", NPROC="2")[0] == 7
    assert "--nproc_per_node=2" in calls(tmp_path)


def test_one_node_turns_term_into_a_stop_file(tmp_path):
    """Catches a TERM that kills the ranks in the middle of a step, or ends the script before them."""
    process = start(ONE_NODE, tmp_path, "c.yaml",
                    work='until [[ -e "$RUN/STOP" ]]; do sleep 0.02; done; sleep 0.2; touch "$RUN/PREEMPTED"; exit 5')
    wait_for(tmp_path, "torchrun")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 5 and (tmp_path / "a run" / "PREEMPTED").exists()


def test_one_node_without_ranks_or_config(tmp_path):
    """Catches a rank count that is no number, and a bare call, each told in one line."""
    code, output = run(ONE_NODE, tmp_path, "c.yaml", NPROC="some")
    assert code == 2 and "'some' ranks" in output and len(output.splitlines()) == 1
    code, output = run(ONE_NODE, tmp_path)
    assert code == 2 and "usage:" in output
