"""Run the benchmarks in this folder and rewrite RESULTS.md from the JSON lines that they print.

The text of NOTES.md goes on top. Those that take many minutes and gigabytes of disk (LONG below) run only with
``--long``:

    python benchmarks/run_all.py --long
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LONG = ("files_kill", "files_million")
KEYS = ("name", "size", "threads", "value", "unit", "ratio", "against")


PACKAGES = ("torch", "numpy", "numba", "ase", "sevenn", "chgnet", "vesin", "zarr", "openmm")


def versions() -> str:
    """Of what took part, where it is installed."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    if shutil.which("lmp"):
        text = subprocess.run(["lmp", "-h"], stdout=subprocess.PIPE, text=True, check=False).stdout
        found += [f"LAMMPS {line.split(' - ', 1)[1]}" for line in text.splitlines() if "Large-scale" in line]
    return ", ".join(found)


def cell(value: object) -> str:
    """Text of a cell; empty for what a case does not have."""
    return "" if value is None else str(value)


def cases(script: Path) -> list[dict[str, object]]:
    """Cases that a benchmark prints; other lines pass through."""
    print(f"--- {script.name}", flush=True)
    output = subprocess.run(
        [sys.executable, str(script)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(output, end="", flush=True)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main() -> None:
    left_out = {Path(__file__).stem, "compare", *(() if "--long" in sys.argv[1:] else LONG)}
    scripts = [script for script in sorted(HERE.glob("*.py")) if script.stem not in left_out]
    lines = [
        "# Results",
        f"Written by `make bench` on {datetime.date.today()}: {platform.machine()}, {os.cpu_count()} cores, "
        f"{versions()}, "
        f"`OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}`. "
        "Each table is what `python benchmarks/NAME.py` printed.",
        "",
        (HERE / "NOTES.md").read_text().strip(),
    ]
    for script in scripts:
        found = cases(script)
        if not found:  # such as that for a GPU where there is none
            continue
        lines += ["", f"## {script.stem}", "| " + " | ".join(KEYS) + " |", "|" + "---|" * len(KEYS)]
        lines += ["| " + " | ".join(cell(case.get(key)) for key in KEYS) + " |" for case in found]
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
