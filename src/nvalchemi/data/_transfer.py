"""A batch as one block of memory: what crosses from a worker process to its parent costs per tensor, not per byte."""

import pickle
from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi.data.batch import Batch

# Every type of tensor may begin at a multiple of this.
_ALIGNMENT = 16
_PTR, _EDGE_PTR = "_ptr", "_edge_ptr"


class PackedBatch(NamedTuple):
    """All tensors of a batch in one block, and how to take it apart; a tuple, so that torch can pin the block."""

    block: Tensor
    layout: bytes


def pack(batch: Batch) -> PackedBatch:
    """Copy the tensors of a batch in host memory into one block."""
    edges = {_EDGE_PTR: batch.edge_ptr} if "edge" in map(batch.level, batch.keys()) else {}
    tensors = {_PTR: batch.batch_ptr, **edges, **dict(batch.items())}
    places: dict[str, tuple[torch.dtype, torch.Size, int, int]] = {}
    stop = 0
    for name, tensor in tensors.items():
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + tensor.numel() * tensor.element_size()
        places[name] = (tensor.dtype, tensor.shape, start, stop)
    block = torch.empty(stop, dtype=torch.uint8)
    for name, tensor in tensors.items():
        _, _, start, stop = places[name]
        block[start:stop] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    levels = {name: batch.level(name) for name in batch.keys()}
    return PackedBatch(block, pickle.dumps((places, levels, batch._scalars, batch.info)))


def unpack(packed: PackedBatch) -> Batch:
    """The batch again; its tensors are views of the block."""
    places, levels, scalars, info = pickle.loads(packed.layout)
    tensors = {
        name: packed.block[start:stop].view(dtype).reshape(shape)
        for name, (dtype, shape, start, stop) in places.items()
    }
    ptr, edge_ptr = tensors.pop(_PTR), tensors.pop(_EDGE_PTR, None)
    return Batch._make(ptr, edge_ptr, levels, tensors, scalars, info)
