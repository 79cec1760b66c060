"""The engine: admission, the run, masks, and what it leaves behind."""

import gc
import time

import pytest
import torch
from ase.build import bulk
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FIRE,
    NVE,
    BaseDynamics,
    ConvergenceHook,
    DemoDynamics,
    DynamicsStage,
    FIREVariableCell,
    NVTLangevin,
)
from nvalchemi.hooks import BiasedPotentialHook, NeighborListHook
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.lj import LennardJonesModelWrapper


class Spy:
    """Calls a function at a stage."""

    def __init__(self, stage, function, frequency=1):
        self.stage, self.function, self.frequency = stage, function, frequency

    def __call__(self, ctx, stage):
        self.function(ctx)


# ---------------------------------------------------------------------- admission
def test_missing_fields_are_added_and_the_same_object_returned(well, atoms_in_wells):
    batch = atoms_in_wells(count=3, size=2)
    assert NVE(well, dt=1.0).run(batch, 0) is batch
    assert batch.system_id.tolist() == [[0], [1], [2]]
    assert batch.status.tolist() == batch.system_step.tolist() == [[0], [0], [0]]
    assert batch.velocities.shape == batch.forces.shape == (6, 3)
    assert batch.energy.shape == (3, 1)


def test_velocities_come_from_momenta_where_there_are_only_those(well, atoms_in_wells):
    batch = atoms_in_wells(count=1)
    batch.momenta = torch.full_like(batch.positions, 39.95)
    NVE(well, dt=1.0).run(batch, 0)
    torch.testing.assert_close(batch.velocities, torch.ones_like(batch.positions))


def test_forces_are_primed_once_at_admission(well, atoms_in_wells):
    batch = atoms_in_wells()
    NVE(well, dt=1.0).run(batch, 5)
    assert len(well.graphs_seen) == 6


def test_admission_fires_once_per_batch_whatever_the_frequency_with_all_graphs_marked(well, atoms_in_wells):
    seen = []
    spy = Spy(
        DynamicsStage.ON_ADMISSION, lambda ctx: seen.append((ctx.step_count, ctx.admitted_mask.tolist())), 7
    )
    engine = NVE(well, dt=1.0, hooks=[spy])
    first, second = atoms_in_wells(count=2), atoms_in_wells(count=1)
    engine.run(first, 3)
    engine.run(first, 3)
    engine.run(second, 1)
    assert seen == [(0, [True, True]), (6, [True])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.add_key("system_id", torch.tensor([[4], [4], [5]])), r"unique over a run; \[4\]"),
        (
            lambda b: b.positions.__setitem__((3, 0), float("nan")),
            r"positions are not finite: atom 1 of graph 1 \(system_id 1\)",
        ),
        (
            lambda b: b.atomic_masses.__setitem__(5, 0.0),
            r"atomic_masses must be finite and positive: atom 1 of graph 2",
        ),
        (
            lambda b: b.add_key("status", torch.ones(3, 1, dtype=torch.int64)),
            r"no graph of the batch is active.*\[1\]",
        ),
    ],
)
def test_batch_that_cannot_run_is_an_error_before_the_first_step(well, atoms_in_wells, change, message):
    batch = atoms_in_wells(count=3, size=2)
    change(batch)
    engine = NVE(well, dt=1.0)
    with pytest.raises(ValueError, match=message):
        engine.run(batch, 1)
    assert engine.step_count == 0


def test_model_that_cannot_give_what_is_needed_is_an_error_before_the_first_step(well, atoms_in_wells):
    with pytest.raises(ValueError, match=r"HarmonicWell cannot give \['stress'\]"):
        FIREVariableCell(well).run(atoms_in_wells(), 1)


def test_field_that_the_model_requires_and_the_batch_lacks_is_an_error(well, atoms_in_wells):
    well.set_config("required_inputs", {"charge"})
    with pytest.raises(ValueError, match=r"needs the fields \['charge'\]"):
        NVE(well, dt=1.0).run(atoms_in_wells(), 1)


