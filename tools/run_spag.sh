#!/usr/bin/env bash
# The whole method: imitation, then epochs of self-play, each of play, rewards, training, match and report.
#
#   tools/run_spag.sh --model M --imitation_data data/train_imitation_gpt4.json --words data/all_target_words.txt \
#     --sft_data data/alpaca_train.json --output outputs/spag
#
# The same command continues a loop that was stopped. A setting is a flag (--epochs 2), an environment variable
# (EPOCHS=2), or a line of the file that --settings names (like configs/tiny.sh); the first in this order counts.
# Several values of a setting are separated by blanks. data/README.md describes the files in OUTPUT.
set -efo pipefail # -f: no value is a pattern of file names
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=tools/loop/run.sh
. "$root/tools/loop/run.sh"
read_settings_file "$@"

: "${MODEL:=}"                 # base model: a folder, or a name on the hub (needed)
: "${WORDS:=}"                 # word list of self-play, one word a line (needed)
: "${OUTPUT:=}"                # folder of all results (needed)
: "${SETTINGS:=}"              # shell file of settings
: "${IMITATION_DATA:=}"        # rows of imitation, one file or several; empty: MODEL plays as it is
: "${SFT_DATA:=}"              # SFT examples that are learned beside the games, e.g. Alpaca's
: "${EPOCHS:=3}"               # epochs of self-play
: "${UNTIL:=}"                 # stop after this stage: imitation, epochK_play or epochK_train
: "${GAME:=taboo}"             # the game: a name, FILE.py:Class or module:Class
: "${GAME_OPTIONS:=}"          # its options, KEY=VALUE, one or several
: "${MATCH:=}"                 # Taboo: substring or word, whether the target word counts inside others
: "${PROMPTS:=}"               # prompt file; empty: the game's own
: "${MAX_TURNS:=}"             # turns of a game; empty: the game's own number
: "${GAMES:=}"                 # play only the first so many words of the list
: "${GAMES_PER_WORD:=1}"       # games of each word in an epoch
: "${FIRST_EPISODES:=}"        # file of episodes that stands in for the play of epoch 1
: "${MAX_LENGTH:=2048}"        # tokens of a row, and of prompt and reply together
: "${MAX_NEW_TOKENS:=256}"     # tokens of a reply
: "${TEMPERATURE:=1.2}"        # of sampling
: "${TOP_K:=50}"               # sample from so many tokens; 0: from all
: "${ENGINE:=auto}"            # of play and matches, as --engine of tools/play_llm_game.py
: "${TENSOR_PARALLEL_SIZE:=1}" # GPUs of a vLLM server; NPROC / this processes play
: "${PLAY_BATCH:=}"            # prompts answered at once; empty: chosen from memory
: "${REWARDS:=}"              # program that makes rows of the games, with the flags of tools/assign_rewards.py (default)
: "${DECAY_WEIGHT:=0.8}"       # what a message gets of the next one's reward
: "${GLOBAL_BATCH:=128}"       # rows of an optimizer step, over all processes
: "${TRAIN_BATCH:=2}"          # rows that a process takes at once
: "${IMITATION_LR:=5e-6}"      # learning rate of imitation
: "${IMITATION_KL:=0.1}"       # weight of the KL in imitation
: "${LEARNING_RATE:=2e-6}"     # learning rate of self-play
: "${KL:=0.2}"                 # weight of the KL in self-play
: "${SFT_COEFF:=0.5}"          # weight of the SFT rows in self-play
: "${CLIP_RANGE:=0.2}"         # clip of the importance ratio
: "${DETACH_KL:=False}"        # True: keep the gradient out of the KL inside the advantage
: "${LORA_RANK:=}"             # train LoRA adapters of this rank and play on with them merged in; needs peft
: "${SEED:=42}"                # of play, rewards and training; epoch k adds k
: "${PRECISION:=auto}"         # bf16, fp16 or fp32; auto: bf16 with a GPU, else fp32
: "${DEEPSPEED:=auto}"         # its configuration, or none; auto: what fits the GPUs' memory (tools/loop/README.md)
: "${GRADIENT_CHECKPOINTING:=auto}" # True or False; auto: True with a GPU
: "${SAVE_STEPS:=0.2}"         # save to resume from every so many steps, below 1 this part of the run; 0: never
: "${NPROC:=auto}"             # processes of this machine; auto: its GPUs, or 1
: "${NNODES:=1}"               # machines; the same command runs on each, with OUTPUT on a shared folder
: "${NODE_RANK:=0}"            # number of this machine, from 0
: "${RDZV_ENDPOINT:=}"         # host:port of machine 0 (needed with several machines)
: "${RDZV_ID:=spag}"           # name of the meeting, the same on all machines
: "${NODE_TIMEOUT:=1800}"      # seconds that the machines wait for each other before a stage
: "${EVAL_WORDS:=}"            # word lists of the match against imitation, FILE or NAME=FILE; empty: no match
: "${EVAL_SEEDS:=0}"           # seeds of the match, one or several
: "${EVAL_GAMES_PER_WORD:=1}"  # games of each word, role and seed of the match
: "${EVAL_EVERY:=1}"           # a match after every so many epochs
: "${EVAL_IMITATION:=False}"   # True: imitation's match against itself too, which shows the spread
: "${REPORT:=True}"            # False: no report.html
: "${CHECK_DISK:=True}"        # False: start although the disk space may not suffice
: "${IMITATION_ARGS:=}"        # further flags of train.py in imitation
: "${TRAIN_ARGS:=}"            # further flags of train.py in self-play
: "${PLAY_ARGS:=}"             # further flags of tools/play_llm_game.py
: "${REWARD_ARGS:=}"           # further flags of REWARDS
: "${EVAL_ARGS:=}"             # further flags of tools/evaluate_games.py

