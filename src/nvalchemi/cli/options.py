"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Files = Annotated[
    list[Path], typer.Argument(help="Structures, in any format that ASE reads.", show_default=False)
]
Model = Annotated[
    str,
    typer.Option(
        help="Potential: a name that `nvalchemi models` lists, a model file, or the directory of a training.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU where there is one.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads.  [default: torch's]", show_default=False)
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="Take options from this YAML file, as `nvalchemi init` writes it; those on the command line win.",
        show_default=False,
    ),
]
Log = Annotated[
    Path | None, typer.Option(help="Write a log: .csv, or .jsonl for JSON lines.", show_default=False)
]
Report = Annotated[
    Path | None,
    typer.Option(
        help="Write a page (.html) with curves, tables and settings, also while it runs.", show_default=False
    ),
]
Restart = Annotated[
    Path | None,
    typer.Option(
        help="Save the state of the run here. If the file exists, go on from it: the same command again resumes a "
        "run that was stopped, log and trajectory included.",
        show_default=False,
    ),
]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between saves of the state.")]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="Leave out structures that cannot be run, as those with two atoms in one place or an element that the "
        "potential does not know; the table says why, and the exit code is then 1.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table.")]
NoProgress = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
ShowHooks = Annotated[
    bool, typer.Option("--show-hooks", help="Print which hook fires at which stage and exit.")
]

Ensemble = Literal["nve", "nvt", "npt"]
Optimizer = Literal["fire", "fire2", "lbfgs"]
