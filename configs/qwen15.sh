# shellcheck shell=bash disable=SC2034,SC2154  # read by tools/loop/settings.py, where root is the project's folder
# A general instruct model of 1.5B parameters on one GPU, by LoRA, with the short prompts of the English world: small
# enough for a study in minutes. configs/arms/qwen15.sh makes its data, and asks first whether it can play.
MODEL=Qwen/Qwen2.5-1.5B-Instruct
CHAT_TEMPLATE=True
PROMPTS=$root/data/english/prompts.json
MAX_TURNS=5
MAX_LENGTH=640
MAX_NEW_TOKENS=40 # a message has 5 to 30 words
TEMPERATURE=0.7
LORA_RANK=16
IMITATION_LR=3e-4
GLOBAL_BATCH=64
TRAIN_BATCH=64 # so short are the rows
GRADIENT_CHECKPOINTING=False
DEEPSPEED=none
REWARD_ARGS="--training_prompt play"
NPROC=1
SAVE_STEPS=0
