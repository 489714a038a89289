#!/usr/bin/env bash
# The loop on 4 machines of 8 GPUs under Slurm. Submit it from the project's folder: sbatch configs/slurm_4x8.sh
# All machines must see that folder and outputs/spag. The job runs in the environment that is active when you submit
# it, which needs all of requirements.txt. Slurm requeues it after preemption or a node failure; after the time limit
# submit it again. In both cases it continues where it stopped.
# For other machines change --nodes, --gpus-per-node, --cpus-per-task and, below, processes (GPUs per machine).
# global_batch (128) must be a multiple of machines x processes x per_device_train_batch_size (2).
#SBATCH --job-name=spag
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --output=spag-%j.out
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# 128 rows per step = 4 machines x 8 GPUs x 2 rows x 2 accumulation steps
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1'):29500
# The port must be free on the first machine. The id keeps out machines of another job with the same port.
settings=(configs/llama2_7b.toml output=outputs/spag processes=8 "machines=$SLURM_NNODES" "rendezvous=$endpoint"
  "rendezvous_id=spag-$SLURM_JOB_ID")

# One task per machine; if one fails, all end. Since Slurm 22.05, srun does not inherit --cpus-per-task.
# shellcheck disable=SC2016  # $SLURM_NODEID is each machine's own
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  bash -c 'exec python -m tools.run_spag "$@" machine="$SLURM_NODEID"' spag "${settings[@]}"
