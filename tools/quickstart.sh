#!/usr/bin/env bash
# From a fresh checkout to a report: makes .venv and a small world, and runs the whole method on it
# (tools/run_spag.sh). Run again, it continues or shows what is there.
#
#   bash tools/quickstart.sh                  a made-up world of 162 words; needs no GPU, no compiler, no download
#   WORLD=english bash tools/quickstart.sh    a pretrained model of 135M parameters and English games
#   QUICK=1 bash tools/quickstart.sh          a smaller run that shows that everything works, and nothing else
#
# PYTHON names the interpreter (3.10 or newer), OUTPUT the folder of results. Arguments go to run_spag.sh: EPOCHS=2.
# The scripts run on bash 3.2, which macOS has.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=tools/loop/run.sh
. tools/loop/run.sh
# shellcheck source=tools/loop/environment.sh
. tools/loop/environment.sh

WORLD=${WORLD:-tiny} QUICK=${QUICK:-0}
name=quickstart$([ "$WORLD" = tiny ] || echo "_$WORLD")$([ "$QUICK" = 0 ] || echo _quick)
OUTPUT=${OUTPUT:-outputs/$name}
data=$OUTPUT/data

install_rest() { # DeepSpeed needs a compiler, and is left out where there is no GPU
  cp requirements.txt .venv/requirements.txt
  [ -n "$gpu" ] || grep -v '^deepspeed' requirements.txt >.venv/requirements.txt
  pip_install -r .venv/requirements.txt
}

tiny() { # the embedded world, with a model of its own
  local smaller=() quick=()
  if [ "$QUICK" != 0 ]; then # its model wins no games, and learns from the facts alone
    quick=(--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50)
    smaller=(EPOCHS=1 GAMES=40 GAMES_PER_WORD=1 GLOBAL_BATCH=32 TRAIN_BATCH=32 EVAL_GAMES_PER_WORD=1
      "EVAL_ARGS=--max_words 20" "REWARD_ARGS=--training_prompt play --min_game_rows 0"
      "TRAIN_ARGS=--allow_no_game_rows True")
  fi
  in_foreground "$venv" -m tools.tiny_world build --output_dir "$OUTPUT" ${quick[@]+"${quick[@]}"}
  in_foreground tools/run_spag.sh configs/tiny.sh MODEL="$OUTPUT/base" OUTPUT="$OUTPUT" \
    IMITATION_DATA="$data/imitation.json" SFT_DATA="$data/facts.json" WORDS="$data/words.txt" \
    EVAL_WORDS="played=$data/words.txt held_out=$data/held_out.txt" ${smaller[@]+"${smaller[@]}"} "$@"
  in_foreground "$venv" -m tools.tiny_world show --output_dir "$OUTPUT"
  in_foreground "$venv" -m tools.tiny_world reason --output_dir "$OUTPUT"
}

english() { # SmolLM2-135M-Instruct, the plain games in data/english, and the benchmarks whose data are there
  local model=models/smollm2 log=.venv/english.log benchmarks='' smaller=()
  if [ "$QUICK" != 0 ]; then
    smaller=(EPOCHS=1 FIRST_EPISODES="$data/games.jsonl" "EVAL_ARGS=--max_words 4"
      "IMITATION_ARGS=--use_cpu True --max_steps 2" "TRAIN_ARGS=--use_cpu True --max_steps 2")
  fi
  "$venv" -c 'import gguf' 2>/dev/null || pip_install 'gguf>=0.19,<0.20' ||
    fail "pip could not install gguf; log: $log"
  in_foreground "$venv" -m tools.prepare_data smollm2 --output_dir "$model"
  in_foreground "$venv" -m tools.prepare_data imitation --output_dir "$data" --games data/english/plain_games.jsonl
  local rows=("$venv" -m tools.assign_rewards --input_data_path "$data/games.jsonl"
    --prompt_templates data/english/prompts.json --training_prompt play --chat_template True --tokenizer "$model"
    --messages all) # the attacker's hints are in games that it loses
  in_foreground "${rows[@]}" --output_data_path "$data/imitation.json"
  in_foreground "${rows[@]}" --output_data_path "$data/anchor.json" --repeat_to 300 # SFT rows of self-play
  [ ! -d lighteval/mutual_harness ] || benchmarks="MuTual"
  [ ! -d allenai/ai2_arc ] || benchmarks="$benchmarks ARC-e"
  [ ! -d baber/piqa ] || benchmarks="$benchmarks PIQA:acc_norm"
  [ -z "$benchmarks" ] || pip_install 'lm-eval==0.4.13' || fail "pip could not install lm-eval; log: $log"
  in_foreground tools/run_spag.sh configs/english.sh MODEL="$model" OUTPUT="$OUTPUT" \
    IMITATION_DATA="$data/imitation.json" SFT_DATA="$data/anchor.json" WORDS="$data/played.txt" \
    EVAL_TASKS="$benchmarks" EVAL_WORDS="held_out=$data/held_out.txt" ${smaller[@]+"${smaller[@]}"} "$@"
  say "report, to open in a browser: $OUTPUT/report.html"
}

main() {
  local argument
  for argument; do
    case $argument in
      OUTPUT=*) fail "$argument: write it before the command, $argument bash tools/quickstart.sh" ;;
    esac
  done
  case $OUTPUT in *[[:space:]]*) fail "OUTPUT '$OUTPUT' holds a blank; name a folder without" ;; esac
  case $WORLD in tiny | english) ;; *) fail "WORLD '$WORLD': the worlds are tiny and english" ;; esac
  set_up quickstart requirements.txt
  export PYTHON=$venv OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
  if [ "$WORLD" = english ]; then english "$@"; else tiny "$@"; fi
  say "all of it took $((SECONDS / 60)) min $((SECONDS % 60)) s"
}

main "$@"; exit # on one line: bash then reads no more of this file, so it may be edited meanwhile