def test_a_stress_label_does_not_outlive_its_structure(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.stress = torch.ones(2, 3, 3, dtype=torch.float64)
    NVE(well, dt=1.0).run(batch, 1)
    assert "stress" not in batch


# ---------------------------------------------------------------------- the run
def test_run_twice_equals_one_long_run_to_the_bit(argon, crystal):
    data = crystal((2, 2, 2), speed=0.02)
    whole, parts = Batch.from_data_list([data]), Batch.from_data_list([data])
    one, two = (NVTLangevin(argon, dt=2.0, temperature=60, friction=0.01) for _ in range(2))
    one.run(whole, 30)
    two.run(parts, 13)
    two.run(parts, 17)
    assert torch.equal(whole.positions, parts.positions)
    assert torch.equal(whole.velocities, parts.velocities)
    assert one.step_count == two.step_count == 30
    assert parts.system_step.item() == 30


def test_positions_changed_between_two_runs_get_fresh_forces(well, atoms_in_wells):
    batch = atoms_in_wells(count=1)
    engine = NVE(well, dt=1.0)
    engine.run(batch, 2)
    batch.positions.fill_(0.5)
    engine.run(batch, 0)
    torch.testing.assert_close(batch.forces, torch.full_like(batch.forces, -0.5))


def test_a_run_that_could_not_end_is_refused(well, atoms_in_wells):
    with pytest.raises(ValueError, match="n_steps or a convergence hook"):
        NVE(well, dt=1.0).run(atoms_in_wells())
    with pytest.raises(ValueError, match="needs a batch"):
        NVE(well, dt=1.0).run(n_steps=1)
    with pytest.raises(ValueError, match="n_steps must be an int"):
        NVE(well, dt=1.0).run(atoms_in_wells(), -1)


def test_step_returns_the_batch_and_the_graphs_that_newly_converged(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.positions[1] = 0.0
    engine = NVE(well, dt=1.0, convergence_hook=ConvergenceHook.from_fmax(1e-3))
    out, converged = engine.step(batch)
    assert out is batch
    assert converged.tolist() == [1]
    assert engine.step(batch)[1] is None


def test_frequency_three_over_ten_steps_fires_at_0_3_6_9_at_every_stage_of_a_step(well, atoms_in_wells):
    seen = {stage: [] for stage in DynamicsStage if 0 <= stage.value <= 7}
    hooks = [Spy(stage, lambda ctx, s=stage: seen[s].append(ctx.step_count), 3) for stage in seen]
    NVE(well, dt=1.0, hooks=hooks).run(atoms_in_wells(), 10)
    assert all(steps == [0, 3, 6, 9] for steps in seen.values())


def test_a_bias_is_in_the_first_forces(well, atoms_in_wells):
    def spring(batch):
        return 0.5 * batch.energy.new_zeros(batch.num_graphs, 1), -2.0 * batch.positions

    biased, stiffer = atoms_in_wells(), atoms_in_wells()
    NVE(well, dt=1.0, hooks=[BiasedPotentialHook(spring)]).run(biased, 20)
    well.k = 3.0
    NVE(well, dt=1.0).run(stiffer, 20)
    torch.testing.assert_close(biased.positions, stiffer.positions, rtol=0, atol=1e-12)


def test_hooks_are_opened_and_closed_around_a_run_and_around_with(well, atoms_in_wells):
    log = []

    class Opened(Spy):
        def __enter__(self):
            log.append("open")

        def __exit__(self, *exc):
            log.append("close")

    engine = NVE(well, dt=1.0, hooks=[Opened(DynamicsStage.AFTER_STEP, lambda ctx: log.append("step"))])
    batch = atoms_in_wells()
    engine.run(batch, 1)
    with engine:
        engine.step(batch)
        engine.run(batch, 1)
    assert log == ["open", "step", "close", "open", "step", "step", "close"]


def test_error_in_a_hook_says_where_and_leaves_the_model_as_it_was(well, atoms_in_wells):
    def fail(ctx):
        raise RuntimeError("stop")

    well.train()
    with pytest.raises(RuntimeError, match="stop") as caught:
        NVE(well, dt=1.0, hooks=[Spy(DynamicsStage.AFTER_COMPUTE, fail, 2)]).run(atoms_in_wells(), 3)
    assert "raised by hook Spy at stage AFTER_COMPUTE, step 0" in caught.value.__notes__
    assert well.training
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------- what is left behind
class Learned(nn.Module, BaseModelMixin):
    """E = w Σ x² by autograd, with a submodule that is in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.frozen = nn.Dropout().eval()
        self.modes = []
        self.model_config = ModelConfig(autograd_outputs={"forces"}, supports_pbc=True)

    def forward(self, data):
        """Energy and forces."""
        self.modes.append(self.training)
        return self.differentiate(self.energies, data)

    def energies(self, inputs):
        """Energy of each graph."""
        from nvalchemi.models.derivatives import sum_per_graph

        per_atom = self.layer(inputs["positions"] ** 2).squeeze(-1)
        return {"energy": sum_per_graph(per_atom, inputs["batch_idx"], inputs["num_graphs"]).reshape(-1, 1)}


def test_model_runs_in_evaluation_mode_gets_its_modes_back_and_leaves_no_graph(atoms_in_wells):
    model = Learned()
    batch = atoms_in_wells()
    NVE(model, dt=1.0).run(batch, 3)
    assert not any(model.modes)
    assert model.training
    assert not model.frozen.training
    assert batch.positions.grad_fn is None
    assert not batch.forces.requires_grad
    assert not batch.energy.requires_grad


def test_outputs_are_switched_on_for_the_run_and_back(argon, crystal):
    argon.set_config("active_outputs", {"energy"})
    batch = Batch.from_data_list([crystal()])
    FIREVariableCell(argon).run(batch, 2)
    assert argon.model_config.active_outputs == {"energy"}
    assert bool(batch.stress.any())


def test_a_thousand_steps_leave_no_more_tensors_alive(well, atoms_in_wells):
    def alive():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    batch = atoms_in_wells()
    engine = NVTLangevin(well, dt=1.0, temperature=300, friction=0.01)
    engine.run(batch, 10)
    before = alive()
    engine.run(batch, 1000)
    assert alive() <= before
    assert batch.positions.grad_fn is None


# ---------------------------------------------------------------------- inactive graphs
def test_converged_graph_is_constant_to_the_bit_and_costs_no_evaluation(well, atoms_in_wells):
    batch = atoms_in_wells(count=3)
    batch.positions[1] *= 1e-4
    engine = FIRE(well, convergence_hook=ConvergenceHook.from_fmax(1e-4))
    engine.run(batch, 1)
    assert batch.status[:, 0].tolist() == [0, 1, 0]
    before = {name: t[1].clone() for name, t in batch.items()}
    well.graphs_seen.clear()
    engine.run(batch, 20)
    assert all(torch.equal(batch[name][1], old) for name, old in before.items())
    assert well.graphs_seen
    assert all(ids == [0, 2] for ids in well.graphs_seen[:5])


def test_nan_in_a_failed_graph_spreads_to_nobody_and_stays_where_it_is(well, atoms_in_wells):
    batch, alone = atoms_in_wells(count=3), atoms_in_wells(count=3)

    def break_second(ctx):
        if ctx.step_count == 2:
            ctx.batch.forces[1] = float("nan")
            ctx.batch.status[1] = -1

    engine = NVTLangevin(well, 1.0, 300, 0.01, hooks=[Spy(DynamicsStage.AFTER_COMPUTE, break_second)])
    engine.run(batch, 3)
    stopped = batch.positions[1].clone(), batch.velocities[1].clone()
    engine.run(batch, 10)
    assert bool(torch.isfinite(batch.positions).all())
    assert torch.equal(batch.positions[1], stopped[0])
    assert torch.equal(batch.velocities[1], stopped[1])
    assert batch.system_step[:, 0].tolist() == [13, 2, 13]
    NVTLangevin(well, 1.0, 300, 0.01).run(alone, 13)
    assert torch.equal(batch.positions[[0, 2]], alone.positions[[0, 2]])


def test_mask_is_none_while_all_are_active_and_marks_the_active_ones_after(well, atoms_in_wells):
    seen = []
    spy = Spy(DynamicsStage.AFTER_STEP, lambda ctx: seen.append(ctx.active_graph_mask))
    batch = atoms_in_wells(count=2)
    batch.positions[0] = 0.0
    NVE(well, 1.0, hooks=[spy], convergence_hook=ConvergenceHook.from_fmax(1e-6)).run(batch, 2)
    assert seen[0] is None
    assert seen[1].tolist() == [False, True]


def test_each_graph_graduates_once_whatever_moved_its_status(well, atoms_in_wells):
    graduated, converged = [], []
    batch = atoms_in_wells(count=4)
    batch.positions[0] = 0.0

    def finish_third(ctx):
        if ctx.step_count == 1:
            ctx.batch.status[2] = 1

    hooks = [
        Spy(DynamicsStage.BEFORE_STEP, finish_third),
        Spy(
            DynamicsStage.ON_GRADUATE,
            lambda ctx: graduated.append((ctx.step_count, ctx.graduated_mask.nonzero()[:, 0].tolist())),
        ),
        Spy(
            DynamicsStage.ON_CONVERGE,
            lambda ctx: converged.append((ctx.step_count, ctx.converged_mask.nonzero()[:, 0].tolist())),
        ),
    ]
    NVE(well, 1.0, hooks=hooks, convergence_hook=ConvergenceHook.from_fmax(1e-6)).run(batch, 6)
    assert converged == [(0, [0])]
    assert graduated == [(0, [0]), (1, [2])]


def test_preset_status_leaves_a_graph_out_from_the_start(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.status = torch.tensor([[1], [0]])
    before = batch.positions.clone()
    NVE(well, 1.0).run(batch, 3)
    assert torch.equal(batch.positions[0], before[0])
    assert not torch.equal(batch.positions[1], before[1])
    assert all(ids == [1] for ids in well.graphs_seen)


@pytest.mark.parametrize(
    "make",
    [lambda m: NVE(m, 1.0), lambda m: NVTLangevin(m, 1.0, 300, 0.1), FIRE, lambda m: DemoDynamics(m, dt=1.0)],
)
def test_fixed_atoms_do_not_move(well, atoms_in_wells, make):
    batch = atoms_in_wells(count=2, size=3)
    batch.atom_categories = torch.tensor([1, 0, 0, 0, 0, 0])
    batch.velocities = torch.ones_like(batch.positions)
    before = batch.positions.clone()
    make(well).run(batch, 5)
    assert torch.equal(batch.positions[0], before[0])
    assert torch.equal(batch.velocities[0], torch.zeros(3, dtype=torch.float64))
    assert bool((batch.positions[1:] != before[1:]).all())


# ---------------------------------------------------------------------- evaluation in pieces
@pytest.mark.parametrize("limit", [1, 400, lambda edges: [(i, i + 1) for i in range(len(edges))]])
def test_pieces_give_the_path_of_one_evaluation(argon, crystal, cluster, limit):
    structures = [crystal(), crystal((2, 1, 1), seed=1), crystal(seed=2)]
    whole, pieces = Batch.from_data_list(structures), Batch.from_data_list(structures)
    NVE(argon, 2.0).run(whole, 10)
    NVE(argon, 2.0, max_edges_per_eval=limit).run(pieces, 10)
    assert torch.equal(whole.positions, pieces.positions)
    assert torch.equal(whole.energy, pieces.energy)
    assert torch.equal(whole.stress, pieces.stress)


@pytest.mark.parametrize("limit", [0, -1, True])
def test_bad_piece_size_is_refused(well, limit):
    with pytest.raises(ValueError, match="max_edges_per_eval"):
        NVE(well, 1.0, max_edges_per_eval=limit)


class ChargeSquared(nn.Module, BaseModelMixin):
    """E = charge²."""

    def __init__(self):
        super().__init__()
        self.model_config = ModelConfig(outputs={"energy", "forces"}, required_inputs={"charge"})

    def forward(self, data):
        """Energy and forces."""
        return {"energy": data.charge.to(data.dtype) ** 2, "forces": torch.zeros_like(data.positions)}


def test_charge_spin_and_fields_of_the_users_own_reach_the_model_and_survive(atoms_in_wells):
    batch = atoms_in_wells(count=3)
    batch.charge = torch.tensor([[0.0], [1.0], [-1.0]], dtype=torch.float64)
    batch.spin = torch.tensor([[1], [2], [2]])
    batch.add_key("label", torch.tensor([7, 8, 9]), "system")
    batch.status = torch.tensor([[0], [0], [1]])
    NVE(ChargeSquared(), 1.0, max_edges_per_eval=1).run(batch, 2)
    assert batch.energy[:2, 0].tolist() == [0.0, 1.0]
    assert batch.charge[:, 0].tolist() == [0.0, 1.0, -1.0]
    assert batch.spin[:, 0].tolist() == [1, 2, 2]
    assert batch.label.tolist() == [7, 8, 9]


# ---------------------------------------------------------------------- neighbour list
def test_engine_adds_a_neighbor_hook_with_a_skin_and_yields_to_one_of_the_user(argon, crystal):
    engine = NVE(argon, 2.0)
    engine.run(Batch.from_data_list([crystal()]), 1)
    (hook,) = engine.hooks
    assert isinstance(hook, NeighborListHook)
    assert hook.skin == 1.0
    own = NeighborListHook(argon.model_config.neighbor_config, skin=0.5)
    engine.register_hook(own)
    assert list(engine.hooks) == [own]


def test_without_automatic_neighbors_the_model_says_what_is_missing(argon, crystal):
    with pytest.raises(ValueError, match="compute_neighbors"):
        NVE(argon, 2.0, auto_neighbors=False).run(Batch.from_data_list([crystal()]), 1)


def test_single_atom_and_molecule_and_crystal_in_one_batch(argon, crystal, cluster):
    lone = AtomicData(
        positions=torch.zeros(1, 3, dtype=torch.float64),
        atomic_numbers=torch.tensor([18]),
        velocities=torch.ones(1, 3, dtype=torch.float64),
    )
    data = crystal()
    molecule = cluster(4)
    molecule.add_node_property("velocities", torch.zeros(4, 3, dtype=torch.float64))
    together = Batch.from_data_list([lone, data, molecule])
    NVE(argon, 2.0).run(together, 10)
    for i, structure in enumerate([lone, data, molecule]):
        alone = Batch.from_data_list([structure])
        NVE(argon, 2.0).run(alone, 10)
        torch.testing.assert_close(together[i].positions, alone.positions, rtol=0, atol=1e-12)


def test_repr_and_subclass_without_methods(well, atoms_in_wells):
    engine = BaseDynamics(well, n_steps=2)
    batch = atoms_in_wells()
    before = batch.positions.clone()
    engine.run(batch)
    assert torch.equal(batch.positions, before)
    assert repr(engine) == "BaseDynamics(model=HarmonicWell, step 2, hooks=[])"


@pytest.mark.parametrize("bad", [-1.0, 0.0, float("inf"), float("nan")])
def test_bad_time_step_is_an_error_at_construction(well, bad):
    for make in (lambda: NVE(well, bad), lambda: FIRE(well, bad), lambda: DemoDynamics(well, dt=bad)):
        with pytest.raises(ValueError, match="dt must be finite and > 0"):
            make()


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan"), torch.tensor([300.0, float("nan")])])
def test_bad_temperature_or_friction_is_an_error_at_construction(well, bad):
    with pytest.raises(ValueError, match="temperature must be finite"):
        NVTLangevin(well, 1.0, bad, 0.01)
    with pytest.raises(ValueError, match="friction must be finite"):
        NVTLangevin(well, 1.0, 300, bad)


def test_parameter_with_the_wrong_number_of_graphs_is_an_error(well, atoms_in_wells):
    with pytest.raises(ValueError, match="dt has 2 values for a batch of 3 graphs"):
        NVE(well, torch.tensor([1.0, 2.0])).run(atoms_in_wells(count=3), 1)
    with pytest.raises(ValueError, match=r"dt must be one number or a tensor of shape \[B\]"):
        NVE(well, torch.ones(2, 1))


@pytest.mark.parametrize(
    "make", [lambda m: NVE(m, 2.0), lambda m: NVTLangevin(m, 2.0, 60.0, 0.01), FIRE, FIREVariableCell]
)
def test_float32_state_stays_float32_and_follows_the_float64_path(argon, crystal, make):
    double = Batch.from_data_list([crystal(speed=0.02)])
    single = double.to(dtype=torch.float32)
    for batch in (double, single):
        make(argon).run(batch, 20)
    floating = {name: t.dtype for name, t in single.items() if t.is_floating_point()}
    assert set(floating.values()) == {torch.float32}
    torch.testing.assert_close(single.positions.double(), double.positions, rtol=0, atol=1e-4)


def test_described_hooks_include_the_automatic_and_the_convergence_hook(argon):
    text = NVE(argon, 2.0, convergence_hook=ConvergenceHook.from_fmax(0.01)).describe_hooks()
    assert "BEFORE_COMPUTE  1      NeighborListHook  1" in text
    assert text.endswith("after AFTER_STEP: ConvergenceHook(fmax <= 0.01)")


def test_structures_without_working_state_can_join_and_get_their_own(argon, crystal):
    batch, fresh = Batch.from_data_list([crystal()]), Batch.from_data_list([crystal(seed=1)])
    FIREVariableCell(argon).run(batch, 3)
    for name in ("energy", "forces", "stress", "system_step", "status"):
        fresh.add_key(name, torch.zeros_like(batch[name]))
    fresh.system_id = torch.tensor([[5]])
    alone = fresh.clone()
    batch.append(fresh)
    FIREVariableCell(argon).run(batch, 10)
    FIREVariableCell(argon).run(alone, 10)
    torch.testing.assert_close(batch[1].positions, alone.positions, rtol=0, atol=1e-10)
    torch.testing.assert_close(batch.cell[1], alone.cell[0], rtol=0, atol=1e-10)


class _SlowForManyEdges(LennardJonesModelWrapper):
    """Pretends to take a time per edge that is least for pieces of about 1,000 edges."""

    def __init__(self, clock):
        super().__init__(0.0104, 3.40, 8.5)
        self.clock, self.sizes = clock, []

    def forward(self, data):
        edges = int(data.num_neighbors.sum())
        self.sizes.append(edges)
        self.clock[0] += 0.1 + 1e-4 * edges + 1e-7 * edges**2
        return super().forward(data)


def test_auto_finds_the_piece_size_with_the_least_time_per_edge(monkeypatch):
    clock = [0.0]
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: clock[0])
    argon = [AtomicData.from_atoms(bulk("Ar", "fcc", 5.3), dtype=torch.float64) for _ in range(64)]
    batch, whole = Batch.from_data_list(argon), Batch.from_data_list(argon)
    model = _SlowForManyEdges(clock)
    engine = NVE(model, 1.0, max_edges_per_eval="auto")
    engine.run(batch, 0)
    assert engine._evaluate_pieces.bound.max_edges == 1024
    model.sizes.clear()
    engine.run(batch, 3)
    assert max(model.sizes) <= 1024
    NVE(LennardJonesModelWrapper(0.0104, 3.40, 8.5), 1.0).run(whole, 3)
    assert torch.allclose(batch.positions, whole.positions, rtol=0, atol=1e-12)
    other = NVE(_SlowForManyEdges(clock), 1.0, max_edges_per_eval="auto")
    other.load_state_dict(engine.state_dict())
    assert other._evaluate_pieces.bound.max_edges == 1024


def test_atoms_that_somebody_moves_far_between_two_runs_are_no_failure(argon, crystal):
    batch, expected = (Batch.from_data_list([crystal(speed=0.01)]) for _ in range(2))
    NVE(argon, 1.0).run(expected, n_steps=6)
    engine = NVE(argon, 1.0)
    batch.positions[:2] += 4000 * batch.cell[0, 0]
    engine.run(batch, n_steps=3)
    batch.positions[:2] -= 4000 * batch.cell[0, 0]
    engine.run(batch, n_steps=3)
    assert not engine.failures
    torch.testing.assert_close(batch.positions, expected.positions, rtol=0, atol=1e-9)
