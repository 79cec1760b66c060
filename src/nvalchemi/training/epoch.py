"""Where training is in its data: the batches of one epoch, which is the last, and how to come back to one of them."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nvalchemi.data import Batch
from nvalchemi.training.rng import random_state, set_random_state

_END = object()


@runtime_checkable
class ResumableLoader(Protocol):
    """A loader that knows its own position."""

    def state_dict(self) -> Mapping[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Go on from there at the next loop."""
        ...

    def __iter__(self) -> Iterator[Batch]: ...


@runtime_checkable
class EpochAwareLoader(Protocol):
    """A loader (or sampler) whose order depends on the number of the epoch."""

    def set_epoch(self, epoch: int, /) -> None:
        """Take the number of the epoch that comes."""
        ...


class EpochPosition:
    """Position in the data, enough to come back to it in another process.

    A loader with ``state_dict`` and ``load_state_dict`` is asked where it stands. Any other is started again with the
    random numbers with which the epoch began, and the batches already used are passed over.

    Attributes
    ----------
    batches : int
        Batches of the epoch that have been used.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._loader: ResumableLoader | None = None
        self._loader_state: Mapping[str, Any] | None = None  # where to go on; None: where the loader is
        self._start: dict[str, Any] | None = None  # random numbers with which the epoch began
        self._fetching: dict[str, Any] | None = None  # and those with which a batch was fetched ahead
        self._generators: list[torch.Generator] = []
        self._generator_states: list[Tensor] | None = None  # restored, to be set when an epoch begins

    def finish(self) -> None:
        """Be at the beginning of the next epoch."""
        self.batches, self._start, self._fetching, self._loader_state = 0, None, None, None

    def state_dict(self) -> dict[str, Any]:
        """Position as plain values and tensors."""
        loader_state = self._loader_state
        if loader_state is None and self._loader is not None:
            loader_state = self._loader.state_dict()
        generator_states = self._generator_states
        if generator_states is None:
            generator_states = [generator.get_state() for generator in self._generators]
        return {
            "batches": self.batches,
            "loader": None if loader_state is None else dict(loader_state),
            "start": self._start,
            "fetching": self._fetching,
            "generators": generator_states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a position that :meth:`state_dict` gave."""
        self.batches, self._start, self._fetching = state["batches"], state["start"], state["fetching"]
        self._loader, self._loader_state = None, state["loader"]
        self._generators, self._generator_states = [], state["generators"]

    # ------------------------------------------------------------------ going through the data
    def iterate(self, loader: Iterable[Batch], epoch: int) -> Iterator[tuple[Batch, bool]]:
        """Batches from the position on, each with whether it is the last of the epoch.

        A loader with a length is taken by its word; from one without, the next batch is fetched ahead.
        """
        set_epoch(loader, epoch)
        iterator = (
            self._go_on(loader) if isinstance(loader, ResumableLoader) else self._start_or_return(loader)
        )
        length = batches_per_epoch(loader)
        if length is None:
            yield from self._look_ahead(iterator)
        else:
            yield from self._count_down(iterator, length)

    def _count_down(self, iterator: Iterator[Batch], length: int) -> Iterator[tuple[Batch, bool]]:
        for batch in iterator:
            yield batch, self.batches >= length - 1
        if self.batches != length:
            window = "left open" if self.batches < length else "closed early"
            warnings.warn(
                f"the dataloader gave {self.batches} batches instead of the {length} it said: the last of the epoch "
                f"was not known as such, and an accumulation window may be {window}",
                UserWarning,
                stacklevel=5,
            )

    def _look_ahead(self, iterator: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
        batch: Any = self._fetch_again(iterator)
        while batch is not _END:
            if self._loader is not None:
                self._loader_state = (
                    self._loader.state_dict()
                )  # the loader itself is a batch further from here on
            self._fetching = random_state()
            following = next(iterator, _END)
            yield batch, following is _END
            batch = following

    def _fetch_again(self, iterator: Iterator[Batch]) -> Any:
        """First batch; after a return the one that was fetched ahead, with the random numbers it was fetched with."""
        if self._fetching is None:
            return next(iterator, _END)
        now = random_state()
        set_random_state(self._fetching)
        batch = next(iterator, _END)
        set_random_state(now)
        return batch

    def _go_on(self, loader: ResumableLoader) -> Iterator[Batch]:
        """Have a loader that knows its position go on there."""
        state = self._loader_state
        if state is None and self.batches and loader is self._loader:
            state = loader.state_dict()  # the last run ended inside the epoch
        if state is not None:
            loader.load_state_dict(state)
        self._loader, self._loader_state = loader, None
        return iter(loader)

    def _start_or_return(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Begin the epoch, or come back to where it was left."""
        self._generators = _generators(loader)
        if not self.batches or self._start is None:
            _set_states(self._generators, self._generator_states)
            self._generator_states = None
            self._start = {"global": random_state(), "own": [g.get_state() for g in self._generators]}
            return iter(loader)
        now = random_state()
        set_random_state(self._start["global"])
        _set_states(self._generators, self._start["own"])
        self._generator_states = None
        iterator = iter(loader)
        for done in range(self.batches):
            if next(iterator, _END) is _END:
                raise ValueError(
                    f"cannot resume after batch {self.batches} of the epoch: the data have only {done} batches"
                )
        set_random_state(now)
        return iterator


def _set_states(generators: list[torch.Generator], states: list[Tensor] | None) -> None:
    if states is None:
        return
    if len(states) != len(generators):
        raise ValueError(
            f"the loader has {len(generators)} generators, the one that was saved had {len(states)}"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def batches_per_epoch(loader: Iterable[Any]) -> int | None:
    """Number of batches of an epoch, where the loader knows it."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a torch DataLoader has __len__ even when its data, a stream, have none
        return None


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell a loader, or the sampler of a torch ``DataLoader``, the number of the epoch."""
    if isinstance(loader, EpochAwareLoader):
        loader.set_epoch(epoch)
    elif isinstance(loader, DataLoader) and isinstance(loader.sampler, EpochAwareLoader):
        loader.sampler.set_epoch(epoch)


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    """Generators of a torch ``DataLoader`` other than the global one."""
    if not isinstance(loader, DataLoader):
        return []
    found = [vars(part).get("generator") for part in (loader, loader.sampler)]
    unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(unique.values())
