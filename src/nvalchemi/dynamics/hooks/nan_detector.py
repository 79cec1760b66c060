"""Stop at values that are not finite."""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.base import FAILED
from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.segments import max_per_graph
from nvalchemi.hooks import DynamicsContext, HookContext
from nvalchemi.hooks.protocols import IsolatingWorkflow

logger = logging.getLogger(__name__)


class NaNDetectorHook:
    """Look for NaN and infinity in energy, forces and other fields of active structures.

    Two atoms at the same place, a time step that is too long or a model far outside its training data end
    here, before the integrator moves anything with such forces.

    Parameters
    ----------
    frequency : int, default 1
        Look every so many steps.
    extra_keys : sequence of str, optional
        Further fields per atom or per structure.
    action : {"raise", "warn", "quarantine"}, default "raise"
        ``"raise"``: ``RuntimeError``. ``"warn"``: a ``UserWarning`` for each structure once.
        ``"quarantine"``: the structure gets the status ``FAILED``, stops at once and is logged as a warning;
        the others go on undisturbed.
    stage : Enum, optional
        Default ``AFTER_COMPUTE``.

    Raises
    ------
    RuntimeError
        With step, field, graph indices and system ids (``action="raise"``).
    """

    default_stages = ("AFTER_COMPUTE",)
    part_of_evaluation = True
    order_role = "check"

    def __init__(
        self,
        frequency: int = 1,
        extra_keys: Sequence[str] | None = None,
        action: Literal["raise", "warn", "quarantine"] = "raise",
        stage: Enum | None = None,
    ) -> None:
        if action not in ("raise", "warn", "quarantine"):
            raise ValueError(f"action must be 'raise', 'warn' or 'quarantine', got {action!r}")
        self.frequency = frequency
        self.keys = ("energy", "forces", *(extra_keys or ()))
        self.action = action
        self.stage = stage
        self._warned: set[int] = set()

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Check the batch."""
        dynamics, batch = dynamics_context(self, ctx)
        fields: list[Tensor] = [batch[key] for key in self.keys]
        # One sum over all finds NaN and infinity, and the host waits once; where it overflows without them the close
        # look finds nothing.
        total = fields[0].sum()
        for values in fields[1:]:
            total = total + values.sum()
        if not math.isfinite(total.item()):
            for key, values in zip(self.keys, fields, strict=True):
                self._look_closely(batch, key, values, dynamics)

    def state_dict(self) -> dict[str, Any]:
        """Which structures were warned of."""
        return {"warned": sorted(self._warned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state, so that a resumed run does not warn again."""
        self._warned = set(state["warned"])

    def _look_closely(self, batch: Batch, key: str, values: Tensor, ctx: DynamicsContext) -> None:
        active, step, workflow = ctx.active_graph_mask, ctx.step_count, ctx.workflow
        rows = ~values.reshape(values.shape[0], -1).isfinite().all(1)
        bad = rows if batch.level(key) == "system" else max_per_graph(rows.double(), batch.batch_ptr) > 0
        if active is not None:
            bad = bad & active
        graphs: list[int] = bad.nonzero()[:, 0].tolist()
        if not graphs:
            return
        ids: list[int] = batch.system_id[bad, 0].tolist()
        message = f"step {step}: {key} is not finite in graphs {graphs} (system_id {ids})"
        if self.action == "raise":
            raise RuntimeError(message)
        if self.action == "warn":
            if not self._warned.issuperset(ids):
                self._warned.update(ids)
                warnings.warn(message, UserWarning, stacklevel=2)
            return
        reasons = dict.fromkeys(graphs, f"step {step}: {key} is not finite")
        if isinstance(workflow, IsolatingWorkflow):
            workflow.retire(batch, reasons)
        else:
            batch.status.masked_fill_(bad.unsqueeze(-1), FAILED)
            logger.warning("%s; given up", message)
