"""``nvalchemi eval``: errors of a model on labelled structures."""

import csv
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi.cli import options

if TYPE_CHECKING:
    import torch

    from nvalchemi.cli.evaluation import Evaluation
    from nvalchemi.data import AtomicData
    from nvalchemi.data.datasets import StructureDataset
    from nvalchemi.models.base import BaseModelMixin


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A name that `nvalchemi models` lists, a model file, or the directory of a training.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Structures with labels. Without any, those that the training of MODEL left aside.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Also write: .html with parity plots, .json or .csv.", show_default=False
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Errors by this info key, too: config_type.", show_default=False),
    ] = None,
    per_element: Annotated[bool, typer.Option("--per-element", help="Force errors by element, too.")] = False,
    fit_offsets: Annotated[
        bool,
        typer.Option(
            "--fit-offsets",
            help="First subtract the energies of the elements by which the labels differ from the model's.",
        ),
    ] = False,
    energy_key: Annotated[str, typer.Option(help="Where the energies are.")] = "energy",
    forces_key: Annotated[str, typer.Option(help="Where the forces are.")] = "forces",
    stress_key: Annotated[str, typer.Option(help="Where the stresses are.")] = "stress",
    device: options.Device = "auto",
    threads: options.Threads = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Say how far MODEL is from the labels of DATA.

    Mean absolute and root mean square errors of energies, forces and stresses, as far as the data have them.
    """
    from nvalchemi.cli import evaluation, session
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli.error_table import print_errors, print_groups
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.progress import ProgressBar

    if output is not None and output.suffix not in _WRITERS:
        raise InputError(f"--output {output}: the suffix must be {', '.join(_WRITERS)}")
    if output is not None:
        outputs.check_outputs({"--output": output}, [*(data or []), *_files_of(model)], overwrite=overwrite)
    session.set_threads(threads)
    where = session.choose_device(device)
    potential = session.load(model, where, "MODEL")
    keys = {"energy": energy_key, "forces": forces_key, "stress": stress_key}
    name, dataset, labels = _structures(model, data or [], potential, keys, where)
    if by is not None:
        _check_key(by, dataset, name)
    began = time.monotonic()
    try:
        with ProgressBar(len(dataset), "structure", quiet=quiet) as bar:
            errors = evaluation.evaluate(
                potential,
                dataset,
                where,
                per_element=per_element,
                group_by=by,
                fit_offsets=fit_offsets,
                on_progress=lambda done: bar.advance_to(done, len(dataset)),
            )
    except ValueError as error:
        reason = session.with_origins(str(error), lambda number: labels[number])
        raise InputError(reason) from error
    seconds = time.monotonic() - began
    if not errors.metrics:
        raise InputError(f"{name}: {model} gives nothing that the structures have a label of")
    if not quiet:
        typer.echo(f"{model} on {len(dataset)} structures of {name}, {seconds:.1f} s")
        print_errors({name: errors})
        print_groups(errors)
        _print_offsets(errors)
    if errors.offsets_note:
        typer.echo(f"nvalchemi: warning: --fit-offsets: {errors.offsets_note}", err=True)
    if output is not None:
        about = {"model": model, "data": name, "structures": len(dataset), "seconds": seconds}
        outputs.write_text(output, _WRITERS[output.suffix](about, errors))


def _structures(
    model: str,
    files: list[Path],
    potential: "BaseModelMixin",
    keys: Mapping[str, str],
    device: "torch.device",
) -> "tuple[str, StructureDataset, Mapping[int, str]]":
    """Where the structures to evaluate on are from, they themselves, and what each is called by its ``system_id``."""
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.labelled_data import read_labelled
    from nvalchemi.cli.train_setup import left_aside
    from nvalchemi.data.datasets import InMemoryDataset

    if not files:
        try:
            name, dataset = left_aside(Path(model), device)
        except (ValueError, InputError) as error:
            raise InputError(f"MODEL {model}: {error}; give DATA to evaluate on") from error
        numbers = (int(data.system_id) for data in dataset)
        return name, dataset, {number: f"frame {number} of the data" for number in numbers}
    parts = [read_labelled(file, potential, keys) for file in files]
    present = [label for label in keys if any(part.counts[label] for part in parts)]
    if not present:
        parts[0].require(keys, keys)
    structures: list[AtomicData] = []
    labels: dict[int, str] = {}
    for part in parts:
        for frame, data in enumerate(part.dataset):
            number = len(structures)
            labels[number] = f"{data.chemical_formula} ({part.source}, frame {frame})"
            data.system_id.fill_(number)
            structures.append(data)
    return ", ".join(map(str, files)), InMemoryDataset(structures), labels


def _files_of(model: str) -> list[Path]:
    """Files of a model that no output may replace: its own, or what its training was made of."""
    from nvalchemi.cli.train_directory import input_files
    from nvalchemi.cli.train_setup import CONFIG, TrainingSetup

    path = Path(model)
    if not (path / CONFIG).is_file():
        return [path] if path.is_file() else []
    return [path / CONFIG, *input_files(TrainingSetup.read(path / CONFIG)).values()]


def _check_key(key: str, dataset: "StructureDataset", name: str) -> None:
    from nvalchemi.cli.errors import InputError

    there = {str(each) for data in dataset for each in data.info}
    if key not in there:
        raise InputError(
            f"--by {key}: no structure of {name} has it; there is {', '.join(sorted(there)) or 'nothing'} in their info"
        )


def _print_offsets(errors: "Evaluation") -> None:
    if errors.offsets:
        from ase.data import chemical_symbols

        words = ", ".join(f"{chemical_symbols[z]} {energy:.4f}" for z, energy in errors.offsets.items())
        typer.echo(f"energies of the elements subtracted from the labels, eV: {words}")


# ---------------------------------------------------------------------- files
def _as_json(about: dict[str, Any], errors: "Evaluation") -> str:
    content = {
        **about,
        "units": "eV, Å",
        "metrics": dict(errors.metrics),
        "counts": dict(errors.counts),
        "offsets": {str(z): energy for z, energy in errors.offsets.items()},
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _as_csv(about: dict[str, Any], errors: "Evaluation") -> str:
    from nvalchemi.cli.error_table import all_errors

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["quantity", "group", "count", "mae", "rmse", "unit"])
    writer.writerows(all_errors(errors))
    return file.getvalue()


def _as_page(about: dict[str, Any], errors: "Evaluation") -> str:
    from nvalchemi.cli.error_table import error_page

    return error_page(about, errors)


_WRITERS = {".html": _as_page, ".json": _as_json, ".csv": _as_csv}
