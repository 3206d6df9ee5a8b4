"""What fits into the Unified Buffer, and how many programs a grid has."""
