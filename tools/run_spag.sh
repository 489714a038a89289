#!/usr/bin/env bash
# The whole method: imitation, then epochs of self-play. An epoch is play, rewards, training, a match and the report.
#
#   tools/run_spag.sh configs/llama2_7b.sh SEED=142 OUTPUT=outputs/spag142
#
# Arguments are settings, NAME=VALUE, and files of settings; --help shows all of them (configs/defaults.sh). The same
# command continues a loop that was stopped. A stage's log is OUTPUT/logs/STAGE.log.
# shellcheck disable=SC2153,SC2154,SC2329  # settings of several values are arrays
set -eo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
# shellcheck source=tools/loop/common.sh
. "$root/tools/loop/common.sh" # run STAGE COMMAND..., and signals

main() {
  case $1 in --help | -h) cat "$root/configs/defaults.sh"; exit ;; esac
  "$PYTHON" -c 'import filelock' >/dev/null 2>&1 || {
    warn "error: ${PYTHON:-python} lacks this project's packages: source .venv/bin/activate, or pip install -r requirements.txt"
    exit 2
  }
  OUTPUT=$("$PYTHON" "$root/tools/loop/settings.py" --output "$@") # empty but on machine 0
  [ -z "$OUTPUT" ] || { mkdir -p "$OUTPUT" && exec 9>>"$OUTPUT/.loop.lock"; } # shell and stages hold the lock
  settings=$("$PYTHON" "$root/tools/loop/settings.py" ${OUTPUT:+--lock} "$@") # lines NAME='value'; some are arrays
  eval "$settings"
  set_flags
  model=${IMITATION_MODEL:-$MODEL} player=imitation # the newest model, and its name in files
  [ -z "$IMITATION_DATA" ] || [ -n "$IMITATION_MODEL" ] || imitate
  end_after imitation
  imitation=$model models=("base=$MODEL")
  [ "$model" = "$MODEL" ] || models+=("imitation=$model")
  for ((epoch = 1; epoch <= EPOCHS; epoch++)); do
    folder=$OUTPUT/epoch$epoch seed=$((SEED + epoch))
    case $CONTROL in sft | silent) ;; *) play ;; esac
    end_after "epoch${epoch}_play"
    on_machine_0 make_rows
    learn
    end_after "epoch${epoch}_train"
    player=epoch$epoch models+=("epoch$epoch=$model")
    [ -z "$EVAL_WORDS" ] || [ $((epoch % EVAL_EVERY)) -gt 0 ] || match
    [ -z "$BELIEF_GAMES" ] || on_machine_0 belief
    [ "$REPORT" = False ] || on_machine_0 run report "$PYTHON" "$root/tools/report.py" "$OUTPUT" "${game_name[@]}"
  done
  [ -z "$EVAL_TASKS" ] || on_machine_0 run reasoning "$PYTHON" "$root/tools/evaluate_reasoning.py" \
    --models "${models[@]}" --tasks "${EVAL_TASKS[@]}" --output_dir "$OUTPUT/reasoning" --dtype "$dtype" \
    "${REASONING_ARGS[@]}"
  say "finished in $((SECONDS / 60)) min; everything is in $OUTPUT"
}

imitate() {
  train imitation "$OUTPUT/imitation/model" --train_method SFTwithKL --train_data_path "${IMITATION_DATA[@]}" \
    --lm_kl_coeff "$IMITATION_KL" --learning_rate "${IMITATION_LR:-${lora_rate:-5e-6}}" --seed "$SEED" \
    "${IMITATION_ARGS[@]}"
}

play() { # the newest model against itself; afterwards $episodes is the file of the games
  episodes=$FIRST_EPISODES
  if [ "$epoch" -eq 1 ] && [ -n "$episodes" ]; then return; fi
  episodes=$folder/episodes/${player}_sampling_words_results.json
  launch "epoch${epoch}_play" "$play_processes" "$root/tools/play_llm_game.py" --seed "$seed" \
    --attacker_model_name_or_path "$model" --defender_model_name_or_path "$model" \
    --data_path "$OUTPUT/words.txt" --output_dir "$folder/episodes" --model_prefix "$player" --data_suffix words \
    "${game[@]}" "${sampling[@]}" "${PLAY_ARGS[@]}"
}

