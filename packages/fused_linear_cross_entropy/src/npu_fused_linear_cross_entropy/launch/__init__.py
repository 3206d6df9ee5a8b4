"""From tensors to kernel launches: tiling, allocation."""
