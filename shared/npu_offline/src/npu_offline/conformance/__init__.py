"""Small kernels of every operation of Triton's language, in variants that must agree, through every compiler."""
