#!/usr/bin/env bash
# triton-ascend beside triton: pip installs both into one folder and finds nothing wrong; the one that is left after `pip uninstall triton`
# imports, and has no triton.jit.
#
# Versions: triton 3.9.0, triton-ascend 3.2.0, pybind11 3.0.1, numpy 2.4.6, Python 3.11, Linux.
# Input: `pip install triton-ascend` where torch had brought triton, as its CUDA builds do.
# Expected: pip refuses, or says that one package overwrites files of the other; or the last one installed works.
# Seen on 2026-11-30:
#     pip check: No broken requirements found.
#     import triton: ImportError: cannot import name 'Language' from 'triton.backends.compiler'
#     after `pip uninstall triton`: import triton and import triton.language succeed; triton.jit: AttributeError
#   Both distributions have the module triton. The uninstallation removes what triton's list of files names, the other's files included;
#   the folders that are left are namespace packages, which import as empty modules.
# A way round: pip uninstall -y triton, then pip install --force-reinstall --no-deps triton-ascend==3.2.0.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet triton==3.9.0 pybind11==3.0.1 numpy==2.4.6
"$work/bin/pip" install --quiet triton-ascend==3.2.0

cd "$work"
check=$(bin/pip check || true)
both=$(bin/python -c "import triton; triton.jit" 2>&1 | tail -n1 || true)
bin/pip uninstall --quiet --yes triton
alone=$(bin/python -c "import triton, triton.language; print('imported'); triton.jit" 2>&1 | grep -E '^imported|Error' || true)
printf 'pip check: %s\nboth: %s\nafter the uninstallation: %s\n' "$check" "${both% (*}" "$alone"
[ "$check" = "No broken requirements found." ] && [[ $both == *"cannot import name 'Language'"* ]] &&
  [[ $alone == imported*"module 'triton' has no attribute 'jit'"* ]] || { echo "changed"; exit 1; }