make_rows() { # the rows of the games, or of a control: epochK/rows/rows.json
  local like_rows=$LIKE/epoch$epoch/rows/rows.json winners=$folder/rows/winners.json at_once=$TRAIN_BATCH
  case ${TRAIN_ARGS[*]} in *loss_normalization[\ =]step*) at_once=$GLOBAL_BATCH ;; esac
  case $CONTROL in
    sft) control "$like_rows" --sft_data_path "$SFT_DATA" --seed "$seed" "${chat[@]}" ;;
    silent) control "$like_rows" ;;
    cloning) rewards "$winners" && control "$winners" --sft_coeff "$SFT_COEFF" --rows_at_once "$at_once" ;;
    coin_by_length) rewards "$folder/rows/rows.json" --permute_outcomes True ;;
    *) rewards "$folder/rows/rows.json" ;;
  esac
}

rewards() { # rewards FILE FLAGS...
  [ "$THINKING" = False ] || set -- "$@" --training_prompt play
  run "epoch${epoch}_rewards" "$PYTHON" "$root/tools/assign_rewards.py" --input_data_path "$episodes" \
    --output_data_path "$1" --seed "$seed" "${game[@]}" --decay_weight "$DECAY_WEIGHT" --losers "$LOSERS" \
    --ties "$TIES" --baseline "$BASELINE" --role_weights "$ROLE_WEIGHTS" ${SFT_DATA:+--sft_data_path "$SFT_DATA"} \
    "${chat[@]}" "${@:2}" "${REWARD_ARGS[@]}"
}

control() { # control ROWS FLAGS...
  run "epoch${epoch}_$CONTROL" "$PYTHON" "$root/tools/controls.py" "$CONTROL" --rows "$1" \
    --output "$folder/rows/rows.json" "${@:2}"
}

learn() {
  case $CONTROL in cloning | sft) set -- --allow_no_game_rows True ;; esac
  train "epoch${epoch}_train" "$folder/model" --train_method OfflinePO --train_data_path "$folder/rows/rows.json" \
    --lm_kl_coeff "$KL" --lm_sft_coeff "$SFT_COEFF" --clip_range "$CLIP_RANGE" --detach_kl "$DETACH_KL" \
    --learning_rate "${LEARNING_RATE:-${lora_rate:-2e-6}}" --seed "$seed" "$@" "${TRAIN_ARGS[@]}"
}

train() { # train STAGE FOLDER FLAGS...: $model is the start and the reference; afterwards it is the new model
  local saving=(--save_strategy steps --save_steps "$SAVE_STEPS" --save_total_limit 1)
  case $SAVE_STEPS in *[1-9]*) ;; *) saving=(--save_strategy no) ;; esac # 0 or 0.0
  launch "$1" "$NPROC" "$root/train.py" --output_dir "$2" --model_name_or_path "$model" \
    --ref_model_name_or_path "$model" --num_train_epochs 1 --per_device_train_batch_size "$TRAIN_BATCH" \
    --gradient_accumulation_steps $((GLOBAL_BATCH / (NPROC * NNODES * TRAIN_BATCH))) \
    --max_length "$MAX_LENGTH" --padding_side right --truncation_side left --lr_scheduler_type cosine \
    --warmup_ratio 0.03 --weight_decay 0.0 --logging_steps 1 --eval_strategy no \
    --per_device_eval_batch_size $((TRAIN_BATCH > 8 ? TRAIN_BATCH : 8)) "${precision[@]}" "${saving[@]}" \
    --gradient_checkpointing "$GRADIENT_CHECKPOINTING" ${DEEPSPEED:+--deepspeed "$DEEPSPEED"} \
    ${LORA_RANK:+--lora_rank "$LORA_RANK" --lora_merge True} "${@:3}"
  on_machine_0 find "$2" -maxdepth 1 -name 'checkpoint-*' -exec rm -rf {} + || # this training has ended
    warn "warning: $2: checkpoints that cannot be deleted stay"
  model=$2${LORA_RANK:+/merged}
}

