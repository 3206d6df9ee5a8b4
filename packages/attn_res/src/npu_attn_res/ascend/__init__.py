"""Kernels for Ascend NPUs."""
