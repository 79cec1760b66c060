"""The state of an engine as numbers, words and tensors: all that decides how a run goes on.

========================= ===========================================================================
saved                     where it is
========================= ===========================================================================
positions … all fields    the batch; state of integrators, minimisers and monitors is fields, too
neighbour lists           fields as well: in another order of pairs, sums would round differently
counters                  ``system_step`` of each structure, ``step_count`` of the engine
random numbers            nothing to save: they follow from seed, structure, step and atom
hooks                     those with ``state_dict`` (:class:`~nvalchemi.hooks.CheckpointableHook`)
sampler, sinks            engines name what else has a state in ``restart_parts``
========================= ===========================================================================

Not saved is what the program says again when it is started again: model, parameters, hooks.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.hooks.protocols import CheckpointableHook, Hook, ResumableHook

if TYPE_CHECKING:
    from nvalchemi.dynamics.base import BaseDynamics

_NOT_PARAMETERS = frozenset({"step_count", "n_steps", "global_rank"})


@runtime_checkable
class Stateful(Protocol):
    """A sampler, a sink or whatever else has a state that a restart must bring back."""

    def state_dict(self) -> Mapping[str, Any]:
        """State as numbers, words, tensors, and lists and dictionaries of them."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave."""
        ...


# ---------------------------------------------------------------------- engine
def engine_state(engine: "BaseDynamics") -> dict[str, Any]:
    """Snapshot of an engine between two steps; see :meth:`BaseDynamics.state_dict`."""
    if engine._saved is not None:
        return dict(engine._saved)
    batch = engine._batch
    return {
        "engine": type(engine).__name__,
        "parameters": engine_parameters(engine),
        "step_count": engine.step_count,
        "failures": dict(engine.failures),
        "batch": None if batch is None else batch_state(batch),
        "forces_are_current": batch is None or engine._is_as_left(batch),
        "hooks": [
            [type(hook).__name__, dict(hook.state_dict())]
            for hook in engine.restart_hooks
            if isinstance(hook, CheckpointableHook)
        ],
        "parts": {name: dict(part.state_dict()) for name, part in engine.restart_parts.items()},
    }


def load_engine_state(engine: "BaseDynamics", state: Mapping[str, Any]) -> None:
    """Take up a snapshot; see :meth:`BaseDynamics.load_state_dict`."""
    kind = type(engine).__name__
    if state["engine"] != kind:
        raise ValueError(f"the saved state is of a {state['engine']}, it cannot be taken up by a {kind}")
    _compare_parameters(state["parameters"], engine_parameters(engine))
    parts = engine.restart_parts
    if set(parts) != set(state["parts"]):
        raise ValueError(
            f"the saved {kind} had the parts {sorted(state['parts'])}, this one has {sorted(parts)}"
        )
    engine._add_neighbor_hook()
    _load_hooks(engine.restart_hooks, state["hooks"])
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    engine.step_count = state["step_count"]
    engine.failures = dict(state["failures"])
    engine._batch = None
    engine._saved = state if state["batch"] is not None else None


def resume(engine: "BaseDynamics", batch: Batch) -> None:
    """Put the saved structures into ``batch`` and stand where the saved engine stood: no new forces, no admission."""
    saved = engine._saved
    assert saved is not None
    restore_batch(batch, saved["batch"])
    engine._refresh_active(batch)
    engine.prepare(batch, torch.zeros(batch.num_graphs, dtype=torch.bool, device=batch.device))
    ctx = engine._build_context(batch)
    for hook in engine.restart_hooks:
        if isinstance(hook, ResumableHook):
            hook.on_resume(ctx)
    engine._batch, engine._saved = batch, None
    engine._undelivered = engine._running
    engine._left_at = {} if saved["forces_are_current"] else {"positions": (None, -1)}


def engine_parameters(engine: "BaseDynamics") -> dict[str, Any]:
    """Numbers and words an engine was made with, that is its public attributes, and the kind of its model."""
    found: dict[str, Any] = {"model": type(engine.model).__name__}
    for i, part in enumerate(engine.parts):
        _add_parameters(found, vars(part), "" if part is engine else f"stage {i}: ")
    return found


def _add_parameters(found: dict[str, Any], attributes: Mapping[str, Any], prefix: str) -> None:
    from nvalchemi.dynamics.optimizers.coordinates import Coordinates
    from nvalchemi.dynamics.pressure import AppliedPressure

    for name, value in attributes.items():
        if name.startswith("_") or name in _NOT_PARAMETERS:
            continue
        if isinstance(value, Coordinates):
            _add_parameters(found, vars(value), f"{prefix}{name}.")
        elif isinstance(value, GraphParameter | AppliedPressure):
            given = value.value
            found[prefix + name] = (
                given.tolist() if isinstance(given, Tensor) else "schedule" if callable(given) else given
            )
        elif isinstance(value, bool | int | float | str):
            found[prefix + name] = value


