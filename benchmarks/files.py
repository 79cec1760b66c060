"""Structures per second into and out of files: 5,000 × 30 atoms (positions, numbers, cell, energy, forces)."""

import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import ase.db
import numpy as np
import torch

from nvalchemi.data import AtomicData
from nvalchemi.data.datasets import Dataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.data.zarr import AtomicDataZarrReader, AtomicDataZarrWriter, write_zarr

COUNT, ATOMS, REPEATS = 5000, 30, 7


def structures(count=COUNT):
    generator = torch.Generator().manual_seed(0)
    return [
        AtomicData(
            positions=10 * torch.rand(ATOMS, 3, generator=generator),
            atomic_numbers=torch.randint(1, 90, (ATOMS,), generator=generator),
            cell=10 * torch.eye(3),
            energy=torch.rand(1, 1, generator=generator),
            forces=torch.randn(ATOMS, 3, generator=generator),
        )
        for _ in range(count)
    ]


def rate(action, count=COUNT, repeats=REPEATS):
    """Structures per second; the first run warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return count / statistics.median(times[1:])


def report(name, value, reference, against, size=COUNT, threads=1):
    case = {"name": name, "size": size, "threads": threads, "value": round(value), "unit": "structures/s"}
    print(json.dumps(case | {"ratio": round(value / reference, 2), "against": against}), flush=True)


def main():
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    path, data = folder / "set.zarr", structures()
    index = np.random.default_rng(0).permutation(COUNT)

    def append():
        shutil.rmtree(folder / "append.zarr", ignore_errors=True)
        with AtomicDataZarrWriter(folder / "append.zarr") as writer:
            for structure in data:
                writer.append(structure)

    def read_one_by_one():
        reader = AtomicDataZarrReader(path)
        for i in index.tolist():
            reader[i]

    def iterate():
        for _ in AtomicDataZarrReader(path):
            pass

    def stream():
        for _ in AtomicDataZarrReader(path).iter_batches():
            pass

    try:
        report("bulk write", rate(lambda: write_zarr(path, data)), 60_000, "target 60,000")
        report("append one at a time", rate(append), 2_000, "target 2,000")
        report("random read one by one", rate(read_one_by_one), 5_000, "target 5,000")
        report("sequential read, batches", rate(stream), 100_000, "target 100,000")
        report("sequential read, one by one", rate(iterate), 100_000, "target 100,000")
        for workers in (0, 1):
            loader = DataLoader(Dataset(path), 64, shuffle=True, num_workers=workers)
            value = rate(lambda loader=loader: [None for _ in loader])
            name = f"DataLoader, batch 64, shuffled, {workers} worker processes"
            report(name, value, 20_000, "target 20,000", threads=1 + workers)
        compare_with_ase(folder, data[:500], index[index < 500])
    finally:
        shutil.rmtree(folder)


def compare_with_ase(folder, data, index):
    """One structure at a time, as a user of ASE would keep them."""
    atoms = [structure.to_atoms() for structure in data]

    def write_ase():
        (folder / "set.db").unlink(missing_ok=True)
        with ase.db.connect(folder / "set.db") as connection:
            for frame in atoms:
                connection.write(frame)

    def write_here():
        shutil.rmtree(folder / "few.zarr", ignore_errors=True)
        with AtomicDataZarrWriter(folder / "few.zarr") as writer:
            for structure in data:
                writer.append(structure)

    def read_ase():
        connection = ase.db.connect(folder / "set.db")
        for i in index.tolist():
            connection.get(id=i + 1).toatoms()

    def read_here():
        reader = AtomicDataZarrReader(folder / "few.zarr")
        for i in index.tolist():
            reader[i]

    n = len(data)
    report("append, 500 structures", rate(write_here, n, 3), rate(write_ase, n, 3), "ase.db (SQLite)", n)
    report("random read, 500 structures", rate(read_here, n, 3), rate(read_ase, n, 3), "ase.db (SQLite)", n)


if __name__ == "__main__":
    main()
