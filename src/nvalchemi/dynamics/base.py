"""The engine: it walks through the stages of a step and lets hooks act at them."""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.admission import FAILED, complete_batch
from nvalchemi.dynamics.convergence import ConvergenceHook, Criterion
from nvalchemi.dynamics.evaluation import Cutter, PieceEvaluator, as_cutter, store_outputs
from nvalchemi.dynamics.session import ModelSession
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.thermo import free_atom_mask, max_force
from nvalchemi.hooks import DynamicsContext, Hook, HookRegistryMixin, NeighborListHook
from nvalchemi.models.base import BaseModelMixin

__all__ = ["FAILED", "BaseDynamics", "ConvergenceHook", "Criterion", "DynamicsStage"]

_FORCES_DEPEND_ON = ("positions", "cell", "atomic_numbers", "atomic_masses", "atom_categories")

DEFAULT_SKIN = 1.0
"""Å; skin of the neighbour list that an engine adds by itself when the model's config names none."""


class BaseDynamics(HookRegistryMixin):
    """Advance the structures of a batch, all at once and each as if it were alone.

    Subclasses say how: :meth:`pre_update` acts before and :meth:`post_update` after the forces are
    computed, and :meth:`prepare` sets up what they need. The loop is drawn in :class:`DynamicsStage`.

    Parameters
    ----------
    model : BaseModelMixin
        Gives energy and forces.
    hooks : sequence of Hook, optional
        Registered in this order.
    convergence_hook : ConvergenceHook, optional
        When a structure is done. The same as one in ``hooks``.
    n_steps : int, optional
        Steps of :meth:`run` when it is not told; without it a run needs a convergence hook and ends when
        all have converged.
    exit_status : int, default 1
        Graphs with 0 ≤ ``status`` < ``exit_status`` are active. Negative means failed.
    sampler, sinks : optional
        Reserved for in-flight batching; must be ``None``.
    auto_neighbors : bool, default True
        Add a :class:`NeighborListHook` (the last at ``BEFORE_COMPUTE``) when the model needs a list and
        none is registered, with the skin that the model's config names, else 1 Å.
    max_edges_per_eval : int or callable, optional
        Bound on the edges given to the model at once; a graph with more goes alone. A callable gets the
        number of edges of each active graph and returns pieces (start, stop). Default: all at once.

    Notes
    -----
    ``status`` is honoured as it is found, so that graphs can be left out from the start; a batch in which
    none is active is an error when it is first seen. Fixed atoms (``atom_categories``) never move.
    """

    __needs_keys__: ClassVar[frozenset[str]] = frozenset({"energy", "forces"})
    __provides_keys__: ClassVar[frozenset[str]] = frozenset({"positions", "velocities"})

    conserves_momentum: ClassVar[bool] = True
    """Whether total momentum is conserved, which decides how degrees of freedom are counted (``dynamics.thermo``)."""

    _stage_type = DynamicsStage
    _unscheduled_stages = frozenset({DynamicsStage.ON_ADMISSION})

    def __init__(
        self,
        model: BaseModelMixin,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        n_steps: int | None = None,
        exit_status: int = 1,
        sampler: Any = None,
        sinks: Any = None,
        *,
        auto_neighbors: bool = True,
        max_edges_per_eval: int | Cutter | None = None,
    ) -> None:
        if sampler is not None or sinks is not None:
            raise ValueError(
                "in-flight batching (sampler, sinks) is not available in this version: pass a batch to run()"
            )
        if exit_status < 1:
            raise ValueError(f"exit_status must be ≥ 1, got {exit_status}")
        self.model = model
        self.n_steps = _checked_steps(n_steps)
        self.exit_status = exit_status
        self.auto_neighbors = auto_neighbors
        self.step_count = 0
        self.global_rank = 0
        self.convergence_hook: ConvergenceHook | None = None
        self._session = ModelSession(model, self.needed_outputs)
        self._cutter = as_cutter(max_edges_per_eval)
        self._evaluate_pieces = PieceEvaluator(self._cutter)
        self._auto_hook: NeighborListHook | None = None

        self._batch: Batch | None = None
        self._num_active = 0
        self.active_graph_mask: Tensor | None = None
        """Graphs being advanced, bool ``[B]``; ``None`` while all are."""
        self.active_atom_mask: Tensor | None = None
        """Atoms that may move (free atoms of active graphs), bool ``[N, 1]``; ``None`` while all may."""
        self._running = torch.empty(0, dtype=torch.bool)
        self._status_seen: tuple[Tensor | None, int] = (None, -1)
        self._status_settled: tuple[Tensor | None, int] = (None, -1)
        self._left_at: dict[str, tuple[Tensor | None, int]] = {}
        self._masks: dict[str, Tensor] = {}

        for hook in hooks or ():
            self.register_hook(hook)
        if convergence_hook is not None:
            self.register_hook(convergence_hook)

    # ------------------------------------------------------------------ for subclasses
    @property
    def needed_outputs(self) -> frozenset[str]:
        """Outputs of the model that this engine needs."""
        return self.__needs_keys__

    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Set up what the updates need; called when graphs enter, and when somebody changed the batch between two runs.

        Parameters
        ----------
        batch : Batch
            The batch.
        admitted : Tensor, bool [B]
            Graphs that just entered, whose state starts anew.
        """

    def pre_update(self, batch: Batch) -> None:
        """First part of a step, before the forces are computed. Runs under ``torch.no_grad``."""

    def post_update(self, batch: Batch) -> None:
        """Second part of a step, with the new forces. Runs under ``torch.no_grad``."""

    def max_force(self, batch: Batch) -> Tensor:
        """Largest norm of what is driven to zero in each graph, eV/Å, ``[B]``; the quantity behind ``fmax``."""
        return max_force(batch)

    def elapsed_time(self, batch: Batch) -> Tensor:
        """Physical time each graph has been simulated, fs, ``[B]``; NaN for engines without one."""
        return torch.full((batch.num_graphs,), torch.nan, dtype=torch.float64, device=batch.device)

    # ------------------------------------------------------------------ one step
    def step(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Advance the active graphs by one step.

        Parameters
        ----------
        batch : Batch
            Changed in place. One that this engine has not seen is admitted first, as in :meth:`run`.

        Returns
        -------
        batch : Batch
            The same object.
        converged : Tensor or None
            Indices of graphs that newly converged.
        """
        with self._session:
            if batch is not self._batch:
                self._admit(batch)
            self._call_hooks(DynamicsStage.BEFORE_STEP, batch)

            self._call_hooks(DynamicsStage.BEFORE_PRE_UPDATE, batch)
            self.pre_update(batch)
            self._call_hooks(DynamicsStage.AFTER_PRE_UPDATE, batch)

            self._call_hooks(DynamicsStage.BEFORE_COMPUTE, batch)
            self.compute(batch)
            self._call_hooks(DynamicsStage.AFTER_COMPUTE, batch)

            self._call_hooks(DynamicsStage.BEFORE_POST_UPDATE, batch)
            self.post_update(batch)
            self._call_hooks(DynamicsStage.AFTER_POST_UPDATE, batch)

            batch.system_step.add_(
                1 if self.active_graph_mask is None else self.active_graph_mask.unsqueeze(-1)
            )
            self._call_hooks(DynamicsStage.AFTER_STEP, batch)

            converged = self._converge(batch)
            self._graduate(batch)
            self.step_count += 1
        return batch, converged

    def compute(self, batch: Batch) -> None:
        """Evaluate the model on the active graphs and write energy, forces (and stress) into the batch.

        Results of other graphs stay as they are. No hook fires here.
        """
        with self._session:
            if self.active_graph_mask is None and self._cutter is None:
                store_outputs(batch, self.model(batch))
            else:
                self._evaluate_pieces(self.model, batch, self.active_graph_mask)

    def _converge(self, batch: Batch) -> Tensor | None:
        """Retire the graphs that newly meet the criteria; their indices, or ``None``."""
        hook = self.convergence_hook
        if hook is None or self.step_count % hook.frequency != 0:
            return None
        converged = hook.evaluate(batch, self.active_graph_mask, self.max_force)
        if not bool(converged.any()):
            return None
        hook.migrate(batch, converged, self.exit_status)
        self._call_hooks_with(DynamicsStage.ON_CONVERGE, batch, converged_mask=converged)
        return converged.nonzero().squeeze(-1)

    def _graduate(self, batch: Batch) -> None:
        """Announce and stop the graphs whose status has reached the exit status, whoever moved it."""
        if _unchanged(batch.status, self._status_settled):
            return
        graduated = self._running & (batch.status[:, 0] >= self.exit_status)
        if bool(graduated.any()):
            self._call_hooks_with(DynamicsStage.ON_GRADUATE, batch, graduated_mask=graduated)
        self._refresh_active(batch)

    # ------------------------------------------------------------------ a run
    def run(self, batch: Batch | None = None, n_steps: int | None = None) -> Batch:
        """Run until the steps are used up or no graph is active.

        Parameters
        ----------
        batch : Batch
            Changed in place. Passing again the object of the last run goes on where that ended.
        n_steps : int, optional
            Steps at most; default the engine's own ``n_steps``.

        Returns
        -------
        Batch
            The same object.

        Raises
        ------
        ValueError
            Before the first step: neither steps nor a convergence hook to end the run, a model that cannot
            give what is needed, a batch that cannot be run
            (:func:`nvalchemi.dynamics.admission.complete_batch`).
        """
        if batch is None:
            raise ValueError("run() needs a batch")
        limit = _checked_steps(n_steps) if n_steps is not None else self.n_steps
        if limit is None and self.convergence_hook is None:
            raise ValueError("run() needs n_steps or a convergence hook, or it would never end")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.global_rank = torch.distributed.get_rank()
        with self._hooks_opened(), self._session:
            self._enter(batch)
            steps = 0
            while self._num_active > 0 and (limit is None or steps < limit):
                self.step(batch)
                steps += 1
            self._left_at = {name: _version(batch.get(name)) for name in _FORCES_DEPEND_ON}
        return batch

    def __enter__(self) -> Self:
        self._opened = self._hooks_opened()
        self._opened.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opened.__exit__(*exc)

    # ------------------------------------------------------------------ admission
    def _enter(self, batch: Batch) -> None:
        """Admit a new batch; take up a known one where it was left, with fresh forces if somebody changed it."""
        if batch is not self._batch:
            self._admit(batch)
            return
        self._refresh_active(batch)
        if not all(_unchanged(batch.get(name), seen) for name, seen in self._left_at.items()):
            self.prepare(batch, torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device))
            self._prime(batch)

    def _admit(self, batch: Batch) -> None:
        """Complete a new batch, show it to the hooks at ``ON_ADMISSION``, and compute its first forces."""
        self._session.check()
        complete_batch(batch, self.model.model_config)
        self._batch = None
        self._add_neighbor_hook()
        self._refresh_active(batch)
        if self._num_active == 0:
            raise ValueError(
                f"no graph of the batch is active: status must be 0 ≤ status < {self.exit_status} and is "
                f"{batch.status[:, 0].unique().tolist()}; set batch.status to 0 to run structures that another "
                "engine finished"
            )
        everyone = torch.ones(batch.num_graphs, dtype=torch.bool, device=batch.device)
        self._call_hooks_with(DynamicsStage.ON_ADMISSION, batch, admitted_mask=everyone)
        self.prepare(batch, everyone)
        self._prime(batch)
        self._batch = batch

    def _prime(self, batch: Batch) -> None:
        """First forces, complete with what hooks that belong to the evaluation contribute."""
        self._call_evaluation_hooks(DynamicsStage.BEFORE_COMPUTE, batch)
        # A stress that is there already is a label or another engine's; it must not outlive the structure
        # it belongs to.
        if "stress" in self.model.requested_outputs(batch):
            if "stress" not in batch:
                batch.stress = batch.positions.new_zeros(batch.num_graphs, 3, 3)
        elif "stress" in batch:
            batch.remove_key("stress")
        self.compute(batch)
        self._call_evaluation_hooks(DynamicsStage.AFTER_COMPUTE, batch)

    def _add_neighbor_hook(self) -> None:
        config = self.model.model_config.neighbor_config
        if (
            config is None
            or not self.auto_neighbors
            or any(isinstance(h, NeighborListHook) for h in self._hooks)
        ):
            return
        skin = config.skin if "skin" in config.model_fields_set else DEFAULT_SKIN
        self._auto_hook = NeighborListHook(config, skin=skin)
        self.register_hook(self._auto_hook)

    # ------------------------------------------------------------------ which graphs are active
    def _refresh_active(self, batch: Batch) -> None:
        """Derive the masks from ``batch.status``: the only place where the host waits for it."""
        status: Tensor = batch.status[:, 0]
        active = (status >= 0) & (status < self.exit_status)
        self._num_active = int(active.sum())
        self.active_graph_mask = None if self._num_active == batch.num_graphs else active
        free = free_atom_mask(batch)
        moving = None if self.active_graph_mask is None else active[batch.batch_idx]
        if free is not None and not bool(free.all()):
            moving = free if moving is None else moving & free
        self.active_atom_mask = None if moving is None else moving.unsqueeze(-1)
        self._running = active
        self._status_seen = self._status_settled = _version(batch.status)

    # ------------------------------------------------------------------ hooks
    def register_hook(self, hook: Hook, stage: Enum | None = None) -> None:
        """Add a hook (see :meth:`HookRegistryMixin.register_hook`); a :class:`ConvergenceHook` becomes the engine's."""
        if isinstance(hook, ConvergenceHook) and self.convergence_hook is not None:
            raise ValueError(
                "there is a convergence hook already: put all criteria into one ConvergenceHook([...])"
            )
        super().register_hook(hook, stage)
        if isinstance(hook, ConvergenceHook):
            self.convergence_hook = hook
        elif (
            isinstance(hook, NeighborListHook) and self._auto_hook is not None and hook is not self._auto_hook
        ):
            automatic, self._auto_hook = self._auto_hook, None
            self.remove_hook(automatic)

    def remove_hook(self, hook: Hook) -> None:
        """Remove a hook (see :meth:`HookRegistryMixin.remove_hook`)."""
        super().remove_hook(hook)
        if hook is self.convergence_hook:
            self.convergence_hook = None

    def describe_hooks(self) -> str:
        """Table of what fires where, with the automatic neighbour list and the convergence hook."""
        self._add_neighbor_hook()
        table = super().describe_hooks()
        return (
            table
            if self.convergence_hook is None
            else f"{table}\nafter AFTER_STEP: {self.convergence_hook!r}"
        )

    def _build_context(self, batch: Batch | None) -> DynamicsContext:
        return DynamicsContext(
            batch=batch,
            model=self.model,
            global_rank=self.global_rank,
            workflow=self,
            step_count=self.step_count,
            active_graph_mask=self.active_graph_mask,
            **self._masks,
        )

    def _call_hooks_with(self, stage: DynamicsStage, batch: Batch, **masks: Tensor) -> None:
        """Call the hooks of ``stage`` with a mask that exists only there."""
        self._masks = masks
        try:
            self._call_hooks(stage, batch)
        finally:
            self._masks = {}

    def _dispatch(self, hooks: Iterable[Hook], stage: Any, batch: Batch | None) -> None:
        super()._dispatch(hooks, stage, batch)
        # A status that a hook moved takes effect at once, so that a graph given up after compute is not
        # updated any more.
        if (
            batch is not None
            and self._status_seen[0] is not None
            and not _unchanged(batch.status, self._status_seen)
        ):
            running, settled = self._running, self._status_settled
            self._refresh_active(batch)
            self._running, self._status_settled = running, settled

    def __repr__(self) -> str:
        model, hooks = type(self.model).__name__, self._hooks_summary()
        return f"{type(self).__name__}(model={model}, step {self.step_count}, hooks={hooks})"


def _version(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Object and version: the same again as long as nobody replaced the tensor or wrote into it."""
    return tensor, -1 if tensor is None else tensor._version


def _unchanged(tensor: Tensor | None, seen: tuple[Tensor | None, int]) -> bool:
    return tensor is seen[0] and (tensor is None or tensor._version == seen[1])


def _checked_steps(n_steps: int | None) -> int | None:
    if n_steps is not None and (isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 0):
        raise ValueError(f"n_steps must be an int ≥ 0, got {n_steps!r}")
    return n_steps
