"""Tiles of the kernels on Ascend: the first way of a table that fits the Unified Buffer."""
