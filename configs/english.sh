# shellcheck shell=bash disable=SC2034,SC2154  # read by tools/run_spag.sh, which sets root
# Settings of WORLD=english in tools/quickstart.sh: SmolLM2-135M-Instruct on two CPU cores, in at most 90 minutes.
PROMPTS=$root/data/english/prompts.json
CHAT_TEMPLATE=True
MAX_TURNS=5
MAX_LENGTH=640
MAX_NEW_TOKENS=40
GLOBAL_BATCH=16
TRAIN_BATCH=16
IMITATION_ARGS="--use_cpu True" # the loop refuses models of this size on a CPU unless it is told so
TRAIN_ARGS="--use_cpu True"
REWARD_ARGS="--training_prompt play"
NPROC=1
PRECISION=auto # bf16 on CPUs that compute it (avx512_bf16 or amx_bf16), else fp32
DEEPSPEED=none
GRADIENT_CHECKPOINTING=False
SAVE_STEPS=0.5
