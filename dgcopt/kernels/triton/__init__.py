"""Device functions that the families' kernels in Triton share, and whether this Triton can compile them."""
