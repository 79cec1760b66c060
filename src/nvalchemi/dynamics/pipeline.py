"""Stages on several processes: each structure is handed from one rank to the next when it is done there.

Rank k of ``torch.distributed`` runs stage k. Between two ranks there is one stream of messages::

    rank k                                    rank k + 1
    finished structures  ── structures ──►    queue of bounded length ──► batch
                         ◄── answer ─────     "taken", once the queue has room
    nothing left         ── end ────────►     works off what it has
                         ◄── answer ─────     "done", when it and all behind it have finished

A sender waits for the answer, so a slow stage slows the ones before it, and what waits between two stages is
bounded. When a stage fails, it says so in its next message and in its next answer, and its neighbours stop with an
error that names it; a rank that is gone is noticed by its broken connection.
"""

import pickle
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics.base import BaseDynamics

_DATA, _ANSWER = 1, 2
"""Tags of the two directions of a stream."""

Kind = Literal["structures", "end", "failed", "taken", "done"]


class PipelineError(RuntimeError):
    """Another stage of the pipeline failed, or its process is gone."""


class DistributedPipeline:
    """Engines one after another for each structure, each engine on a process of its own: ``relax | sample``.

    Every rank makes the whole pipeline and calls :meth:`run`; rank k runs stage k. A structure goes on to the next
    rank when it has converged or made the ``n_steps`` of its engine, keeps ``system_id`` and ``system_step``, and
    ends in the sinks of the last engine. A failed structure goes there directly, as failed.

    Parameters
    ----------
    stages : sequence of BaseDynamics
        At least two engines. The first has a sampler, the last has sinks, the others have neither.
    max_batch_size : int, default 64
        Largest number of structures at work on a rank behind the first, and of those that wait there.

    Raises
    ------
    ValueError
        Fewer than two engines, a sampler or sinks in other places than these, an engine that would keep structures
        for ever.

    Notes
    -----
    When a stage fails, the others stop with a :class:`PipelineError`; what was finished is in the sinks, which are
    closed then. Ranks should run under a launcher that stops all when one is killed, such as ``torchrun``.
    """

    def __init__(self, stages: Sequence[BaseDynamics], max_batch_size: int = 64) -> None:
        if len(stages) < 2:
            raise ValueError(f"a pipeline needs at least two engines, got {len(stages)}")
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be ≥ 1, got {max_batch_size}")
        last = len(stages) - 1
        for k, stage in enumerate(stages):
            who = f"{type(stage).__name__} (stage {k})"
            if (stage.sampler is not None) != (k == 0):
                raise ValueError(f"{who}: the first engine of a pipeline has a sampler, and no other")
            if bool(stage.sinks) != (k == last):
                raise ValueError(f"{who}: the last engine of a pipeline has sinks, and no other")
            if not stage.ends_by_itself and stage.n_steps is None:
                raise ValueError(
                    f"{who} needs n_steps or a convergence hook, or it would keep structures for ever"
                )
        self.stages = tuple(stages)
        self.max_batch_size = max_batch_size

    def __or__(self, other: BaseDynamics) -> "DistributedPipeline":
        """The pipeline with one more engine at its end."""
        return DistributedPipeline([*self.stages, other], self.max_batch_size)

    def run(self) -> None:
        """Run the stage of this rank until every structure has come out at the end.

        Raises
        ------
        ValueError
            ``torch.distributed`` is not initialised with as many ranks as there are stages.
        PipelineError
            Another stage failed, or its process is gone.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("a pipeline needs torch.distributed: call init_process_group first")
        if dist.get_world_size() != len(self.stages):
            raise ValueError(
                f"{len(self.stages)} stages need as many ranks, there are {dist.get_world_size()}"
            )
        rank = dist.get_rank()
        engine = self.stages[rank]
        source = Inbox(rank - 1, self.max_batch_size) if rank > 0 else None
        target = Outbox(rank + 1) if rank < len(self.stages) - 1 else None
        if source is not None:
            engine.feed_from(source)
        if target is not None:
            engine.sinks = (target,)
        try:
            engine.run()
            if target is not None:
                target.end()
        except BaseException as error:
            words = str(error) if isinstance(error, PipelineError) else f"stage {rank} failed: {error!r}"
            if target is not None:
                target.fail(words)
            if source is not None:
                source.finish("failed", words)
            raise
        if source is not None:
            source.finish("done")


class Outbox:
    """Sink of a stage that sends what is finished to the next rank, and waits until it is taken there.

    Parameters
    ----------
    rank : int
        The next one.
    """

    capacity: int | None = None

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sent = 0
        self._broken = False

    @property
    def is_full(self) -> bool:
        """Never: a write waits instead."""
        return False

    def __len__(self) -> int:
        return self._sent

    def fits(self, batch: Batch, mask: Tensor | None = None) -> Tensor:
        """All of them."""
        return torch.ones(batch.num_graphs, dtype=torch.bool, device=batch.device) if mask is None else mask

    def write(self, batch: Batch, mask: Tensor | None = None) -> None:
        """Send them; returns when the next rank has taken them."""
        chosen = batch if mask is None else batch.index_select(mask)
        if chosen.num_graphs > 0:
            self._say("structures", chosen.cpu())
            self._sent += chosen.num_graphs

    def end(self) -> None:
        """Say that there will be no more; returns when the last rank has finished."""
        self._say("end", None)

    def fail(self, words: str) -> None:
        """Say that this stage failed, where the next rank still listens."""
        if not self._broken:
            with suppress(RuntimeError):  # it may be gone as well
                _send("failed", words, self._rank, _DATA)

    def read(self) -> Batch:
        """Nothing can be read here."""
        raise ValueError("structures that were sent to another rank cannot be read")

    drain = read

    def zero(self) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """Nothing to do: everything was taken when :meth:`write` returned."""

    def _say(self, kind: Kind, content: Any) -> None:
        try:
            _send(kind, content, self._rank, _DATA)
            answer, words = _receive(self._rank, _ANSWER)
        except RuntimeError as error:
            self._broken = True
            raise PipelineError(f"stage {self._rank} is gone: {error}") from error
        if answer == "failed":
            self._broken = True
            raise PipelineError(words)


class Inbox:
    """Sampler of a stage that hands out what the rank before has finished.

    Parameters
    ----------
    rank : int
        The rank before.
    max_batch_size : int
        Largest number of structures that are out together.
    """

    def __init__(self, rank: int, max_batch_size: int) -> None:
        self._rank = rank
        self._max = max_batch_size
        self._queue: queue.Queue[tuple[Kind, Any]] = queue.Queue(maxsize=1)
        self._waiting: list[AtomicData] = []
        self._ended = False
        self._finished = threading.Event()
        self._result: tuple[Kind, Any] = ("done", None)
        self._thread = threading.Thread(target=self._listen, name="nvalchemi-pipeline", daemon=True)
        self._thread.start()

    def has_room_to_fill(self, num_graphs: int) -> bool:
        """Whether structures wait that fit next to ``num_graphs`` others."""
        return num_graphs < self._max and (bool(self._waiting) or not self._queue.empty())

    def draw(self, staying: Batch | None) -> list[AtomicData]:
        """Hand out what has arrived, as far as it fits; waits only when nothing else is at work."""
        at_work = 0 if staying is None else staying.num_graphs
        while not self._ended and len(self._waiting) < self._max - at_work:
            try:
                kind, content = self._queue.get(block=at_work == 0 and not self._waiting)
            except queue.Empty:
                break
            if kind == "failed":
                raise PipelineError(content)
            if kind == "end":
                self._ended = True
            else:
                self._waiting += [_fresh(data) for data in content.to_data_list()]
        room = max(self._max - at_work, 0)
        drawn, self._waiting = self._waiting[:room], self._waiting[room:]
        return drawn

    def finish(self, kind: Kind, words: str | None = None) -> None:
        """Answer the rank before, once it asks next, that this stage is done or failed, and stop listening."""
        self._result = (kind, words)
        self._finished.set()
        self._thread.join()

    def state_dict(self) -> dict[str, Any]:
        """Nothing that could be saved: a pipeline starts anew."""
        raise ValueError("a pipeline cannot be saved")

    def load_state_dict(self, state: Any) -> None:
        """Nothing that could be taken up."""
        raise ValueError("a pipeline cannot be restored")

    def _listen(self) -> None:
        """Receive and answer until the end, or until this stage has failed. Runs in a thread of its own."""
        while True:
            try:
                kind, content = _receive(self._rank, _DATA)
            except RuntimeError as error:
                kind, content = "failed", f"stage {self._rank} is gone: {error}"
            self._put((kind, content))
            if kind == "failed":
                return
            if kind == "end":
                self._finished.wait()
            answer = self._result if self._finished.is_set() else ("taken", None)
            with suppress(RuntimeError):  # a rank that is gone is noticed when it is listened to next
                _send(*answer, self._rank, _ANSWER)
            if kind == "end" or answer[0] == "failed":
                return

    def _put(self, message: tuple[Kind, Any]) -> None:
        """Queue a message as soon as there is room, unless this stage has failed."""
        while not self._finished.is_set():
            with suppress(queue.Full):
                self._queue.put(message, timeout=0.1)
                return


def _fresh(data: AtomicData) -> AtomicData:
    """A structure as the next stage begins with it; a failed one stays failed."""
    data = data.clone()
    data.status = data.status.clamp(max=0)
    return data


def _send(kind: Kind, content: Any, rank: int, tag: int) -> None:
    payload = torch.frombuffer(bytearray(pickle.dumps((kind, content))), dtype=torch.uint8)
    dist.send(torch.tensor([payload.shape[0]]), rank, tag=tag)
    dist.send(payload, rank, tag=tag)


def _receive(rank: int, tag: int) -> tuple[Kind, Any]:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, tag=tag)
    payload = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(payload, rank, tag=tag)
    # Both ends are processes of one run, started by the same user.
    return pickle.loads(payload.numpy().tobytes())
