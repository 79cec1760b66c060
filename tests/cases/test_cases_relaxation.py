"""Cases from the field: relaxation."""

import numpy as np
import pytest
import torch
from ase.build import bulk

from nvalchemi.data import AtomicData
from nvalchemi.dynamics import FIRE, ConvergenceHook, DynamicsStage, FIREVariableCell, SizeAwareSampler
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.dynamics.thermo import pressure as pressure_of
from nvalchemi.dynamics.thermo import volume
from nvalchemi.hooks import BiasedPotentialHook, WrapPeriodicHook
from nvalchemi.neighbors import compute_neighbors

STATE = ("positions", "cell", "velocities", "energy", "forces", "stress", "image_flags")


class Watch:
    """Compare the structures that are done with what they were when they were done."""

    frequency, stage = 1, DynamicsStage.BEFORE_STEP

    def __init__(self):
        self.then = {}
        self.comparisons = 0

    def __call__(self, ctx, stage):
        if ctx.active_graph_mask is None:
            return
        for graph in (~ctx.active_graph_mask).nonzero()[:, 0].tolist():
            now = {name: ctx.batch[graph][name].clone() for name in STATE}
            for name, value in self.then.setdefault(graph, now).items():
                assert torch.equal(value, now[name]), (graph, name)
            self.comparisons += 1


class WrapOnce(WrapPeriodicHook):
    """Wrap at one step only."""

    def __call__(self, ctx, stage):
        if ctx.step_count == 20:
            super().__call__(ctx, stage)


def test_converged_cell_and_all_else_stay_to_the_bit_while_the_others_go_on(argon, crystal, join):
    batch = join(crystal(4.8, rattle=0.2), crystal(5.2, rattle=0.0), crystal(5.0, rattle=0.0))
    # Outside the cell, so that wrapping would move those that are done by then, too.
    batch.positions += 20.0
    batch.image_flags = torch.zeros(12, 3, dtype=torch.int32)
    watch = Watch()
    hooks = [watch, WrapOnce()]
    engine = FIREVariableCell(argon, hooks=hooks, convergence_hook=ConvergenceHook.from_fmax(5e-3))
    engine.run(batch, 500)
    assert batch.status[:, 0].tolist() == [1, 1, 1]
    steps = batch.system_step[:, 0].tolist()
    assert max(steps[1:]) < 20 < steps[0]
    assert bool(batch.image_flags[:4].any())
    assert not bool(batch.image_flags[4:].any())
    assert watch.comparisons == sum(max(steps) - s for s in steps)


def test_bias_of_p_times_v_relaxes_to_the_cell_of_pressure_p(argon, crystal, join):
    pressure = 0.01

    def bias(batch):
        size = torch.linalg.det(batch.cell).abs().reshape(-1, 1)
        stress = pressure * torch.eye(3, dtype=batch.dtype).repeat(batch.num_graphs, 1, 1)
        return pressure * size, torch.zeros_like(batch.forces), stress

    biased, pressed = (join(crystal(5.0), crystal(5.4, seed=1)) for _ in range(2))
    stop = 1e-4
    hook = BiasedPotentialHook(bias)
    FIREVariableCell(argon, hooks=[hook], convergence_hook=ConvergenceHook.from_fmax(stop)).run(biased, 800)
    FIREVariableCell(argon, pressure=pressure, convergence_hook=ConvergenceHook.from_fmax(stop)).run(
        pressed, 800
    )
    torch.testing.assert_close(biased.cell, pressed.cell, rtol=0, atol=1e-9)
    work = pressure * volume(biased).unsqueeze(-1)
    torch.testing.assert_close(biased.energy, pressed.energy + work, rtol=1e-12, atol=0)


