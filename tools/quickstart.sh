#!/usr/bin/env bash
# From a fresh checkout to a report: makes .venv and a made-up world of 162 words, and runs the whole method on it
# (tools/quickstart.py). It needs no GPU, no compiler and no download of a model. Run again, it continues.
#
#   bash tools/quickstart.sh
#   QUICK=1 bash tools/quickstart.sh          a smaller run that shows that everything works, and nothing else
# Arguments are settings of the loop: output=DIR epochs=2. PYTHON names the interpreter, 3.11 to 3.14.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
# shellcheck source=tools/environment.sh
. tools/environment.sh

install_rest() { # DeepSpeed needs a compiler, and is left out where there is no GPU
  cp requirements.txt .venv/requirements.txt
  [ -n "$gpu" ] || grep -v '^deepspeed' requirements.txt >.venv/requirements.txt
  pip_install -r .venv/requirements.txt
}

case " $* " in *" --help "* | *" -h "*) sed -n '2,/^# Arguments/s/^# \{0,1\}//p' "$0"; exit ;; esac

set_up quickstart requirements.txt
# Threads that wait sleep, and leave the cores to other processes. Nothing comes from the hub, so nothing asks it.
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
exec "$venv" -m tools.quickstart "$@"
