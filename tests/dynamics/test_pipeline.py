"""A pipeline over two gloo processes: nothing lost or doubled, results as alone, and a clear end when a rank fails."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, DistributedPipeline, NVTLangevin, SizeAwareSampler
from nvalchemi.dynamics.hooks import InitializeVelocitiesHook
from nvalchemi.dynamics.sinks import HostMemory, ZarrData
from nvalchemi.models.lj import LennardJonesModelWrapper

PREAMBLE = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from datetime import timedelta
from test_pipeline import clusters, engines
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
rank = dist.get_rank()
"""


def clusters(count):
    """Argon in a row of 2 to 4 atoms, 3.6 to 4.4 Å apart."""
    from nvalchemi.data import AtomicData

    out = []
    for i in range(count):
        n = 2 + i % 3
        positions = torch.zeros(n, 3, dtype=torch.float64)
        positions[:, 0] = (3.6 + 0.8 * i / count) * torch.arange(n)
        out.append(AtomicData(positions=positions, atomic_numbers=torch.full((n,), 18)))
    return out


def engines(data=None, sinks=None, hooks=()):
    """Relax, then sample; with data and sinks for a pipeline."""
    argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    sampler = None if data is None else SizeAwareSampler(data, max_batch_size=3)
    relax = FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.002), sampler=sampler)
    start = InitializeVelocitiesHook(20.0)
    sample = NVTLangevin(argon, 2.0, 20.0, 0.01, n_steps=8, hooks=[start, *hooks], sinks=sinks)
    return relax, sample


def _launch(code):
    """Start two ranks of a program; exit codes and what they wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path("program.py").write_text(PREAMBLE + code)
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "program.py"],
            env={**os.environ, **settings, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


def test_every_structure_comes_out_once_and_as_alone():
    codes, errors = _launch(
        """
from nvalchemi.dynamics.sinks import ZarrData
data = clusters(9)
data[4].positions[0, 0] = float("nan")
relax, sample = engines(data, ZarrData("out.zarr"))
pipeline = relax | sample
pipeline.max_batch_size = 2
pipeline.run()
dist.destroy_process_group()
"""
    )
    assert codes == [0, 0], errors
    results = ZarrData("out.zarr").read()
    ids = results.system_id[:, 0].tolist()
    assert sorted(ids) == list(range(9))
    for place, i in enumerate(ids):
        if i == 4:
            assert int(results.status[place]) == -1
            assert "positions are not finite" in results.info[place]["failure"]
            continue
        alone = Batch.from_data_list([clusters(9)[i]])
        alone.system_id = torch.tensor([[i]])
        for engine in engines():
            if "status" in alone:
                alone.status.fill_(0)
            engine.run(alone)
        for name in ("positions", "velocities", "energy", "system_step"):
            assert torch.equal(results[place][name], alone[0][name]), (i, name)


FAIL = """
from nvalchemi.dynamics import DynamicsStage
from nvalchemi.dynamics.sinks import ZarrData

class Fail:
    frequency, stage = 1, DynamicsStage.BEFORE_STEP

    def __call__(self, ctx, stage):
        if rank == {rank} and ctx.step_count == {step}:
            {action}

relax, sample = engines(clusters(9), ZarrData("out.zarr"), hooks=[Fail()])
relax.register_hook(Fail())
(relax | sample).run()
"""


@pytest.mark.parametrize(("rank", "step"), [(0, 60), (1, 12)])
def test_when_a_stage_fails_the_other_stops_naming_it_and_what_was_finished_is_on_disk(rank, step):
    codes, errors = _launch(FAIL.format(rank=rank, step=step, action='raise ZeroDivisionError("boom")'))
    assert all(code != 0 for code in codes)
    assert "ZeroDivisionError: boom" in errors[rank]
    assert f"PipelineError: stage {rank} failed: ZeroDivisionError('boom')" in errors[1 - rank]
    finished = ZarrData("out.zarr").read().system_id[:, 0].tolist()
    assert 0 < len(finished) == len(set(finished)) < 9


def test_when_a_process_is_killed_the_other_stops_with_an_error():
    codes, errors = _launch(FAIL.format(rank=1, step=3, action="os._exit(9)"))
    assert codes[1] == 9
    assert codes[0] != 0
    assert "PipelineError: stage 1 is gone" in errors[0]


# ---------------------------------------------------------------------- refused
def test_what_cannot_be_a_pipeline_is_refused():
    relax, sample = engines(clusters(2), HostMemory())
    with pytest.raises(ValueError, match="the first engine of a pipeline has a sampler"):
        sample | relax
    with pytest.raises(ValueError, match="the last engine of a pipeline has sinks"):
        relax | engines()[1]
    with pytest.raises(ValueError, match="would keep structures for ever"):
        relax | NVE(relax.model, 1.0, sinks=HostMemory())
    with pytest.raises(ValueError, match="at least two engines"):
        DistributedPipeline([relax])
    with pytest.raises(ValueError, match="init_process_group"):
        (relax | sample).run()
