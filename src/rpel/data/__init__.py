"""Data sets, how they are shared out among the nodes, and a real MNIST sample to start with."""

from rpel.data.dataset import DataError, Dataset, MissingDataError, crop_flip, from_arrays
from rpel.data.partition import Virtual, balanced_subset, by_writer, dirichlet, iid, largest_owners, virtual
from rpel.data.sources import NAMES, load

__all__ = [
    "NAMES", "DataError", "Dataset", "MissingDataError", "Virtual", "balanced_subset", "by_writer",
    "crop_flip", "dirichlet", "from_arrays", "iid", "largest_owners", "load", "virtual",
]  # fmt: skip
