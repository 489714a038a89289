#!/usr/bin/env bash
# Set up .venv, then run linter, type checker and tests. Arguments go to pytest: bash tools/test.sh -k collator
# PYTHON names the interpreter (3.11 to 3.14). tests/README.md has more.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
# shellcheck source=tools/environment.sh
. tools/environment.sh

COMPILE='from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder
CPUAdamBuilder().load(), ShareMemCommBuilder().load()'

install_rest() { # also compiles DeepSpeed's operators (two minutes, once) and downloads tokenizers for tests
  pip_install -r tests/requirements.txt || return
  PATH="$root/.venv/bin:$PATH" "$venv" -c "$COMPILE" >>"$log" 2>&1 ||
    say "could not compile DeepSpeed's operators: its tests will fail; log: $log"
  "$venv" -m pip download -q --no-deps --dest .venv/wheels 'mistral-common>=1.13,<2' >>"$log" 2>&1 ||
    say "no wheel of mistral-common: tests with published tokenizers are skipped; log: $log"
}

set_up tests tests/requirements.txt
export PATH="$root/.venv/bin:$PATH" OMP_WAIT_POLICY=passive
ruff check .
python -m mypy # the files that pyproject.toml names
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" # on two cores, file by file
