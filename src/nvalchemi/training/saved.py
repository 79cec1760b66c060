"""How a strategy is saved, comes back, and is written as plain values."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from nvalchemi.training import _ranks
from nvalchemi.training.archive import read_newest, write_checkpoint
from nvalchemi.training.rng import set_random_state
from nvalchemi.training.state import restore_snapshot, take_snapshot
from nvalchemi.training.strategy_spec import arguments_from_spec, describe_strategy

if TYPE_CHECKING:
    from nvalchemi.training.strategy import TrainingStrategy

_COUNTERS = ("step_count", "global_step_count", "batch_count", "epoch_count", "epoch_step_count")


class SavedStrategy:
    """The part of :class:`~nvalchemi.training.TrainingStrategy` that deals with checkpoints and specifications."""

    _epoch: int = 0
    _validated_at: int = 0
    _pending_random_state: Mapping[str, Any] | None = None

    def _strategy(self) -> "TrainingStrategy":
        return cast("TrainingStrategy", self)

    @classmethod
    def _made_of(cls, models: Any, **options: Any) -> Self:
        make: Any = cls
        return make(models, **options)

    def counters(self) -> dict[str, int]:
        """Counters by name."""
        return {name: vars(self)[name] for name in _COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters, as a restore does."""
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self._epoch, self._validated_at = counters["epoch_count"], counters["step_count"]

    def set_random_state_at_run(self, state: Mapping[str, Any]) -> None:
        """Have the random number generators set when training goes on, so that nothing until then can disturb them."""
        self._pending_random_state = state

    def _apply_random_state(self) -> None:
        if self._pending_random_state is not None:
            set_random_state(self._pending_random_state)
            self._pending_random_state = None

    def save_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write the whole state to a directory, which appears (or is replaced) when it is complete.

        Parameters
        ----------
        path : path
            The directory to write.
        """
        self._strategy().setup()
        snapshot = take_snapshot(self._strategy())
        if _ranks.rank() == 0:
            write_checkpoint(snapshot, Path(path))
        _ranks.barrier()

    def restore_checkpoint(self, path: str | PathLike[str], *, strict: bool = True) -> Path:
        """Take up the state of a checkpoint, or of the newest intact one of a directory of checkpoints.

        Parameters
        ----------
        path : path
            A checkpoint, or a directory of them.
        strict : bool, default True
            Whether the hooks with state must be those that were saved.

        Returns
        -------
        Path
            The checkpoint that was read.

        Raises
        ------
        FileNotFoundError
            There is none.
        DamagedCheckpointError
            None is intact.
        """
        found, snapshot = read_newest(Path(path))
        self._strategy().setup()
        restore_snapshot(self._strategy(), snapshot, strict=strict)
        return found

    @classmethod
    def load_checkpoint(
        cls, path: str | PathLike[str], models: Any, *, strict: bool = True, **options: Any
    ) -> Self:
        """Make a strategy from a checkpoint.

        Parameters
        ----------
        path : path
            A checkpoint, or a directory of them: the newest intact one is read.
        models : nn.Module or dict of str to nn.Module
            Models to load the weights into.
        strict : bool, default True
            As in :meth:`restore_checkpoint`.
        **options
            Arguments of the strategy to replace what was saved, and those that could not be saved: data,
            hooks and functions without a name.
        """
        _, snapshot = read_newest(Path(path))
        if snapshot.spec is None:
            strategy = cls._made_of(models, **options)
        else:
            strategy = cls.from_spec_dict(snapshot.spec, models, **options)
        strategy._strategy().setup()
        restore_snapshot(strategy._strategy(), snapshot, strict=strict)
        return strategy

    # ------------------------------------------------------------------ specification
    def to_spec_dict(self) -> dict[str, Any]:
        """What the strategy is made of, as plain values for JSON.

        Models and data are left out, and so are hooks that are no pydantic models (named in ``omitted_hooks``).

        Raises
        ------
        ValueError
            A function (``training_fn``, ``loss_fn``) that cannot be named, such as a lambda.
        """
        return describe_strategy(self._strategy())

    @classmethod
    def from_spec_dict(
        cls, spec: Mapping[str, Any], models: Any, *, validation_data: Any = None, **options: Any
    ) -> Self:
        """Make a strategy of what :meth:`to_spec_dict` gave.

        Parameters
        ----------
        spec : mapping
            The specification.
        models : nn.Module or dict of str to nn.Module
            The models.
        validation_data : iterable of Batch, optional
            Data for the validation that the specification describes.
        **options
            Arguments of the strategy that replace those of the specification.

        Warns
        -----
        UserWarning
            Hooks or validation data were left out of the specification and are not given.
        """
        return cls._made_of(models, **arguments_from_spec(spec, validation_data, options))
