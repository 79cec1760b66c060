"""Hooks that check and limit: NaN detector, force clamp, energy drift."""

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, DynamicsStage
from nvalchemi.dynamics.hooks import EnergyDriftMonitorHook, MaxForceClampHook, NaNDetectorHook
from nvalchemi.hooks import BiasedPotentialHook, DynamicsContext, HookOrderWarning


def _nan_in_second_graph_from_step(first):
    calls = []

    def bias(batch):
        calls.append(None)
        forces = torch.zeros_like(batch.forces)
        if len(calls) > first + 1:  # the first call is at admission
            forces[1] = float("nan")
        return torch.zeros_like(batch.energy), forces

    return BiasedPotentialHook(bias)


# ---------------------------------------------------------------------- NaN
def test_nan_is_an_error_with_step_field_graphs_and_ids(well, atoms_in_wells):
    batch = atoms_in_wells(count=3)
    batch.system_id = torch.tensor([[10], [20], [30]])
    engine = NVE(well, 1.0, hooks=[_nan_in_second_graph_from_step(2), NaNDetectorHook()])
    with pytest.raises(
        RuntimeError, match=r"step 2: forces is not finite in graphs \[1\] \(system_id \[20\]\)"
    ):
        engine.run(batch, 5)
    assert bool(batch.positions.isfinite().all())


def test_quarantined_graph_stops_and_the_others_go_on_undisturbed(well, atoms_in_wells, caplog):
    batch, alone = atoms_in_wells(count=3), atoms_in_wells(count=3)
    hooks = [_nan_in_second_graph_from_step(2), NaNDetectorHook(action="quarantine")]
    NVE(well, 1.0, hooks=hooks).run(batch, 10)
    NVE(well, 1.0).run(alone, 10)
    assert batch.status[:, 0].tolist() == [0, -1, 0]
    assert batch.system_step[:, 0].tolist() == [10, 2, 10]
    assert torch.equal(batch.positions[[0, 2]], alone.positions[[0, 2]])
    assert bool(batch.positions.isfinite().all() & batch.velocities.isfinite().all())
    assert "graph 1" in caplog.text


def test_warning_comes_once_for_each_structure(well, atoms_in_wells):
    engine = NVE(well, 1.0, hooks=[_nan_in_second_graph_from_step(1), NaNDetectorHook(action="warn")])
    with pytest.warns(UserWarning, match="forces is not finite") as caught:
        engine.run(atoms_in_wells(count=3), 1 + 1)
    assert len(caught) == 1


def test_two_atoms_at_the_same_place_are_reported_before_anything_moves(argon):
    dimer = AtomicData(positions=torch.ones(2, 3, dtype=torch.float64), atomic_numbers=torch.tensor([18, 18]))
    batch = Batch.from_data_list([dimer])
    with pytest.raises(RuntimeError, match="is not finite"):
        NVE(argon, 1.0, hooks=[NaNDetectorHook()]).run(batch, 1)
    assert bool((batch.positions == 1.0).all())


