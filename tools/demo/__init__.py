"""Trains a small language model twice, with the operators of this repository and with plain PyTorch, and compares."""

import os

# Read when PyTorch loads OpenMP: threads that wait leave the core to others. Spinning, which is usual, makes each small
# operation wait for the scheduler where other programs want the cores too, and the demo many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
