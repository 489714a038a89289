# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, which sets root, after run.sh
# The settings of the loop: those of configs/defaults.sh, changed by the words of the command line.

# shellcheck source=configs/defaults.sh
. "$root/configs/defaults.sh"
known=$(sed -n 's/^\([A-Z_]*\)=.*/\1/p' "$root/configs/defaults.sh")

read_settings() { # read_settings WORD...: settings, and files of settings, in their order
  local word
  for word; do
    case $word in
      --help | -h) cat "$root/configs/defaults.sh"; exit ;;
      -*) fail "unknown flag $word; settings are words like EPOCHS=2, and --help lists them" ;;
      [A-Za-z]*=*) check_name "${word%%=*}" "$word" && printf -v "${word%%=*}" %s "${word#*=}" ;;
      *) read_file "$word" ;;
    esac
  done
}

read_file() { # read_file FILE: its lines are NAME=VALUE, comments, or empty
  local wrong name
  [ -r "$1" ] || fail "$1: neither a setting NAME=VALUE nor a file of settings"
  wrong=$(grep -nvE '^[[:blank:]]*([A-Za-z_]+=.*|#.*)?$' "$1" | head -n 1) || true
  [ -z "$wrong" ] || fail "$1:${wrong%%:*}: expected NAME=VALUE, got '${wrong#*:}'"
  while read -r name; do check_name "$name" "$1"; done < <(sed -n 's/^[[:blank:]]*\([A-Za-z_]*\)=.*/\1/p' "$1")
  # shellcheck source=configs/tiny.sh
  case $1 in */*) . "$1" ;; *) . "./$1" ;; esac
}

check_name() { # check_name NAME WHERE: end if there is no such setting
  ! grep -qxF -e "$1" <<<"$known" || return 0
  # shellcheck disable=SC2086  # the names are words of their own
  fail "$2: unknown setting $1; did you mean $("$PYTHON" -c \
    'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], 1, 0))' "$1" $known)?"
}
