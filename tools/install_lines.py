"""The lines that install a package, as its README shows them: tests hold each README against these."""

from __future__ import annotations

from npu_tiling.doctor import TORCH_CPU_INDEX, TRITON_ASCEND, WHEELS_PYTHON

from .workspace import read_versions

TORCH_NPU = "2.13.0"
"""The torch_npu that they name: the newest that was tried."""


def install_lines(distribution: str) -> str:
    """The block of an operator package: from a clone, Ascend, CUDA, CPU."""
    module = distribution.replace("-", "_")
    folder = f"./packages/{module.removeprefix('npu_')}"
    pythons = read_versions()["python"]["packages"]
    ascend = " or ".join(python for python in pythons if tuple(map(int, python.split("."))) <= WHEELS_PYTHON[1])
    return f"""```
# Nothing is published yet. From a clone of this repository, Python {pythons[0]} to {pythons[-1]}, plain PyTorch on a CPU:
python3 -m venv venv && . venv/bin/activate
pip install torch=={TORCH_NPU} --index-url {TORCH_CPU_INDEX}
pip install ./shared/npu_tiling {folder}    # for {distribution} below; with [npu] or [cuda] as there

# Ascend: Linux, x86-64 or aarch64, Python {ascend}, CANN's set_env.sh sourced
python3.11 -m venv npu && . npu/bin/activate
pip install torch=={TORCH_NPU} --index-url {TORCH_CPU_INDEX}    # a CPU build
pip install torch_npu=={TORCH_NPU} '{distribution}[npu]'
pip uninstall -y triton    # a torch with CUDA brings it, and its files overwrite those of triton-ascend
pip install --force-reinstall --no-deps triton-ascend=={TRITON_ASCEND}
python -m npu_tiling {module}    # imports all kernels, and says what is wrong if that fails

# CUDA: Linux, Python {pythons[0]} to {pythons[-1]}
python3 -m venv cuda && . cuda/bin/activate
pip install '{distribution}[cuda]'
python -m npu_tiling {module}

# A CPU: plain PyTorch
pip install {distribution}
```
"""
