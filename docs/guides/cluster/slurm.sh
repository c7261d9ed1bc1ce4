#!/bin/bash
# A Ray cluster for the life of one Slurm job: `sbatch slurm.sh`. Submit the same file again to go on.
#SBATCH --job-name=plateaux
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120

set -euo pipefail
RECIPE=${RECIPE:-recipe.toml}
OUT=${OUT:-$SLURM_SUBMIT_DIR/runs/demo} # a file system that all nodes see, or s3://bucket/runs/demo
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One secret for this job's nodes, which no other user's processes know.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | base64 | tr -dc 'a-zA-Z0-9')
export RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1

# Starts Ray on every node, runs the command on the first, and stops Ray when the command ends. Slurm's warning two
# minutes before the end goes to that command alone, as SIGTERM: every member then ends with a checkpoint. To the whole
# step it would stop Ray itself, and the members with it.
DRIVER=/tmp/plateaux-$SLURM_JOB_ID.pid # on the first node
srun --kill-on-bad-exit=0 ray symmetric-run --address "$HEAD:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    bash -c 'echo $$ > "$0" && exec "$@"' "$DRIVER" \
    plateaux train "$RECIPE" --out "$OUT" --executor ray --address "$HEAD:6379" --take-over \
    --set executor.num_gpus=1 --set executor.num_cpus=8 --set executor.max_retries=20 &
WORK=$!
trap 'srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD" bash -c "kill -TERM \$(cat $DRIVER)"' TERM
wait "$WORK" || wait "$WORK"
