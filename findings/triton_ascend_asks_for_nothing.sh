#!/usr/bin/env bash
# triton-ascend cannot be imported where it is installed alone: it needs pybind11, and its metadata asks for no package at all.
#
# Versions: triton-ascend 3.2.0, pybind11 3.0.1, Python 3.11, Linux.
# Expected: `pip install triton-ascend` brings what `import triton` needs, or `pip check` names what is missing.
# Seen on 2026-11-30:
#     pip check: No broken requirements found.
#     import triton: ModuleNotFoundError: No module named 'pybind11'
#     with pybind11 beside it: imported
#   pybind11 has the C++ headers that the launcher of a kernel is compiled with; it is imported when the backends are looked for, so that
#   machines that only read the language or run the interpreter need it too.
# A way round: name pybind11 beside triton-ascend in requirements and images.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
cd "$work"
bin/pip install --quiet triton-ascend==3.2.0
check=$(bin/pip check || true)
alone=$(bin/python -c "import triton" 2>&1 | tail -n1 || true)
bin/pip install --quiet pybind11==3.0.1
beside=$(bin/python -c "import triton; print(triton.__version__)" 2>&1 | tail -n1 || true)
printf 'pip check: %s\nalone: %s\nwith pybind11: %s\n' "$check" "$alone" "$beside"
[ "$check/$alone/$beside" = "No broken requirements found./ModuleNotFoundError: No module named 'pybind11'/3.2.0" ] ||
  { echo "changed"; exit 1; }
