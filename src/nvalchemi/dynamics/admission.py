"""What a batch must have before it can run, and what is added to it."""

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.thermo import free_atom_mask
from nvalchemi.models.base import ModelConfig

FAILED = -1
"""Status of a structure that was given up."""


def complete_batch(batch: Batch, config: ModelConfig) -> None:
    """Check a batch and add the fields that every engine needs.

    Added when absent: ``system_id`` (0 … B−1), ``system_step`` and ``status`` (0), ``velocities`` (from
    ``momenta`` if there are any, else zero), ``energy`` and ``forces`` (zero, until the first evaluation).
    Velocities of fixed atoms are set to zero. Tensors that carry an autograd graph are replaced by detached
    ones.

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
        are not positive, a ``system_id`` that occurs twice. The message names the graph.
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
    _add_bookkeeping(batch)
    _check_rows(batch, batch.positions.isfinite().all(-1), "positions", "are not finite")
    if "atomic_masses" not in batch:
        raise ValueError(f"dynamics needs atomic_masses; the batch has {', '.join(batch.keys())}")
    masses: Tensor = batch.atomic_masses
    _check_rows(batch, masses.isfinite() & (masses > 0), "atomic_masses", "must be finite and positive")
    if "velocities" not in batch:
        if "momenta" in batch:
            batch.velocities = batch.momenta / masses.unsqueeze(-1)
        else:
            batch.velocities = torch.zeros_like(batch.positions)
    free = free_atom_mask(batch)
    if free is not None:
        batch.velocities.masked_fill_(~free.unsqueeze(-1), 0.0)
    if "energy" not in batch:
        batch.energy = batch.positions.new_zeros(batch.num_graphs, 1)
    if "forces" not in batch:
        batch.forces = torch.zeros_like(batch.positions)


def _add_bookkeeping(batch: Batch) -> None:
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


def _check_rows(batch: Batch, good: Tensor, name: str, problem: str) -> None:
    if bool(good.all()):
        return
    atom = int((~good).nonzero()[0, 0])
    graph = int(batch.batch_idx[atom])
    local = atom - int(batch.batch_ptr[graph])
    raise ValueError(
        f"{name} {problem}: atom {local} of {batch.describe_graph(graph)} has {batch[name][atom].tolist()}"
    )
