"""``nvalchemi info``, ``check`` and ``convert``: what is in a file, whether to train on it, another format."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi.cli import options

if TYPE_CHECKING:
    from nvalchemi.data import AtomicData

_FORMULAS_SHOWN = 12


def info(
    file: Annotated[
        Path, typer.Argument(help="Structures, in any format that ASE reads.", show_default=False)
    ],
) -> None:
    """Say what is in FILE.

    Frames, formulas, elements, periodicity, fields and the ranges of their values.
    """
    import torch

    from nvalchemi.cli.errors import InputError
    from nvalchemi.data import iread

    summary = _Summary()
    try:
        for data in iread(file, dtype=torch.float64):
            summary.add(data)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    if not summary.frames:
        raise InputError(f"{file}: no structure in it")
    typer.echo("\n".join(line.rstrip() for line in summary.lines(file)))


def check(
    file: Annotated[
        Path,
        typer.Argument(help="A data set to train on, in any format that `info` reads.", show_default=False),
    ],
) -> None:
    """Say whether FILE is fit to train on.

    Looks for missing labels, duplicates, overlapping atoms, outliers, values that are not finite, and a stress of the
    wrong sign or unit. Exit code 1 when it is not fit.
    """
    from nvalchemi.cli.errors import InputError
    from nvalchemi.data.check import check_dataset

    try:
        report = check_dataset(file)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    typer.echo("\n".join(report.lines()))
    if not report.fit_to_train:
        raise typer.Exit(1)


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File to read.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.", show_default=False)],
    index: Annotated[str, typer.Option(help="Frames, as in ASE: 5, -1, 10:20, ::10.")] = ":",
    input_format: Annotated[
        str | None, typer.Option(help="Format of IN.  [default: by its name and content]", show_default=False)
    ] = None,
    output_format: Annotated[
        str | None, typer.Option(help="Format of OUT.  [default: by its suffix]", show_default=False)
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out frames that cannot be read.")
    ] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Convert structures from one format to another.

    Frame by frame; OUT appears whole or not at all.
    """
    import torch

    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.output import check_outputs
    from nvalchemi.data import iread, write

    check_outputs({"OUT": target}, [source], overwrite=overwrite)
    try:
        frames = iread(
            source,
            index,
            format=input_format,
            on_error="skip" if skip_broken else "raise",
            dtype=torch.float64,
        )
        count = write(target, _not_empty(frames, source, index), format=output_format)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    typer.echo(f"{target}: {count} structure{'s' if count != 1 else ''}")


def _not_empty(frames: Iterable["AtomicData"], source: Path, index: str) -> Iterator["AtomicData"]:
    empty = True
    for frame in frames:
        empty = False
        yield frame
    if empty:
        what = "no structure in it" if index == ":" else f"--index {index} chooses no frame of it"
        raise ValueError(f"{source}: {what}")


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
class _Summary:
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

    def lines(self, file: Path) -> Iterator[str]:
        """The summary in words."""
        from ase.data import chemical_symbols

        common = self.formulas.most_common(_FORMULAS_SHOWN)
        rest = len(self.formulas) - len(common)
        elements = ", ".join(f"{chemical_symbols[z]} {n}" for z, n in sorted(self.elements.items()))
        yield f"{file}"
        yield f"frames        {self.frames}"
        yield f"atoms         {self.atoms}, per frame {self.sizes}"
        yield (
            "formulas      "
            + ", ".join(f"{name} ×{n}" for name, n in common)
            + (f", {rest} more" if rest else "")
        )
        yield f"elements      {elements}"
        yield "periodic      " + ", ".join(f"{pbc} ×{n}" for pbc, n in self.periodicity.most_common())
        for name, values in self.ranges.items():
            yield f"{name:<25} {values}"
        yield "fields"
        for name, (level, shape) in self.fields.items():
            yield f"  {name:<20} {level:<7} {shape:<11} {self._share(self.counts[name])}"
        for key, count in self.info_keys.items():
            yield f"  {key:<20} info    {'':<11} {self._share(count)}"

    def _share(self, count: int) -> str:
        return "" if count == self.frames else f"in {count} of {self.frames} frames"
