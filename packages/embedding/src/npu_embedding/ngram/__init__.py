"""The n-gram look-up: the public function, its module and its plan, and the kernels of both chips."""
