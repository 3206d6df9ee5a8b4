"""`python -m tools.hub_kernel FOLDER`: npu-rms-norm as a kernel repository for the Hugging Face Hub.

    build/torch-npu, build/torch-cuda   one variant a backend, the same files in each
        metadata.json                   name, licence, backend
        layers.py                       RMSNorm, RMSNormGated, RMSNormZeroCentered, as transformers marks them
        npu_rms_norm, npu_tiling        the sources, whose imports of each other are relative

A kernel of the Hub may import the standard library, torch and itself. Its operators have a namespace of their own in
torch.ops, so that it can be loaded where npu-rms-norm is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {
    "npu_rms_norm": ROOT / "packages/rms_norm/src/npu_rms_norm",
    "npu_tiling": ROOT / "shared/npu_tiling/src/npu_tiling",
}
BACKENDS = {"npu": "cann", "cuda": "cuda"}  # in the variant's name, in its metadata
_LEFT_OUT = ("__main__.py", "integrations/")  # command lines, other trainers
_KEPT = tuple(f"npu_rms_norm/integrations/{name}.py" for name in ("__init__", "layers"))
_NAMESPACE = 'OperatorLibrary("npu_rms_norm")'
_ABSOLUTE = re.compile(rf"^(\s*)from ({'|'.join(SOURCES)})\b", re.MULTILINE)
_INIT = '''"""RMSNorm for training on Ascend NPUs and CUDA: `layers` replace the norms of transformers."""

from . import layers
from .npu_rms_norm import add_rms_norm, gated_rms_norm, qk_rms_norm, rms_norm

__all__ = ["add_rms_norm", "gated_rms_norm", "layers", "qk_rms_norm", "rms_norm"]
'''
_LAYERS_FILE = '''"""Layers by the names that transformers marks its norms with."""

from .npu_rms_norm.integrations.layers import RMSNorm, RMSNormGated, RMSNormZeroCentered

__all__ = ["RMSNorm", "RMSNormGated", "RMSNormZeroCentered"]
'''
_CARD = """---
license: apache-2.0
tags: [kernels]
---
RMSNorm of the package npu-rms-norm, for Ascend NPUs and CUDA, with the layers `RMSNorm`, `RMSNormGated` and
`RMSNormZeroCentered`. On npu it needs triton-ascend.
"""


def files(backend: str) -> dict[str, str]:
    """The text of every file of a variant, by its path."""
    found = {"__init__.py": _INIT, "layers.py": _LAYERS_FILE}
    for package, source in SOURCES.items():
        for file in sorted(source.rglob("*.py")):
            path = f"{package}/{file.relative_to(source).as_posix()}"
            if path not in _KEPT and any(part in path for part in _LEFT_OUT):
                continue
            # From a folder at depth n, n + 1 dots lead to the variant's own folder.
            found[path] = _ABSOLUTE.sub(rf"\1from {'.' * path.count('/')}.\2", file.read_text())
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]
    identity = f"_npu_rms_norm_{backend}_{digest}"
    (library,) = (path for path, text in found.items() if _NAMESPACE in text)
    found[library] = found[library].replace(_NAMESPACE, f'OperatorLibrary("{identity}")')
    metadata = {
        "id": identity,
        "name": "npu-rms-norm",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": BACKENDS.get(backend, backend)},
    }
    return {**found, "metadata.json": json.dumps(metadata, indent=2) + "\n"}


def build(folder: Path, backends: Iterable[str] = tuple(BACKENDS)) -> None:
    """Write the repository into a folder."""
    for backend in backends:
        for path, text in files(backend).items():
            file = folder / "build" / f"torch-{backend}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (folder / "README.md").write_text(_CARD)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.hub_kernel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    build(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
