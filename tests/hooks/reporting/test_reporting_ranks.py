"""Reports of several processes."""

import os
import subprocess
import sys

SCRIPT = """
import torch, torch.distributed as dist
from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import ReportingOrchestrator, TrainContext
from nvalchemi.training import TrainingStage

class Show:
    def report(self, ctx, stage, state):
        print(ctx.global_rank, {name: value for name, value in sorted(state.items())}, flush=True)

dist.init_process_group("gloo")
rank = dist.get_rank()
orchestrator = ReportingOrchestrator([Show()], ranks="mean")
ctx = TrainContext(batch=None, global_rank=rank, loss=torch.tensor(1.0 + 2 * rank), epoch=3,
                   losses={"only_on_one": torch.tensor(5.0)} if rank else {})
orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
orchestrator.close()
dist.destroy_process_group()
"""


def test_means_over_two_processes_are_reported_by_the_first(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, *launcher],
        capture_output=True,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "0 {'loss/only_on_one': 5.0, 'loss/total': 2.0, 'training/epoch': 3.0}"
    ]
