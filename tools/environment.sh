# shellcheck shell=bash disable=SC2154  # sourced by quickstart.sh and test.sh from the project's folder, which is root
# Makes .venv with the interpreter PYTHON (default: python3), and with PyTorch's CPU build if there is no NVIDIA GPU.

venv=$root/.venv/bin/python
gpu=$(command -v nvidia-smi || true)
unset PYTHONDONTWRITEBYTECODE # otherwise every start would recompile all modules

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

pip_install() { # --no-compile, because Python compiles modules when it imports them
  "$venv" -m pip install --no-compile --progress-bar off "$@" >>"$log" 2>&1
}

set_up() { # set_up NAME FILE: run the script's install_rest, unless .venv has requirements.txt and FILE already
  local python=${PYTHON:-python3} requirements stamp=.venv/$1.txt log=.venv/$1.log
  requirements=$(cat requirements.txt "$2")
  [ "$(cat "$stamp" 2>/dev/null)" != "$requirements" ] || return 0
  say "installing into .venv; log: $log"
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
    fail "$python is not Python 3.11 to 3.14; set PYTHON=/path/to/python"
  "$venv" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv ||
    { "$python" -m venv --clear --without-pip .venv && "$python" -m pip --python "$venv" install pip; } # as in Colab
  if [ -z "$gpu" ] && [ "$(uname)" = Linux ]; then # PyPI's build for Linux comes with several GB of CUDA
    pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1 \
      "$(grep '^torch[<>=]' requirements.txt)" || say "PyTorch's index has no CPU build: using PyPI's"
  fi
  install_rest || { tail -n 15 "$log" >&2; fail "pip could not install the requirements; log: $log"; }
  printf '%s\n' "$requirements" >"$stamp" # last, so that an interrupted installation is repeated
}
