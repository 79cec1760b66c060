"""Neighbour lists, rebuilt only when they may have become wrong."""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch, Field, register_field
from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.protocols import IsolatingWorkflow
from nvalchemi.neighbors import (
    NeighborConfig,
    NeighborListFormat,
    UnsearchableStructureError,
    compute_neighbors,
    max_displacement_exceeds,
)

LIST_FIELD = {NeighborListFormat.COO: "neighbor_list", NeighborListFormat.MATRIX: "neighbor_matrix"}
"""Field with the pairs, by format. A batch may have both, each made for positions and a cell of its own."""
REFERENCE_POSITIONS = {
    kind: register_field(
        Field(
            f"{name}_reference_positions", "node", (3,), "float", "Å",
            f"positions for which {name} was built; NaN: for none", neutral=math.nan, persistent=False,
        )
    )
    for kind, name in LIST_FIELD.items()
}  # fmt: skip
REFERENCE_CELL = {
    kind: register_field(
        Field(
            f"{name}_reference_cell", "system", (3, 3), "float", "Å",
            f"cell for which {name} was built; NaN: for none", neutral=math.nan, persistent=False,
        )
    )
    for kind, name in LIST_FIELD.items()
}  # fmt: skip

MAX_MOVE = 1e4
"""Å; an atom that moves further between two looks at the list, at most a few fs apart, is faster than light."""


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
    and the atoms having moved by at most u besides following the cell. Then ``|d| ≥ σ_min(A) |d₀| − 2u ≥
    (1 − ‖A − 1‖) |d₀| − 2u``. A pair that is not in the list has ``|d₀| > cutoff + skin``, so it is still out of
    reach, and the list valid, while

        2u ≤ skin − ‖A − 1‖ (cutoff + skin),

    which for a fixed cell is the familiar u ≤ skin / 2. The list is made again when this fails for any graph,
    when graphs came, left or changed size or periodicity, and when somebody else removed it. Graphs for which
    it holds are searched as they were at their own last build, so that the list of a graph, order included,
    depends on its own path only. Results are then the same in any company as far as the model's are, which may
    choose other kernels, with other round-off, for another mix of structures.

    A workflow has one hook for each format: the model's matrix and a COO list for a bias, say, are two lists, and each
    hook decides for its own. A second one for the same format is refused.

    Failed graphs (``status`` < 0) are left out: they have no pairs. A graph that cannot be searched, such as
    one whose atoms flew off to infinity or move by more than ``MAX_MOVE`` from one step to the next, is retired where
    the workflow can do that (:class:`nvalchemi.hooks.protocols.IsolatingWorkflow`), and is an error elsewhere.

    Attributes
    ----------
    num_builds : int
        Number of searches so far.
    gives_way : bool
        Whether a workflow added this hook by itself, so that one which a user registers takes its place.

    Raises
    ------
    ValueError
        A skin that is not a finite length; on registration, a hook for this format that is there already.
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
        self.gives_way = False
        self._list = LIST_FIELD[self.config.format]
        self._reference_positions = REFERENCE_POSITIONS[self.config.format].name
        self._reference_cell = REFERENCE_CELL[self.config.format].name
        self._edits_accepted = False
        self._structure: tuple[object, ...] = ()
        self._cell: tuple[Tensor | None, int] = (None, -1)
        self._status: tuple[Tensor | None, int] = (None, -1)
        self._failed: Tensor | None = None
        self._saved_config: dict[str, Any] | None = None

    @property
    def skin(self) -> float:
        """Å added to the cutoff."""
        return self.config.skin

    def on_register(self, workflow: Any) -> None:
        """Refuse to write into the list of another hook."""
        for other in workflow.hooks:
            if (
                isinstance(other, NeighborListHook)
                and other.config.format is self.config.format
                and not other.gives_way
            ):
                raise ValueError(
                    f"one NeighborListHook makes the {self.config.format} list, and there is one already: it has "
                    f"{other.config!r}, the second {self.config!r}; register the one with the larger cutoff"
                )

    def accept_edits(self) -> None:
        """Take the next positions however far the atoms have moved: somebody may have set them by hand."""
        self._edits_accepted = True

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Rebuild the list if it may have become wrong."""
        if ctx.batch is None:
            raise ValueError(f"NeighborListHook needs a batch; stage {stage.name} has none")
        if self.needs_rebuild(ctx.batch):
            self._rebuild_or_retire(ctx, ctx.batch)
        self._edits_accepted = False

    def _rebuild_or_retire(self, ctx: HookContext, batch: Batch) -> None:
        while True:
            try:
                self.rebuild(batch)
                return
            except UnsearchableStructureError as error:
                if not isinstance(ctx.workflow, IsolatingWorkflow):
                    raise
                ctx.workflow.retire(batch, {error.graph: str(error)})

    def needs_rebuild(self, batch: Batch) -> bool:
        """Whether the list in ``batch`` may miss a pair within the cutoff, or is not there."""
        if self.skin == 0.0 or not _same_objects(self._structure, self._structure_of(batch)):
            return True
        cell: Tensor | None = batch.get("cell")
        if cell is self._cell[0] and (cell is None or cell._version == self._cell[1]):
            positions, reference = batch.positions, batch[self._reference_positions]
            failed = self._failed_graphs(batch)
            if failed is not None:
                positions = torch.where(failed[batch.batch_idx].unsqueeze(-1), reference, positions)
            return bool(max_displacement_exceeds(positions, reference, self.skin / 2))
        return bool(self._outdated(batch).any())

    def rebuild(self, batch: Batch) -> None:
        """Search, and remember for which positions and cell."""
        failed = self._failed_graphs(batch)
        cell: Tensor | None = batch.get("cell")
        outdated: Tensor | None = None
        if (
            self.skin > 0.0
            and self._reference_positions in batch
            and (cell is None or self._reference_cell in batch)
        ):
            outdated = self._outdated(batch)
            if self.owns_list(batch) and not self._edits_accepted:
                self._check_moves(batch, outdated)
            x = _where(outdated[batch.batch_idx], batch.positions, batch[self._reference_positions])
            h = None if cell is None else _where(outdated, cell, batch[self._reference_cell])
        else:
            x, h = batch.positions, cell
        searched_x, searched_h, pbc = x, h, None
        if failed is not None:
            searched_x, searched_h, pbc = self._without(failed, batch, x, h)
        compute_neighbors(
            batch,
            config=self.config,
            max_neighbors=self.max_neighbors,
            method=self.method,
            in_place=self.owns_list(batch),
            positions=searched_x,
            cell=searched_h,
            pbc=pbc,
            graphs=outdated if self.owns_list(batch) else None,
        )
        self.num_builds += 1
        if self.skin > 0.0:
            _copy_into(batch, self._reference_positions, searched_x)
            if cell is not None and h is not None:
                _copy_into(batch, self._reference_cell, h)
            # Displacements alone decide only as long as every cell is the one that was searched.
            same_cell = cell is None or h is None or torch.equal(h, cell)
            self._cell = (cell, -1 if cell is None else cell._version) if same_cell else (None, -1)
        self._structure = self._structure_of(batch)

    def _failed_graphs(self, batch: Batch) -> Tensor | None:
        """Graphs that were given up, bool ``[B]``; ``None`` when there are none."""
        status: Tensor | None = batch.get("status")
        if status is not self._status[0] or (status is not None and status._version != self._status[1]):
            failed = None if status is None else status[:, 0] < 0
            self._failed = failed if failed is not None and bool(failed.any()) else None
            self._status = (status, -1 if status is None else status._version)
        return self._failed

    def _without(
        self, failed: Tensor, batch: Batch, positions: Tensor, cell: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Positions, cell and periodicity in which failed graphs are rows of atoms too far apart to be neighbours."""
        atom = torch.arange(batch.num_nodes, device=batch.device) - batch.batch_ptr[batch.batch_idx]
        apart = torch.zeros_like(positions)
        apart[:, 0] = 2.0 * self.config.search_cutoff * atom
        pbc: Tensor | None = batch.get("pbc")
        return (
            _where(failed[batch.batch_idx], apart, positions),
            None if cell is None else _where(failed, torch.zeros_like(cell), cell),
            None if pbc is None else pbc & ~failed.unsqueeze(-1),
        )

    def state_dict(self) -> dict[str, Any]:
        """For what the list is; the list itself, and where the atoms were then, are fields of the batch."""
        return {"config": self.config.model_dump(mode="json"), "num_builds": self.num_builds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; :meth:`on_resume` follows."""
        self._saved_config = dict(state["config"])
        self.num_builds = state["num_builds"]
        self._structure = ()

    def on_resume(self, ctx: HookContext) -> None:
        """Go on with the list that a restart brought back, if it was made for the same cutoff, skin and format."""
        batch, saved, self._saved_config = ctx.batch, self._saved_config, None
        if batch is None or saved != self.config.model_dump(mode="json"):
            return
        if self._reference_positions not in batch:
            return
        self._structure = self._structure_of(batch)
        cell: Tensor | None = batch.get("cell")
        reference: Tensor | None = batch.get(self._reference_cell)
        is_reference = cell is None or (reference is not None and torch.equal(cell, reference))
        self._cell = (cell, -1 if cell is None else cell._version) if is_reference else (None, -1)

    def owns_list(self, batch: Batch) -> bool:
        """Whether the list now in the batch is this hook's own work, so that its memory may be written again."""
        return _same_objects(self._structure, self._structure_of(batch))

    def _structure_of(self, batch: Batch) -> tuple[object, ...]:
        """Objects that are replaced when graphs come, leave or change size or periodicity, or the list is replaced."""
        ids: Tensor | None = batch.get("system_id")
        pbc: Tensor | None = batch.get("pbc")
        return (
            batch,
            batch.batch_ptr,
            batch.get(self._list),
            ids,
            -1 if ids is None else ids._version,
            pbc,
            -1 if pbc is None else pbc._version,
            batch.get(self._reference_positions),
        )

    def _outdated(self, batch: Batch) -> Tensor:
        """Graphs whose list may miss a pair, or that have none: bool ``[B]``; decided for each graph as if alone."""
        half = self.skin / 2
        d = batch.positions - batch[self._reference_positions]
        # The arithmetic of max_displacement_exceeds, so that both always agree. Not "greater than": NaN has moved.
        squares = d[:, 0] * d[:, 0] + d[:, 1] * d[:, 1] + d[:, 2] * d[:, 2]
        outdated = _any_per_graph(~(squares.double() <= half * half), batch)
        cell: Tensor | None = batch.get("cell")
        if cell is not None and not (cell is self._cell[0] and cell._version == self._cell[1]):
            deformed = (cell != batch[self._reference_cell]).flatten(1).any(1)
            outdated = torch.where(deformed, self._deformed_too_far(batch), outdated)
        failed = self._failed_graphs(batch)
        return outdated if failed is None else outdated & ~failed

    def _deformed_too_far(self, batch: Batch) -> Tensor:
        cell, reference = batch.cell.double(), batch[self._reference_cell].double()
        eye = torch.eye(3, dtype=cell.dtype, device=cell.device)
        # Graphs without a cell (all zeros) cannot be deformed; a singular cell whose vectors are only
        # partly given is left to the search.
        has_cell = reference.abs().amax((-2, -1)) > 0
        inverse, info = torch.linalg.inv_ex(torch.where(has_cell[:, None, None], reference, eye))
        deformation = torch.where(has_cell[:, None, None], inverse @ cell, eye)
        strain = (deformation - eye).norm(dim=(-2, -1))
        before: Tensor = batch[self._reference_positions].double()
        followed = (before.unsqueeze(-2) @ deformation[batch.batch_idx]).squeeze(-2)
        moved = (batch.positions.double() - followed).norm(dim=-1)
        allowed = self.skin - strain * self.config.search_cutoff
        too_far = _any_per_graph(~(2 * moved <= allowed[batch.batch_idx]), batch)
        return too_far | ~(allowed >= 0) | (info != 0)

    def _check_moves(self, batch: Batch, graphs: Tensor) -> None:
        """Refuse a move from one step to the next that no motion can make."""
        squares = (batch.positions - batch[self._reference_positions]).double().square().sum(1)
        atoms = (squares > MAX_MOVE**2) & graphs[batch.batch_idx]
        if bool(atoms.any()):
            atom = int(atoms.nonzero()[0, 0])
            graph = int(batch.batch_idx[atom])
            raise UnsearchableStructureError(
                f"atom {atom - int(batch.batch_ptr[graph])} of {batch.describe_graph(graph)} moved "
                f"{float(squares[atom].sqrt()):g} Å at once",
                graph,
            )


def _any_per_graph(atoms: Tensor, batch: Batch) -> Tensor:
    """Graphs with a marked atom, bool ``[B]``."""
    marks = torch.segment_reduce(
        atoms.float(), "max", offsets=batch.batch_ptr, axis=0, unsafe=True, initial=0
    )
    return marks > 0


def _where(rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (a.ndim - 1)), a, b)


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
