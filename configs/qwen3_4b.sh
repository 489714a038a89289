# shellcheck shell=bash disable=SC2034  # read by tools/loop/settings.py
# Qwen3-4B on one GPU, by LoRA and in its chat template. It imitates the games of this project first: without that,
# instruct models say the word in their first message. README.md, "One GPU", makes its data and has the commands.
MODEL=Qwen/Qwen3-4B-Instruct-2507
CHAT_TEMPLATE=True
LORA_RANK=16
TRAIN_BATCH=8
IMITATION_DATA=data/own/rows.json
WORDS=data/own/words.txt
EVAL_WORDS=data/own/new.txt
