"""Every width from 1 to 70,000 planned, and every tiling among them launched: `hatch run cuda:widths`, on a CUDA machine."""
