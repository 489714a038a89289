#!/usr/bin/env bash
# A study: the arms of a file, each a loop of tools/run_spag.sh, for several seeds.
#
#   SEEDS="0 1 2" JOBS=2 tools/study/run_study.sh configs/arms/tiny.sh outputs/tiny_study [NAME=VALUE ...]
#
# JOBS seeds run at once, with a thread each. NAME=VALUE are further settings of every loop; EPOCHS=1 makes a trial.
# What is finished is kept; the same command continues. After each arm OUTPUT/seedN.json holds the numbers of the
# seed, at the end OUTPUT/table.md those of all.
#
# A file of arms is sourced once for each seed, with $seed, $folder (of the seed) and $root (of the project):
#   before() { ... }               a function that makes what the loops need
#   all=(WORDS=... ...)            settings of every arm, and files of them
#   arm NAME SETTING=VALUE ...     a loop. The first arm makes imitation and the games of epoch 1; others are LIKE it
#   after() { ... "$1" ... }       a function that is called with the folder of each loop that has ended
#   table=(--primary ...)          flags of tools.study.table
# shellcheck disable=SC1091,SC2154,SC2329  # the file of arms calls `arm` and sets `table`
set -eo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHON=${PYTHON:-$(command -v python || command -v python3)} OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
say() { echo "[$(date +%H:%M:%S)] $*"; }
before() { :; }
after() { :; }

arm() { # run a loop, unless it has ended with these settings
  local loop=$folder/$1 words=("${settings[@]}" "${@:2}")
  if [ -z "$first" ]; then
    first=$loop
    before >>"$folder/before.log" 2>&1
  else
    words=("LIKE=$first" "${words[@]}")
  fi
  if [ -f "$loop.finished" ] && [ "$(cat "$loop.finished")" = "${all[*]} ${words[*]}" ]; then return 0; fi
  say "seed $seed: $1"
  "$root/tools/run_spag.sh" "${all[@]}" "SEED=$((seed * 100))" "OUTPUT=$loop" "${words[@]}" >>"$loop.log" 2>&1
  after "$loop" >>"$loop.log" 2>&1
  echo "${all[*]} ${words[*]}" >"$loop.finished"
  "$PYTHON" -m tools.study.collect "$folder"
}

if [ "$1" = --seed ]; then # what this script calls for each seed
  seed=$2 arms=$3 folder=$4/seed$2 settings=("${@:5}") first='' all=()
  mkdir -p "$folder"
  trap '[ $? = 0 ] || say "seed $seed failed; logs: $folder/*.log"' EXIT
  # shellcheck source=configs/arms/tiny.sh
  . "$arms"
  exit
fi
arms=$1 output=$2
[ -f "$arms" ] && [ -n "$output" ] || { echo "give a file of arms (configs/arms/tiny.sh) and a folder" >&2; exit 2; }
output=${output%/} output=${output#./} # as collect.py finds it in the settings of loops
set -- "$arms" "$output" "${@:3}"
# shellcheck disable=SC2086  # one seed a line
printf '%s\n' ${SEEDS:-0} | xargs -P "${JOBS:-1}" -I{} bash "$0" --seed {} "$@"
arm() { :; } # now for the flags of the table alone
# shellcheck source=/dev/null
. "$arms"
"$PYTHON" -m tools.study.table --results "$output"/seed*.json "${table[@]}" >"$output/.table.md"
mv "$output/.table.md" "$output/table.md"
say "finished; tables are in $output/table.md"
