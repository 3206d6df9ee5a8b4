"""Kernels that are the same on Ascend and CUDA, and helpers of both chips' kernels."""