def test_left_handed_cell_takes_the_path_of_the_right_handed_one(argon, crystal, join):
    right, left = crystal(5.0, rattle=0.1), crystal(5.0, rattle=0.1)
    order = [1, 0, 2]
    left.cell = right.cell[:, order]
    assert float(torch.linalg.det(left.cell[0])) < 0
    batch = join(right, left)
    FIREVariableCell(argon, pressure=0.005).run(batch, 40)
    assert float((batch.cell[0] - right.cell[0]).abs().max()) > 0.01
    torch.testing.assert_close(batch.cell[1], batch.cell[0][order], rtol=0, atol=1e-8)
    torch.testing.assert_close(batch.stress[1], batch.stress[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(volume(batch)[1], volume(batch)[0])
    torch.testing.assert_close(pressure_of(batch)[1], pressure_of(batch)[0])


def test_components_of_the_strain_that_are_masked_stay_zero_and_the_others_reach_their_minimum(argon, join):
    atoms = bulk("Ar", "fcc", 5.0)
    atoms.set_cell(atoms.cell[:] @ np.array([[1, 0.1, 0], [0.1, 1, 0.05], [0, 0.05, 1]]), scale_atoms=True)
    batch = join(AtomicData.from_atoms(atoms, dtype=torch.float64))
    first = batch.cell.clone()
    engine = FIREVariableCell(
        argon, mask=[0, 0, 0, 0, 0, 1], convergence_hook=ConvergenceHook.from_fmax(1e-6)
    )
    engine.run(batch, 500)
    assert batch.status.item() == 1
    strain = batch.log_deformation[0].clone()
    held = torch.ones(3, 3, dtype=torch.bool)
    held[0, 1] = held[1, 0] = False
    assert not bool(strain[held].any())
    assert float(strain.abs().max()) > 0.01

    def energy(i, j, change):
        deformed = batch.clone()
        moved = strain.clone()
        moved[i, j] += change
        deformed.cell = first @ torch.matrix_exp(moved).mT
        compute_neighbors(deformed, config=argon.model_config.neighbor_config)
        return argon(deformed)["energy"].item()

    assert energy(0, 1, 0.0) == pytest.approx(batch.energy.item(), abs=1e-12)
    for i, j in ((0, 1), (1, 0)):
        assert (energy(i, j, 1e-4) - energy(i, j, -1e-4)) / 2e-4 == pytest.approx(0.0, abs=1e-5)


def test_cell_without_atoms_beside_a_crystal_neither_moves_nor_spoils_the_run(argon, crystal, join):
    empty = AtomicData(
        positions=torch.zeros(0, 3, dtype=torch.float64), atomic_numbers=[], cell=5.0 * torch.eye(3).double()
    )
    batch = join(empty, crystal(5.0))
    FIREVariableCell(argon, convergence_hook=ConvergenceHook.from_fmax(1e-3)).run(batch, 300)
    assert batch.status[:, 0].tolist() == [1, 1]
    assert torch.equal(batch.cell[0], 5.0 * torch.eye(3).double())


@pytest.mark.parametrize("name", ["f_inc", "f_dec", "alpha_start", "f_alpha", "max_step"])
@pytest.mark.parametrize("bad", [-1.0, 0.0, float("nan"), float("inf")])
def test_parameters_that_would_send_fire_astray_are_errors_at_construction(argon, name, bad):
    with pytest.raises(ValueError, match=f"{name} must be finite and > 0"):
        FIRE(argon, **{name: bad})


@pytest.mark.parametrize("bad", [-1e-3, float("nan")])
def test_stress_threshold_that_nothing_can_meet_is_an_error(bad):
    with pytest.raises(ValueError, match="threshold of criterion 'stress'"):
        ConvergenceHook.from_stress(bad)


def test_small_large_small_through_a_budget_come_back_in_the_order_of_the_input(argon, chain):
    sizes = [1, 100, 1]
    results = {}
    for order in ("arrival", "system_id"):
        sink = HostMemory(order=order)
        sampler = SizeAwareSampler([chain(n, 3.8 + 0.01 * n) for n in sizes], max_atoms=101)
        stop = ConvergenceHook.from_fmax(1e-6)
        FIRE(argon, n_steps=30, convergence_hook=stop, sampler=sampler, sinks=sink).run()
        results[order] = sink.drain()
        assert len(sink) == 0
    arrived, ordered = results["arrival"], results["system_id"]
    assert arrived.system_id[:, 0].tolist() == [0, 2, 1]
    assert ordered.system_id[:, 0].tolist() == [0, 1, 2]
    assert ordered.num_nodes_per_graph.tolist() == sizes
    assert torch.equal(ordered[1].positions, arrived[2].positions)


def test_order_that_a_sink_cannot_keep_is_an_error(chain, join):
    with pytest.raises(ValueError, match="order must be 'arrival' or 'system_id'"):
        HostMemory(order="size")
    sink = HostMemory(order="system_id")
    sink.write(join(chain(1)))
    with pytest.raises(ValueError, match="without system_id"):
        sink.read()
