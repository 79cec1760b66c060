import csv
import json
import math
from pathlib import Path

import pytest
import torch
from ase.build import bulk

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch, InMemoryDataset
from nvalchemi.dynamics import NVE, DynamicsStage, NVTLangevin, SizeAwareSampler, initialize_velocities
from nvalchemi.dynamics.hooks import LoggingHook
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.hooks import DynamicsContext
from nvalchemi.models.lj import LennardJonesModelWrapper


def argon_batch() -> Batch:
    """A crystal, a larger crystal and a dimer without a cell."""
    crystals = [bulk("Ar", "fcc", a=5.3, cubic=True), bulk("Ar", "fcc", a=5.4, cubic=True).repeat((2, 1, 1))]
    data = [AtomicData.from_atoms(atoms, dtype=torch.float64) for atoms in crystals]
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 4.0]], dtype=torch.float64)
    data.append(AtomicData(positions=positions, atomic_numbers=torch.tensor([18, 18])))
    batch = Batch.from_data_list(data)
    initialize_velocities(batch, 50.0, random_seed=1)
    return batch


def nve(*hooks) -> NVE:
    return NVE(LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5), dt=2.0, hooks=list(hooks))


def read_rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_row_of_every_structure_with_the_quantities_of_that_step():
    batch = argon_batch()
    nve(LoggingHook(log_path="log.csv")).run(batch, n_steps=3)
    rows = read_rows("log.csv")
    assert [(int(r["step"]), int(r["graph_idx"]), int(r["system_id"]), int(r["status"])) for r in rows] == [
        (step, k, k, 0) for step in range(3) for k in range(3)
    ]
    assert [float(r["time"]) for r in rows[::3]] == pytest.approx([2.0, 4.0, 6.0])
    for k, row in enumerate(rows[-3:]):
        data = batch[k]
        kinetic = 0.5 * (data.atomic_masses[:, None] * data.velocities**2).sum().item()
        assert float(row["energy"]) == data.energy.item()
        assert float(row["fmax"]) == pytest.approx(data.forces.norm(dim=1).max().item(), rel=1e-12)
        assert float(row["temperature"]) == pytest.approx(
            2 * kinetic / (3 * data.num_nodes - 3) / units.kB, rel=1e-9
        )
    volumes = [float(r["volume"]) for r in rows[-3:-1]]
    assert volumes == pytest.approx([5.3**3, 2 * 5.4**3])
    assert rows[-1]["volume"] == rows[-1]["pressure"] == ""


def test_temperature_of_langevin_dynamics_counts_the_centre_of_mass():
    batch = argon_batch()
    model = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    hook = LoggingHook(log_path="log.csv")
    NVTLangevin(model, dt=2.0, temperature=50.0, friction=0.01, hooks=[hook]).run(batch, n_steps=1)
    for data, row in zip(batch.to_data_list(), read_rows("log.csv"), strict=True):
        kinetic = 0.5 * (data.atomic_masses[:, None] * data.velocities**2).sum().item()
        assert float(row["temperature"]) == pytest.approx(
            2 * kinetic / (3 * data.num_nodes) / units.kB, rel=1e-9
        )


class OwnEngine:
    """An engine of one's own that says nothing of its quantities."""


class OwnEngineWithQuantities:
    conserves_momentum = False

    def elapsed_time(self, batch):
        return torch.full((batch.num_graphs,), 12.5)

    def max_force(self, batch):
        return torch.full((batch.num_graphs,), 0.25)


@pytest.mark.parametrize(
    ("engine", "time", "fmax", "lost"),
    [(OwnEngine(), "", "0.0", 3), (OwnEngineWithQuantities(), "12.5", "0.25", 0)],
    ids=["without quantities", "with quantities"],
)
def test_engine_of_ones_own(engine, time, fmax, lost):
    batch = argon_batch()
    batch.energy, batch.forces = torch.zeros(3, 1).double(), torch.zeros(14, 3).double()
    batch.system_id = torch.arange(3)[:, None]
    batch.status = torch.zeros(3, 1, dtype=torch.int64)
    hook = LoggingHook(log_path="log.csv")
    hook(DynamicsContext(batch=batch, workflow=engine), DynamicsStage.AFTER_STEP)
    hook.close()
    row = read_rows("log.csv")[0]
    assert (row["time"], row["fmax"]) == (time, fmax)
    # initialize_velocities has set 50 K for 3N − 3 degrees of freedom; the crystal has 4 atoms.
    assert float(row["temperature"]) == pytest.approx(50.0 * 9 / (12 - lost))