def _compare_parameters(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    names = [name for name in saved.keys() | mine.keys() if saved.get(name) != mine.get(name)]
    if names:
        changes = ", ".join(f"{name} {mine.get(name)} (was {saved.get(name)})" for name in sorted(names))
        warnings.warn(
            f"the run goes on with other parameters than it was saved with: {changes}", UserWarning, 4
        )


def _load_hooks(hooks: Sequence[Hook], saved: Sequence[Sequence[Any]]) -> None:
    """Give each hook the state of the hook of the same class, first to first, second to second."""
    waiting: defaultdict[str, list[Any]] = defaultdict(list)
    for name, state in saved:
        waiting[name].append(state)
    for hook in hooks:
        states = waiting[type(hook).__name__]
        if isinstance(hook, CheckpointableHook) and states:
            hook.load_state_dict(states.pop(0))
    lost = [name for name, states in waiting.items() for _ in states]
    if lost:
        warnings.warn(f"the saved run had hooks that this one lacks: {', '.join(lost)}", UserWarning, 4)


# ---------------------------------------------------------------------- batch
def batch_state(batch: Batch) -> dict[str, Any]:
    """Snapshot of a batch: every field with its level, and what it is made of; independent of its memory."""
    from nvalchemi.data.zarr.stores import encode_info

    return {
        "device": str(batch.device),
        "batch_ptr": batch.batch_ptr.clone(),
        "edge_ptr": None if batch._edge_ptr is None else batch._edge_ptr.clone(),
        "fields": {
            name: {"level": batch.level(name), **_pack(tensor.detach())} for name, tensor in batch.items()
        },
        "scalars": sorted(batch._scalars),
        "info": [encode_info(info).decode() for info in batch.info],
    }


def batch_from_state(state: Mapping[str, Any], device: torch.device | str | None = None) -> Batch:
    """Batch with the fields, the dtypes and the memory layout of the one saved, on its device unless told another."""
    from nvalchemi.data.zarr.stores import decode_info

    where = torch.device(state["device"] if device is None else device)
    edge_ptr: Tensor | None = state["edge_ptr"]
    fields: Mapping[str, Mapping[str, Any]] = state["fields"]
    return Batch._make(
        state["batch_ptr"].to(where, copy=True),
        None if edge_ptr is None else edge_ptr.to(where, copy=True),
        {name: field["level"] for name, field in fields.items()},
        {name: _unpack(field, where) for name, field in fields.items()},
        frozenset(state["scalars"]),
        [decode_info(text.encode()) for text in state["info"]],
    )


def restore_batch(batch: Batch, state: Mapping[str, Any]) -> None:
    """Replace all fields of ``batch`` by those saved; ``ValueError`` unless it is of the same structures."""
    saved = batch_from_state(state, batch.device)
    same = torch.equal(saved.batch_ptr, batch.batch_ptr) and torch.equal(
        saved.atomic_numbers, batch.atomic_numbers
    )
    if not same:
        raise ValueError(
            f"the saved state is of other structures: {saved._describe()}, and the batch given is a "
            f"{batch._describe()}" + (" of other elements" if saved.num_nodes == batch.num_nodes else "")
        )
    vars(batch).clear()
    vars(batch).update(vars(saved))


def _pack(tensor: Tensor) -> dict[str, Any]:
    """Contiguous copy, in the smallest integer type, with what is needed to undo that."""
    packed: dict[str, Any] = {}
    if not tensor.is_contiguous():
        # Kernels add up in the order of memory, and tables of shifts are stored transposed.
        packed["order"] = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        tensor = tensor.permute(packed["order"])
    if tensor.numel() > 0 and not tensor.is_floating_point() and tensor.dtype in (torch.int64, torch.int32):
        low, high = (int(bound) for bound in tensor.aminmax())
        for smaller in (torch.int8, torch.int32):
            limits = torch.iinfo(smaller)
            if limits.min <= low and high <= limits.max and tensor.dtype != smaller:
                packed["dtype"] = tensor.dtype
                tensor = tensor.to(smaller)
                break
    packed["values"] = tensor.clone(memory_format=torch.contiguous_format)
    return packed


def _unpack(packed: Mapping[str, Any], device: torch.device) -> Tensor:
    tensor: Tensor = packed["values"].to(device, packed.get("dtype"), copy=True)
    if "order" in packed:
        tensor = tensor.permute([packed["order"].index(axis) for axis in range(tensor.ndim)])
    return tensor
