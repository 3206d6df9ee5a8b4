"""From tensors to kernel launches."""
