#!/usr/bin/env bash
# From a fresh checkout to a report: makes .venv and a made-up world of 162 words, and runs the whole method on it
# (tools/run_spag.sh). It needs no GPU, no compiler and no download of a model. Run again, it continues.
#
#   bash tools/quickstart.sh
#   QUICK=1 bash tools/quickstart.sh          a smaller run that shows that everything works, and nothing else
# PYTHON names the interpreter (3.11 to 3.14), OUTPUT the folder of results. Arguments go to run_spag.sh: EPOCHS=2.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
# shellcheck source=tools/loop/common.sh
. tools/loop/common.sh
# shellcheck source=tools/loop/environment.sh
. tools/loop/environment.sh

install_rest() { # DeepSpeed needs a compiler, and is left out where there is no GPU
  cp requirements.txt .venv/requirements.txt
  [ -n "$gpu" ] || grep -v '^deepspeed' requirements.txt >.venv/requirements.txt
  pip_install -r .venv/requirements.txt
}

case " $* " in *" --help "* | *" -h "*) sed -n '2,/^# PYTHON/s/^# \{0,1\}//p' "$0"; exit ;; esac

main() {
  local data epoch listed models newest table word smaller=() quick=()
  for word; do case $word in OUTPUT=*) OUTPUT=${word#*=} ;; esac; done
  if [ "${QUICK:-0}" != 0 ]; then # its model wins hardly a game, so it learns from all messages
    OUTPUT=${OUTPUT:-outputs/quickstart_quick}
    quick=(--pretraining_facts 640 --imitation_rounds 1 --imitation_facts 100 --facts 50)
    smaller=(EPOCHS=1 GAMES=40 GAMES_PER_WORD=1 GLOBAL_BATCH=32 TRAIN_BATCH=32 EVAL_GAMES_PER_WORD=1
      "EVAL_ARGS=--max_words 20" "REWARD_ARGS=--training_prompt play --messages all")
  fi
  OUTPUT=${OUTPUT:-outputs/quickstart} data=$OUTPUT/data
  listed=${data// /\\ } # as one of several values, which are split at blanks
  set_up quickstart requirements.txt
  export PYTHON=$venv OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
  run world "$PYTHON" -m tools.tiny.build --output_dir "$OUTPUT" ${quick[@]+"${quick[@]}"} # as bash 3.2 needs it
  in_foreground tools/run_spag.sh configs/tiny.sh MODEL="$OUTPUT/base" OUTPUT="$OUTPUT" \
    IMITATION_DATA="$listed/imitation.json" SFT_DATA="$data/facts.json" WORDS="$data/words.txt" \
    EVAL_WORDS="played=$listed/words.txt held_out=$listed/held_out.txt" ${smaller[@]+"${smaller[@]}"} "$@"
  newest=$OUTPUT/imitation/model models=("base=$OUTPUT/base" "imitation=$OUTPUT/imitation/model")
  for ((epoch = 1; ; epoch++)); do
    [ -d "$OUTPUT/epoch$epoch/model" ] || break
    newest=$OUTPUT/epoch$epoch/model models+=("epoch$epoch=$newest")
  done
  in_foreground "$PYTHON" -m tools.tiny.questions --models "${models[@]}" --output_dir "$OUTPUT"
  say "it took $((SECONDS / 60)) min $((SECONDS % 60)) s; points against the imitation model after each epoch:"
  for table in "$OUTPUT"/epoch*/eval/matches.txt; do [ ! -f "$table" ] || tail -n 1 "$table"; done
  [ ! -f "$OUTPUT/report.html" ] || say "report, to open in a browser: $OUTPUT/report.html"
  # The newest model hints at a word, you have one guess.
  say "play against it: .venv/bin/python -m tools.play_llm_game --attacker_model_name_or_path $(printf %q "$newest")" \
    "--defender_model_name_or_path human --data_path $(printf %q "$data/words.txt") --max_turns 3 --prompt_templates" \
    "data/tiny/prompts.json --max_length 160 --max_new_tokens 24 --temperature 1.0 --output_dir" \
    "$(printf %q "$OUTPUT/me") --model_prefix me --data_suffix words"
}

main "$@"; exit # on one line: bash then reads no more of this file, so it may be edited meanwhile
