"""Shapes and launches of the kernels in both/. They import neither Triton nor PyTorch."""
