# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, quickstart.sh and test.sh, which set root
# Shared by the three scripts: messages, stages, and signals. Programs that a script starts end when it ends.

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
child='' bar='' step='' # process groups of the program at work and of its bar; the name of the stage at work
set -m                  # a background job is a process group of its own
for name in $(compgen -e); do # of a training platform or mpirun: the scripts launch by themselves
  case $name in
    RANK | *_RANK | *WORLD_SIZE | MASTER_ADDR | MASTER_PORT | PMI_* | PET_* | TORCHELASTIC_*) unset "$name" ;;
  esac
done

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

run() { # run STAGE COMMAND...: its output goes to OUTPUT/logs/STAGE.log; end the script if it fails
  local status=0 before=$SECONDS size log=$OUTPUT/logs/$1.log
  step=$1
  shift
  [ "${NODE_RANK:-0}" -eq 0 ] || log=${log%.log}.node$NODE_RANK.log
  mkdir -p "$OUTPUT/logs"
  say "$step; its log: $log"
  printf '\n=== %s: %s\n' "$(date)" "$*" >>"$log"
  size=$(($(wc -c <"$log")))
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  show_bar "$log"
  wait_for_child || status=$?
  child=''
  hide_bar
  if [ "$status" -ne 0 ]; then
    new_lines "$log" "$size" | { grep ': error: ' || true; } | sort -u >&2 # torchrun writes its own lines below it
    new_lines "$log" "$size" | tail -n 20 >&2
    warn "$step failed (exit $status); its log: $log"
    [ "$step" = report ] || exit 1 # a missing report loses no results
  else
    new_lines "$log" "$size" | LC_ALL=C sed -n 's/^.* WARNING /WARNING: /p' | LC_ALL=C sort -u
    say "$step took $(((SECONDS - before) / 60)) min $(((SECONDS - before) % 60)) s"
    new_lines "$log" "$size" | tail -n 1 # the program's summary
  fi
}

new_lines() { # new_lines LOG SIZE: the lines behind the first SIZE bytes, but no bars
  tail -c "+$(($2 + 1))" "$1" | tr '\r' '\n' | LC_ALL=C tr -d '\000-\010\013-\037\177' |
    grep -v -e '^ *$' -e '[0-9]%|' || true
}

show_bar() { # show_bar LOG: keep the last progress bar of a log on the terminal
  [ -t 1 ] || return 0
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    printf '\r\033[K%.*s' "$(($(tput cols 2>/dev/null || echo 80) - 1))" "$(tail -c 4000 "$1" | tr '\r' '\n' |
      LC_ALL=C sed "s/$(printf '\033')\[[0-9;]*[A-Za-z]//g; s/\][0-9][0-9]:.*/]/" | grep '[0-9]%|' | tail -n 1 |
      LC_ALL=C tr -d '\000-\037\177')" # there may be no bar yet, and a message may stand behind it
  done 2>/dev/null &
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
  printf '\n%s: stopped%s; the same command continues\n' "${0##*/}" "${step:+ in $step}" >&2
  exit "$1"
}

trap hide_bar EXIT
trap 'stop 130' INT
trap 'stop 143' TERM HUP USR1 # Slurm may send USR1 before it ends a job
