"""Run every numbered example, each in an interpreter of its own, and stop at the first that fails."""

import subprocess
import sys
import time
from pathlib import Path

for script in sorted(Path(__file__).parent.glob("[0-9][0-9]_*.py")):
    print(f"\n--- {script.name}", flush=True)
    start = time.monotonic()
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:nvalchemi", str(script)], check=True)
    print(f"--- {script.name}: {time.monotonic() - start:.0f} s")
