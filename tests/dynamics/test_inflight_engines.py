"""Every engine and every hook in a run fed by a sampler, and as stages of a fused run: results as alone."""

import pytest
import torch

from nvalchemi import units
from nvalchemi.data import Batch
from nvalchemi.dynamics import (
    FIRE,
    FIRE2,
    LBFGS,
    NPH,
    NPT,
    NVE,
    ConvergenceHook,
    FIRE2VariableCell,
    FIREVariableCell,
    NVTLangevin,
    NVTNoseHoover,
    SizeAwareSampler,
)
from nvalchemi.dynamics.hooks import (
    AlignCellHook,
    ConvergedSnapshotHook,
    EnergyDriftMonitorHook,
    FreezeAtomsHook,
    InitializeVelocitiesHook,
    LoggingHook,
    MaxForceClampHook,
    NaNDetectorHook,
)
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.hooks import StageTimingHook, WrapPeriodicHook

bar = 1e4 * units.bar

ENGINES = {
    "NVE": lambda m, **o: NVE(m, 2.0, n_steps=8, **o),
    "Langevin": lambda m, **o: NVTLangevin(m, 2.0, 40.0, 0.01, n_steps=8, **o),
    "NoseHoover": lambda m, **o: NVTNoseHoover(m, 2.0, 40.0, 50.0, n_steps=8, **o),
    "NPT": lambda m, **o: NPT(m, 2.0, 40.0, bar, 500.0, 50.0, n_steps=8, **o),
    "NPT triclinic": lambda m, **o: NPT(
        m, 2.0, 40.0, bar, 500.0, 50.0, pressure_coupling="triclinic", n_steps=8, **o
    ),
    "NPH": lambda m, **o: NPH(m, 2.0, bar, 500.0, n_steps=8, **o),
    "FIRE": lambda m, **o: FIRE(m, **_fmax(), **o),
    "FIRE2": lambda m, **o: FIRE2(m, **_fmax(), **o),
    "LBFGS": lambda m, **o: LBFGS(m, **_fmax(), **o),
    "FIREVariableCell": lambda m, **o: FIREVariableCell(m, **_fmax(), **o),
    "FIRE2VariableCell": lambda m, **o: FIRE2VariableCell(m, **_fmax(), **o),
}


def _fmax():
    return {"convergence_hook": ConvergenceHook.from_fmax(0.02), "n_steps": 40}


def _same(found, expected, number):
    for name in ("positions", "velocities", "cell", "forces", "energy", "stress", "system_step"):
        assert torch.equal(found[name], expected[name]), (number, name)


@pytest.fixture
def crystals(crystal):
    return [crystal(seed=i, speed=0.01, a=5.25 + 0.05 * i, rattle=0.02 + 0.03 * i) for i in range(5)]


@pytest.mark.parametrize("name", ENGINES)
def test_engine_in_flight_gives_what_it_gives_alone_to_the_bit(argon, crystals, name):
    sink = HostMemory()
    sampler = SizeAwareSampler(crystals, max_batch_size=2)
    ENGINES[name](argon, sampler=sampler, sinks=sink).run()
    results = sink.read()
    ids = results.system_id[:, 0].tolist()
    assert sorted(ids) == list(range(5))
    for place, i in enumerate(ids):
        alone = Batch.from_data_list([crystals[i]])
        alone.system_id = torch.tensor([[i]])
        ENGINES[name](argon).run(alone)
        _same(results[place], alone[0], i)


@pytest.mark.parametrize("name", ["NPT", "LBFGS", "FIRE2VariableCell", "NoseHoover"])
def test_engine_as_second_stage_gives_what_it_gives_after_the_first_to_the_bit(argon, crystals, name):
    batch = Batch.from_data_list(crystals[:3])
    first = FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.05))
    (first + ENGINES[name](argon)).run(batch)
    for i in range(3):
        alone = Batch.from_data_list([crystals[i]])
        alone.system_id = torch.tensor([[i]])
        FIRE(argon, convergence_hook=ConvergenceHook.from_fmax(0.05)).run(alone)
        alone.status.fill_(0)
        ENGINES[name](argon).run(alone)
        _same(batch[i], alone[0], i)


def _hooks(log, snapshots):
    return [
        InitializeVelocitiesHook(30.0),
        AlignCellHook(),
        FreezeAtomsHook(indices=[1]),
        WrapPeriodicHook(),
        MaxForceClampHook(5.0),
        NaNDetectorHook(),
        EnergyDriftMonitorHook(1e-3, action="raise"),
        LoggingHook(backend="custom", writer_fn=log.extend),
        ConvergedSnapshotHook(snapshots),
        StageTimingHook(),
    ]


def test_all_hooks_together_in_flight_as_alone(argon, crystals):
    rows, sink, snapshots = [], HostMemory(), HostMemory()

    def make(hooks, **options):
        return NVE(argon, 1.0, n_steps=10, hooks=hooks, **options)

    make(_hooks(rows, snapshots), sampler=SizeAwareSampler(crystals, max_batch_size=2), sinks=sink).run()
    results = sink.read()
    for place, i in enumerate(results.system_id[:, 0].tolist()):
        alone = Batch.from_data_list([crystals[i]])
        alone.system_id = torch.tensor([[i]])
        alone_rows = []
        make(_hooks(alone_rows, HostMemory())).run(alone)
        assert torch.equal(results[place].positions, alone.positions)
        mine = [row for row in rows if row["system_id"] == i]
        for name in ("energy", "temperature", "fmax", "time"):
            assert [row[name] for row in mine] == [row[name] for row in alone_rows], name
        assert not results[place].velocities[1].any()
