"""A writer killed 100 times at random moments: committed structures lost and halves shown (there are none)."""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nvalchemi.data.zarr import AtomicDataZarrReader

KILLS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
WRITER = """
import sys, torch
from nvalchemi.data import AtomicData
from nvalchemi.data.zarr import AtomicDataZarrWriter
writer = AtomicDataZarrWriter(sys.argv[1], chunk_bytes=4096, buffer_frames=20)
i = len(writer)
print(i, flush=True)
while True:
    n = 1 + i % 7
    numbers = torch.full((n,), 1 + i % 50)
    writer.append(AtomicData(torch.full((n, 3), float(i)), numbers, energy=-float(i), info={"i": i}))
    i += 1
    print(writer.num_committed, flush=True)
"""


def is_whole(i, data):
    n = 1 + i % 7
    return (
        data.positions.tolist() == [[float(i)] * 3] * n
        and data.atomic_numbers.tolist() == [1 + i % 50] * n
        and data.energy.item() == -i
        and data.info == {"i": i}
    )


def main():
    random.seed(0)
    lost = torn = count = 0
    with tempfile.TemporaryDirectory() as folder:
        script, store = Path(folder) / "writer.py", Path(folder) / "killed.zarr"
        script.write_text(WRITER)
        for _ in range(KILLS):
            process = subprocess.Popen([sys.executable, script, store], stdout=subprocess.PIPE, text=True)
            lost += count - int(process.stdout.readline())
            time.sleep(random.uniform(0.0, 0.5))
            process.send_signal(signal.SIGKILL)
            reported = [int(line) for line in process.stdout.read().splitlines(True) if line.endswith("\n")]
            process.communicate()
            reader = AtomicDataZarrReader(store)
            count = len(reader)
            lost += max(0, max(reported, default=0) - count)
            torn += sum(not is_whole(i, data) for i, data in enumerate(reader))
    for name, value in (("lost", lost), ("torn", torn), ("committed", count)):
        case = {
            "name": f"structures {name}, writer killed {KILLS} times",
            "size": count,
            "threads": 1,
            "value": value,
        }
        print(json.dumps(case | {"unit": "structures", "ratio": "", "against": ""}))


if __name__ == "__main__":
    main()
