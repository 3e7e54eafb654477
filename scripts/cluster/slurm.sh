#!/usr/bin/env bash
# One sweep on whole Slurm nodes: sbatch slurm.sh +sweep=methods cluster.gpus_per_trial=0.25
# Run it in a directory that every node mounts, with .venv in it. Submit a job again to continue after its time limit.
#SBATCH --job-name=pruning
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --tasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=1
#SBATCH --time=08:00:00
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
. .venv/bin/activate

# Ray's files on the node's disk, under a short path, as the paths of sockets are limited.
export RAY_TMPDIR="/tmp/ray-$SLURM_JOB_ID"
# One token for this job's nodes: without it every user of the cluster could run code as you.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(openssl rand -hex 32)
# A dead node is detected within seconds.
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
  ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_PER_TASK:-0}" -- \
  python -m orchestrator "cluster.address=$head:6379" "store.uri=$SLURM_SUBMIT_DIR/store" "$@"
