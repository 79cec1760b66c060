"""Watch the conservation of energy."""

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from nvalchemi.data import Batch, Field, register_field
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.thermo import kinetic_energy
from nvalchemi.hooks import HookContext

REFERENCE_ENERGY = register_field(
    Field(
        "drift_reference_energy",
        "system",
        (1,),
        "float",
        "eV",
        "energy that drift is counted from",
        neutral=0,
        persistent=False,
    )
)
REFERENCE_STEP = register_field(
    Field(
        "drift_reference_step",
        "system",
        (1,),
        "int",
        "",
        "system_step of that energy; −1: not yet",
        neutral=-1,
        persistent=False,
    )
)


class EnergyDriftMonitorHook:
    """Report structures whose energy moves away from where it was when they were first seen.

    The reference belongs to the structure (a field of the batch), not to its place, so it survives selection
    and refills.

    Parameters
    ----------
    threshold : float
        Largest drift allowed: eV per atom and step, or eV.
    metric : {"per_atom_per_step", "absolute"}, default "per_atom_per_step"
        ``|E − E₀|`` divided by atoms and by steps since the reference, or ``|E − E₀|`` itself.
    action : {"warn", "raise"}, default "warn"
        ``UserWarning`` once for each structure, or ``RuntimeError``.
    frequency : int, default 1
        Check every so many steps.
    include_kinetic : bool, default True
        Watch the total energy rather than the potential energy.
    stage : Enum, optional
        Default ``AFTER_STEP``.
    """

    default_stages = ("AFTER_STEP",)
    order_role = "record"

    def __init__(
        self,
        threshold: float,
        metric: Literal["per_atom_per_step", "absolute"] = "per_atom_per_step",
        action: Literal["warn", "raise"] = "warn",
        frequency: int = 1,
        include_kinetic: bool = True,
        stage: Enum | None = None,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold must be positive, got {threshold}")
        if metric not in ("per_atom_per_step", "absolute"):
            raise ValueError(f"metric must be 'per_atom_per_step' or 'absolute', got {metric!r}")
        if action not in ("warn", "raise"):
            raise ValueError(f"action must be 'warn' or 'raise', got {action!r}")
        self.threshold = threshold
        self.metric = metric
        self.action = action
        self.frequency = frequency
        self.include_kinetic = include_kinetic
        self.stage = stage
        self._warned: set[int] = set()

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Check the active structures."""
        dynamics, batch = dynamics_context(self, ctx)
        energy = batch.energy[:, 0].double()
        if self.include_kinetic:
            energy = energy + kinetic_energy(batch)
        drift = self._drift(batch, energy)
        # NaN is a drift, too.
        bad = ~(drift <= self.threshold)
        if dynamics.active_graph_mask is not None:
            bad &= dynamics.active_graph_mask
        if bool(bad.any()):
            self._report(batch, drift, bad, dynamics.step_count)

    def state_dict(self) -> dict[str, Any]:
        """Which structures were warned of; the references are fields of the batch."""
        return {"warned": sorted(self._warned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, so that a resumed run does not warn again."""
        self._warned = set(state["warned"])

    def _drift(self, batch: Batch, energy: Tensor) -> Tensor:
        """Drift of each graph by the metric; graphs seen for the first time get their reference here."""
        if REFERENCE_ENERGY.name not in batch:
            batch.drift_reference_energy = torch.zeros_like(energy).unsqueeze(-1)
            batch.drift_reference_step = torch.full_like(batch.system_step, -1)
        reference, since = batch.drift_reference_energy[:, 0], batch.drift_reference_step[:, 0]
        new = since < 0
        torch.where(new, energy, reference, out=reference)
        torch.where(new, batch.system_step[:, 0], since, out=since)
        drift = (energy - reference).abs()
        if self.metric == "absolute":
            return drift
        steps = (batch.system_step[:, 0] - since).clamp(min=1)
        return drift / (batch.num_nodes_per_graph * steps)

    def _report(self, batch: Batch, drift: Tensor, bad: Tensor, step: int) -> None:
        unit = "eV" if self.metric == "absolute" else "eV per atom and step"
        graphs: list[int] = bad.nonzero()[:, 0].tolist()
        ids: list[int] = batch.system_id[bad, 0].tolist()
        worst = float(drift[bad].max())
        message = (
            f"step {step}: energy drifts by up to {worst:.3g} {unit} (limit {self.threshold:g}) "
            f"in graphs {graphs} (system_id {ids})"
        )
        if self.action == "raise":
            raise RuntimeError(message)
        if not self._warned.issuperset(ids):
            self._warned.update(ids)
            warnings.warn(message, UserWarning, stacklevel=2)
