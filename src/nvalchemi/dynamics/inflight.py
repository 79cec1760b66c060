"""In-flight batching: structures take their turn in a batch of bounded size, and leave it when they are done.

A run fed by a sampler (``engine.run()`` without a batch) goes like this::

    draw structures from the sampler, as many as fit
    repeat until none is left:
        step
        when structures are done, or failed:
            they go to the sinks
            those that stay and new ones from the sampler make the next batch
            ON_ADMISSION for the new ones, first forces of the new ones only

What an engine, a hook or the neighbour search keeps for a structure is fields of the batch and stays with it.
A structure's path does not depend on its company, and its ``system_id`` is its number in the dataset.
"""

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics.admission import (
    add_bookkeeping,
    complete_batch,
    unusable_graphs,
    without_periodic_cell,
)
from nvalchemi.dynamics.evaluation import OUTPUTS
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.dynamics.pressure import AppliedPressure
from nvalchemi.dynamics.sinks import deliver
from nvalchemi.hooks import NeighborListHook
from nvalchemi.neighbors import UnsearchableStructureError, compute_neighbors

if TYPE_CHECKING:
    from nvalchemi.dynamics.base import BaseDynamics


_UNLIMITED = int(np.iinfo(np.int64).max)
_EXAMPLES = 16
"""Structures on which the room for a model's evaluations is measured."""


