#!/usr/bin/env bash
# The whole method in one command: imitation, then epochs of self-play, rewards, learning, match and report.
#
#   tools/run_spag.sh --model M --imitation_data data/train_imitation_gpt4.json --words data/all_target_words.txt \
#       --sft_data data/alpaca_train.json --output outputs/spag
#
# The same command continues a loop that was cut off. `tools/run_spag.sh --help` shows every setting.
# Runs on bash 3.2 (macOS).
# shellcheck disable=SC2086,SC2206  # settings that hold several values are split at blanks
# shellcheck disable=SC2153  # settings are assigned by their names in the table
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# shellcheck source=tools/loop/stages.sh
. "$root/tools/loop/stages.sh"
# An environment that is active; else .venv of this folder; else what the system has.
if [ -z "${PYTHON:-}" ] && [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ] &&
  [ -x "$root/.venv/bin/python" ]; then
  PYTHON=$root/.venv/bin/python
fi
PYTHON=${PYTHON:-$(command -v python || command -v python3 || true)}

# NAME|default|help. "auto" is settled by what the machine has.
SETTINGS_TABLE="\
MODEL||base model: a folder, or a name on the hub (needed)
WORDS||word list of self-play, one word a line (needed)
OUTPUT||folder of all results (needed)
SETTINGS||file of settings, 'name: value' a line
IMITATION_DATA||rows of imitation, one file or several; empty: MODEL has learnt to play already, imitation is skipped
SFT_DATA||SFT examples that are learnt beside the games, e.g. Alpaca's
EPOCHS|3|epochs of self-play
PROMPTS|$root/configs/prompts.json|prompt file
MATCH|substring|substring or word: whether the target word counts inside other words
MAX_TURNS|5|turns of a game
GAMES||play only the first so many words of the list
GAMES_PER_WORD|1|games of each word in an epoch
MAX_LENGTH|2048|tokens of a row, and of prompt and reply together
MAX_NEW_TOKENS|256|tokens of a reply
TEMPERATURE|1.2|of sampling
TOP_K|50|sample from so many tokens; 0: from all
PLAY_BATCH||prompts answered at once; empty: chosen from memory
GLOBAL_BATCH|128|rows of an optimizer step, over all processes
TRAIN_BATCH|2|rows that a process takes at once
IMITATION_LR|5e-6|learning rate of imitation
IMITATION_KL|0.1|weight of the KL in imitation
LEARNING_RATE|2e-6|learning rate of self-play
KL|0.2|weight of the KL in self-play
SFT_COEFF|0.5|weight of the SFT rows in self-play
LORA_RANK||train LoRA adapters of this rank and play on with them merged in; empty: the whole model. Needs peft
CLIP_RANGE|0.2|clip of the importance ratio
DETACH_KL|False|True: keep the gradient out of the KL inside the advantage
DECAY_WEIGHT|0.8|what a message gets of the next one's reward
SEED|42|of play, rewards and training; epoch k adds k
PRECISION|auto|bf16, fp16 or fp32; auto: bf16 with a GPU, else fp32
DEEPSPEED|auto|DeepSpeed configuration, or none; auto: configs/default_offload_opt_param.json with a GPU, else none
GRADIENT_CHECKPOINTING|auto|True or False; auto: True with a GPU
SAVE_STEPS|0.2|training saves to resume from every so many steps, below 1 this part of the run; 0: never
NPROC|auto|processes of this machine; auto: its GPUs, or 1
NNODES|1|machines; the same command runs on each, with OUTPUT on a shared folder
NODE_RANK|0|number of this machine, from 0
RDZV_ENDPOINT||host:port of machine 0 (needed with several machines)
RDZV_ID|spag|name of the meeting, the same on all machines
NODE_TIMEOUT|1800|seconds that the other machines wait for what machine 0 does alone
BACKEND|auto|engine of play and matches: slots, generate (whole batches), or auto
EVAL_WORDS||word lists of the match against imitation, FILE or NAME=FILE, one or several; empty: no match
EVAL_SEEDS|0|seeds of the match, one or several
EVAL_GAMES_PER_WORD|1|games of each word, role and seed of the match
EVAL_IMITATION|False|True: imitation's match against itself too, which shows the spread
REPORT|True|False: no report.html
CHECK_DISK|True|False: start although the disk space may not suffice
IMITATION_ARGS||further flags of train.py in imitation
TRAIN_ARGS||further flags of train.py in self-play
PLAY_ARGS||further flags of tools/play_llm_game.py
REWARD_ARGS||further flags of tools/assign_rewards.py
EVAL_ARGS||further flags of tools/evaluate_games.py"

