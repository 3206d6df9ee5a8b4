"""The lines that install a package, as its README shows them: tests hold each README against these."""

from __future__ import annotations

from npu_tiling.installation import TRITON_ASCEND

TORCH_NPU = "2.13.0"
"""The torch_npu that they name: the newest that was tried."""


def install_lines(distribution: str) -> str:
    """The block of an operator package: Ascend, CUDA, CPU."""
    module = distribution.replace("-", "_")
    return f"""```
# Ascend: Linux, x86-64 or aarch64, Python 3.10 or 3.11, CANN's set_env.sh sourced
python3.11 -m venv npu && . npu/bin/activate
pip install torch_npu=={TORCH_NPU} '{distribution}[npu]'
pip uninstall -y triton    # torch asks for it, and its files overwrite those of triton-ascend
pip install --force-reinstall --no-deps triton-ascend=={TRITON_ASCEND}
python -c "import torch_npu, {module}.kernels"

# CUDA: Linux, Python 3.10 to 3.13
python3 -m venv cuda && . cuda/bin/activate
pip install '{distribution}[cuda]'
python -c "import {module}.kernels"

# A CPU: plain PyTorch
pip install {distribution}
```
"""
