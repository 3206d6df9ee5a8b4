"""Device helpers that several operators use. Of npu_tiling the modules of this folder alone import Triton.

Kernels import what they use: `from npu_tiling.device.rounding import widen`. triton-ascend 3.2.0 tells helpers apart by bare
name and argument types: no kernel may reach two helpers of one name, be they in this folder, in the kernel's package or in
`triton.language`.
"""
