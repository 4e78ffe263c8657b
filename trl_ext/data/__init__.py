from .loading import load_dataset_split

__all__ = ["load_dataset_split"]
