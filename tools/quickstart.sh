#!/usr/bin/env bash
# From a fresh checkout to a report: makes .venv, builds a small world with a model of its own, and runs the whole
# method on it (tools/run_spag.sh). Run again, it continues or shows what is there.
#
#   bash tools/quickstart.sh             needs no GPU and no compiler
#   QUICK=1 bash tools/quickstart.sh     a smaller run that shows that everything works, and nothing else
#
# PYTHON names the interpreter (3.10 or newer), OUTPUT the folder of results. Arguments go to tools/run_spag.sh.
# The scripts run on bash 3.2, which macOS has.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=tools/loop/run.sh
. tools/loop/run.sh
# shellcheck source=tools/loop/environment.sh
. tools/loop/environment.sh

QUICK=${QUICK:-0}
OUTPUT=${OUTPUT:-outputs/quickstart$([ "$QUICK" = 0 ] || echo _quick)}

install_rest() { # DeepSpeed needs a compiler, and is left out where there is no GPU
  cp requirements.txt .venv/requirements.txt
  [ -n "$gpu" ] || grep -v '^deepspeed' requirements.txt >.venv/requirements.txt
  pip_install -r .venv/requirements.txt
}

main() {
  local data=$OUTPUT/data smaller=() quick=()
  case $OUTPUT in *[[:space:]]*) fail "OUTPUT '$OUTPUT' holds a blank; name a folder without" ;; esac
  if [ "$QUICK" != 0 ]; then
    quick=(--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50)
    smaller=(--epochs 1 --games 40 --games_per_word 1 --global_batch 32 --train_batch 32 --eval_games_per_word 1
      --eval_args "--max_words 20" # its model wins no games, and learns from the facts alone
      --reward_args "--training_prompt play --min_game_rows 0" --train_args "--allow_no_game_rows True")
  fi
  set_up quickstart requirements.txt
  export PYTHON=$venv OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
  in_foreground "$venv" -m tools.tiny_world build --output_dir "$OUTPUT" ${quick[@]+"${quick[@]}"}
  in_foreground tools/run_spag.sh --settings configs/tiny.sh --model "$OUTPUT/base" --output "$OUTPUT" \
    --imitation_data "$data/imitation.json" --sft_data "$data/facts.json" --words "$data/words.txt" \
    --eval_words "played=$data/words.txt held_out=$data/held_out.txt" ${smaller[@]+"${smaller[@]}"} "$@"
  in_foreground "$venv" -m tools.tiny_world show --output_dir "$OUTPUT"
  in_foreground "$venv" -m tools.tiny_world reason --output_dir "$OUTPUT"
  say "all of it took $((SECONDS / 60)) min $((SECONDS % 60)) s"
}

main "$@"; exit # on one line: bash then reads no more of this file, so it may be edited meanwhile
