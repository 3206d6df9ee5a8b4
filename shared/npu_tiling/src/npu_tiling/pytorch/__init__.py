"""What ties operators to PyTorch: registration and autograd, DTensors, arguments, memory, patched models. Imports torch."""
