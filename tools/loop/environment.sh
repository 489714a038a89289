# shellcheck shell=bash disable=SC2154  # sourced after run.sh by quickstart.sh and test.sh, from the checkout
# How .venv is made: its Python, a PyTorch that suits the machine, and the packages that the script's install_rest asks
# pip for. PYTHON names the interpreter.

CPU_INDEX=https://download.pytorch.org/whl/cpu # PyPI's own build for Linux brings several GB of CUDA
NEWEST_MINOR=13 # Python's: PyTorch has builds for a newer one only after a while
venv=$root/.venv/bin/python
unset PYTHONDONTWRITEBYTECODE # which images set: pip leaves compiling to the first import, and each would compile anew

find_python() {  # PYTHON, or one that is new enough; one that may be too new for PyTorch only if there is no other
  local python minor newest candidates=("${PYTHON:-}")
  [ -n "${PYTHON:-}" ] || candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  for newest in "$NEWEST_MINOR" 99; do
    for python in "${candidates[@]}"; do
      minor=$("$python" -c 'import sys; print(sys.version_info[1])' 2>/dev/null) || continue
      if [ "$minor" -ge 10 ] && [ "$minor" -le "$newest" ]; then
        echo "$python"
        return
      fi
    done
  done
  fail "needs Python 3.10 or newer, which none of these is: ${candidates[*]}. PYTHON=/path/to/python names another"
}

pip_install() {  # status of pip, whose output goes to the log; Python compiles what is imported, pip would all files
  in_foreground "$venv" -m pip install --no-compile --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1
}

install_torch() {  # a build without CUDA where there is no NVIDIA GPU, and one can be had
  local wanted
  wanted=$(grep '^torch[<>=]' requirements.txt)
  if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    # What it depends on comes with the other requirements.
    if pip_install --no-deps --index-url "$CPU_INDEX" --timeout 10 --retries 1 "$wanted"; then return; fi
    say "no CPU build of PyTorch from $CPU_INDEX: installing the large one with CUDA"
  fi
  pip_install "$wanted"
}

set_up() {  # set_up NAME FILE...: .venv, unless it is that of these requirements already
  local python stamp gpus without_it stamp_file=.venv/$1.txt
  log=$root/.venv/$1.log
  shift
  gpus=$(command -v nvidia-smi || true)
  stamp="$(cat "$@" | cksum) ${EXTRAS[*]-} $gpus"
  if [ -x "$venv" ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then
    say "environment: .venv is up to date"
    return
  fi
  without_it=$(grep -sLF -e "$gpus" .venv/quickstart.txt .venv/tests.txt || true)
  if [ -n "$gpus" ] && [ -n "$without_it" ]; then
    say "environment: .venv was made where there was no GPU, and is made anew"
    rm -rf .venv && mkdir .venv
  fi
  python=$(find_python)
  say "environment: installs into .venv; log: $log"
  # A python without pip is what a failure has left.
  "$venv" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv ||
    fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
  if ! { install_torch && install_rest; }; then
    tail -n 15 "$log" >&2
    fail "pip could not install the requirements; its log: $log"
  fi
  printf '%s\n' "$stamp" >"$stamp_file"
  say "environment: done"
}
