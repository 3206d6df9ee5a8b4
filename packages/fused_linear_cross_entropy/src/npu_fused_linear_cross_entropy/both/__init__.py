"""Kernels for every chip (they import Triton, not PyTorch), and the tilings that chips share (they import neither)."""
