# shellcheck shell=bash disable=SC2154  # sourced by run_spag.sh, which sets root, after run.sh
# The settings of the loop: those of configs/defaults.sh, changed by the arguments of the command line.

# shellcheck source=configs/defaults.sh
. "$root/configs/defaults.sh"
value="([^[:blank:]\"']*|\"[^\"]*\"|'[^']*')" # in a file of settings: one word, or a text in quotes
known=$(sed -n 's/^\([A-Z_]*\)=.*/\1/p' "$root/configs/defaults.sh")

read_settings() { # read_settings ARGUMENT...: settings, and files of settings, in their order
  local given
  for given; do
    case $given in
      --help | -h) cat "$root/configs/defaults.sh"; exit ;;
      -*) fail "unknown flag $given; settings look like EPOCHS=2, and --help lists them" ;;
      [A-Za-z]*=*) check_name "${given%%=*}" "$given" && printf -v "${given%%=*}" %s "${given#*=}" ;;
      *) read_file "$given" ;;
    esac
  done
}

read_file() { # read_file FILE: its lines are NAME=VALUE, comments, or empty
  local wrong name
  [ -r "$1" ] || fail "$1: neither a setting NAME=VALUE nor a file of settings"
  wrong=$(grep -nvE "^[[:blank:]]*([A-Za-z_]+=$value)?([[:blank:]]*|[[:blank:]]*#.*)$" "$1" | head -n 1) || true
  [ -z "$wrong" ] || fail "$1:${wrong%%:*}: expected NAME=VALUE, a value with blanks in quotes, got '${wrong#*:}'"
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
