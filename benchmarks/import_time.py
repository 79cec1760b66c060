"""What importing each package adds to bare Python or to torch. Prints one JSON line per case."""

import json
import statistics
import subprocess
import sys
import time

REPEATS = 7
CASES = (
    ("nvalchemi", "pass"),
    ("nvalchemi.data", "import torch"),
    ("nvalchemi.models", "import torch"),
    ("nvalchemi.dynamics", "import torch"),
    ("nvalchemi.training", "import torch"),
    ("nvalchemi.cli.app", "pass"),
)


def seconds(statement: str) -> float:
    """Wall time of one interpreter that runs `statement`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    for module, against in CASES:
        pairs = [(seconds(against), seconds(f"{against}; import {module}")) for _ in range(REPEATS + 1)][1:]
        added = statistics.median(with_it - bare for bare, with_it in pairs)
        bare = statistics.median(bare for bare, _ in pairs)
        case = {"name": "import", "size": module, "threads": 1, "value": round(added, 4), "unit": "s"}
        print(json.dumps(case | {"ratio": round((added + bare) / bare, 3), "against": against}), flush=True)


if __name__ == "__main__":
    main()
