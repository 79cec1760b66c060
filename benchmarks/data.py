"""Structures and batches: making, joining, splitting, selecting and reading fields.

1,000 graphs of 30 atoms with a cell, energies and forces. Each case is measured next to the bare torch
operations on the same arrays (``torch.cat``, ``torch.index_select``, ``split``; a plain attribute for the
access), in turns, and the ratio of the medians is printed: one JSON line per case.

    python benchmarks/data.py
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

from nvalchemi.data import AtomicData, Batch

NUM_GRAPHS, NUM_ATOMS, REPEATS = 1000, 30, 15


def medians(*functions: Callable[[], object]) -> list[float]:
    """Median seconds of each function, measured in turns so that all see the same machine."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(REPEATS + 3):
        for k, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if repeat >= 3:
                times[k].append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def report(name: str, value: float, unit: str, ratio: float, against: str) -> None:
    line = {"name": name, "size": f"{NUM_GRAPHS}x{NUM_ATOMS}", "threads": torch.get_num_threads()}
    print(
        json.dumps(
            line | {"value": round(value, 4), "unit": unit, "ratio": round(ratio, 2), "against": against}
        )
    )


def arrays() -> list[dict[str, torch.Tensor]]:
    return [
        {
            "positions": torch.rand(NUM_ATOMS, 3),
            "atomic_numbers": torch.randint(1, 90, (NUM_ATOMS,)),
            "cell": 10 * torch.eye(3).unsqueeze(0),
            "pbc": torch.ones(1, 3, dtype=torch.bool),
            "energy": torch.rand(1, 1),
            "forces": torch.rand(NUM_ATOMS, 3),
        }
        for _ in range(NUM_GRAPHS)
    ]


class Plain:
    """What attribute access costs at least."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions


def main() -> None:
    torch.manual_seed(0)
    sources = arrays()
    structures = [AtomicData(**source) for source in sources]
    batch = Batch.from_data_list(structures)
    names = batch.keys()
    sizes = [NUM_ATOMS] * NUM_GRAPHS
    columns = [[data[name] for data in structures] for name in names]

    def bare_cat() -> list[torch.Tensor]:
        return [torch.cat(column) for column in columns]

    def bare_split() -> list[object]:
        return [batch[name].split(sizes if batch.level(name) == "node" else 1) for name in names]

    chosen = torch.randperm(NUM_GRAPHS)[: NUM_GRAPHS // 2]
    rows = torch.cat([torch.arange(NUM_ATOMS) + NUM_ATOMS * int(i) for i in chosen])

    def bare_select() -> list[torch.Tensor]:
        return [
            batch[name].index_select(0, rows if batch.level(name) == "node" else chosen) for name in names
        ]

    cases = {
        "make AtomicData": (
            lambda: [AtomicData(**s) for s in sources],
            lambda: [dict(s) for s in sources],
            "dict",
        ),
        "Batch.from_data_list": (lambda: Batch.from_data_list(structures), bare_cat, "torch.cat per field"),
        "Batch.to_data_list": (batch.to_data_list, bare_split, "split per field"),
        "Batch.index_select 500": (
            lambda: batch.index_select(chosen),
            bare_select,
            "torch.index_select per field",
        ),
        "Batch.clone": (batch.clone, lambda: [batch[name].clone() for name in names], "clone per field"),
    }
    for name, (ours, bare, against) in cases.items():
        value, floor = medians(ours, bare)
        report(name, value * 1e3, "ms", value / floor, against)

    plain, loop = Plain(batch.positions), range(100_000)

    def read(holder: Batch | Plain) -> None:
        for _ in loop:
            holder.positions  # noqa: B018

    def nothing() -> None:
        for _ in loop:
            pass

    ours, bare, empty = medians(lambda: read(batch), lambda: read(plain), nothing)
    report(
        "attribute", (ours - empty) / len(loop) * 1e6, "us", ours / bare, "the same loop over a plain object"
    )


if __name__ == "__main__":
    main()
