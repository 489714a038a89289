# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, quickstart.sh and test.sh, which set root
# What the scripts share: messages, settings, and how a program is run, logged, and ended with the script.

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}" # rows differ in length
export SPAG_LOOP_PID=$$ # programs end with this script, also when it is killed
child='' warnings='' # the process group at work; lines of the stages' logs, which are shown again at the end
set -m # what runs in the background is a process group of its own

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
warn() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
fail() { warn "$@"; exit 1; }

read_settings_file() { # read_settings_file FLAGS...: the one that --settings names; what is set already stays
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h) show_help; exit ;;
      --settings) SETTINGS=${2-} ;;
      --settings=*) SETTINGS=${1#*=} ;;
    esac
    shift
  done
  case $SETTINGS in '' | */*) ;; *) SETTINGS=./$SETTINGS ;; esac # else it would be looked for in PATH
  # shellcheck source=configs/tiny.sh
  [ -z "$SETTINGS" ] || . "$SETTINGS"
}

show_help() { # the first lines of the script, and its settings
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
  awk -F ':=|}" +# ' '/^: "\$\{/ {
    printf "  --%-24s %s%s\n", tolower(substr($1, 6)), $3, $2 == "" ? "" : " (default: " $2 ")"}' "$0"
}

settle_settings() { # settle_settings FLAGS...: checks all settings and assigns them, and what follows from them
  local name settings=() assignments
  if [ -z "$PYTHON$VIRTUAL_ENV" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ] && [ -x "$root/.venv/bin/python" ]; then
    PYTHON=$root/.venv/bin/python
  fi
  : "${PYTHON:=$(command -v python || command -v python3)}"
  while read -r name; do
    settings+=("$name=${!name}")
  done < <(sed -n 's/^: "${\([A-Z_]*\):=.*/\1/p' "$0")
  assignments=$(mktemp)
  in_foreground "$PYTHON" "$root/tools/loop/support.py" "${settings[@]}" -- "$@" >"$assignments" ||
    { rm "$assignments"; exit 2; }
  # shellcheck source=/dev/null
  . "$assignments"
  rm "$assignments"
}

run() { # run STAGE COMMAND...: its output goes to OUTPUT/logs/STAGE.log too; its failure ends the script
  local status=0 start lines
  stage=$1 log=$OUTPUT/logs/$1.log
  shift
  [ "$NODE_RANK" -eq 0 ] || log=${log%.log}.node$NODE_RANK.log
  say "$stage; its log: $log"
  printf '\n=== %s: %s\n' "$(date)" "$*" >>"$log"
  start=$(($(wc -c <"$log")))
  ("$@" 2>&1 </dev/null | (trap '' TERM; exec tee -ai "$log")) & # which reads on to the end
  child=$!
  wait "$child" || status=$?
  child=''
  lines=$(tail -c "+$start" "$log" | LC_ALL=C sed -n "s/^.* WARNING /  $stage: /p" | LC_ALL=C sort -u)
  warnings+=${lines:+$lines$'\n'}
  if [ "$status" -ne 0 ]; then
    warn "$stage failed (exit $status); its log: $log"
    [ "$stage" = report ] || exit 1 # a report costs no result
  fi
  [ "$stage" != "$UNTIL" ] || exit 0
}

in_foreground() { # in_foreground COMMAND...: a signal to this script ends it too
  "$@" </dev/null &
  child=$!
  wait "$child"
}

# shellcheck disable=SC2317  # called by traps
stop() { # stop STATUS: ends this script and what it has started, within 10 s
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
trap 'stop 143' TERM HUP USR1 # USR1: what Slurm may send before it ends a job
