"""What all minimisers share."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.base import BaseDynamics, ConvergenceHook
from nvalchemi.dynamics.optimizers.coordinates import AtomCoordinates, Coordinates
from nvalchemi.dynamics.updates import assign
from nvalchemi.hooks import Hook
from nvalchemi.models.base import BaseModelMixin


class Minimiser(BaseDynamics):
    """An engine that drives the generalised forces of its coordinates to zero.

    A subclass makes its whole move in ``pre_update``; convergence is judged after the forces of the new
    positions are known.

    Parameters
    ----------
    model, hooks, convergence_hook, n_steps, **options
        As in :class:`BaseDynamics`.
    coordinates : Coordinates, optional
        What moves; default the atoms. :class:`CellCoordinates` adds the cell.
    """

    def __init__(
        self,
        model: BaseModelMixin,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        n_steps: int | None = None,
        *,
        coordinates: Coordinates | None = None,
        **options: Any,
    ) -> None:
        self.coordinates: Coordinates = AtomCoordinates() if coordinates is None else coordinates
        super().__init__(model, hooks, convergence_hook, n_steps, **options)

    @property
    def needed_outputs(self) -> frozenset[str]:
        """Energy, forces, and what the coordinates need."""
        return self.__needs_keys__ | self.coordinates.needs

    def max_force(self, batch: Batch) -> Tensor:
        """Largest norm of a generalised force, eV/Å, ``[B]``; rows of the force on a variable cell count, too."""
        return self.coordinates.forces(batch).max_norm(batch.batch_ptr)

    def begin(self, batch: Batch, admitted: Tensor, first: Mapping[str, Tensor]) -> None:
        """Give the graphs that entered (bool ``[B]``) the values ``first`` of their working state."""
        for name, value in first.items():
            if name not in batch or batch[name].shape != value.shape:
                batch.add_key(name, value)
            else:
                rows = admitted[batch.batch_idx] if batch.level(name) == "node" else admitted
                assign(batch[name], value, _as_column(rows, value))

    def store(self, batch: Batch, state: Mapping[str, Tensor]) -> None:
        """Write new values of the working state, for active graphs only."""
        active = self.active_graph_mask
        for name, value in state.items():
            if active is None:
                batch[name].copy_(value)
            else:
                rows = active[batch.batch_idx] if batch.level(name) == "node" else active
                assign(batch[name], value, _as_column(rows, value))


def _as_column(rows: Tensor, like: Tensor) -> Tensor:
    """Rows [n] as [n, 1, …, 1], to be broadcast against ``like``."""
    return rows.view(-1, *[1] * (like.ndim - 1))
