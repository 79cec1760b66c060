"""The engine: it walks through the stages of a step and lets hooks act at them."""

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsIndex

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics import observables
from nvalchemi.dynamics.active import ActiveGraphs, unchanged, version
from nvalchemi.dynamics.admission import FAILED, complete_batch, mark_entry, release_atoms
from nvalchemi.dynamics.clock import add_clock, set_clock
from nvalchemi.dynamics.convergence import ConvergenceHook, Criterion
from nvalchemi.dynamics.evaluation import Cutter, PieceEvaluator, as_cutter, forget_outputs, store_outputs
from nvalchemi.dynamics.inflight import StructureFeed, check_parameters, refill, warn_of_lost_structures
from nvalchemi.dynamics.restart import RestartFile
from nvalchemi.dynamics.session import ModelSession
from nvalchemi.dynamics.sinks import DataSink, as_sinks, sinks_closed_after
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.state import Stateful, batch_from_state, engine_state, load_engine_state, resume
from nvalchemi.dynamics.thermo import max_force
from nvalchemi.hooks import DynamicsContext, Hook, NeighborListHook
from nvalchemi.hooks.protocols import Progress
from nvalchemi.models.base import BaseModelMixin

if TYPE_CHECKING:
    from nvalchemi.dynamics.fused import FusedStage
    from nvalchemi.dynamics.pipeline import DistributedPipeline

__all__ = ["FAILED", "BaseDynamics", "ConvergenceHook", "Criterion", "DynamicsStage"]

_FORCES_DEPEND_ON = ("positions", "cell", "pbc", "atomic_numbers", "atomic_masses", "atom_categories")

DEFAULT_SKIN = 1.0
"""Å; skin of the neighbour list that an engine adds by itself when the model's config names none."""


