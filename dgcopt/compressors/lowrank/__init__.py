"""Low-rank compressors: matrices travel as thin factors."""
