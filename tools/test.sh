#!/usr/bin/env bash
# Set up .venv and run the linter and the tests. Arguments go to pytest: bash tools/test.sh -k collator
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "tools/test.sh: needs Python 3.10 or newer, $python is $("$python" --version 2>&1)" >&2; exit 1; }
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet -r tests/requirements.txt

export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH=. OMP_WAIT_POLICY=passive
ruff check .
exec python -m pytest "$@"
