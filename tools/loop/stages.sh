# shellcheck shell=bash disable=SC2154,SC2034  # sourced by run_spag.sh, which sets what is used here, and quickstart.sh
# How run_spag.sh runs a stage: skipped when it is whole, logged, followed.
#
# A stage is described by lists: `program`, its file and the flags that its result depends on; `how`, flags that it
# does not depend on, so that a loop can be continued on other machines; `counts`, settings that stand in `how` and yet
# count; `reads`, files whose content counts, and model folders; `makes`, files that are all there when it is whole.
# The rows that a process takes at once are in `how`, since accumulation makes up for them, and so are the processes.
# A training in its middle under DeepSpeed, whose ZeRO checkpoints are in one part a process, needs the same number.

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
warn() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
fail() { warn "$@"; exit 1; }
duration() { printf '%d:%02d:%02d' $(($1 / 3600)) $(($1 / 60 % 60)) $(($1 % 60)); }
loop_support() { "$PYTHON" "$root/tools/loop/support.py" "$@"; }

run_stage() {  # run_stage NAME launched|alone
  stage=$1 log=$OUTPUT/logs/$1.log
  [ "$NODE_RANK" -eq 0 ] || log=$OUTPUT/logs/$1.node$NODE_RANK.log
  if [ "$NODE_RANK" -eq 0 ]; then check_command; fi
  counts=()
  if whole; then
    say "$stage: whole already"
    return
  fi
  local started=$SECONDS
  if [ "$2" = launched ]; then
    launcher
    run "${launch[@]}" "${program[@]}" ${how[@]+"${how[@]}"}
    wait_for 60
  elif [ "$NODE_RANK" -eq 0 ]; then
    run "$PYTHON" "${program[@]}" ${how[@]+"${how[@]}"}
  else
    say "$stage: waits for machine 0"
    wait_for "$NODE_TIMEOUT"
  fi
  whole || fail "$stage ended without ${makes[*]}; its log: $log"
  stage_seconds=$((SECONDS - started))
  say "$stage: done in $(duration "$stage_seconds")"
  times="$times${times:+, }${stage#*_} $(duration "$stage_seconds")"
}

whole() {
  local file
  for file in "${makes[@]}"; do [ -s "$file" ] || return 1; done
}

begun() { whole || compgen -G "$(dirname "${makes[0]}")/checkpoint-*" >/dev/null; }

wait_for() {  # seconds, until what another machine wrote shows here
  local until=$((SECONDS + $1))
  [ "$NNODES" -gt 1 ] || return 0
  while ! whole; do
    [ "$SECONDS" -lt "$until" ] || fail "$stage: no ${makes[*]} after $1 seconds. Is $OUTPUT on a folder that all \
machines share, and has machine 0 not stopped? (--node_timeout)"
    sleep 1
  done
}

check_command() {  # what is there must come from this command; written down when the stage begins
  local now difference file stored=$OUTPUT/logs/$stage.command
  now=$(printf '%s\n' "${program[@]}" | awk '/^--/ && NR > 1 {printf "\n"} NR > 1 && !/^--/ {printf " "} {printf "%s", $0}'
    [ -z "${counts[*]-}" ] || printf '\n%s' "${counts[@]}"
    for file in ${reads[@]+"${reads[@]}"}; do printf '\nread %s %s' "$file" "$(checksum "$file")"; done)
  now=${now//"$OUTPUT"/OUTPUT}
  now=${now//"$root"\//}
  if [ -e "$stored" ]; then watched=False; else touch "$stored"; fi
  if begun; then
    difference=$(diff "$stored" - <<<"$now") || fail "$stage has results of another command (< then, > now):
$difference
Use another OUTPUT, or the settings of then, or delete $(dirname "${makes[0]}") to have it made anew (the stages that \
build on it will ask the same)."
  fi
  printf '%s\n' "$now" >"$stored"
}

checksum() { if [ -d "$1" ]; then loop_support fingerprint "$1"; else cksum <"$1"; fi; }

launcher() {
  launch=("$PYTHON")
  [ $((NPROC * NNODES)) -gt 1 ] || return 0
  launch+=(-m torch.distributed.run --nproc_per_node "$NPROC")
  if [ "$NNODES" -eq 1 ]; then
    launch+=(--standalone)
  else
    launch+=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT" --rdzv_id "$RDZV_ID-$stage"
      --rdzv_conf "is_host=$([ "$NODE_RANK" -eq 0 ] && echo True || echo False)")
  fi
}

run() {  # run a command as the stage; a failure ends this script
  local status=0
  say "$stage: starts; log: $log"
  run_logged "$@" || status=$?
  [ "$status" -ne 0 ] || return 0
  tail -c 20000 "$log" | LC_ALL=C tr '\r' '\n' | tail -n 15 >&2 || true # LC_ALL: of text that is cut anywhere
  fail "$stage failed (exit $status); its log: $log"
}

run_logged() {  # run a command with its output in the log, showing how far it is; returns its status
  local status=0
  printf '\n=== %s: %s\n' "$(date)" "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null &
  child=$!
  follow 9>&- &
  follower=$!
  wait "$child" || status=$?
  kill "$follower" 2>/dev/null || true
  wait "$follower" 2>/dev/null || true
  [ ! -t 1 ] || printf '\r\033[K'
  return "$status"
}

follow() {  # the log's last progress bar, or else its last line: on a terminal each second, elsewhere each half minute
  local line began=$SECONDS pause=30 width=100 nap=''
  [ ! -t 1 ] || pause=1 width=55
  trap 'kill $nap; exit' TERM # leaves no sleep behind
  while kill -0 $$ 2>/dev/null; do
    sleep "$pause" >/dev/null 2>&1 &
    nap=$!
    wait "$nap"
    line=$(tail -c 4000 "$log" | LC_ALL=C tr '\r' '\n' | LC_ALL=C tr -cd '\n\33\40-\176' |
      awk -v width="$width" '{gsub(/\033\[[0-9;]*[A-Za-z]/, "")} /%\|/ {bar = $0} NF {last = $0}
        END {print substr(bar == "" ? last : bar, 1, width)}')
    if [ -t 1 ]; then
      printf '\r%s %s %s\033[K' "$stage" "$(duration $((SECONDS - began)))" "$line"
    else
      say "$stage $(duration $((SECONDS - began))) $line"
    fi
  done
}
