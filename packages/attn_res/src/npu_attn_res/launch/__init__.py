"""From tensors to kernel launches: how sources lie, tiling, allocation."""
