"""The numbers of one moment of a run, fetched from the device at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.hooks.context import DynamicsContext, HookContext, TrainContext
from nvalchemi.hooks.protocols import ObservableWorkflow, Progress, conforms
from nvalchemi.hooks.reporting.structures import StructureLog

UNITS: Mapping[str, str] = {
    "energy": "eV",
    "energy_per_atom": "eV/atom",
    "total_energy": "eV",
    "conserved_energy": "eV",
    "fmax": "eV/Å",
    "temperature": "K",
    "pressure": "eV/Å³",
    "volume": "Å³",
    "time": "fs",
}
"""Units of the scalars that have one; losses have the units of their definition."""

_STAGES_AFTER_A_STEP = frozenset({"AFTER_STEP", "ON_CONVERGE", "ON_GRADUATE"})


@dataclass(frozen=True, kw_only=True)
class ScalarSnapshot(Mapping[str, float]):
    """Scalars of one moment by name: a mapping, with what they were made of.

    Attributes
    ----------
    stage : str
        Name of the stage.
    step : int
        Steps made: of the engine, or of the optimizer.
    scalars : mapping of str to float
        The same as the mapping itself.
    graphs : mapping of str to array ``[B]``
        In simulations: each quantity of each graph, with ``system_id``, ``status``, ``system_step``, ``num_atoms`` and
        ``active``.
    structures : sequence of :class:`~nvalchemi.hooks.reporting.StructureRecord`
        Every structure of the run so far, also those that have left the batch; kept by the orchestrator.
    progress : Progress or None
        How far the run has come, where the workflow knows.
    """

    stage: str
    step: int
    scalars: Mapping[str, float]
    graphs: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    structures: StructureLog = field(default_factory=StructureLog)
    progress: Progress | None = None

    def __getitem__(self, name: str) -> float:
        return self.scalars[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scalars)

    def __len__(self) -> int:
        return len(self.scalars)


def collect_scalars(ctx: HookContext, stage: Enum) -> ScalarSnapshot:
    """Scalars that a context shows, with one transfer from the device.

    Parameters
    ----------
    ctx : HookContext
        Of dynamics, of training, or of an engine of your own with energies or forces in its batch.
    stage : Enum
        Where it is.

    Returns
    -------
    ScalarSnapshot
        In simulations, over the structures of the batch that have not failed: ``energy`` (mean), ``energy_per_atom``,
        ``fmax`` (largest), and the means of ``temperature``, ``pressure``, ``volume``, ``time``, ``total_energy``,
        ``conserved_energy`` over those that have one; ``converged_fraction`` (done, of all), ``active`` and ``failed``
        (numbers). An engine that is no :class:`~nvalchemi.hooks.protocols.ObservableWorkflow` has no rule for
        temperature and pressure, which are then left out.

        In training: ``loss/total``, ``loss/<component>`` (weighted) and ``loss/<component>/unweighted``,
        ``optimizer/<i>/lr`` (``optimizer/<i>/lr/<group>`` from the second parameter group on), ``training/epoch``, and
        the numbers of the last validation as ``validation/loss``, ``validation/<component>``,
        ``validation/energy_mae``.
    """
    if isinstance(ctx, TrainContext):
        return _collect_training(ctx, stage)
    step = ctx.step_count if isinstance(ctx, DynamicsContext) else 0
    if stage.name in _STAGES_AFTER_A_STEP:
        step += 1
    graphs = {} if ctx.batch is None or ctx.batch.num_graphs == 0 else _collect_graphs(ctx, ctx.batch)
    return ScalarSnapshot(stage=stage.name, step=step, scalars=_reduce(graphs), graphs=graphs)


# ---------------------------------------------------------------------- simulation
def _collect_graphs(ctx: HookContext, batch: Batch) -> dict[str, np.ndarray]:
    columns: dict[str, Tensor] = {}
    if conforms(type(ctx.workflow), ObservableWorkflow):
        columns |= ctx.workflow.observables(batch)
    else:
        if "energy" in batch:
            columns["energy"] = batch.energy[:, 0]
        if "forces" in batch:
            norms = torch.linalg.vector_norm(batch.forces, dim=-1)
            largest = norms.new_zeros(batch.num_graphs)
            columns["fmax"] = largest.scatter_reduce(0, batch.batch_idx, norms, "amax")
    for name in ("system_id", "status", "system_step"):
        if name in batch:
            columns[name] = batch[name][:, 0]
    columns["num_atoms"] = batch.num_nodes_per_graph
    active = ctx.active_graph_mask if isinstance(ctx, DynamicsContext) else None
    if active is not None:
        columns["active"] = active
    graphs = _to_host(columns)
    graphs.setdefault("system_id", np.arange(batch.num_graphs, dtype=np.float64))
    graphs.setdefault("status", np.zeros(batch.num_graphs))
    # Without a mask all are active, but for those that failed since it was made.
    graphs.setdefault("active", (graphs["status"] >= 0).astype(np.float64))
    return graphs


def _to_host(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Values as float64 on the host, joined into one tensor for the way."""
    device = next(iter(tensors.values())).device
    flat = [tensor.detach().reshape(-1).to(device) for tensor in tensors.values()]
    # The first element makes all of them float64, in which the numbers of structures keep their digits.
    joined = torch.cat([torch.zeros(1, dtype=torch.float64, device=device), *flat]).cpu().numpy()
    found: dict[str, np.ndarray] = {}
    start = 1
    for name, tensor in zip(tensors, flat, strict=True):
        found[name] = joined[start : start + tensor.shape[0]]
        start += tensor.shape[0]
    return found


