#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What only a GPU can show, in under 5 minutes on one:   bash launch/gpu_check.sh
# The `gpu` tests, then a table: bf16 against fp32, graph decode, sparse head, decode speed against the memory's
# bandwidth, training-step MFU. Appends the table to tests/bench/results.jsonl (RESULTS=FILE: to another one). Needs the
# five packages of requirements.txt, with a CUDA build of torch. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}

found=$("$python" -c 'import torch; print(torch.cuda.is_available())')  # no torch: this ends here
if [[ $found != True ]]; then
    echo "gpu_check.sh: skipped, nothing was checked: torch sees no CUDA device here"
    exit 0
fi
# One GPU is what it measures, and no other one is touched.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
code=0
"$python" -m pytest -q -m gpu tests/test_gpu.py || code=$?
"$python" tests/bench/bench_gpu.py --results "${RESULTS:-tests/bench/results.jsonl}" || code=$?
exit "$code"
