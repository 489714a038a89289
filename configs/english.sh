# shellcheck shell=bash disable=SC2034,SC2154  # read by tools/loop/settings.py, where root is the project's folder
# A pretrained model of 135M parameters plays in English, on two CPU cores (38 minutes in bf16):
#   python -m tools.prepare_data smollm2 --output_dir models/smollm2
#   python -m tools.prepare_data english --model models/smollm2 --output_dir outputs/english/data
#   tools/run_spag.sh configs/english.sh OUTPUT=outputs/english
MODEL=models/smollm2
IMITATION_DATA=outputs/english/data/imitation.json
SFT_DATA=outputs/english/data/anchor.json # 300 rows of imitation
WORDS=outputs/english/data/played.txt
EVAL_WORDS=held_out=outputs/english/data/held_out.txt
PROMPTS=$root/data/english/prompts.json
CHAT_TEMPLATE=True
MAX_TURNS=5
MAX_LENGTH=640
MAX_NEW_TOKENS=40 # a message has 5 to 30 words
TEMPERATURE=0.7
GAMES=400 # words of an epoch
IMITATION_LR=1e-4
LEARNING_RATE=2e-5
REASONING_ARGS="--limit 300"
GLOBAL_BATCH=16
TRAIN_BATCH=16
IMITATION_ARGS="--attn_implementation eager" # faster than sdpa on CPUs with rows this short
TRAIN_ARGS="--attn_implementation eager"
REWARD_ARGS="--training_prompt play"
NPROC=1
DEEPSPEED=none
GRADIENT_CHECKPOINTING=False
SAVE_STEPS=0.5
