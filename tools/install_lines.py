"""The lines that install a package, as its README shows them: tests hold each README against these."""

from __future__ import annotations

from npu_tiling.doctor import TORCH_CPU_INDEX, TRITON_ASCEND, WHEELS_PYTHON

from .workspace import read_versions

TORCH_NPU = "2.13.0"
"""The torch_npu that they name: the newest that was tried."""


def install_lines(distribution: str) -> str:
    """The block of an operator package, by kind of machine, and what will do once it is published."""
    module = distribution.replace("-", "_")
    folder = f"./packages/{module.removeprefix('npu_')}"
    pythons = read_versions()["python"]["packages"]
    ascend = " or ".join(python for python in pythons if tuple(map(int, python.split("."))) <= WHEELS_PYTHON[1])
    return f"""In a clone of the repository and a virtual environment:

```
# CPU: Python {pythons[0]} to {pythons[-1]}; torch without CUDA, if pip reaches that index; numpy, without which it warns
pip install --extra-index-url {TORCH_CPU_INDEX} numpy ./shared/npu_tiling {folder}

# CUDA: Linux, Python {pythons[0]} to {pythons[-1]}
pip install numpy ./shared/npu_tiling '{folder}[cuda]'

# Ascend: Linux, Python {ascend}, CANN's set_env.sh sourced
pip install torch=={TORCH_NPU} --index-url {TORCH_CPU_INDEX}
pip install numpy torch_npu=={TORCH_NPU} ./shared/npu_tiling '{folder}[npu]'
pip uninstall -y triton    # its files overwrite those of triton-ascend
pip install --force-reinstall --no-deps triton-ascend=={TRITON_ASCEND}
```

`python -m npu_tiling {module}` imports all kernels and says what is wrong with an installation. Nothing is published
yet: once it is, `{distribution}`, `'{distribution}[cuda]'` and `'{distribution}[npu]'` take the place of the two folders.
"""
