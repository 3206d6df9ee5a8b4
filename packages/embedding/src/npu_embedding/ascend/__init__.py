"""Kernels for Ascend (Triton, no PyTorch), and their tiling (neither)."""
