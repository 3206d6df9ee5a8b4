"""The loss: kernels, their tiles and launches, the definition in plain PyTorch, and the plans."""