usage() {
  cat <<'END'
usage: tools/run_spag.sh --model M --words FILE --output DIR [--setting value ...]

Imitation, then epochs of self-play: play, rewards, training, match, report. A setting is a flag (--epochs 2), an
environment variable (EPOCHS=2) or a line of the file that --settings names (epochs: 2); of several the first in this
order counts. Several files or flags in one setting are separated by blanks. PYTHON names the interpreter; else it is
that of the active environment, or of .venv.

END
  local name default help
  while IFS='|' read -r name default help; do
    [ -z "$default" ] || help="$help (default: ${default#"$root"/})"
    printf '  --%-24s %s\n' "$(lower "$name")" "$help"
  done <<<"$SETTINGS_TABLE"
  cat <<'END'

OUTPUT holds, for k = 1 .. EPOCHS:
  settings.json        the settings of the last start
  report.html          the report, renewed after each epoch
  words.txt            the first GAMES words of WORDS, GAMES_PER_WORD times (where these are set)
  logs/STAGE.log       output of imitation, epochK_play, epochK_rewards, epochK_train, epochK_eval, report
  logs/STAGE.command   what the stage's result depends on: its command, and checksums of what it read
  imitation/model/     the model after imitation, with settings and numbers of the training; with LORA_RANK the
                       adapters, and in merged/ the model
  epochK/episodes/     games of epoch K-1's model against itself (epoch 0 is imitation)
  epochK/rows/         the rows made of them
  epochK/model/        the model after epoch K
  epochK/eval/         its match against imitation
A stage whose result is whole is skipped; the same command continues a loop that was cut off, also inside play and
training. A result that was made by another command stops the loop. Settings that only concern speed or memory (NPROC,
TRAIN_BATCH, PLAY_BATCH, DEEPSPEED, SAVE_STEPS, ...) may change in between, but a training in its middle under
DeepSpeed needs the number of processes that it was begun with.
END
}

upper() { printf %s "$1" | tr '[:lower:]' '[:upper:]'; }
lower() { printf %s "$1" | tr '[:upper:]' '[:lower:]'; }
bad_usage() { printf 'run_spag.sh: error: %s\n' "$*" >&2; exit 2; }
known() { case $'\n'$SETTINGS_TABLE in *$'\n'"$1|"*) ;; *) return 1 ;; esac; }

# --- settings -------------------------------------------------------------------------------------------------------

read_flags() {
  local name value
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --*=*) name=${1%%=*} value=${1#*=} ;;
      --*)
        [ $# -gt 1 ] || bad_usage "$1 needs a value"
        name=$1 value=$2
        shift ;;
      *) bad_usage "'$1' belongs to no flag; several values of one flag go in quotes" ;;
    esac
    name=$(upper "${name#--}")
    known "$name" || bad_usage "unknown flag --$(lower "$name"); --help lists them"
    printf -v "$name" %s "$value"
    shift
  done
}

