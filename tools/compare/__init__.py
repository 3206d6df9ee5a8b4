"""Our kernels against liger-kernel's Ascend kernels and against what was published, by predicted time."""
