"""Kernels for CUDA (Triton, no PyTorch), and their tiling (neither)."""