@runtime_checkable
class StructureSource(Protocol):
    """What a sampler draws from: ``len`` and structures by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """An ``AtomicData``, or a pair of one and a dictionary, which is added to its ``info``."""
        ...


@runtime_checkable
class SizedSource(Protocol):
    """A dataset that knows the sizes of its structures without loading them."""

    def get_metadata(self, index: int) -> tuple[int, int]:
        """Number of atoms and of edges."""
        ...


@runtime_checkable
class StructureFeed(Protocol):
    """Where an engine draws structures from: a :class:`SizeAwareSampler`, or the rank before in a pipeline."""

    def draw(self, staying: Batch | None) -> list[AtomicData]:
        """Structures that fit next to those that stay; none when there are no more, or none fits."""
        ...

    def has_room_to_fill(self, num_graphs: int) -> bool:
        """Whether to draw although none of the ``num_graphs`` that are out is done."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Position, for restarts."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position."""
        ...


class SizeAwareSampler:
    """Hands out the structures of a dataset, each once, so that what is out at any time stays within budgets.

    The largest structure that fits is handed out first: what is left at the end is small, and fills gaps.

    Parameters
    ----------
    dataset : sequence of AtomicData or of (AtomicData, dict)
        Anything with ``len`` and ``[i]``. With ``get_metadata(i) -> (n_atoms, n_edges)`` sizes are asked for there;
        without, every structure is loaded once to see its size.
    max_atoms, max_edges, max_batch_size : int, optional
        Largest numbers of atoms, edges and structures that are out together; at least one of them. Edges are those
        of the dataset's own neighbour lists. ``max_atoms="auto"``: as many as the engine's model evaluates at once with
        the least time for each (:mod:`nvalchemi.dynamics.cost`), and one structure at least; the engine finds out
        when the run begins.
    bin_width : int, default 1
        Structures whose numbers of atoms fall into one bin of this width count as equally large.
    shuffle : bool, default False
        Hand out equally large structures in random order instead of that of the dataset.
    random_seed : int, default 0
        Of that order.

    Raises
    ------
    ValueError
        No budget, a budget below 1, an empty dataset, ``max_edges`` where no structure has edges, or a structure
        that is larger than a budget, named by its number.

    Examples
    --------
    >>> atoms = [
    ...     AtomicData(positions=torch.zeros(n, 3), atomic_numbers=torch.full((n,), 18)) for n in (2, 3, 4, 1)
    ... ]
    >>> sampler = SizeAwareSampler(atoms, max_atoms=6)
    >>> [int(data.system_id) for data in sampler.draw(None)]
    [2, 0]
    >>> len(sampler)
    2
    """

    def __init__(
        self,
        dataset: StructureSource,
        max_atoms: "int | Literal['auto'] | None" = None,
        max_edges: int | None = None,
        max_batch_size: int | None = None,
        bin_width: int = 1,
        shuffle: bool = False,
        random_seed: int = 0,
    ) -> None:
        self.is_undecided = max_atoms == "auto"
        """Whether the number of atoms is still to be chosen (:meth:`choose_max_atoms`)."""
        atom_limit = None if isinstance(max_atoms, str) else max_atoms
        budgets = {"max_atoms": atom_limit, "max_edges": max_edges, "max_batch_size": max_batch_size}
        if all(limit is None for limit in budgets.values()) and not self.is_undecided:
            raise ValueError("SizeAwareSampler needs max_atoms, max_edges or max_batch_size")
        for name, limit in {**budgets, "bin_width": bin_width}.items():
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be ≥ 1, got {limit}")
        if len(dataset) == 0:
            raise ValueError("the dataset is empty")
        self.dataset = dataset
        atoms, edges = _sizes(dataset)
        if max_edges is not None and not edges.any():
            raise ValueError(
                "max_edges needs the number of edges of each structure, and the dataset has none"
            )
        self._sizes = np.stack([atoms, edges, np.ones_like(atoms)], axis=1)
        limits = (atom_limit, max_edges, max_batch_size)
        self._budget = np.array([_UNLIMITED if limit is None else limit for limit in limits])
        for column, name in enumerate(("atoms", "edges")):
            too_large = self._sizes[:, column] > self._budget[column]
            if too_large.any():
                worst = int(np.flatnonzero(too_large)[0])
                raise ValueError(
                    f"structure {worst} of the dataset has {self._sizes[worst, column]} {name}, more than "
                    f"max_{name}={self._budget[column]}"
                )
        order = (
            np.random.default_rng(random_seed).permutation(len(atoms)) if shuffle else np.arange(len(atoms))
        )
        self._waiting = order[np.argsort(-(atoms[order] // bin_width), kind="stable")]

    def __len__(self) -> int:
        """Number of structures that were not handed out yet."""
        return len(self._waiting)

    @property
    def max_atoms(self) -> int | None:
        """Largest number of atoms that are out together."""
        limit = int(self._budget[0])
        return None if limit == _UNLIMITED else limit

    def choose_max_atoms(self, max_atoms: int) -> None:
        """Decide what ``max_atoms="auto"`` left open; the largest structure has room in any case."""
        self._budget[0] = max(max_atoms, int(self._sizes[:, 0].max()))
        self.is_undecided = False

    def examples(self, count: int) -> list[AtomicData]:
        """Up to ``count`` of the structures that were not handed out, of all sizes; they stay with the sampler."""
        places = np.unique(np.linspace(0, len(self._waiting) - 1, count).round().astype(np.int64))
        return [self._load(int(self._waiting[place])) for place in places]

    @property
    def atoms_waiting(self) -> int:
        """Atoms of all structures that were not handed out yet."""
        return int(self._sizes[self._waiting, 0].sum())

    def draw(self, staying: Batch | None) -> list[AtomicData]:
        """Hand out the structures that fit next to those of an earlier draw that are still out.

        Parameters
        ----------
        staying : Batch or None
            Structures that are still out, by ``system_id``; all others of earlier draws have come back.

        Returns
        -------
        list of AtomicData
            Their ``system_id`` is their number in the dataset; status and step counts of an earlier run are removed.
        """
        if self.is_undecided:
            raise ValueError(
                "max_atoms='auto' is decided by an engine that runs with this sampler; give a number, or call "
                "choose_max_atoms"
            )
        ids: list[int] = [] if staying is None else staying.system_id[:, 0].tolist()
        room = self._budget - self._sizes[ids].sum(axis=0)
        return [self._load(int(number)) for number in self._take(room)]

    def has_room_to_fill(self, num_graphs: int) -> bool:
        """No: as many are out as fit, until one is done."""
        del num_graphs
        return False

    def _take(self, room: np.ndarray) -> np.ndarray:
        """Numbers of structures that fit, first come first served in the order of waiting."""
        taken: list[int] = []
        places: list[int] = []
        start = 0
        while start < len(self._waiting):
            # The next that fits into what is left.
            fitting = (self._sizes[self._waiting[start:]] <= room).all(axis=1)
            if not fitting.any():
                break
            place = start + int(np.argmax(fitting))
            places.append(place)
            taken.append(int(self._waiting[place]))
            room = room - self._sizes[taken[-1]]
            start = place + 1
        self._waiting = np.delete(self._waiting, places)
        return np.array(taken, dtype=np.int64)

    def _load(self, number: int) -> AtomicData:
        data, more = _with_info(self.dataset[number])
        if not isinstance(data, AtomicData):
            raise TypeError(
                f"structure {number} of the dataset is a {type(data).__name__}, not an AtomicData"
            )
        data = copy(data)
        data.info.update(more)
        for name in ("status", "system_step"):
            if name in data:
                data.remove_key(name)
        data.add_system_property("system_id", torch.full((1, 1), number, device=data.device))
        return data

    def state_dict(self) -> dict[str, Any]:
        """Numbers of the structures that were not handed out yet, in order, and the largest number of atoms."""
        max_atoms = None if self.is_undecided else self.max_atoms
        return {"waiting": self._waiting.tolist(), "max_atoms": max_atoms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position."""
        self._waiting = np.array(state["waiting"], dtype=np.int64)
        if self.is_undecided and state["max_atoms"] is not None:
            self.choose_max_atoms(state["max_atoms"])


def _with_info(item: Any) -> tuple[Any, Mapping[str, Any]]:
    return (item[0], item[1]) if isinstance(item, tuple) else (item, {})


