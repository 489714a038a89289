# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, quickstart.sh and test.sh, which set root
# Shared by the three scripts: messages, stages, and signals. Programs that a script starts end when it ends.

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
child='' stage='' warnings='' # the process group at work, the stage's name, warnings from the logs of all stages
set -m # a background job is a process group of its own

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
warn() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
fail() { warn "$@"; exit 2; }

in_foreground() { # in_foreground COMMAND...: run it and wait; a signal to this script ends it too
  "$@" </dev/null &
  child=$!
  wait "$child"
}

run() { # run STAGE COMMAND...: print its output and append it to OUTPUT/logs/STAGE.log; end the script if it fails
  local status=0 start lines log=$OUTPUT/logs/$1.log
  stage=$1
  shift
  [ "$NODE_RANK" -eq 0 ] || log=${log%.log}.node$NODE_RANK.log
  mkdir -p "$OUTPUT/logs"
  say "$stage; its log: $log"
  printf '\n=== %s: %s\n' "$(date)" "$*" >>"$log"
  start=$(($(wc -c <"$log")))
  ("$@" 2>&1 </dev/null | (trap '' TERM; exec tee -ai "$log")) & # tee goes on until the program has ended
  child=$!
  wait "$child" || status=$?
  child=''
  lines=$(tail -c "+$start" "$log" | LC_ALL=C sed -n "s/^.* WARNING /  $stage: /p" | LC_ALL=C sort -u)
  warnings+=${lines:+$lines$'\n'}
  if [ "$status" -ne 0 ]; then
    warn "$stage failed (exit $status); its log: $log"
    [ "$stage" = report ] || exit 1 # a missing report loses no results
  fi
}

# shellcheck disable=SC2317  # called by traps
stop() { # stop STATUS: end what this script has started, within 10 s, and then the script
  trap '' INT TERM HUP USR1
  if [ -n "$child" ] && kill -TERM -- "-$child" 2>/dev/null; then
    for _ in {1..70}; do
      kill -0 -- "-$child" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$child" 2>/dev/null || true
  fi
  printf '\n%s: stopped%s; the same command continues\n' "${0##*/}" "${stage:+ in $stage}" >&2
  exit "$1"
}

trap '[ -z "$warnings" ] || printf "Warnings:\n%s" "$warnings" >&2' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM HUP USR1 # Slurm may send USR1 before it ends a job
