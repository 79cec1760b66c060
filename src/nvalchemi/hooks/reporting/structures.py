"""What became of each structure of a run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from torch import Tensor

from nvalchemi.data import Batch

_KEPT = ("energy", "fmax", "volume", "conserved_energy", "total_energy", "time")
_NAMES = ("name", "label", "id", "material_id")
"""Entries of ``info`` that name a structure, in the order of preference."""


@dataclass(slots=True)
class StructureRecord:
    """One structure: what it is, how it was when it entered, how it is or was when last seen.

    Attributes
    ----------
    system_id : int
        Its number in the run.
    name : str
        Given to the orchestrator, or the ``name``, ``label``, ``id`` or ``material_id`` in its ``info``, or empty.
    formula : str
        Hill's order.
    num_atoms : int
        Number of atoms.
    status : str
        ``"running"``, ``"converged"``, ``"done"`` (has made its steps, or had before), ``"not converged"``,
        ``"stopped"`` (the run ended before its end) or ``"failed"``.
    reason : str
        Why it failed.
    steps : int
        Steps made.
    before, after : dict of str to float
        ``energy`` (eV), ``fmax`` (eV/Å), ``volume`` (Å³), ``total_energy``, ``conserved_energy`` (eV), ``time`` (fs),
        where there are any: with the first forces, and when last seen.
    first_step : int
        Steps it had made at ``before``: not 0 in a run that goes on with another of which nothing is known.
    """

    system_id: int
    name: str
    formula: str
    num_atoms: int
    status: str = "running"
    reason: str = ""
    steps: int = 0
    before: dict[str, float] = field(default_factory=dict[str, float])
    after: dict[str, float] = field(default_factory=dict[str, float])
    first_step: int = 0


class StructureLog(Sequence[StructureRecord]):
    """Records of all structures in the order of admission; brought up to date when looked at.

    Parameters
    ----------
    names : mapping of int to str, optional
        Names by ``system_id``.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self._names = names or {}
        self._records: list[StructureRecord] = []
        self._present: dict[int, StructureRecord] = {}
        self._recalled: set[int] = set()
        self._latest: Mapping[str, np.ndarray] = {}
        self._incomplete = False
        self.counts: Counter[str] = Counter()
        """Number of structures by status."""

    @overload
    def __getitem__(self, index: int) -> StructureRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StructureRecord]: ...
    def __getitem__(self, index: int | slice) -> StructureRecord | Sequence[StructureRecord]:
        self._catch_up()
        return self._records[index]

    def __iter__(self) -> Iterator[StructureRecord]:
        self._catch_up()
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def incomplete(self) -> bool:
        """Whether structures have entered whose first values were not seen yet."""
        return self._incomplete

    def record_of(self, system_id: int) -> StructureRecord | None:
        """Record of a structure that is out at the moment."""
        return self._present.get(system_id)

    def first(self, count: int) -> Sequence[StructureRecord]:
        """The first records, not brought up to date."""
        return self._records[:count]

    # ------------------------------------------------------------------ what happens to structures
    def admit(self, batch: Batch, admitted: Tensor | None) -> None:
        """New records of the graphs marked, bool ``[B]``, or of all."""
        self._catch_up()
        graphs: list[int] = (
            list(range(batch.num_graphs)) if admitted is None else admitted.nonzero()[:, 0].tolist()
        )
        for graph in graphs:
            self._add(batch, graph)
        self._incomplete = True

    def admit_unknown(self, batch: Batch, graphs: Mapping[str, np.ndarray]) -> None:
        """New records of the graphs that nobody has announced: those that were there before this hook."""
        for graph, system_id in enumerate(graphs["system_id"].tolist()):
            if system_id not in self._present:
                self._add(batch, graph)
                self._incomplete = True

    def _add(self, batch: Batch, graph: int) -> StructureRecord:
        system_id = int(batch.system_id[graph]) if "system_id" in batch else graph
        info = batch.info[graph]
        name = self._names.get(system_id) or next((str(info[key]) for key in _NAMES if info.get(key)), "")
        atoms = slice(int(batch.batch_ptr[graph]), int(batch.batch_ptr[graph + 1]))
        numbers: list[int] = batch.atomic_numbers[atoms].tolist()
        if system_id in self._recalled:  # it had left after the state was saved that the run goes on with
            self._recalled.remove(system_id)
            gone = self._present.pop(system_id)
            self._records.remove(gone)
            self.counts[gone.status] -= 1
        return self._append(StructureRecord(system_id, name, _formula(numbers), len(numbers)))

    def _append(self, record: StructureRecord) -> StructureRecord:
        self._records.append(record)
        self.counts[record.status] += 1
        self._present[record.system_id] = record
        return record

    def observe(self, graphs: Mapping[str, np.ndarray]) -> None:
        """Remember the values of the graphs in the batch; nothing is done with them until somebody looks."""
        self._latest = graphs
        if self._incomplete:
            self._incomplete = False
            for record, row in self._rows(graphs):
                if graphs["status"][row] >= 0 and not record.before:
                    record.before = _values(graphs, row)
                    record.first_step = int(graphs["system_step"][row]) if "system_step" in graphs else 0
                if record.status == "running" and not graphs["active"][row]:
                    # Left out from the start: finished, or failed, in an earlier run.
                    self._set_status(record, "failed" if graphs["status"][row] < 0 else "done")

    def recall(self, earlier: Sequence[StructureRecord], steps: Mapping[int, int]) -> bool:
        """Take up what is known of structures from the run that this one goes on with.

        Parameters
        ----------
        earlier : sequence of StructureRecord
            What is known. It may be newer than the state that the run goes on with.
        steps : mapping of int to int
            Steps made by the structures that are there.

        Returns
        -------
        bool
            Whether that was this run; nothing is taken up if structures of the same number differ.
        """
        if any(_kind(self._present.get(known.system_id, known)) != _kind(known) for known in earlier):
            return False
        for known in earlier:
            record = self._present.get(known.system_id)
            if record is None:
                if known.status not in ("running", "stopped"):  # it has left, unless it enters again
                    self._append(known)
                    self._recalled.add(known.system_id)
                continue
            record.before, record.first_step = known.before, known.first_step
            if known.status in ("converged", "failed") and known.steps <= steps.get(known.system_id, 0):
                self._set_status(record, known.status)
                record.after, record.reason, record.steps = known.after, known.reason, known.steps
        return True

    def converge(self, batch: Batch, converged: Tensor) -> None:
        """Note that the graphs marked have met the criteria."""
        for record in self._marked(batch, converged):
            self._set_status(record, "converged")

    def graduate(
        self, batch: Batch, graduated: Tensor, graphs: Mapping[str, np.ndarray], *, seeking: bool
    ) -> None:
        """Note that the graphs marked have left; ``seeking``: a criterion was there to be met."""
        self._latest = {}
        self._take(graphs)
        for record in self._marked(batch, graduated):
            if record.status == "running":
                self._set_status(record, "not converged" if seeking else "done")

    def fail(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Note that graphs were given up, also before they were admitted."""
        self._catch_up()
        for graph, reason in reasons.items():
            record = self._present.get(int(batch.system_id[graph]))
            if record is None or record.status == "failed":
                record = self._add(batch, graph)
            if "system_step" in batch:
                record.steps = int(batch.system_step[graph])
            self._set_status(record, "failed")
            record.reason = reason

    def finish(self, status: str) -> None:
        """Give the structures that still run this status."""
        self._catch_up()
        for record in self._present.values():
            if record.status == "running":
                self._set_status(record, status)

    def resume(self) -> None:
        """Let structures whose run was over go on."""
        for record in self._present.values():
            if record.status in ("done", "not converged", "stopped"):
                self._set_status(record, "running")

    def _set_status(self, record: StructureRecord, status: str) -> None:
        self.counts[record.status] -= 1
        self.counts[status] += 1
        record.status = status

    # ------------------------------------------------------------------ values
    def _marked(self, batch: Batch, mask: Tensor) -> list[StructureRecord]:
        ids: list[int] = batch.system_id[:, 0][mask].tolist()
        return [self._present[i] for i in ids if i in self._present]

    def _catch_up(self) -> None:
        if self._latest:
            latest, self._latest = self._latest, {}
            self._take(latest)

    def _take(self, graphs: Mapping[str, np.ndarray]) -> None:
        for record, row in self._rows(graphs):
            # What has left the batch, or failed, is not that graph any more or says nothing.
            if record.status in ("running", "converged", "done") and graphs["status"][row] >= 0:
                record.after = _values(graphs, row)
                record.steps = int(graphs["system_step"][row]) if "system_step" in graphs else 0

    def _rows(self, graphs: Mapping[str, np.ndarray]) -> Iterator[tuple[StructureRecord, int]]:
        for row, system_id in enumerate(graphs["system_id"].tolist() if graphs else ()):
            record = self._present.get(int(system_id))
            if record is not None:
                yield record, row


def _kind(record: StructureRecord) -> tuple[str, int]:
    return record.formula, record.num_atoms


def _values(graphs: Mapping[str, np.ndarray], row: int) -> dict[str, float]:
    return {name: float(graphs[name][row]) for name in _KEPT if name in graphs}


def _formula(numbers: Sequence[int]) -> str:
    """Hill's order: carbon, hydrogen, then the alphabet; the alphabet alone without carbon."""
    from ase.data import chemical_symbols
    from ase.formula import Formula

    known = [chemical_symbols[z] if 0 <= z < len(chemical_symbols) else "X" for z in numbers]
    return Formula.from_list(known).format("hill")
