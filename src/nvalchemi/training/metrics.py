"""Errors of a model over a whole data set, accumulated batch by batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch

__all__ = ["ErrorMetrics"]


class ErrorMetrics:
    """Mean absolute and root mean square errors of energy, forces and stress.

    ========================= ================================================= =======
    metric                    mean over                                         unit
    ========================= ================================================= =======
    ``energy_mae``, …         structures                                        eV
    ``energy_per_atom_mae``   structures, of the error divided by their atoms   eV
    ``forces_mae``, …         components of all atoms                           eV/Å
    ``stress_mae``, …         nine components of all structures                 eV/Å³
    ========================= ================================================= =======

    and each with ``rmse``. A quantity appears when both the model gives it and the data have it; labels that are NaN
    are passed over. Sums are kept in float64 on the device of the predictions; nothing is copied to the host before
    :meth:`compute` unless errors are split by element or group.

    Parameters
    ----------
    target_keys : mapping of str to str, optional
        Fields that hold the labels, where they are not called ``energy``, ``forces``, ``stress``.
    prediction_keys : mapping of str to str, optional
        Outputs of the model, likewise.
    per_element : bool, default False
        Force errors by element too, as ``forces_mae/element=O``.
    group_by : str, optional
        Errors by this entry of ``batch.info`` too, usually ``"config_type"``: ``energy_mae/config_type=bulk``.

    Examples
    --------
    Structures of 1 and 99 atoms with errors of 0.1 and 9.9 eV are equally well described:

    >>> from nvalchemi.data import AtomicData
    >>> sizes = (1, 99)
    >>> batch = Batch.from_data_list(
    ...     [AtomicData(positions=torch.zeros(n, 3), atomic_numbers=[18] * n, energy=[[0.0]]) for n in sizes]
    ... )
    >>> metrics = ErrorMetrics()
    >>> metrics.update({"energy": torch.tensor([[0.1], [9.9]])}, batch)
    >>> {name: round(value, 6) for name, value in metrics.compute().items()}
    {'energy_mae': 5.0, 'energy_rmse': 7.000714, 'energy_per_atom_mae': 0.1, 'energy_per_atom_rmse': 0.1}
    """

    QUANTITIES: tuple[str, ...] = ("energy", "forces", "stress")

    def __init__(
        self,
        *,
        target_keys: Mapping[str, str] | None = None,
        prediction_keys: Mapping[str, str] | None = None,
        per_element: bool = False,
        group_by: str | None = None,
    ) -> None:
        for given in (target_keys or {}, prediction_keys or {}):
            if unknown := set(given) - set(self.QUANTITIES):
                raise ValueError(f"no metric of {sorted(unknown)}; there are {', '.join(self.QUANTITIES)}")
        self.target_keys = {name: name for name in self.QUANTITIES} | dict(target_keys or {})
        self.prediction_keys = {name: name for name in self.QUANTITIES} | dict(prediction_keys or {})
        self.per_element = per_element
        self.group_by = group_by
        # (quantity, group) → number of values, sum of |e|, sum of e²; the group of all values is "".
        self._sums: dict[tuple[str, str], Tensor] = {}

    # ------------------------------------------------------------------ accumulating
    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Add the errors of one batch.

        Raises
        ------
        ValueError
            A prediction whose shape is not that of its label.
        """
        for quantity, (target, prediction) in self.labelled(predictions, batch).items():
            errors = (prediction.to(torch.float64) - target.to(torch.float64)).flatten(1)
            labelled = target.isfinite().flatten(1)
            rows = _sums_of_rows(errors, labelled)
            self._add(quantity, rows, batch)
            if quantity == "energy":
                sizes = batch.num_nodes_per_graph.unsqueeze(-1)
                self._add("energy_per_atom", _sums_of_rows(errors / sizes, labelled), batch)

    def labelled(self, predictions: Mapping[str, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Label and prediction of each quantity that both the data and the model have; shapes as in :meth:`update`."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for quantity in self.QUANTITIES:
            target_key, prediction_key = self.target_keys[quantity], self.prediction_keys[quantity]
            if target_key not in batch or prediction_key not in predictions:
                continue
            target, prediction = batch[target_key], predictions[prediction_key].detach()
            if prediction.shape != target.shape:
                raise ValueError(
                    f"the prediction {prediction_key!r} has shape {list(prediction.shape)}, "
                    f"the label {target_key!r} has {list(target.shape)}"
                )
            found[quantity] = (target, prediction)
        return found

    def _add(self, quantity: str, rows: Tensor, batch: Batch) -> None:
        self._add_to(quantity, "", rows.sum(0))
        if self.per_element and quantity == "forces":
            numbers, index = batch.atomic_numbers.unique(return_inverse=True)
            names = [f"element={_symbol(number)}" for number in numbers.tolist()]
            self._add_groups(quantity, names, index, rows)
        if self.group_by is not None:
            labels = [f"{self.group_by}={info.get(self.group_by, 'none')}" for info in batch.info]
            names = list(dict.fromkeys(labels))
            index = torch.tensor([names.index(label) for label in labels], device=rows.device)
            self._add_groups(quantity, names, index[batch.batch_idx] if quantity == "forces" else index, rows)

    def _add_groups(self, quantity: str, names: Sequence[str], index: Tensor, rows: Tensor) -> None:
        sums = rows.new_zeros(len(names), 3).index_add(0, index, rows)
        for name, row in zip(names, sums.unbind(0), strict=True):
            self._add_to(quantity, name, row)

    def _add_to(self, quantity: str, group: str, sums: Tensor) -> None:
        key = (quantity, group)
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums

    def merge(self, other: "ErrorMetrics") -> None:
        """Add what another object has accumulated, over other batches."""
        for key, sums in other._sums.items():
            mine = self._sums.get(key)
            self._sums[key] = sums.clone() if mine is None else mine + sums.to(mine.device)

    def reduce_across_ranks(self) -> None:
        """Add up over all processes of the default group of ``torch.distributed``; without one, nothing happens.

        Every rank must have seen different structures: a sampler that repeats some to fill the last batch counts them
        twice.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(
            gathered, {key: sums.tolist() for key, sums in self._sums.items()}
        )
        self.reset()
        for rank_sums in gathered:
            for (quantity, group), sums in rank_sums.items():
                self._add_to(quantity, group, torch.tensor(sums, dtype=torch.float64))

    def reset(self) -> None:
        """Forget all batches."""
        self._sums.clear()

    # ------------------------------------------------------------------ results
    def compute(self) -> dict[str, float]:
        """Metrics over everything seen so far, by name; empty when nothing had a label."""
        metrics: dict[str, float] = {}
        for (quantity, group), sums in sorted(self._sums.items(), key=lambda entry: entry[0][1]):
            count, absolute, square = sums.tolist()
            if count == 0:
                continue
            suffix = f"/{group}" if group else ""
            metrics[f"{quantity}_mae{suffix}"] = absolute / count
            metrics[f"{quantity}_rmse{suffix}"] = (square / count) ** 0.5
        return metrics

    def counts(self) -> dict[str, int]:
        """Number of values behind each metric: structures for energies, components for forces and stresses."""
        return {
            f"{name}/{group}" if group else name: int(sums[0]) for (name, group), sums in self._sums.items()
        }


def _sums_of_rows(errors: Tensor, labelled: Tensor) -> Tensor:
    """Number, sum of |e| and sum of e² of each row, [rows, 3]."""
    errors = torch.where(labelled, errors, 0)
    return torch.stack((labelled.sum(1).to(errors.dtype), errors.abs().sum(1), errors.square().sum(1)), dim=1)


def _symbol(number: int) -> str:
    from ase.data import chemical_symbols

    return chemical_symbols[number] if 0 <= number < len(chemical_symbols) else str(number)
