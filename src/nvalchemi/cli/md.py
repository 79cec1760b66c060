"""``nvalchemi md``: molecular dynamics of every structure of the given files in one batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi.cli import options

if TYPE_CHECKING:
    from nvalchemi.cli.statistics import RunStatistics
    from nvalchemi.cli.structures import Rejected, Structure
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
        Path | None, typer.Option(help="Write a trajectory: .extxyz, or .zarr.", show_default=False)
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
    skip_bad: options.SkipBad = False,
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
    from nvalchemi.cli.errors import RunError
    from nvalchemi.cli.interrupt import interrupted
    from nvalchemi.cli.record import RunRecord
    from nvalchemi.cli.statistics import RunStatistics

    sampled = Ensemble(ensemble, temperature, dt, friction, pressure, thermostat_time, barostat_time, seed)
    continued = outputs.continued_outputs(restart)
    outputs.check_outputs(
        {"--output": output, "--traj": traj, "--log": log, "--report": report, "--restart": restart},
        files,
        overwrite=overwrite,
        continued=continued,
    )
    outputs.check_trajectory_file(traj)
    found = inputs.read_structures(files)
    if output is not None:
        outputs.check_structure_file("--output", output, len(found[0]))
    session.set_threads(threads)
    where = session.choose_device(device)
    potential = session.load(model, where)
    structures, batch, rejected = session.usable_structures(
        found, potential, where, velocities=True, skip=skip_bad
    )
    record = RunRecord("md", (model, potential), sampled.told(), structures, batch)
    sampled.set_velocities(batch)
    statistics = RunStatistics(log_every)
    hooks = [
        *session.failure_hooks(),
        *session.log_hooks(log, frequency=log_every),
        *session.trajectory_hooks(traj, frequency=traj_every, overwrite=overwrite and not continued),
        *session.report_hooks(report, structures, frequency=log_every),
        statistics,
        *session.progress_hooks(
            steps, lambda ctx: f"{statistics.mean_temperature.nanmean():.0f} K", quiet=quiet
        ),
    ]
    dynamics = sampled.engine(potential, hooks)
    if show_hooks:
        typer.echo(dynamics.describe_hooks())
        return
    received = session.run(
        dynamics, structures, batch, steps, record=record, report=report, restart=restart, save_every=save_every
    )  # fmt: skip
    failed = session.failures(batch)
    if output is not None:
        session.save(output, inputs.with_results(structures, batch, failed, velocities=True))
    if not quiet:
        _print_results(structures, batch, dynamics, statistics, failed, rejected)
    if received is not None:
        raise interrupted(
            received,
            f"interrupted after {int(batch.system_step.max())} steps; the files have what was done until then"
            + session.how_to_resume(restart),
        )
    if failed or rejected:
        raise RunError(session.failed_in_words(structures, failed, rejected))


def _print_results(
    structures: "Sequence[Structure]",
    batch: "Batch",
    dynamics: "BaseDynamics",
    statistics: "RunStatistics",
    failed: Mapping[int, str],
    rejected: "Sequence[Rejected]",
) -> None:
    """One row per structure."""
    from nvalchemi.cli.statistics import engine_temperature
    from nvalchemi.cli.tables import Cell, Column, print_table
    from nvalchemi.dynamics import NVE

    columns = [
        Column("#"), Column("name"), Column("formula"), Column("atoms", "d"), Column("steps", "d"),
        Column("time/ps", ".3f"), Column("energy/eV", ".4f"), Column("T/K", ".1f"), Column("mean T/K", ".1f"),
        Column("ΔE total/meV/atom", "+.3f"), Column("status"),
    ]  # fmt: skip
    made = (
        batch.num_nodes_per_graph,
        batch.system_step[:, 0],
        dynamics.elapsed_time(batch) / 1000,
    )
    found = [batch.energy[:, 0], engine_temperature(dynamics, batch), statistics.mean_temperature]
    if type(dynamics) is NVE:
        found.append(1000 * statistics.energy_change / batch.num_nodes_per_graph)
    else:
        del columns[-2]  # what a thermostat takes and gives says nothing about the integration
    rows: list[list[Cell]] = []
    for k, structure in enumerate(structures):
        values = [None if k in failed else tensor[k].item() for tensor in found]
        outcome = f"failed: {failed[k]}" if k in failed else "done"
        known = (tensor[k].item() for tensor in made)
        rows.append([str(k), structure.name, structure.formula, *known, *values, outcome])
    for each in rejected:
        rows.append([None, each.name, each.formula, *[None] * (len(columns) - 4), f"failed: {each.reason}"])
    print_table(columns, rows)
