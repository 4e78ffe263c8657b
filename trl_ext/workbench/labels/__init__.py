"""Measure how far the annotators of preference pairs agree, and make training pairs from their labels."""

from .agreement import agreement_report, krippendorff_alpha, zscores
from .tables import FIRST, SECOND, TIE, Columns, Labels, hold_out_annotators, majority_pairs, noisy_bradley_terry
from .tables import read_labels, shares_of_labels
