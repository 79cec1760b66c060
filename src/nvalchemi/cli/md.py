"""``nvalchemi md``: molecular dynamics of every structure of the given files in one batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    log_every: Annotated[
        int, typer.Option(min=1, help="Steps between rows of the log, and of the report.")
    ] = 10,
    report: options.Report = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    restart: options.Restart = None,
    save_every: options.SaveEvery = 100,
    overwrite: options.Overwrite = False,
    config: options.Config = None,
    quiet: options.Quiet = False,
    show_hooks: options.ShowHooks = False,
) -> None:
    """Molecular dynamics of every structure of all FILES in one batch.

    Velocities come from the files when every structure has them, and are drawn at --temperature otherwise.
    """
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli import session
    from nvalchemi.cli import structures as inputs
    from nvalchemi.cli.ensemble import Ensemble
    from nvalchemi.cli.interrupt import interrupted
    from nvalchemi.cli.statistics import RunStatistics

    sampled = Ensemble(ensemble, temperature, dt, friction, pressure, thermostat_time, barostat_time, seed)
    outputs.check_outputs(
        {"--output": output, "--traj": traj, "--log": log, "--report": report, "--restart": restart},
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
    sampled.set_velocities(batch)
    statistics = RunStatistics(log_every)
    hooks = [
        *session.log_hooks(log, frequency=log_every),
        *session.trajectory_hooks(traj, frequency=traj_every),
        *session.report_hooks(report, structures, frequency=log_every),
        statistics,
        *session.progress_hooks(
            steps, lambda ctx: f"{statistics.mean_temperature.mean():.0f} K", quiet=quiet
        ),
    ]
    dynamics = sampled.engine(potential, hooks)
    if show_hooks:
        typer.echo(dynamics.describe_hooks())
        return
    received = session.run(dynamics, structures, batch, steps, restart=restart, save_every=save_every)
    if output is not None:
        session.save(output, inputs.with_results(structures, batch, velocities=True))
    if not quiet:
        _print_results(structures, batch, dynamics, statistics)
    if received is not None:
        raise interrupted(
            received,
            f"interrupted after {int(batch.system_step.max())} steps; the files have what was done until then"
            + session.how_to_resume(restart),
        )
    session.check_finite(structures, batch)


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
