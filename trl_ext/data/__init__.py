from .hh import split_dialogue, split_pair
from .loading import load_dataset_split
from .pairs import usable_pairs

__all__ = ["load_dataset_split", "split_dialogue", "split_pair", "usable_pairs"]