def test_pressure_is_the_virial_part_plus_the_kinetic_part():
    batch = argon_batch()[:2]
    nve(LoggingHook(log_path="log.csv")).run(batch, n_steps=2)
    for k, row in enumerate(read_rows("log.csv")[-2:]):
        data = batch[k]
        box = torch.linalg.det(data.cell[0]).item()
        kinetic = 0.5 * (data.atomic_masses[:, None] * data.velocities**2).sum().item()
        expected = -data.stress[0].trace().item() / 3 + 2 * kinetic / (3 * box)
        assert float(row["pressure"]) == pytest.approx(expected, rel=1e-9)


def test_two_active_structures_and_one_that_is_done_give_two_rows():
    batch = argon_batch()
    batch.status = torch.tensor([[0], [1], [0]])
    nve(LoggingHook(log_path="log.csv")).run(batch, n_steps=1)
    assert [row["graph_idx"] for row in read_rows("log.csv")] == ["0", "2"]


def test_frequency_chooses_the_steps():
    nve(LoggingHook(log_path="log.csv", frequency=3)).run(argon_batch(), n_steps=10)
    assert [row["step"] for row in read_rows("log.csv")[::3]] == ["0", "3", "6", "9"]


def test_custom_scalars_are_columns():
    scalars = {
        "atoms": lambda ctx: ctx.batch.num_nodes_per_graph,
        "column": lambda ctx: ctx.batch.energy,
        "same": lambda ctx: 7.5,
    }
    batch = argon_batch()
    nve(LoggingHook(log_path="log.csv", custom_scalars=scalars)).run(batch, n_steps=1)
    rows = read_rows("log.csv")
    assert [row["atoms"] for row in rows] == ["4", "8", "2"]
    assert [row["column"] for row in rows] == [row["energy"] for row in rows]
    assert {row["same"] for row in rows} == {"7.5"}


def test_custom_scalar_of_wrong_shape_is_refused_by_name():
    hook = LoggingHook(log_path="log.csv", custom_scalars={"wrong": lambda ctx: ctx.batch.positions})
    with pytest.raises(ValueError, match=r"'wrong'.*\[3\].*\[14, 3\]"):
        nve(hook).run(argon_batch(), n_steps=1)


def test_custom_scalar_cannot_replace_a_column():
    hook = LoggingHook(log_path="log.csv", custom_scalars={"energy": lambda ctx: 0.0})
    with pytest.raises(ValueError, match="'energy'"):
        nve(hook).run(argon_batch(), n_steps=1)


@pytest.mark.parametrize("backend", ["csv", "jsonl"])
def test_further_run_appends_without_repeating_the_header(backend):
    batch, path = argon_batch(), f"log.{backend}"
    engine = nve(LoggingHook(backend, log_path=path))
    engine.run(batch, n_steps=2)
    engine.run(batch, n_steps=2)
    rows = (
        read_rows(path)
        if backend == "csv"
        else [json.loads(line) for line in Path(path).read_text().splitlines()]
    )
    assert [int(row["step"]) for row in rows[::3]] == [0, 1, 2, 3]


def test_restart_drops_the_rows_of_steps_that_are_done_again(tmp_path):
    batch = argon_batch()
    hook = LoggingHook(log_path="log.csv")
    engine = nve(hook)
    engine.run(batch, n_steps=2)
    state = hook.state_dict()
    engine.run(batch, n_steps=2)
    with open("log.csv", "a") as file:
        file.write("4,10.0,0,0,0,-0.3")  # what a kill may leave of a row

    resumed = LoggingHook(log_path="log.csv")
    resumed.load_state_dict(state)
    again = nve(resumed)
    again.step_count = 2
    again.run(argon_batch(), n_steps=3)
    assert [int(row["step"]) for row in read_rows("log.csv")[::3]] == [0, 1, 2, 3, 4]


def test_append_false_replaces_an_older_file_once(tmp_path):
    (tmp_path / "log.csv").write_text("something else\n1\n")
    batch = argon_batch()
    engine = nve(LoggingHook(log_path="log.csv", append=False))
    engine.run(batch, n_steps=1)
    engine.run(batch, n_steps=1)
    assert [int(row["step"]) for row in read_rows("log.csv")[::3]] == [0, 1]


