"""When a structure is done."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.segments import max_per_graph
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.thermo import free_atom_mask, max_force
from nvalchemi.hooks import HookContext, active_graphs

ReduceOp = Literal["norm", "max", "min", "sum", "mean", "abs_max"]

_REDUCTIONS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "norm": lambda x, dims: torch.linalg.vector_norm(x, dim=list(dims)),
    "max": lambda x, dims: x.amax(list(dims)),
    "min": lambda x, dims: x.amin(list(dims)),
    "sum": lambda x, dims: x.sum(list(dims)),
    "mean": lambda x, dims: x.mean(list(dims)),
    "abs_max": lambda x, dims: x.abs().amax(list(dims)),
}


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A number per structure that must not exceed a threshold.

    Attributes
    ----------
    key : str
        Field of the batch, or ``"fmax"``: the largest force the engine minimises, in eV/Å (see
        :class:`ConvergenceHook`).
    threshold : float
        Met when the number is ≤ this. NaN never meets a criterion.
    reduce_op : str, default "norm"
        How a row of the field becomes one number: ``norm``, ``max``, ``min``, ``sum``, ``mean``,
        ``abs_max``. Of a field per atom the largest over the free atoms of a structure counts.
    reduce_dims : int or sequence of int, optional
        Dimensions (not 0) to reduce; default all but the first.
    custom_op : callable, optional
        Takes the field and returns a number, or a bool "is met", per row; replaces ``reduce_op``.
    """

    key: str
    threshold: float
    reduce_op: ReduceOp = "norm"
    reduce_dims: int | Sequence[int] | None = None
    custom_op: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.reduce_op not in _REDUCTIONS:
            raise ValueError(
                f"reduce_op {self.reduce_op!r} of criterion {self.key!r} is unknown: {', '.join(_REDUCTIONS)}"
            )
        if not self.threshold >= 0 and self.custom_op is None and self.reduce_op in ("norm", "abs_max"):
            raise ValueError(f"threshold of criterion {self.key!r} must be ≥ 0, got {self.threshold}")

    def is_met(self, batch: Batch, fmax: Callable[[Batch], Tensor]) -> Tensor:
        """Which graphs meet it: bool ``[B]``; ``fmax`` gives the largest force of each graph."""
        if self.key == "fmax":
            return fmax(batch) <= self.threshold
        if self.key not in batch:
            raise ValueError(
                f"criterion {self.key!r} is not a field of the batch; it has {', '.join(batch.keys())}"
            )
        level = batch.level(self.key)
        value = self._reduce(batch[self.key])
        failing = ~value if value.dtype == torch.bool else ~(value <= self.threshold)
        if level == "node":
            free = free_atom_mask(batch)
            failing = (
                max_per_graph((failing if free is None else failing & free).double(), batch.batch_ptr) > 0
            )
        elif level != "system":
            raise ValueError(
                f"criterion {self.key!r} is a field of level {level!r}; only atoms and systems can converge"
            )
        return ~failing

    def _reduce(self, value: Tensor) -> Tensor:
        if self.custom_op is not None:
            value = self.custom_op(value)
            dims: Sequence[int] = ()
        elif self.reduce_dims is None:
            dims = range(1, value.ndim)
        else:
            dims = (self.reduce_dims,) if isinstance(self.reduce_dims, int) else tuple(self.reduce_dims)
            if any(d % value.ndim == 0 for d in dims):
                raise ValueError(
                    f"reduce_dims of criterion {self.key!r} must not contain dimension 0 (atoms or systems)"
                )
        if dims:
            value = _REDUCTIONS[self.reduce_op](value, list(dims))
        if value.ndim == 2 and value.shape[1] == 1:
            value = value.squeeze(1)
        if value.ndim != 1:
            raise ValueError(
                f"criterion {self.key!r} is not one number per row after reduction: shape {list(value.shape)}"
            )
        return value