launch() { # launch STAGE PROGRAM FLAGS...: in all processes of all machines
  local machines=(--standalone)
  [ "$NNODES" -eq 1 ] || machines=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT"
    --rdzv_id "$RDZV_ID-$1"
    --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=$NODE_TIMEOUT,read_timeout=$NODE_TIMEOUT")
  [ "$NPROC" -eq 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # as torchrun does, with a long notice
  [ $((NPROC * NNODES)) -gt 1 ] || machines=()
  run "$1" "$PYTHON" ${machines:+-m torch.distributed.run --nproc_per_node "$NPROC" "${machines[@]}"} "${@:2}"
}

train() { # train STAGE FOLDER FLAGS...: from $model, which is the reference too; then $model is the new one
  launch "$1" "$root/train.py" --output_dir "$2" --model_name_or_path "$model" --ref_model_name_or_path "$model" \
    --num_train_epochs 1 --per_device_train_batch_size "$TRAIN_BATCH" --gradient_accumulation_steps "$ACCUMULATION" \
    --max_length "$MAX_LENGTH" --padding_side right --truncation_side left --lr_scheduler_type cosine \
    --warmup_ratio 0.03 --weight_decay 0.0 --logging_steps 1 --eval_strategy no \
    --per_device_eval_batch_size $((TRAIN_BATCH > 8 ? TRAIN_BATCH : 8)) "${precision[@]}" "${saving[@]}" \
    --gradient_checkpointing "$GRADIENT_CHECKPOINTING" ${DEEPSPEED:+--deepspeed "$DEEPSPEED"} \
    ${LORA_RANK:+--lora_rank "$LORA_RANK" --lora_merge True} "${@:3}"
  [ "$NODE_RANK" -gt 0 ] || find "$2" -maxdepth 1 -name 'checkpoint-*' -exec rm -rf {} + # of no more use
  model=$2${LORA_RANK:+/merged}
}

match() { # match NAME PLAYER...: against the imitation model
  NPROC=$players launch "$1_eval" "$root/tools/evaluate_games.py" --players "${@:2}" --against imitation \
    --words "${EVAL_WORDS[@]}" --seeds "${EVAL_SEEDS[@]}" --games_per_word "$EVAL_GAMES_PER_WORD" \
    --output_dir "$OUTPUT/$1/eval" "${game[@]}" "${prompts[@]}" "${sampling[@]}" "${EVAL_ARGS[@]}"
}

{ # read as a whole before it runs: this file may change meanwhile
settle_settings "$@"
case $PRECISION in
  bf16) precision=(--bf16 True --tf32 True) ;;
  fp16) precision=(--fp16 True) ;;
  *) precision=() ;;
