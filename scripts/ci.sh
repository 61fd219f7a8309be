#!/usr/bin/env bash
# What has to pass before a change lands. Makes its own environments and uses nothing that was installed by hand:
#   1 lint, the workflows' schema
#   2 the built wheel, from an empty directory: the first command of README, then the quick tests
#   3 an editable install: the slow tests
#   4 what convert writes, read by the oldest transformers and mlx-lm that are declared (1 to 3 have the newest)
#   5 on every other interpreter of 3.11 to 3.14 that is here: the same first command and a part of the quick tests (PART below),
#     with MLX's own products (tests/support/products.py); for those that are not here: all dependencies as wheels
# PYTHON names the interpreter of 1 to 3 (default: python3.11). ONLY=quick stops after 2.
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1

python=${PYTHON:-python3.11}
"$python" -m venv "$work/env"
. "$work/env/bin/activate"
pip install -q build "ruff>=0.17,<0.18" check-jsonschema
ruff check .
ruff format --check .
check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml

# quick ENVIRONMENT TESTS...: README's first command and quick tests, from a directory that holds nothing.
quick() {
  local env=$1
  shift
  rm -rf "$work/empty" && mkdir "$work/empty"
  (cd "$work/empty" && "$env/bin/dflash-mlx" generate -m 16 && "$env/bin/dflash-mlx" generate -m 16 --block-size 8 &&
    "$env/bin/python" -m pytest "$@" -c "$repo/pyproject.toml" --rootdir "$repo")
}
# What touches every module and the standard library most, in a minute or two.
PART=(core/test_imports.py core/test_no_globals.py core/test_generation.py core/test_checkpoint.py cli/test_first_day.py
  serving/test_requests.py)

echo "== the wheel, from an empty directory"
python -m build -q --wheel --outdir "$work/dist" .
wheel=$(echo "$work"/dist/*.whl)
pip install -q "$wheel[cpu,train,dev]"
quick "$work/env" "$repo/tests"
[ "${ONLY:-}" != quick ] || exit 0

echo "== editable, slow tests"
# Two processes on two cores: more threads in each are in each other's way. The quick tests have run with as many as there are.
export OMP_NUM_THREADS=1
pip uninstall -q -y dflash-mlx
pip install -q -e ".[cpu,train,dev]"
pytest -m full
unset OMP_NUM_THREADS

echo "== readers of converted models"
PYTHON="$python" bash scripts/check_versions.sh "$work/readers" oldest

# interpreter VERSION: prints a Python of that version, if one runs here.
interpreter() {
  for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$found" -c 'import venv' 2> /dev/null; then echo "$found" && return; fi
  done
}

own=$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.11 3.12 3.13 3.14; do
  [ "$version" != "$own" ] || continue
  if found=$(interpreter "$version") && [ -n "$found" ]; then
    echo "== Python $version"
    "$found" -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "$wheel[cpu,train,dev]"
    DFLASH_MLX_TEST_PRODUCTS=mlx quick "$work/$version" "${PART[@]/#/$repo/tests/}"
  else
    echo "== Python $version is not here: its wheels"
    python scripts/wheels.py "$version" "$work/wheels"
  fi
done
