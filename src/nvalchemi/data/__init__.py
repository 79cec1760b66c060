"""Structures in and out: :class:`AtomicData`, :class:`Batch`, the schema table, files."""

from nvalchemi.data.atomic_data import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.io import iread, read, write
from nvalchemi.data.schema import FIELDS, FIXED, FREE, Field, register_field

__all__ = [
    "FIELDS",
    "FIXED",
    "FREE",
    "AtomicData",
    "Batch",
    "Field",
    "iread",
    "read",
    "register_field",
    "write",
]
