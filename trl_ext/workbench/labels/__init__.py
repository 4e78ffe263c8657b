"""Measure how far people who labelled preference pairs agree, and make training pairs from their labels."""

from .agreement import agreement_report, krippendorff_alpha, zscores
from .pairs import METHODS, hold_out_annotators, majority_pairs, noisy_bradley_terry, shares_of_labels
from .tables import FIRST, SECOND, TIE, Columns, Labels, read_labels

__all__ = [
    "FIRST",
    "METHODS",
    "SECOND",
    "TIE",
    "Columns",
    "Labels",
    "agreement_report",
    "hold_out_annotators",
    "krippendorff_alpha",
    "majority_pairs",
    "noisy_bradley_terry",
    "read_labels",
    "shares_of_labels",
    "zscores",
]
