"""Which graphs of a batch are being advanced: the masks that follow from ``status``, and graphs that stop."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.admission import FAILED
from nvalchemi.dynamics.sinks import DataSink, deliver
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.thermo import free_atom_mask
from nvalchemi.hooks import Hook, HookRegistryMixin
from nvalchemi.hooks.protocols import FailureHook

logger = logging.getLogger(__name__)


class ActiveGraphs(HookRegistryMixin):
    """What an engine knows of the graphs in its batch: who runs, who has stopped, who has been delivered.

    Parameters
    ----------
    exit_status : int
        Graphs with 0 ≤ ``status`` < ``exit_status`` are active.
    sinks : tuple of DataSink
        Where graphs go that stop.
    steps_per_graph : int, optional
        Steps that each graph may make, counted from ``stage_entry_step``; default any number.
    """

    def __init__(self, exit_status: int, sinks: tuple[DataSink, ...], steps_per_graph: int | None) -> None:
        self.exit_status = exit_status
        self.sinks = sinks
        self.step_count = 0
        self._steps_per_graph = steps_per_graph
        self.failures: dict[int, str] = {}
        """Why structures were given up, by ``system_id``."""
        self._num_active = 0
        self.active_graph_mask: Tensor | None = None
        """Graphs being advanced, bool ``[B]``; ``None`` while all are."""
        self.active_atom_mask: Tensor | None = None
        """Atoms that may move (free atoms of active graphs), bool ``[N, 1]``; ``None`` while all may."""
        self._running = torch.empty(0, dtype=torch.bool)
        self._status_seen: tuple[Tensor | None, int] = (None, -1)
        self._status_settled: tuple[Tensor | None, int] = (None, -1)
        self._masks: dict[str, Tensor] = {}
        self._considered: Tensor | None = None
        self._whole: ActiveGraphs | None = None
        self._undelivered = torch.empty(0, dtype=torch.bool)
        self._next_expiry = 0

    def _refresh_active(self, batch: Batch) -> None:
        """Derive the masks from ``batch.status``: the only place where the host waits for it."""
        status: Tensor = batch.status[:, 0]
        active = (status >= 0) & (status < self.exit_status)
        if self._considered is not None:
            active = active & self._considered
        self._activate(batch, active)
        self._status_seen = self._status_settled = version(batch.status)

    def _activate(self, batch: Batch, active: Tensor) -> None:
        """Advance the graphs marked, bool ``[B]``, from now on."""
        self._num_active = int(active.sum())
        self.active_graph_mask = None if self._num_active == batch.num_graphs else active
        free = free_atom_mask(batch)
        moving = None if self.active_graph_mask is None else active[batch.batch_idx]
        if free is not None and not bool(free.all()):
            moving = free if moving is None else moving & free
        self.active_atom_mask = None if moving is None else moving.unsqueeze(-1)
        self._running = active
        self._next_expiry = self.step_count

    def refresh_masks(self, batch: Batch) -> None:
        """Have what a hook wrote into ``status`` or ``frozen_atoms`` take effect at once, before the step is over."""
        if self._whole is not None:
            self._whole.refresh_masks(batch)
            return
        running, settled = self._running, self._status_settled
        self._refresh_active(batch)
        self._running, self._status_settled = running, settled

    def _notice_status(self, batch: Batch) -> None:
        """Let a status that a hook moved take effect: a graph given up after compute is not updated any more."""
        if self._status_seen[0] is not None and not unchanged(batch.status, self._status_seen):
            self.refresh_masks(batch)

    def _is_settled(self, batch: Batch) -> bool:
        """Whether every change of status has been acted upon."""
        return unchanged(batch.status, self._status_settled)

    # ------------------------------------------------------------------ graphs that stop
    def _used_up(self, batch: Batch) -> Tensor | None:
        """Running graphs that have made the steps each may make, bool ``[B]``; ``None`` when there are none."""
        if self._steps_per_graph is None or self.step_count < self._next_expiry:
            return None
        left = self._steps_per_graph - (batch.system_step - batch.stage_entry_step)[:, 0]
        over = self._running & (left <= 0) & (batch.status[:, 0] >= 0)
        others = left[self._running & (left > 0)]
        # The next look is due when the first of the others may be at its end.
        self._next_expiry = self.step_count + (int(others.min()) if others.numel() > 0 else 1)
        return over if bool(over.any()) else None

    def retire(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """Give up structures: they stop at once with the status ``FAILED``, the others go on undisturbed.

        Parameters
        ----------
        batch : Batch
            The batch.
        reasons : mapping of int to str
            Number of the graph in the batch → why. Kept in :attr:`failures`, in ``batch.info[i]["failure"]`` (and so
            in sinks and files), and logged as a warning.
        """
        new = {graph: reason for graph, reason in reasons.items() if int(batch.status[graph]) >= 0}
        for graph, reason in new.items():
            batch.status[graph] = FAILED
            batch.info[graph] = {**batch.info[graph], "failure": reason}
            self.failures[int(batch.system_id[graph])] = reason
            logger.warning("%s given up: %s", batch.describe_graph(graph), reason)
        whole = () if self._whole is None else self._whole.hooks
        for hook in (*self.hooks, *whole) if new else ():
            if isinstance(hook, FailureHook):
                hook.on_failure(batch, new)

    def _deliver(self, batch: Batch) -> None:
        """Write the graphs that stopped since the last time, done or failed, to the sinks."""
        if not self.sinks:
            return
        stopped = self._undelivered & ~self._running
        if bool(stopped.any()):
            deliver(self.sinks, batch, stopped)
            self._undelivered = self._undelivered & ~stopped

    # ------------------------------------------------------------------ hooks
    def _call_hooks_with(self, stage: DynamicsStage, batch: Batch, **masks: Tensor) -> None:
        """Call the hooks of ``stage`` with a mask that exists only there."""
        self._masks = masks
        try:
            self._call_hooks(stage, batch)
        finally:
            self._masks = {}

    def _dispatch(self, hooks: Iterable[Hook], stage: Any, batch: Batch | None) -> None:
        super()._dispatch(hooks, stage, batch)
        if batch is not None:
            self._notice_status(batch)


def version(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """Object and version: the same again as long as nobody replaced the tensor or wrote into it."""
    return tensor, -1 if tensor is None else tensor._version


def unchanged(tensor: Tensor | None, seen: tuple[Tensor | None, int]) -> bool:
    """Whether that is still the case."""
    return tensor is seen[0] and (tensor is None or tensor._version == seen[1])
