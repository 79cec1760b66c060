"""What a batch must have before it can run, and what is added to it."""

import warnings

import torch
from torch import Tensor

from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.thermo import FROZEN_ATOMS, free_atom_mask
from nvalchemi.models.base import ModelConfig

FAILED = -1
"""Status of a structure that was given up."""

_SMALLEST_VOLUME = 1e-9
"""Å³; the neighbour search takes lattice planes closer than 1e-3 Å for one."""

STALE_RESULTS = frozenset({"virial", "free_energy", "energies", "dipole", "magmom", "magmoms"})
"""What a calculation may have said of a structure, besides the energy, forces and stress that engines write anew."""

STAGE_ENTRY_STEP = register_field(
    Field(
        "stage_entry_step", "system", (1,), "int", "", "system_step at which a structure entered its stage",
        neutral=0, persistent=False,
    )
)  # fmt: skip


def complete_batch(batch: Batch, config: ModelConfig) -> None:
    """Check a batch and add the fields that every engine needs.

    Added when absent: ``system_id`` (0 … B−1), ``system_step`` and ``status`` (0), ``velocities`` (from
    ``momenta`` if there are any, else zero), until the first evaluation ``energy`` (NaN) and ``forces`` (zero).
    Velocities of fixed atoms are set to zero. Tensors that carry an autograd graph are replaced by detached
    ones. Results of other calculations that the model will not replace (``virial``, ``dipole``, …) are removed: they
    are not true any more when the atoms have moved.

    Parameters
    ----------
    batch : Batch
        Changed in place.
    config : ModelConfig
        Of the model that will evaluate it.

    Raises
    ------
    ValueError
        No graphs; a field the model needs is missing; positions or masses that are not finite, masses that
        are not positive (failed graphs may have any), a ``system_id`` that occurs twice. The message names the
        graph.

    Warns
    -----
    UserWarning
        Constraints of ASE other than fixed atoms, which engines do not honour.
    """
    if batch.num_graphs == 0:
        raise ValueError("the batch has no graphs")
    missing = sorted(name for name in config.required_inputs if name not in batch)
    if missing:
        raise ValueError(
            f"the model needs the fields {missing}, which the batch lacks; it has {', '.join(batch.keys())}"
        )
    for name, tensor in list(batch.items()):
        if tensor.requires_grad:
            batch.add_key(name, tensor.detach())
        if name in STALE_RESULTS - config.available_outputs:
            batch.remove_key(name)
    _warn_of_constraints(batch)
    add_bookkeeping(batch)
    if "atomic_masses" not in batch:
        raise ValueError(f"dynamics needs atomic_masses; the batch has {', '.join(batch.keys())}")
    for reason in unusable_graphs(batch).values():
        raise ValueError(reason)
    if "velocities" not in batch:
        if "momenta" in batch:
            batch.velocities = batch.momenta / batch.atomic_masses.unsqueeze(-1)
        else:
            batch.velocities = torch.zeros_like(batch.positions)
    free = free_atom_mask(batch)
    if free is not None:
        batch.velocities.masked_fill_(~free.unsqueeze(-1), 0.0)
    if "energy" not in batch:
        batch.energy = batch.positions.new_full((batch.num_graphs, 1), torch.nan)
    if "forces" not in batch:
        batch.forces = torch.zeros_like(batch.positions)


def _warn_of_constraints(batch: Batch) -> None:
    for graph, info in enumerate(batch.info):
        if info.get("constraints"):
            kinds = ", ".join(type(constraint).__name__ for constraint in info["constraints"])
            warnings.warn(
                f"constraints of {batch.describe_graph(graph)} are not honoured: {kinds}; only fixed atoms are",
                UserWarning,
                stacklevel=2,
            )


