"""Structures in and out: :class:`AtomicData`, :class:`Batch`, the schema table, files, datasets and their loader."""

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.check import CheckReport, check_dataset
from nvalchemi.data.datasets import Dataset, InMemoryDataset, MultiDataset, StructureDataset, Subset, split
from nvalchemi.data.io import iread, read, write
from nvalchemi.data.loader import DataLoader
from nvalchemi.data.samplers import (
    BalancedSampler,
    BudgetBatcher,
    FixedBatcher,
    SequentialSampler,
    ShuffleSampler,
    WeightedSampler,
)
from nvalchemi.data.schema import FIELDS, FIXED, FREE, Field, register_field
from nvalchemi.data.statistics import DatasetStatistics, compute_statistics, reference_energies
from nvalchemi.data.zarr import AtomicDataZarrReader, AtomicDataZarrWriter, CorruptChunkError

__all__ = [
    "FIELDS",
    "FIXED",
    "FREE",
    "AtomicData",
    "AtomicDataZarrReader",
    "AtomicDataZarrWriter",
    "BalancedSampler",
    "Batch",
    "BudgetBatcher",
    "CheckReport",
    "CorruptChunkError",
    "DataLoader",
    "Dataset",
    "DatasetStatistics",
    "Field",
    "FixedBatcher",
    "InMemoryDataset",
    "MultiDataset",
    "SequentialSampler",
    "ShuffleSampler",
    "StructureDataset",
    "Subset",
    "WeightedSampler",
    "check_dataset",
    "compute_statistics",
    "iread",
    "read",
    "reference_energies",
    "register_field",
    "split",
    "write",
]
