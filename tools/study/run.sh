#!/usr/bin/env bash
# A study: the arms of a file, for several seeds, each a loop of tools/run_spag.sh.
#
#   tools/study/run.sh configs/arms/tiny.txt configs/tiny.sh SEEDS="0 1 2" JOBS=2 OUTPUT=outputs/study
#
# The first word is the file of arms (tools/study/README.md). SEEDS, JOBS (loops at once, with a thread each) and OUTPUT
# are the study's; all other words are settings of every loop, or files of them. For each seed the first arm makes the
# imitation model and the games of epoch 1, and the other arms start from both. An arm whose words name {folder} reads
# files of other arms and begins after them. What is finished is kept, and the same command continues. Results are in
# OUTPUT/seedN.json and table.md.
set -euo pipefail
{ # bash reads this block as a whole before it runs it: the file may change meanwhile
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
export PYTHON PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit "${status:-2}"; }

read_words() { # read_words WORD...: the study's words, and the settings of all loops
  [ $# -gt 0 ] && [ -r "$1" ] || fail "the first word is a file of arms, such as configs/arms/tiny.txt"
  arms=$1 SEEDS=0 JOBS=1 OUTPUT='' files=() settings=()
  for word in "${@:2}"; do
    case $word in
      SEEDS=*) SEEDS=${word#*=} ;;
      JOBS=*) JOBS=${word#*=} ;;
      OUTPUT=*) OUTPUT=${word#*=} ;;
      *=*) settings+=("$word") ;;
      *) files+=("$word") ;;
    esac
  done
  [ -n "$OUTPUT" ] || fail "OUTPUT is missing: OUTPUT=outputs/study"
  case $SEEDS in *[!0-9\ ]* | '') fail "SEEDS=$SEEDS: expected numbers, such as SEEDS='0 1 2'" ;; esac
  case $JOBS in *[!0-9]* | '' | 0) fail "JOBS=$JOBS: expected a number of loops" ;; esac
}

read_arms() { # the arms' names and settings, and the lines all:, before: and after:
  local line name rest
  names=() own=() all='' before='' after=''
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in '#'*) continue ;; esac
    read -r name rest <<<"${line%% #*}"
    case $name in
      all:) all=$rest ;;
      before:) before=$rest ;;
      after:) after=$rest ;;
      '' | *:) ;; # the other lines are about the tables
      *) names+=("$name") own+=("$rest") ;;
    esac
  done <"$arms"
}

split() { # split TEXT: fill `words` with its words, with {seed} and {folder} filled in; quotes hold a word together
  local word text=${1//\{seed\}/$seed}
  text=${text//\{folder\}/$folder} words=()
  [ -z "$text" ] || while IFS= read -r word; do words+=("$word"); done < <(xargs -n 1 printf '%s\n' <<<"$text")
}

begin() { # begin NAME COMMAND...: run it in the background as soon as there is a place
  while [ "$(jobs -pr | wc -l)" -ge "$JOBS" ]; do sleep 0.5; done
  mkdir -p "$folder"
  say "$folder: $1"
  "${@:2}" >>"$folder/$1.log" 2>&1 </dev/null &
  pids+=($!) marks+=("$folder/$1.finished") commands+=("${*:2}")
}

finish() { # wait for all that has begun; end the study if anything has failed
  local place failed=''
  for ((place = 0; place < ${#pids[@]}; place++)); do
    if wait "${pids[place]}"; then
      printf '%s\n' "${commands[place]}" >"${marks[place]}"
    else
      failed+=" ${marks[place]%.finished}.log"
    fi
  done
  pids=() marks=() commands=()
  [ -z "$failed" ] || status=1 fail "failed; the same command continues. Logs:$failed"
}

begin_arm() { # begin_arm PLACE: the loop of this arm, unless the same command has ended well before
  local name=${names[$1]} command=("$root/tools/run_spag.sh" ${files[@]+"${files[@]}"})
  split "$all"
  command+=("SEED=$((100 * seed))") # the loop adds the number of the epoch
  command+=(${words[@]+"${words[@]}"} ${settings[@]+"${settings[@]}"} "OUTPUT=$folder/$name")
  [ "$1" -eq 0 ] || command+=("LIKE=$folder/${names[0]}")
  split "${own[$1]}"
  command+=(${words[@]+"${words[@]}"})
  if [ "$(cat "$folder/$name.finished" 2>/dev/null)" != "${command[*]}" ]; then
    begin "$name" "${command[@]}"
  fi
}

of_seed() { seed=$1 folder=$OUTPUT/seed$1; }

keep() { # write OUTPUT/seedN.json; `good` has the seeds that are not left out
  local status
  good=()
  for seed in $SEEDS; do
    of_seed "$seed"
    status=0
    "$PYTHON" -m tools.study.keep --folder "$folder" --arms "$arms" >"$folder.part" || status=$?
    case $status in 0) good+=("$seed") ;; 3) ;; *) exit "$status" ;; esac
    mv "$folder.part" "$folder.json"
  done
}

run_arms() { # run_arms first|others|readers: these arms of the seeds in `good`
  local place kind
  for seed in ${good[@]+"${good[@]}"}; do
    of_seed "$seed"
    for ((place = 0; place < ${#names[@]}; place++)); do
      kind=others
      case ${own[place]} in *'{folder}'*) kind=readers ;; esac
      [ "$place" -gt 0 ] || kind=first
      [ "$kind" != "$1" ] || begin_arm "$place"
    done
  done
  finish
}

run_python() { # run_python NAME TEXT: Python with these words, for each seed in `good`
  for seed in ${good[@]+"${good[@]}"}; do
    of_seed "$seed"
    split "$2"
    [ ${#words[@]} -eq 0 ] || begin "$1" "$PYTHON" "${words[@]}"
  done
  finish
}

pids=() marks=() commands=()
trap 'trap "" INT TERM; kill $(jobs -p) 2>/dev/null; wait; status=143 fail "stopped; the same command continues"' INT TERM
read_words "$@"
"$PYTHON" -m tools.study.arms "$arms"
read_arms
read -ra good <<<"$SEEDS"
run_python before "$before"
run_arms first
keep
run_arms others
run_arms readers
run_python matches "-m tools.study.matches --folder {folder} --arms '$arms'"
run_python after "$after"
keep
results=()
for seed in $SEEDS; do results+=("$OUTPUT/seed$seed.json"); done
"$PYTHON" -m tools.study.table --arms "$arms" --results "${results[@]}" >"$OUTPUT/table.part"
mv "$OUTPUT/table.part" "$OUTPUT/table.md"
say "finished; tables are in $OUTPUT/table.md"
exit
}
