"""Run every numbered example, each in an interpreter of its own, and stop at the first that fails.

With ``--gallery FOLDER`` what an example prints, and its picture, are kept there: ``docs/gallery`` is made so.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parent


def run(script: Path) -> str:
    """What the example prints, which is shown line by line meanwhile."""
    command = [sys.executable, "-u", "-W", "error::DeprecationWarning:nvalchemi", str(script)]
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    lines = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"{script.name} failed with exit code {process.returncode}")
    return "".join(lines)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--gallery", type=Path)
gallery = parser.parse_args().gallery
for script in sorted(EXAMPLES.glob("[0-9][0-9]_*.py")):
    print(f"\n--- {script.name}", flush=True)
    start = time.monotonic()
    printed = run(script)
    print(f"--- {script.name}: {time.monotonic() - start:.0f} s")
    if gallery is not None:
        number = script.name[:2]
        (gallery / f"{number}.txt").write_text(printed)
        picture = Path("examples/output", number, "picture.png")
        if picture.exists():
            shutil.copy(picture, gallery / f"{number}.png")