def release_atoms(batch: Batch, admitted: Tensor | None) -> None:
    """Free what a hook of another engine has left frozen in the graphs admitted (bool ``[B]``; ``None``: all)."""
    if FROZEN_ATOMS.name not in batch:
        return
    if admitted is None:
        batch.remove_key(FROZEN_ATOMS.name)
    else:
        batch.frozen_atoms.masked_fill_(admitted[batch.batch_idx], False)


def add_bookkeeping(batch: Batch) -> None:
    """Add ``system_id``, ``system_step`` and ``status`` where absent; ``ValueError`` for an id that occurs twice."""
    graphs = torch.arange(batch.num_graphs, device=batch.device).unsqueeze(-1)
    if "system_id" not in batch:
        batch.system_id = graphs
    elif batch.system_id.unique().numel() != batch.num_graphs:
        ids: list[int] = batch.system_id[:, 0].tolist()
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise ValueError(f"system_id must be unique over a run; {twice[:5]} occur more than once")
    for name in ("system_step", "status"):
        if name not in batch:
            batch.add_key(name, torch.zeros_like(graphs))


def unusable_graphs(batch: Batch) -> dict[int, str]:
    """Graphs that cannot be run, with the reason: positions, masses or cells that make no sense; not of failed ones."""
    masses: Tensor = batch.atomic_masses
    checks = (
        ("positions", "are not finite", batch.positions.isfinite().all(-1)),
        ("atomic_masses", "must be finite and positive", masses.isfinite() & (masses > 0)),
    )
    failed = batch.status[:, 0] < 0
    reasons: dict[int, str] = {}
    for name, problem, good in checks:
        if bool(good.all()):
            continue
        for atom in (~(good | failed[batch.batch_idx])).nonzero()[:, 0].tolist():
            graph = int(batch.batch_idx[atom])
            local = atom - int(batch.batch_ptr[graph])
            value = batch[name][atom].tolist()
            reasons.setdefault(
                graph, f"{name} {problem}: atom {local} of {batch.describe_graph(graph)} has {value}"
            )
    if "cell" in batch and "pbc" in batch:
        volume = torch.linalg.det(batch.cell.double()).abs()
        flat = batch.pbc.all(-1) & ~(volume > _SMALLEST_VOLUME) & ~failed
        for graph in flat.nonzero()[:, 0].tolist():
            size = f"volume {float(volume[graph]):g} Å³ with pbc (T, T, T)"
            reasons.setdefault(graph, f"cell of {batch.describe_graph(graph)} is degenerate: {size}")
    return reasons


def mark_entry(batch: Batch, entering: Tensor) -> None:
    """Remember at which of its steps each graph marked (bool ``[B]``) enters a stage."""
    if STAGE_ENTRY_STEP.name not in batch:
        batch.stage_entry_step = batch.system_step.clone()
    torch.where(entering[:, None], batch.system_step, batch.stage_entry_step, out=batch.stage_entry_step)


def without_periodic_cell(batch: Batch, who: str) -> dict[int, str]:
    """Graphs whose cell is not periodic in three directions or has no volume, with the reason; not of failed ones.

    Parameters
    ----------
    batch : Batch
        The structures.
    who : str
        What needs the cells, for the reasons.
    """
    if "cell" not in batch or "pbc" not in batch:
        return {
            graph: f"{who} needs structures with a cell; {batch.describe_graph(graph)} has none"
            for graph in range(batch.num_graphs)
        }
    volume = torch.linalg.det(batch.cell.double()).abs()
    bad = ~batch.pbc.all(-1) | ~(volume >= 1e-12)
    return {
        graph: f"{who} needs cells periodic in three directions; {batch.describe_graph(graph)} has "
        f"pbc {batch.pbc[graph].tolist()} and volume {float(volume[graph]):g} Å³"
        for graph in bad.nonzero()[:, 0].tolist()
    }


def require_periodic_cells(batch: Batch, who: str) -> None:
    """``ValueError`` for the first graph of :func:`without_periodic_cell`."""
    for reason in without_periodic_cell(batch, who).values():
        raise ValueError(reason)
