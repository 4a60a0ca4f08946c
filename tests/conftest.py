"""Settings of all tests: nothing is fetched from the hub, and one thread, so that sums repeat."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_SILENT", "true")

import torch

torch.set_num_threads(1)