class ConvergenceHook:
    """Retire structures that meet all criteria.

    The engine evaluates it after ``AFTER_STEP`` of each step, on active graphs only. Those that newly meet
    the criteria are shown at ``ON_CONVERGE``, and their ``status`` moves to ``target_status``; the run ends
    when no graph is active any more.

    Parameters
    ----------
    criteria : mapping or Criterion, or a sequence of them
        All must hold. A mapping has the keys of :class:`Criterion`. Default: ``fmax`` ≤ 0.05 eV/Å.
    source_status : int, optional
        Only graphs of this status are tested; default all active ones.
    target_status : int, optional
        Status of those that converged; default the exit status of the engine.
    frequency : int, default 1
        Test every so many steps.

    Notes
    -----
    ``"fmax"`` is the largest norm of what the engine drives to zero: of the force on a free atom and, where
    the cell relaxes too, also of the rows of the generalised force on the cell, as in ASE's
    ``FrechetCellFilter``. So an atom alone in its cell is not converged before its cell is. Fixed atoms do
    not count.

    Examples
    --------
    >>> ConvergenceHook.from_fmax(0.02)
    ConvergenceHook(fmax <= 0.02)
    >>> ConvergenceHook(
    ...     [
    ...         {"key": "fmax", "threshold": 0.02},
    ...         {"key": "stress", "threshold": 0.001, "reduce_op": "abs_max"},
    ...     ]
    ... )
    ConvergenceHook(fmax <= 0.02, abs_max(stress) <= 0.001)
    """

    def __init__(
        self,
        criteria: Mapping[str, Any] | Criterion | Sequence[Mapping[str, Any] | Criterion] | None = None,
        *,
        source_status: int | None = None,
        target_status: int | None = None,
        frequency: int = 1,
    ) -> None:
        if criteria is None:
            criteria = Criterion(key="fmax", threshold=0.05)
        several = [criteria] if isinstance(criteria, Mapping | Criterion) else list(criteria)
        if not several:
            raise ValueError("ConvergenceHook needs at least one criterion")
        self.criteria = tuple(c if isinstance(c, Criterion) else Criterion(**c) for c in several)
        self.source_status = source_status
        self.target_status = target_status
        self.frequency = frequency
        self.stage: Enum | None = DynamicsStage.AFTER_STEP

    @classmethod
    def from_fmax(cls, threshold: float = 0.05, **options: Any) -> Self:
        """Largest force, including the generalised force on a cell that relaxes, ≤ ``threshold`` eV/Å."""
        return cls(Criterion(key="fmax", threshold=threshold), **options)

    @classmethod
    def from_forces(cls, threshold: float, **options: Any) -> Self:
        """The same as :meth:`from_fmax`; use a criterion with key ``"forces"`` to leave the cell out."""
        return cls.from_fmax(threshold, **options)

    @classmethod
    def from_stress(cls, threshold: float, *, pressure: float = 0.0, **options: Any) -> Self:
        """Largest component of the stress relative to an applied pressure, ``|σ + P·1| ≤ threshold``; both eV/Å³."""
        if not threshold >= 0:
            raise ValueError(f"threshold of criterion 'stress' must be ≥ 0, got {threshold}")

        def deviation(stress: Tensor) -> Tensor:
            eye = torch.eye(3, dtype=stress.dtype, device=stress.device)
            return (stress + pressure * eye).abs().amax((-2, -1))

        return cls(Criterion(key="stress", threshold=threshold, custom_op=deviation), **options)

    def _runs_on_stage(self, stage: Enum) -> bool:
        # The engine evaluates it itself, after every hook of AFTER_STEP.
        return False

    def evaluate(
        self, batch: Batch, active: Tensor | None = None, fmax: Callable[[Batch], Tensor] = max_force
    ) -> Tensor:
        """Graphs that are active, of the source and not yet of the target status, and meet all criteria: bool ``[B]``.

        Parameters
        ----------
        batch : Batch
            The structures.
        active : Tensor, bool [B], optional
            Graphs to test; default all.
        fmax : callable, optional
            Largest force of each graph that is to vanish, ``[B]``; default that on the free atoms.
        """
        mask = self.criteria[0].is_met(batch, fmax)
        for criterion in self.criteria[1:]:
            mask = mask & criterion.is_met(batch, fmax)
        if active is not None:
            mask = mask & active
        if self.source_status is not None:
            mask = mask & (batch.status[:, 0] == self.source_status)
        if self.target_status is not None:
            mask = mask & (batch.status[:, 0] != self.target_status)
        return mask

    def migrate(self, batch: Batch, converged: Tensor, exit_status: int) -> None:
        """Write the target status of the graphs marked."""
        target = exit_status if self.target_status is None else self.target_status
        batch.status.masked_fill_(converged.unsqueeze(-1), target)

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Evaluate and migrate at once, for engines that are not :class:`BaseDynamics`."""
        if ctx.batch is None:
            raise ValueError("ConvergenceHook needs a batch")
        self.migrate(ctx.batch, self.evaluate(ctx.batch, active_graphs(ctx)), exit_status=1)

    def __repr__(self) -> str:
        parts = [
            f"{c.key} <= {c.threshold:g}"
            if c.key == "fmax"
            else f"{'custom_op' if c.custom_op else c.reduce_op}({c.key}) <= {c.threshold:g}"
            for c in self.criteria
        ]
        return f"ConvergenceHook({', '.join(parts)})"
