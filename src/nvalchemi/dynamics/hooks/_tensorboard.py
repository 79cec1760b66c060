"""Logs for TensorBoard."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class TensorBoardWriter:
    """Write the rows of a log as scalars ``<quantity>/system_<system_id>``, flushed after every record.

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
                "logs for TensorBoard need the extra [tensorboard]: pip install 'nvalchemi[tensorboard]'"
            )
        self.folder = folder
        self._append = append
        self._last_step: int | None = None
        self._purge_step: int | None = None
        self._writer: Any = None

    def __call__(self, rows: list[dict[str, int | float | None]]) -> None:
        """Write the rows of one step."""
        writer = self._writer
        if writer is None:
            writer = self._writer = self._open()
        for row in rows:
            for name, value in row.items():
                if name not in ("step", "system_id", "graph_idx") and value is not None:
                    writer.add_scalar(f"{name}/system_{row['system_id']}", value, row["step"])
            self._last_step = int(row["step"] or 0)
        writer.flush()

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        if not self._append:
            for file in self.folder.glob("events.out.tfevents.*"):
                file.unlink()
        self._append = True
        purge_step, self._purge_step = self._purge_step, None
        return SummaryWriter(str(self.folder), purge_step=purge_step)

    def close(self) -> None:
        """Close the event file; the next record opens another one beside it."""
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
