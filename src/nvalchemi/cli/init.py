"""``nvalchemi init``: configurations to begin with."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from nvalchemi.cli import options
from nvalchemi.cli.option_file import in_yaml

if TYPE_CHECKING:
    from nvalchemi.data import AtomicData
    from nvalchemi.data.statistics import DatasetStatistics

app = typer.Typer(help="Write a configuration to begin with.", no_args_is_help=True, rich_markup_mode=None)

# Measured on one core with 1,000 frames of a molecule: errors fall little after this many steps.
_STEPS, _STEPS_FINE_TUNING = 15_000, 1_000
_STEPS_AT_STAKE = 50
"""Steps between two checkpoints where epochs are shorter: seconds with a small model, a minute with a large one."""
_LABELS = ("energy", "forces", "stress")


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="Structures with labels.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The configuration.")] = Path("config.yaml"),
    model: Annotated[
        str, typer.Option(help="painn: a new model; or one to train on, as 7net-0, chgnet or a model file.")
    ] = "painn",
    overwrite: options.Overwrite = False,
) -> None:
    """Write a commented configuration that trains on DATA as it is.

    It is fitted to the data: labels under whatever name, weights of the loss, size of the batches, number of epochs.
    """
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli import session
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.labelled_data import read_labelled
    from nvalchemi.data.statistics import compute_statistics

    outputs.check_outputs({"--output": output}, [data], overwrite=overwrite)
    if model != "painn":
        session.load(model, session.choose_device("cpu"))  # whether it can be used here
    contents = _scan(data)
    keys = contents.label_keys()
    if "energy" not in keys and "forces" not in keys:
        seen = ", ".join(sorted(contents.names)) or "nothing"
        raise InputError(
            f"{data}: neither energies nor forces found; besides positions the structures have {seen}"
        )
    statistics = compute_statistics(read_labelled(data, keys=keys).dataset)
    outputs.write_text(output, _training_config(data, output, model, contents, keys, statistics))
    typer.echo("\n".join(contents.lines(data, keys)))
    typer.echo(f"wrote {output}; train with: nvalchemi train {output}")


_Structures = Annotated[list[Path], typer.Argument(help="Structures.", show_default=False)]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The configuration.", show_default=False)
]
_Potential = Annotated[str, typer.Option(help="Potential.")]


@app.command()
def relax(
    files: _Structures,
    output: _Output = None,
    model: _Potential = "7net-0",
    overwrite: options.Overwrite = False,
) -> None:
    """Write all options of `nvalchemi relax` as a file."""
    from nvalchemi.cli.relax import relax as command

    _write_options("relax", command, files, output or Path("relax.yaml"), overwrite, model, "relaxed.extxyz")


@app.command()
def md(
    files: _Structures,
    output: _Output = None,
    model: _Potential = "7net-0",
    overwrite: options.Overwrite = False,
) -> None:
    """Write all options of `nvalchemi md` as a file."""
    from nvalchemi.cli.md import md as command

    _write_options("md", command, files, output or Path("md.yaml"), overwrite, model, "end.extxyz")


def _write_options(
    name: str,
    command: Callable[..., None],
    files: list[Path],
    output: Path,
    overwrite: bool,
    model: str,
    result: str,
) -> None:
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli.option_file import commented_options

    outputs.check_outputs({"--output": output}, files, overwrite=overwrite)
    given: dict[str, Any] = {"files": [str(_from(output.parent, file)) for file in files]}
    given |= {"model": model, "output": result}
    if name == "md":
        given |= {"steps": 1000, "temperature": 300.0}
    head = f"# Run with:\n#     nvalchemi {name} --config {output}\n# Paths count from the folder of this file.\n\n"
    outputs.write_text(output, head + commented_options(command, **given))
    typer.echo(f"wrote {output}; run with: nvalchemi {name} --config {output}")


def _from(folder: Path, file: Path) -> Path:
    """The file as seen from a folder."""
    return file if file.is_absolute() else Path(os.path.relpath(file, folder))


# ---------------------------------------------------------------------- what is in the data
@dataclass
class _Contents:
    """What is in a file, collected structure by structure."""

    structures: int = 0
    formulas: Counter[str] = field(default_factory=Counter[str])
    names: Counter[str] = field(default_factory=Counter[str])
    """Structures by what they carry."""
    periodic: int = 0
    volume: float = 0.0
    """Of all periodic structures, Å³."""

    def add(self, data: "AtomicData") -> None:
        self.structures += 1
        self.formulas[data.chemical_formula] += 1
        arrays = data.info.get("arrays")
        more: Mapping[Any, Any] = arrays if isinstance(arrays, Mapping) else {}
        values = {**more, **data.info, **{name: data[name] for name in data.keys()}}
        self.names.update({str(name) for name, value in values.items() if _is_there(value)} - _NO_LABELS)
        if bool(data.pbc.all()) and "cell" in data:
            self.periodic += 1
            self.volume += float(data.cell[0].det().abs())

    def label_keys(self) -> dict[str, str]:
        """Key of each label that there is: of the names that have it in them the most frequent one, or its own."""
        found: dict[str, str] = {}
        for label in _LABELS:
            similar = self.similar(label)
            if similar:
                found[label] = max(similar, key=lambda name: (self.names[name], name == label, -len(name)))
        return found

    def similar(self, label: str) -> list[str]:
        """Names that may be those of a label."""
        stem = label.removesuffix("s")
        return [name for name in self.names if stem in name.lower() and not _is_something_else(name)]

    def lines(self, file: Path, keys: Mapping[str, str]) -> list[str]:
        """The contents in words."""
        common = ", ".join(f"{name} ×{count}" for name, count in self.formulas.most_common(6))
        more = len(self.formulas) - 6
        labels = ", ".join(
            (label if key == label else f"{label} (as {key})")
            + ("" if self.names[key] == self.structures else f" in {self.names[key]} of {self.structures}")
            + "".join(f" [also {name} in {self.names[name]}]" for name in self.similar(label) if name != key)
            for label, key in keys.items()
        )
        return [
            f"{file}: {self.structures} structures: {common}"
            + (f", {more} more formulas" if more > 0 else ""),
            f"labels: {labels}",
        ]


_NO_LABELS = frozenset(
    {"positions", "atomic_numbers", "atomic_masses", "cell", "pbc", "velocities", "arrays"}
)


_OTHER_ENERGIES = (
    "kinetic", "formation", "per_atom", "hull", "std", "var", "weight", "cut", "fermi", "correction", "error"
)  # fmt: skip


def _is_there(value: Any) -> bool:
    """Whether a value is not one that stands for a missing number."""
    numbers = np.asarray(value)
    return numbers.dtype.kind != "f" or bool(np.isfinite(numbers).any())


def _is_something_else(name: str) -> bool:
    """Whether a name with "energy" in it is that of another energy than the one that forces derive from."""
    return any(word in name.lower() for word in _OTHER_ENERGIES)


def _scan(file: Path) -> _Contents:
    import warnings

    import torch

    from nvalchemi.cli.errors import InputError
    from nvalchemi.data import iread

    contents = _Contents()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # about labels under other names, which are looked for here
            for data in iread(file, dtype=torch.float64):
                contents.add(data)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error
    if contents.structures < 3:
        raise InputError(f"{file}: {contents.structures} structures are too few to train on")
    return contents


# ---------------------------------------------------------------------- what is suggested
@dataclass(frozen=True)
class _Suggestion:
    """Numbers of a configuration that follow from the data."""

    validation: float
    test: float | None
    split: str
    batch_size: int
    epochs: int
    checkpoint_every: int

    @classmethod
    def of(cls, contents: _Contents, statistics: "DatasetStatistics", steps: int) -> "_Suggestion":
        n = contents.structures
        validation, test = (0.1, 0.1) if n >= 100 else (0.2, None)
        trained = int(n * (1 - validation - (test or 0)))
        by_atoms = 2048 * n // max(statistics.num_atoms, 1)
        batch_size = max(1, min(max(4, trained // 200), 32, by_atoms))
        epochs = min(max(ceil(steps * batch_size / max(trained, 1)), 20), 300)
        # Successive frames of one system resemble each other: drawn one by one, every validation frame would lie
        # between two that are trained on.
        split = "blocks" if len(contents.formulas) == 1 and n >= 100 else "random"
        checkpoint_every = min(max(1, _STEPS_AT_STAKE * batch_size // max(trained, 1)), epochs)
        return cls(validation, test, split, batch_size, epochs, checkpoint_every)


def _training_config(
    data: Path,
    output: Path,
    model: str,
    contents: _Contents,
    keys: Mapping[str, str],
    statistics: "DatasetStatistics",
) -> str:
    new = model == "painn"
    suggestion = _Suggestion.of(contents, statistics, _STEPS if new else _STEPS_FINE_TUNING)
    atoms = statistics.num_atoms / contents.structures
    with_stress = "stress" in keys and contents.periodic == contents.structures
    weights = {
        "energy": round(min(max(atoms, 1.0), 30.0)) if "energy" in keys else 0,
        "forces": 1 if "forces" in keys else 0,
        "stress": round(min(max(0.1 * contents.volume / contents.structures, 1.0), 100.0))
        if with_stress
        else 0,
    }
    stem = data.name.removesuffix("".join(data.suffixes))
    key_lines = "\n".join(
        f"  {label}_key: {keys.get(label, label)}" + ("" if label in keys else "  # not in these data")
        for label in _LABELS
    )
    test = "null" if suggestion.test is None else f"{suggestion.test}"
    summary = "\n".join(f"# {line}" for line in contents.lines(data, keys))
    return f"""\
