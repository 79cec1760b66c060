"""The doctor: whether a dataset is fit to train on and, if not, which structures are to blame."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nvalchemi.data._check_rules import make_rules
from nvalchemi.data.batch import Batch
from nvalchemi.data.datasets import Dataset, InMemoryDataset, StructureDataset
from nvalchemi.data.io import iread

_BATCH = 512


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of fault.

    Parameters
    ----------
    kind : str
        Short name: ``"non-finite"``, ``"overlap"``, ``"missing label"``, …
    severity : {"error", "warning"}
        An error makes the dataset unfit to train on.
    message : str
        What is wrong, in words.
    structures : tuple of int
        All structures concerned, by number; empty where it is the dataset as a whole.
    """

    kind: str
    severity: Literal["error", "warning"]
    message: str
    structures: tuple[int, ...] = ()


@dataclass(slots=True)
class CheckReport:
    """What :func:`check_dataset` found."""

    source: str
    num_structures: int = 0
    num_atoms: int = 0
    min_atoms: int = 0
    max_atoms: int = 0
    elements: dict[str, int] = field(default_factory=dict[str, int])
    """Atoms by chemical symbol."""
    fields: dict[str, int] = field(default_factory=dict[str, int])
    """Structures by field that they have."""
    problems: list[Problem] = field(default_factory=list[Problem])

    @property
    def fit_to_train(self) -> bool:
        """Whether nothing found is an error."""
        return all(problem.severity != "error" for problem in self.problems)

    def lines(self) -> list[str]:
        """The report as text, line by line."""
        out = [
            f"{self.source}",
            f"structures  {self.num_structures}",
            f"atoms       {self.num_atoms} ({self.min_atoms} to {self.max_atoms} per structure)",
            f"elements    {', '.join(f'{symbol} {count}' for symbol, count in self.elements.items()) or 'none'}",
            "fields",
        ]
        for name, count in self.fields.items():
            share = "all" if count == self.num_structures else f"{count} of {self.num_structures}"
            out.append(f"  {name:<22}{share}")
        for problem in self.problems:
            out.append(f"{problem.severity}: {problem.kind}: {problem.message}{_numbers(problem.structures)}")
        out.append("fit to train on" if self.fit_to_train else "not fit to train on")
        return out


def check_dataset(
    source: "str | os.PathLike[str] | StructureDataset",
    on_progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Look through a dataset once for faults that spoil a training.

    Parameters
    ----------
    source : path or StructureDataset
        A file in any format that this package reads, or a dataset.
    on_progress : callable, optional
        Called as the work goes on with the number of structures looked at and that of all.

    Returns
    -------
    CheckReport
        Counts, elements, fields and the problems found. Errors: structures that cannot be read, labels that are
        missing, values that are not finite, atoms closer than half the sum of their covalent radii, forces far
        outside the rest, stress whose sign or unit contradicts the energies. Warnings: duplicates, forces that do not
        add up to zero.

    Raises
    ------
    FileNotFoundError, ValueError
        No such file, or not one with structures.

    Examples
    --------
    >>> from nvalchemi.data import AtomicData
    >>> molecule = AtomicData(
    ...     positions=[[0, 0, 0], [0, 0, 0.05]], atomic_numbers=[6, 8], energy=1.0, forces=[[0.0] * 3] * 2
    ... )
    >>> report = check_dataset(InMemoryDataset([molecule]))
    >>> report.fit_to_train, report.problems[0].kind
    (False, 'overlap')
    """
    unread: list[str] = []
    dataset, name = (
        (source, type(source).__name__) if isinstance(source, StructureDataset) else _opened(source, unread)
    )
    report = CheckReport(source=name)
    sizes: list[np.ndarray] = []
    elements: Counter[int] = Counter()
    fields: Counter[str] = Counter()
    rules = make_rules()
    broken: dict[int, str] = {}
    for numbers, batch in _batches(dataset, broken):
        sizes.append(batch.num_nodes_per_graph.cpu().numpy())
        elements.update(
            dict(zip(*(v.tolist() for v in batch.atomic_numbers.unique(return_counts=True)), strict=True))
        )
        fields.update(dict.fromkeys(batch.keys(), batch.num_graphs))
        for rule in rules:
            rule.see(numbers, batch)
        if on_progress is not None:
            on_progress(int(numbers[-1]) + 1, len(dataset))
    _summarise(report, sizes, elements, fields)
    report.problems = [Problem("unreadable", "error", text) for text in unread]
    if broken:
        first = next(iter(broken.values()))
        report.problems.append(
            Problem(
                "unreadable",
                "error",
                f"{len(broken)} structure(s) cannot be read; first: {first}",
                tuple(broken),
            )
        )
    if report.num_structures == 0:
        report.problems.append(Problem("empty", "error", "no structure could be read"))
    for rule in rules:
        report.problems += [Problem(*found) for found in rule.problems()]
    return report


def _opened(path: "str | os.PathLike[str]", unread: list[str]) -> tuple[StructureDataset, str]:
    """The file as a dataset; what a reader leaves out of it is told in ``unread``."""
    name = os.fspath(path)
    try:
        return Dataset(path), name
    except ValueError:
        # Not a kind of file with random access, or a text file with a broken frame: everything that can be read.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataset = InMemoryDataset(iread(path, on_error="skip"))
        unread += [str(w.message) for w in caught if "skipped" in str(w.message)]
        return dataset, name


def _batches(dataset: StructureDataset, broken: dict[int, str]) -> Iterator[tuple[np.ndarray, Batch]]:
    """Batches of structures with the same fields, and their numbers; what cannot be read goes to ``broken``."""
    for start in range(0, len(dataset), _BATCH):
        numbers = np.arange(start, min(start + _BATCH, len(dataset)))
        try:
            parts = dataset.read_parts(numbers)
        # Whatever a file can make a reader raise is a finding here, with the number of the structure.
        except Exception:
            parts = []
            for i in numbers.tolist():
                try:
                    parts.append(Batch.from_data_list([dataset[i]]))
                except Exception as error:
                    broken[i] = str(error)
            numbers = np.array([i for i in numbers.tolist() if i not in broken], dtype=np.int64)
        first = 0
        for part in parts:
            yield numbers[first : first + part.num_graphs], part
            first += part.num_graphs


def _summarise(
    report: CheckReport, sizes: list[np.ndarray], elements: Counter[int], fields: Counter[str]
) -> None:
    from ase.data import chemical_symbols

    atoms = np.concatenate([np.zeros(0, dtype=np.int64), *sizes])
    report.num_structures, report.num_atoms = len(atoms), int(atoms.sum())
    report.min_atoms, report.max_atoms = (int(atoms.min()), int(atoms.max())) if len(atoms) else (0, 0)
    report.elements = {chemical_symbols[z]: elements[z] for z in sorted(elements)}
    report.fields = dict(fields)


def _numbers(structures: tuple[int, ...]) -> str:
    if not structures:
        return ""
    shown = ", ".join(map(str, structures[:8])) + (" …" if len(structures) > 8 else "")
    return f" (structures {shown})" if len(structures) > 1 else f" (structure {shown})"
