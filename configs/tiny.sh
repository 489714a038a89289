# shellcheck shell=bash disable=SC2034,SC2154  # read by tools/loop/settings.py, where $root is the project's folder
# Settings of the embedded world. They differ from the paper's because model and prompts are far smaller; the
# losses and their coefficients are the same.
PROMPTS=$root/data/tiny/prompts.json
MAX_TURNS=3
MAX_LENGTH=160 # prompts have up to 90 tokens
MAX_NEW_TOKENS=24 # a message has 6 to 11
TEMPERATURE=1.0
GAMES_PER_WORD=12
PLAY_BATCH=256
GLOBAL_BATCH=64
TRAIN_BATCH=64
IMITATION_LR=2e-3
LEARNING_RATE=3e-4
REWARD_ARGS="--training_prompt play" # a model of this size knows one layout
NPROC=1 # there is too little work for more
PRECISION=fp32
DEEPSPEED=none
GRADIENT_CHECKPOINTING=False
SAVE_STEPS=0.5
EVAL_GAMES_PER_WORD=5
