# SPDX-License-Identifier: Apache-2.0
# What opd.sbatch and dmd.sbatch do, sourced by them from the project's folder with $script as their name: check the
# config, start one torchrun on each node, and requeue the job when it has been stopped before its end.
MAX_IDLE_REQUEUES=${MAX_IDLE_REQUEUES:-3}  # requeues in a row without a new checkpoint, before the job gives up

die() {
    echo "$script: $1" >&2
    exit 2
}
(( $# >= 1 )) || die "usage: sbatch [--nodes=N] launch/$script CONFIG [key=value ...]"
config=$1
shift
job_id=${SLURM_JOB_ID:-} attempt=${SLURM_RESTART_COUNT:-0} nodes=${SLURM_NNODES:-1}
ranks=${NPROC:-${SLURM_GPUS_ON_NODE:-}} cpus=${SLURM_CPUS_PER_TASK:-1}
[[ $job_id =~ ^[0-9]+$ ]] || die "SLURM_JOB_ID is '$job_id': submit this script with sbatch"
[[ $attempt =~ ^[0-9]+$ ]] || die "SLURM_RESTART_COUNT is '$attempt', not a number"
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "SLURM_GPUS_ON_NODE is '$ranks': ask for --gpus-per-node, or set NPROC=N"

# A bad config ends here with its one line and exit code 2, before any other node is bothered.
resolved=$(python -m distill_core.config "$config" "$@")
fields=$(python -c '
import sys, yaml
c = yaml.safe_load(sys.stdin)
print(c["job"], c["run_root"] + "/" + c["name"], sep="\n")' <<<"$resolved")
{ read -r job; read -r run; } <<<"$fields"
python "train_$job.py" --config "$config" "$@" topology.world_size=$(( nodes * ranks )) --check

# Answers and micro-batches of ever new lengths fragment memory that is cut into segments of fixed size.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# More threads than cores and the ranks wait for each other; unset, torchrun takes one thread a rank.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cpus > ranks ? cpus / ranks : 1 ))}
# NCCL's own line names the link or library that failed; the Python error does not.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A collective that timed out ends its rank instead of leaving it on a spinning GPU (some clusters switch this off).
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# The last collectives of each rank, written here on a timeout: they tell which rank was missing, and where.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_FR_DUMP_TEMP_FILE=$run/nccl_trace_rank_
# torchrun's --shutdown-timeout, by the name that versions without it ignore: when one rank has failed, the others,
# stuck in a collective, are killed after 5 s and not 30. Where SLURM preempts with TERM, give a step and a
# checkpoint their time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-5}
# Where host names lead to a slow network, name the fast one, for payloads and for gloo's control messages:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

latest_checkpoint() {
    cat "$run/checkpoints/latest" 2>/dev/null || echo none
}

mkdir -p "$run/slurm"
rm -f "$run"/{STOP,PREEMPTED,DONE}
requeues=$run/slurm/requeues  # "COUNT CHECKPOINT": requeues in a row that found this same checkpoint
(( attempt > 0 )) && [[ -f $requeues ]] || echo "0 $(latest_checkpoint)" >"$requeues"

# The head node keeps the rendezvous. The port comes from the job so that two jobs on a node do not meet, and lies below
# the ports that Linux gives to outgoing connections; the id tells a requeued attempt from stragglers of the last one.
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoint=$head_node:$(( 10000 + job_id % 20000 ))
rendezvous=$job_id-$attempt

asked=no
trap 'signalled=yes; asked=yes; touch "$run/STOP"' USR1 TERM
# --kill-on-bad-exit: one node's failure ends the others. --cpus-per-task: srun does not inherit it and would give one
# core. %N: one log for each node. --max-restarts=0: a restart would begin with a node half dead; a new job resumes.
srun --kill-on-bad-exit=1 --cpus-per-task="$cpus" --open-mode=append --output="$run/slurm/$rendezvous-%N.log" \
    torchrun --nnodes="$nodes" --nproc_per_node="$ranks" --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$rendezvous" \
    "train_$job.py" --config "$config" "$@" &
srun_pid=$!
while :; do
    signalled=no  # a trap makes `wait` return at once, with the signal's code
    wait "$srun_pid" && code=0 || code=$?
    [[ $signalled == yes ]] || break
done
trap - USR1 TERM

if [[ -e $run/DONE ]]; then
    echo "$run: done"
    exit 0
elif [[ ! -e $run/PREEMPTED ]]; then
    echo "$script: $run ended without DONE or PREEMPTED (exit code $code); see $run/slurm/$rendezvous-*.log" >&2
    exit $(( code ? code : 1 ))
elif [[ -e $run/STOP && $asked == no ]]; then
    echo "$run: stopped by hand; the same sbatch command resumes it"
    exit 0
elif [[ $(scontrol show job "$job_id") =~ JobState=(CANCELLED|COMPLETING) ]]; then
    echo "$run: cancelled, so not requeued; the same sbatch command resumes it"
    exit 0
fi

# A run that is stopped before it saves would be requeued for ever.
read -r idle last <"$requeues"
latest=$(latest_checkpoint)
[[ $latest == "$last" ]] && idle=$(( idle + 1 )) || idle=0
echo "$idle $latest" >"$requeues"
if (( idle > MAX_IDLE_REQUEUES )); then
    echo "$script: $run: $idle starts in a row without a new checkpoint (latest: $latest); not requeued" >&2
    exit 1
fi
scontrol requeue "$job_id"
