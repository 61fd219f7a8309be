#!/usr/bin/env bash
# Reads converted checkpoints of every family with the oldest and the newest transformers and mlx-lm that the project allows.
#
#     scripts/check_versions.sh [DIRECTORY [oldest|newest]...]      environments are made there, and kept; default: a temporary
#                                                                   directory, both
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
if [ $# -gt 0 ]; then
  mkdir -p "$1"
  work=$(cd "$1" && pwd)
  shift
else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
python=${PYTHON:-python3.11}
extras=dev
[ "$(uname)" = Darwin ] || extras=cpu,dev

check() { # name, then what pip installs beside the project
  local name=$1
  shift
  [ -d "$work/$name" ] || "$python" -m venv "$work/$name"
  "$work/$name/bin/pip" install -q --upgrade "$@" -e ".[$extras]"
  echo "== $name: $("$work/$name/bin/pip" list --format freeze | grep -E '^(transformers|mlx-lm|mlx|tokenizers)==' | tr '\n' ' ')"
  (cd "$repo" && HF_HUB_OFFLINE=1 "$work/$name/bin/python" -m pytest -m "full or not full" tests/convert/test_readers.py)
}

[ $# -gt 0 ] || set -- oldest newest
for name in "$@"; do
  case "$name" in
    oldest) check oldest "transformers==5.7.0" "mlx-lm==0.32.2" ;;
    newest) check newest transformers "mlx-lm<0.33" ;;
    *) echo "check_versions.sh: $name is neither oldest nor newest" >&2 && exit 2 ;;
  esac
done
