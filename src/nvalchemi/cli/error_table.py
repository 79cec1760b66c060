"""The errors of a model as tables and as a page."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nvalchemi.cli.evaluation import QUANTITIES, Evaluation, Quantity
from nvalchemi.cli.tables import Cell, Column, print_table


def print_errors(evaluations: Mapping[str, Evaluation]) -> None:
    """Mean absolute and root mean square errors by quantity, of one or several sets of structures.

    The last column says how large the labels themselves are: forces and stresses in the root mean square, energies per
    atom beyond the sum of the energies of the elements.
    """
    columns = [Column("set"), Column("quantity"), Column("MAE", ".2f"), Column("RMSE", ".2f"), Column("unit")]
    rows: list[list[Cell]] = []
    for name, errors in evaluations.items():
        spread = {
            q.heading: q.factor * errors.spread[q.metric] for q in QUANTITIES if q.metric in errors.spread
        }
        rows += [
            [name if len(evaluations) > 1 else None, heading, mae, rmse, unit, spread.get(heading)]
            for heading, group, _, mae, rmse, unit in all_errors(errors)
            if not group
        ]
    print_table([*columns, Column("size of labels", ".1f")], rows)


def all_errors(errors: Evaluation) -> Iterator[tuple[str, str, int, float, float, str]]:
    """Quantity, group (``""``: all), number of values, mean absolute and root mean square error, unit."""
    for quantity in QUANTITIES:
        for name, count in errors.counts.items():
            metric, _, group = name.partition("/")
            if metric == quantity.metric and count:
                mae, rmse = (
                    quantity.factor * errors.metrics[f"{metric}_{kind}/{group}".rstrip("/")]
                    for kind in ("mae", "rmse")
                )
                yield quantity.heading, group, count, mae, rmse, quantity.unit


def print_groups(errors: Evaluation) -> None:
    """Errors of the groups (elements, entries of ``info``), if any were asked for."""
    rows = _by_group(errors)
    if rows:
        print()
        headings = ("group", "quantity", "values", "MAE", "RMSE", "unit")
        print_table(
            [Column(h, f) for h, f in zip(headings, ("", "", "d", ".2f", ".2f", ""), strict=True)], rows
        )


def _by_group(errors: Evaluation) -> list[tuple[Cell, ...]]:
    found = [row for row in all_errors(errors) if row[1] and row[0] != "energy"]
    return [(row[1], row[0], *row[2:]) for row in sorted(found, key=lambda row: row[1])]


def error_page(about: Mapping[str, Any], errors: Evaluation) -> str:
    """A self-contained HTML page with the errors and parity plots."""
    from nvalchemi.hooks.reporting.content import timestamp
    from nvalchemi.hooks.reporting.page import render
    from nvalchemi.hooks.reporting.settings import describe_environment

    overall = [row for row in all_errors(errors) if not row[1]]
    tiles = [
        {"label": f"{heading}, MAE", "value": mae, "unit": unit, "note": f"RMSE {rmse:.4g} {unit}"}
        for heading, _, _, mae, rmse, unit in overall
    ]
    sections = [
        {"title": "Evaluation", "rows": [[key, str(about[key])] for key in ("model", "data", "structures")]}
    ]
    for quantity in QUANTITIES:
        rows = [
            [group, f"MAE {mae:.4g}, RMSE {rmse:.4g} {unit} ({count} values)"]
            for heading, group, count, mae, rmse, unit in all_errors(errors)
            if heading == quantity.heading and group
        ]
        if rows:
            sections.append({"title": f"Errors: {quantity.heading}", "rows": rows})
    return render(
        {
            "title": f"Errors of {about['model']}",
            "status": {
                "state": "finished",
                "error": "",
                "written": timestamp(),
                "elapsed_s": about["seconds"],
                "eta_s": None,
                "progress": {"done": about["structures"], "total": None, "unit": "structure", "note": ""},
            },
            "tiles": tiles,
            "charts": [],
            "parity": [
                _parity(errors, quantity) for quantity in QUANTITIES if quantity.metric in errors.parity
            ],
            "structures": None,
            "timing": None,
            "settings": sections,
            "environment": list(describe_environment(None).items()),
        }
    )


_MOST_POINTS = 2000
"""Of a parity plot; a random sample of more."""
_UNITS = {"energy_per_atom": "eV/atom", "forces": "eV/Å", "stress": "GPa"}


def _parity(errors: Evaluation, quantity: Quantity) -> dict[str, Any]:
    labels, predictions = errors.parity[quantity.metric]
    shown = np.random.default_rng(0).permutation(len(labels))[:_MOST_POINTS]
    unit = _UNITS[quantity.metric]
    factor = quantity.factor if unit == quantity.unit else 1.0
    return {
        "title": quantity.heading,
        "unit": unit,
        "error_unit": quantity.unit,
        "mae": quantity.factor * errors.metrics[f"{quantity.metric}_mae"],
        "rmse": quantity.factor * errors.metrics[f"{quantity.metric}_rmse"],
        "count": len(labels),
        "x": (factor * labels[shown]).tolist(),
        "y": (factor * predictions[shown]).tolist(),
    }
