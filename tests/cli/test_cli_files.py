import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator

from nvalchemi.cli import main
from nvalchemi.data import AtomicData, Batch, DataLoader, InMemoryDataset, write
from nvalchemi.dynamics import NVE, DynamicsStage
from nvalchemi.dynamics.hooks import SnapshotHook
from nvalchemi.dynamics.sinks import ZarrData
from nvalchemi.models.lj import LennardJonesModelWrapper
from nvalchemi.models.painn import PaiNN
from nvalchemi.training import CheckpointHook, EnergyMAELoss, OptimizerConfig, TrainingStrategy


@pytest.fixture
def labelled():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    atoms.info["name"] = "salt"
    forces = np.zeros((8, 3))
    forces[3] = (0.3, 0.0, 0.4)
    atoms.calc = SinglePointCalculator(atoms, energy=-27.2, forces=forces, stress=[0.01, 0.01, 0.01, 0, 0, 0])
    return atoms


def test_info_says_what_is_in_a_file(command, labelled):
    ase.io.write("in.extxyz", [labelled, labelled, molecule("H2O")])
    result = command("info", "in.extxyz")
    assert result.code == 0
    text = " ".join(result.out.split())
    for words in (
        "frames 3",
        "Cl4Na4 ×2, H2O ×1",
        "H 2, O 1, Na 8, Cl 8",
        "TTT ×2, FFF ×1",
        "energy per atom, eV -3.4",
        "largest force, eV/Å 0.5",
        "pressure −tr σ/3, eV/Å³ -0.01",
        "forces node [n, 3] in 2 of 3 frames",
        "name info in 2 of 3 frames",
    ):
        assert words in text


def test_info_lists_arrays_that_are_no_field(command, labelled):
    labelled.set_array("site_kind", np.array(["a", "b"] * 4))
    ase.io.write("in.extxyz", [labelled, molecule("H2O")])
    result = command("info", "in.extxyz")
    assert result.code == 0
    text = " ".join(result.out.split())
    assert "site_kind node [n] in 1 of 2 frames" in text
    assert "arrays info" not in text


def test_info_on_a_broken_file_names_the_frame(command, labelled, tmp_path):
    ase.io.write("in.extxyz", [labelled, labelled])
    path = tmp_path / "in.extxyz"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]))
    result = command("info", "in.extxyz")
    assert result.code == 2
    assert "frame 1" in result.err
    assert len(result.err.splitlines()) == 1


def test_convert_keeps_frames_labels_and_info(command, labelled):
    second = labelled.copy()
    second.calc = labelled.calc
    ase.io.write("in.extxyz", [labelled, second])
    assert command("convert", "in.extxyz", "out.traj").code == 0
    frames = ase.io.read("out.traj", ":")
    assert len(frames) == 2
    assert frames[0].info["name"] == "salt"
    assert frames[0].get_potential_energy() == pytest.approx(-27.2)
    assert np.array_equal(frames[0].get_forces(), labelled.get_forces())
    assert np.array_equal(frames[0].positions, labelled.positions)


def test_convert_takes_an_index(command, labelled):
    frames = [labelled, labelled.repeat((2, 1, 1)), labelled.repeat((3, 1, 1))]
    ase.io.write("in.traj", frames)
    assert command("convert", "in.traj", "last.cif", "--index", "-1").code == 0
    assert len(ase.io.read("last.cif")) == 24


def test_convert_names_an_index_that_chooses_nothing(command, labelled):
    ase.io.write("in.extxyz", labelled)
    result = command("convert", "in.extxyz", "out.extxyz", "--index", "5:")
    assert result.code == 2
    assert "in.extxyz: --index 5: chooses no frame" in result.err


def test_convert_to_a_single_frame_format_refuses_several(command, labelled, tmp_path):
    ase.io.write("in.traj", [labelled, labelled])
    result = command("convert", "in.traj", "POSCAR")
    assert result.code == 2
    assert not (tmp_path / "POSCAR").exists()


def test_convert_leaves_the_old_file_when_the_input_is_broken(command, labelled, tmp_path):
    ase.io.write("in.extxyz", [labelled, labelled])
    path = tmp_path / "in.extxyz"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]))
    (tmp_path / "out.extxyz").write_text("mine")
    result = command("convert", "in.extxyz", "out.extxyz", "--overwrite")
    assert result.code == 2
    assert "frame 1" in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.extxyz", "out.extxyz"]
    assert (tmp_path / "out.extxyz").read_text() == "mine"


