"""Kernels on this host: from their Linalg IR (`linalg`), or from the final module that the compiler makes (`final`)."""
