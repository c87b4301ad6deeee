#!/bin/bash
# One Ray cluster for one experiment, on machines that SLURM gives:
#   sbatch --nodes=4 --gpus-per-node=8 examples/cluster/slurm.sh experiment.yaml
# The folder this is started from, potluck's environment and POTLUCK_DATA must be on a file system that all machines share.
#SBATCH --job-name=potluck
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

EXPERIMENT=${1:?"give an experiment file: sbatch slurm.sh experiment.yaml"}
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# Whoever has this token runs code on all machines of the job: a new one for every job, for your eyes only.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
export RAY_USAGE_STATS_ENABLED=0
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"; kill $(jobs -p) 2> /dev/null' EXIT

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
# Where machines have several networks, name the head's address on the right one: HEAD_IP=… sbatch …
HEAD_IP=${HEAD_IP:-$(srun --nodes=1 --ntasks=1 --nodelist="$HEAD" hostname --all-ip-addresses | awk '{print $1}')}
: "${HEAD_IP:?"$HEAD has no address; give one with HEAD_IP=… sbatch …"}"

# Every process ends with the job step that started it (--block), and the steps end with this script.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD" \
    ray start --head --node-ip-address="$HEAD_IP" --port="$PORT" --include-dashboard=false --block &
HEAD_STEP=$!
SECONDS=0
until python -c "import socket; socket.create_connection(('$HEAD_IP', $PORT), 1)" 2> /dev/null; do
    { kill -0 "$HEAD_STEP" 2> /dev/null && [ "$SECONDS" -lt 120 ]; } ||
        { echo "no head of a Ray cluster came up at $HEAD_IP:$PORT; see above" >&2; exit 1; }
    sleep 1
done
for NODE in "${NODES[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$NODE" ray start --address="$HEAD_IP:$PORT" --block &
done

# Wait for all machines, two minutes at most: one that comes later is not used, unless another is lost.
machines() {
    python -m potluck.engine.ray.knock "$HEAD_IP:$PORT" 2> /dev/null |
        python -c 'import json, sys; print(len(json.load(sys.stdin)))' 2> /dev/null || echo 0
}
SECONDS=0
until [ "$(machines)" -ge "${#NODES[@]}" ] || [ "$SECONDS" -gt 120 ]; do sleep 1; done

# The driver is on the head, where this script runs. It plays on if a machine is lost; if the job ends early, submit it
# again: a run that was begun goes on.
RUN="runs/$(basename "${EXPERIMENT%.*}")"
if [ -e "$RUN/config.yaml" ]; then
    potluck resume "$RUN" engine.name=ray engine.address="$HEAD_IP:$PORT"
else
    potluck run "$EXPERIMENT" engine.name=ray engine.address="$HEAD_IP:$PORT" --out "$RUN"
fi