class BaseDynamics(ActiveGraphs):
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
    sampler : SizeAwareSampler, optional
        Where structures come from when :meth:`run` is called without a batch
        (:mod:`nvalchemi.dynamics.inflight`). ``n_steps`` is then the number of steps that each structure may
        make.
    sinks : DataSink or sequence of DataSink, optional
        Where structures go that are done or failed; when one is full, the next is filled.
    auto_neighbors : bool, default True
        Add a :class:`NeighborListHook` (the last at ``BEFORE_COMPUTE``) when the model needs a list and
        none is registered, with the skin that the model's config names, else 1 Å.
    max_edges_per_eval : int, "auto" or callable, optional
        Bound on the edges given to the model at once; a graph with more goes alone. ``"auto"``: the size that takes
        the least time per edge and fits into memory, found with some evaluations more on the first batch, and kept on
        disk for later runs (:mod:`nvalchemi.dynamics.cost`). A callable gets the number of edges of each active graph
        and returns pieces (start, stop). Pieces that do not fit into memory are halved. Default: all at once.

    Notes
    -----
    ``status`` is honoured as it is found, so that graphs can be left out from the start; a batch in which
    none is active is an error when it is first seen. Fixed atoms (``atom_categories``) never move.
    """

    __needs_keys__: ClassVar[frozenset[str]] = frozenset({"energy", "forces"})
    __provides_keys__: ClassVar[frozenset[str]] = frozenset({"positions", "velocities"})

    conserves_momentum: bool = True
    """Whether total momentum is conserved, which decides how degrees of freedom are counted (``dynamics.thermo``)."""

    _stage_type = DynamicsStage
    _unscheduled_stages = frozenset({DynamicsStage.ON_ADMISSION})

    def __init__(
        self,
        model: BaseModelMixin,
        hooks: Sequence[Hook] | None = None,
        convergence_hook: ConvergenceHook | None = None,
        n_steps: SupportsIndex | None = None,
        exit_status: int = 1,
        sampler: StructureFeed | None = None,
        sinks: DataSink | Sequence[DataSink] | None = None,
        *,
        auto_neighbors: bool = True,
        max_edges_per_eval: int | Cutter | Literal["auto"] | None = None,
    ) -> None:
        if isinstance(exit_status, bool) or not isinstance(exit_status, SupportsIndex) or exit_status < 1:
            raise ValueError(f"exit_status must be an int ≥ 1, got {exit_status!r}")
        self.model = model
        self.n_steps = _checked_steps(n_steps)
        super().__init__(exit_status, as_sinks(sinks), None if sampler is None else self.n_steps)
        self.auto_neighbors = auto_neighbors
        self.global_rank = 0
        self.convergence_hook: ConvergenceHook | None = None
        self.sampler: StructureFeed | None = sampler
        self._needs = self.needed_outputs
        self._session = ModelSession(model, self._needs)
        self._cutter = as_cutter(max_edges_per_eval)
        self._evaluate_pieces = PieceEvaluator(self._cutter, model)
        self._auto_hook: NeighborListHook | None = None

        self._batch: Batch | None = None
        self._left_at: dict[str, tuple[Tensor | None, int]] = {}
        self._saved: Mapping[str, Any] | None = None
        self._restart_file: RestartFile | None = None
        self._stop_requested = False
        self._this_run: tuple[int, int | None, StructureFeed | None] = (0, self.n_steps, None)

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

    # ------------------------------------------------------------------ for reports
    def observables(self, batch: Batch) -> dict[str, Tensor]:
        """What can be measured of each graph, by this engine's own rules; each ``[B]``, NaN where there is none.

        ``energy`` (eV), ``fmax`` (eV/Å), ``time`` (fs); with velocities ``temperature`` (K) and ``total_energy`` (eV);
        ``conserved_energy`` (eV) of integrators that have one; with a cell ``volume`` (Å³) and ``pressure`` (eV/Å³).
        """
        return observables.observables(self, batch)

    def targets(self) -> Mapping[str, float]:
        """Thresholds of the convergence criteria by their key, ``{"fmax": 0.05}``; empty without."""
        return observables.targets(self)

    def progress(self) -> Progress:
        """Steps made of those of this run; structures that came out of those of the sampler."""
        return observables.progress(self)

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
                self._enter(batch)
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
                store_outputs(batch, self._evaluate(batch))
            else:
                too_large = self._evaluate_pieces(self._evaluate, batch, self.active_graph_mask)
                if too_large:
                    self._give_up_too_large(batch, too_large)

    def _give_up_too_large(self, batch: Batch, graphs: Sequence[int]) -> None:
        """Retire graphs that do not fit into memory alone; an error where there is nothing else to do."""
        reasons = {
            graph: f"{batch.describe_graph(graph)} with {int(batch.num_nodes_per_graph[graph])} atoms does not fit "
            f"into the memory of {batch.device}"
            for graph in graphs
        }
        if len(graphs) == self._num_active and self.sampler is None:
            raise MemoryError("; ".join(reasons.values()))
        forget_outputs(batch, graphs)
        self.retire(batch, reasons)
        self._notice_status(batch)

    def _evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        outputs = self.model(batch)
        if not self._needs <= outputs.keys():
            raise ValueError(
                f"{type(self.model).__name__} declares {sorted(self._needs - outputs.keys())} and did not give it"
            )
        return outputs

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
        over = self._used_up(batch)
        if over is not None:
            batch.status.masked_fill_(
                (over & (batch.status[:, 0] < self.exit_status))[:, None], self.exit_status
            )
        if self._is_settled(batch):
            return
        graduated = self._running & (batch.status[:, 0] >= self.exit_status)
        if bool(graduated.any()):
            self._call_hooks_with(DynamicsStage.ON_GRADUATE, batch, graduated_mask=graduated)
        self._refresh_active(batch)
        self._deliver(batch)

    # ------------------------------------------------------------------ a run
    def run(
        self,
        batch: Batch | None = None,
        n_steps: SupportsIndex | None = None,
        *,
        restart: str | Path | None = None,
        save_every: int = 1000,
    ) -> Batch:
        """Run until the steps are used up or no graph is active.

        Parameters
        ----------
        batch : Batch, optional
            Changed in place. Passing again the object of the last run goes on where that ended. Without a batch,
            structures come from the sampler: those that are done leave to the sinks and others take their room,
            until every one has come out, or go on with what an earlier call left.
        n_steps : int, optional
            Steps at most; default the engine's own ``n_steps``, and no limit with structures from a sampler.
        restart : str or Path, optional
            File for the state of this run. Where it exists, this run goes on from it, to the bit as if it had
            not been interrupted: the same program started again does what is left, so ``n_steps`` counts the
            steps made before. One file serves all runs of one engine, and no other.
        save_every : int, default 1000
            Steps between saves of the state; it is also saved at the beginning and at the end of a run.

        Returns
        -------
        Batch
            The same object. Without ``batch``, the restored one, or what is left of the sampler's.

        Raises
        ------
        ValueError
            Before the first step: neither steps nor a convergence hook to end the run, a model that cannot
            give what is needed, a batch that cannot be run
            (:func:`nvalchemi.dynamics.admission.complete_batch`), a restart file that is damaged or belongs
            to another engine or other structures.
        """
        self._stop_requested = False
        if batch is not None and not isinstance(batch, Batch):
            raise TypeError(
                f"run() takes a Batch, got {type(batch).__name__}: Batch.from_data_list([…]) makes one"
            )
        if torch.is_inference_mode_enabled():
            raise RuntimeError("run() needs the versions of tensors, which torch.inference_mode() leaves out")
        file = self._open_restart_file(restart, save_every)
        feed = self.sampler if batch is None else None
        in_flight = feed is not None
        if batch is None and not in_flight and self._saved is None:
            raise ValueError("run() needs a batch, or an engine with a sampler")
        if in_flight:
            self._prepare_in_flight()
        if batch is None:
            batch = self._batch if self._saved is None else batch_from_state(self._saved["batch"])
        limit = _checked_steps(n_steps) if n_steps is not None or in_flight else self.n_steps
        if limit is None and not self.ends_by_itself:
            raise ValueError("run() needs n_steps or a convergence hook, or it would never end")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.global_rank = torch.distributed.get_rank()
        if file is not None and file.is_stopped and batch is not None:
            return batch
        if file is not None and file.run_is_over and batch is not None:
            # The program goes on in a later run, for which hooks stay as they were saved.
            with self._session:
                self._enter(batch)
            return batch
        self._this_run = (self.step_count, limit, feed)
        with self._hooks_opened(), sinks_closed_after(self.sinks), self._session:
            if batch is not None:
                self._enter(batch)
            if batch is None or (in_flight and self._num_active < batch.num_graphs):
                batch = self._exchange(batch)
            steps = 0 if file is None else file.steps_made(self)
            self._this_run = (self.step_count - steps, limit, feed)
            while self._num_active > 0 and (limit is None or steps < limit) and not self._stop_requested:
                self.step(batch)
                steps += 1
                if feed is not None and (
                    self._num_active < batch.num_graphs or feed.has_room_to_fill(batch.num_graphs)
                ):
                    batch = self._exchange(batch)
                if file is not None:
                    file.step_made(self, steps)
            if file is not None:
                file.end_run(self, steps)
                file.is_stopped = self._stop_requested
            set_clock(batch, self.elapsed_time(batch))
            inputs = self.model.model_config.required_inputs | self.model.model_config.optional_inputs
            self._left_at = {name: version(batch.get(name)) for name in (*_FORCES_DEPEND_ON, *inputs)}
        return batch

    def request_stop(self) -> None:
        """End the run behind the step being made; a state saved then goes on from there.

        May be called from a hook, a signal handler or another thread. An engine of a :class:`FusedStage` stops that.
        Between two runs there is nothing to stop, and the next one is made in full.

        With a restart file the rest of the program is stopped, too: later runs of this engine with that file log a
        warning and return at once, because the run that was stopped may have steps left that come before theirs. The
        program started again, or a new engine with the file, makes them all.
        """
        self._stop_requested = True
        if isinstance(self._whole, BaseDynamics):
            self._whole.request_stop()

    @property
    def ends_by_itself(self) -> bool:
        """Whether every graph stops at some time, without a limit to the run."""
        return self.convergence_hook is not None or self._steps_per_graph is not None

    def _open_restart_file(self, path: str | Path | None, every: int) -> RestartFile | None:
        if path is None:
            return None
        file = RestartFile(path, every)
        if self._restart_file is None or self._restart_file.path != file.path:
            self._restart_file = file
        self._restart_file.every = every
        self._restart_file.begin_run(self)
        return self._restart_file

    @property
    def parts(self) -> "Sequence[BaseDynamics]":
        """The engine itself; engines made of engines name those."""
        return (self,)

    # ------------------------------------------------------------------ state
    @property
    def restart_hooks(self) -> Sequence[Hook]:
        """Hooks whose state is saved; engines made of engines add those of their parts."""
        return self.hooks

    @property
    def restart_parts(self) -> Mapping[str, Stateful]:
        """What else has a state that is saved, by name: a sampler's position, what sinks have taken."""
        parts: dict[str, Stateful] = {} if self.sampler is None else {"sampler": self.sampler}
        if self._cutter == "auto":
            parts["pieces"] = self._evaluate_pieces
        return parts | {f"sink {i}": sink for i, sink in enumerate(self.sinks) if isinstance(sink, Stateful)}

    def state_dict(self) -> dict[str, Any]:
        """Snapshot of all that decides how the run goes on (:mod:`nvalchemi.dynamics.state`).

        Numbers, words, tensors, and lists and dictionaries of them, which share no memory with the batch. To
        be taken between two steps.
        """
        return engine_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a snapshot of an engine of the same class, made with the same parameters and hooks.

        The structures come with it: the next :meth:`run` or :meth:`step` puts them into the batch it is given,
        which must be of the same atoms, and goes on. ``run()`` without a batch makes one.

        Raises
        ------
        ValueError
            The snapshot is of another class of engine.

        Warns
        -----
        UserWarning
            Parameters differ, which those of this engine win, or a hook with a saved state is missing.
        """
        load_engine_state(self, state)

    def __add__(self, other: "BaseDynamics") -> "FusedStage":
        """Fuse with an engine that follows, for each structure at its own pace: :class:`FusedStage`."""
        from nvalchemi.dynamics.fused import FusedStage

        return FusedStage([self, other])

    def __or__(self, other: "BaseDynamics") -> "DistributedPipeline":
        """Join with an engine that follows on the next process: :class:`DistributedPipeline`."""
        from nvalchemi.dynamics.pipeline import DistributedPipeline

        return DistributedPipeline([self, other])

    def __enter__(self) -> Self:
        self._opened = self._hooks_opened()
        self._opened.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._opened.__exit__(*exc)

    # ------------------------------------------------------------------ admission
    def _enter(self, batch: Batch) -> None:
        """Admit a new batch; take up a known one where it was left, with fresh forces if somebody changed it."""
        if self._saved is not None:
            resume(self, batch)
        elif batch is not self._batch:
            self._admit(batch)
        else:
            self._refresh_active(batch)
            self._undelivered = self._running
        if not self._is_as_left(batch):
            for hook in self.hooks:
                if isinstance(hook, NeighborListHook):
                    hook.accept_edits()
            self.prepare(batch, torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device))
            self._prime(batch)
        self._left_at = {}

    def _is_as_left(self, batch: Batch) -> bool:
        """Whether nobody has touched, since the last run, what forces depend on."""
        return all(unchanged(batch.get(name), seen) for name, seen in self._left_at.items())

    def _exchange(self, batch: Batch | None) -> Batch:
        """Leave out the graphs that have stopped and admit others in their room, as long as any stops or enters."""
        if self.sampler is None:
            raise ValueError("only an engine with a sampler can exchange graphs")
        while True:
            staying = None if batch is None else batch.index_select(self._running)
            batch, admitted = refill(self, self.sampler, staying)
            if batch.num_graphs == 0:
                self._batch = batch
                self._refresh_active(batch)
                return batch
            self._admit(batch, admitted)
            if self._steps_per_graph == 0:
                self._graduate(batch)
            if self._num_active == batch.num_graphs:
                return batch

    def feed_from(self, sampler: StructureFeed) -> None:
        """Take structures from ``sampler`` when :meth:`run` is called without a batch."""
        self.sampler = sampler
        self._steps_per_graph = self.n_steps

    def _prepare_in_flight(self) -> None:
        """Refuse what cannot work with graphs that come and go, and see to it that failed ones are noticed."""
        from nvalchemi.dynamics.hooks import NaNDetectorHook, SafetyHook

        check_parameters(self.parts)
        warn_of_lost_structures(self)
        if not any(isinstance(hook, NaNDetectorHook | SafetyHook) for hook in self.restart_hooks):
            self.register_hook(SafetyHook())

    def _admit(self, batch: Batch, admitted: Tensor | None = None) -> None:
        """Complete a batch, show new graphs to the hooks at ``ON_ADMISSION``, and compute their first forces.

        Parameters
        ----------
        batch : Batch
            A batch that the engine has not seen yet.
        admitted : Tensor, bool [B], optional
            Graphs that are new, where others are known and only their batch is another one; default all.
        """
        self._session.check()
        complete_batch(batch, self.model.model_config)
        add_clock(batch)
        release_atoms(batch, admitted)
        self._batch = None
        self._add_neighbor_hook()
        self._refresh_active(batch)
        self._undelivered = self._running
        if self._num_active == 0:
            raise ValueError(
                f"no graph of the batch is active: status must be 0 ≤ status < {self.exit_status} and is "
                f"{batch.status[:, 0].unique().tolist()}; set batch.status to 0 to run structures that another "
                "engine finished"
            )
        new = torch.ones_like(self._running) if admitted is None else admitted
        self._mark_entry(batch, new)
        if bool(new.any()):
            self._call_hooks_with(DynamicsStage.ON_ADMISSION, batch, admitted_mask=new)
        self.prepare(batch, new)
        self._prime(batch, admitted)
        self._batch, self._left_at = batch, {}
        self._deliver(batch)

    def _mark_entry(self, batch: Batch, admitted: Tensor) -> None:
        """Remember where graphs begin to make the steps that each of them may make."""
        if self._steps_per_graph is not None:
            mark_entry(batch, admitted)

    def _prime(self, batch: Batch, only: Tensor | None = None) -> None:
        """First forces, complete with what hooks that belong to the evaluation contribute.

        With ``only`` (bool ``[B]``), of these graphs; model and hooks see no others as active meanwhile.
        """
        if only is None:
            self._evaluate_first(batch)
            return
        self._considered = only
        self._refresh_active(batch)
        try:
            if self._num_active > 0:
                self._evaluate_first(batch)
        finally:
            self._considered = None
            self._refresh_active(batch)

    def _evaluate_first(self, batch: Batch) -> None:
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
        lists = [hook.config for hook in self._hooks if isinstance(hook, NeighborListHook)]
        if config is None or any(config.is_served_by(other) for other in lists):
            return
        if lists:
            raise ValueError(
                f"no NeighborListHook makes the list that {type(self.model).__name__} needs ({config!r}); there is "
                f"{', '.join(map(repr, lists))}: use NeighborListHook(model.model_config.neighbor_config, skin=…)"
            )
        if not self.auto_neighbors:
            return
        skin = config.skin if "skin" in config.model_fields_set else DEFAULT_SKIN
        self._auto_hook = NeighborListHook(config, skin=skin)
        self._auto_hook.gives_way = True
        self.register_hook(self._auto_hook)

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

    def __repr__(self) -> str:
        model, hooks = type(self.model).__name__, self._hooks_summary()
        return f"{type(self).__name__}(model={model}, step {self.step_count}, hooks={hooks})"


def _checked_steps(n_steps: SupportsIndex | None) -> int | None:
    if n_steps is None:
        return None
    if isinstance(n_steps, bool) or not isinstance(n_steps, SupportsIndex) or int(n_steps) < 0:
        raise ValueError(f"n_steps must be an int ≥ 0, got {n_steps!r}")
    return int(n_steps)
