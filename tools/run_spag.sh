#!/usr/bin/env bash
# The whole method: imitation, then epochs of self-play. An epoch is play, rewards, training, a match and the report.
#
#   tools/run_spag.sh --model M --imitation_data data/train_imitation_gpt4.json --words data/all_target_words.txt \
#     --sft_data data/alpaca_train.json --output outputs/spag
#
# The same command continues a loop that was stopped. A setting is a flag (--epochs 2), an environment variable
# (EPOCHS=2) or a line of the settings file (--settings configs/tiny.sh); the first of these wins. Blanks separate
# several values of one setting; quotes hold words of a *_ARGS together. data/README.md describes the files in OUTPUT.
set -efo pipefail # -f: no value is a pattern of file names
# shellcheck disable=SC2086,SC2206,SC2229  # settings of several values are split at their blanks
{ # bash reads this block as a whole before it runs it: the file may change meanwhile
names=(MODEL WORDS OUTPUT SETTINGS IMITATION_DATA SFT_DATA CONTROL LIKE EPOCHS UNTIL GAME GAME_OPTIONS PROMPTS
  MAX_TURNS GAMES GAMES_PER_WORD FIRST_EPISODES MAX_LENGTH MAX_NEW_TOKENS TEMPERATURE TOP_K ENGINE
  TENSOR_PARALLEL_SIZE PLAY_BATCH REWARDS DECAY_WEIGHT LOSERS TIES GLOBAL_BATCH TRAIN_BATCH IMITATION_LR
  IMITATION_KL LEARNING_RATE KL SFT_COEFF CLIP_RANGE DETACH_KL LORA_RANK SEED PRECISION DEEPSPEED
  GRADIENT_CHECKPOINTING SAVE_STEPS NPROC NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID EVAL_WORDS EVAL_SEEDS
  EVAL_GAMES_PER_WORD EVAL_EVERY EVAL_IMITATION EVAL_TASKS REPORT IMITATION_ARGS TRAIN_ARGS PLAY_ARGS REWARD_ARGS
  EVAL_ARGS REASONING_ARGS)

set_flags() { # set_flags --name VALUE ...: NAME gets VALUE
  local name
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h) show_help; exit ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
      --*) [ $# -gt 1 ] || fail "$1 needs a value" ;;
      *) fail "'$1' belongs to no flag; several values of one flag go in quotes" ;;
    esac
    name=$(tr '[:lower:]' '[:upper:]' <<<"${1#--}")
    case " ${names[*]} " in *" $name "*) ;; *) fail "unknown flag $1; --help lists them" ;; esac
    printf -v "$name" %s "$2"
    shift 2
  done
}

show_help() { # print the first comments of this file and its settings
  sed -n -e '2,/^set/s/^# \{0,1\}//p' -e 's/^: "\${\([A-Z_]*\):=\(.*\)}"\( *#\)/  \1=\2\3/p' "$0"
}

