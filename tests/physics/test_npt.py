"""Barostats: what they conserve and sample, against the ideal gas and LAMMPS; arguments and their errors."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from torch import nn

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NPH, NPT, SizeAwareSampler, initialize_velocities
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.dynamics.thermo import pressure, temperature, volume
from nvalchemi.models.base import BaseModelMixin, ModelConfig
from nvalchemi.models.lj import LennardJonesModelWrapper

KBAR = 1000 * units.bar


def _model():
    # Smooth at the cutoff, so that no jump there hides the error of the integrator.
    return LennardJonesModelWrapper(0.0104, 3.40, 6.5, switch_width=1.5)


def _argon(repeat=(2, 2, 2), seed=0, a=5.35):
    atoms = bulk("Ar", "fcc", a, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=seed)
    return AtomicData.from_atoms(atoms, dtype=torch.float64)


def _batch(*structures, temperature=60.0):
    batch = Batch.from_data_list(list(structures))
    initialize_velocities(batch, temperature)
    return batch


ROWS = torch.tensor([[1.0, 1.3, 0.7], [0.5, 0.5, 0.8]]) * 0.5 * KBAR
TENSORS = torch.diag_embed(ROWS)
TENSORS[:, 0, 1] = TENSORS[:, 1, 0] = 0.1 * KBAR


@pytest.mark.parametrize("ensemble", ["NPT", "NPH"])
@pytest.mark.parametrize(
    ("coupling", "applied"), [("isotropic", 0.5 * KBAR), ("anisotropic", ROWS), ("triclinic", TENSORS)]
)
def test_conserved_quantity_is_flat(ensemble, coupling, applied):
    batch = _batch(_argon((2, 2, 1)), _argon((2, 1, 1), 1))
    engine = (
        NPT(_model(), 4.0, 60.0, applied, 500.0, 100.0, coupling)
        if ensemble == "NPT"
        else NPH(_model(), 4.0, applied, 500.0, coupling, mass_temperature=60.0)
    )
    engine.run(batch, 0)
    values, cells = [], []
    for _ in range(100):
        engine.run(batch, 5)
        values.append(engine.conserved_quantity(batch) / batch.num_nodes_per_graph)
        cells.append(batch.cell.clone())
    slope = np.polyfit(0.02 * np.arange(100), torch.stack(values).numpy(), 1)[0]
    # 2 ps, in which P V alone changes by 1e-3 eV per atom.
    assert (abs(slope) < 5e-6).all()
    assert float((torch.stack(values).amax(0) - torch.stack(values).amin(0)).max()) < 3e-5
    swing = torch.linalg.det(torch.stack(cells)).std(0) / batch.num_nodes_per_graph
    assert bool((0.5 * KBAR * swing > 5e-5).all())


def test_error_of_the_conserved_quantity_falls_as_the_square_of_the_time_step():
    def excursion(dt):
        batch = _batch(_argon((2, 2, 1)))
        engine = NPT(_model(), dt, 60.0, TENSORS[:1], 300.0, 100.0, "triclinic")
        engine.run(batch, 0)
        values = []
        for _ in range(int(600 / dt)):
            engine.run(batch, 1)
            values.append(engine.conserved_quantity(batch))
        return float(torch.stack(values).max() - torch.stack(values).min())

    assert excursion(10.0) / excursion(5.0) == pytest.approx(4.0, rel=0.2)


def test_path_can_be_walked_back():
    batch = _batch(_argon((2, 2, 1)))
    start = batch.positions.clone(), batch.cell.clone()
    engine = NPT(_model(), 4.0, 60.0, TENSORS[:1], 300.0, 100.0, "triclinic")
    engine.run(batch, 60)
    assert float((batch.cell - start[1]).abs().max()) > 0.01
    for field in (batch.velocities, batch.thermostat_velocities, batch.barostat_strain_rate):
        field.neg_()
    engine.run(batch, 60)
    torch.testing.assert_close(batch.positions, start[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(batch.cell, start[1], rtol=0, atol=1e-9)
    assert float(batch.barostat_work.abs()) < 1e-9


class IdealGas(nn.Module, BaseModelMixin):
    """Nothing acts on anything."""

    def __init__(self):
        super().__init__()
        self.model_config = ModelConfig(outputs={"energy", "forces", "stress"}, supports_pbc=True)

    def forward(self, data):
        """Zeros."""
        zero = data.positions.new_zeros
        n = data.num_graphs
        return {"energy": zero(n, 1), "forces": zero(data.num_nodes, 3), "stress": zero(n, 3, 3)}


def _gas(count, n=50, box=3.5):
    generator = torch.Generator().manual_seed(0)
    batch = Batch.from_data_list(
        [
            AtomicData(
                positions=box * torch.rand(n, 3, generator=generator, dtype=torch.float64),
                atomic_numbers=torch.full((n,), 18),
                atomic_masses=torch.full((n,), 39.95, dtype=torch.float64),
                cell=box * torch.eye(3, dtype=torch.float64).unsqueeze(0),
                pbc=torch.ones(1, 3, dtype=torch.bool),
            )
            for _ in range(count)
        ]
    )
    initialize_velocities(batch, 10.0, rescale=False)
    return batch


@pytest.mark.slow
def test_volume_of_the_ideal_gas():
    # N = 50, T = 10 K, P = 1e-3 eV/Å³. With the momentum held the volume has a gamma distribution of shape N:
    # ⟨V⟩ = N kT/P = 43.09 Å³ (not 42.23, which N − 1 would give) and variance N (kT/P)². The standard error of
    # the mean of 48 gases over 60 times the barostat's 200 fs is 0.08 Å³.
    batch = _gas(48)
    engine = NPT(IdealGas(), 6.0, 10.0, 1e-3, 200.0, 100.0)
    engine.run(batch, 300)
    samples = []
    for _ in range(80):
        engine.run(batch, 25)
        samples.append(volume(batch))
    volumes, expected = torch.stack(samples), 50 * units.kB * 10.0 / 1e-3
    error = float(volumes.mean(0).std()) / 48**0.5
    assert error < 0.15
    assert float(volumes.mean()) == pytest.approx(expected, abs=3.5 * error)
    assert expected == pytest.approx(43.09, abs=0.01)
    assert float(volumes.std()) == pytest.approx(expected / 50**0.5, rel=0.12)
    assert float((batch.atomic_masses.unsqueeze(-1) * batch.velocities).sum(0).abs().max()) < 1e-10


LAMMPS = """
units metal
atom_style atomic
read_data start.data
mass 1 39.95
pair_style lj/cut 6.5
pair_coeff 1 1 0.0104 3.40
velocity all create 60 7 mom yes rot no
timestep 0.005
fix 1 all npt temp 60 60 0.1 iso {bar} {bar} 0.5
run 2000
thermo 20
thermo_style custom step vol press
run 16000
"""


def _lammps_volume(directory, bar):
    """Mean volume of 108 argon atoms by ``fix npt``, and its standard error from 10 blocks of 8 ps, Å³."""
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(3)
    atoms.write(directory / "start.data", format="lammps-data")
    (directory / "in.lmp").write_text(LAMMPS.format(bar=bar))
    command = ["lmp", "-in", "in.lmp", "-log", "log.lammps", "-screen", "none"]
    subprocess.run(command, cwd=directory, check=True, timeout=120)
    lines = (directory / "log.lammps").read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.split()[:1] == ["Step"])
    rows = [line.split() for line in lines[last + 1 : last + 802]]
    blocks = np.array([float(row[1]) for row in rows])[1:].reshape(10, -1).mean(1)
    return blocks.mean(), blocks.std(ddof=1) / 10**0.5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lmp") is None, reason="needs LAMMPS on PATH")
def test_volume_and_pressure_of_solid_argon_are_those_of_lammps(tmp_path):
    # 108 atoms at 60 K, the plain truncated potential of both codes, six copies at each of two pressures.
    bars = (100.0, 2000.0)
    model = LennardJonesModelWrapper(0.0104, 3.40, 6.5)
    batch = _batch(
        *[_argon((3, 3, 3), seed, a=(5.52, 5.4)[seed % 2]) for seed in range(12)], temperature=90.0
    )
    applied = units.bar * torch.tensor(bars, dtype=torch.float64).repeat(6)
    engine = NPT(model, 5.0, 60.0, applied, 300.0, 100.0)
    engine.run(batch, 500)
    volumes, pressures = [], []
    for _ in range(100):
        engine.run(batch, 10)
        volumes.append(volume(batch))
        pressures.append(pressure(batch))
    volumes, pressures = torch.stack(volumes).mean(0), torch.stack(pressures).mean(0)
    means = []
    for i, bar in enumerate(bars):
        reference, reference_error = _lammps_volume(tmp_path, bar)
        ours = volumes[i::2]
        error = (reference_error**2 + float(ours.var()) / 6) ** 0.5
        assert error < 0.004 * reference
        assert float(ours.mean()) == pytest.approx(reference, abs=3 * error)
        means.append(reference)
        standard_error = float(pressures[i::2].std()) / 6**0.5
        assert float(pressures[i::2].mean()) == pytest.approx(bar * units.bar, abs=3.5 * standard_error)
    assert means[0] / means[1] > 1.05


@pytest.mark.parametrize("coupling", ["isotropic", "anisotropic", "triclinic"])
def test_coupling_says_what_of_the_cell_changes(coupling):
    atoms = bulk("Ar", "fcc", 5.35, cubic=True).repeat((2, 1, 1))
    atoms.set_cell(atoms.cell[:] + np.array([[0, 0.6, 0], [0, 0, 0], [0.4, 0, 0]]), scale_atoms=True)
    batch = _batch(AtomicData.from_atoms(atoms, dtype=torch.float64))
    before = batch.cell[0].clone()
    NPH(_model(), 4.0, 1.0 * KBAR, 300.0, coupling, mass_temperature=60.0).run(batch, 50)
    deformation = torch.linalg.inv(before) @ batch.cell[0]
    # A symmetric rate of strain turns nothing; deformations are not quite symmetric, rates are.
    rate = batch.barostat_strain_rate[0]
    assert torch.equal(rate, rate.T)
    off = deformation - torch.diag(deformation.diagonal())
    if coupling == "isotropic":
        torch.testing.assert_close(deformation, deformation[0, 0] * torch.eye(3, dtype=torch.float64))
    elif coupling == "anisotropic":
        assert float(off.abs().max()) < 1e-14
        assert float(deformation.diagonal().std()) > 1e-3
    else:
        assert float(off.abs().max()) > 1e-3
    assert float((torch.linalg.det(deformation) - 1).abs()) > 0.01


def test_momentum_stays_zero():
    batch = _batch(_argon((2, 2, 1)))
    NPT(_model(), 4.0, 60.0, 0.0, 300.0, 100.0, "triclinic").run(batch, 100)
    assert float((batch.atomic_masses.unsqueeze(-1) * batch.velocities).sum(0).abs().max()) < 1e-12


def test_path_and_state_are_the_same_alone_and_in_a_batch_with_own_parameters():
    structures = [_argon((2, 2, 1)), _argon((2, 1, 1), 1)]
    P, tau_b = TENSORS * torch.tensor([1.0, 3.0]).view(2, 1, 1), torch.tensor([300.0, 600.0])
    dt, T, tau = torch.tensor([2.0, 4.0]), torch.tensor([40.0, 80.0]), torch.tensor([50.0, 200.0])
    together = _batch(*structures)
    alone = [together[[i]] for i in range(2)]
    NPT(_model(), dt, T, P, tau_b, tau, "triclinic").run(together, 30)
    names = (
        "positions",
        "velocities",
        "cell",
        "barostat_strain_rate",
        "barostat_work",
        "thermostat_positions",
    )
    for i, batch in enumerate(alone):
        numbers = [float(x[i]) for x in (dt, T, tau_b, tau)]
        NPT(_model(), *numbers[:2], P[[i]], *numbers[2:], "triclinic").run(batch, 30)
        for name in names:
            torch.testing.assert_close(together[i][name], batch[0][name], rtol=0, atol=1e-10)


def test_finished_structure_with_its_barostat_stays_to_the_bit_and_does_not_disturb_the_other():
    batch = _batch(_argon((2, 2, 1)), _argon((2, 1, 1), 1))
    alone = batch[[1]]

    def make():
        return NPT(_model(), 4.0, 60.0, 1.0 * KBAR, 300.0, 100.0, "triclinic")

    engine = make()
    engine.run(batch, 5)
    batch.status[0] = -1
    batch.velocities[:16] = float("nan")
    batch.stress[0] = float("nan")
    before = {
        name: t[0].clone() for name, t in batch.items() if batch.level(name) == "system" and name != "stress"
    }
    positions = batch.positions[:16].clone()
    engine.run(batch, 20)
    assert all(torch.equal(batch[name][0], old) for name, old in before.items())
    assert torch.equal(batch.positions[:16], positions)
    make().run(alone, 25)
    torch.testing.assert_close(batch[1].positions, alone.positions, rtol=0, atol=1e-10)
    torch.testing.assert_close(batch.cell[1], alone.cell[0], rtol=0, atol=1e-10)


def test_two_runs_are_one_long_run():
    whole, parts = _batch(_argon((2, 1, 1))), _batch(_argon((2, 1, 1)))
    NPT(_model(), 4.0, 60.0, 0.0, 300.0, 100.0).run(whole, 20)
    engine = NPT(_model(), 4.0, 60.0, 0.0, 300.0, 100.0)
    engine.run(parts, 7)
    engine.run(parts, 13)
    assert torch.equal(whole.positions, parts.positions)
    assert torch.equal(whole.cell, parts.cell)


def test_saved_state_goes_on_to_the_bit():
    def make():
        return NPT(_model(), 4.0, lambda step: 60.0 + step, TENSORS[:1], 300.0, 100.0, "triclinic")

    whole, first, second = (_batch(_argon((2, 1, 1))) for _ in range(3))
    make().run(whole, 25)
    engine, other = make(), make()
    engine.run(first, 10)
    other.load_state_dict(engine.state_dict())
    other.run(second, 15)
    for name in (
        "positions",
        "velocities",
        "cell",
        "barostat_strain_rate",
        "barostat_work",
        "thermostat_velocities",
    ):
        assert torch.equal(whole[name], second[name])


def test_structures_in_flight_have_the_path_they_have_alone():
    batch = _batch(*[_argon((1 + i % 2, 1, 1), i) for i in range(5)])
    structures = batch.to_data_list()

    def make(**options):
        return NPT(_model(), 4.0, 60.0, 0.5 * KBAR, 300.0, 100.0, n_steps=15, **options)

    sink = HostMemory()
    make(sampler=SizeAwareSampler(structures, max_batch_size=2), sinks=sink).run()
    out = sink.drain()
    assert sorted(out.system_id[:, 0].tolist()) == [0, 1, 2, 3, 4]
    for data in out:
        alone = Batch.from_data_list([structures[int(data.system_id)]])
        make().run(alone)
        torch.testing.assert_close(data.positions, alone.positions, rtol=0, atol=1e-10)
        torch.testing.assert_close(data.cell, alone.cell, rtol=0, atol=1e-10)


def test_fixed_atoms_keep_their_scaled_positions_and_the_enthalpy_is_conserved_with_them():
    def scaled(batch):
        return (batch.positions @ torch.linalg.inv(batch.cell[0]))[:4]

    batch = _batch(_argon((2, 2, 1)))
    batch.atom_categories = (torch.arange(16) < 4).long()
    initialize_velocities(batch, 60.0)
    before = scaled(batch)
    engine = NPH(_model(), 4.0, 1.0 * KBAR, 300.0, "anisotropic", mass_temperature=60.0)
    engine.run(batch, 0)
    values = []
    for _ in range(100):
        engine.run(batch, 2)
        values.append(float(engine.conserved_quantity(batch)) / 16)
    torch.testing.assert_close(scaled(batch), before, rtol=0, atol=1e-13)
    assert not bool(batch.velocities[:4].any())
    assert max(values) - min(values) < 3e-5


def test_chain_of_length_one_runs():
    batch = _batch(_argon((2, 1, 1)))
    NPT(_model(), 4.0, 60.0, 0.0, 300.0, 100.0, chain_length=1).run(batch, 20)
    assert batch.thermostat_positions.shape == (1, 2, 1)
    assert 20 < float(temperature(batch)) < 100


def test_pressure_and_temperature_may_be_schedules_of_the_steps_of_each_system():
    asked = []

    def squeeze(step):
        asked.append(step.tolist())
        return 0.01 * step * KBAR

    batch = _batch(_argon((2, 1, 1)), _argon((1, 1, 1), 1))
    NPT(_model(), 4.0, lambda step: 60.0 + step, squeeze, 300.0, 100.0).run(batch, 10)
    batch.system_step[1] = 50
    engine = NPT(_model(), 4.0, lambda step: 60.0 + step, squeeze, 300.0, 100.0)
    engine.run(batch, 5)
    assert asked[-1] == [14, 54]
    assert engine.temperature.per_graph(batch).tolist() == [75.0, 115.0]
    diagonal = engine.pressure.per_graph(batch).diagonal(dim1=-2, dim2=-1) / KBAR
    torch.testing.assert_close(diagonal, torch.tensor([[0.15] * 3, [0.55] * 3], dtype=torch.float64))


@pytest.mark.parametrize(
    ("coupling", "shape", "message"),
    [
        ("isotropic", (2, 3), r"isotropic coupling must be a number or of shape \[B\]; got shape \[2, 3\]"),
        ("isotropic", (2, 3, 3), r"must be a number or of shape \[B\]"),
        ("anisotropic", (3,), r"shape \[3\] could be one tensor or one row for each of 3 graphs"),
        ("anisotropic", (3, 3), r"shape \[3, 3\] could be"),
        ("triclinic", (3, 3), r"shape \[3, 3\] could be"),
        (
            "triclinic",
            (2, 6),
            r"must be a number or of shape \[B\], \[B, 3\], \[B, 3, 3\]; got shape \[2, 6\]",
        ),
    ],
)
def test_pressure_of_a_wrong_or_ambiguous_shape_is_refused(coupling, shape, message):
    with pytest.raises(ValueError, match=message):
        NPH(_model(), 4.0, torch.zeros(shape), 300.0, coupling)


@pytest.mark.parametrize(
    ("coupling", "value"),
    [
        ("isotropic", torch.tensor([1.0, 2.0, 3.0])),
        ("anisotropic", torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0], [4.0, 4.0, 4.0]])),
        ("triclinic", torch.diag_embed(torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3]))),
    ],
)
def test_pressure_of_each_documented_shape_is_understood(coupling, value):
    batch = _batch(*[_argon((1, 1, 1))] * len(value))
    tensors = NPH(_model(), 4.0, value, 300.0, coupling).pressure.per_graph(batch)
    numbers = torch.arange(1, len(value) + 1, dtype=torch.float64).view(-1, 1, 1)
    assert torch.equal(tensors, numbers * torch.eye(3, dtype=torch.float64))


def test_bad_arguments_are_errors_at_construction():
    def make(dt=2.0, T=60.0, P=0.0, tau_b=300.0, tau=100.0, coupling="isotropic"):
        return NPT(_model(), dt, T, P, tau_b, tau, coupling)

    for bad in (-1.0, 0.0, float("inf"), float("nan")):
        for name, argument in (
            ("dt", "dt"),
            ("temperature", "T"),
            ("barostat_time", "tau_b"),
            ("thermostat_time", "tau"),
        ):
            with pytest.raises(ValueError, match=f"^{name} must be finite and > 0"):
                make(**{argument: bad})
        with pytest.raises(ValueError, match="mass_temperature must be finite and > 0"):
            NPH(_model(), 2.0, 0.0, 300.0, mass_temperature=bad)
    with pytest.raises(ValueError, match="pressure must be finite"):
        make(P=float("nan"))
    with pytest.raises(ValueError, match="pressure tensors must be symmetric"):
        make(P=torch.tensor([[[0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]]), coupling="triclinic")
    with pytest.raises(ValueError, match="must be diagonal with anisotropic coupling"):
        make(P=TENSORS, coupling="anisotropic")
    with pytest.raises(ValueError, match="pressure has 2 rows for a batch of 1 graphs"):
        make(P=ROWS, coupling="anisotropic").run(_batch(_argon((1, 1, 1))), 1)


def test_molecule_with_a_barostat_is_refused_by_name():
    molecule = AtomicData.from_atoms(Atoms("Ar2", [[0, 0, 0], [0, 0, 3.8]]), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"a barostat needs cells periodic in three directions; graph 1 \(system_id 1\)"
    ):
        NPT(_model(), 2.0, 60.0, 0.0, 300.0, 100.0).run(Batch.from_data_list([_argon(), molecule]), 1)
    with pytest.raises(ValueError, match="a barostat needs structures with a cell; graph 0"):
        NPH(_model(), 2.0, 0.0, 300.0).run(Batch.from_data_list([molecule]), 1)


def test_float32_state_stays_float32():
    double = _batch(_argon((2, 2, 1)))
    single = double.to(dtype=torch.float32)
    for batch in (double, single):
        NPT(_model(), 2.0, 60.0, 1.0 * KBAR, 300.0, 100.0, "triclinic").run(batch, 20)
    assert {t.dtype for _, t in single.items() if t.is_floating_point()} == {torch.float32}
    torch.testing.assert_close(single.positions.double(), double.positions, rtol=0, atol=1e-4)
    torch.testing.assert_close(single.cell.double(), double.cell, rtol=0, atol=1e-4)
