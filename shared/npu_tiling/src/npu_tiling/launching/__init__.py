"""From a tiling to a launch: kernels by name, the launcher, what happens where a tile does not fit."""