def test_extra_keys_are_watched_and_large_finite_values_are_not_reported(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.add_key("charges", torch.tensor([1e308, 1e308], dtype=torch.float64))
    engine = NVE(well, 1.0, hooks=[NaNDetectorHook(extra_keys=["charges"])])
    engine.run(batch, 1)
    batch.charges[1] = float("inf")
    with pytest.raises(RuntimeError, match=r"charges is not finite in graphs \[1\]"):
        engine.run(batch, 1)


# ---------------------------------------------------------------------- clamp
def _forces(batch, values):
    batch.forces = torch.tensor(values, dtype=torch.float64)
    return batch


def test_force_30_40_0_clamped_to_5_is_3_4_0_and_nan_stays(atoms_in_wells):
    batch = _forces(atoms_in_wells(count=3), [[30.0, 40.0, 0.0], [1.0, 2.0, 3.0], [float("nan"), 0.0, 0.0]])
    hook = MaxForceClampHook(5.0)
    hook(DynamicsContext(batch=batch), DynamicsStage.AFTER_COMPUTE)
    torch.testing.assert_close(batch.forces[0], torch.tensor([3.0, 4.0, 0.0]).double())
    assert batch.forces[1].tolist() == [1.0, 2.0, 3.0]
    assert bool(batch.forces[2, 0].isnan())
    assert hook.num_clamped == 1


def test_clamp_leaves_inactive_graphs_to_the_bit(atoms_in_wells):
    batch = _forces(atoms_in_wells(count=2), [[30.0, 40.0, 0.0], [30.0, 40.0, 0.0]])
    ctx = DynamicsContext(batch=batch, active_graph_mask=torch.tensor([False, True]))
    MaxForceClampHook(5.0)(ctx, DynamicsStage.AFTER_COMPUTE)
    assert batch.forces[0].tolist() == [30.0, 40.0, 0.0]
    assert float(batch.forces[1].norm()) == pytest.approx(5.0)


def test_clamp_registered_before_a_bias_warns(well):
    with pytest.warns(HookOrderWarning, match="MaxForceClampHook is registered before BiasedPotentialHook"):
        NVE(well, 1.0, hooks=[MaxForceClampHook(5.0), _nan_in_second_graph_from_step(9)])


# ---------------------------------------------------------------------- drift
def test_conserved_energy_is_silent_and_a_lost_one_is_reported_with_its_system_id(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.system_id = torch.tensor([[4], [9]])

    class Kick:
        frequency, stage = 1, DynamicsStage.AFTER_POST_UPDATE

        def __call__(self, ctx, stage):
            if ctx.step_count == 6:
                ctx.batch.velocities[1] += 1.0

    hook = EnergyDriftMonitorHook(1e-3, metric="absolute", action="raise")
    engine = NVE(well, 1.0, hooks=[Kick(), hook])
    with pytest.raises(RuntimeError, match=r"step 6: energy drifts .* in graphs \[1\] \(system_id \[9\]\)"):
        engine.run(batch, 10)


def test_drift_is_per_atom_and_step_and_its_reference_follows_the_structure(well, atoms_in_wells):
    batch = atoms_in_wells(count=3, size=4)
    engine = NVE(well, 1.0, hooks=[EnergyDriftMonitorHook(1.0, include_kinetic=False)])
    engine.run(batch, 11)
    selected = batch[[2, 0]]
    assert selected.drift_reference_step[:, 0].tolist() == [1, 1]
    assert torch.equal(selected.drift_reference_energy, batch.drift_reference_energy[[2, 0]])
    drift = (batch.energy - batch.drift_reference_energy).abs()[:, 0] / (4 * 10)
    hook = EnergyDriftMonitorHook(float(drift.max()) * 0.99, include_kinetic=False, action="raise")
    with pytest.raises(RuntimeError, match="per atom and step"):
        hook(DynamicsContext(batch=batch), DynamicsStage.AFTER_STEP)
    EnergyDriftMonitorHook(float(drift.max()) * 1.01, include_kinetic=False, action="raise")(
        DynamicsContext(batch=batch), DynamicsStage.AFTER_STEP
    )


def test_drift_monitor_works_with_inactive_graphs(well, atoms_in_wells):
    batch = atoms_in_wells(count=3)
    batch.status = torch.tensor([[0], [1], [0]])
    NVE(well, 1.0, hooks=[EnergyDriftMonitorHook(1.0, action="raise")]).run(batch, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NaNDetectorHook(action="ignore"),
        lambda: MaxForceClampHook(0.0),
        lambda: EnergyDriftMonitorHook(0.0),
        lambda: EnergyDriftMonitorHook(1.0, metric="relative"),
        lambda: EnergyDriftMonitorHook(1.0, action="stop"),
    ],
)
def test_options_that_make_no_sense_are_errors(make):
    # With the types checked in the tests, an unknown word is refused before the message of the hook (a TypeError).
    with pytest.raises((ValueError, TypeError)):
        make()
