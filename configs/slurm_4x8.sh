#!/usr/bin/env bash
# The loop on 4 machines of 8 GPUs under Slurm. Submit it from the project's folder: sbatch configs/slurm_4x8.sh
# All machines must see that folder and outputs/spag. The same job submitted again, or requeued, continues where it
# was. It runs in the environment that is active when it is submitted, which needs all of requirements.txt.
# --requeue begins the job again after preemption or the failure of a machine. After the time limit submit it again.
# For other machines change --nodes, --gpus-per-node, --cpus-per-task and, below, processes (GPUs of a machine).
# global_batch, 128, must be a multiple of machines x processes x per_device_train_batch_size, which is 2.
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

# configs/llama2_7b.toml on all machines: 128 rows a step = 4 machines x 8 GPUs x 2 rows x 2 accumulation steps.
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1'):29500
# The port must be free on the first machine. The id keeps out machines of another job that has the same port.
settings=(configs/llama2_7b.toml output=outputs/spag processes=8 "machines=$SLURM_NNODES" "rendezvous=$endpoint"
  "rendezvous_id=spag-$SLURM_JOB_ID")

# One task on each machine; if one fails, the others end too. Since Slurm 22.05, srun needs --cpus-per-task again.
# shellcheck disable=SC2016  # $SLURM_NODEID is each machine's own
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  bash -c 'exec python -m tools.run_spag "$@" machine="$SLURM_NODEID"' spag "${settings[@]}"