read_settings_file() {  # what flags and environment have set stays
  local line name value number=0 pattern='^[[:space:]]*([A-Za-z_]+)[[:space:]]*[:=][[:space:]]*(.*)$'
  [ -f "$1" ] || bad_usage "$1: no such file (--settings)"
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    line=${line%$'\r'}
    case $line in \#* | ---) continue ;; esac
    line=${line%%[[:space:]]#*}
    [ -n "${line//[[:space:]]/}" ] || continue
    [[ $line =~ $pattern ]] || bad_usage "$1:$number: expected 'name: value', got: $line"
    name=$(upper "${BASH_REMATCH[1]}") value=${BASH_REMATCH[2]}
    known "$name" || bad_usage "$1:$number: unknown setting ${BASH_REMATCH[1]}; --help lists them"
    value=${value%"${value##*[![:space:]]}"}
    case $value in \"*\" | \'*\') value=${value:1:${#value}-2} ;; esac
    [ -n "${!name+set}" ] || printf -v "$name" %s "$value"
  done <"$1"
}

settle_settings() {
  local name default help gpus=0
  [ -z "${SETTINGS:-}" ] || read_settings_file "$SETTINGS"
  while IFS='|' read -r name default help; do
    [ -n "${!name+set}" ] || printf -v "$name" %s "$default"
  done <<<"$SETTINGS_TABLE"
  case " $NPROC $PRECISION $DEEPSPEED $GRADIENT_CHECKPOINTING " in *" auto "*) gpus=$(loop_support gpus) ;; esac
  [ "$NPROC" != auto ] || NPROC=$((gpus > 0 ? gpus : 1))
  [ "$PRECISION" != auto ] || PRECISION=$([ "$gpus" -gt 0 ] && echo bf16 || echo fp32)
  [ "$DEEPSPEED" != auto ] ||
    DEEPSPEED=$([ "$gpus" -gt 0 ] && echo "$root/configs/default_offload_opt_param.json" || echo none)
  [ "$GRADIENT_CHECKPOINTING" != auto ] || GRADIENT_CHECKPOINTING=$([ "$gpus" -gt 0 ] && echo True || echo False)
}

check_settings() {  # all problems at once, then the lock, settings.json and the disk space
  local name rest pairs=()
  while IFS='|' read -r name rest; do pairs+=("$name=${!name}"); done <<<"$SETTINGS_TABLE"
  loop_support check "${pairs[@]}" || exit 2
  mkdir -p "$OUTPUT/logs"
  OUTPUT=$(cd "$OUTPUT" && pwd)
  [ "$NODE_RANK" -eq 0 ] || return 0
  exec 9>>"$OUTPUT/logs/.lock" # kept by this process and what it starts, until the last of them has ended
  loop_support lock 9 || fail "$OUTPUT: another loop, or a stage that it left behind, is at work here; end it first"
  loop_support prepare "${pairs[@]}" || exit 1
}

# --- the method -----------------------------------------------------------------------------------------------------

train() {  # train STAGE OUTPUT_DIR START METHOD FLAGS...: from the model START, which is the reference too
  local name=$1 model=$2 start=$3 method=$4
  shift 4
  local trained=(--ref_model_name_or_path "$start") merged=''
  [ -z "$LORA_RANK" ] || trained=(--lora_rank "$LORA_RANK" --lora_merge True) merged=/merged # reference: no adapters
  program=("$root/train.py" --train_method "$method" --output_dir "$model" --model_name_or_path "$start"
    "${trained[@]}" --num_train_epochs 1 --max_length "$MAX_LENGTH" --padding_side right
    --truncation_side left --lr_scheduler_type cosine --warmup_ratio 0.03 --weight_decay 0.0 --logging_steps 1
    ${precision[@]+"${precision[@]}"} "$@")
  counts=("--global_batch $GLOBAL_BATCH") # stands in no single flag
  how=(--per_device_train_batch_size "$TRAIN_BATCH" --gradient_accumulation_steps "$accumulation"
    --per_device_eval_batch_size $((TRAIN_BATCH > 8 ? TRAIN_BATCH : 8)) --gradient_checkpointing
    "$GRADIENT_CHECKPOINTING" --eval_strategy no) # the second batch size is that of the reference
  if [ "$SAVE_STEPS" = 0 ]; then
    how+=(--save_strategy no)
  else
    how+=(--save_strategy steps --save_steps "$SAVE_STEPS" --save_total_limit 1)
  fi
  [ "$DEEPSPEED" = none ] || how+=(--deepspeed "$DEEPSPEED")
  if compgen -G "$model/checkpoint-*" >/dev/null; then
    how+=(--resume_from_checkpoint True)
  else
    how+=(--overwrite_output_dir True)
  fi
  makes=("$model/train_results.json")
  run_stage "$name" launched
  # The optimizer's state, most of a checkpoint, is of no more use.
  if [ "$NODE_RANK" -eq 0 ]; then rm -rf "$model"/checkpoint-*; fi
  model_before=$model$merged
  made_by=("$model/train_results.json")
}

