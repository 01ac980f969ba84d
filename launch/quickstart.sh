#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real distillation on two CPU cores, in minutes:
#   bash launch/quickstart.sh [opd] [key=value ...]    a small language model learns arithmetic from the shipped teacher
#   bash launch/quickstart.sh dmd [key=value ...]      students of 4 steps and of 1 learn to draw digits from a flow model
# Makes .venv and installs the five packages.
#   VENV=/path/to/venv   an environment of your own;   TORCH='torch==2.11.0'   another torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
job=opd
[[ ${1:-} != opd && ${1:-} != dmd ]] || { job=$1; shift; }
[[ $job == opd ]] || for override; do  # the two runs differ in these, and the table compares them
    case $override in
        name=* | dmd.student_steps=* | teacher.path=*)
            echo "quickstart.sh: dmd trains two students: ${override%%=*} cannot be set (set run_root, or run" \
                "launch/torchrun_1node.sh with a config of your own)" >&2
            exit 2 ;;
    esac
done
venv=${VENV:-.venv}
python=$venv/bin/python

[[ -x $python ]] || python3 -m venv "$venv"
if [[ -n ${TORCH:-} ]] || ! "$python" -m pip show -qq torch; then
    # Pinned: a plain `torch` would take the newest release, on Linux with gigabytes of CUDA.
    "$python" -m pip install -q ${TORCH:-torch==2.13.0}
fi
"$python" -m pip install -q -r requirements.txt

export OMP_NUM_THREADS=1  # the ranks share two cores

# train RANKS CONFIG [key=value ...]: a run; its folder is left in $run.
train() {
    local ranks=$1 config=$2
    shift 2
    "$python" "train_$job.py" --config "$config" "$@" --check
    run=$("$python" -m distill_core.config "$config" "$@" | "$python" -c '
import sys, yaml
c = yaml.safe_load(sys.stdin)
print(c["run_root"] + "/" + c["name"])')
    # A finished run starts anew; one that was stopped goes on.
    [[ ! -e $run/DONE ]] || rm -rf -- "$run"
    "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" --max-restarts=0 \
        "train_$job.py" --config "$config" "$@" &
    # `kill` of this script is a request to stop, as in torchrun_1node.sh: torchrun would leave the workers behind.
    trap 'touch "$run/STOP"' TERM USR1
    local launcher=$! code=0
    wait "$launcher" || code=$?
    while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" && code=0 || code=$?; done
    trap - TERM USR1
    return "$code"
}

if [[ $job == opd ]]; then
    train 3 configs/quickstart.yaml "$@"
    exit
fi

# sample NAME FOLDER [option ...]: 4,000 samples and a grid of them, from the same noise for every row of the table.
sample() {
    rm -f "$out/$1".{npz,png}
    "$python" -m distill_core.sample --export "$2" --out "$out/$1.npz" --num 4000 --png "$out/$1.png" "${@:3}"
    rows+=("$out/$1.npz")
}

teacher=examples/digits/teacher rows=()
train 1 configs/dmd_digits.yaml "$@"
out=$run/table four=$run
train 1 configs/dmd_digits_1step.yaml "$@"
one=$run
mkdir -p "$out"
for steps in 50 8 4 2; do sample "teacher, $steps steps" "$teacher" --steps "$steps"; done
sample "teacher, 1 step" "$teacher" --steps 1
for name in four one; do
    rm -rf "${!name}/export"
    "$python" -m distill_core.export --checkpoint "${!name}" --out "${!name}/export"
done
sample "student, 4 steps" "$four/export"
sample "student, 1 step" "$one/export"
echo
"$python" examples/digits/measure.py "${rows[@]}"
echo "grids of samples: $out/*.png; curves: $four/report.html, $one/report.html"