# Training configuration, written by `nvalchemi init train`. Train with:
#     nvalchemi train {output}
#
{summary}
#
# Paths count from the folder of this file.

data:
  train: {in_yaml(str(_from(output.parent, data)))}
  # A share of these structures, or another file. The model with the smallest loss on these is the one that is kept.
  validation: {suggestion.validation}
  # Likewise, for errors on structures that had no influence whatever; null: none.
  test: {test}
  # How shares are drawn: random; blocks (of successive frames, for trajectories); or the name of an info key, such as
  # config_type: structures that agree in it stay together.
  split: {suggestion.split}
  # Names of the labels in the file.
{key_lines}

{_model_section(model)}

# Weights of the mean errors in the loss: of the energy per atom (eV), the forces (eV/Å) and the stress (eV/Å³).
# 0 leaves one out. Here the energy per atom counts as often as a structure has atoms.
loss:
  energy: {weights["energy"]}
  forces: {weights["forces"]}
  stress: {weights["stress"]}{"" if with_stress or "stress" not in keys else "  # some structures have no cell"}
  # mae: absolute errors; huber: squares of small errors, absolute large ones; mse: squares, which outliers dominate.
  kind: mae

training:
  epochs: {suggestion.epochs}
  batch_size: {suggestion.batch_size}
  learning_rate: {"3.0e-3" if new else "3.0e-4"}
  # cosine: up over the first twentieth, then down; plateau: halved when validation no longer gets better; constant.
  schedule: cosine
  weight_decay: 0.0
  # Largest norm of all gradients; null: no limit.
  gradient_clip: {"10.0" if new else "1.0"}
  # Validate, and keep, weights averaged over the last steps.
  average: true
  # float32, float64, or on a GPU bfloat16 or float16 (mixed precision).
  precision: float32
  # Epochs between two validations.
  validate_every: {max(1, suggestion.epochs // 20)}
  # Validations without progress after which training ends; null: all epochs.
  patience: null
  # Of the split, the first weights and the order of the batches.
  seed: 0
  # Processes that prepare batches; 0: none besides the main one.
  num_workers: 0

output:
  directory: {in_yaml(f"{stem}_{Path(model).stem}")}
  # Epochs between two checkpoints, from which `nvalchemi train --resume` goes on: what a crash or kill -9 may cost
  # (Ctrl-C and SIGTERM cost nothing); and how many of them are kept.
  checkpoint_every: {suggestion.checkpoint_every}
  keep_checkpoints: 2
"""


def _model_section(model: str) -> str:
    if model == "painn":
        return """\
# A new model, PaiNN. Energies of the elements are fitted to the data first.
model:
  name: painn
  # Features of each atom; 128 is more accurate and half as fast.
  hidden_dim: 64
  num_layers: 3
  num_radial: 20
  # Å
  cutoff: 5.0"""
    return f"""\
# A trained model to go on from (fine-tuning).
model:
  name: {in_yaml(model)}
  # Parameters that stay as they are, by name; * and ? are wildcards: ["*embedding*"].
  freeze: []
  # Subtract from the energies of the data those of the elements by which they differ from the model's. For data of
  # another code or other pseudopotentials, whose energies have another zero.
  fit_offsets: false"""