def test_convert_can_skip_broken_frames(command, labelled, tmp_path):
    ase.io.write("in.extxyz", [labelled, labelled])
    path = tmp_path / "in.extxyz"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]))
    with pytest.warns(UserWarning, match="skipped 1 frame"):
        result = command("convert", "in.extxyz", "out.extxyz", "--skip-broken")
    assert result.code == 0
    assert len(ase.io.read("out.extxyz", ":")) == 1


def test_models_lists_what_can_be_used(command):
    result = command("models")
    assert result.code == 0
    rows = {line.split()[0]: line.split()[1] for line in result.out.splitlines() if line.split()}
    assert rows["lj-argon"] == "yes"
    assert rows["7net-0"] == "yes"
    assert "cpu:" in result.out


def test_models_names_the_extra_of_a_missing_package(command, monkeypatch):
    from nvalchemi.models import catalog

    monkeypatch.setattr(catalog, "is_installed", lambda package: False)
    (row,) = [line for line in command("models").out.splitlines() if line.startswith("chgnet ")]
    assert row.split()[1] == "no"
    assert "nvalchemi[chgnet]" in row


def test_help_says_in_whole_sentences_what_the_commands_do(command):
    result = command("--help")
    assert result.code == 0
    assert "List the potentials." in result.out
    assert "..." not in result.out.partition("Commands:")[2]


def test_version_is_printed(command):
    import nvalchemi

    assert command("--version").out.strip() == nvalchemi.__version__


def test_missing_typer_is_named_with_its_extra(command, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "nvalchemi.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"nvalchemi\[cli\]"):
        main(["models"])


def test_check_says_whether_a_file_is_fit_to_train_on(command, labelled):
    other = labelled.copy()
    other.rattle(0.05, seed=1)
    stress = [0.01, 0.01, 0.01, 0, 0, 0]
    other.calc = SinglePointCalculator(other, energy=-27.1, forces=np.full((8, 3), 0.1), stress=stress)
    ase.io.write("good.extxyz", [labelled, other])
    result = command("check", "good.extxyz")
    assert (result.code, result.out.splitlines()[-1]) == (0, "fit to train on")
    other.calc.results["forces"][2, 0] = np.nan
    ase.io.write("bad.extxyz", [labelled, other])
    result = command("check", "bad.extxyz")
    assert result.code == 1
    assert "not fit to train on" in result.out
    assert command("check", "absent.extxyz").code == 2


# ---------------------------------------------------------------------- stores, checkpoints, states of runs
def argon_trajectory():
    """Two systems in turns, three frames of 0 and two of 1, and a restart file."""
    crystals = [AtomicData.from_atoms(bulk("Ar", a=a, cubic=True), dtype=torch.float64) for a in (5.3, 5.4)]
    batch = Batch.from_data_list(crystals)
    model = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)

    class StopSecond:
        frequency, stage = 1, DynamicsStage.AFTER_STEP

        def __call__(self, ctx, stage):
            ctx.batch.status.masked_fill_((ctx.batch.system_id == 1) & (ctx.batch.system_step == 2), 1)

    NVE(model, 1.0, hooks=[StopSecond(), SnapshotHook(ZarrData("path.zarr"))]).run(
        batch, 3, restart="run.state"
    )


def test_info_on_a_store_tells_how_it_is_stored(command):
    argon_trajectory()
    text = " ".join(command("info", "path.zarr").out.split())
    for words in (
        "frames 5",
        "atoms 20, per frame 4",
        "elements Ar 20",
        "trajectories 2 systems, frames of each 2 … 3",
        "labels energy in all, forces in all, stress in all",
        "positions node [n, 3] float64",
        "chunks of 10922 rows, zstd+crc32c",
    ):
        assert words in text


def test_info_on_a_store_counts_labels_that_some_lack(command):
    frames = [AtomicData(torch.zeros(1, 3), [18], energy=-1.0), AtomicData(torch.zeros(1, 3), [2])]
    write("set.zarr", frames)
    text = " ".join(command("info", "set.zarr").out.split())
    assert "labels energy in 1 of 2 frames, forces in none, stress in none" in text
    assert "elements He 1, Ar 1" in text


