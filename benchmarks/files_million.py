"""A million structures × 30 atoms written, streamed and loaded shuffled: rates, peak memory of each process.

Takes 1.3 GB of disk, freed at the end. A smaller number may be given: ``python benchmarks/files_million.py 100000``.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datasets import Dataset
from nvalchemi.data.loader import DataLoader
from nvalchemi.data.zarr import AtomicDataZarrReader, AtomicDataZarrWriter

ATOMS, PIECE = 30, 1000


def piece(number):
    generator = torch.Generator().manual_seed(number)
    shape = (PIECE, ATOMS)
    positions = 10 * torch.rand(*shape, 3, generator=generator)
    forces = torch.randn(*shape, 3, generator=generator)
    numbers = torch.randint(1, 90, shape, generator=generator)
    energy = torch.full((PIECE, 1), float(number))
    cell = 10 * torch.eye(3)
    return Batch.from_data_list(
        AtomicData(p, z, cell=cell, energy=e, forces=f)
        for p, z, e, f in zip(positions, numbers, energy, forces, strict=True)
    )


def write(path, count):
    busy = 0.0
    with AtomicDataZarrWriter(path) as writer:
        for number in range(count // PIECE):
            batch = piece(number)
            start = time.perf_counter()
            writer.append(batch)
            busy += time.perf_counter() - start
    return busy


def stream(path, count):
    start = time.perf_counter()
    seen = sum(batch.num_graphs for batch in AtomicDataZarrReader(path).iter_batches())
    assert seen == count
    return time.perf_counter() - start


def load(path, count):
    start = time.perf_counter()
    seen = sum(batch.num_graphs for batch in DataLoader(Dataset(path), 64, shuffle=True))
    assert seen == count
    return time.perf_counter() - start


def main():
    if len(sys.argv) == 4:
        torch.set_num_threads(1)
        seconds = globals()[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"seconds": seconds, "peak": peak}))
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "million.zarr")
    try:
        for action in ("write", "stream", "load"):
            arguments = [sys.executable, __file__, action, path, str(count)]
            result = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
            case = {"name": f"{action} {count} structures", "size": count, "threads": 1}
            value = round(count / result["seconds"])
            print(
                json.dumps(case | {"value": value, "unit": "structures/s", "ratio": "", "against": ""}),
                flush=True,
            )
            case["name"] = f"{action} {count} structures, peak memory"
            peak = round(result["peak"], 3)
            print(
                json.dumps(case | {"value": peak, "unit": "GiB", "ratio": peak, "against": "limit 1 GiB"}),
                flush=True,
            )
        size = sum(
            os.path.getsize(os.path.join(at, file)) for at, _, files in os.walk(path) for file in files
        )
        case = {
            "name": "size on disk",
            "size": count,
            "threads": 1,
            "value": round(size / count),
            "unit": "bytes/structure",
        }
        print(json.dumps(case | {"ratio": "", "against": ""}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
