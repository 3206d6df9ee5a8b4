"""Kernels that are the same on every chip (Triton, no PyTorch), and the tilings that both chips share (neither)."""