def _sizes(dataset: StructureSource) -> tuple[np.ndarray, np.ndarray]:
    """Atoms and edges of every structure."""
    if isinstance(dataset, SizedSource):
        sizes = [dataset.get_metadata(i) for i in range(len(dataset))]
    else:
        loaded = (_with_info(dataset[i])[0] for i in range(len(dataset)))
        sizes = [(data.num_nodes, data.num_edges) for data in loaded]
    table = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def refill(engine: "BaseDynamics", sampler: StructureFeed, staying: Batch | None) -> tuple[Batch, Tensor]:
    """Join the graphs that stay with new ones; those that cannot be run go straight to the sinks, as failed.

    Parameters
    ----------
    engine : BaseDynamics
        Whose batch it will be.
    sampler : StructureFeed
        Where new structures come from.
    staying : Batch or None
        Graphs that go on.

    Returns
    -------
    batch : Batch
        Without graphs when none stays and none is left.
    admitted : Tensor, bool [B]
        The new ones.
    """
    if isinstance(sampler, SizeAwareSampler) and sampler.is_undecided:
        _choose_max_atoms(engine, sampler)
    new = _draw_usable(engine, sampler, staying)
    if new is None:
        if staying is None:
            raise ValueError("the sampler has handed out all structures before")
        batch, first_new = staying, staying.num_graphs
    elif staying is None or staying.num_graphs == 0:
        batch, first_new = new, 0
    elif new.num_graphs == 0:
        batch, first_new = staying, staying.num_graphs
    else:
        batch, first_new = join(staying, new), staying.num_graphs
    return batch, torch.arange(batch.num_graphs, device=batch.device) >= first_new


def _choose_max_atoms(engine: "BaseDynamics", sampler: SizeAwareSampler) -> None:
    """As many atoms as one evaluation should have, measured on some structures of the dataset."""
    batch = Batch.from_data_list(sampler.examples(_EXAMPLES))
    add_bookkeeping(batch)
    engine._add_neighbor_hook()
    unusable = list(_unusable(engine, batch))
    while batch.num_graphs > len(unusable):
        batch = batch.index_select([graph for graph in range(batch.num_graphs) if graph not in unusable])
        complete_batch(batch, engine.model.model_config)
        try:
            for hook in engine.hooks:
                if isinstance(hook, NeighborListHook):
                    compute_neighbors(batch, config=hook.config)
        except UnsearchableStructureError as error:
            unusable = [error.graph]
            continue
        with engine._session:
            at_once = engine._evaluate_pieces.atoms_at_once(engine._evaluate, batch, sampler.atoms_waiting)
        sampler.choose_max_atoms(at_once)
        return
    sampler.choose_max_atoms(1)


def _draw_usable(engine: "BaseDynamics", sampler: StructureFeed, staying: Batch | None) -> Batch | None:
    """The next structures that can be run; none in it when all drawn cannot, ``None`` when there are none to draw."""
    new = None
    while drawn := sampler.draw(staying):
        new = Batch.from_data_list(drawn)
        add_bookkeeping(new)
        engine.retire(new, _unusable(engine, new))
        bad = new.status[:, 0] < 0
        if bool(bad.any()):
            if engine.sinks:
                deliver(engine.sinks, new, bad)
            new = new.index_select(~bad)
        if new.num_graphs > 0:
            complete_batch(new, engine.model.model_config)
            break
    return new


def _unusable(engine: "BaseDynamics", batch: Batch) -> dict[int, str]:
    """Structures that the engine cannot run, with the reason."""
    reasons = unusable_graphs(batch)
    if "stress" in engine.needed_outputs:
        reasons = without_periodic_cell(batch, type(engine).__name__) | reasons
    return reasons


def join(staying: Batch, new: Batch) -> Batch:
    """One batch of graphs under way and of new ones, which get room for what is computed for all."""
    new = copy(new)
    counts = {"node": new.num_nodes, "system": new.num_graphs}
    for name in OUTPUTS:
        if name in staying and name not in new:
            like: Tensor = staying[name]
            new.add_key(name, like.new_zeros(counts[staying.level(name)], *like.shape[1:]))
    return Batch.from_data_list([staying, new])


def check_parameters(engines: Sequence["BaseDynamics"]) -> None:
    """``ValueError`` for parameters with one value per graph, which have no meaning when graphs come and go."""
    for engine in engines:
        for name, value in vars(engine).items():
            if isinstance(value, GraphParameter | AppliedPressure) and _is_per_graph(value.value):
                raise ValueError(
                    f"{name} of {type(engine).__name__} has one value for each graph of a batch; in a run fed by a "
                    "sampler graphs come and go: give one number for all"
                )


def warn_of_lost_structures(engine: "BaseDynamics") -> None:
    """``UserWarning`` when nothing takes the structures that are done, or at least follows them on their way."""
    from nvalchemi.dynamics.hooks import ConvergedSnapshotHook, SnapshotHook

    kept = any(isinstance(hook, SnapshotHook | ConvergedSnapshotHook) for hook in engine.restart_hooks)
    if not engine.sinks and not kept:
        warnings.warn(
            "structures leave the batch when they are done, and nothing keeps them: give the engine sinks=, such as "
            "nvalchemi.dynamics.sinks.HostMemory()",
            UserWarning,
            stacklevel=4,
        )


def _is_per_graph(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
