"""Tiles of the kernels on CUDA: the first rule that holds."""
