"""Physical time of each structure, over engines with different time steps and such that have none.

The time is known at one step of a structure, the ``clock_step``, and counted from there on. It is set when a structure
leaves an engine: at the end of a run, and where a fused stage hands it over.
"""

import torch
from torch import Tensor

from nvalchemi.data import Batch, Field, register_field

CLOCK_STEP = register_field(
    Field(
        "clock_step", "system", (1,), "int", "", "system_step at which clock_time was the time",
        neutral=0, persistent=False,
    )
)  # fmt: skip
CLOCK_TIME = register_field(
    Field("clock_time", "system", (1,), "float", "fs", "time at clock_step", neutral=0, persistent=False)
)


def time_since_start(batch: Batch, dt: Tensor) -> Tensor:
    """Time of each graph in an engine with time step ``dt`` (fs, ``[B]``), fs, ``[B]``."""
    steps = batch.system_step[:, 0]
    if CLOCK_STEP.name not in batch:
        return steps * dt
    return batch.clock_time[:, 0] + (steps - batch.clock_step[:, 0]) * dt


def add_clock(batch: Batch) -> None:
    """Add the fields where they are absent: at step 0 the time was 0."""
    if CLOCK_STEP.name not in batch:
        batch.clock_step = torch.zeros_like(batch.system_step)
        batch.clock_time = batch.positions.new_zeros(batch.num_graphs, 1)


def set_clock(batch: Batch, time: Tensor) -> None:
    """Note the time of each graph, fs, ``[B]``; NaN: it stood still since it was noted last."""
    if CLOCK_STEP.name not in batch:
        return  # what is left of a run in which nothing could be admitted
    time = time[:, None].to(batch.clock_time.dtype)
    batch.clock_time.copy_(torch.where(time.isnan(), batch.clock_time, time))
    batch.clock_step.copy_(batch.system_step)
