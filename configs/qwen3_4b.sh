# shellcheck shell=bash disable=SC2034  # read by tools/loop/settings.py
# Qwen3-4B on one GPU of 80 GB, by LoRA (computed to fit without DeepSpeed, not run here). Its chat template is used
# in play, rows and matches. The model follows instructions already, so there is no imitation.
#   tools/run_spag.sh configs/qwen3_4b.sh OUTPUT=outputs/spag_qwen3
MODEL=Qwen/Qwen3-4B-Instruct-2507
CHAT_TEMPLATE=True
LORA_RANK=16
SFT_DATA=data/alpaca_train.json
WORDS=data/played.txt # made by prepare_data split, as the README shows
EVAL_WORDS=data/held_out.txt
EVAL_TASKS="MMLU BBH MuTual ARC-e ARC-c LogiQA2 WinoGrande PIQA"
