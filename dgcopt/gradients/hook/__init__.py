"""The communication hook of DistributedDataParallel: its buckets, its models and the optimizer behind it."""
