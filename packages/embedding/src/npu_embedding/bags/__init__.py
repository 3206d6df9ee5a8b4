"""Look-ups that sum, decode or normalise rows: the public function and its plans, and the kernels of both chips."""
