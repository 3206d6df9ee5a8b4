"""What a module in MLIR says, Linalg IR or final module: read here once, for compilation, execution, timing and lint."""
