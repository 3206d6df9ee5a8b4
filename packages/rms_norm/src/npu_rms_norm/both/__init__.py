"""Kernels that are the same on every chip: rows that are too wide to be held on chip, in blocks of columns."""