root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=tools/loop/run.sh
. "$root/tools/loop/run.sh"
set_flags "$@"
# shellcheck source=configs/tiny.sh
case $SETTINGS in '') ;; */*) . "$SETTINGS" ;; *) . "./$SETTINGS" ;; esac

: "${MODEL:=}"                 # base model: a folder, or a name on the hub (needed, unless LIKE is set)
: "${WORDS:=}"                 # word list of self-play, one word a line (needed)
: "${OUTPUT:=}"                # folder of all results (needed)
: "${SETTINGS:=}"              # shell file of settings
: "${IMITATION_DATA:=}"        # rows of imitation, one file or several; empty: MODEL plays as it is
: "${SFT_DATA:=}"              # SFT examples to train on beside the rows of the games, e.g. Alpaca's
: "${CONTROL:=}"               # sft, silent, coin, coin_by_length or cloning: rows of a control (configs/README.md)
: "${LIKE:=}"                  # OUTPUT of another run: the same imitation model, and the same games in epoch 1
: "${EPOCHS:=3}"               # epochs of self-play
: "${UNTIL:=}"                 # stop after this stage: imitation, epochK_play or epochK_train
: "${GAME:=taboo}"             # the game: a name, FILE.py:Class or module:Class
: "${GAME_OPTIONS:=}"          # its options, KEY=VALUE, one or several
: "${PROMPTS:=}"               # prompt file; empty: the game's own
: "${MAX_TURNS:=}"             # turns of a game; empty: the game's own number
: "${GAMES:=}"                 # play only this many words, the first of the list
: "${GAMES_PER_WORD:=1}"       # games of each word in an epoch
: "${FIRST_EPISODES:=}"        # file of episodes that replaces the play of epoch 1
: "${MAX_LENGTH:=2048}"        # tokens of a row, and of prompt and reply together
: "${MAX_NEW_TOKENS:=256}"     # tokens of a reply
: "${TEMPERATURE:=1.2}"        # sampling temperature
: "${TOP_K:=50}"               # sample from this many most likely tokens; 0: from all
: "${ENGINE:=auto}"            # engine of play and matches: auto, vllm, slots or generate
: "${TENSOR_PARALLEL_SIZE:=1}" # GPUs of each vLLM server; play then has NPROC / this number of processes
: "${PLAY_BATCH:=}"            # prompts answered at once; empty: chosen from memory
: "${REWARDS:=}"               # program that makes rows, with assign_rewards.py's flags; empty: that program
: "${DECAY_WEIGHT:=0.8}"       # reward decay gamma, applied backwards from the last message
: "${LOSERS:=0}"               # share of the winner's reward that the loser is charged; above 0 needs DETACH_KL
: "${TIES:=0}"                 # reward that both roles of a tied game are charged; above 0 needs DETACH_KL
: "${GLOBAL_BATCH:=128}"       # rows of an optimizer step, over all processes
: "${TRAIN_BATCH:=2}"          # rows of a micro-batch of one process
: "${IMITATION_LR:=}"          # learning rate of imitation; empty: 5e-6, with LORA_RANK 1e-4
: "${IMITATION_KL:=0.1}"       # weight of the KL in imitation
: "${LEARNING_RATE:=}"         # learning rate of self-play; empty: 2e-6, with LORA_RANK 1e-4
: "${KL:=0.2}"                 # weight of the KL in self-play
: "${SFT_COEFF:=0.5}"          # weight of the SFT rows in self-play
: "${CLIP_RANGE:=0.2}"         # clip of the importance ratio
: "${DETACH_KL:=False}"        # True: no gradient through the KL inside the advantage
: "${LORA_RANK:=}"             # train LoRA adapters of this rank and play with them merged in; needs peft
: "${SEED:=42}"                # seed of play, rewards and training; epoch k adds k
: "${PRECISION:=auto}"         # bf16, fp16 or fp32; auto: fp32 without a GPU, fp16 on GPUs without bf16, else bf16
: "${DEEPSPEED:=auto}"         # DeepSpeed's configuration, or none; auto: by the GPUs' memory (tools/loop/README.md)
: "${GRADIENT_CHECKPOINTING:=auto}" # True or False; auto: True with a GPU
: "${SAVE_STEPS:=0.2}"         # steps between checkpoints; below 1: a share of all steps; 0: none
: "${NPROC:=auto}"             # processes of this machine; auto: its GPUs, or 1
: "${NNODES:=1}"               # machines; the same command runs on each, with OUTPUT on a shared folder
: "${NODE_RANK:=0}"            # number of this machine, from 0
: "${RDZV_ENDPOINT:=}"         # host:port of machine 0 (needed with several machines)
: "${RDZV_ID:=spag}"           # torchrun's rendezvous id, the same on all machines
: "${EVAL_WORDS:=}"            # word lists of the match against imitation, FILE or NAME=FILE; empty: no match
: "${EVAL_SEEDS:=0}"           # seeds of the match, one or several
: "${EVAL_GAMES_PER_WORD:=1}"  # games of each word, role and seed of the match
: "${EVAL_EVERY:=1}"           # epochs between matches
: "${EVAL_IMITATION:=False}"   # True: a match of imitation against itself too, which shows the spread
: "${EVAL_TASKS:=}"            # benchmarks for base, imitation and every epoch, e.g. MMLU ARC-c; empty: none
: "${REPORT:=True}"            # True or False: make report.html after each epoch
: "${IMITATION_ARGS:=}"        # further flags of train.py in imitation
: "${TRAIN_ARGS:=}"            # further flags of train.py in self-play
: "${PLAY_ARGS:=}"             # further flags of tools/play_llm_game.py
: "${REWARD_ARGS:=}"           # further flags of REWARDS
: "${EVAL_ARGS:=}"             # further flags of tools/evaluate_games.py
: "${REASONING_ARGS:=}"        # further flags of tools/evaluate_reasoning.py
set_flags "$@" # again: a flag with an empty value wins over the settings file too
lora_rate=${LORA_RANK:+1e-4} # merging into bf16 weights loses smaller updates
IMITATION_LR=${IMITATION_LR:-${lora_rate:-5e-6}} LEARNING_RATE=${LEARNING_RATE:-${lora_rate:-2e-6}}

PYTHON=${PYTHON:-$(command -v python || command -v python3)}
PATH=$PATH:$(dirname "$(command -v "$PYTHON")") # DeepSpeed compiles its operators with pip's ninja, which is there
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}" # rows differ in length

answers=$(mktemp) settings=()
for name in "${names[@]}"; do settings+=("$name=${!name}"); done
in_foreground "$PYTHON" "$root/tools/check_loop.py" "$answers" "${settings[@]}" || { rm "$answers"; exit 2; }
for name in "${names[@]}"; do case $name in *_ARGS) eval "$name=()" ;; esac; done
{
  for name in NPROC PRECISION GRADIENT_CHECKPOINTING GAME_OPTIONS PROMPTS MAX_TURNS DEEPSPEED MODEL FIRST_EPISODES \
    imitation; do
    IFS= read -r "$name"
  done
  while IFS= read -r word; do eval "${word%%=*}+=(\"\${word#*=}\")"; done # NAME=WORD, a word of NAME
} <"$answers"
rm "$answers"
precision=($PRECISION) # its flags

reached() { # reached STAGE: end here if this is UNTIL
  [ "$1" != "$UNTIL" ] || exit 0
}

launch() { # launch STAGE PROGRAM FLAGS...: in all processes of all machines
  local machines=(--standalone)
  [ "$NNODES" -eq 1 ] || machines=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT"
    --rdzv_id "$RDZV_ID-$1" --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=1800,read_timeout=1800")
  [ $((NPROC * NNODES)) -gt 1 ] || machines=()
  run "$1" "$PYTHON" ${machines:+-m torch.distributed.run --nproc_per_node "$NPROC" "${machines[@]}"} "${@:2}"
}

train() { # train STAGE FOLDER FLAGS...: start and reference are $model; afterwards $model is the new model
  launch "$1" "$root/train.py" --output_dir "$2" --model_name_or_path "$model" --ref_model_name_or_path "$model" \
    --num_train_epochs 1 --per_device_train_batch_size "$TRAIN_BATCH" \
    --gradient_accumulation_steps $((GLOBAL_BATCH / (NPROC * NNODES * TRAIN_BATCH))) \
    --max_length "$MAX_LENGTH" --padding_side right --truncation_side left --lr_scheduler_type cosine \
    --warmup_ratio 0.03 --weight_decay 0.0 --logging_steps 1 --eval_strategy no \
    --per_device_eval_batch_size $((TRAIN_BATCH > 8 ? TRAIN_BATCH : 8)) "${precision[@]}" "${saving[@]}" \
    --gradient_checkpointing "$GRADIENT_CHECKPOINTING" ${DEEPSPEED:+--deepspeed "$DEEPSPEED"} \
    ${LORA_RANK:+--lora_rank "$LORA_RANK" --lora_merge True} "${@:3}"
  [ "$NODE_RANK" -gt 0 ] || find "$2" -maxdepth 1 -name 'checkpoint-*' -exec rm -rf {} + # this training has ended
  model=$2${LORA_RANK:+/merged}
}

match() { # match NAME PLAYER...: against the imitation model
  NPROC=$players launch "$1_eval" "$root/tools/evaluate_games.py" --players "${@:2}" --against imitation \
    --words $EVAL_WORDS --seeds $EVAL_SEEDS --games_per_word "$EVAL_GAMES_PER_WORD" \
    --output_dir "$OUTPUT/$1/eval" "${game[@]}" "${prompts[@]}" "${sampling[@]}" "${EVAL_ARGS[@]}"
}

saving=(--save_strategy steps --save_steps "$SAVE_STEPS" --save_total_limit 1)
case $SAVE_STEPS in *[1-9]*) ;; *) saving=(--save_strategy no) ;; esac
game=(--game "$GAME" ${GAME_OPTIONS:+--game_options $GAME_OPTIONS})
prompts=(${PROMPTS:+--prompt_templates "$PROMPTS"})
sampling=(--task_type sampling --max_turns "$MAX_TURNS" --max_length "$MAX_LENGTH" --max_new_tokens "$MAX_NEW_TOKENS"
  --temperature "$TEMPERATURE" --top_k "$TOP_K" "${precision[@]}" --engine "$ENGINE"
  --tensor_parallel_size "$TENSOR_PARALLEL_SIZE" ${PLAY_BATCH:+--per_device_eval_batch_size "$PLAY_BATCH"})
rewards=(--decay_weight "$DECAY_WEIGHT" --losers "$LOSERS" --ties "$TIES" --min_game_rows "$GLOBAL_BATCH"
  ${SFT_DATA:+--sft_data_path "$SFT_DATA"})
if [ -n "$CONTROL" ]; then
  rows=$TRAIN_BATCH # over which training averages a loss
  case ${TRAIN_ARGS[*]} in *loss_normalization[\ =]step*) rows=$GLOBAL_BATCH ;; esac
  rewards+=(--control "$CONTROL" --sft_coeff "$SFT_COEFF" --rows_at_once "$rows")
  case $CONTROL in coin*) ;; *) TRAIN_ARGS=(--allow_no_game_rows True "${TRAIN_ARGS[@]}") ;; esac
fi
case ${precision[*]} in *bf16*) dtype=bfloat16 ;; *fp16*) dtype=float16 ;; *) dtype=float32 ;; esac

model=${imitation:-$MODEL} player=imitation players=$((NPROC / TENSOR_PARALLEL_SIZE)) models=("base=$MODEL")
[ -z "$IMITATION_DATA" ] || [ -n "$imitation" ] || train imitation "$OUTPUT/imitation/model" \
  --train_method SFTwithKL --train_data_path $IMITATION_DATA --lm_kl_coeff "$IMITATION_KL" \
  --learning_rate "$IMITATION_LR" --seed "$SEED" "${IMITATION_ARGS[@]}"
reached imitation
imitation=$model
[ "$imitation" = "$MODEL" ] || models+=("imitation=$imitation")
[ -z "$EVAL_WORDS" ] || [ "$EVAL_IMITATION" = False ] || match imitation "imitation=$imitation"

for ((epoch = 1; epoch <= EPOCHS; epoch++)); do
  folder=$OUTPUT/epoch$epoch seed=$((SEED + epoch))
  episodes=$folder/episodes/${player}_sampling_words_results.json
  if [ "$epoch" -eq 1 ] && [ -n "$FIRST_EPISODES" ]; then
    episodes=$FIRST_EPISODES
  elif [ "$CONTROL" != sft ] && [ "$CONTROL" != silent ]; then # these make no rows of games
    NPROC=$players launch "epoch${epoch}_play" "$root/tools/play_llm_game.py" --seed "$seed" \
      --attacker_model_name_or_path "$model" --defender_model_name_or_path "$model" \
      --data_path "$OUTPUT/words.txt" --output_dir "$folder/episodes" --model_prefix "$player" --data_suffix words \
      "${game[@]}" "${prompts[@]}" "${sampling[@]}" "${PLAY_ARGS[@]}"
  fi
  reached "epoch${epoch}_play"
  [ "$NODE_RANK" -gt 0 ] || run "epoch${epoch}_rewards" "$PYTHON" ${REWARDS:-"$root/tools/assign_rewards.py"} \
    --input_data_path "$episodes" --output_data_path "$folder/rows/rows.json" --seed "$seed" \
    ${CONTROL:+${LIKE:+--like_rows "$LIKE/epoch$epoch/rows/rows.json"}} \
    "${game[@]}" "${prompts[@]}" "${rewards[@]}" "${REWARD_ARGS[@]}"
  train "epoch${epoch}_train" "$folder/model" --train_method OfflinePO --train_data_path "$folder/rows/rows.json" \
    --lm_kl_coeff "$KL" --lm_sft_coeff "$SFT_COEFF" --clip_range "$CLIP_RANGE" --detach_kl "$DETACH_KL" \
    --learning_rate "$LEARNING_RATE" --seed "$seed" "${TRAIN_ARGS[@]}"
  reached "epoch${epoch}_train"
  player=epoch$epoch models+=("epoch$epoch=$model")
  [ -z "$EVAL_WORDS" ] || [ $((epoch % EVAL_EVERY)) -gt 0 ] || match "$player" "imitation=$imitation" "$player=$model"
  say "epoch $epoch of $EPOCHS is done, $((SECONDS / 60)) minutes after the start"
  [ "$NODE_RANK" -gt 0 ] || [ "$REPORT" = False ] ||
    run report "$PYTHON" "$root/tools/report.py" "$OUTPUT" "${game[@]}"
done
[ -z "$EVAL_TASKS" ] || [ "$NODE_RANK" -gt 0 ] ||
  run reasoning "$PYTHON" "$root/tools/evaluate_reasoning.py" --models "${models[@]}" --tasks $EVAL_TASKS \
    --output_dir "$OUTPUT/reasoning" --dtype "$dtype" "${REASONING_ARGS[@]}"
say "finished; everything is in $OUTPUT"
exit
}