def _reduce(graphs: Mapping[str, np.ndarray]) -> dict[str, float]:
    if not graphs:
        return {}
    failed = graphs["status"] < 0
    active = graphs["active"] > 0
    scalars: dict[str, float] = {}
    if not failed.all():
        present = graphs
        if failed.any():
            present = {name: values[~failed] for name, values in graphs.items()}
        if "energy" in present:
            scalars["energy"] = _mean(present["energy"])
            scalars["energy_per_atom"] = float(present["energy"].sum() / present["num_atoms"].sum())
        if "fmax" in present:
            scalars["fmax"] = float(present["fmax"].max())
        for name in _MEANS:
            if name not in present or (name == "temperature" and "time" in present and "time" not in scalars):
                continue  # the velocities of a minimiser are no thermal motion
            values = present[name]
            known = values[~np.isnan(values)]
            if known.size:
                scalars[name] = _mean(known)
    scalars["converged_fraction"] = _mean(~active & ~failed)
    scalars["active"], scalars["failed"] = float(active.sum()), float(failed.sum())
    return scalars


_MEANS = ("time", "temperature", "pressure", "volume", "total_energy", "conserved_energy")


def _mean(values: np.ndarray) -> float:
    return float(values[0] if values.size == 1 else values.mean())


# ---------------------------------------------------------------------- training
def _collect_training(ctx: TrainContext, stage: Enum) -> ScalarSnapshot:
    found: dict[str, Any] = {}
    if ctx.loss is not None:
        found["loss/total"] = ctx.loss
    for name, value in (ctx.losses or {}).items():
        found[f"loss/{name}"] = value
    for name, value in (ctx.unweighted_losses or {}).items():
        found[f"loss/{name}/unweighted"] = value
    for i, optimizer in enumerate(ctx.optimizers):
        for k, group in enumerate(optimizer.param_groups):
            found[f"optimizer/{i}/lr" + (f"/{k}" if k else "")] = group["lr"]
    found["training/epoch"] = ctx.epoch
    for name, value in (ctx.validation or {}).items():
        if name == "components":
            found |= {f"validation/{component}": number for component, number in value.items()}
        elif name not in ("step_count", "epoch"):
            found[f"validation/{name}"] = value
    on_device = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    fetched = _to_host(on_device) if on_device else {}
    scalars = {name: float(fetched[name][0] if name in fetched else value) for name, value in found.items()}
    return ScalarSnapshot(stage=stage.name, step=ctx.step_count, scalars=scalars)
