"""What the benchmark of rms_norm is made of."""
