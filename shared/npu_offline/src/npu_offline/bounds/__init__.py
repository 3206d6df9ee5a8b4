"""Bounds for all sizes: which loads and stores of a kernel stay inside their tensors. Needs z3-solver."""
