"""The numbers of a report, against independent ones."""

from enum import Enum

import numpy as np
import pytest
import torch
from ase import units as ase_units

from nvalchemi.data import Batch
from nvalchemi.dynamics import FIRE, NVE, DynamicsStage, NVTLangevin, initialize_velocities
from nvalchemi.hooks import (
    HookContext,
    HookRegistryMixin,
    ReportingOrchestrator,
    TrainContext,
    collect_scalars,
)
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)


@pytest.fixture
def moving(batch, argon):
    initialize_velocities(batch, 60.0, random_seed=3)
    engine = NVE(argon, dt=2.0)
    engine.run(batch, n_steps=7)
    return engine, batch


def test_scalars_of_dynamics_are_those_of_numpy_and_ase(moving):
    engine, batch = moving
    scalars = collect_scalars(engine._build_context(batch), DynamicsStage.AFTER_STEP)
    forces = batch.forces.numpy()
    assert scalars["fmax"] == pytest.approx(np.sqrt((forces**2).sum(1)).max())
    assert scalars["energy"] == pytest.approx(batch.energy.numpy().mean())
    assert scalars["energy_per_atom"] == pytest.approx(batch.energy.numpy().sum() / 16)
    structures = [data.to_atoms() for data in batch.to_data_list()]
    # ASE counts 3N degrees of freedom; with the momentum conserved there are 3N - 3.
    kelvin = [atoms.get_temperature() * len(atoms) / (len(atoms) - 1) for atoms in structures]
    assert scalars["temperature"] == pytest.approx(np.mean(kelvin))
    assert scalars["volume"] == pytest.approx(np.mean([atoms.get_volume() for atoms in structures]))
    kinetic = [atoms.get_kinetic_energy() for atoms in structures]
    total = batch.energy.numpy()[:, 0] + kinetic
    assert scalars["total_energy"] == pytest.approx(total.mean())
    stress = batch.stress.numpy()
    pressure = [
        -np.trace(s) / 3 + 2 * k / (3 * atoms.get_volume())
        for s, k, atoms in zip(stress, kinetic, structures, strict=True)
    ]
    assert scalars["pressure"] == pytest.approx(np.mean(pressure))
    assert scalars["time"] == pytest.approx(14.0)
    assert ase_units.fs > 0


def test_numbers_of_each_graph_come_along(moving):
    engine, batch = moving
    graphs = collect_scalars(engine._build_context(batch), DynamicsStage.AFTER_STEP).graphs
    assert graphs["num_atoms"].tolist() == [4, 8, 4]
    assert graphs["system_id"].tolist() == [0, 1, 2]
    assert graphs["energy"].tolist() == batch.energy[:, 0].tolist()
    assert graphs["system_step"].tolist() == [7, 7, 7]


def test_converged_and_failed_graphs_count_as_such(batch, argon):
    engine = FIRE(argon, dt=1.0)
    engine.run(batch, n_steps=2)
    batch.status[0], batch.status[2] = 1, -1
    batch.energy[2] = torch.nan
    engine.refresh_masks(batch)
    scalars = collect_scalars(engine._build_context(batch), DynamicsStage.AFTER_STEP)
    assert scalars["converged_fraction"] == pytest.approx(1 / 3)
    assert (scalars["active"], scalars["failed"]) == (1, 1)
    assert np.isfinite(scalars["energy"])


def test_a_minimiser_has_no_temperature_and_langevin_conserves_nothing(batch, argon):
    engine = FIRE(argon, dt=1.0)
    engine.run(batch, n_steps=1)
    scalars = collect_scalars(engine._build_context(batch), DynamicsStage.AFTER_STEP)
    assert "temperature" not in scalars
    assert "time" not in scalars
    langevin = NVTLangevin(argon, dt=1.0, temperature=50.0, friction=0.01)
    langevin.run(batch, n_steps=1)
    scalars = collect_scalars(langevin._build_context(batch), DynamicsStage.AFTER_STEP)
    assert "temperature" in scalars
    assert "conserved_energy" not in scalars


