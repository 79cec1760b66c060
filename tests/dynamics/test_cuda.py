"""On a GPU: the same results as on the CPU, every field on the device, and no wait of the host in a step."""

import warnings

import pytest
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FIRE,
    LBFGS,
    NPT,
    NVE,
    FIREVariableCell,
    NVTLangevin,
    NVTNoseHoover,
    initialize_velocities,
)
from nvalchemi.models.lj import LennardJonesModelWrapper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ENGINES = {
    "NVE": lambda model: NVE(model, 1.0),
    "NVTLangevin": lambda model: NVTLangevin(model, 1.0, torch.tensor([20.0, 30.0]), 0.01),
    "NVTNoseHoover": lambda model: NVTNoseHoover(model, 1.0, 20.0, 100.0),
    "NPT": lambda model: NPT(model, 1.0, 20.0, 0.0, 500.0, 100.0),
    "FIRE": lambda model: FIRE(model, 1.0),
    "FIREVariableCell": lambda model: FIREVariableCell(model, 1.0),
    "LBFGS": LBFGS,
}


def argon(device: str) -> Batch:
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True) * (2, 2, 2)
    atoms.rattle(0.02, seed=0)
    batch = Batch.from_data_list([AtomicData.from_atoms(atoms, dtype=torch.float64)] * 2)
    initialize_velocities(batch, 20.0)
    return batch.to(device=device)


def engine_on(device: str, name: str):
    return ENGINES[name](LennardJonesModelWrapper(0.0104, 3.40, 6.0, switch_width=1.0).to(device))


@pytest.mark.parametrize("name", ENGINES)
def test_results_are_those_of_the_cpu_and_on_the_device(name):
    on_gpu, on_cpu = argon("cuda"), argon("cpu")
    engine_on("cuda", name).run(on_gpu, 10)
    engine_on("cpu", name).run(on_cpu, 10)
    assert {field: on_gpu[field].device.type for field in on_gpu.keys()} == dict.fromkeys(
        on_gpu.keys(), "cuda"
    )
    for field in ("positions", "velocities", "forces", "energy", "stress", "cell"):
        torch.testing.assert_close(on_gpu[field].cpu(), on_cpu[field], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_waits_only_for_the_decision_on_the_neighbour_list(name):
    batch, engine = argon("cuda"), engine_on("cuda", name)
    engine.run(batch, 4)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                engine.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in caught) == 4
