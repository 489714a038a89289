# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, quickstart.sh and test.sh, which set root
# Shared by the three scripts: stages, their bars, and signals. Programs that a script starts end when it ends.

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT # the loop launches by itself
child='' step='' # process group of the program at work; name of the stage at work
set -m           # a background job is a process group of its own

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
warn() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

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

run() { # run STAGE COMMAND...: its output goes to OUTPUT/logs/STAGE.log; end the script if it fails
  local status=0 before=$SECONDS size mistakes log=$OUTPUT/logs/$1.log
  step=$1
  shift
  [ "${NODE_RANK:-0}" -eq 0 ] || log=${log%.log}.node$NODE_RANK.log
  mkdir -p "$OUTPUT/logs"
  say "$step; its log: $log"
  printf '\n=== %s: %s\n' "$(date)" "$*" >>"$log"
  size=$(wc -c <"$log")
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  show_bar "$log"
  wait_for_child || status=$?
  child=''
  if [ "$status" -ne 0 ]; then
    mistakes=$(new_lines "$log" "$size" | grep '^[a-z_]*\.py: error: ' | sort -u) || # torchrun writes more below it
      mistakes=$(new_lines "$log" "$size" | tail -n 20)
    printf '%s\n' "$mistakes" >&2
    warn "$step failed; its log: $log"
    [ "$step" = report ] || exit 1 # a missing report loses no results
  fi
  new_lines "$log" "$size" | LC_ALL=C sed -n 's/^.* WARNING /WARNING: /p' | LC_ALL=C sort -u
  say "$step took $(((SECONDS - before) / 60)) min $(((SECONDS - before) % 60)) s"
  new_lines "$log" "$size" | tail -n 1 # the program's summary
}

new_lines() { # new_lines LOG SIZE: the lines behind the first SIZE bytes, without bars; a line may begin behind one
  tail -c "+$(($2 + 1))" "$1" | LC_ALL=C tr '\r' '\n' | LC_ALL=C tr -d '\000-\010\013-\037\177' |
    LC_ALL=C sed 's/^.*[0-9]%|[^]]*\]\(\[A\)*//' | grep -v -e '^ *$' -e '[0-9]%|' || true
}

show_bar() { # show_bar LOG: while the program is at work, keep the last bar of its log on the terminal
  [ -t 1 ] || return 0
  while kill -0 "$child" 2>/dev/null; do
    {
      printf '\r\033[K%.*s' "$(($(tput -T "${TERM:-dumb}" cols || echo 80) - 1))" "$(tail -c 4000 "$1" | LC_ALL=C tr '\r' '\n' |
        grep -a '[0-9]%|' | tail -n 1 | LC_ALL=C tr -d '\000-\037\177')"
      sleep 1
    } &
    wait $! || true # a job and `wait`, so that a signal comes through at once
  done
  printf '\r\033[K'
}

# shellcheck disable=SC2317  # called by traps
stop() { # stop STATUS: end what this script has started, within 10 s, and then the script
  trap '' INT TERM HUP USR1
  if [ -n "$child" ] && kill -TERM -- "-$child" 2>/dev/null; then
    for _ in {1..70}; do
      kill -0 -- "-$child" 2>/dev/null || break
      sleep 0.1
    done
    pkill -KILL -P "$child" 2>/dev/null || true # torchrun's processes are no part of its group
    kill -KILL -- "-$child" 2>/dev/null || true
  fi
  printf '\n%s: stopped%s; the same command continues\n' "${0##*/}" "${step:+ in $step}" >&2
  exit "$1"
}

trap 'stop 130' INT
trap 'stop 143' TERM HUP USR1 # Slurm may send USR1 before it ends a job
