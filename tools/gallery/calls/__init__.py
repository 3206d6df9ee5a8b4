"""The calls in the gallery: sizes, inputs, whom to call, and what PyTorch computes in fp64. One module for each source."""

from . import fla, liger, mojo, tutorials
from .entry import Entry

ENTRIES: list[Entry] = [*liger.ENTRIES, *fla.ENTRIES, *tutorials.ENTRIES, *mojo.ENTRIES]

__all__ = ["ENTRIES", "Entry"]
