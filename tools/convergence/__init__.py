"""Trains the demo's model in fp32, bf16 and under autocast, and asks whether our operators stay as close to plain PyTorch as
another order of the same data does."""

from .. import demo  # noqa: F401 - how OpenMP waits, which it reads once
