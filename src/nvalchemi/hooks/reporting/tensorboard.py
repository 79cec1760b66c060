"""Scalars for TensorBoard."""

from collections.abc import Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot


class ScalarEvents:
    """Event files of TensorBoard in a folder, opened at the first scalar.

    Parameters
    ----------
    folder : Path
        Where the event files go; made if missing.
    append : bool
        Keep the event files that are there.

    Raises
    ------
    ImportError
        TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, append: bool) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoard is needed, the extra [tensorboard]: pip install 'nvalchemi[tensorboard]'"
            )
        self.folder = folder
        self._append = append
        self._last_step: int | None = None
        self._purge_step: int | None = None
        self._writer: Any = None

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars of one step and hand them to the operating system."""
        if self._writer is None:
            self._writer = self._open()
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._last_step = step
        self._writer.flush()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if not self._append:
            for file in self.folder.glob("events.out.tfevents.*"):
                file.unlink()
        self._append = True
        purge_step, self._purge_step = self._purge_step, None
        return SummaryWriter(str(self.folder), purge_step=purge_step)

    def close(self) -> None:
        """Close the event file; the next scalar opens another one beside it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """Last step written."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have TensorBoard forget what was written after that step, as it will be written again."""
        self.close()
        self._last_step = state["last_step"]
        self._purge_step = 0 if self._last_step is None else self._last_step + 1
        self._append = True


class TensorBoardReporter:
    """Write every scalar of a report for TensorBoard, under its own name.

    Parameters
    ----------
    log_dir : str or Path
        Where the event files go; made if missing. Files of earlier runs stay.

    Raises
    ------
    ImportError
        TensorBoard is not installed: the extra ``[tensorboard]``.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._events = ScalarEvents(self.log_dir, append=True)

    def report(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Write the scalars."""
        self._events.add(state.scalars, state.step)

    def report_event(self, ctx: HookContext, stage: Enum, state: ScalarSnapshot) -> None:
        """Write the scalars."""
        self.report(ctx, stage, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._events.close()
