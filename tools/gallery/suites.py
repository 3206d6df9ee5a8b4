"""Count tests of other packages with `pytest --npu-device emulated`: `python -m tools.gallery.suites --liger FOLDER`.

A folder is a checkout of the package's repository, of which tests alone are taken; the package is the one that is installed,
as for `tools.gallery.count`. Tests of small sizes are chosen by their names. Files that were counted keep their counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .measure import short

RESULTS = Path(__file__).parent / "results" / "suites.json"
COMMITS = {"liger-kernel": "ead96b6", "fla-core": "bc3b101"}
"""Of the repositories whose tests were counted."""
_MODULES, _LAYERS = "tests/modules", "test/transformers"
SUITES = {
    "liger-kernel": {
        f"{_LAYERS}/test_relu_squared.py": "",
        f"{_LAYERS}/test_dyt.py": "",
        f"{_LAYERS}/test_rms_norm.py": "correctness and 2-128-512 or functional",
        f"{_LAYERS}/test_layer_norm.py": "",
        f"{_LAYERS}/test_softmax.py": "",
        f"{_LAYERS}/test_sparsemax.py": "",
        f"{_LAYERS}/test_swiglu.py": "functional or silumul",
        f"{_LAYERS}/test_geglu.py": "functional",
        f"{_LAYERS}/test_poly_norm.py": "functional or 2-128-512",
    },
    "fla-core": {
        f"{_MODULES}/test_l2norm.py": "",
        "tests/ops/utils/test_pooling.py": "T63",
        "tests/ops/test_hgrn.py": "T63",
        "tests/ops/test_simple_gla.py": "fused_recurrent and T63",
        "tests/ops/test_linear_attn.py": "fused_recurrent and B1",
        "tests/ops/test_delta.py": "T63",
    },
}
_SECONDS = 1500  # that a file may take


def main() -> int:
    """Count what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tools.gallery.suites", description=__doc__)
    parser.add_argument("--liger", dest="liger-kernel", type=Path, metavar="FOLDER", help="a checkout of Liger-Kernel")
    parser.add_argument("--fla", dest="fla-core", type=Path, metavar="FOLDER", help="the folder with fla's folder of tests")
    parser.add_argument("--only", default="", metavar="TEXT", help="only files with this text, again")
    options = vars(parser.parse_args())
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for package, files in SUITES.items():
        if options[package] is None:
            continue
        found = kept.setdefault(f"{package} {importlib.metadata.version(package)}", {})
        for file, choice in files.items():
            if options["only"] not in file or (file in found and not options["only"]):
                continue
            found[file] = _counted(options[package], file, choice)
            print(f"{file}: {found[file]}", file=sys.stderr, flush=True)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _counted(folder: Path, file: str, choice: str) -> dict[str, object]:
    """How many tests passed, failed and were refused, and why."""
    words = [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-o", "pythonpath=", "--tb=line"]
    chosen = ["-k", choice] if choice else []
    try:
        done = subprocess.run(
            [*words, "--npu-device", "emulated", *chosen], cwd=folder, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"why": [f"more than {_SECONDS} s"]}
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else ""
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|refused|skipped|error)", last)}
    return {**counts, **({"choice": choice} if choice else {}), "why": _reasons(lines)}


def _reasons(lines: Sequence[str]) -> list[str]:
    """Each reason of a failure or refusal once."""
    said = [line for line in lines if re.match(r"\d+ refused: |FAILED |ERROR ", line)]
    return list(dict.fromkeys(short(re.sub(r"^(FAILED|ERROR) \S+?::", r"\1 ", line)) for line in said))[:8]


if __name__ == "__main__":
    sys.exit(main())
