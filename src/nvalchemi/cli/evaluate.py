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

    if output is not None and output.suffix not in _WRITERS:
        raise InputError(f"--output {output}: the suffix must be {', '.join(_WRITERS)}")
    outputs.check_outputs({"--output": output}, data or [], overwrite=overwrite)
    session.set_threads(threads)
    where = session.choose_device(device)
    potential = session.load(model, where, "MODEL")
    keys = {"energy": energy_key, "forces": forces_key, "stress": stress_key}
    name, dataset = _structures(model, data or [], potential, keys, where)
    began = time.monotonic()
    try:
        errors = evaluation.evaluate(
            potential, dataset, where, per_element=per_element, group_by=by, fit_offsets=fit_offsets
        )
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error
    seconds = time.monotonic() - began
    if not errors.metrics:
        raise InputError(f"{name}: {model} gives nothing that the structures have a label of")
    if not quiet:
        typer.echo(f"{model} on {len(dataset)} structures of {name}, {seconds:.1f} s")
        print_errors({name: errors})
        print_groups(errors)
        _print_offsets(errors)
    if output is not None:
        about = {"model": model, "data": name, "structures": len(dataset), "seconds": seconds}
        outputs.write_text(output, _WRITERS[output.suffix](about, errors))


def _structures(
    model: str,
    files: list[Path],
    potential: "BaseModelMixin",
    keys: Mapping[str, str],
    device: "torch.device",
) -> "tuple[str, StructureDataset]":
    """Structures to evaluate on, and where they are from."""
    from nvalchemi.cli.errors import InputError
    from nvalchemi.cli.labelled_data import read_labelled
    from nvalchemi.cli.train_setup import left_aside
    from nvalchemi.data.datasets import InMemoryDataset

    if not files:
        try:
            return left_aside(Path(model), device)
        except ValueError as error:
            raise InputError(f"MODEL {model}: {error}; give DATA to evaluate on") from error
    parts = [read_labelled(file, potential, keys) for file in files]
    present = [label for label in keys if any(part.counts[label] for part in parts)]
    if not present:
        parts[0].require(keys, keys)
    structures = [data for part in parts for data in part.dataset]
    return ", ".join(map(str, files)), InMemoryDataset(structures)


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
