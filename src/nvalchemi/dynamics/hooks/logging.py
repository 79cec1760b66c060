"""Logs of a run: one row per structure and logged step."""

import atexit
import csv
import io
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, TextIO, runtime_checkable

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.dynamics.hooks._context import FedWorkflow, SimulationWorkflow, dynamics_context
from nvalchemi.dynamics.hooks._tensorboard import TensorBoardWriter
from nvalchemi.dynamics.restart import cut_back, position_to_resume
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.state import Stateful
from nvalchemi.dynamics.thermo import kinetic_energy, max_force, pressure, temperature, volume
from nvalchemi.hooks import DynamicsContext, HookContext

CustomScalar = Callable[[DynamicsContext], Tensor | float]
Row = dict[str, int | float | None]
Columns = dict[str, Tensor]

_BACKLOG = 64
"""Records that may wait for the writer before the run waits for it: bounds the memory when a disk is slow."""


class LoggingHook:
    """Write one row per active structure: step, time, energy, largest force, temperature and more.

    The columns are ``step, time, graph_idx, system_id, status, energy, fmax``, then ``temperature`` if there
    are velocities, ``pressure, volume`` if there is a cell or structures come from a sampler, and the custom
    scalars. Units: fs, eV, eV/Å, K, eV/Å³, Å³. A quantity that a structure does not have (the volume of a
    molecule, the time of a minimiser) is left empty (``null`` in jsonl). Time, fmax and the degrees of freedom
    of the temperature are those of the engine (``elapsed_time``, ``max_force``, ``conserves_momentum``); an
    engine of your own without these has no time, the largest force as fmax, and the default rule of
    :mod:`nvalchemi.dynamics.thermo`.

    The scalars are computed where the batch is; a thread fetches and writes them and flushes the file after
    every record, so that a killed run loses at most the record being written. A further ``run``, and a
    restart, append: the header is not repeated, an unfinished last line is removed, and after
    :meth:`load_state_dict` so is all that was written since the state was saved, as it will be written again.

    Parameters
    ----------
    backend : {"csv", "jsonl", "tensorboard", "custom"}, default "csv"
        Form of the log. ``"tensorboard"`` writes scalars ``<quantity>/system_<system_id>`` to a folder and
        needs the extra ``[tensorboard]``. ``"custom"`` hands the rows to ``writer_fn`` instead of a file.
    frequency : int, default 1
        Log every so many steps.
    log_path : str or Path, optional
        The file, or the folder for TensorBoard; default ``dynamics.csv`` (``.jsonl``, ``.tensorboard``) in the
        current directory. Missing folders are made.
    custom_scalars : mapping of str to callable, optional
        Further columns: ``fn(ctx)`` gives one number per structure, ``[B]`` or ``[B, 1]``, or one number for
        all.
    writer_fn : callable, optional
        For ``backend="custom"``: called with the list of rows of one step, each a dictionary, in the writer's
        thread. If it has ``state_dict`` and ``load_state_dict``, a restart brings its state back.
    stage : DynamicsStage, optional
        Where in the step to log; default ``AFTER_STEP``.
    append : bool, default True
        Go on behind the rows of an existing file. False: the first record replaces the file; later runs
        append to it.

    Raises
    ------
    ValueError
        Unknown backend, ``writer_fn`` without the custom backend or the reverse, a custom scalar named like a
        column or of a wrong shape, or an existing log with other columns.

    Examples
    --------
    >>> def atoms(ctx):
    ...     return ctx.batch.num_nodes_per_graph
    >>> hook = LoggingHook(log_path="argon.csv", frequency=10, custom_scalars={"atoms": atoms})
    >>> hook.frequency, hook.stage.name
    (10, 'AFTER_STEP')
    """

    order_role = "record"

    def __init__(
        self,
        backend: str = "csv",
        frequency: int = 1,
        log_path: str | Path | None = None,
        custom_scalars: Mapping[str, CustomScalar] | None = None,
        writer_fn: Callable[[list[Row]], None] | None = None,
        stage: Enum | None = None,
        *,
        append: bool = True,
    ) -> None:
        if backend not in ("csv", "jsonl", "tensorboard", "custom"):
            raise ValueError(
                f"unknown backend {backend!r}; there are 'csv', 'jsonl', 'tensorboard' and 'custom'"
            )
        if (writer_fn is not None) != (backend == "custom"):
            raise ValueError("writer_fn and backend='custom' go together: give both or neither")
        self.backend = backend
        self.frequency = frequency
        self.stage: Enum | None = DynamicsStage.AFTER_STEP if stage is None else stage
        self.log_path = Path(log_path if log_path is not None else f"dynamics.{backend}")
        self.custom_scalars = dict(custom_scalars or {})
        self._writer_fn = writer_fn
        if backend == "tensorboard":
            self._writer_fn = TensorBoardWriter(self.log_path, append=append)
        self._append = append
        self._writer: _WriterThread | None = None
        self._resume_at: int | None = None

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Record the active structures of ``ctx.batch``."""
        ctx, batch = dynamics_context(self, ctx)
        columns = self._columns(ctx, batch)
        if self._writer is None:
            self._writer = _WriterThread(self._open_backend(list(columns)))
        active = ctx.active_graph_mask
        self._writer.put(columns, None if active is None else active.clone())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is waiting and close the file; the next record opens it again for appending."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def flush(self) -> None:
        """Wait until every record so far is in the file."""
        if self._writer is not None:
            self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Where the log ends, once every record so far is on the disk."""
        self.flush()
        if isinstance(self._writer_fn, Stateful):
            return {"writer_fn": dict(self._writer_fn.state_dict())}
        if self._writer_fn is not None:
            return {}
        if self._resume_at is not None:
            return {"position": self._resume_at}
        return {"position": position_to_resume(self.log_path, keep=self._append)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a log: what was written after the state was saved is removed before the next record."""
        self.close()
        if isinstance(self._writer_fn, Stateful) and "writer_fn" in state:
            self._writer_fn.load_state_dict(state["writer_fn"])
        self._append, self._resume_at = True, state.get("position")

    # ------------------------------------------------------------------ what is logged
    def _columns(self, ctx: DynamicsContext, batch: Batch) -> Columns:
        """New tensors ``[B]``, one per column, on the device of the batch."""
        engine = ctx.workflow if isinstance(ctx.workflow, SimulationWorkflow) else None
        none = torch.full((batch.num_graphs,), torch.nan, dtype=torch.float64, device=batch.device)
        columns: Columns = {
            "step": torch.full_like(batch.system_id[:, 0], ctx.step_count),
            "time": none if engine is None else engine.elapsed_time(batch),
            "graph_idx": torch.arange(batch.num_graphs, device=batch.device),
            "system_id": batch.system_id[:, 0].clone(),
            "status": batch.status[:, 0].clone(),
            "energy": batch.energy[:, 0].clone(),
            "fmax": max_force(batch) if engine is None else engine.max_force(batch),
        }
        kinetic = kinetic_energy(batch) if "velocities" in batch else None
        if kinetic is not None:
            columns["temperature"] = temperature(batch, engine is None or engine.conserves_momentum, kinetic)
        # Crystals may follow molecules from a sampler; a csv file cannot take up columns later.
        fed = isinstance(ctx.workflow, FedWorkflow) and ctx.workflow.sampler is not None
        if fed or "cell" in batch:
            columns["pressure"], columns["volume"] = pressure(batch, kinetic), volume(batch)
        for name, function in self.custom_scalars.items():
            if name in columns:
                raise ValueError(f"custom scalar {name!r} of the log has the name of a column")
            columns[name] = _per_graph(name, function(ctx), batch.num_graphs, batch.device)
        return columns

    def _open_backend(self, names: list[str]) -> "_Backend":
        if self._writer_fn is not None:
            return _CustomBackend(self._writer_fn)
        if not self._append:
            self.log_path.unlink(missing_ok=True)
        if self._resume_at is not None:
            cut_back(self.log_path, self._resume_at)
        self._append, self._resume_at = True, None
        return _BACKENDS[self.backend](self.log_path, names)


def _per_graph(name: str, value: Tensor | float, num_graphs: int, device: torch.device) -> Tensor:
    """A custom scalar as a new tensor ``[B]``."""
    tensor = torch.as_tensor(value, device=device).detach()
    if tensor.ndim == 0:
        tensor = tensor.expand(num_graphs)
    elif tensor.shape == (num_graphs, 1):
        tensor = tensor[:, 0]
    if tensor.shape != (num_graphs,):
        raise ValueError(
            f"custom scalar {name!r} of the log must give one number or a tensor of shape [{num_graphs}], "
            f"got {list(tensor.shape)}"
        )
    return tensor.clone()


# ---------------------------------------------------------------------- where the rows go
@runtime_checkable
class _Backend(Protocol):
    def write(self, rows: list[Row]) -> None:
        """Write the rows of one step and hand them to the operating system."""
        ...

    def close(self) -> None: ...


class _CustomBackend:
    def __init__(self, writer_fn: Callable[[list[Row]], None]) -> None:
        self._writer_fn = writer_fn

    def write(self, rows: list[Row]) -> None:
        self._writer_fn(rows)

    def close(self) -> None:
        if isinstance(self._writer_fn, TensorBoardWriter):
            self._writer_fn.close()


class _CsvBackend:
    def __init__(self, path: Path, names: list[str]) -> None:
        header = io.StringIO()
        csv.writer(header).writerow(names)
        self.file = _open_for_append(path, header.getvalue())
        self.writer = csv.DictWriter(self.file, names, restval="", extrasaction="ignore")

    def write(self, rows: list[Row]) -> None:
        if rows and (new := rows[0].keys() - set(self.writer.fieldnames)):
            raise ValueError(
                f"log {self.file.name} has no columns for {sorted(new)}, which the batch got in mid-run: log to a "
                f"new log_path, or with backend='jsonl', where every row carries its names"
            )
        self.writer.writerows(rows)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class _JsonlBackend:
    def __init__(self, path: Path, names: list[str]) -> None:
        del names  # every line carries them
        self.file = _open_for_append(path, "")

    def write(self, rows: list[Row]) -> None:
        finite = (
            {
                name: None if value is None or not math.isfinite(value) else value
                for name, value in row.items()
            }
            for row in rows
        )
        self.file.write("".join(json.dumps(row) + "\n" for row in finite))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


_BACKENDS = {"csv": _CsvBackend, "jsonl": _JsonlBackend}


def _open_for_append(path: Path, header: str) -> TextIO:
    """Open a log of one line per row where its last complete line ends, writing the header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = 0
    if path.exists():
        with path.open("rb") as log:
            first = log.readline() if header else b""
            if first.endswith(b"\n") and first != header.encode():
                raise ValueError(
                    f"log {path} has the columns {first.decode().strip()}, this run writes {header.strip()}: "
                    f"give another log_path or remove the file"
                )
            end = _end_of_last_line(log)
    file = path.open("a", encoding="utf-8", newline="")
    file.truncate(end)
    if end == 0:
        file.write(header)
        file.flush()
    return file


def _end_of_last_line(file: BinaryIO, block: int = 1 << 16) -> int:
    """Length of a file without a last line that is not complete, found from the end."""
    size = file.seek(0, io.SEEK_END)
    while size > 0:
        start = max(0, size - block)
        file.seek(start)
        found = file.read(size - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0


class _WriterThread:
    """Fetches, formats and writes records while the run goes on; errors are raised at the next record."""

    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        self._records: queue.Queue[tuple[Columns, Tensor | None] | None] = queue.Queue(_BACKLOG)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="nvalchemi-log", daemon=True)
        self._thread.start()
        # A hook that is used without a run and never closed still writes its last rows.
        atexit.register(self.close)

    def put(self, columns: Columns, active: Tensor | None) -> None:
        self._raise_error()
        self._records.put((columns, active))

    def flush(self) -> None:
        self._records.join()
        self._raise_error()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._records.put(None)
        self._thread.join()
        self._backend.close()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        failed = False
        while (record := self._records.get()) is not None:
            # After a failure records are still taken, or the run would wait for a writer that is no more.
            if not failed:
                try:
                    self._backend.write(_rows(*record))
                except Exception as error:  # raised again in the thread of the run
                    self._error, failed = error, True
            self._records.task_done()


def _rows(columns: Columns, active: Tensor | None) -> list[Row]:
    """Rows of the active structures; NaN becomes ``None``."""
    values = {
        name: (tensor if active is None else tensor[active]).tolist() for name, tensor in columns.items()
    }
    return [
        {name: None if value != value else value for name, value in zip(values, row, strict=True)}
        for row in zip(*values.values(), strict=True)
    ]
