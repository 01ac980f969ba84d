#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train on this machine:   [NPROC=4] bash launch/torchrun_1node.sh CONFIG [key=value ...]
# NPROC: ranks; by default the config's topology.world_size, else one for each GPU.
# `kill PID` of this script, or `touch RUN/STOP`: the run ends after its step, with a checkpoint. Ctrl-C: it ends now.
# The same command again resumes.
set -euo pipefail

die() {
    echo "torchrun_1node.sh: $1" >&2
    exit 2
}
(( $# >= 1 )) || die "usage: bash launch/torchrun_1node.sh CONFIG [key=value ...]"
config=$(realpath -- "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."  # the paths in configs/ start at the project

# A bad config ends here with its one line and exit code 2: under torchrun that line would drown in tracebacks.
resolved=$(python -m distill_core.config "$config" "$@")
fields=$(python -c '
import sys, yaml
c = yaml.safe_load(sys.stdin)
print(c["job"], c["run_root"] + "/" + c["name"], c["topology"]["world_size"] or "gpu", sep="\n")' <<<"$resolved")
{ read -r job; read -r run; read -r world_size; } <<<"$fields"
ranks=${NPROC:-$world_size}
[[ $ranks != gpu ]] || ranks=$(python -c 'import torch; print(torch.cuda.device_count())')
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "'$ranks' ranks: no GPU here, so set NPROC=N or topology.world_size=N"
python "train_$job.py" --config "$config" "$@" topology.world_size="$ranks" --check

# Answers and micro-batches of ever new lengths fragment memory that is cut into segments of fixed size.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# More threads than cores and the ranks wait for each other; unset, torchrun takes one thread a rank.
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > ranks ? cores / ranks : 1 ))}
# NCCL's own line names the link or library that failed; the Python error does not.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A collective that timed out ends its rank instead of leaving it on a spinning GPU (some clusters switch this off).
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# The last collectives of each rank, written here on a timeout: they tell which rank was missing, and where.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_FR_DUMP_TEMP_FILE=$run/nccl_trace_rank_
# torchrun's --shutdown-timeout, by the name that versions without it ignore: when one rank has failed, the others,
# stuck in a collective, are killed after 5 s and not 30. A wanted stop goes through the STOP file and has all
# its time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-5}

mkdir -p "$run"
rm -f "$run"/{STOP,PREEMPTED,DONE}
trap 'signalled=yes; touch "$run/STOP"' TERM USR1
# --max-restarts=0: a restart would begin with some ranks half dead; the same command resumes.
torchrun --standalone --nproc_per_node="$ranks" --max-restarts=0 "train_$job.py" --config "$config" "$@" &
torchrun_pid=$!
while :; do
    signalled=no  # a trap makes `wait` return at once, with the signal's code
    wait "$torchrun_pid" && code=0 || code=$?
    [[ $signalled == yes ]] || exit "$code"
done
