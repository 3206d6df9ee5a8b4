"""Kernels for CUDA alone, and the tiling of all kernels there."""
