"""Data sets, how they are shared out among the nodes, and a real MNIST sample to start with."""

from rpel.data.dataset import Dataset, check_examples, check_finite, crop_flip, from_arrays
from rpel.data.datasets import NAMES, load
from rpel.data.files import DataError, MissingDataError
from rpel.data.partition import Virtual, balanced_subset, by_writer, dirichlet, iid, largest_owners, virtual

__all__ = [
    "NAMES",
    "DataError",
    "Dataset",
    "MissingDataError",
    "Virtual",
    "balanced_subset",
    "by_writer",
    "check_examples",
    "check_finite",
    "crop_flip",
    "dirichlet",
    "from_arrays",
    "iid",
    "largest_owners",
    "load",
    "virtual",
]
