"""Small sums over the processes of a distributed run; alone, they return what they got."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if distributed() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if distributed() else 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum of a tensor over all processes."""
    if distributed():
        values = values.clone()
        dist.all_reduce(values)
    return values


def mean_over_ranks(value: float, device: torch.device) -> float:
    """Mean of a number over all processes."""
    if not distributed():
        return value
    return float(sum_over_ranks(torch.tensor(value, dtype=torch.float64, device=device))) / world_size()


def gather(own: Any) -> list[Any]:
    """What every process has, in the order of their ranks."""
    if not distributed():
        return [own]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def barrier() -> None:
    """Wait for all processes."""
    if distributed():
        dist.barrier()


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, without a wrapper that synchronises gradients."""
    return model.module if isinstance(model, DistributedDataParallel) else model
