"""Every operator on tensors of more than 2^31 elements, against fp64: `hatch run cuda:large`, on a GPU of 100 GiB."""