esac
saving=(--save_strategy steps --save_steps "$SAVE_STEPS" --save_total_limit 1)
case $SAVE_STEPS in *[1-9]*) ;; *) saving=(--save_strategy no) ;; esac
game=(--game "$GAME" ${GAME_OPTIONS:+--game_options "${GAME_OPTIONS[@]}"} ${MATCH:+--match "$MATCH"})
prompts=(${PROMPTS:+--prompt_templates "$PROMPTS"})
sampling=(--task_type sampling --max_turns "$MAX_TURNS" --max_length "$MAX_LENGTH" --max_new_tokens "$MAX_NEW_TOKENS"
  --temperature "$TEMPERATURE" --top_k "$TOP_K" "${precision[@]}" --engine "$ENGINE"
  --tensor_parallel_size "$TENSOR_PARALLEL_SIZE" ${PLAY_BATCH:+--per_device_eval_batch_size "$PLAY_BATCH"})

model=$MODEL player=imitation players=$((NPROC / TENSOR_PARALLEL_SIZE))
[ -z "$IMITATION_DATA" ] || train imitation "$OUTPUT/imitation/model" --train_method SFTwithKL \
  --train_data_path "${IMITATION_DATA[@]}" --lm_kl_coeff "$IMITATION_KL" --learning_rate "$IMITATION_LR" \
  --seed "$SEED" "${IMITATION_ARGS[@]}"
imitation=$model
[ -z "$EVAL_WORDS" ] || [ "$EVAL_IMITATION" = False ] || match imitation "imitation=$imitation"

for ((epoch = 1; epoch <= EPOCHS; epoch++)); do
  folder=$OUTPUT/epoch$epoch seed=$((SEED + epoch))
  episodes=$folder/episodes/${player}_sampling_words_results.json
  [ "$epoch" -gt 1 ] || episodes=${FIRST_EPISODES:-$episodes}
  [ "$episodes" = "$FIRST_EPISODES" ] || NPROC=$players launch "epoch${epoch}_play" "$root/tools/play_llm_game.py" \
    --attacker_model_name_or_path "$model" --defender_model_name_or_path "$model" --data_path "$WORDS" \
    --output_dir "$folder/episodes" --model_prefix "$player" --data_suffix words --seed "$seed" \
    "${game[@]}" "${prompts[@]}" "${sampling[@]}" "${PLAY_ARGS[@]}"
  [ "$NODE_RANK" -gt 0 ] || run "epoch${epoch}_rewards" "$PYTHON" "${REWARDS[@]:-$root/tools/assign_rewards.py}" \
    --input_data_path "$episodes" --output_data_path "$folder/rows/rows.json" --decay_weight "$DECAY_WEIGHT" \
    --min_game_rows "$GLOBAL_BATCH" --seed "$seed" "${game[@]}" "${prompts[@]}" \
    ${SFT_DATA:+--sft_data_path "$SFT_DATA"} "${REWARD_ARGS[@]}"
  train "epoch${epoch}_train" "$folder/model" --train_method OfflinePO --train_data_path "$folder/rows/rows.json" \
    --lm_kl_coeff "$KL" --lm_sft_coeff "$SFT_COEFF" --clip_range "$CLIP_RANGE" --detach_kl "$DETACH_KL" \
    --learning_rate "$LEARNING_RATE" --seed "$seed" "${TRAIN_ARGS[@]}"
  player=epoch$epoch
  [ -z "$EVAL_WORDS" ] || [ $((epoch % EVAL_EVERY)) -gt 0 ] || match "$player" "imitation=$imitation" "$player=$model"
  say "epoch $epoch of $EPOCHS is done, $((SECONDS / 60)) minutes after the start"
  [ "$NODE_RANK" -eq 0 ] || continue
  printf '%s\n' "$SETTINGS_JSON" >"$OUTPUT/settings.json" # all programs have accepted these
  [ "$REPORT" = False ] || run report "$PYTHON" "$root/tools/report.py" "$OUTPUT" "${game[@]}"
done
say "finished; everything is in $OUTPUT"
exit
}
