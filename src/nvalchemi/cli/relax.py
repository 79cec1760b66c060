"""``nvalchemi relax``: relax every structure of the given files in one batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi.cli import options

if TYPE_CHECKING:
    from nvalchemi.cli.structures import Rejected, Structure
    from nvalchemi.data import AtomicData, Batch
    from nvalchemi.dynamics import Minimiser
    from nvalchemi.hooks import DynamicsContext, Hook
    from nvalchemi.models.base import BaseModelMixin


def relax(
    files: options.Files,
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Relaxed structures.", show_default=False)],
    cell: Annotated[bool, typer.Option("--cell", help="Relax the cells too, to zero stress.")] = False,
    fmax: Annotated[
        float, typer.Option(help="Converged when no force (with --cell: nor cell force) is above, eV/Å.")
    ] = 0.05,
    steps: Annotated[int, typer.Option(min=1, help="Steps at most.")] = 500,
    optimizer: Annotated[options.Optimizer, typer.Option(help="Minimiser.")] = "fire",
    device: options.Device = "auto",
    threads: options.Threads = None,
    log: options.Log = None,
    report: options.Report = None,
    restart: options.Restart = None,
    save_every: options.SaveEvery = 100,
    skip_bad: options.SkipBad = False,
    overwrite: options.Overwrite = False,
    config: options.Config = None,
    quiet: options.Quiet = False,
    show_hooks: options.ShowHooks = False,
) -> None:
    """Relax every structure of all FILES in one batch.

    Structures keep what the files say of them (names, tags, fixed atoms); energy, forces and stress are
    added, and whether they converged. Those that did not are written too; the exit code is then 1. A structure that
    fails on the way (an energy that is not finite) leaves the others alone and has the reason as `failure` in its info.
    """
    from nvalchemi.cli import output as outputs
    from nvalchemi.cli import session
    from nvalchemi.cli import structures as inputs
    from nvalchemi.cli.errors import InputError, RunError
    from nvalchemi.cli.interrupt import interrupted
    from nvalchemi.cli.record import RunRecord

    if not 0 < fmax < float("inf"):
        raise InputError(f"--fmax must be positive and finite, got {fmax}")
    outputs.check_outputs(
        {"--output": output, "--log": log, "--report": report, "--restart": restart},
        files,
        overwrite=overwrite,
        continued=outputs.continued_outputs(restart),
    )
    found = inputs.read_structures(files, cell=cell)
    outputs.check_structure_file("--output", output, len(found[0]))
    session.set_threads(threads)
    where = session.choose_device(device)
    potential = session.load(model, where)
    structures, batch, rejected = session.usable_structures(
        found, potential, where, velocities=False, skip=skip_bad
    )
    hooks = [
        *session.failure_hooks(),
        *session.log_hooks(log, frequency=1),
        *session.report_hooks(report, structures),
        *session.progress_hooks(steps, _progress, quiet=quiet),
    ]
    dynamics = _make_minimiser(potential, optimizer, hooks, cell=cell, fmax=fmax)
    if show_hooks:
        typer.echo(dynamics.describe_hooks())
        return
    told = {"cell": cell, "fmax": fmax, "optimizer": optimizer}
    record = RunRecord("relax", (model, potential), told, structures, batch)

    received = session.run(
        dynamics, structures, batch, steps, record=record, report=report, restart=restart, save_every=save_every
    )  # fmt: skip

    failed = session.failures(batch)
    converged = (batch.status[:, 0] >= dynamics.exit_status).tolist()
    results = inputs.with_results(structures, batch, failed, velocities=False)
    for data, done in zip(results, converged, strict=True):
        data.info["converged"] = done
    session.save(output, results)
    if not quiet:
        largest = dynamics.max_force(batch).tolist()  # with --cell the forces on the cells, too
        outcomes = [
            f"failed: {failed[k]}" if k in failed else "yes" if done else "no"
            for k, done in enumerate(converged)
        ]
        _print_results(structures, results, batch, largest, outcomes, rejected, cell=cell)
    if received is not None:
        raise interrupted(
            received,
            f"interrupted after {int(batch.system_step.max())} steps; {output} has the structures as they were then"
            + session.how_to_resume(restart),
        )
    problems = [session.failed_in_words(structures, failed, rejected)] if failed or rejected else []
    unfinished = [
        structure.label
        for k, (structure, done) in enumerate(zip(structures, converged, strict=True))
        if not done and k not in failed
    ]
    if unfinished:
        problems.append(
            f"{len(unfinished)} of {len(structures)} not converged to {fmax} eV/Å in {steps} steps: "
            + session.some(unfinished)
        )
    if problems:
        raise RunError("; ".join(problems))


def _progress(ctx: "DynamicsContext") -> str:
    count = 0 if ctx.batch is None else ctx.batch.num_graphs
    active = count if ctx.active_graph_mask is None else int(ctx.active_graph_mask.sum())
    return f"{count - active} of {count} converged"


def _make_minimiser(
    potential: "BaseModelMixin", optimizer: options.Optimizer, hooks: "list[Hook]", *, cell: bool, fmax: float
) -> "Minimiser":
    from nvalchemi.dynamics import FIRE, FIRE2, LBFGS, AtomCoordinates, CellCoordinates, ConvergenceHook

    minimiser = {"fire": FIRE, "fire2": FIRE2, "lbfgs": LBFGS}[optimizer]
    return minimiser(
        potential,
        hooks=hooks,
        convergence_hook=ConvergenceHook.from_fmax(fmax),
        coordinates=CellCoordinates() if cell else AtomCoordinates(),
        max_edges_per_eval="auto",
    )


def _print_results(
    structures: "Sequence[Structure]",
    results: "Sequence[AtomicData]",
    batch: "Batch",
    largest: Sequence[float],
    outcomes: Sequence[str],
    rejected: "Sequence[Rejected]",
    *,
    cell: bool,
) -> None:
    """One row per structure, with lattice constants where the file gives measured ones (a_exp, c_exp)."""
    import torch

    from nvalchemi import units
    from nvalchemi.cli.tables import Cell, Column, print_table

    columns = [
        Column("#"), Column("name"), Column("formula"), Column("atoms", "d"), Column("steps", "d"),
        Column("energy/eV", ".4f"), Column("fmax/eV/Å", ".4f"), Column("ΔV/%", "+.2f"), Column("max|σ|/GPa", ".3f"),
        Column("a/Å", ".4f"), Column("exp", ".3f"), Column("Δ/%", "+.2f"),
        Column("c/Å", ".4f"), Column("exp", ".3f"), Column("Δ/%", "+.2f"), Column("converged"),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for k, (structure, result) in enumerate(zip(structures, results, strict=True)):
        row: list[Cell] = [
            str(k),
            structure.name,
            structure.formula,
            result.num_nodes,
            int(batch.system_step[k, 0]),
        ]
        if "energy" not in result:
            rows.append([*row, *[None] * (len(columns) - len(row) - 1), outcomes[k]])
            continue
        row += [result.energy.item(), largest[k]]
        if cell:
            growth = torch.linalg.det(result.cell[0]) / torch.linalg.det(structure.data.cell[0]) - 1
            row += [100 * growth.item(), result.stress.abs().max().item() / units.GPa]
        else:
            row += [None, None]
        for axis, key in ((0, "a_exp"), (2, "c_exp")):
            measured = structure.data.info.get(key) if cell else None
            if isinstance(measured, int | float):
                length = result.cell[0, axis].norm().item()
                row += [length, float(measured), 100 * (length / measured - 1)]
            else:
                row += [None, None, None]
        rows.append([*row, outcomes[k]])
    for each in rejected:
        rows.append([None, each.name, each.formula, *[None] * (len(columns) - 4), f"failed: {each.reason}"])
    print_table(columns, rows)