def test_one_transfer_from_the_device(moving, monkeypatch):
    engine, batch = moving
    ctx = engine._build_context(batch)
    fetched = []
    for name in ("cpu", "item", "tolist", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            fetched.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    collect_scalars(ctx, DynamicsStage.AFTER_STEP)
    assert fetched == ["cpu", "numpy"]


def test_an_engine_of_its_own_is_reported_on_with_its_stages(batch, argon, recorder):
    class Stage(Enum):
        MOVE = 0
        JUDGE = 1

    class MonteCarlo(HookRegistryMixin):
        _stage_type, step_count = Stage, 0

        def step(self, batch):
            batch.energy = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
            batch.forces = torch.arange(48, dtype=torch.float64).reshape(16, 3)
            self._call_hooks(Stage.JUDGE, batch)
            self.step_count += 1

    engine = MonteCarlo()
    engine.register_hook(ReportingOrchestrator([recorder], stages={Stage.JUDGE}))
    for _ in range(3):
        engine.step(batch)
    assert len(recorder.states) == 3
    assert recorder.states[0]["energy"] == 3.0
    assert recorder.states[0]["fmax"] == pytest.approx(np.linalg.norm([45, 46, 47]))
    with pytest.raises(ValueError, match=r"MonteCarlo has none of the stages.*MOVE, JUDGE"):
        MonteCarlo().register_hook(ReportingOrchestrator([recorder]))


# ---------------------------------------------------------------------- training
class Scale(torch.nn.Module):
    """energy = w Σ|x|², forces = w x."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, batch):
        energy = torch.zeros(batch.num_graphs).index_add(0, batch.batch_idx, batch.positions.square().sum(1))
        return {"energy": self.w * energy[:, None], "forces": self.w * batch.positions}


def labelled(seed=0, n=3):
    from nvalchemi.data import AtomicData

    generator = torch.Generator().manual_seed(seed)
    structures = [
        AtomicData(
            positions=torch.randn(2, 3, generator=generator),
            atomic_numbers=[1, 8],
            energy=torch.randn(1, 1, generator=generator),
            forces=torch.randn(2, 3, generator=generator),
        )
        for _ in range(n)
    ]
    return Batch.from_data_list(structures)


def strategy_with(hooks, **options):
    options.setdefault("num_steps", 4)
    optimizer = OptimizerConfig(torch.optim.SGD, {"lr": 0.01})
    return TrainingStrategy(
        Scale(), optimizer, EnergyMSELoss() + 10.0 * ForceMSELoss(), hooks=hooks, **options
    )


def test_losses_are_given_with_and_without_their_weights(recorder):
    batch = labelled()
    strategy = strategy_with([ReportingOrchestrator([recorder])])
    strategy.run([batch, batch])
    first = recorder.states[0]
    predicted, wanted = 0.5 * batch.positions.numpy(), batch.forces.numpy()
    assert first["loss/forces_mse/unweighted"] == pytest.approx(((predicted - wanted) ** 2).mean(), rel=1e-5)
    assert first["loss/forces_mse"] == pytest.approx(10 * first["loss/forces_mse/unweighted"])
    assert first["loss/total"] == pytest.approx(first["loss/forces_mse"] + first["loss/energy_mse"])
    assert first["optimizer/0/lr"] == 0.01
    assert [state.step for state in recorder.states] == [1, 2, 3, 4]
    assert recorder.states[-1].progress == (4, 4, "step", "")
    assert recorder.states[-1]["training/steps_per_s"] > 0
    assert recorder.states[-1]["training/eta_s"] == 0


def test_the_result_of_a_validation_is_in_the_next_report(recorder):
    config = ValidationConfig([labelled(1)], every_n_steps=2)
    strategy = strategy_with([ReportingOrchestrator([recorder])], validation_config=config)
    strategy.run([labelled()])
    assert "validation/loss" not in recorder.states[1]
    assert recorder.states[2]["validation/loss"] > 0
    assert recorder.states[2]["validation/forces_mae"] > 0
    assert [stage.name for stage in recorder.stages] == ["AFTER_OPTIMIZER_STEP"] * 4


def test_a_context_made_by_hand_is_enough():
    ctx = TrainContext(batch=None, loss=torch.tensor(2.0), losses={"force": torch.tensor(1.5)}, step_count=9)
    snapshot = collect_scalars(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    assert (snapshot.step, snapshot["loss/total"], snapshot["loss/force"]) == (9, 2.0, 1.5)
    assert dict(collect_scalars(HookContext(batch=None), TrainingStage.SETUP)) == {}
