"""What is in a file, for ``nvalchemi info``: structures, Zarr stores, checkpoints of trainings, states of runs."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi.data import AtomicData

_FORMULAS_SHOWN = 12
_MODEL_SUFFIXES = (".safetensors", ".pth", ".pt", ".model")
_LABELS = ("energy", "forces", "stress")


def describe(file: Path) -> Iterator[str]:
    """Lines about a file.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or nothing is in it.
    """
    from nvalchemi.cli.train_setup import CHECKPOINTS, CONFIG, MODEL_FILES
    from nvalchemi.training.archive import MANIFEST

    yield str(file)
    if file.is_dir() and (file / "zarr.json").is_file():
        yield from _store(file)
    elif (file / CONFIG).is_file():
        yield f"training      as {file / CONFIG} says"
        for name in MODEL_FILES:
            if (file / name).is_file():
                yield f"best model    {file / name}"
                yield from _model(file / name)
        if (file / CHECKPOINTS).is_dir():
            yield from _checkpoints(file / CHECKPOINTS)
    elif file.is_dir():
        if not (file / MANIFEST).is_file() and not any(file.glob(f"*/{MANIFEST}")):
            raise ValueError(f"{file} is a directory, neither a Zarr store nor one with checkpoints")
        yield from _checkpoints(file)
    elif file.suffix in _MODEL_SUFFIXES and file.is_file():
        yield from _model(file)
    elif _is_restart_file(file):
        yield from _restart_file(file)
    else:
        yield from _structures(file)


# ---------------------------------------------------------------------- stores
def _store(path: Path) -> Iterator[str]:
    import numpy as np

    from nvalchemi.data.zarr import AtomicDataZarrReader
    from nvalchemi.data.zarr.description import count_elements, describe_arrays

    reader = AtomicDataZarrReader(path)
    if len(reader) == 0:
        raise ValueError(f"{path}: no structure in it")
    sizes, edges = reader.num_nodes(), reader.num_edges()
    yield f"frames        {len(reader)}"
    yield f"atoms         {sizes.sum()}, per frame {_Range(sizes.min(), sizes.max())}"
    if edges.any():
        yield f"edges         {edges.sum()}, per frame {_Range(edges.min(), edges.max())}"
    yield f"elements      {_elements(count_elements(reader))}"
    systems = reader.system_ids()
    if 0 < len(systems) < len(reader):
        frames = np.unique(reader.column("system_id").numpy(), return_counts=True)[1]
        yield f"trajectories  {len(systems)} systems, frames of each {_Range(frames.min(), frames.max())}"
    arrays = describe_arrays(reader)
    have = {array.name: array.frames for array in arrays}
    yield "labels        " + ", ".join(
        f"{label} {'in none' if not have.get(label) else _share(have[label], len(reader)) or 'in all'}"
        for label in _LABELS
    )
    stored, size = sum(array.nbytes_stored for array in arrays), sum(array.nbytes for array in arrays)
    yield f"size          {_bytes(stored)} stored, {_bytes(size)} in memory"
    yield "fields"
    for array in arrays:
        shape = [*({"node": ["n"], "edge": ["e"], "system": ["1"]}[array.level]), *map(str, array.shape)]
        files = "" if array.chunks_per_shard == 1 else f", {array.chunks_per_shard} in a file"
        yield (
            f"  {array.name:<20} {array.level:<7} [{', '.join(shape)}]".ljust(44)
            + f"{array.dtype:<8} {_bytes(array.nbytes_stored):>9} of {_bytes(array.nbytes):>9}, chunks of "
            f"{array.chunk_rows} rows{files}, {array.compression}  {_share(array.frames, len(reader))}"
        )


# ---------------------------------------------------------------------- models
def _model(path: Path) -> Iterator[str]:
    from torch import nn

    from nvalchemi.models.catalog import load_model

    model = load_model(path)
    neighbors = model.model_config.neighbor_config
    if isinstance(model, nn.Module):
        parameters = list(model.parameters())
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        kind = type(model).__name__.removesuffix("Wrapper")
        yield f"model         {kind}, {sum(p.numel() for p in parameters)} parameters, {', '.join(dtypes)}"
        known = dict(model.named_buffers()).get("known_elements")
        if known is not None:
            yield f"elements      {_known(known.tolist())}"
    if neighbors is not None:
        yield f"cutoff        {neighbors.cutoff:g} Å"


def _known(known: Sequence[bool]) -> str:
    from ase.data import chemical_symbols

    symbols = [chemical_symbols[z] for z, yes in enumerate(known) if yes and z > 0]
    return f"{len(symbols)}: {', '.join(symbols)}" if len(symbols) < 118 else "any"


# ---------------------------------------------------------------------- checkpoints
def _checkpoints(path: Path) -> Iterator[str]:
    from nvalchemi.training.archive import MANIFEST, newest_first, read_newest

    newest, snapshot = read_newest(path)
    if newest != path:
        names = [checkpoint.name for checkpoint in newest_first(path)]
        yield f"checkpoints   {len(names)}: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
    yield f"newest        {newest.name}, intact" if newest != path else "checkpoint    intact"
    counters = snapshot.counters
    yield (
        f"trained       {counters['step_count']} steps, {counters['batch_count']} batches, "
        f"{counters['epoch_count']} epochs"
    )
    spec = snapshot.spec or {}
    for key, weights in snapshot.weights.items():
        numbers = sum(tensor.numel() for tensor in weights.values())
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
        kind = _last_name(spec.get("models", {}).get(key))
        yield f"model         {key}: {kind}{numbers} numbers in {len(weights)} tensors, {', '.join(dtypes)}"
    if spec:
        optimizers = spec.get("optimizer_configs")
        if isinstance(optimizers, Mapping) and "optimizer_cls" in optimizers:
            options = ", ".join(f"{name} {value}" for name, value in optimizers["optimizer_kwargs"].items())
            yield f"optimizer     {_last_name(optimizers['optimizer_cls'])}{options}"
        terms = [term.get("name", term.get("type")) for term in (spec.get("loss_fn") or {}).get("terms", ())]
        if terms:
            yield f"loss          {', '.join(map(str, terms))}"
        hooks = [_last_name(hook.get("type"), end="") for hook in spec.get("hooks") or ()]
        if hooks:
            yield f"hooks         {', '.join(hooks)}"
    manifest = json.loads((newest / MANIFEST).read_text(encoding="utf-8"))
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    yield f"size          {_bytes(size)}, torch {manifest['torch']}"


def _last_name(path: object, end: str = ", ") -> str:
    return f"{path.rpartition('.')[2]}{end}" if isinstance(path, str) else ""


# ---------------------------------------------------------------------- states of runs
def _is_restart_file(path: Path) -> bool:
    from nvalchemi.dynamics.restart import FORMAT

    if not path.is_file():
        return False
    with path.open("rb") as file:
        # A safetensors file begins with the length of its JSON header.
        length = int.from_bytes(file.read(8), "little")
        return length < path.stat().st_size and FORMAT.encode() in file.read(min(length, 4096))


def _restart_file(path: Path) -> Iterator[str]:
    from nvalchemi.cli.record import RunRecord, recorded
    from nvalchemi.data import FIELDS
    from nvalchemi.dynamics.restart import read_state
    from nvalchemi.dynamics.state import batch_from_state

    state = read_state(path)
    engine = state["engine"]
    parameters = {name: value for name, value in engine["parameters"].items() if name != "model"}
    yield f"state of      {engine['engine']} with {engine['parameters']['model']}, intact"
    yield f"made          {engine['step_count']} steps"
    record = recorded(engine)
    if record is not None:
        told = {"model": record["model"], **record["options"]}
        yield f"begun by      nvalchemi {record['command']}, " + ", ".join(
            f"{name} {value}" for name, value in told.items()
        )
    yield "parameters    " + ", ".join(f"{name} {value}" for name, value in parameters.items())
    hooks = [name for name, _ in engine["hooks"] if name != RunRecord.__name__]
    yield f"hooks         {', '.join(hooks) or 'none with a state'}"
    for who, reason in engine["failures"].items():
        yield f"failed        system {who}: {reason}"
    if engine["batch"] is not None:
        batch = batch_from_state(engine["batch"], "cpu")
        for name in list(batch.keys()):
            if name in FIELDS and not FIELDS[name].persistent:
                batch.remove_key(name)  # working state of engines and neighbour lists
        status = Counter[int](batch.status[:, 0].tolist())
        yield "status        " + ", ".join(f"{value} ×{count}" for value, count in sorted(status.items()))
        yield from _summary(batch.to_data_list())


# ---------------------------------------------------------------------- structures
def _structures(file: Path) -> Iterator[str]:
    import torch

    from nvalchemi.data import iread

    empty = True
    for line in _summary(iread(file, dtype=torch.float64)):
        empty = False
        yield line
    if empty:
        raise ValueError(f"{file}: no structure in it")


def _summary(structures: "Iterable[AtomicData]") -> Iterator[str]:
    """Lines about structures, of which only one is in memory at a time; none when there are none."""
    summary = _Structures()
    for data in structures:
        summary.add(data)
    if summary.frames:
        yield from summary.lines()


@dataclass
class _Range:
    """Smallest and largest of the values seen."""

    low: float = math.inf
    high: float = -math.inf

    def add(self, *values: float) -> None:
        self.low, self.high = min(self.low, *values), max(self.high, *values)

    def __str__(self) -> str:
        return f"{self.low:.6g}" if self.low == self.high else f"{self.low:.6g} … {self.high:.6g}"


@dataclass
class _Structures:
    """What is in a file, collected frame by frame."""

    frames: int = 0
    atoms: int = 0
    sizes: _Range = field(default_factory=_Range)
    formulas: Counter[str] = field(default_factory=Counter[str])
    elements: Counter[int] = field(default_factory=Counter[int])
    periodicity: Counter[str] = field(default_factory=Counter[str])
    fields: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    counts: Counter[str] = field(default_factory=Counter[str])
    info_keys: Counter[str] = field(default_factory=Counter[str])
    ranges: dict[str, _Range] = field(default_factory=dict[str, _Range])

    def add(self, data: "AtomicData") -> None:
        import torch

        self.frames += 1
        self.atoms += data.num_nodes
        self.sizes.add(data.num_nodes)
        self.formulas[data.chemical_formula or "(no atoms)"] += 1
        self.elements.update(data.atomic_numbers.tolist())
        self.periodicity["".join("T" if axis else "F" for axis in data.pbc[0].tolist())] += 1
        # Arrays of the file that are no known field; what a program has put under this key is its own affair.
        others = data.info.get("arrays")
        arrays: Mapping[str, Any] = others if isinstance(others, Mapping) else {}
        for name, array in arrays.items():
            self.fields[name] = ("node", f"[{', '.join(('n', *map(str, array.shape[1:])))}]")
            self.counts[name] += 1
        self.info_keys.update(str(key) for key in data.info if not (key == "arrays" and arrays))
        for name in data.keys():
            tail = data[name].shape[1:]
            shape = ", ".join(("n" if data.level(name) == "node" else "1", *map(str, tail)))
            self.fields[name] = (data.level(name), f"[{shape}]")
            self.counts[name] += 1
        if data.num_nodes == 0:
            return
        if "energy" in data:
            self._range("energy per atom, eV").add(data.energy.item() / data.num_nodes)
        if "forces" in data:
            self._range("largest force, eV/Å").add(data.forces.norm(dim=1).max().item())
        if "stress" in data:
            self._range("pressure −tr σ/3, eV/Å³").add(-data.stress[0].trace().item() / 3)
        if "cell" in data:
            lengths = data.cell[0].norm(dim=1)
            self._range("cell lengths, Å").add(lengths.min().item(), lengths.max().item())
            volume = torch.linalg.det(data.cell[0]).abs().item()
            if volume > 0:
                self._range("volume per atom, Å³").add(volume / data.num_nodes)

    def _range(self, name: str) -> _Range:
        return self.ranges.setdefault(name, _Range())

    def lines(self) -> Iterator[str]:
        """The summary in words."""
        common = self.formulas.most_common(_FORMULAS_SHOWN)
        rest = len(self.formulas) - len(common)
        yield f"frames        {self.frames}"
        yield f"atoms         {self.atoms}, per frame {self.sizes}"
        yield (
            "formulas      "
            + ", ".join(f"{name} ×{n}" for name, n in common)
            + (f", {rest} more" if rest else "")
        )
        yield f"elements      {_elements(self.elements)}"
        yield "periodic      " + ", ".join(f"{pbc} ×{n}" for pbc, n in self.periodicity.most_common())
        for name, values in self.ranges.items():
            yield f"{name:<25} {values}"
        yield "fields"
        for name, (level, shape) in self.fields.items():
            yield f"  {name:<20} {level:<7} {shape:<11} {_share(self.counts[name], self.frames)}"
        for key, count in self.info_keys.items():
            yield f"  {key:<20} info    {'':<11} {_share(count, self.frames)}"


def _elements(counts: Mapping[int, int]) -> str:
    from ase.data import chemical_symbols

    return ", ".join(f"{chemical_symbols[z]} {n}" for z, n in sorted(counts.items()))


def _share(count: int, frames: int) -> str:
    return "" if count == frames else f"in {count} of {frames} frames"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