match() { # the newest model against imitation
  launch "${player}_eval" "$play_processes" "$root/tools/evaluate_games.py" \
    --players "imitation=$imitation" "$player=$model" --against imitation --words "${EVAL_WORDS[@]}" --seeds "${EVAL_SEEDS[@]}" \
    --games_per_word "$EVAL_GAMES_PER_WORD" --output_dir "$folder/eval" "${game[@]}" "${sampling[@]}" "${EVAL_ARGS[@]}"
}

belief() { # what the hints of these games tell the newest model; after epoch 1 base and imitation too
  local newest=("$player=$model")
  [ "$epoch" -gt 1 ] || newest=("${models[@]}")
  run "${player}_belief" "$PYTHON" "$root/tools/evaluate_belief.py" --models "${newest[@]}" --games "$BELIEF_GAMES" \
    --output_dir "$folder/belief" --chat_template "$CHAT_TEMPLATE" --dtype "$dtype" \
    --max_length $((MAX_LENGTH - MAX_NEW_TOKENS)) "${game[@]}" "${BELIEF_ARGS[@]}"
}

set_flags() { # flags that several stages share
  case $PRECISION in
    bf16) dtype=bfloat16 precision=(--bf16 True --tf32 True) tf32=(--tf32 True) ;;
    fp16) dtype=float16 precision=(--fp16 True) tf32=() ;;
    fp32) dtype=float32 precision=() tf32=() ;;
  esac
  lora_rate=${LORA_RANK:+1e-4} # merging adapters into bf16 weights loses smaller updates
  [ "$DEEPSPEED" != none ] || DEEPSPEED=''
  game_name=(--game "$GAME" ${GAME_OPTIONS:+--game_options "${GAME_OPTIONS[@]}"}) # all that the report needs
  game=("${game_name[@]}" ${PROMPTS:+--prompt_templates "$PROMPTS"})
  sampling=(--task_type sampling ${MAX_TURNS:+--max_turns "$MAX_TURNS"} --chat_template "$CHAT_TEMPLATE"
    --thinking "$THINKING" --max_length "$MAX_LENGTH" --max_new_tokens "$MAX_NEW_TOKENS"
    --temperature "$TEMPERATURE" --top_k "$TOP_K" --dtype "$dtype" "${tf32[@]}" --engine "$ENGINE"
    --tensor_parallel_size "$TENSOR_PARALLEL_SIZE" ${PLAY_BATCH:+--per_device_eval_batch_size "$PLAY_BATCH"})
  play_processes=$((NPROC / TENSOR_PARALLEL_SIZE))
  chat=(--chat_template "$CHAT_TEMPLATE" --thinking "$THINKING")
  [ "$CHAT_TEMPLATE" = False ] || chat+=(--tokenizer "$MODEL")
  case ${REWARD_ARGS[*]} in *'--trust_remote_code True'*) chat+=(--trust_remote_code True) ;; esac # for controls too
}

launch() { # launch STAGE PROCESSES PROGRAM FLAGS...: run a stage in so many processes on each machine
  local threads=$(($(getconf _NPROCESSORS_ONLN) / $2)) torchrun=(-m torch.distributed.run --nproc_per_node "$2"
    --nnodes "$NNODES" --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT" --rdzv_id "$RDZV_ID-$1"
    --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=86400,read_timeout=86400")
  if [ $((NNODES * $2)) -eq 1 ]; then
    run "$1" "$PYTHON" "${@:3}"
  else # torchrun would give each process one thread; under offload the optimizer needs more
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))} run "$1" "$PYTHON" "${torchrun[@]}" "${@:3}"
  fi
}

on_machine_0() { [ "$NODE_RANK" -gt 0 ] || "$@"; }
end_after() { [ "$1" != "$UNTIL" ] || { say "stopped after $1, as UNTIL says"; exit 0; }; }

export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}" # rows differ in length
main "$@"; exit # on one line: bash then reads no more of this file, so it may be edited meanwhile
