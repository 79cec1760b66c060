"""Where structures go: files that take one snapshot after another, and sinks for what is done.

============================ =======================================================
:class:`ExtxyzTrajectory`    one extended-xyz file, for snapshots
:class:`HostMemory`          memory of the host
:class:`GPUBuffer`           memory of fixed size on the device
:class:`ZarrData`            a Zarr store
============================ =======================================================
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TextIO, runtime_checkable

import torch
from torch import Tensor

from nvalchemi.data import FIELDS, Batch
from nvalchemi.data._fixed import FixedBatch
from nvalchemi.dynamics.restart import cut_back, position_to_resume
from nvalchemi.dynamics.state import batch_from_state, batch_state

if TYPE_CHECKING:
    from nvalchemi.data.zarr import AtomicDataZarrReader, AtomicDataZarrWriter


@runtime_checkable
class SnapshotSink(Protocol):
    """What :class:`~nvalchemi.dynamics.hooks.SnapshotHook` writes to."""

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Store the structures of ``batch``, or those where the boolean ``mask`` (shape ``[B]``) is true."""
        ...

    def close(self) -> None:
        """Finish what is being written. A later :meth:`write` goes on where this one ended."""
        ...


class ExtxyzTrajectory:
    """Trajectory of any number of structures in one extended-xyz file, which ASE, OVITO and others read.

    Every frame says whose it is and when: ``system_id`` and ``system_step`` (steps that this structure has
    made) stand in its comment line, next to the ``info`` that the structure came with. The file is flushed
    after every write, so a killed run loses at most the frame being written. A restart removes the frames that
    were written since the state was saved, as they will be written again.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are made. Nothing is touched before the first write.
    append : bool, default False
        Go on behind the frames of an existing file instead of replacing it.

    Examples
    --------
    >>> from nvalchemi.dynamics.hooks import SnapshotHook
    >>> hook = SnapshotHook(ExtxyzTrajectory("argon.extxyz"), frequency=100)
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self._append = append
        self._file: TextIO | None = None
        self._resume_at: int | None = None

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Append one frame for each structure, or for each where ``mask`` is true."""
        from ase.io.extxyz import write_extxyz

        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._resume_at is not None:
                cut_back(self.path, self._resume_at)
                self._resume_at = None
            self._file = self.path.open("a" if self._append else "w", encoding="utf-8")
            self._append = True
        chosen = batch if mask is None else batch[mask]
        write_extxyz(self._file, [data.to_atoms() for data in chosen.to_data_list()])
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later :meth:`write` appends to it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Where the file ends; what is there is on the disk then."""
        if self._resume_at is not None:
            return {"position": self._resume_at}
        return {"position": position_to_resume(self.path, keep=self._append)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a trajectory: later frames are removed before the next one is written."""
        self.close()
        self._append, self._resume_at = True, state["position"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@runtime_checkable
class DataSink(Protocol):
    """Where structures go that are done: engines (``sinks=``) and snapshot hooks write to it.

    Attributes
    ----------
    capacity : int or None
        Number of structures it can hold; ``None``: any number.
    """

    capacity: int | None

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing more."""
        ...

    def __len__(self) -> int:
        """Number of structures it holds."""
        ...

    def fits(self, batch: Batch, mask: Tensor | None = None) -> Tensor:
        """Which of the structures (of those where ``mask`` is true), in order, there is room for: bool ``[B]``."""
        ...

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Store a copy of the structures, or of those where the boolean ``mask`` (shape ``[B]``) is true.

        Raises
        ------
        RuntimeError
            There is no room for all of them; then none is stored.
        """
        ...

    def read(self) -> Batch:
        """All structures, in the order written; they stay. ``ValueError`` when there are none.

        Fields that only some of them have are filled as in ``Batch.from_data_list(..., missing="fill")``.
        """
        ...

    def drain(self) -> Batch:
        """All structures, in the order written; the sink is empty afterwards."""
        ...

    def zero(self) -> None:
        """Remove all structures."""
        ...

    def close(self) -> None:
        """Make what was written durable. A later :meth:`write` goes on behind it."""
        ...


class HostMemory:
    """Structures in the memory of the host.

    Parameters
    ----------
    capacity : int, optional
        Number of structures it takes; default any number.
    order : {"arrival", "system_id"}, default "arrival"
        Order in which they are read. Structures of a run with a sampler are done in any order; ``"system_id"`` gives
        them back in that of the data set (several frames of one structure stay as they were written).

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.data import AtomicData
    >>> sink = HostMemory()
    >>> sink.write(
    ...     Batch.from_data_list([AtomicData(positions=torch.zeros(1, 3), atomic_numbers=torch.tensor([18]))])
    ... )
    >>> len(sink), sink.drain().num_nodes, len(sink)
    (1, 1, 0)
    """

    def __init__(self, capacity: int | None = None, *, order: str = "arrival") -> None:
        if order not in ("arrival", "system_id"):
            raise ValueError(f"order must be 'arrival' or 'system_id', got {order!r}")
        self.capacity, self.order = _checked_capacity(capacity), order
        self._parts: list[Batch] = []

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing more."""
        return self.capacity is not None and len(self) >= self.capacity

    def __len__(self) -> int:
        return sum(part.num_graphs for part in self._parts)

    def fits(self, batch: Batch, mask: Tensor | None = None) -> Tensor:
        """As many, in order, as the capacity leaves room for."""
        return _first(batch, mask, None if self.capacity is None else self.capacity - len(self))

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Keep a copy on the host."""
        chosen = _all_that_fit(self, batch, mask)
        if chosen.num_graphs > 0:
            self._parts.append(chosen.cpu())

    def read(self) -> Batch:
        """All structures as one batch, in the ``order`` chosen."""
        if not self._parts:
            raise ValueError("the sink is empty")
        batch = Batch.from_data_list(self._parts, missing="fill")
        if self.order == "arrival":
            return batch
        if "system_id" not in batch:
            raise ValueError("structures without system_id cannot be put into the order of their system_id")
        return batch.index_select(torch.argsort(batch.system_id[:, 0], stable=True))

    def drain(self) -> Batch:
        """All structures as one batch; they are forgotten here."""
        batch = self.read()
        self.zero()
        return batch

    def zero(self) -> None:
        """Forget all structures."""
        self._parts = []

    def close(self) -> None:
        """Nothing to do: memory is as durable as the process."""

    def state_dict(self) -> dict[str, Any]:
        """The structures."""
        return {"parts": [batch_state(part) for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the structures of a saved state instead of those now held."""
        self._parts = [batch_from_state(part) for part in state["parts"]]


class GPUBuffer:
    """Structures in memory of fixed size on the device of the run, allocated with the first write.

    Parameters
    ----------
    capacity : int
        Number of structures.
    max_atoms : int
        Number of atoms of all of them.
    max_edges : int, default 0
        Number of edges of all of them, for structures that are written with their neighbour list.

    Notes
    -----
    All structures must have the fields of the first. Works on every device; the name is the usual place.
    """

    def __init__(self, capacity: int, max_atoms: int, max_edges: int = 0) -> None:
        self.capacity: int | None = _checked_capacity(capacity)
        self._sizes = (capacity, max_atoms, max_edges)
        self._buffer: FixedBatch | None = None

    @property
    def is_full(self) -> bool:
        """Whether no structure or no atom has room any more."""
        return self._buffer is not None and (
            self._buffer.num_graphs >= self._sizes[0] or self._buffer.num_nodes >= self._sizes[1]
        )

    def __len__(self) -> int:
        return 0 if self._buffer is None else self._buffer.num_graphs

    def fits(self, batch: Batch, mask: Tensor | None = None) -> Tensor:
        """As many, in order, as structures, atoms and edges leave room for."""
        return self._opened(batch).room_for(batch, mask)

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Copy into the buffer."""
        chosen = _all_that_fit(self, batch, mask)
        if chosen.num_graphs > 0:
            self._opened(batch).put(chosen)

    def read(self) -> Batch:
        """All structures as one batch, a copy."""
        if self._buffer is None or self._buffer.num_graphs == 0:
            raise ValueError("the sink is empty")
        return self._buffer.view().clone()

    def drain(self) -> Batch:
        """All structures as one batch; the buffer is free again."""
        batch = self.read()
        self.zero()
        return batch

    def zero(self) -> None:
        """Free the buffer for other structures; its memory is kept."""
        if self._buffer is not None:
            self._buffer.zero()

    def close(self) -> None:
        """Nothing to do: memory is as durable as the process."""

    def state_dict(self) -> dict[str, Any]:
        """The structures."""
        return {"held": None if len(self) == 0 else batch_state(self.read())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the structures of a saved state instead of those now held."""
        self.zero()
        if state["held"] is not None:
            self.write(batch_from_state(state["held"]))

    def _opened(self, batch: Batch) -> FixedBatch:
        if self._buffer is None:
            self._buffer = Batch.empty(*self._sizes, batch)
        return self._buffer


class ZarrData:
    """Structures in a Zarr store (``nvalchemi.data.zarr``), which may be read while the run goes on.

    Parameters
    ----------
    store : path, URL or zarr store
        Where to.
    capacity : int, optional
        Number of structures it takes; default any number.
    config : mapping, optional
        Options of :class:`nvalchemi.data.zarr.AtomicDataZarrWriter`. With ``{"mode": "w"}`` what is there is
        replaced; otherwise it is kept and counts towards the capacity. By default a run that would begin a system
        again that is there already is refused; ``{"mode": "a"}`` appends it all the same. What waits in memory (at most
        ``buffer_seconds``) is written when the run ends, also after an error.

    Notes
    -----
    A restarted run (``run(restart=…)``) makes frames again that were written after the last save; they are
    recognised by ``system_id`` and ``system_step`` and not written twice.

    The frames of systems that ran side by side are told apart by
    :meth:`~nvalchemi.data.zarr.AtomicDataZarrReader.trajectory`.
    """

    def __init__(
        self, store: Any, capacity: int | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        self.store = store
        self.capacity = _checked_capacity(capacity)
        self._options = dict(config or {})
        # Whether to refuse systems that are there: unless the mode was chosen, and not after a restart.
        self._new_systems_only = "mode" not in self._options
        self._mode: Literal["a", "w", "x"] = self._options.pop("mode", "a")
        self._writer: AtomicDataZarrWriter | None = None
        # Frames by (system_id, system_step) that a restarted run will make once more.
        self._there: set[tuple[int, int]] = set()

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing more."""
        return self.capacity is not None and len(self) >= self.capacity

    def __len__(self) -> int:
        if self._writer is not None:
            return len(self._writer)
        reader = self._reader()
        return 0 if reader is None else len(reader)

    def fits(self, batch: Batch, mask: Tensor | None = None) -> Tensor:
        """As many, in order, as the capacity leaves room for."""
        return _first(batch, mask, None if self.capacity is None else self.capacity - len(self))

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Append to the store."""
        chosen = _all_that_fit(self, batch, mask)
        if self._there:
            frames = _frame_names(chosen.get("system_id"), chosen.get("system_step"))
            chosen = chosen.index_select(torch.tensor([frame not in self._there for frame in frames]))
            self._there.difference_update(frames)
        if chosen.num_graphs > 0:
            if self._new_systems_only:
                self._check_systems_are_new(chosen)
                self._new_systems_only = False
            self._opened().append(chosen.cpu())

    def _check_systems_are_new(self, batch: Batch) -> None:
        """Refuse a second run of systems that the store has, which no reader could tell from the first."""
        reader = self._reader()
        last = {} if reader is None else reader.last_steps()
        for system, step in _frame_names(batch.get("system_id"), batch.get("system_step")):
            if step <= last.get(system, -1):
                raise ValueError(
                    f"{self.store} has frames of system_id {system} up to step {last[system]}, and another run would "
                    f"write its step {step}: choose another store, replace this one with config={{'mode': 'w'}}, give "
                    "the structures a system_id of their own, or append all the same with config={'mode': 'a'}"
                )

    def read(self) -> Batch:
        """All structures of the store as one batch."""
        self.close()
        reader = self._reader()
        if reader is None or len(reader) == 0:
            raise ValueError("the sink is empty")
        return reader.read(range(len(reader)), missing="fill")

    def drain(self) -> Batch:
        """All structures as one batch; the store is empty afterwards."""
        batch = self.read()
        self.zero()
        return batch

    def zero(self) -> None:
        """Empty the store."""
        self.close()
        self._mode = "w"
        self._opened()
        self.close()

    def close(self) -> None:
        """Commit what waits and let others write; a later :meth:`write` appends."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """How many structures are in the store, all of them committed."""
        self.close()
        return {"count": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the store; frames written since the state was saved will not be written again."""
        self._mode, self._new_systems_only = "a", False
        reader = self._reader()
        held = 0 if reader is None else len(reader)
        if reader is None or held <= state["count"]:
            if held < state["count"]:
                raise ValueError(
                    f"{self.store} holds {held} structures, {state['count']} were in it when the run was saved"
                )
            return
        later = [
            reader.column(name)[state["count"] :] if name in reader.fields else None
            for name in ("system_id", "system_step")
        ]
        self._there = set(_frame_names(*later))

    def _opened(self) -> "AtomicDataZarrWriter":
        if self._writer is None:
            from nvalchemi.data.zarr import AtomicDataZarrWriter

            self._writer = AtomicDataZarrWriter(self.store, mode=self._mode, **self._options)
            self._mode = "a"
        return self._writer

    def _reader(self) -> "AtomicDataZarrReader | None":
        """A reader of what is committed; ``None`` where there is no store, or one that is to be replaced."""
        from nvalchemi.data.zarr import AtomicDataZarrReader

        if self._mode == "w":
            return None
        try:
            return AtomicDataZarrReader(self.store, storage_options=self._options.get("storage_options"))
        except FileNotFoundError:
            return None


# ---------------------------------------------------------------------- for engines
def as_sinks(sinks: DataSink | Sequence[DataSink] | None) -> tuple[DataSink, ...]:
    """The engine's argument of that name as a tuple."""
    if sinks is None:
        return ()
    return (sinks,) if isinstance(sinks, DataSink) else tuple(sinks)


def deliver(sinks: Sequence[DataSink], batch: Batch, graphs: Tensor) -> None:
    """Write the graphs marked (bool ``[B]``) to the first sinks that have room, without their working state.

    Raises
    ------
    RuntimeError
        All sinks are full.
    """
    rest = without_working_state(batch.index_select(graphs))
    for sink in sinks:
        taken = sink.fits(rest)
        sink.write(rest, taken)
        rest = rest.index_select(~taken)
        if rest.num_graphs == 0:
            return
    raise RuntimeError(
        f"all sinks are full: there is no room for {rest.num_graphs} structures "
        f"(system_id {rest.system_id[:, 0].tolist()})"
    )


def without_working_state(batch: Batch) -> Batch:
    """The batch without neighbour lists and what integrators, minimisers and monitors keep in it."""
    batch = copy(batch)
    for name in batch.keys():
        if name in FIELDS and not FIELDS[name].persistent:
            batch.remove_key(name)
    return batch


@contextmanager
def sinks_closed_after(sinks: Sequence[DataSink]) -> Iterator[None]:
    """Close every sink at the end, also after an error, so that what was finished is kept."""
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield


def _frame_names(ids: Tensor | None, steps: Tensor | None) -> list[tuple[int, int]]:
    """Whose frames, and of which steps; nothing without ids, step 0 without steps."""
    if ids is None:
        return []
    steps = torch.zeros_like(ids) if steps is None else steps
    return list(zip(ids[:, 0].tolist(), steps[:, 0].tolist(), strict=True))


def _checked_capacity(capacity: int | None) -> int | None:
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be ≥ 1, got {capacity}")
    return capacity


def _first(batch: Batch, mask: Tensor | None, room: int | None) -> Tensor:
    """The first ``room`` of the graphs marked."""
    wanted = torch.ones(batch.num_graphs, dtype=torch.bool, device=batch.device) if mask is None else mask
    return wanted if room is None else wanted & (torch.cumsum(wanted, 0) <= room)


def _all_that_fit(sink: DataSink, batch: Batch, mask: Tensor | None) -> Batch:
    """A copy of the graphs to write; ``RuntimeError`` unless there is room for all of them."""
    chosen = batch.clone() if mask is None else batch.index_select(mask)
    if not bool(sink.fits(chosen).all()):
        raise RuntimeError(
            f"{type(sink).__name__} holds {len(sink)} structures and has no room for {chosen.num_graphs} more"
        )
    return chosen
