"""What the page says, as plain values: tiles, charts, tables."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nvalchemi import units
from nvalchemi.hooks.protocols import CompositeWorkflow, ObservableWorkflow
from nvalchemi.hooks.reporting.recording import MOST_LINES, Recording
from nvalchemi.hooks.reporting.series import PointSample
from nvalchemi.hooks.reporting.settings import describe, describe_model
from nvalchemi.hooks.reporting.snapshot import ScalarSnapshot
from nvalchemi.hooks.reporting.structures import StructureLog, StructureRecord
from nvalchemi.hooks.reporting.watch import RunWatch, StageClock

Section = dict[str, Any]

_INTERNAL = frozenset({RunWatch.__name__, StageClock.__name__})
"""Hooks that an orchestrator registers: its own doing."""

_MOST_ROWS = 5000
"""Structures in the table; those that need a look come first."""

_INTERVALS = {
    "BEFORE_STEP -> BEFORE_PRE_UPDATE": "hooks before the step",
    "BEFORE_PRE_UPDATE -> AFTER_PRE_UPDATE": "first half of the step",
    "AFTER_PRE_UPDATE -> BEFORE_COMPUTE": "hooks before the forces (neighbour list)",
    "BEFORE_COMPUTE -> AFTER_COMPUTE": "model, with hooks before the forces (neighbour list)",
    "AFTER_COMPUTE -> BEFORE_POST_UPDATE": "hooks on the forces (biases, checks)",
    "BEFORE_POST_UPDATE -> AFTER_POST_UPDATE": "second half of the step",
    "AFTER_POST_UPDATE -> AFTER_STEP": "hooks at the end of the step (logs, reports)",
    "BEFORE_BATCH -> BEFORE_FORWARD": "hooks before the batch",
    "BEFORE_FORWARD -> AFTER_FORWARD": "forward pass, with the neighbour list",
    "BEFORE_LOSS -> AFTER_LOSS": "loss",
    "BEFORE_BACKWARD -> AFTER_BACKWARD": "backward pass",
    "BEFORE_OPTIMIZER_STEP -> AFTER_OPTIMIZER_STEP": "optimizer step",
    "AFTER_OPTIMIZER_STEP -> AFTER_BATCH": "hooks after the step (reports)",
    "AFTER_OPTIMIZER_STEP -> AFTER_VALIDATION": "validation",
    "AFTER_BATCH -> AFTER_VALIDATION": "validation",
    "AFTER_VALIDATION -> AFTER_EPOCH": "hooks after the validation",
}

_SIMULATION = (
    # quantity, title, unit, factor, logarithmic
    ("fmax", "Largest force", "eV/Å", 1.0, True),
    ("energy_change", "Energy per atom since the start", "meV/atom", 1e3, False),
    ("temperature", "Temperature", "K", 1.0, False),
    ("drift", "Drift of the conserved energy per atom", "meV/atom", 1e3, False),
    ("pressure", "Pressure", "GPa", 1 / units.GPa, False),
    ("volume", "Volume", "Å³", 1.0, False),
)


# ---------------------------------------------------------------------- what it is, and how it stands
def title(workflow: Any, model: Any, latest: ScalarSnapshot | None) -> str:
    """What is done, with which model and which engine."""
    name = _model_name(model)
    if workflow is None or latest is None:
        return "Report"
    engine = type(workflow).__name__
    if not latest.graphs:
        words = "Training" if any(key.startswith(("loss/", "validation/")) for key in latest) else engine
    else:
        if isinstance(workflow, CompositeWorkflow):
            engine = ", then ".join(type(part).__name__ for part in workflow.parts)
        relaxes = "time" not in latest and isinstance(workflow, ObservableWorkflow) and workflow.targets()
        cells = describe(workflow).get("coordinates") == "CellCoordinates"
        kind = "Relaxation of atoms and cell" if cells else "Relaxation"
        words = f"{kind if relaxes or cells else 'Molecular dynamics'} ({engine})"
        if name:
            return f"{words}, {name}"
    return f"{words} {name}".strip()


def _model_name(model: Any) -> str:
    """Class of a model, without the words that every wrapper has."""
    if model is None:
        return ""
    return type(model).__name__.removesuffix("Wrapper").removesuffix("Model") or type(model).__name__


def outcome(log: StructureLog, targets: Mapping[str, float]) -> str:
    """What is to be said of a run that has come to its end; ``""`` when all is well."""
    failed = log.counts["failed"]
    words = f", {failed} failed" if failed else ""
    good = log.counts["converged"] + log.counts["done"]
    if targets and good < len(log):
        return f": {good} of {len(log)} converged{words}"
    return words


# ---------------------------------------------------------------------- tiles
def tiles(state: ScalarSnapshot, targets: Mapping[str, float]) -> list[Section]:
    """The numbers that matter now."""
    found: list[Section] = []

    def tile(label: str, value: float | str | None, unit: str = "", note: str = "") -> None:
        if value is not None:
            found.append({"label": label, "value": value, "unit": unit, "note": note})

    log = state.structures
    if len(log):
        tile("Structures", len(log), note=_counted(log))
        if targets:
            converged = log.counts["converged"]
            tile("Converged", converged, note=f"{100 * converged / len(log):.0f} %")
    if "time" not in state:
        tile("Largest force", state.get("fmax"), "eV/Å")
    else:
        tile("Time", state["time"] / 1e3, "ps")
        tile("Temperature", state.get("temperature"), "K", "mean of this moment")
    tile("Loss", state.get("loss/total"), note="of the last batch")
    for name, label, unit in (
        ("validation/energy_per_atom_mae", "Energy error", "meV/atom"),
        ("validation/forces_mae", "Force error", "meV/Å"),
    ):
        if name in state:
            tile(label, 1e3 * state[name], unit, "validation, mean absolute")
    for kind in ("dynamics", "training", "run"):
        tile("Speed", state.get(f"{kind}/steps_per_s"), "steps/s")
        tile("Throughput", state.get(f"{kind}/atom_steps_per_s"), "atom-steps/s")
        tile("Throughput", state.get(f"{kind}/structures_per_s"), "structures/s")
    return found


def _counted(log: StructureLog) -> str:
    return ", ".join(f"{count} {status}" for status, count in log.counts.most_common() if count)


# ---------------------------------------------------------------------- charts
def charts(recording: Recording, targets: Mapping[str, float]) -> list[Section]:
    """Curves of a simulation or of training, whichever there are."""
    found = _simulation_charts(recording, targets) if recording.structures else []
    return [*found, *_training_charts(recording)]


def _simulation_charts(recording: Recording, targets: Mapping[str, float]) -> list[Section]:
    curve, found = recording.curve, list[Section]()
    simulates_time = any(name in ("temperature/mid", "drift/mid") for name in curve.names())
    single = len(recording.structures) < MOST_LINES
    for quantity, title, unit, factor, logarithmic in _SIMULATION:
        if quantity == "fmax" and simulates_time and quantity not in targets:
            continue
        if f"{quantity}/mid" not in curve.names():
            continue
        if quantity == "volume" and _is_constant(curve.column("volume/mid")[1]):
            continue
        x_label, series, note = (_lines if single else _bands)(
            recording, quantity, factor, _RUNAWAY[logarithmic]
        )
        found.append(
            {
                "title": title,
                "x": x_label,
                "y": unit,
                "log": logarithmic,
                "target": targets.get(quantity) if quantity == "fmax" else None,
                "series": series,
                "note": note,
            }
        )
    fractions = curve.column("converged_fraction")
    if targets and fractions[0]:
        percent = {"name": "converged", "x": fractions[0], "y": [100 * y for y in fractions[1]]}
        found.append(
            {"title": "Structures converged", "x": "step", "y": "%", "range": [0, 100], "series": [percent]}
        )
    return found


def _lines(
    recording: Recording, quantity: str, factor: float, runaway: float
) -> tuple[str, list[Section], str]:
    """One line for each structure, over its own steps or time; the axis fits those that have not run away."""
    series: list[Section] = []
    clocks = [dict(zip(*curve.column("time"), strict=True)) for _, curve in recording.structures]
    # Where a minimiser took part, which knows no time, the steps are all that the points share.
    timed = all(
        step in times
        for (_, curve), times in zip(recording.structures, clocks, strict=True)
        for step in curve.column(quantity)[0]
    )
    sizes: list[float] = []
    for (record, curve), times in zip(recording.structures, clocks, strict=True):
        steps, values = curve.column(quantity)
        x = [times[step] / 1e3 if timed else step for step in steps]
        if len(x) > 1:
            y = [factor * value for value in values]
            series.append({"name": _label(record), "x": x, "y": y, "outside": record.status == "failed"})
            sizes.append(_size(y))
    usual = sorted(size for size, line in zip(sizes, series, strict=True) if not line["outside"])
    if usual:
        largest = runaway * usual[(len(usual) - 1) // 2]
        of_failed = min(largest, 3 * usual[-1])
        for size, line in zip(sizes, series, strict=True):
            line["outside"] = size > 0 and size > (of_failed if line["outside"] else largest)
    return ("time / ps" if timed else "step"), series, _outside_note(series)


def _bands(
    recording: Recording, quantity: str, factor: float, runaway: float
) -> tuple[str, list[Section], str]:
    """Median, quantiles and largest of all structures, over the steps of the engine or the time they share."""
    curve = recording.curve
    steps, middle = curve.column(f"{quantity}/mid")
    low, high, largest = (curve.column(f"{quantity}/{which}")[1] for which in ("low", "high", "max"))
    shared = dict(zip(*curve.column("time/same"), strict=True))
    timed = all(step in shared for step in steps)
    x = [shared[step] / 1e3 if timed else step for step in steps]
    scaled = [[factor * y for y in values] for values in (middle, low, high, largest)]
    usual = max(_size(scaled[1]), _size(scaled[2]))
    series: list[Section] = [
        {"name": "median", "x": x, "y": scaled[0], "low": scaled[1], "high": scaled[2]},
        {
            "name": "largest",
            "x": x,
            "y": scaled[3],
            "dashed": True,
            "outside": 0 < runaway * usual < _size(scaled[3]),
        },
    ]
    note = "Line: median of the structures; band: 10 to 90 %; dashes: largest. " + _outside_note(series)
    return ("time / ps" if timed else "step"), series, note.strip()


_RUNAWAY = {False: 100.0, True: 1e4}
"""Times the usual size of a quantity, on a plain and on a logarithmic axis: what is larger does not set the range."""


def _size(values: Sequence[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)


def _outside_note(series: Sequence[Section]) -> str:
    names = [line["name"] for line in series if line.get("outside")]
    return f"The axis leaves out the extremes of: {', '.join(names)}." if names else ""


def _is_constant(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= 1e-6 * abs(max(values))


def _label(record: StructureRecord) -> str:
    return f"{record.name or record.formula} (#{record.system_id})"


def _training_charts(recording: Recording) -> list[Section]:
    curve, validations, found = recording.curve, recording.validations, list[Section]()
    steps, losses = curve.column("loss/total")
    if steps:
        series: list[Section] = [{"name": "each batch", "x": steps, "y": losses, "faint": True}]
        series.append({"name": "mean of neighbours", "x": steps, "y": _smooth(losses)})
        x, y = validations.column("validation/loss")
        if x:
            series.append({"name": "validation", "x": x, "y": y, "points": True})
        found.append({"title": "Loss", "x": "step", "y": "", "log": True, "series": series})
    parts = [name for name in curve.names() if name.startswith("loss/") and name.count("/") == 1]
    parts.remove("loss/total") if "loss/total" in parts else None
    if len(parts) > 1:
        series = []
        for name in parts:
            x, y = curve.column(name)
            series.append({"name": name.removeprefix("loss/"), "x": x, "y": _smooth(y)})
        note = "With their weights; mean of neighbours."
        found.append(
            {
                "title": "Components of the loss",
                "x": "step",
                "y": "",
                "log": True,
                "series": series,
                "note": note,
            }
        )
    for quantity, title, unit in (
        ("energy_per_atom", "Energy error per atom", "meV/atom"),
        ("forces", "Force error", "meV/Å"),
        ("stress", "Stress error", "GPa"),
    ):
        series, factor = [], 1 / units.GPa if quantity == "stress" else 1e3
        for kind, words in (("mae", "mean absolute"), ("rmse", "root mean square")):
            x, y = validations.column(f"validation/{quantity}_{kind}")
            if x:
                series.append({"name": words, "x": x, "y": [factor * value for value in y], "points": True})
        if series:
            found.append(
                {"title": title, "x": "step", "y": unit, "log": True, "series": series, "note": "Validation."}
            )
    rates = [name for name in curve.names() if name.startswith("optimizer/")]
    if rates:
        series = []
        for name in rates:
            x, y = curve.column(name)
            series.append({"name": name, "x": x, "y": y})
        found.append({"title": "Learning rate", "x": "step", "y": "", "series": series})
    return found


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over a twentieth of the curve around each point, without what is not finite."""
    half = len(values) // 40
    if half == 0:
        return list(values)
    sums, counts = [0.0], [0]
    for value in values:
        known = math.isfinite(value)
        sums.append(sums[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    means: list[float] = []
    for i in range(len(values)):
        start, stop = max(0, i - half), min(len(values), i + half + 1)
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if count else math.nan)
    return means


def parity_plots(samples: Mapping[str, PointSample]) -> list[Section]:
    """Prediction over label, of the last validation."""
    return [
        {
            "title": heading,
            "unit": unit,
            "error_unit": error_unit,
            "mae": error_factor * sample.mae,
            "rmse": error_factor * sample.rmse,
            "count": sample.count,
            "x": (factor * sample.labels).tolist(),
            "y": (factor * sample.predictions).tolist(),
        }
        for name, (heading, unit, factor, error_unit, error_factor) in _PARITY.items()
        if (sample := samples.get(name)) is not None and sample.count
    ]


_PARITY = {
    "energy": ("Energy per atom", "eV/atom", 1.0, "meV/atom", 1e3),
    "forces": ("Force components", "eV/Å", 1.0, "meV/Å", 1e3),
    "stress": ("Stress components", "GPa", 1 / units.GPa, "GPa", 1 / units.GPa),
}
"""Title, unit and factor of the values, unit and factor of the errors."""


# ---------------------------------------------------------------------- tables
def structure_table(log: StructureLog) -> Section | None:
    """One row for each structure; of very many those that need a look first."""
    if not len(log):
        return None
    columns: list[Section] = [
        {"name": "#"}, {"name": "name"}, {"name": "formula"}, {"name": "atoms"}, {"name": "status"}, {"name": "steps"},
        {"name": "energy before", "unit": "eV"}, {"name": "after", "unit": "eV"}, {"name": "Δ", "unit": "meV/atom"},
        {"name": "fmax before", "unit": "eV/Å"}, {"name": "after", "unit": "eV/Å"},
        {"name": "volume before", "unit": "Å³"}, {"name": "after", "unit": "Å³"}, {"name": "Δ", "unit": "%"},
    ]  # fmt: skip
    records = list(log)
    if len(records) > _MOST_ROWS:
        order = {"failed": 0, "not converged": 1, "running": 2}
        records = sorted(records, key=lambda record: order.get(record.status, 3))[:_MOST_ROWS]
    rows = [_row(record) for record in records]
    # A molecule has no volume: columns without a number in any row say nothing.
    shown = [k for k in range(len(columns)) if any(row[k] not in (None, "") for row in rows)]
    return {
        "columns": [columns[k] for k in shown],
        "rows": [[row[k] for k in shown] for row in rows],
        "reasons": [record.reason for record in records],
        "status_column": shown.index(4),
        "total": len(log),
        "note": _before_note(log),
        "counts": {status: count for status, count in log.counts.most_common() if count},
    }


def _before_note(log: StructureLog) -> str:
    """What "before" is in a run that goes on with one of which nothing is known."""
    steps = sorted({record.first_step for record in log if record.first_step})
    if not steps:
        return ""
    which = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    return f"“before” is the state after step {which}, where this run went on."


def _row(record: StructureRecord) -> list[Any]:
    def pair(name: str) -> tuple[float, float]:
        return record.before.get(name, math.nan), record.after.get(name, math.nan)

    energy, fmax, size = pair("energy"), pair("fmax"), pair("volume")
    change = 1e3 * (energy[1] - energy[0]) / max(record.num_atoms, 1)
    growth = 100 * (size[1] / size[0] - 1) if size[0] else math.nan
    numbers = [value if math.isfinite(value) else None for value in (*energy, change, *fmax, *size, growth)]
    return [
        record.system_id,
        record.name,
        record.formula,
        record.num_atoms,
        record.status,
        record.steps,
        *numbers,
    ]


def timing(clock: StageClock | None, elapsed: float) -> Section | None:
    """Where the time of a step goes, and how much of the run hooks took."""
    if clock is None:
        return None
    times = clock.stage_times()
    step = sum(times.values())
    if not times or step <= 0:
        return None
    stages = [
        {"name": name, "words": _INTERVALS.get(name, ""), "ms": 1e3 * seconds, "share": 100 * seconds / step}
        for name, seconds in times.items()
    ]
    spent: dict[str, float] = {}
    for name, seconds in clock.hook_times().items():
        shown = "ReportingOrchestrator" if name in _INTERNAL else name
        spent[shown] = spent.get(shown, 0.0) + seconds
    hooks = [
        {"name": name, "s": seconds, "share": 100 * seconds / elapsed}
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]
    return {"step_ms": 1e3 * step, "stages": stages, "hooks": hooks}


# ---------------------------------------------------------------------- settings
def settings(workflow: Any, model: Any) -> list[Section]:
    """Engine, model and hooks with what they were made with."""
    found: list[Section] = []
    if workflow is not None:
        parts: Sequence[Any] = [workflow]
        if isinstance(workflow, CompositeWorkflow):
            parts = workflow.parts
        found += [{"title": type(part).__name__, "rows": _pairs(describe(part))} for part in parts]
    if model is not None:
        found.append({"title": "Model", "rows": _pairs(describe_model(model))})
    if workflow is not None:
        hooks: Sequence[Any] = vars(workflow)["_hooks"]
        rows = [
            [type(hook).__name__, ", ".join(f"{name}={words}" for name, words in describe(hook).items())]
            for hook in hooks
            if type(hook).__name__ not in _INTERNAL
        ]
        found.append({"title": "Hooks", "rows": rows})
    return found


def _pairs(words: Mapping[str, str]) -> list[list[str]]:
    return [[name, value] for name, value in words.items()]


def timestamp() -> str:
    """Now, in local time with its offset from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
