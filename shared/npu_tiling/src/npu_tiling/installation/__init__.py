"""Which Triton is installed, and how to mend an installation."""
