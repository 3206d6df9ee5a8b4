"""From tensors to kernel launches: how the rows lie, tiling, allocation."""
