"""Sparsifiers: DGC and its kin send selected coordinates and keep the others in a residual."""
