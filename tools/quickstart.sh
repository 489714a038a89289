#!/usr/bin/env bash
# From a fresh checkout to a report: makes .venv, builds a toy world of 162 words and runs the whole method on it
# (tools/quickstart.py). Needs no GPU, compiler or model download. Rerun it to continue.
#
#   bash tools/quickstart.sh
#   QUICK=1 bash tools/quickstart.sh          a smaller run, which only shows that everything works
# Arguments are settings of the loop: output=DIR epochs=2. PYTHON names the interpreter, 3.11 to 3.14.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
# shellcheck source=tools/environment.sh
. tools/environment.sh

install_rest() { # without DeepSpeed, which needs a compiler, unless there is a GPU
  cp requirements.txt .venv/requirements.txt
  [ -n "$gpu" ] || grep -v '^deepspeed' requirements.txt >.venv/requirements.txt
  pip_install -r .venv/requirements.txt
}

case " $* " in *" --help "* | *" -h "*) sed -n '2,/^# Arguments/s/^# \{0,1\}//p' "$0"; exit ;; esac

set_up quickstart requirements.txt
# Waiting threads sleep and so leave the cores to other processes. The hub is not needed.
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
exec "$venv" -m tools.quickstart "$@"