play() {  # games of the last model against itself
  local name
  name=imitation
  [ "$epoch" -eq 1 ] || name=epoch$((epoch - 1))
  stem=$OUTPUT/epoch$epoch/episodes/${name}_sampling_words
  program=("$root/tools/play_llm_game.py" --attacker_model_name_or_path "$model_before"
    --defender_model_name_or_path "$model_before" --data_path "$words" --output_dir "$OUTPUT/epoch$epoch/episodes"
    --model_prefix "$name" --data_suffix words --task_type sampling "${game[@]}" "${sampling[@]}"
    --seed $((SEED + epoch)) $PLAY_ARGS)
  how=(--engine "$BACKEND" ${PLAY_BATCH:+--per_device_eval_batch_size "$PLAY_BATCH"})
  reads=(${made_by[@]+"${made_by[@]}"} "$words" "$PROMPTS")
  makes=("${stem}_results.json" "${stem}_summary.json")
  run_stage "epoch${epoch}_play" launched
}

assign_rewards() {
  local rows=$OUTPUT/epoch$epoch/rows/rows
  program=("$root/tools/assign_rewards.py" --input_data_path "${stem}_results.json" --output_data_path "$rows.json"
    --decay_weight "$DECAY_WEIGHT" --match "$MATCH" --prompt_templates "$PROMPTS" --seed $((SEED + epoch))
    ${SFT_DATA:+--sft_data_path "$SFT_DATA"} $REWARD_ARGS)
  how=()
  reads=("${stem}_summary.json" "$PROMPTS" ${SFT_DATA:+"$SFT_DATA"})
  makes=("${rows}_rewards_settings.json" "$rows.json")
  run_stage "epoch${epoch}_rewards" alone
}

learn() {
  local rows=$OUTPUT/epoch$epoch/rows/rows
  reads=(${made_by[@]+"${made_by[@]}"} "${rows}_rewards_settings.json")
  train "epoch${epoch}_train" "$OUTPUT/epoch$epoch/model" "$model_before" OfflinePO --train_data_path "$rows.json" \
    --lm_kl_coeff "$KL" --lm_sft_coeff "$SFT_COEFF" --clip_range "$CLIP_RANGE" --detach_kl "$DETACH_KL" \
    --learning_rate "$LEARNING_RATE" --seed $((SEED + epoch)) $TRAIN_ARGS
}

evaluate() {  # evaluate NAME: the last model, under this name, against imitation
  local item players=("imitation=$imitation") lists=()
  [ "$1" = imitation ] || players+=("$1=$model_before")
  for item in $EVAL_WORDS; do
    case $item in *=*) ;; *) item=$(basename "${item%.*}")=$item ;; esac
    lists+=("$item")
  done
  program=("$root/tools/evaluate_games.py" --players "${players[@]}" --against imitation --words "${lists[@]}"
    --seeds $EVAL_SEEDS --games_per_word "$EVAL_GAMES_PER_WORD" --task_type sampling "${game[@]}" "${sampling[@]}"
    --output_dir "$OUTPUT/$1/eval" $EVAL_ARGS)
  how=(--engine "$BACKEND" ${PLAY_BATCH:+--per_device_eval_batch_size "$PLAY_BATCH"})
  reads=(${made_by[@]+"${made_by[@]}"} "$PROMPTS")
  for item in "${lists[@]}"; do reads+=("${item#*=}"); done
  makes=("$OUTPUT/$1/eval/matches.json")
  run_stage "$1_eval" launched
}

