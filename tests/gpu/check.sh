#!/usr/bin/env bash
# What nobody could run for us: this project on your NVIDIA GPU, in at most 30 minutes. From the project's folder, in
# the environment that trains:
#
#   bash tests/gpu/check.sh OUT
#
# OUT/report.md grows with each part and says what was measured; OUT/check.tar.gz holds it with all logs. Models have
# random weights of real shapes (1B and 7B) and are made in WORK, which is removed at the end. 60 GB of memory and 60 GB
# of disk are enough. PYTHON names another interpreter, WORK another folder than OUT/work.
#
#   CPU=1 bash tests/gpu/check.sh OUT   every part in a small form, without a GPU
set -u
OUT=$1
END=$((SECONDS + ${LIMIT:-1740}))
PY=${PYTHON:-python}
WORK=${WORK:-$OUT/work}
check=("$PY" tests/gpu/check.py)
mkdir -p "$OUT" "$WORK"
OUT=$(cd "$OUT" && pwd) WORK=$(cd "$WORK" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
if [ "${CPU:-0}" = 1 ]; then
  export CUDA_VISIBLE_DEVICES=
  small=tiny big=tiny rows=32 words=8 tests=(-k greedy) shape_rows="2 4" steps=4 games=6 engine=generate
  world=(--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50)
else
  small=1b big=7b rows=512 words=64 tests=() shape_rows="16 32 64" steps=10 games=155 engine=vllm world=()
fi

begin() { # begin NAME SECONDS: a part with a clock of its own
  PART=$1 UNTIL=$((SECONDS + $2))
  [ "$UNTIL" -lt "$END" ] || UNTIL=$END
}

step() { # step NAME COMMAND ...: until the part's time is over; its output goes to OUT/PART/NAME.log
  local name=$1 from=$SECONDS status left=$((UNTIL - SECONDS)) log=$OUT/$PART/$1.log
  shift
  mkdir -p "$OUT/$PART"
  if [ "$left" -lt 5 ]; then
    status=left_out
  else
    echo "== $(date +%X) $PART: $name"
    timeout -k 15 "$left" "$@" >"$log" 2>&1
    status=$?
    [ $status = 0 ] || tail -n 5 "$log"
  fi
  printf '%s\t%s\t%s\t%s\t%s\n' "$PART" "$name" "$status" $((SECONDS - from)) "$(memory_since)" >>"$OUT/steps.tsv"
  "${check[@]}" report "$OUT" >"$OUT/report.md" # as it goes: a later step may take the machine down
  [ "$status" = 0 ]
}

memory_since() { # the largest number of MiB in use on one card since the last call
  [ -f "$OUT/memory.now" ] || return 0
  sort -n "$OUT/memory.now" | tail -n 1
  : >"$OUT/memory.now"
}

train() { # train NAME OUTPUT_DIR FLAGS ...: one training with the README's flags under offload
  step "$1" "${torchrun[@]}" train.py --output_dir "$2" --remove_unused_columns False --num_train_epochs 1 \
    --evaluation_strategy no --padding_side right --truncation_side left --save_strategy epoch --lr_scheduler_type cosine \
    --warmup_ratio 0.03 --logging_steps 1 --weight_decay 0. --deepspeed configs/default_offload_opt_param.json \
    --gradient_checkpointing True --tf32 True --bf16 True --report_to none "${@:3}"
}

four_commands() { # four_commands FOLDER BASE ROWS SFT WORDS GAMES: imitation, play, rewards and self-play
  local at=$1 base=$2
  train imitation "$at/imitation" --model_name_or_path "$base" --ref_model_name_or_path "$base" --lm_kl_coeff 0.1 \
    --train_method SFTwithKL --train_data_path "$3" "${imitate[@]}" "${batch[@]}" &&
    step play "${torchrun[@]}" tools/play_llm_game.py --attacker_model_name_or_path "$at/imitation" \
      --defender_model_name_or_path "$at/imitation" --model_prefix im --data_path "$5" --output_dir "$at/games" \
      --task_type sampling --data_suffix words --bf16 True --tf32 True "${play[@]}" &&
    step rewards "$PY" tools/assign_rewards.py --input_data_path "${6:-$at/games/im_sampling_words_results.json}" \
      --output_data_path "$at/rows.json" --sft_data_path "$4" --decay_weight 0.8 "${rewards[@]}" &&
    train self-play "$at/spag1" --model_name_or_path "$at/imitation" --ref_model_name_or_path "$at/imitation" \
      --lm_kl_coeff 0.2 --lm_sft_coeff 0.5 --train_method OfflinePO --train_data_path "$at/rows.json" "${learn[@]}" "${batch[@]}"
}

pack() {
  [ -z "${WATCH:-}" ] || kill "$WATCH" 2>/dev/null
  "${check[@]}" report "$OUT" >"$OUT/report.md"
  (cd "$OUT" && find . -path ./work -prune -o -type f -size -4M ! -name '*.tar.gz' -print0 | tar czf check.tar.gz --null -T -)
  rm -rf "$WORK"
  echo "== after $SECONDS s: $OUT/report.md, and all logs in $OUT/check.tar.gz"
}
keep() { # the small files of a folder of models: records, logs of training, matches
  [ -d "$WORK/$1" ] || return 0
  (cd "$WORK" && find "$1" \( -name '*settings.json' -o -name trainer_state.json -o -name 'matches.*' -o -name '*summary.json' \) \
    ! -path '*/checkpoint-*' -print0 | tar c --null -T - | tar x -C "$OUT")
}
trap pack EXIT
trap 'exit 143' TERM INT
rm -f "$OUT/steps.tsv"
if [ "${CPU:-0}" != 1 ]; then
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader >"$OUT/card" || exit 1
  : >"$OUT/memory.now"
  (while sleep 2; do nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; done >>"$OUT/memory.now") &
  WATCH=$!
fi
cards=$($PY -c 'import torch; print(torch.cuda.device_count() or 1)')
torchrun=("$PY" -m torch.distributed.run --standalone --nproc_per_node="$cards")

begin data 240
step "model_$small" "${check[@]}" model "$WORK/$small" $small
[ $big = $small ] || step "model_$big" "${check[@]}" model "$WORK/$big" $big
step games "$PY" -m tools.prepare_data imitation --output_dir "$WORK/own"
step rows "$PY" tools/assign_rewards.py --input_data_path "$WORK/own/games.jsonl" --output_data_path "$WORK/all.json"
"${check[@]}" split "$WORK/all.json" $rows "$WORK"
head -n $words data/target_words.txt >"$WORK/words.txt"

begin "four_commands_$small" 420 # random weights win no game, so self-play learns from the project's own games
batch=(--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048)
imitate=(--learning_rate 5e-6) learn=(--learning_rate 2e-6) rewards=()
play=(--max_turns 5 --max_length 2048 --max_new_tokens 64)
four_commands "$WORK/four_commands_$small" "$WORK/$small" "$WORK/imitation.json" "$WORK/sft.json" "$WORK/words.txt" "$WORK/some_games.jsonl"
keep "four_commands_$small"
rm -rf "$WORK/four_commands_$small"

begin world 300
at=$WORK/world
batch=(--per_device_train_batch_size 32 --max_length 160) imitate=(--learning_rate 2e-3) learn=(--learning_rate 3e-4)
play=(--max_turns 3 --prompt_templates configs/prompts/tiny.json --max_length 160 --max_new_tokens 24 --temperature 1.0)
rewards=(--prompt_templates configs/prompts/tiny.json --training_prompt play)
[ "${CPU:-0}" != 1 ] || rewards+=(--messages all)
step world "$PY" -m tools.lab.world.build --output_dir "$at" "${world[@]}" &&
  four_commands "$at" "$at/base" "$at/data/imitation.json" "$at/data/facts.json" "$at/data/words.txt" "" &&
  step match "$PY" tools/evaluate_games.py --players imitation="$at/imitation" spag1="$at/spag1" --against imitation \
    --words "$at/data/words.txt" --games_per_word 2 --output_dir "$at/match" "${play[@]}"
keep world
rm -rf "$at"

begin engines 240
for name in slots $engine; do
  eager=()
  [ "$name" != vllm ] || eager=(--vllm_args=--enforce-eager) # vLLM has CUDA graphs in half precision only
  step "greedy_$name" "$PY" tools/play_llm_game.py --attacker_model_name_or_path "$WORK/$small" \
    --defender_model_name_or_path "$WORK/$small" --model_prefix "$name" --data_path "$WORK/words.txt" \
    --output_dir "$WORK/greedy" --task_type testing --data_suffix words --engine "$name" --dtype float32 --max_turns 2 \
    --max_length 1024 --max_new_tokens 40 "${eager[@]}"
done
step compare "${check[@]}" compare "$WORK"/greedy/slots_testing_words_results.json "$WORK"/greedy/"${engine}"_testing_words_results.json
step speed "$PY" -m tools.bench play --model "$WORK/$big" --games "$games"

begin training_speed 360
for each in "$small SFT" "$big OfflinePO --lora_rank 16 --loss_normalization step"; do
  read -r model method <<<"$each"
  for number in $shape_rows; do
    for checkpointing in False True; do
      name=${model}_${method%% *}_${number}_rows_checkpointing_$checkpointing
      # shellcheck disable=SC2086
      step "$name" "$PY" train.py --output_dir "$WORK/$name" --model_name_or_path "$WORK/$model" --train_data_path "$WORK/imitation.json" \
        --train_method $method --max_steps "$steps" --per_device_train_batch_size "$number" --gradient_checkpointing "$checkpointing" \
        --max_length 2048 --learning_rate 1e-5 --logging_steps 1 --save_strategy no --report_to none --bf16 True --tf32 True
      mkdir -p "$OUT/training_speed/$name"
      cp "$WORK/$name/trainer_state.json" "$OUT/training_speed/$name/" 2>/dev/null
      rm -rf "${WORK:?}/$name"
    done
  done
done

begin tests 420
step tests "$PY" -m pytest tests/gpu -v -ra --durations=0 -p no:cacheprovider --basetemp="$WORK/tests" "${tests[@]}"
