# shellcheck shell=bash disable=SC2034  # read by tools/run_spag.sh
# Llama-3-8B on 8 GPUs of 80 GB (computed to fit under ZeRO-2, not run here): the paper's settings, another model.
#   tools/run_spag.sh configs/llama3_8b.sh OUTPUT=outputs/spag_llama3
MODEL=meta-llama/Meta-Llama-3-8B # gated: hf auth login
IMITATION_DATA=data/train_imitation_gpt4.json
SFT_DATA=data/alpaca_train.json
WORDS=data/played.txt # made by prepare_data split, as the README shows
EVAL_WORDS=data/held_out.txt
EVAL_TASKS="MMLU BBH MuTual ARC-e ARC-c LogiQA2 WinoGrande PIQA"
REASONING_ARGS="--lm_eval 'accelerate launch -m lm_eval'" # on all GPUs of the machine