def test_info_on_a_store_reads_none_of_the_large_arrays(command, tmp_path):
    write("set.zarr", [AtomicData(torch.rand(2, 3), [18, 18], energy=-1.0, forces=torch.rand(2, 3))])
    for name in ("positions", "forces"):
        (tmp_path / f"set.zarr/node/{name}/c/0/0").write_bytes(b"damaged")
    assert command("info", "set.zarr").code == 0


def test_info_on_the_state_of_a_run(command):
    argon_trajectory()
    text = " ".join(command("info", "run.state").out.split())
    for words in (
        "state of NVE with LennardJonesModelWrapper, intact",
        "made 3 steps parameters",
        "dt 1.0",
        "status 0 ×1, 1 ×1",
        "velocities node [n, 3]",
    ):
        assert words in text


def test_info_on_a_damaged_state_is_an_error(command, tmp_path):
    argon_trajectory()
    content = bytearray((tmp_path / "run.state").read_bytes())
    content[-10] ^= 1
    (tmp_path / "run.state").write_bytes(content)
    result = command("info", "run.state")
    assert result.code == 2
    assert "damaged" in result.err


def test_info_on_checkpoints_names_the_newest_intact_one(command, tmp_path):
    data = [AtomicData(torch.rand(2, 3), [1, 1], energy=-1.0, forces=torch.zeros(2, 3)) for _ in range(4)]
    model = PaiNN(hidden_dim=8)
    strategy = TrainingStrategy(
        model,
        OptimizerConfig(torch.optim.AdamW, {"lr": 1e-3}),
        EnergyMAELoss(),
        num_epochs=3,
        hooks=[CheckpointHook("checkpoints")],
    )
    strategy.run(DataLoader(InMemoryDataset(data), batch_size=2))
    text = " ".join(command("info", "checkpoints").out.split())
    numbers = sum(t.numel() for t in model.state_dict().values())
    for words in (
        "newest epoch-3, intact",
        "trained 6 steps",
        f"main: PaiNN, {numbers} numbers",
        "AdamW, lr 0.001",
    ):
        assert words in text
    assert "checkpoint intact trained 2 steps" in " ".join(command("info", "checkpoints/epoch-1").out.split())
    weights = tmp_path / "checkpoints/epoch-1/model-main.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = command("info", "checkpoints/epoch-1")
    assert (result.code, "model-main.safetensors is not what was written" in result.err) == (2, True)


def test_info_on_a_model_file_says_which_model_it_is(command):
    model = PaiNN(hidden_dim=8, cutoff=4.5)
    model.export_model("own.safetensors")
    text = " ".join(command("info", "own.safetensors").out.split())
    assert f"model PaiNN, {sum(p.numel() for p in model.parameters())} parameters, float32" in text
    assert "cutoff 4.5 Å" in text
    from nvalchemi.models.chgnet import CHGNetWrapper

    CHGNetWrapper().export_model("other.pth")
    text = " ".join(command("info", "other.pth").out.split())
    assert "model CHGNet, 412525 parameters, float32 elements 94: H, He" in text


def test_info_on_any_other_directory_is_an_error(command, tmp_path):
    assert "neither a Zarr store nor one with checkpoints" in command("info", tmp_path).err


def test_convert_takes_one_trajectory_out_of_a_run_of_many(command):
    argon_trajectory()
    assert command("convert", "path.zarr", "all.extxyz").out == "all.extxyz: 5 structures\n"
    for source in ("path.zarr", "all.extxyz"):
        assert command("convert", source, "one.extxyz", "--system", 1, "--overwrite").code == 0
        frames = ase.io.read("one.extxyz", ":")
        assert [(f.info["system_id"], f.info["system_step"]) for f in frames] == [(1, 1), (1, 2)]
    result = command("convert", "path.zarr", "none.extxyz", "--system", 7)
    assert (result.code, "no frame of system_id 7" in result.err) == (2, True)
    result = command("convert", "all.extxyz", "none.extxyz", "--system", 7)
    assert (result.code, "--system 7 chooses no frame" in result.err) == (2, True)


def test_convert_says_which_suffixes_there_are(command, labelled):
    ase.io.write("in.extxyz", labelled)
    result = command("convert", "in.extxyz", "out.something")
    assert result.code == 2
    assert ".extxyz, .traj, .cif, .db or .zarr" in result.err
