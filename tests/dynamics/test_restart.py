"""A run that was interrupted and resumed is the uninterrupted run: to the bit, in every field and every file."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from ase.build import bulk
from ase.constraints import FixedPlane

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import (
    FIRE,
    FIRE2,
    LBFGS,
    NPH,
    NPT,
    NVE,
    CellCoordinates,
    ConvergenceHook,
    DemoDynamics,
    DynamicsStage,
    FIRE2VariableCell,
    FIREVariableCell,
    NVTLangevin,
    NVTNoseHoover,
    initialize_velocities,
)
from nvalchemi.dynamics.hooks import (
    EnergyDriftMonitorHook,
    FreezeAtomsHook,
    LoggingHook,
    MaxForceClampHook,
    NaNDetectorHook,
    SnapshotHook,
)
from nvalchemi.dynamics.inflight import SizeAwareSampler
from nvalchemi.dynamics.restart import read_state
from nvalchemi.dynamics.sinks import ExtxyzTrajectory, HostMemory
from nvalchemi.dynamics.state import batch_from_state, batch_state
from nvalchemi.hooks import BiasedPotentialHook, NeighborListHook, StageTimingHook, WrapPeriodicHook
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.neighbors import NeighborConfig, compute_neighbors


def argon() -> LennardJonesModelWrapper:
    return LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)


def crystals(dtype=torch.float64, temperature=80.0) -> Batch:
    """Three strained and rattled crystals of different size, hot enough for new neighbour lists every few steps."""
    data = []
    for k, (a, repeat) in enumerate([(5.3, 1), (5.45, 2), (5.6, 1)]):
        atoms = bulk("Ar", "fcc", a, cubic=True).repeat((repeat, 1, 1))
        atoms.rattle(0.08, seed=k)
        data.append(AtomicData.from_atoms(atoms, dtype=dtype))
    batch = Batch.from_data_list(data)
    initialize_velocities(batch, temperature, random_seed=3)
    return batch


def assert_same(a: Batch, b: Batch) -> None:
    """Equal to the bit, down to the order of fields and the layout in memory."""
    assert a.keys() == b.keys()
    for name in a.keys():
        assert a[name].dtype == b[name].dtype, name
        assert a[name].stride() == b[name].stride(), name
        assert torch.equal(a[name], b[name]), name
        assert a.level(name) == b.level(name)
    assert torch.equal(a.batch_ptr, b.batch_ptr)
    assert torch.equal(a.edge_ptr, b.edge_ptr)
    assert a.info == b.info


class Interrupt:
    """End a run in the middle of a step, as an error would."""

    frequency = 1
    stage = DynamicsStage.AFTER_COMPUTE

    def __init__(self, step):
        self.step = step

    def __call__(self, ctx, stage):
        if ctx.step_count == self.step:
            raise KeyboardInterrupt


def run_with_interruption(make, batch, n_steps, *, at, save_every):
    """Run until an interruption, then again with everything new; the last engine and batch."""
    engine = make()
    engine.register_hook(Interrupt(at))
    with pytest.raises(KeyboardInterrupt):
        engine.run(batch.clone(), n_steps, restart="run.ckpt", save_every=save_every)
    engine, batch = make(), batch.clone()
    assert engine.run(batch, n_steps, restart="run.ckpt", save_every=save_every) is batch
    return engine, batch


def relaxing(kind, fmax=1e-4, **options):
    # With FIRE the crystals converge after 60 to 80 steps, some before and some after the interruption.
    return lambda: kind(argon(), convergence_hook=ConvergenceHook.from_fmax(fmax), **options)


def list_with_skin(skin):
    return NeighborListHook(argon().model_config.neighbor_config, skin=skin)


ENGINES = {
    "NVE": lambda: NVE(argon(), dt=5.0, hooks=[list_with_skin(0.2)]),
    "NVTLangevin": lambda: NVTLangevin(argon(), dt=5.0, temperature=80.0, friction=0.01),
    "NVTLangevin, own parameters for each": lambda: NVTLangevin(
        argon(),
        dt=torch.tensor([2.0, 4.0, 6.0]),
        temperature=torch.tensor([40.0, 80.0, 120.0]),
        friction=0.02,
    ),
    "DemoDynamics": lambda: DemoDynamics(argon(), dt=5.0),
    "FIRE": relaxing(FIRE),
    "FIREVariableCell": relaxing(FIREVariableCell),
    # These are faster and go on for as long as they are told here.
    "FIRE2": relaxing(FIRE2, fmax=0.0),
    "FIRE2VariableCell": relaxing(FIRE2VariableCell, fmax=0.0),
    "LBFGS": relaxing(LBFGS, fmax=0.0, memory=5),
    "LBFGS with variable cell": relaxing(LBFGS, fmax=0.0, coordinates=CellCoordinates()),
    "NVTNoseHoover": lambda: NVTNoseHoover(argon(), dt=5.0, temperature=80.0, thermostat_time=100.0),
    "NPH": lambda: NPH(argon(), dt=5.0, pressure=0.1 * units.GPa, barostat_time=200.0),
    "NPT": lambda: NPT(
        argon(),
        dt=5.0,
        temperature=lambda step: 80.0 + 0.1 * step,
        pressure=0.1 * units.GPa,
        barostat_time=200.0,
        thermostat_time=100.0,
        pressure_coupling="triclinic",
    ),
    "NVE in pieces": lambda: NVE(argon(), dt=5.0, max_edges_per_eval=400),
    "NVE, wrapped": lambda: NVE(argon(), dt=5.0, hooks=[WrapPeriodicHook(), list_with_skin(0.2)]),
    "NVE, two lists": lambda: NVE(
        argon(),
        dt=5.0,
        hooks=[
            list_with_skin(0.2),
            NeighborListHook(NeighborConfig(cutoff=4.0), skin=0.3),
            WrapPeriodicHook(),
        ],
    ),
    "NVE, list at every step": lambda: NVE(argon(), dt=5.0, hooks=[list_with_skin(0.0)]),
    "NVE, held atoms": lambda: NVE(argon(), dt=5.0, hooks=[FreezeAtomsHook(indices=[0, 2])]),
}


INTERRUPTION = 73


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ENGINES)
def test_resumed_run_equals_the_uninterrupted_one(name, dtype):
    make, start = ENGINES[name], crystals(dtype)
    start.image_flags = torch.zeros(start.num_nodes, 3, dtype=torch.int32)
    whole = start.clone()
    reference = make()
    reference.run(whole, 80)
    engine, resumed = run_with_interruption(make, start, 80, at=INTERRUPTION, save_every=10)
    assert_same(whole, resumed)
    assert engine.step_count == reference.step_count


def test_the_runs_compared_rebuild_their_lists_and_retire_structures_on_both_sides_of_the_interruption():
    """What makes the test above worth something."""
    md, moving = ENGINES["NVE"](), crystals()
    relax, relaxing = ENGINES["FIRE"](), crystals()
    builds, active = [], []
    for n_steps in (INTERRUPTION, 80 - INTERRUPTION):
        md.run(moving, n_steps)
        relax.run(relaxing, n_steps)
        builds.append(md.hooks[0].num_builds)
        active.append(int((relaxing.status == 0).sum()))
    assert 1 < builds[0] < builds[1]
    assert 3 > active[0] > active[1]


def test_number_of_list_builds_goes_on():
    whole = ENGINES["NVE"]()
    whole.run(crystals(), 80)
    engine, _ = run_with_interruption(ENGINES["NVE"], crystals(), 80, at=INTERRUPTION, save_every=10)
    assert engine.hooks[0].num_builds == whole.hooks[0].num_builds


def test_model_is_not_called_again_for_forces_that_are_known():
    calls = []

    class Counting(LennardJonesModelWrapper):
        def forward(self, data):
            calls.append(1)
            return super().forward(data)

    def make():
        return NVE(Counting(epsilon=0.0104, sigma=3.40, cutoff=8.5), dt=5.0)

    make().run(crystals(), 10, restart="run.ckpt")
    assert len(calls) == 11
    make().run(crystals(), 15, restart="run.ckpt")
    assert len(calls) == 16


# ---------------------------------------------------------------------- state_dict
def test_state_dict_is_taken_up_by_a_fresh_engine():
    whole, part = crystals(), crystals()
    ENGINES["NVTLangevin"]().run(whole, 60)
    engine = ENGINES["NVTLangevin"]()
    engine.run(part, 25)
    state = engine.state_dict()
    engine.run(part, 5)  # the state does not follow

    for given in (crystals(), None):
        fresh = ENGINES["NVTLangevin"]()
        fresh.load_state_dict(state)
        assert fresh.step_count == 25
        assert_same(whole, fresh.run(given, 35))


def test_state_survives_an_engine_that_only_passed_it_on():
    engine, batch = ENGINES["NVE"](), crystals()
    engine.run(batch, 10)
    second, third = ENGINES["NVE"](), ENGINES["NVE"]()
    second.load_state_dict(engine.state_dict())
    third.load_state_dict(second.state_dict())
    assert_same(engine.run(batch, 10), third.run(n_steps=10))


def test_engine_without_structures_has_a_state_too():
    fresh = ENGINES["NVE"]()
    fresh.load_state_dict(ENGINES["NVE"]().state_dict())
    assert_same(ENGINES["NVE"]().run(crystals(), 5), fresh.run(crystals(), 5))


def test_step_takes_up_the_saved_structures():
    engine, batch = ENGINES["NVE"](), crystals()
    engine.run(batch, 10)
    fresh, other = ENGINES["NVE"](), crystals()
    fresh.load_state_dict(engine.state_dict())
    fresh.step(other)
    engine.step(batch)
    assert_same(batch, other)


def test_structures_changed_between_runs_get_fresh_forces_after_a_restart_too():
    engine, batch = ENGINES["NVE"](), crystals()
    engine.run(batch, 5)
    batch.positions[0] += 0.2
    fresh = ENGINES["NVE"]()
    fresh.load_state_dict(engine.state_dict())
    assert_same(engine.run(batch, 5), fresh.run(crystals(), 5))


def test_state_of_another_engine_or_of_other_structures_is_refused():
    engine = ENGINES["NVE"]()
    engine.run(crystals(), 1)
    with pytest.raises(ValueError, match="of a NVE, it cannot be taken up by a FIRE"):
        ENGINES["FIRE"]().load_state_dict(engine.state_dict())
    fresh = ENGINES["NVE"]()
    fresh.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match=r"other structures: .*3 graphs, 16 atoms.*2 graphs, 12 atoms"):
        fresh.run(crystals()[:2], 1)


def test_state_of_an_engine_with_other_parts_is_refused():
    class Fed(NVE):
        restart_parts: ClassVar = {"sampler": SizeAwareSampler(crystals().to_data_list(), max_batch_size=1)}

    fed = Fed(argon(), dt=5.0)
    state = fed.state_dict()
    with pytest.raises(ValueError, match=r"had the parts \[\], this one has \['sampler'\]"):
        fed.load_state_dict({**state, "parts": {}})


def test_other_parameters_are_warned_of_and_used():
    engine = NVTLangevin(argon(), dt=5.0, temperature=80.0, friction=0.01)
    engine.run(crystals(), 1)
    fresh = NVTLangevin(argon(), dt=5.0, temperature=90.0, friction=0.01, random_seed=7)
    with pytest.warns(UserWarning, match=r"random_seed 7 \(was 42\), temperature 90.0 \(was 80.0\)"):
        fresh.load_state_dict(engine.state_dict())
    assert fresh.temperature.value == 90.0


def test_hook_that_is_missing_is_warned_of():
    engine = NVE(argon(), dt=5.0, hooks=[MaxForceClampHook(1.0)])
    engine.run(crystals(), 1)
    with pytest.warns(UserWarning, match="MaxForceClampHook"):
        ENGINES["NVE"]().load_state_dict(engine.state_dict())


# ---------------------------------------------------------------------- batch
def test_batch_survives_with_custom_fields_scalars_info_and_edges():
    atoms = bulk("Ar", "fcc", 5.3, cubic=True)
    atoms.info["name"] = "argon"
    atoms.set_constraint(FixedPlane(1, (0, 0, 1)))
    data = [AtomicData.from_atoms(atoms), AtomicData.from_atoms(bulk("Ar", "fcc", 5.3))]
    for k, one in enumerate(data):
        one.add_system_property("label", torch.tensor(1.5 + k))
        one.add_node_property("half", torch.ones(one.num_nodes, 2, dtype=torch.bfloat16))
    batch = Batch.from_data_list(data)
    compute_neighbors(batch, config=NeighborConfig(cutoff=4.0))
    restored = batch_from_state(batch_state(batch))
    assert [repr(c) for c in restored.info[0].pop("constraints")] == [
        repr(c) for c in batch.info[0].pop("constraints")
    ]
    assert_same(batch, restored)
    assert restored[1].label.shape == batch[1].label.shape == ()


def test_info_that_cannot_be_written_is_refused_before_the_first_step():
    batch = crystals()
    batch.info[0]["object"] = object()
    before = batch.positions.clone()
    with pytest.raises(ValueError, match="object"):
        ENGINES["NVE"]().run(batch, 5, restart="run.ckpt")
    assert torch.equal(batch.positions, before)


# ---------------------------------------------------------------------- schedules
def test_temperature_ramp_stopped_at_50_and_resumed_is_at_250_kelvin_at_step_75():
    targets: dict[int, float] = {}

    def ramp(step):
        target = 100.0 + 2.0 * step
        targets.update(zip(step.tolist(), target.tolist(), strict=True))
        return target

    def make():
        return NVTLangevin(argon(), dt=1.0, temperature=ramp, friction=0.05)

    whole, stopped, resumed = crystals(), crystals(), crystals()
    make().run(whole, 100)
    make().run(stopped, 50, restart="ramp.ckpt")
    targets.clear()
    make().run(resumed, 100, restart="ramp.ckpt")
    assert targets[75] == 250.0
    assert min(targets) == 50
    assert_same(whole, resumed)


# ---------------------------------------------------------------------- logs and trajectories
@pytest.mark.parametrize("backend", ["csv", "jsonl"])
@pytest.mark.parametrize("interrupted_at", [3, 66, 70])
def test_logs_and_trajectories_have_no_row_or_frame_twice_or_missing(backend, interrupted_at):
    def make(name):
        trajectory = SnapshotHook(ExtxyzTrajectory(f"{name}.extxyz"), frequency=7)
        return lambda: FIRE(
            argon(),
            hooks=[LoggingHook(backend, 3, f"{name}.log"), trajectory],
            convergence_hook=ConvergenceHook.from_fmax(1e-4),
        )

    make("whole")().run(crystals(), 80)
    run_with_interruption(make("resumed"), crystals(), 80, at=interrupted_at, save_every=10)
    for suffix in ("log", "extxyz"):
        whole, resumed = (Path(f"{name}.{suffix}").read_text() for name in ("whole", "resumed"))
        assert whole == resumed
    assert len(whole.splitlines()) > 50


def make_logged():
    return NVE(
        argon(), dt=5.0, hooks=[LoggingHook(log_path="md.csv"), SnapshotHook(ExtxyzTrajectory("md.extxyz"))]
    )


def test_longer_run_goes_on_in_the_files_of_one_that_was_complete():
    make_logged().run(crystals(), 20, restart="run.ckpt")
    make_logged().run(crystals(), 30, restart="run.ckpt")
    resumed = [Path(name).read_text() for name in ("md.csv", "md.extxyz")]
    for name in ("md.csv", "md.extxyz"):
        Path(name).unlink()
    make_logged().run(crystals(), 30)
    assert resumed == [Path(name).read_text() for name in ("md.csv", "md.extxyz")]


def test_run_that_is_complete_leaves_its_files_as_they_are():
    make_logged().run(crystals(), 20, restart="run.ckpt")
    before = [Path(name).read_bytes() for name in ("md.csv", "md.extxyz")]
    batch = crystals()
    make_logged().run(batch, 20, restart="run.ckpt")
    assert before == [Path(name).read_bytes() for name in ("md.csv", "md.extxyz")]
    assert batch.system_step[:, 0].tolist() == [20, 20, 20]


def test_log_that_was_removed_is_warned_of_and_begun_again():
    make_logged().run(crystals(), 10, restart="run.ckpt")
    Path("md.csv").unlink()
    with pytest.warns(UserWarning, match=r"md.csv has 0 bytes and had \d+"):
        make_logged().run(crystals(), 12, restart="run.ckpt")
    lines = Path("md.csv").read_text().splitlines()
    assert lines[0].startswith("step,time")
    assert [line.split(",")[0] for line in lines[1:]] == ["10"] * 3 + ["11"] * 3


def test_writer_of_ones_own_is_brought_back():
    class Rows:
        def __init__(self):
            self.steps = []

        def __call__(self, rows):
            self.steps += {row["step"] for row in rows}

        def state_dict(self):
            return {"steps": list(self.steps)}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    writers = []

    def make():
        writers.append(Rows())
        return NVE(argon(), dt=5.0, hooks=[LoggingHook("custom", writer_fn=writers[-1])])

    run_with_interruption(make, crystals(), 30, at=17, save_every=10)
    assert writers[1].steps == list(range(30))


# ---------------------------------------------------------------------- hooks with state
def test_drift_is_counted_from_where_it_was_and_warned_of_once():
    def make():
        return NVE(argon(), dt=40.0, hooks=[EnergyDriftMonitorHook(1e-7, metric="absolute")])

    with pytest.warns(UserWarning, match="drifts"):
        whole = make().run(crystals(), 20)
    with pytest.warns(UserWarning, match="drifts"):
        make().run(crystals(), 10, restart="run.ckpt")
    # All three have been warned of; a warning here would be an error.
    assert_same(whole, make().run(crystals(), 20, restart="run.ckpt"))


def test_clamped_forces_are_counted_through():
    def make():
        return NVE(argon(), dt=5.0, hooks=[MaxForceClampHook(0.05)])

    whole = make()
    whole.run(crystals(), 40)
    engine, _ = run_with_interruption(make, crystals(), 40, at=23, save_every=10)
    assert engine.hooks[0].num_clamped == whole.hooks[0].num_clamped > 0


def test_values_that_are_not_finite_are_warned_of_once():
    class NoEnergy(LennardJonesModelWrapper):
        def forward(self, data):
            outputs = super().forward(data)
            outputs["energy"][0] = torch.nan
            return outputs

    def make():
        model = NoEnergy(epsilon=0.0104, sigma=3.40, cutoff=8.5)
        return NVE(model, dt=5.0, hooks=[NaNDetectorHook(action="warn")])

    with pytest.warns(UserWarning, match="energy is not finite in graphs \\[0\\]"):
        make().run(crystals(), 5, restart="run.ckpt")
    # A second warning would be an error.
    make().run(crystals(), 10, restart="run.ckpt")


def test_times_are_summed_up_over_the_restart():
    def make():
        return NVE(argon(), dt=5.0, hooks=[StageTimingHook("step")])

    make().run(crystals(), 10, restart="run.ckpt")
    first = read_state(Path("run.ckpt"))["engine"]["hooks"][0][1]["statistics"]["step"]
    engine = make()
    engine.run(crystals(), 30, restart="run.ckpt")
    row = engine.hooks[0].summary()["step"]
    # The first step of each process is its warm-up and does not count.
    assert row["n"] == 9 + 19
    assert row["total"] > first["total"] > 0
    assert row["min"] <= first["min"]
    assert row["mean"] == pytest.approx(row["total"] / row["n"])


def test_hook_of_ones_own_is_saved_and_shown_the_batch():
    class Mean:
        """Mean energy of each structure."""

        frequency, stage = 1, DynamicsStage.AFTER_STEP

        def __init__(self):
            self.sum, self.resumed_with = torch.zeros(3, dtype=torch.float64), None

        def __call__(self, ctx, stage):
            self.sum += ctx.batch.energy[:, 0]

        def state_dict(self):
            return {"sum": self.sum}

        def load_state_dict(self, state):
            self.sum = state["sum"].clone()

        def on_resume(self, ctx):
            self.resumed_with = ctx.batch

    def make():
        return NVE(argon(), dt=5.0, hooks=[Mean()])

    whole = make()
    whole.run(crystals(), 40)
    engine, batch = run_with_interruption(make, crystals(), 40, at=23, save_every=10)
    assert torch.equal(engine.hooks[0].sum, whole.hooks[0].sum)
    assert engine.hooks[0].resumed_with is batch


def test_admission_hooks_are_not_called_again():
    class Admissions:
        frequency, stage = 1, DynamicsStage.ON_ADMISSION

        def __init__(self):
            self.count = 0

        def __call__(self, ctx, stage):
            self.count += 1

    engine, _ = run_with_interruption(
        lambda: NVE(argon(), dt=5.0, hooks=[Admissions()]), crystals(), 20, at=13, save_every=5
    )
    assert engine.hooks[0].count == 0


def test_parts_of_an_engine_are_saved_by_name():
    """The seam for samplers and sinks."""

    class Position:
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    class Fed(NVE):
        def __init__(self):
            super().__init__(argon(), dt=5.0)
            self.feeder = Position()

        @property
        def restart_parts(self):
            return {"sampler": self.feeder}

        def post_update(self, batch):
            super().post_update(batch)
            self.feeder.value += 1

    engine, _ = run_with_interruption(Fed, crystals(), 20, at=13, save_every=5)
    assert engine.feeder.value == 20


@pytest.mark.parametrize("interrupted_at", [0, 40, 110])
def test_run_fed_by_a_sampler_goes_on_with_the_structures_that_were_under_way(interrupted_at):
    """Every structure comes out once, in the same order, and as it does without the interruption."""
    structures = [one for seed in range(4) for one in crystals(temperature=20.0 + seed).to_data_list()]

    def make():
        return FIRE(
            argon(),
            hooks=[LoggingHook(log_path="log.csv", frequency=5)],
            convergence_hook=ConvergenceHook.from_fmax(1e-4),
            sampler=SizeAwareSampler(structures, max_batch_size=4),
            sinks=HostMemory(),
        )

    whole = make()
    whole.run()
    log = Path("log.csv").read_text()
    Path("log.csv").unlink()
    stopped = make()
    stopped.register_hook(Interrupt(interrupted_at))
    with pytest.raises(KeyboardInterrupt):
        stopped.run(restart="run.ckpt", save_every=10)
    resumed = make()
    resumed.run(restart="run.ckpt", save_every=10)
    assert whole.step_count > 110
    assert sorted(resumed.sinks[0].read().system_id[:, 0].tolist()) == list(range(12))
    assert_same(whole.sinks[0].read(), resumed.sinks[0].read())
    assert Path("log.csv").read_text() == log


def test_bias_that_grows_is_restored():
    class Hills:
        """A push of each structure away from where it has been, as in metadynamics."""

        def __init__(self):
            self.centres = []

        def __call__(self, batch):
            first = batch.positions[batch.batch_ptr[:-1]]
            forces = torch.zeros_like(batch.forces)
            for centre in self.centres:
                away = first - centre
                forces[batch.batch_ptr[:-1]] += 0.01 * away * (-away.square().sum(1, keepdim=True)).exp()
            if int(batch.system_step[0]) % 5 == 0:
                self.centres.append(first.clone())
            return torch.zeros_like(batch.energy), forces

        def state_dict(self):
            return {"centres": list(self.centres)}

        def load_state_dict(self, state):
            self.centres = list(state["centres"])

    def make():
        return NVE(argon(), dt=5.0, hooks=[BiasedPotentialHook(Hills())])

    whole = crystals()
    make().run(whole, 40)
    _, resumed = run_with_interruption(make, crystals(), 40, at=27, save_every=10)
    assert_same(whole, resumed)


def test_structure_that_was_given_up_stays_so_and_the_reason_is_kept():
    start = crystals()
    start.positions[5] = start.positions[4]  # two atoms of the second crystal at one place

    def make():
        return NVE(argon(), dt=5.0, hooks=[NaNDetectorHook(action="quarantine")])

    whole = start.clone()
    reference = make()
    reference.run(whole, 30)
    engine, resumed = run_with_interruption(make, start, 30, at=17, save_every=10)
    for name in ("positions", "velocities", "energy", "forces", "status", "system_step"):
        assert torch.equal(whole[name].nan_to_num(), resumed[name].nan_to_num()), name
    assert resumed.status[:, 0].tolist() == [0, -1, 0]
    assert engine.failures == reference.failures
    assert resumed.info == whole.info


@pytest.mark.parametrize("interrupted_at", [53, 93, 131])
def test_fused_stages_go_on_with_each_structure_in_its_stage(interrupted_at):
    """Interrupted when all relax, when some do, and when some are done with the second stage."""

    def make():
        model = argon()
        log, count = LoggingHook(log_path="relax.csv"), MaxForceClampHook(0.05)
        relax = FIRE(model, convergence_hook=ConvergenceHook.from_fmax(1e-4), hooks=[log])
        heat = NVTLangevin(model, dt=5.0, temperature=60.0, friction=0.01, n_steps=60, hooks=[count])
        return relax + heat

    whole = crystals()
    reference = make()
    reference.run(whole, 200)
    log = Path("relax.csv").read_text()
    Path("relax.csv").unlink()
    engine, resumed = run_with_interruption(make, crystals(), 200, at=interrupted_at, save_every=10)
    assert_same(whole, resumed)
    assert engine.step_count == reference.step_count > 131
    assert Path("relax.csv").read_text() == log
