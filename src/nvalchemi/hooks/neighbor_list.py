"""Neighbour lists, rebuilt only when they may have become wrong."""

from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nvalchemi.data import Batch, Field, register_field
from nvalchemi.hooks.context import HookContext
from nvalchemi.neighbors import (
    NeighborConfig,
    NeighborListFormat,
    compute_neighbors,
    max_displacement_exceeds,
)

REFERENCE_POSITIONS = register_field(
    Field(
        "neighbor_reference_positions", "node", (3,), "float", "Å",
        "positions for which the neighbour list was built", neutral=0, persistent=False,
    )
)  # fmt: skip
REFERENCE_CELL = register_field(
    Field(
        "neighbor_reference_cell", "system", (3, 3), "float", "Å",
        "cell for which the neighbour list was built", neutral=0, persistent=False,
    )
)  # fmt: skip


class NeighborListHook:
    """Keep the batch's neighbour list valid for a model.

    Parameters
    ----------
    config : NeighborConfig
        What the model asks for: cutoff, format, half or full list.
    skin : float, default 0.0
        Å added to the cutoff in the search. With 0 the skin that ``config`` names is used; if that is 0
        too, the list is rebuilt at every call.
    max_neighbors : int, optional
        First width of a neighbour matrix; a full row grows it, nothing is ever cut off.
    stage : Enum, optional
        Where to build; default ``BEFORE_COMPUTE``, in training ``BEFORE_FORWARD``.
    method : str, optional
        Backend of the search, as in :func:`nvalchemi.neighbors.compute_neighbors`.

    Notes
    -----
    Let a pair be at d₀ when the list was built and at d now, the cell having been deformed by A (h = h₀ A)
    and the atoms having moved by at most u besides following the cell. Then |d| ≥ σ_min(A) |d₀| − 2u ≥ (1 −
    ‖A − 1‖) |d₀| − 2u. A pair that is not in the list has |d₀| > cutoff + skin, so it is still out of
    reach, and the list valid, while

        2u ≤ skin − ‖A − 1‖ (cutoff + skin),

    which for a fixed cell is the familiar u ≤ skin / 2. The list is rebuilt when this fails for any graph,
    when graphs came, left or changed size, and when somebody else removed it.

    Attributes
    ----------
    num_builds : int
        Number of searches so far.
    """

    default_stages = ("BEFORE_COMPUTE", "BEFORE_FORWARD")
    part_of_evaluation = True
    order_role = "neighbors"
    frequency = 1

    def __init__(
        self,
        config: NeighborConfig,
        skin: float = 0.0,
        max_neighbors: int | None = None,
        stage: Enum | None = None,
        method: str | None = None,
    ) -> None:
        if not 0.0 <= skin < float("inf"):
            raise ValueError(f"skin must be a finite length ≥ 0 Å, got {skin}")
        self.config = config.model_copy(update={"skin": skin or config.skin})
        self.max_neighbors = max_neighbors
        self.stage = stage
        self.method = method
        self.num_builds = 0
        self._structure: tuple[object, ...] = ()
        self._cell: tuple[Tensor | None, int] = (None, -1)

    @property
    def skin(self) -> float:
        """Å added to the cutoff."""
        return self.config.skin

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Rebuild the list if it may have become wrong."""
        if ctx.batch is None:
            raise ValueError(f"NeighborListHook needs a batch; stage {stage.name} has none")
        if self.needs_rebuild(ctx.batch):
            self.rebuild(ctx.batch)

    def needs_rebuild(self, batch: Batch) -> bool:
        """Whether the list in ``batch`` may miss a pair within the cutoff, or is not there."""
        if self.skin == 0.0 or not _same_objects(self._structure, self._structure_of(batch)):
            return True
        cell: Tensor | None = batch.get("cell")
        if cell is self._cell[0] and (cell is None or cell._version == self._cell[1]):
            return bool(
                max_displacement_exceeds(batch.positions, batch.neighbor_reference_positions, self.skin / 2)
            )
        return self._deformed_too_far(batch)

    def rebuild(self, batch: Batch) -> None:
        """Search and remember for which positions and cell."""
        compute_neighbors(
            batch,
            config=self.config,
            max_neighbors=self.max_neighbors,
            method=self.method,
            in_place=self._owns_list(batch),
        )
        self.num_builds += 1
        if self.config.format is NeighborListFormat.MATRIX:
            # Compiled code may have written into the old table, which torch cannot see: say so, for those
            # who keep something derived from the list and compare versions.
            increment_version(batch.neighbor_matrix)
            increment_version(batch.neighbor_matrix_shifts)
        if self.skin == 0.0:
            self._structure = self._structure_of(batch)
            return
        _copy_into(batch, REFERENCE_POSITIONS.name, batch.positions)
        cell: Tensor | None = batch.get("cell")
        if cell is not None:
            _copy_into(batch, REFERENCE_CELL.name, cell)
        self._cell = (cell, -1 if cell is None else cell._version)
        self._structure = self._structure_of(batch)

    def _owns_list(self, batch: Batch) -> bool:
        """Whether the list now in the batch is this hook's own work, so that its memory may be written again."""
        return _same_objects(self._structure, self._structure_of(batch))

    def _structure_of(self, batch: Batch) -> tuple[object, ...]:
        """Objects that are replaced when graphs come, leave or change size, or when the list is replaced."""
        matrix = self.config.format is NeighborListFormat.MATRIX
        lists = batch.get("neighbor_matrix" if matrix else "neighbor_list")
        ids: Tensor | None = batch.get("system_id")
        return (
            batch,
            batch.batch_ptr,
            lists,
            ids,
            -1 if ids is None else ids._version,
            batch.get(REFERENCE_POSITIONS.name),
        )

    def _deformed_too_far(self, batch: Batch) -> bool:
        cell, reference = batch.cell.double(), batch.neighbor_reference_cell.double()
        eye = torch.eye(3, dtype=cell.dtype, device=cell.device)
        # Graphs without a cell (all zeros) cannot be deformed; a singular cell whose vectors are only
        # partly given is left to the search.
        has_cell = reference.abs().amax((-2, -1)) > 0
        inverse, info = torch.linalg.inv_ex(torch.where(has_cell[:, None, None], reference, eye))
        if bool((info != 0).any()):
            return True
        deformation = torch.where(has_cell[:, None, None], inverse @ cell, eye)
        strain = (deformation - eye).norm(dim=(-2, -1))
        followed = (
            batch.neighbor_reference_positions.double().unsqueeze(-2) @ deformation[batch.batch_idx]
        ).squeeze(-2)
        moved = (batch.positions.double() - followed).norm(dim=-1)
        allowed = self.skin - strain * self.config.search_cutoff
        return bool((2 * moved > allowed[batch.batch_idx]).any() or (allowed < 0).any())


def _same_objects(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    return len(a) == len(b) and all(
        x is y or (isinstance(x, int) and x == y) for x, y in zip(a, b, strict=True)
    )


def _copy_into(batch: Batch, name: str, source: Tensor) -> None:
    """Keep a copy of ``source`` as a field, in the memory it already has."""
    target: Tensor | None = batch.get(name)
    if target is not None and target.shape == source.shape and target.dtype == source.dtype:
        target.copy_(source)
    else:
        batch.add_key(name, source.detach().clone())
