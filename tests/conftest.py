"""Set before anything imports transformers, datasets or wandb: they read these once, at import."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors: threads cost more than they save, and tests run side by side
