"""Several stages in one batch: relax, then heat, then sample, each structure at its own pace."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.admission import mark_entry, release_atoms
from nvalchemi.dynamics.base import BaseDynamics, ConvergenceHook
from nvalchemi.dynamics.clock import set_clock
from nvalchemi.dynamics.inflight import StructureFeed
from nvalchemi.dynamics.sinks import DataSink
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.state import Stateful
from nvalchemi.hooks import Hook, NeighborListHook
from nvalchemi.neighbors import NeighborListFormat


class FusedStage(BaseDynamics):
    """Engines one after another for each structure, all in one batch: ``relax + heat + sample``.

    ``status`` says which engine advances a structure, from 0. A structure moves on when it meets the
    convergence hook of its engine or has made the ``n_steps`` of its engine, and is done after the last. The
    model is evaluated once per step for all. The path of a structure is the one it has when the engines are run
    one after another on it alone: on entering an engine it is shown to that engine's hooks at ``ON_ADMISSION``,
    the engine's state of it begins anew, and its first forces are computed with that engine's biases.

    Parameters
    ----------
    stages : sequence of BaseDynamics
        At least two engines with the same model object. They belong to the fused stage from then on; a
        :class:`~nvalchemi.hooks.NeighborListHook` of theirs becomes a hook of the fused stage, of several that make the
        same kind of list the one with the largest cutoff.
    hooks : sequence of Hook, optional
        See every structure, at every stage behind the hooks of the engines. Hooks of an engine see its own
        structures as ``active_graph_mask`` and the engine as ``workflow``, whose ``step_count`` counts the steps in
        which it has any.
    n_steps : int, optional
        Steps of :meth:`run` with a batch at most; default no limit.
    sampler, sinks : optional
        As in :class:`BaseDynamics`; default the sampler of the first engine and the sinks of the last.
    **options
        As in :class:`BaseDynamics`.

    Raises
    ------
    ValueError
        Fewer than two engines, one twice, models that are not the same object, ``n_steps=0`` of an engine, or a
        convergence hook among ``hooks``: engines have their own.

    Notes
    -----
    Velocities to begin dynamics with are drawn by an
    :class:`~nvalchemi.dynamics.hooks.InitializeVelocitiesHook` of the engine that needs them.
    """

    def __init__(
        self,
        stages: Sequence[BaseDynamics],
        hooks: Sequence[Hook] | None = None,
        n_steps: int | None = None,
        sampler: StructureFeed | None = None,
        sinks: DataSink | Sequence[DataSink] | None = None,
        **options: Any,
    ) -> None:
        flat: list[BaseDynamics] = []
        own_hooks = list(hooks or ())
        for stage in stages:
            if isinstance(stage, FusedStage):
                flat += stage.stages
                own_hooks += [hook for hook in stage.hooks if hook is not stage._auto_hook]
            else:
                flat.append(stage)
        _check_stages(flat)
        self.stages = tuple(flat)
        self._owner = torch.empty(0, dtype=torch.int64)
        self._owned: Batch | None = None
        self._occupied: tuple[BaseDynamics, ...] = ()
        super().__init__(
            flat[0].model,
            _without_narrower_lists([*_taken_neighbor_hooks(flat), *own_hooks]),
            n_steps=n_steps,
            exit_status=len(flat),
            sampler=stages[0].sampler if sampler is None else sampler,
            sinks=stages[-1].sinks if sinks is None else sinks,
            **options,
        )
        self.conserves_momentum = all(stage.conserves_momentum for stage in flat)
        self._steps_per_graph = None
        for stage in flat:
            stage._steps_per_graph = stage.n_steps
            stage._status_seen = (None, -1)
            stage._whole = self
            stage.failures = self.failures

    # ------------------------------------------------------------------ what engines are asked
    @property
    def needed_outputs(self) -> frozenset[str]:
        """What any of the engines needs."""
        return frozenset[str]().union(*(stage.needed_outputs for stage in self.stages))

    @property
    def ends_by_itself(self) -> bool:
        """Whether every engine lets go of its structures at some time."""
        return all(stage.ends_by_itself for stage in self.stages)

    @property
    def parts(self) -> Sequence[BaseDynamics]:
        """The engines."""
        return self.stages

    @property
    def restart_hooks(self) -> Sequence[Hook]:
        """Own hooks, and those of the engines."""
        return [*self.hooks, *(hook for stage in self.stages for hook in stage.hooks)]

    @property
    def restart_parts(self) -> Mapping[str, Stateful]:
        """Sampler, sinks and the step counts of the engines."""
        counters = {f"stage {k}": _StepCount(stage) for k, stage in enumerate(self.stages)}
        return {**super().restart_parts, **counters}

    def max_force(self, batch: Batch) -> Tensor:
        """Largest norm of what the engine of each structure drives to zero, eV/Å, ``[B]``; NaN where it has none."""
        return self._of_owners(batch, [stage.max_force for stage in self.stages])

    def elapsed_time(self, batch: Batch) -> Tensor:
        """Time as the engine of each structure counts it, fs, ``[B]``; NaN where it has none."""
        return self._of_owners(batch, [stage.elapsed_time for stage in self.stages])

    def _of_owners(self, batch: Batch, functions: Sequence[Any]) -> Tensor:
        result = torch.full((batch.num_graphs,), torch.nan, dtype=torch.float64, device=batch.device)
        for k, function in enumerate(functions):
            mine = self._owner == k
            if bool(mine.any()):
                result = torch.where(mine, function(batch).double(), result)
        return result

    def feed_from(self, sampler: StructureFeed) -> None:
        """Take structures from ``sampler``; the engines count the steps of each."""
        self.sampler = sampler

    # ------------------------------------------------------------------ one step
    def prepare(self, batch: Batch, admitted: Tensor) -> None:
        """Let every engine that has structures set up, with those of ``admitted`` (bool ``[B]``) that are its own."""
        for k, stage in enumerate(self.stages):
            if stage in self._occupied:
                stage.prepare(batch, admitted & (self._owner == k))

    def pre_update(self, batch: Batch) -> None:
        """First part of the step of every engine, on its own structures."""
        for stage in self._occupied:
            stage.pre_update(batch)

    def post_update(self, batch: Batch) -> None:
        """Second part of the step of every engine, on its own structures."""
        for stage in self._occupied:
            stage.post_update(batch)

    def _converge(self, batch: Batch) -> Tensor | None:
        """Let those move on that meet the criteria of their engine."""
        moving = torch.zeros_like(self._running)
        for k, stage in enumerate(self.stages):
            hook = stage.convergence_hook
            if stage not in self._occupied or hook is None or stage.step_count % hook.frequency != 0:
                continue
            converged = hook.evaluate(batch, stage.active_graph_mask, stage.max_force)
            converged &= batch.status[:, 0] == k
            if bool(converged.any()):
                hook.migrate(batch, converged, k + 1)
                moving |= converged
        if not bool(moving.any()):
            return None
        self._call_hooks_with(DynamicsStage.ON_CONVERGE, batch, converged_mask=moving)
        return moving.nonzero().squeeze(-1)

    def _graduate(self, batch: Batch) -> None:
        """Let those move on that have made the steps of their engine, and hand over whatever moved."""
        stepped = self._occupied
        for k, stage in enumerate(self.stages):
            over = stage._used_up(batch) if stage in stepped else None
            if over is not None:
                batch.status.masked_fill_((over & (batch.status[:, 0] == k))[:, None], k + 1)
        self._hand_over(batch)
        for stage in stepped:
            stage.step_count += 1

    def _hand_over(self, batch: Batch) -> None:
        """Give the structures whose status changed to the engines that it names."""
        if self._is_settled(batch):
            return
        status: Tensor = batch.status[:, 0]
        moved = (status != self._owner) & (status >= 0)
        left = moved & (self._owner >= 0) & (self._owner < self.exit_status)
        self._call_stage_hooks_with(DynamicsStage.ON_GRADUATE, batch, graduated_mask=left)
        done = left & (status >= self.exit_status)
        if bool(done.any()):
            self._call_own_hooks_with(DynamicsStage.ON_GRADUATE, batch, graduated_mask=done)
        set_clock(batch, self.elapsed_time(batch))
        self._owner = status.clone()
        self._refresh_active(batch)
        self._deliver(batch)
        entering = moved & (status < self.exit_status)
        if bool(entering.any()):
            self._enter_stages(batch, entering)

    def _enter_stages(self, batch: Batch, entering: Tensor) -> None:
        """What an engine does at the admission of a structure, for those that enter another engine."""
        release_atoms(batch, entering)
        self._refresh_active(batch)
        mark_entry(batch, entering)
        self._call_stage_hooks_with(DynamicsStage.ON_ADMISSION, batch, admitted_mask=entering)
        self.prepare(batch, entering)
        self._prime(batch, entering)
        self._deliver(batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a snapshot (see :meth:`BaseDynamics.load_state_dict`)."""
        super().load_state_dict(state)
        self._owned = None

    # ------------------------------------------------------------------ which graphs are whose
    def _enter(self, batch: Batch) -> None:
        super()._enter(batch)
        # A status that somebody changed since the last run.
        if not torch.equal(batch.status[:, 0], self._owner):
            self._status_settled = (None, -1)
            self._hand_over(batch)

    def _admit(self, batch: Batch, admitted: Tensor | None = None) -> None:
        self._owned = None
        super()._admit(batch, admitted)

    def _mark_entry(self, batch: Batch, admitted: Tensor) -> None:
        mark_entry(batch, admitted)

    def _activate(self, batch: Batch, active: Tensor) -> None:
        super()._activate(batch, active)
        if self._owned is not batch:
            self._owned, self._owner = batch, batch.status[:, 0].clone()
        for k, stage in enumerate(self.stages):
            stage._activate(batch, active & (self._owner == k))
        self._occupied = tuple(stage for stage in self.stages if stage._num_active > 0)

    # ------------------------------------------------------------------ hooks
    def register_hook(self, hook: Hook, stage: Enum | None = None) -> None:
        """Add a hook that sees all structures (see :meth:`HookRegistryMixin.register_hook`)."""
        if isinstance(hook, ConvergenceHook):
            raise ValueError(
                "structures converge in an engine of the fused stage: give it the ConvergenceHook"
            )
        super().register_hook(hook, stage)

    def describe_hooks(self) -> str:
        """Tables of what fires where: of the engines in order, and of the fused stage."""
        tables = [
            f"stage {k}, {type(stage).__name__}:\n{super(BaseDynamics, stage).describe_hooks()}"
            + ("" if stage.convergence_hook is None else f"\nafter AFTER_STEP: {stage.convergence_hook!r}")
            for k, stage in enumerate(self.stages)
        ]
        return "\n\n".join([*tables, f"all:\n{super().describe_hooks()}"])

    def _call_hooks(self, stage: Enum, batch: Batch | None) -> None:
        for part in self._occupied:
            part._call_hooks(stage, batch)
        if batch is not None:
            self._notice_status(batch)
        super()._call_hooks(stage, batch)

    def _call_evaluation_hooks(self, stage: Enum, batch: Batch | None) -> None:
        for part in self._occupied:
            part._call_evaluation_hooks(stage, batch)
        if batch is not None:
            self._notice_status(batch)
        super()._call_evaluation_hooks(stage, batch)

    def _call_hooks_with(self, stage: DynamicsStage, batch: Batch, **masks: Tensor) -> None:
        self._call_stage_hooks_with(stage, batch, **masks)
        self._call_own_hooks_with(stage, batch, **masks)

    def _call_stage_hooks_with(self, stage: DynamicsStage, batch: Batch, **masks: Tensor) -> None:
        """Call the hooks of each engine with its own part of the masks, where there is any."""
        for k, part in enumerate(self.stages):
            own = {name: mask & (self._owner == k) for name, mask in masks.items()}
            if any(bool(mask.any()) for mask in own.values()):
                part._call_hooks_with(stage, batch, **own)

    def _call_own_hooks_with(self, stage: DynamicsStage, batch: Batch, **masks: Tensor) -> None:
        self._masks = masks
        try:
            super()._call_hooks(stage, batch)
        finally:
            self._masks = {}

    @contextmanager
    def _hooks_opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.stages:
                part.global_rank = self.global_rank
                stack.enter_context(part._hooks_opened())
            stack.enter_context(super()._hooks_opened())
            yield

    def __repr__(self) -> str:
        return f"FusedStage({' + '.join(repr(stage) for stage in self.stages)}, step {self.step_count})"


