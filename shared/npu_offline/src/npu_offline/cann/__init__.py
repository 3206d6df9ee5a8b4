"""The host path without a chip: the real torch_npu and triton-ascend's own driver over a stand-in of CANN's runtime.

    python -m npu_offline.cann pytest --npu-device npu        # or any other command: python train.py

Device memory is host memory, in an address range of its own for each device. Streams work lazily: nothing is done until the
host waits for it, so that a missing wait gives a wrong result. Triton kernels are compiled by triton-ascend
through the real bishengir-compile, and run as npu-offline's emulation runs their Linalg IR. Other operators of `npu` tensors
are PyTorch's CPU kernels on the same memory.

Needs torch_npu, triton-ascend and a C++ compiler, in an environment of their own: torch_npu changes what `import torch`
does. It cannot show anything of the chip, CANN's own operators and their limits, collectives (HCCL), or time on a device.
"""

from .control import kernels_do_nothing, launched, profiling

__all__ = ["kernels_do_nothing", "launched", "profiling"]
