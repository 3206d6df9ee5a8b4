"""The tiling of kernels on Ascend; the kernels are in both/."""
