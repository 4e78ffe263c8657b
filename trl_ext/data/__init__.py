from .loading import load_dataset_split
from .pairs import usable_pairs

__all__ = ["load_dataset_split", "usable_pairs"]
