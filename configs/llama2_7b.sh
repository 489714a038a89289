# shellcheck shell=bash disable=SC2034  # read by tools/loop/settings.py
# The paper's run: Llama-2-7B on 8 GPUs of 80 GB (computed to fit under ZeRO-2). README.md makes its data; benchmarks come
# last, by EVAL_TASKS or tools.evaluate_reasoning. With your own OUTPUT:
#   tools/run_spag.sh configs/llama2_7b.sh OUTPUT=outputs/spag
MODEL=meta-llama/Llama-2-7b-hf # gated: hf auth login
IMITATION_DATA=data/train_imitation_gpt4.json # with rows of your own games, PROMPTS= of these too
PROMPTS=data/released_prompts.json # the authors' prompts, which their rows hold: made by prepare_data prompts
SFT_DATA=data/alpaca_train.json
WORDS=data/played.txt # made by prepare_data split, as the README shows
EVAL_WORDS=data/held_out.txt
