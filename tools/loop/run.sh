# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, quickstart.sh and test.sh, which set root
# Shared by the three scripts: messages, stages, and signals. Programs that a script starts end when it ends.

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
child='' bar='' stage='' warnings='' # process groups: the program at work, its bar; its stage; warnings of all stages
set -m # a background job is a process group of its own

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
warn() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
fail() { warn "$@"; exit 2; }

in_foreground() { # in_foreground COMMAND...: run it and wait; a signal to this script ends it too
  "$@" </dev/null &
  child=$!
  wait_for_child
}

wait_for_child() { # return its exit status; `wait` also returns when it is suspended, as Slurm may do with a job
  local status
  while true; do
    status=0
    wait "$child" || status=$?
    [ "$status" -gt 128 ] && kill -0 "$child" 2>/dev/null || return "$status"
    sleep 1
  done
}

open_lock() { # open OUTPUT's lock file, of which each machine has its own, as descriptor 9
  local node=''
  [ -n "$OUTPUT" ] || fail "OUTPUT=... is missing"
  [ "$NODE_RANK" = 0 ] || node=.node$NODE_RANK
  { mkdir -p "$OUTPUT" && exec 9>>"$OUTPUT/.loop$node.lock"; } || exit 2
}

run() { # run STAGE COMMAND...: its output goes to OUTPUT/logs/STAGE.log; end the script if it fails
  local status=0 before size lines log=$OUTPUT/logs/$1.log
  stage=$1 before=$SECONDS
  shift
  [ "$NODE_RANK" -eq 0 ] || log=${log%.log}.node$NODE_RANK.log
  mkdir -p "$OUTPUT/logs"
  say "$stage; its log: $log"
  printf '\n=== %s: %s\n' "$(date)" "$*" >>"$log"
  size=$(($(wc -c <"$log")))
  if [ "$VERBOSE" = True ]; then
    ("$@" 2>&1 </dev/null | (trap '' TERM; exec tee -ai "$log")) & # tee goes on until the program has ended
  else
    "$@" >>"$log" 2>&1 </dev/null &
  fi
  child=$!
  show_bar "$log"
  wait_for_child || status=$?
  child=''
  hide_bar
  lines=$(tail -c "+$size" "$log" | LC_ALL=C sed -n "s/^.* WARNING /  $stage: /p" | LC_ALL=C sort -u)
  warnings+=${lines:+$lines$'\n'}
  if [ "$status" -ne 0 ]; then
    [ "$VERBOSE" = True ] || tail -c "+$size" "$log" | tr '\r' '\n' | tail -n 20 >&2
    warn "$stage failed (exit $status); its log: $log"
    [ "$stage" = report ] || exit 1 # a missing report loses no results
  else
    lines=$("$PYTHON" -m tools.loop.numbers "$OUTPUT" "$stage" 2>/dev/null) || true
    say "$stage took $(((SECONDS - before) / 60)) min $(((SECONDS - before) % 60)) s${lines:+: $lines}"
  fi
}

show_bar() { # show_bar LOG: keep the last progress bar of a log on the terminal
  local line escape=$'\033'
  [ -t 1 ] && [ "$VERBOSE" = False ] || return 0
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    line=$(tail -c 4000 "$1" | LC_ALL=C sed "s/$escape\[[0-9;]*[A-Za-z]//g" | tr '\r' '\n' | grep '[0-9]%|' |
      tail -n 1 | sed 's/\][0-9][0-9]:.*/]/') || true # there is no bar yet; a message may stand behind it
    printf '\r\033[K%.*s' "$(($(tput cols 2>/dev/null || echo 80) - 1))" "$(LC_ALL=C tr -d '\000-\037\177' <<<"$line")"
  done 9>&- 2>/dev/null & # it does not hold the loop's lock
  bar=$!
}

hide_bar() {
  [ -n "$bar" ] || return 0
  { kill -- "-$bar"; wait "$bar"; } 2>/dev/null || true
  bar=''
  printf '\r\033[K'
}

# shellcheck disable=SC2317  # called by traps
stop() { # stop STATUS: end what this script has started, within 10 s, and then the script
  trap '' INT TERM HUP USR1
  hide_bar
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

trap 'hide_bar; [ -z "$warnings" ] || printf "Warnings:\n%s" "$warnings" >&2' EXIT
trap 'stop 130' INT
trap 'stop 143' TERM HUP USR1 # Slurm may send USR1 before it ends a job
