#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install what the tests need into .venv and run them:   bash launch/test.sh [pytest arguments]
#   TORCH='torch==2.11.0' VENV=.venv211 bash launch/test.sh        another torch, in an environment of its own
#   TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu' bash launch/test.sh      no CUDA libraries
# Packages that are there already are not looked up again, so that a second run needs no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
python=$venv/bin/python

[[ -x $python ]] || python3 -m venv "$venv"
if [[ -n ${TORCH:-} ]] || ! "$python" -m pip show -qq torch; then
    # Pinned, so that a CPU wheel of this version (pip's find-links, the index above) is taken where there is one; a
    # plain `torch` takes a newer release with gigabytes of CUDA. $TORCH is unquoted: it may carry options for pip.
    "$python" -m pip install -q ${TORCH:-torch==2.13.0}
fi
"$python" -m pip install -q -r requirements.txt -r requirements-text.txt -r requirements-test.txt

# The tests of several processes share the cores: one thread a process is faster, and the same everywhere.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[[ $# -eq 0 ]] || exec "$python" -m pytest "$@"

# Most tests keep one core busy, so two runs share the two: the long jobs in one, everything else in the other.
long=(tests/test_{quickstart,torchrun,train_opd}.py)
output=$(mktemp)
trap 'rm -f "$output"' EXIT
"$python" -m pytest "${long[@]}" >"$output" 2>&1 &
code=0
"$python" -m pytest "${long[@]/#/--ignore=}" || code=$?
wait $! || code=$?
cat "$output"
exit "$code"