def test_log_with_other_columns_is_not_mixed_up(tmp_path):
    (tmp_path / "log.csv").write_text("step,mine\n0,1\n")
    with pytest.raises(ValueError, match="step,mine"):
        nve(LoggingHook(log_path="log.csv")).run(argon_batch(), n_steps=1)
    assert (tmp_path / "log.csv").read_text() == "step,mine\n0,1\n"


def test_csv_of_molecules_before_crystals_from_a_sampler_keeps_its_columns():
    crystal = argon_batch()[0]
    positions = 4.0 * torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([0.0, 0.0, 1.0])
    molecule = AtomicData(positions=positions, atomic_numbers=torch.full((5,), 18))
    engine = NVE(
        LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5),
        dt=2.0,
        n_steps=2,
        sampler=SizeAwareSampler(InMemoryDataset([molecule, crystal]), max_batch_size=1),
        sinks=[HostMemory()],
        hooks=[LoggingHook(log_path="log.csv")],
    )
    engine.run()
    rows = read_rows("log.csv")
    assert [row["system_id"] for row in rows] == ["0", "0", "1", "1"]
    assert [row["volume"] for row in rows[:2]] == ["", ""]
    assert [float(row["volume"]) for row in rows[2:]] == pytest.approx([5.3**3] * 2)


def test_column_that_appears_in_mid_run_is_refused_in_csv_by_name():
    batch = argon_batch()
    molecule = batch[2:]
    molecule.remove_key("cell")
    nve().run(batch, n_steps=1)
    nve().run(molecule, n_steps=1)
    hook = LoggingHook(log_path="log.csv")
    hook(DynamicsContext(batch=molecule), DynamicsStage.AFTER_STEP)
    hook(DynamicsContext(batch=batch), DynamicsStage.AFTER_STEP)
    with pytest.raises(ValueError, match=r"no columns for \['pressure', 'volume'\]"):
        hook.close()


def test_jsonl_is_valid_json_with_null_for_what_a_molecule_does_not_have():
    nve(LoggingHook("jsonl", log_path="log.jsonl")).run(argon_batch(), n_steps=1)
    rows = [
        json.loads(line, parse_constant=pytest.fail) for line in Path("log.jsonl").read_text().splitlines()
    ]
    assert rows[2]["volume"] is None
    assert rows[0]["volume"] == pytest.approx(5.3**3)


def test_rows_are_on_disk_while_the_run_goes_on():
    """What is logged at step k can be read back, from the file, a moment later and before the run ends."""
    seen = []

    class Reader:
        frequency, stage = 1, None

        def __init__(self, hook):
            self.stage, self.hook = hook.stage, hook

        def __call__(self, ctx, stage):
            if ctx.step_count == 1:
                self.hook.flush()
                seen.append(len(read_rows("log.csv")))

    hook = LoggingHook(log_path="log.csv")
    nve(hook, Reader(hook)).run(argon_batch(), n_steps=3)
    assert seen == [6]


def test_custom_backend_gets_rows_step_by_step():
    records = []
    nve(LoggingHook("custom", writer_fn=records.append)).run(argon_batch(), n_steps=2)
    assert [len(rows) for rows in records] == [3, 3]
    assert records[1][0]["step"] == 1
    assert records[0][2]["volume"] is None
    assert math.isfinite(records[0][2]["temperature"])


def test_error_of_a_custom_writer_ends_the_run():
    def refuse(rows):
        raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        nve(LoggingHook("custom", writer_fn=refuse)).run(argon_batch(), n_steps=200)


def test_error_in_the_run_still_leaves_the_rows_before_it():
    class Fail:
        frequency, stage = 1, None

        def __init__(self, stage):
            self.stage = stage

        def __call__(self, ctx, stage):
            if ctx.step_count == 2:
                raise RuntimeError("stop")

    hook = LoggingHook(log_path="log.csv")
    with pytest.raises(RuntimeError, match="stop"):
        nve(hook, Fail(hook.stage)).run(argon_batch(), n_steps=5)
    assert len(read_rows("log.csv")) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "xml"}, "unknown backend"),
        ({"backend": "custom"}, "writer_fn"),
        ({"backend": "csv", "writer_fn": print}, "writer_fn"),
    ],
)
def test_contradicting_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LoggingHook(**arguments)
