"""What the page keeps of the reports it gets: curves of bounded size."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.reporting.series import Curve, PointSample
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot
from nvalchemi.hooks.reporting.structures import StructureLog, StructureRecord

MOST_LINES = 12
"""Structures that are drawn one by one; of more, quantiles are."""

_LINE_CAPACITY = 500
"""Points of the line of one structure."""

QUANTILES = {"low": 0.1, "mid": 0.5, "high": 0.9, "max": 1.0}

Graphs = Mapping[str, np.ndarray]


class Recording:
    """Curves of a run, of its first structures and of its validations, and points for parity plots."""

    def __init__(self) -> None:
        self.curve = Curve()
        self.validations = Curve()
        self.structures: list[tuple[StructureRecord, Curve]] = []
        self.parity: dict[str, PointSample] = {}
        self._parity_under_way: dict[str, PointSample] = {}
        self._earlier: dict[int, tuple[Mapping[str, Any], float]] = {}
        self._offset = 0.0
        self._references: tuple[tuple[bytes, int], np.ndarray, np.ndarray] | None = None
        self._drift_from: dict[int, float] = {}

    def add(self, state: ScalarSnapshot) -> None:
        """Take up a report."""
        if state.stage == "AFTER_VALIDATION":
            self._end_validation(state)
            return
        last = self.curve.last_x
        if last is not None and self._offset + state.step < last:
            self._offset = last  # another engine began to count anew
        values = dict(state.scalars)
        if state.graphs:
            graphs = self._with_changes(state.graphs, state.structures)
            values |= _quantiles(graphs)
            self._add_structures(graphs, state.structures)
        self.curve.add(self._offset + state.step, values)

    def _with_changes(self, graphs: Graphs, log: StructureLog) -> Graphs:
        """Quantities of each graph with what has changed since it entered, eV per atom."""
        ids = graphs["system_id"]
        key = (ids.tobytes(), len(log))
        if self._references is None or self._references[0] != key:
            records = [log.record_of(int(i)) for i in ids.tolist()]
            before = [{} if record is None else record.before for record in records]
            energy = np.array([values.get("energy", np.nan) for values in before])
            conserved = [
                self._drift_from.get(
                    i, np.nan if np.isnan(values.get("time", np.nan)) else _conserved(values)
                )
                for i, values in zip(ids.tolist(), before, strict=True)
            ]
            self._references = (key, energy, np.array(conserved))
        _, energy, conserved = self._references
        changed = dict(graphs)
        atoms = np.maximum(graphs["num_atoms"], 1)
        if "energy" in graphs:
            changed["energy_change"] = (graphs["energy"] - energy) / atoms
        if "total_energy" in graphs and "time" in graphs:
            total = graphs["total_energy"]
            kept = graphs.get("conserved_energy", total)
            now = np.where(np.isnan(kept), total, kept)
            # After a minimiser the drift counts from the first state of the dynamics that is seen.
            for row in np.flatnonzero(np.isnan(conserved) & ~np.isnan(graphs["time"])):
                conserved[row] = self._drift_from[int(ids[row])] = now[row]
            changed["drift"] = np.where(np.isnan(graphs["time"]), np.nan, (now - conserved) / atoms)
        if "time" in graphs and "temperature" in graphs:
            # The velocities of a minimiser are no thermal motion.
            changed["temperature"] = np.where(np.isnan(graphs["time"]), np.nan, graphs["temperature"])
        return changed

    def _add_structures(self, graphs: Graphs, log: StructureLog) -> None:
        known = {id(record) for record, _ in self.structures}
        if len(self.structures) < MOST_LINES:
            for record in log.first(MOST_LINES):
                if id(record) not in known:
                    timed = "time" in graphs and not np.isnan(graphs["time"]).all()
                    self.structures.append((record, self._curve_of(record, timed)))
        rows = {system_id: row for row, system_id in enumerate(graphs["system_id"].tolist())}
        for record, curve in self.structures:
            row = rows.get(record.system_id)
            if row is None or log.record_of(record.system_id) is not record or graphs["status"][row] < 0:
                continue
            values = {name: float(graphs[name][row]) for name in _DRAWN if name in graphs}
            step = float(graphs["system_step"][row]) if "system_step" in graphs else len(curve)
            curve.add(step, {name: value for name, value in values.items() if not np.isnan(value)})

    def _curve_of(self, record: StructureRecord, timed: bool) -> Curve:
        """A curve that begins where the structure entered, or goes on with that of the run before."""
        if record.system_id in self._earlier:
            columns, until = self._earlier.pop(record.system_id)
            return Curve.from_columns(columns, until, _LINE_CAPACITY)
        curve = Curve(_LINE_CAPACITY)
        start = {"energy_change": 0.0, **({"drift": 0.0, "time": 0.0} if timed else {}), **record.before}
        known = {name: value for name, value in start.items() if not math.isnan(value)}
        curve.add(float(record.first_step), known)
        return curve

    # ------------------------------------------------------------------ from one run to the next
    def to_plain(self) -> dict[str, Any]:
        """What is drawn, as plain values for :meth:`recall`."""
        drawn = ("loss/", "optimizer/", "converged_fraction", "time/same")
        banded = tuple(f"{name}/" for name in _DRAWN) if len(self.structures) >= MOST_LINES else ()
        return {
            "curve": self.curve.to_columns(drawn + banded),
            "validations": self.validations.to_columns(),
            "structures": [[record.system_id, curve.to_columns()] for record, curve in self.structures],
        }

    def recall(self, saved: Mapping[str, Any], step: int, steps_of: Mapping[int, int]) -> None:
        """Go on with the curves of an earlier run, as far as ``step``, and ``steps_of`` each structure."""
        self.curve = Curve.from_columns(saved["curve"], until=step)
        self.validations = Curve.from_columns(saved["validations"], until=step)
        self._earlier = {
            system_id: (columns, steps_of.get(system_id, math.inf))
            for system_id, columns in saved["structures"]
        }

    # ------------------------------------------------------------------ validation
    def add_validation_batch(self, batch: Batch, labelled: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Points for the parity plots: energies per atom, components of forces and of stresses."""
        atoms = batch.num_nodes_per_graph.unsqueeze(-1)
        for name, (label, prediction) in labelled.items():
            if name not in ("energy", "forces", "stress"):
                continue
            sample = self._parity_under_way.setdefault(name, PointSample())
            scale = atoms if name == "energy" else 1
            known, said = (
                (values.detach().double() / scale).flatten().cpu().numpy() for values in (label, prediction)
            )
            sample.add(known, said)

    def _end_validation(self, state: ScalarSnapshot) -> None:
        numbers = {name: value for name, value in state.items() if name.startswith("validation/")}
        self.validations.add(self._offset + state.step, numbers)
        if self._parity_under_way:
            self.parity, self._parity_under_way = self._parity_under_way, {}


_DRAWN = ("fmax", "energy_change", "temperature", "drift", "pressure", "volume", "time")


def _conserved(values: Mapping[str, float]) -> float:
    kept = values.get("conserved_energy", np.nan)
    return values.get("total_energy", np.nan) if np.isnan(kept) else kept


def _quantiles(graphs: Graphs) -> dict[str, float]:
    """Quantiles (the nearest value) of each quantity over the structures that have not failed, as ``fmax/high`` ….

    ``time/same`` is the time where it is that of all.
    """
    present = graphs["status"] >= 0
    found: dict[str, float] = {}
    for name in _DRAWN:
        if name not in graphs:
            continue
        values = graphs[name][present]
        values = values[~np.isnan(values)]
        if values.size == 0:
            continue
        if name == "time":
            if values.size == present.sum() and values.min() == values.max():
                found["time/same"] = float(values[0])
            continue
        values = np.sort(values)
        last = values.size - 1
        found |= {f"{name}/{which}": float(values[round(part * last)]) for which, part in QUANTILES.items()}
    return found