class _StepCount:
    """The step count of an engine, for restarts."""

    def __init__(self, engine: BaseDynamics) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {"step_count": self._engine.step_count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.step_count = state["step_count"]


def _check_stages(stages: Sequence[BaseDynamics]) -> None:
    if len(stages) < 2:
        raise ValueError(f"a FusedStage needs at least two engines, got {len(stages)}")
    if len({id(stage) for stage in stages}) < len(stages):
        raise ValueError("an engine can be only one stage of a FusedStage: make a second one")
    for k, stage in enumerate(stages):
        if stage.model is not stages[0].model:
            raise ValueError(
                f"the stages of a FusedStage share one model: {type(stage).__name__} (stage {k}) has another "
                f"than {type(stages[0]).__name__} (stage 0)"
            )
        if stage.n_steps == 0:
            raise ValueError(f"{type(stage).__name__} (stage {k}) has n_steps=0; leave it out")


def _taken_neighbor_hooks(stages: Sequence[BaseDynamics]) -> list[Hook]:
    """Neighbour hooks that a user gave to an engine; all of them leave their engines."""
    given: list[Hook] = []
    for stage in stages:
        for hook in stage.hooks:
            if isinstance(hook, NeighborListHook):
                stage.remove_hook(hook)
                if hook is not stage._auto_hook:
                    given.append(hook)
        stage._auto_hook = None
    return given


def _without_narrower_lists(hooks: Sequence[Hook]) -> list[Hook]:
    """Hooks, with one neighbour hook for each kind of list: the first of those with the largest cutoff."""
    widest: dict[tuple[NeighborListFormat, bool], NeighborListHook] = {}
    for hook in hooks:
        if isinstance(hook, NeighborListHook):
            kind = hook.config.format, hook.config.half_list
            if hook.config.cutoff > widest.setdefault(kind, hook).config.cutoff:
                widest[kind] = hook
    return [hook for hook in hooks if not isinstance(hook, NeighborListHook) or hook in widest.values()]
