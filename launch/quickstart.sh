#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A real on-policy distillation on two CPU cores:   bash launch/quickstart.sh [key=value ...]
# Makes .venv, installs the five packages, and trains the small shipped student with the shipped teacher on 2 + 1 ranks.
#   VENV=/path/to/venv   an environment of your own;   TORCH='torch==2.11.0'   another torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} != opd ]] || shift
venv=${VENV:-.venv}
python=$venv/bin/python

[[ -x $python ]] || python3 -m venv "$venv"
if [[ -n ${TORCH:-} ]] || ! "$python" -m pip show -qq torch; then
    # Pinned: a plain `torch` would take the newest release, on Linux with gigabytes of CUDA.
    "$python" -m pip install -q ${TORCH:-torch==2.13.0}
fi
"$python" -m pip install -q -r requirements.txt

export OMP_NUM_THREADS=1  # three ranks share two cores
"$python" train_opd.py --config configs/quickstart.yaml "$@" --check
# A fresh start each time: the same command on an old run folder would resume it.
run=$("$python" -m distill_core.config configs/quickstart.yaml "$@" | "$python" -c '
import sys, yaml
c = yaml.safe_load(sys.stdin)
print(c["run_root"] + "/" + c["name"])')
rm -rf -- "$run"
exec "$python" -m torch.distributed.run --standalone --nproc_per_node=3 --max-restarts=0 \
    train_opd.py --config configs/quickstart.yaml "$@"
