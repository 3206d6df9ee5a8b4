"""What launches of kernels that are the same on every chip depend on: neither Triton nor PyTorch is imported."""
