"""Errors of a model on labelled structures."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi import units
from nvalchemi.data import Batch
from nvalchemi.data.datasets import StructureDataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.data.statistics import compute_statistics
from nvalchemi.models.base import BaseModelMixin, evaluation_mode
from nvalchemi.models.reference_energies import composition
from nvalchemi.neighbors import compute_neighbors
from nvalchemi.training import ErrorMetrics

ATOMS_PER_BATCH = 2048


@dataclass(frozen=True)
class Quantity:
    """How errors of a quantity are shown."""

    metric: str
    """Its name in :class:`~nvalchemi.training.ErrorMetrics`."""
    heading: str
    unit: str
    factor: float
    """From eV, Å to the unit."""


QUANTITIES = (
    Quantity("energy", "energy", "meV", 1000.0),
    Quantity("energy_per_atom", "energy per atom", "meV/atom", 1000.0),
    Quantity("forces", "forces", "meV/Å", 1000.0),
    Quantity("stress", "stress", "GPa", 1.0 / units.GPa),
)


@dataclass(frozen=True)
class Evaluation:
    """Errors of a model, and what they were made of."""

    metrics: Mapping[str, float]
    """As :class:`~nvalchemi.training.ErrorMetrics` gives them, in eV and Å."""
    counts: Mapping[str, int]
    spread: Mapping[str, float]
    """Root mean square of the labels (energies: about the sum of the energies of the elements): the error of a model
    that has learnt nothing else."""
    parity: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Labels and predictions: energies per atom, force and stress components."""
    offsets: Mapping[int, float]
    """Energies of the elements that were subtracted from the labels, eV, by atomic number."""
    offsets_note: str
    """What keeps the data from determining these; empty if nothing."""


def evaluate(
    model: BaseModelMixin,
    dataset: StructureDataset,
    device: torch.device,
    *,
    per_element: bool = False,
    group_by: str | None = None,
    fit_offsets: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Evaluate a model on structures and compare with their labels.

    Parameters
    ----------
    model, dataset, device
        What to evaluate on what, where.
    per_element : bool, default False
        Force errors by element too.
    group_by : str, optional
        Errors by this entry of ``info`` too.
    fit_offsets : bool, default False
        First subtract from the labels the energies of the elements by which labels and model differ (least squares),
        as codes and pseudopotentials have different zeros of energy.
    on_progress : callable, optional
        Called with the number of structures evaluated.

    Raises
    ------
    ValueError
        A structure that the model cannot evaluate, or no energy to fit offsets to.
    """
    results: list[tuple[Batch, dict[str, Tensor]]] = []
    num_done = 0
    for result in _predictions(model, dataset, device):
        results.append(result)
        num_done += result[0].num_graphs
        if on_progress is not None:
            on_progress(num_done)
    offsets, note = _subtract_offsets(results) if fit_offsets else ({}, "")
    metrics = ErrorMetrics(per_element=per_element, group_by=group_by)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch, outputs in results:
        metrics.update(outputs, batch)
        for name in ErrorMetrics.QUANTITIES:
            if name in batch and name in outputs:
                sizes = batch.num_nodes_per_graph[:, None] if name == "energy" else 1
                label = "energy_per_atom" if name == "energy" else name
                pairs.setdefault(label, []).append((batch[name] / sizes, outputs[name] / sizes))
    parity = {name: _joined(parts) for name, parts in pairs.items()}
    return Evaluation(metrics.compute(), metrics.counts(), _spread(dataset), parity, offsets, note)


def _predictions(
    model: BaseModelMixin, dataset: StructureDataset, device: torch.device
) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
    # A model gives a stress when every structure of the batch has one.
    periodic = np.array([bool(data.pbc.all()) for data in dataset])
    neighbors = model.model_config.neighbor_config
    module: Any = model
    with evaluation_mode(module):
        for alike in (periodic, ~periodic):
            if not alike.any():
                continue
            for batch in DataLoader(dataset.select(np.flatnonzero(alike)), max_atoms=ATOMS_PER_BATCH):
                there = batch.to(device)  # another object: what is yielded stays without edges
                if neighbors is not None:
                    compute_neighbors(there, config=neighbors)
                yield (
                    batch,
                    {name: value.detach().to(batch.positions) for name, value in model(there).items()},
                )


def _subtract_offsets(results: list[tuple[Batch, dict[str, Tensor]]]) -> tuple[dict[int, float], str]:
    """Energies by element, and what keeps the data from determining them."""
    if not all("energy" in batch and "energy" in outputs for batch, outputs in results):
        raise ValueError("there are no energies to fit offsets to")
    counts = torch.cat([composition(batch) for batch, _ in results]).double()
    differences = torch.cat([(batch.energy - outputs["energy"])[:, 0] for batch, outputs in results]).double()
    known = differences.isfinite()
    present = counts.any(0).nonzero().squeeze(-1)
    # gelsd gives the least-norm solution where the compositions leave it open.
    fit = torch.linalg.lstsq(counts[known][:, present], differences[known, None], driver="gelsd")
    solution = fit.solution.squeeze(-1)
    table = counts.new_zeros(counts.shape[1]).index_copy(0, present, solution)
    for batch, _ in results:
        batch.energy.sub_((composition(batch).double() @ table)[:, None])
    offsets = dict(zip(present.tolist(), solution.tolist(), strict=True))
    num_energies, num_elements, rank = int(known.sum()), len(present), int(fit.rank)
    note = ""
    if num_energies <= rank:
        note = (
            f"the fit is underdetermined, structures with an energy: {num_energies}, elements: {num_elements}; it "
            "takes away all errors of the energies, which then say nothing"
        )
    elif rank < num_elements:
        note = "the compositions leave the energies of single elements open; of those that fit the smallest are taken"
    return offsets, note


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    labels, predictions = (torch.cat([part[k].flatten() for part in parts]) for k in (0, 1))
    known = labels.isfinite()
    return labels[known].numpy(), predictions[known].numpy()


def _spread(dataset: StructureDataset) -> dict[str, float]:
    statistics = compute_statistics(dataset)
    spread = {"forces": statistics.forces_rms, "stress": statistics.stress_rms}
    # With hardly more energies than elements the fit leaves nothing, which says nothing of the data.
    if statistics.num_energies >= 3 * len(statistics.element_counts):
        spread["energy_per_atom"] = statistics.residual_per_atom_std
    return spread
