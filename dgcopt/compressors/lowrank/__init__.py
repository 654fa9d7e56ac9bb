"""Low-rank compressors: send matrices as thin factors."""
