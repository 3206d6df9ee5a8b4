"""Launches kernels for tensors: finds their strides, chooses tilings and allocates results."""
