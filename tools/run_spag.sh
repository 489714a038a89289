#!/usr/bin/env bash
# The whole method: imitation, then epochs of self-play. An epoch is play, rewards, training, a match and the report.
#
#   tools/run_spag.sh configs/llama2_7b.sh SEED=142 OUTPUT=outputs/spag142
#
# Arguments are settings, NAME=VALUE, and files of settings; --help lists all of them (configs/defaults.sh). The same
# command continues a loop that was stopped: every program skips what it has finished, play goes on after its last
# finished game, training from its last checkpoint. Settings that would change results which are there are refused
# (tools/loop/begin.py). A stage's log is OUTPUT/logs/STAGE.log. data/README.md describes all files.
set -efo pipefail # -f: no value is a pattern of file names
# shellcheck disable=SC2086,SC2153,SC2154  # settings of several values are split at their blanks
{ # bash reads this block as a whole before it runs it: the file may change meanwhile
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=tools/loop/run.sh
. "$root/tools/loop/run.sh"
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
PATH=$PATH:$(dirname "$(command -v "$PYTHON")") # DeepSpeed compiles its operators with pip's ninja, which is there
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}" # rows differ in length
# shellcheck source=tools/loop/settings.sh
. "$root/tools/loop/settings.sh"
read_settings "$@"
lora_rate=${LORA_RANK:+1e-4} # merging into bf16 weights loses smaller updates
IMITATION_LR=${IMITATION_LR:-${lora_rate:-5e-6}} LEARNING_RATE=${LEARNING_RATE:-${lora_rate:-2e-6}}
settings=()
for name in $known; do settings+=("$name=${!name}"); done

open_lock # descriptor 9, which `begin` locks for as long as this script and the stage at work run
# Check the settings, compare them with OUTPUT/settings.json or write them there, and write the list of target words of
# an epoch, OUTPUT/words.txt.
in_foreground "$PYTHON" -m tools.loop.begin --lock 9 "${settings[@]}"
# Choose what is "auto" or comes from LIKE. Also set: like_model, the imitation model of LIKE; dtype; and the arrays
# precision_flags and *_ARGS, which are lists of words from here on.
choices=$("$PYTHON" -m tools.loop.fit "${settings[@]}")
eval "$choices"

# run STAGE COMMAND... is in tools/loop/run.sh: the output goes to the stage's log, and this script ends if it fails.
on_machine_0() { [ "$NODE_RANK" -gt 0 ] || "$@"; }
end_after() { [ "$1" != "$UNTIL" ] || { say "stopped after $1, as UNTIL says"; exit 0; }; }

launch() { # launch STAGE PROCESSES PROGRAM FLAGS...: run a stage in so many processes on each machine
  local torchrun=()
  if [ "$NNODES" -gt 1 ]; then
    torchrun=(-m torch.distributed.run --nproc_per_node "$2" --nnodes "$NNODES"
      --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT" --rdzv_id "$RDZV_ID-$1"
      --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=1800,read_timeout=1800")
  elif [ "$2" -gt 1 ]; then
    torchrun=(-m torch.distributed.run --nproc_per_node "$2" --standalone)
  fi
  run "$1" "$PYTHON" "${torchrun[@]}" "${@:3}"
}

train() { # train STAGE FOLDER FLAGS...: $model is the start and the reference; afterwards it is the new model
  launch "$1" "$NPROC" "$root/train.py" --output_dir "$2" --model_name_or_path "$model" \
    --ref_model_name_or_path "$model" --num_train_epochs 1 --per_device_train_batch_size "$TRAIN_BATCH" \
    --gradient_accumulation_steps $((GLOBAL_BATCH / (NPROC * NNODES * TRAIN_BATCH))) \
    --max_length "$MAX_LENGTH" --padding_side right --truncation_side left --lr_scheduler_type cosine \
    --warmup_ratio 0.03 --weight_decay 0.0 --logging_steps 1 --eval_strategy no \
    --per_device_eval_batch_size $((TRAIN_BATCH > 8 ? TRAIN_BATCH : 8)) "${precision_flags[@]}" "${saving_flags[@]}" \
    --gradient_checkpointing "$GRADIENT_CHECKPOINTING" ${DEEPSPEED:+--deepspeed "$DEEPSPEED"} \
    ${LORA_RANK:+--lora_rank "$LORA_RANK" --lora_merge True} "${@:3}"
  on_machine_0 find "$2" -maxdepth 1 -name 'checkpoint-*' -exec rm -rf {} + # this training has ended
  model=$2${LORA_RANK:+/merged}
}

match() { # match NAME PLAYER...: stage NAME_eval, against the imitation model
  launch "$1_eval" "$play_processes" "$root/tools/evaluate_games.py" --players "${@:2}" --against imitation \
    --words $EVAL_WORDS --seeds $EVAL_SEEDS --games_per_word "$EVAL_GAMES_PER_WORD" \
    --output_dir "$OUTPUT/$1/eval" "${game_flags[@]}" "${play_flags[@]}" "${EVAL_ARGS[@]}"
}

# The flags of the stages.
saving_flags=(--save_strategy steps --save_steps "$SAVE_STEPS" --save_total_limit 1)
case $SAVE_STEPS in *[1-9]*) ;; *) saving_flags=(--save_strategy no) ;; esac # 0 or 0.0
game_flags=(--game "$GAME" ${GAME_OPTIONS:+--game_options $GAME_OPTIONS})
prompt_flags=(${PROMPTS:+--prompt_templates "$PROMPTS"})
play_flags=("${prompt_flags[@]}" --task_type sampling ${MAX_TURNS:+--max_turns "$MAX_TURNS"} --max_length "$MAX_LENGTH"
  --max_new_tokens "$MAX_NEW_TOKENS" --temperature "$TEMPERATURE" --top_k "$TOP_K" "${precision_flags[@]}"
  --engine "$ENGINE" --tensor_parallel_size "$TENSOR_PARALLEL_SIZE"
  ${PLAY_BATCH:+--per_device_eval_batch_size "$PLAY_BATCH"})
