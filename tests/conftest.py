"""What all tests share: one thread per process, as ranks share few cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
