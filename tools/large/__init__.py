"""Every operator on tensors of more than 2^31 elements, against fp64: `hatch run large`, on a CUDA device of 100 GiB."""
