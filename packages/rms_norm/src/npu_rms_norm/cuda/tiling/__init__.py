"""Tilings on CUDA: the first row of a table that a shape matches, and its sizes."""