reward_flags=("${prompt_flags[@]}" --decay_weight "$DECAY_WEIGHT" --losers "$LOSERS" --ties "$TIES"
  --role_weights "$ROLE_WEIGHTS" --min_game_rows "$GLOBAL_BATCH" ${SFT_DATA:+--sft_data_path "$SFT_DATA"}
  ${CONTROL:+--control "$CONTROL"})
method_flags=(--train_method OfflinePO --lm_kl_coeff "$KL" --lm_sft_coeff "$SFT_COEFF" --clip_range "$CLIP_RANGE"
  --detach_kl "$DETACH_KL" --learning_rate "$LEARNING_RATE")
if [ "$CHAT_TEMPLATE" = True ]; then
  play_flags+=(--chat_template True) reward_flags+=(--chat_template True --tokenizer "$MODEL")
fi
case $CONTROL in cloning | sft) method_flags+=(--allow_no_game_rows True) ;; esac
if [ "$CONTROL" = cloning ]; then # its weights depend on how many rows a loss is averaged over: a micro-batch or a step
  averaged=$TRAIN_BATCH
  case ${TRAIN_ARGS[*]} in *loss_normalization[\ =]step*) averaged=$GLOBAL_BATCH ;; esac
  reward_flags+=(--sft_coeff "$SFT_COEFF" --rows_at_once "$averaged")
fi
play_processes=$((NPROC / TENSOR_PARALLEL_SIZE)) models=("base=$MODEL")

# The stages. $model is the newest model, and $player its name in files.
model=${like_model:-$MODEL} player=imitation
if [ -n "$IMITATION_DATA" ] && [ -z "$like_model" ]; then
  train imitation "$OUTPUT/imitation/model" --train_method SFTwithKL --train_data_path $IMITATION_DATA \
    --lm_kl_coeff "$IMITATION_KL" --learning_rate "$IMITATION_LR" --seed "$SEED" "${IMITATION_ARGS[@]}"
fi
end_after imitation
imitation=$model
[ "$imitation" = "$MODEL" ] || models+=("imitation=$imitation")
[ -z "$EVAL_WORDS" ] || [ "$EVAL_IMITATION" = False ] || match imitation "imitation=$imitation"

for ((epoch = 1; epoch <= EPOCHS; epoch++)); do
  folder=$OUTPUT/epoch$epoch seed=$((SEED + epoch))
  if [ "$CONTROL" = sft ] || [ "$CONTROL" = silent ]; then # no games are played
    episodes=(--like_rows "$LIKE/epoch$epoch/rows/rows.json")
  elif [ "$epoch" -eq 1 ] && [ -n "$FIRST_EPISODES" ]; then
    episodes=(--input_data_path "$FIRST_EPISODES")
  else
    episodes=(--input_data_path "$folder/episodes/${player}_sampling_words_results.json")
    launch "epoch${epoch}_play" "$play_processes" "$root/tools/play_llm_game.py" --seed "$seed" \
      --attacker_model_name_or_path "$model" --defender_model_name_or_path "$model" \
      --data_path "$OUTPUT/words.txt" --output_dir "$folder/episodes" --model_prefix "$player" --data_suffix words \
      "${game_flags[@]}" "${play_flags[@]}" "${PLAY_ARGS[@]}"
  fi
  end_after "epoch${epoch}_play"
  on_machine_0 run "epoch${epoch}_rewards" "$PYTHON" "$root/tools/assign_rewards.py" "${episodes[@]}" \
    --output_data_path "$folder/rows/rows.json" --seed "$seed" "${game_flags[@]}" "${reward_flags[@]}" \
    "${REWARD_ARGS[@]//\{epoch\}/$epoch}"
  train "epoch${epoch}_train" "$folder/model" --train_data_path "$folder/rows/rows.json" --seed "$seed" \
    "${method_flags[@]}" "${TRAIN_ARGS[@]}"
  end_after "epoch${epoch}_train"
  player=epoch$epoch models+=("epoch$epoch=$model")
  [ -z "$EVAL_WORDS" ] || [ $((epoch % EVAL_EVERY)) -gt 0 ] || match "$player" "imitation=$imitation" "$player=$model"
  [ "$REPORT" = False ] || on_machine_0 run report "$PYTHON" "$root/tools/report.py" "$OUTPUT" "${game_flags[@]}"
done
[ -z "$EVAL_TASKS" ] || on_machine_0 run reasoning "$PYTHON" "$root/tools/evaluate_reasoning.py" \
  --models "${models[@]}" --tasks $EVAL_TASKS --output_dir "$OUTPUT/reasoning" --dtype "$dtype" "${REASONING_ARGS[@]}"
on_machine_0 "$PYTHON" -m tools.loop.begin --end "$OUTPUT" # marks the record as finished
say "finished in $((SECONDS / 60)) min; everything is in $OUTPUT"
exit
}
