"""Sharded parameters: FSDP2 within a replica of the model, dgcopt between replicas.

The ranks are a mesh of 2 x 2; six ranks are 2 x 3 and 3 x 2. Layers have 7, 5 and 1 rows, so shards are uneven, and
some are empty.
"""