report() {  # a failure costs no result, so it does not end the loop
  [ "$REPORT" = True ] && [ "$NODE_RANK" -eq 0 ] || return 0
  stage=report log=$OUTPUT/logs/report.log warning=''
  if run_logged "$PYTHON" "$root/tools/report.py" "$OUTPUT"; then
    say "report: $OUTPUT/report.html"
  else
    warning="report failed; its log: $log"
    warn "$warning"
  fi
}

tell_time() {  # after an epoch that was watched from its beginning to its end
  local seconds=$1 left=$((EPOCHS - epoch))
  [ "$watched" = True ] || return 0
  say "epoch $epoch took $(duration "$seconds") ($times)"
  [ "$left" -eq 0 ] || say "epochs left: $left, about $(duration $((left * seconds)))"
}

# shellcheck disable=SC2317  # called by the traps
stop() {  # ended by a signal: so are the programs that this one started
  trap '' INT TERM HUP
  loop_support stop $$ || true
  printf '\nrun_spag.sh: stopped%s; the same command continues\n' "${stage:+ in $stage}" >&2
  exit "$1"
}

main() {
  local started
  read_flags "$@"
  [ -n "$PYTHON" ] || bad_usage "no python found; PYTHON names one"
  settle_settings
  trap 'stop 130' INT
  trap 'stop 143' TERM HUP
  check_settings
  accumulation=$((GLOBAL_BATCH / (NPROC * NNODES * TRAIN_BATCH)))
  case $PRECISION in
    bf16) precision=(--bf16 True --tf32 True) half=(--bf16 True) ;;
    fp16) precision=(--fp16 True) half=(--fp16 True) ;;
    *) precision=() half=() ;;
  esac
  game=(--taboo_max_turns "$MAX_TURNS" --match "$MATCH" --prompt_templates "$PROMPTS")
  sampling=(--max_length "$MAX_LENGTH" --max_new_tokens "$MAX_NEW_TOKENS" --temperature "$TEMPERATURE"
    --top_k "$TOP_K" ${half[@]+"${half[@]}"})
  words=$WORDS
  if [ -n "$GAMES" ] || [ "$GAMES_PER_WORD" != 1 ]; then
    words=$OUTPUT/words.txt
    [ "$NODE_RANK" -ne 0 ] || loop_support word_list "$WORDS" "$GAMES" "$GAMES_PER_WORD" "$words"
  fi

  epoch=0 times='' watched=True made_by=() model_before=$MODEL warning=''
  reads=($IMITATION_DATA)
  if [ -d "$MODEL" ]; then reads+=("$MODEL") made_by=("$MODEL"); fi
  [ -z "$IMITATION_DATA" ] || train imitation "$OUTPUT/imitation/model" "$MODEL" SFTwithKL \
    --train_data_path $IMITATION_DATA --lm_kl_coeff "$IMITATION_KL" --learning_rate "$IMITATION_LR" --seed "$SEED" \
    $IMITATION_ARGS
  imitation=$model_before
  [ -z "$EVAL_WORDS" ] || [ "$EVAL_IMITATION" != True ] || evaluate imitation

  while [ "$epoch" -lt "$EPOCHS" ]; do
    epoch=$((epoch + 1)) started=$SECONDS times='' watched=True
    play
    assign_rewards
    learn
    [ -z "$EVAL_WORDS" ] || evaluate "epoch$epoch"
    tell_time $((SECONDS - started))
    [ -z "$times" ] || [ "$epoch" -eq "$EPOCHS" ] || report # the last one's follows, whether a stage ran or not
  done
  report
  say "finished; everything is in $OUTPUT"
  [ -z "$warning" ] || warn "$warning"
}

main "$@"; exit # at once: what bash has not read yet of this file may have changed meanwhile
