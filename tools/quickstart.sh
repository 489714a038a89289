#!/usr/bin/env bash
# From a fresh checkout to a report: makes .venv, builds a small world with a model of its own, and runs the whole
# method on it (tools/run_spag.sh). Run again, it continues or shows what is there.
#
#   bash tools/quickstart.sh             at most a quarter of an hour on 2 CPU cores; no GPU, no compiler
#   QUICK=1 bash tools/quickstart.sh     a smaller run that shows that everything works, and nothing else
#
# PYTHON names the interpreter (3.10 or newer), OUTPUT the folder of results. Arguments go to tools/run_spag.sh.
# Runs on bash 3.2 (macOS).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=tools/stages.sh
. tools/stages.sh

QUICK=${QUICK:-0}
OUTPUT=${OUTPUT:-outputs/quickstart$([ "$QUICK" = 0 ] || echo _quick)}
CPU_INDEX=https://download.pytorch.org/whl/cpu # PyPI's own build for Linux brings several GB of CUDA
CPU_GB=3 CUDA_GB=12                            # that an environment takes while it is installed
DRAWING='matplotlib>=3.10,<4'
venv=$root/.venv/bin/python
child='' follower=''

find_python() {  # the first one that is new enough
  local python version found=''
  for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    found="$found${found:+, }$python is $version"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || continue
    echo "$python"
    return
  done
  fail "needs Python 3.10 or newer; found: ${found:-none}. PYTHON=/path/to/python names another"
}

need_space() {  # need_space GB
  local free
  free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1000000)}')
  [ "$free" -ge "$1" ] || fail "not enough disk space: $root has $free GB free, the environment takes $1 GB"
}

pip_install() {  # status of pip, whose output goes to the log
  : >"$log"
  run_logged "$venv" -m pip install --disable-pip-version-check --progress-bar off "$@"
}

install_torch() {  # a build without CUDA where there is no NVIDIA GPU, and one can be had
  local wanted settings
  settings=$("$venv" -m pip config list)
  wanted=$(grep '^torch[<>=]' requirements.txt)
  if [ "$(uname -s)" != Linux ]; then
    pip_install "$wanted"
  elif command -v nvidia-smi >/dev/null; then
    need_space "$CUDA_GB"
    pip_install "$wanted"
  elif [ "$settings" != "${settings/find-links/}" ]; then
    pip_install torch==2.13.0 # a build that was put there on purpose; a range might prefer a newer one with CUDA
  elif ! pip_install --index-url "$CPU_INDEX" --timeout 10 --retries 1 "$wanted"; then
    say "no CPU build of PyTorch from $CPU_INDEX: installing the large one with CUDA"
    need_space "$CUDA_GB"
    pip_install "$wanted"
  fi
}

set_up() {  # .venv, unless it is that of these requirements already
  local python stamp stamp_file=.venv/quickstart.txt
  stamp=$(cksum <requirements.txt)
  if [ -x "$venv" ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then
    say "environment: .venv is up to date"
    return
  fi
  python=$(find_python)
  need_space "$CPU_GB"
  stage=environment log=$root/.venv/quickstart.log
  [ -x "$venv" ] || "$python" -m venv .venv ||
    fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
  # Without DeepSpeed, which is for many GPUs and wants a compiler; with what draws the figures.
  if ! { install_torch && grep -v '^deepspeed' requirements.txt >.venv/requirements.txt &&
    pip_install -r .venv/requirements.txt "$DRAWING"; }; then
    tail -n 15 "$log" >&2
    ! grep -qiE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|name resolution' "$log" ||
      fail "no network: pip could not reach the index of packages; its log: $log"
    fail "pip could not install the requirements; its log: $log"
  fi
  printf '%s\n' "$stamp" >"$stamp_file"
  say "environment: done"
}

in_foreground() {  # a command that a signal to this script ends too
  "$@" &
  child=$!
  wait "$child"
}

stop() {
  trap '' INT TERM
  [ -z "$follower" ] || kill "$follower" 2>/dev/null || true
  [ -z "$child" ] || { kill "$child" 2>/dev/null && wait "$child"; } || true
  exit 130
}

main() {
  local data=$OUTPUT/data smaller=() quick=()
  trap stop INT TERM
  if [ "$QUICK" != 0 ]; then
    quick=(--pretraining_facts 2000 --imitation_rounds 2 --imitation_facts 200 --facts 100)
    smaller=(--epochs 1 --games_per_word 1 --eval_games_per_word 1)
  fi
  set_up
  export PYTHON=$venv PYTHONPATH=$root OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
  stage=world log=$OUTPUT/logs/world.log
  mkdir -p "$OUTPUT/logs"
  run "$venv" -m tools.tiny_world build --output_dir "$OUTPUT" ${quick[@]+"${quick[@]}"}
  say "world: done"
  in_foreground tools/run_spag.sh --settings configs/tiny.yaml --model "$OUTPUT/base" --output "$OUTPUT" \
    --imitation_data "$data/imitation.json" --sft_data "$data/facts.json" --words "$data/words.txt" \
    --eval_words "played=$data/words.txt held_out=$data/held_out.txt" ${smaller[@]+"${smaller[@]}"} "$@"
  in_foreground "$venv" -m tools.tiny_world show "$OUTPUT"
  say "all of it took $(duration "$SECONDS")"
}

main "$@"
