"""``nvalchemi md``: molecular dynamics of every structure of the given files in one batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvalchemi import units
from nvalchemi.cli import options

if TYPE_CHECKING:
    from nvalchemi.cli.statistics import RunStatistics
    from nvalchemi.cli.structures import Structure
    from nvalchemi.data import Batch
    from nvalchemi.dynamics import BaseDynamics


def md(
    files: options.Files,
    model: options.Model,
    steps: Annotated[int, typer.Option(min=1, help="Steps to make.", show_default=False)],
    ensemble: Annotated[
        options.Ensemble,
        typer.Option(help="nve: velocity Verlet; nvt: Langevin; npt: isotropic MTK barostat."),
    ] = "nvt",
    temperature: Annotated[
        float | None,
        typer.Option(
            help="K; needed by nvt and npt, and where the files have no velocities.", show_default=False
        ),
    ] = None,
    dt: Annotated[float, typer.Option(help="Time step, fs.")] = 1.0,
    friction: Annotated[float, typer.Option(help="Friction of nvt, 1/fs.")] = 0.01,
    pressure: Annotated[float, typer.Option(help="Pressure of npt, GPa.")] = 0.0,
    thermostat_time: Annotated[float, typer.Option(help="Relaxation time of npt's thermostat, fs.")] = 100.0,
    barostat_time: Annotated[float, typer.Option(help="Relaxation time of npt's barostat, fs.")] = 1000.0,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 42,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Final structures with velocities.", show_default=False),
    ] = None,
    traj: Annotated[
        Path | None, typer.Option(help="Write a trajectory (.extxyz).", show_default=False)
    ] = None,
    traj_every: Annotated[int, typer.Option(min=1, help="Steps between its frames.")] = 10,
    log: options.Log = None,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between rows of the log.")] = 10,
    device: options.Device = "auto",
    threads: options.Threads = None,
    restart: options.Restart = None,
    save_every: options.SaveEvery = 100,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    show_hooks: options.ShowHooks = False,
) -> None:
    """Molecular dynamics of every structure of all FILES in one batch.

    Velocities come from the files when every structure has them, and are drawn at --temperature otherwise.
    """
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli import session
    from nvalchemi.cli import structures as inputs
    from nvalchemi.cli.errors import InputError, InterruptError
    from nvalchemi.cli.statistics import RunStatistics
    from nvalchemi.dynamics import NPT, NVE, NVTLangevin

    if ensemble != "nve" and temperature is None:
        raise InputError(f"--ensemble {ensemble} needs --temperature")
    outputs.check_outputs(
        {"--output": output, "--traj": traj, "--log": log, "--restart": restart},
        files,
        overwrite=overwrite,
        continued=outputs.continued_outputs(restart),
    )
    outputs.check_trajectory_file(traj)
    structures = inputs.read_structures(files)
    for structure in structures:
        structure.data.info.pop("converged", None)  # said by `relax` of a state that is now left
    if output is not None:
        outputs.check_structure_file("--output", output, len(structures))
    session.set_threads(threads)
    where = session.choose_device(device)
    potential = session.load(model, where)
    batch = inputs.make_batch(structures, potential, where, keep_velocities=True)
    statistics = RunStatistics(log_every)
    hooks = [
        *session.log_hooks(log, frequency=log_every),
        *session.trajectory_hooks(traj, frequency=traj_every),
        statistics,
        *session.terminal_hooks(
            steps, lambda ctx: f"{statistics.mean_temperature.mean():.0f} K", quiet=quiet
        ),
    ]
    try:
        _set_velocities(batch, temperature, seed)
        common: dict[str, Any] = {"hooks": hooks, "max_edges_per_eval": "auto"}
        if ensemble == "nve" or temperature is None:
            dynamics: BaseDynamics = NVE(potential, dt, **common)
        elif ensemble == "nvt":
            dynamics = NVTLangevin(potential, dt, temperature, friction, random_seed=seed, **common)
        else:
            applied = pressure * units.GPa
            dynamics = NPT(potential, dt, temperature, applied, barostat_time, thermostat_time, **common)
    except ValueError as error:
        raise InputError(str(error)) from error
    if show_hooks:
        typer.echo(dynamics.describe_hooks())

    interrupted = session.run(dynamics, structures, batch, steps, restart=restart, save_every=save_every)

    if output is not None:
        session.save(output, inputs.with_results(structures, batch, velocities=True))
    if not quiet:
        _print_results(structures, batch, dynamics, statistics)
    if interrupted:
        raise InterruptError(
            f"interrupted after {int(batch.system_step.max())} steps; the files have what was done until then"
            + session.how_to_resume(restart)
        )
    session.check_finite(structures, batch)


def _set_velocities(batch: "Batch", temperature: float | None, seed: int) -> None:
    """Draw velocities unless the files had them."""
    from nvalchemi.dynamics import initialize_velocities

    if "velocities" in batch:
        return
    if temperature is None:
        raise ValueError("not every structure has velocities: --temperature says at which to draw them")
    initialize_velocities(batch, temperature, random_seed=seed)


def _print_results(
    structures: "Sequence[Structure]", batch: "Batch", dynamics: "BaseDynamics", statistics: "RunStatistics"
) -> None:
    from nvalchemi.cli.statistics import engine_temperature
    from nvalchemi.cli.tables import Cell, Column, print_table
    from nvalchemi.dynamics import NVE

    columns = [
        Column("#"), Column("name"), Column("atoms", "d"), Column("steps", "d"), Column("time/ps", ".3f"),
        Column("energy/eV", ".4f"), Column("T/K", ".1f"), Column("mean T/K", ".1f"),
        Column("ΔE total/meV/atom", "+.3f"),
    ]  # fmt: skip
    per_graph = (
        batch.num_nodes_per_graph,
        batch.system_step[:, 0],
        dynamics.elapsed_time(batch) / 1000,
        batch.energy[:, 0],
        engine_temperature(dynamics, batch),
        statistics.mean_temperature,
        1000 * statistics.energy_change / batch.num_nodes_per_graph,
    )
    names = [structure.name for structure in structures]
    if type(dynamics) is not NVE:
        columns.pop()  # what a thermostat takes and gives says nothing about the integration
    rows: list[list[Cell]] = [
        [str(k), name, *values[: len(columns) - 2]]
        for k, (name, *values) in enumerate(zip(names, *(t.tolist() for t in per_graph), strict=True))
    ]
    print_table(columns, rows)
