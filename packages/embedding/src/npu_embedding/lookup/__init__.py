"""The look-up and its gradient: operators, plans, and kernels with their tables of tiles."""
