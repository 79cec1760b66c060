"""Structures with labels for `train` and `eval`."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvalchemi.cli.errors import InputError
from nvalchemi.data import AtomicData, iread
from nvalchemi.data.datasets import InMemoryDataset, StructureDataset
from nvalchemi.models.base import BaseModelMixin

LABELS = ("energy", "forces", "stress")
_GEOMETRY = frozenset({"positions", "atomic_numbers", "cell", "pbc"})


@dataclass(frozen=True)
class LabelledData:
    """Structures of a file and how many of them have which label."""

    dataset: StructureDataset
    source: Path
    counts: Mapping[str, int]
    """Structures by label."""
    names_seen: frozenset[str]
    """Names of everything that the structures carry."""

    def require(self, labels: Iterable[str], keys: Mapping[str, str]) -> None:
        """:class:`InputError` for labels that no structure has under the key given for it."""
        for label in labels:
            if self.counts[label]:
                continue
            stem = label.removesuffix("s")
            similar = sorted(name for name in self.names_seen if stem in name.lower())
            hint = f"; there is {', '.join(similar)}: {label}_key says which to take" if similar else ""
            raise InputError(f"{self.source}: no structure has {label} under the key {keys[label]!r}{hint}")

    def incomplete(self, labels: Iterable[str]) -> Iterator[str]:
        """A line for each label that some structures lack."""
        for label in labels:
            missing = len(self.dataset) - self.counts[label]
            if missing:
                yield f"{label} missing in {missing} of {len(self.dataset)} structures of {self.source}"

    def fingerprint(self, key: str) -> dict[str, Any]:
        """Number of the structures, and a checksum of them, their labels and the entry ``key`` of their ``info``.

        Of the content and not of the bytes of the file, which may be compressed or moved without harm.
        """
        digest = hashlib.sha256()
        for data in self.dataset:
            digest.update(repr(data.info.get(key)).encode())
            for name in sorted(_GEOMETRY.union(LABELS)):
                if name in data:
                    digest.update(f"{name} {tuple(data[name].shape)} ".encode())
                    digest.update(data[name].numpy().tobytes())
        return {"frames": len(self.dataset), "sha256": digest.hexdigest()}


def read_labelled(
    path: Path, model: BaseModelMixin | None = None, keys: Mapping[str, str] | None = None
) -> LabelledData:
    """Structures of a file, in double precision, with labels and what a model reads.

    A label that some structures have is NaN in the others. Each structure has the number of its frame as ``system_id``,
    by which messages name it.

    Raises
    ------
    InputError
        The file cannot be read or is empty.
    """
    wanted = _GEOMETRY.union(LABELS)
    if model is not None:
        wanted |= model.model_config.required_inputs | model.model_config.optional_inputs
    counts: Counter[str] = Counter()
    names: set[str] = set()
    structures: list[AtomicData] = []
    options: dict[str, Any] = {f"{label}_key": key for label, key in (keys or {}).items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about similar names, of which `require` speaks
            for number, data in enumerate(iread(path, dtype=torch.float64, **options)):
                names.update(map(str, data.info), data.keys())
                counts.update(
                    label for label in LABELS if label in data and bool(data[label].isfinite().any())
                )
                for name in data.keys():
                    if name not in wanted:
                        data.remove_key(name)
                data.add_key("system_id", torch.tensor([[number]]))
                structures.append(data)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    if not structures:
        raise InputError(f"{path}: no structure in it")
    for data in structures:
        _complete(data, counts)
    return LabelledData(InMemoryDataset(structures), path, counts, frozenset(names - wanted))


def _complete(data: AtomicData, counts: Mapping[str, int]) -> None:
    """Give a structure the labels that others have, as NaN."""
    shapes = {"energy": (1, 1), "forces": (data.num_nodes, 3), "stress": (1, 3, 3)}
    for label in LABELS:
        if label not in data and counts[label]:
            data.add_key(label, torch.full(shapes[label], torch.nan, dtype=data.dtype))
