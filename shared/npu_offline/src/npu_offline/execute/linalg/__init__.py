"""Linalg IR, as the Ascend compiler is given it, lowered to code of this host."""
