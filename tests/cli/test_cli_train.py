"""From a file of labelled structures to a potential."""

import csv
import os
import re
import signal
from pathlib import Path

import ase.io
import pytest
import torch
import yaml
from safetensors.torch import load_file

from nvalchemi.models.ase import to_ase_calculator
from nvalchemi.models.catalog import load_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"

CONFIG = """\
data:
  train: frames.extxyz
  validation: 0.2
  test: 0.2
model:
  name: painn
  hidden_dim: 8
  num_layers: 1
loss: {energy: 9, forces: 1}
training:
  epochs: 4
  batch_size: 4
output:
  directory: run
"""


@pytest.fixture
def frames(tmp_path):
    """20 frames of ethanol."""
    path = tmp_path / "frames.extxyz"
    ase.io.write(path, ase.io.read(EXAMPLES / "ethanol_small.extxyz", ":20"))
    return path


@pytest.fixture
def config(frames, tmp_path):
    """A configuration that trains in a second."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def made_small(config: Path) -> None:
    """Cut the work of a configuration that `init` has written, and nothing else of it."""
    text = config.read_text()
    for key, value in {"epochs": 2, "hidden_dim": 8, "num_layers": 1}.items():
        text, count = re.subn(rf"^  {key}: .*$", f"  {key}: {value}", text, flags=re.MULTILINE)
        assert count == 1
    config.write_text(text)


def stop_at(monkeypatch, batch: int, number: signal.Signals) -> None:
    """Have a signal come during that batch."""
    from nvalchemi.cli.train_hooks import TrainingLog

    call = TrainingLog.__call__

    def calling(self, ctx, stage):
        if ctx.batch_count == batch and ctx.batch is not None:
            os.kill(os.getpid(), number)
        call(self, ctx, stage)

    monkeypatch.setattr(TrainingLog, "__call__", calling)


def log_rows(path: str) -> list[dict[str, str]]:
    """Rows of a training log without the times."""
    with open(path) as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def same_weights(a: str, b: str) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------------- two commands
def test_two_commands_lead_from_a_data_file_to_a_model_and_its_errors(command, frames):
    assert command("init", "train", frames).code == 0
    made_small(Path("config.yaml"))
    result = command("train", "config.yaml")
    assert result.code == 0, result.err
    assert re.search(r"forces +\d+\.\d\d +\d+\.\d\d +meV/Å", result.out)
    assert re.search(r"energy per atom +\d+\.\d\d +\d+\.\d\d +meV/atom", result.out)
    for kind in ("model", "checkpoints", "log"):
        (path,) = re.findall(rf"^{kind}: +(.*)$", result.out, re.MULTILINE)
        assert Path(path).exists()


def test_config_of_init_is_commented_and_builds_as_it_is(command, frames):
    assert command("init", "train", frames, "-o", "c.yaml").code == 0
    lines = Path("c.yaml").read_text().splitlines()
    assert sum(line.lstrip().startswith("#") for line in lines) > 20
    result = command("train", "c.yaml", "--show-hooks")
    assert result.code == 0, result.err
    assert re.search(r"AFTER_EPOCH +\d +CheckpointHook", result.out)
    assert not list(Path().glob("frames_painn*"))


def test_init_finds_labels_under_other_names_and_suggests_weights(command):
    frames = ase.io.read(EXAMPLES / "crystals_labelled.extxyz", ":12")
    for atoms in frames:
        results, atoms.calc = atoms.calc.results, None
        atoms.info |= {
            "REF_energy": results["energy"],
            "REF_stress": results["stress"],
            "formation_energy": 1.0,
        }
        atoms.set_array("REF_forces", results["forces"])
    ase.io.write("crystals.extxyz", frames)
    result = command("init", "train", "crystals.extxyz")
    assert result.code == 0, result.err
    assert "energy (as REF_energy), forces (as REF_forces), stress (as REF_stress)" in result.out
    written = yaml.safe_load(Path("config.yaml").read_text())
    assert written["data"]["energy_key"] == "REF_energy"
    assert all(written["loss"][label] > 0 for label in ("energy", "forces", "stress"))
    made_small(Path("config.yaml"))
    trained = command("train", "config.yaml")
    assert trained.code == 0, trained.err
    assert "GPa" in trained.out


def test_init_says_what_is_there_when_there_are_no_labels(command, frames):
    bare = ase.io.read(frames, ":")
    for atoms in bare:
        atoms.calc = None
        atoms.info["bandgap"] = 1.0
    ase.io.write("bare.extxyz", bare)
    result = command("init", "train", "bare.extxyz")
    assert result.code == 2
    assert "neither energies nor forces" in result.err
    assert "bandgap" in result.err


def test_paths_in_a_config_count_from_its_folder(command, frames):
    Path("sub").mkdir()
    assert command("init", "train", "frames.extxyz", "-o", "sub/c.yaml").code == 0
    assert yaml.safe_load(Path("sub/c.yaml").read_text())["data"]["train"] == "../frames.extxyz"
    assert command("train", "sub/c.yaml", "--show-hooks").code == 0


# ---------------------------------------------------------------------- what is left
def test_the_model_serves_in_relax_eval_and_ase(command, config, frames):
    assert command("train", config, "-q").code == 0
    for model in ("run", "run/model.safetensors", "run/checkpoints/epoch-4"):
        relaxed = command("relax", frames, "--model", model, "--steps", 2, "-o", "out.extxyz", "--overwrite")
        assert relaxed.code == 1  # not converged in two steps
        assert "not converged" in relaxed.err
    atoms = ase.io.read(frames, 0)
    reference = atoms.get_potential_energy()
    atoms.calc = to_ase_calculator(load_model("run/model.safetensors"))
    assert (
        abs(atoms.get_potential_energy() - reference) < 5.0
    )  # of −309 eV, which the reference energies give
    assert atoms.get_forces().shape == (9, 3)


def test_eval_of_a_training_takes_the_structures_it_left_aside(command, config):
    trained = command("train", config)
    evaluated = command("eval", "run")
    assert evaluated.code == 0, evaluated.err
    assert "4 structures of the test part" in evaluated.out
    errors = next(line for line in trained.out.splitlines() if re.match("test +forces", line))
    again = next(line for line in evaluated.out.splitlines() if line.startswith("forces"))
    assert errors.split()[1:] == again.split()


def test_the_best_model_is_kept(command, config):
    config.write_text(CONFIG.replace("epochs: 4", "epochs: 6\n  learning_rate: 0.3\n  schedule: constant"))
    assert command("train", config, "-q").code == 0
    losses = [float(row["validation_loss"]) for row in log_rows("run/log.csv")]
    from nvalchemi.cli.train_setup import TrainingSetup

    setup = TrainingSetup.read(config)
    fresh = setup.make_model(torch.device("cpu"))
    parts = setup.make_parts(fresh, setup.read_data(fresh), torch.device("cpu"))
    model = load_model("run/model.safetensors")
    _, validation = setup.loaders(parts)
    strategy = setup.make_strategy(model, validation, validation, torch.device("cpu"))
    assert min(losses) < losses[-1]
    assert strategy.validate()["loss"] == pytest.approx(min(losses), rel=1e-5)


def test_training_goes_on_from_a_model_file(command, config, frames):
    assert command("train", config, "-q").code == 0
    before = load_file("run/model.safetensors")
    tuned = yaml.safe_load(CONFIG)
    tuned["model"] = {"name": "run/model.safetensors", "freeze": ["embedding*"]}
    tuned["output"]["directory"] = "tuned"
    Path("tuned.yaml").write_text(yaml.safe_dump(tuned))
    assert command("train", "tuned.yaml", "-q").code == 0
    after = load_file("tuned/model.safetensors")
    assert torch.equal(after["embedding.weight"], before["embedding.weight"])
    assert not torch.equal(after["readout.0.weight"], before["readout.0.weight"])


def test_another_zero_of_energy_is_noticed_and_can_be_subtracted(command, config, frames):
    assert command("train", config, "-q").code == 0
    shifted = ase.io.read(frames, ":")
    for atoms in shifted:
        atoms.calc.results["energy"] += 9 * 20.0
    ase.io.write(frames, shifted)
    tuned = yaml.safe_load(CONFIG) | {
        "model": {"name": "run/model.safetensors"},
        "output": {"directory": "tuned"},
    }
    Path("tuned.yaml").write_text(yaml.safe_dump(tuned))
    refused = command("train", "tuned.yaml", "-q")
    assert refused.code == 2
    assert re.search(r"tuned.yaml:\d+: model.name: .* differ by \d+.\d+ eV per atom", refused.err)
    tuned["model"]["fit_offsets"] = True
    Path("tuned.yaml").write_text(yaml.safe_dump(tuned))
    result = command("train", "tuned.yaml")
    assert result.code == 0, result.err
    errors = re.findall(r"energy per atom +(\d+\.\d\d)", result.out.partition("size of labels")[2])
    assert len(errors) == 2  # validation, test
    assert max(map(float, errors)) < 1000  # meV/atom


# ---------------------------------------------------------------------- stopping and going on
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("batch", [5, 6])  # of 3 in an epoch: in its midst, and its last
def test_stopped_training_is_gone_on_with_to_the_bit(command, config, number, code, batch):
    assert command("train", config, "-q").code == 0
    other = Path("other.yaml")
    other.write_text(CONFIG.replace("directory: run", "directory: other"))
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, batch, number)
        stopped = command("train", other, "-q")
    assert stopped.code == code
    assert (
        f"interrupted after {batch} steps, all of which are saved in other/checkpoints/step-{batch}"
        in stopped.err
    )
    assert f"nvalchemi train {other} --resume" in stopped.err
    resumed = command("train", other, "-q", "--resume")
    assert resumed.code == 0, resumed.err
    assert same_weights("run/model.safetensors", "other/model.safetensors")
    assert same_weights(
        "run/checkpoints/epoch-4/model-main.safetensors", "other/checkpoints/epoch-4/model-main.safetensors"
    )
    assert log_rows("run/log.csv") == log_rows("other/log.csv")


def test_a_training_is_neither_replaced_nor_mixed_with_another(command, config):
    assert command("train", config, "-q").code == 0
    model = Path("run/model.safetensors").read_bytes()
    refused = command("train", config)
    assert refused.code == 2
    assert "config.yaml:14: output.directory: " in refused.err
    assert "run holds a training" in refused.err
    config.write_text(CONFIG.replace("batch_size: 4", "batch_size: 5"))
    refused = command("train", config, "--resume")
    assert refused.code == 2
    assert "config.yaml:12: training.batch_size: this training was begun with 4 and now says 5" in refused.err
    assert Path("run/model.safetensors").read_bytes() == model
    assert command("train", config, "-q", "--overwrite").code == 0


def test_resume_without_a_checkpoint_starts(command, config):
    assert command("train", config, "-q", "--resume").code == 0
    assert Path("run/model.safetensors").exists()


def test_report_is_written(command, config):
    assert command("train", config, "-q", "--report", "report.html").code == 0
    assert "Validation" in Path("report.html").read_text()


def test_label_that_is_not_finite_is_passed_over_and_missing_ones_are_named(command, config, frames):
    damaged = ase.io.read(frames, ":")
    damaged[3].calc.results.pop("forces")
    damaged[4].calc.results["energy"] = float("nan")
    ase.io.write(frames, damaged)
    assert command("train", config, "-q").code == 0
    config.write_text(CONFIG.replace("forces: 1", "forces: 1, stress: 1"))
    result = command("train", config, "-q", "--overwrite")
    assert result.code == 2
    assert "no structure has stress under the key 'stress'" in result.err


# ---------------------------------------------------------------------- mistakes in the configuration
MISTAKES = {
    "unknown key": ("batch_size: 4", "batchsize: 4", 12, "no such key, did you mean 'batch_size'?"),
    "unknown section": ("output:", "outptu:", 13, "outptu: no such key, did you mean 'output'?"),
    "word for a number": ("epochs: 4", "epochs: many", 11, "training.epochs: must be a valid integer"),
    "number out of range": ("batch_size: 4", "batch_size: 0", 12, "training.batch_size: must be greater than 0, got 0"),
    "word that is no choice": (
        "forces: 1}", "forces: 1, kind: maee}", 9, "loss.kind: 'maee' is none of mae, huber, mse, did you mean 'mae'?"
    ),
    "share": ("validation: 0.2", "validation: 1.2", 3, "data.validation: a share must lie between 0 and 1"),
    "shares": ("validation: 0.2", "validation: 0.9", 1, "data: validation and test take 1.1 of all structures"),
    "missing key": ("  train: frames.extxyz\n", "", 1, "data.train: is missing"),
    "missing model": ("name: painn\n  hidden_dim: 8\n  num_layers: 1", "name: x.pth", 6, "model.name: no such file: "),
    "missing file": ("frames.extxyz", "farmes.extxyz", 2, "data.train: no such file"),
    "unknown model": ("name: painn\n  hidden_dim: 8\n  num_layers: 1", "name: pain", 6, "model.name: unknown model"),
    "key of another model": ("name: painn", "name: 7net-0", 7, "model.hidden_dim: no such key"),
    "key twice": ("  batch_size: 4", "  batch_size: 4\n  epochs: 5", 13, "epochs is given twice, first in line 11"),
    "no weight": ("{energy: 9, forces: 1}", "{energy: 0, forces: 0}", 9, "loss: all weights are 0"),
    "no YAML": ("loss: {", "loss: }", 9, "not valid YAML"),
    "seed below 0": ("epochs: 4", "seed: -1", 11, "training.seed: must be greater than or equal to 0, got -1"),
    "seed too large": ("epochs: 4", f"seed: {'9' * 23}", 11, "training.seed: must be less than"),
    "truth value": ("epochs: 4", "epochs: true", 11, "training.epochs: true does not fit here"),
    "infinity": ("epochs: 4", "learning_rate: .inf", 11, "training.learning_rate: must be a finite number, got inf"),
    "tag": ("epochs: 4", "epochs: !!python/int 2", 11, "not valid YAML: could not determine a constructor"),
    "merge": ("epochs: 4", "<<: 5", 11, "not valid YAML: expected a mapping"),
    "date": ("epochs: 4", "epochs: 2020-13-45", 11, "not valid YAML: month must be in 1..12"),
    "list as key": ("epochs: 4", "? [a, b]\n  : 1", 11, "a key must be a word"),
    "recursion": ("epochs: 4", "a: &x {b: *x}", 11, "training.a.b contains itself"),
    "unwritable directory": ("directory: run", "directory: /proc/foo", 14, "output.directory: /proc is not writable"),
    "directory in a file": ("directory: run", "directory: frames.extxyz/foo", 14, "frames.extxyz is a file"),
    "split": ("test: 0.2", "test: 0.2\n  split: blcoks", 5, "data.split: structure 0 has no info['blcoks']"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_named_with_file_line_and_key(command, config, old, new, line, message):
    assert old in CONFIG
    config.write_text(CONFIG.replace(old, new))
    result = command("train", config)
    assert result.code == 2
    assert f"{config}:{line}: " in result.err
    assert message in result.err
    assert not Path("run").exists()


def test_every_mistake_is_named_at_once(command, config):
    config.write_text(CONFIG.replace("epochs: 4", "epochs: -4").replace("hidden_dim: 8", "hidden_dim: x"))
    lines = command("train", config).err.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["model.hidden_dim", "training.epochs"]


def test_exponents_without_a_point_are_numbers(command, config):
    config.write_text(CONFIG.replace("epochs: 4", "epochs: 4\n  learning_rate: 1e-3"))
    assert command("train", config, "--show-hooks").code == 0


def test_a_structure_that_cannot_be_evaluated_is_named_by_its_frame(command, config, frames):
    foreign = ase.io.read(frames, ":")
    for atoms in foreign[:10]:
        atoms.symbols[0] = "F"
    ase.io.write("foreign.extxyz", foreign)
    text = CONFIG.replace("validation: 0.2\n  test: 0.2", "validation: foreign.extxyz")
    config.write_text(text)
    result = command("train", config)
    assert result.code == 2
    assert (
        f"{config}:3: data.validation: foreign.extxyz, frame 0, in the validation part, has F; " in result.err
    )
    assert len(result.err.splitlines()) == 1
    assert not Path("run").exists()


def test_an_element_of_the_test_part_alone_is_found_before_the_training(command, config, frames):
    from nvalchemi.cli.train_setup import TrainingSetup

    setup = TrainingSetup.read(config)
    model = setup.make_model(torch.device("cpu"))
    number = int(setup.make_parts(model, setup.read_data(model), torch.device("cpu"))["test"][0].system_id)
    structures = ase.io.read(frames, ":")
    structures[number].symbols[0] = "F"
    ase.io.write(frames, structures)
    result = command("train", config)
    assert result.code == 2
    assert f"{config}:4: data.test: frames.extxyz, frame {number}, in the test part, has F; " in result.err


def test_a_part_without_a_label_that_is_trained_on_is_refused(command, config, frames):
    bare = ase.io.read(frames, ":")
    for atoms in bare:
        atoms.calc.results["energy"] = float("nan")
    ase.io.write("bare.extxyz", bare)
    config.write_text(CONFIG.replace("validation: 0.2\n  test: 0.2", "validation: bare.extxyz"))
    result = command("train", config)
    assert result.code == 2
    assert f"{config}:3: data.validation: " in result.err
    assert "bare.extxyz: no structure has energy" in result.err


def test_a_drawn_part_without_a_label_that_is_trained_on_is_refused(command, config, frames):
    structures = ase.io.read(frames, ":")
    for k, atoms in enumerate(structures):
        atoms.info["config_type"] = "abcde"[k // 4]
        if k >= 4:
            atoms.calc.results["energy"] = float("nan")
    ase.io.write(frames, structures)
    config.write_text(CONFIG.replace("test: 0.2", "test: 0.2\n  split: config_type"))
    result = command("train", config)
    assert result.code == 2
    assert re.search(r":[234]: data.\w+: none of the \d+ structures of the \w+ part", result.err)


def test_structures_without_labels_are_counted_aloud(command, config, frames):
    damaged = ase.io.read(frames, ":")
    for atoms in damaged[:7]:
        atoms.calc.results.pop("forces")
    ase.io.write(frames, damaged)
    result = command("train", config, "-q")
    assert result.code == 0, result.err
    assert f"warning: forces missing in 7 of 20 structures of {frames}" in result.err


def test_init_takes_the_label_that_most_structures_have(command, frames):
    structures = ase.io.read(frames, ":")
    for k, atoms in enumerate(structures):
        results, atoms.calc = atoms.calc.results, None
        atoms.info |= {"REF_energy": results["energy"], "energy_cutoff": 500.0}
        atoms.set_array("forces", results["forces"])
        if k < 3:
            atoms.info["energy"] = 0.0
    ase.io.write(frames, structures)
    result = command("init", "train", frames)
    assert result.code == 0, result.err
    assert yaml.safe_load(Path("config.yaml").read_text())["data"]["energy_key"] == "REF_energy"
    assert "energy (as REF_energy) [also energy in 3]" in result.out


def test_init_has_checkpoints_often_enough(command, frames):
    assert command("init", "train", frames).code == 0
    written = yaml.safe_load(Path("config.yaml").read_text())
    batches = 16 // written["training"]["batch_size"]
    assert 1 <= written["output"]["checkpoint_every"] * batches <= 50


# ---------------------------------------------------------------------- files that are not the training's
@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_a_report_replaces_no_input(command, config, frames, option):
    page = Path("page.html")
    page.write_bytes(frames.read_bytes())
    config.write_text(CONFIG.replace("validation: 0.2\n  test: 0.2", "validation: page.html"))
    for report, words in ((page, "is an input file"), (frames, "the suffix must be .html")):
        before = report.read_bytes()
        result = command("train", config, "-q", "--report", report, option)
        assert (result.code, report.read_bytes()) == (2, before)
        assert words in result.err


def test_an_earlier_training_outlives_a_report_that_cannot_be_written(command, config):
    assert command("train", config, "-q").code == 0
    before = Path("run/model.safetensors").read_bytes()
    result = command("train", config, "-q", "--overwrite", "--report", "/proc/report.html")
    assert result.code == 2
    assert "/proc is not writable" in result.err
    assert Path("run/model.safetensors").read_bytes() == before


def test_the_model_to_go_on_from_is_not_overwritten(command, config):
    assert command("train", config, "-q").code == 0
    before = Path("run/model.safetensors").read_bytes()
    config.write_text(re.sub(r"name: painn\n.*\n.*", "name: run/model.safetensors", CONFIG))
    for option in ("-q", "--overwrite", "--resume"):
        result = command("train", config, option)
        assert result.code == 2
        assert f"{config}:6: model.name: " in result.err
        assert "would be overwritten" in result.err
    assert Path("run/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth", "config.yaml", "log.csv", "checkpoints"])
@pytest.mark.parametrize("option", ["-q", "--overwrite", "--resume"])
def test_files_that_no_training_made_are_left_alone(command, config, name, option):
    mine = Path("run", name)
    mine.parent.mkdir()
    mine.write_text("mine")
    result = command("train", config, option)
    assert result.code == 2
    assert f"{config}:14: output.directory: " in result.err
    assert f"has {name}, which no training has made" in result.err
    assert mine.read_text() == "mine"


def test_a_configuration_among_the_checkpoints_is_not_removed(command, config):
    assert command("train", config, "-q").code == 0
    other = Path("run/checkpoints/other.yaml")
    other.write_text(
        CONFIG.replace("frames.extxyz", "../../frames.extxyz").replace("directory: run", "directory: ..")
    )
    result = command("train", other, "--overwrite")
    assert result.code == 2
    assert "would be overwritten" in result.err
    assert other.exists()


def test_resume_and_overwrite_contradict_each_other(command, config):
    assert command("train", config, "-q").code == 0
    result = command("train", config, "--resume", "--overwrite")
    assert result.code == 2
    assert "give one of the two" in result.err
    assert Path("run/model.safetensors").exists()


# ---------------------------------------------------------------------- data that are not there any more
def test_changed_data_are_noticed(command, config, frames):
    assert command("train", config, "-q").code == 0
    structures = ase.io.read(frames, ":")
    ase.io.write(frames, structures[1:])
    for arguments in (("train", config, "--resume"), ("eval", "run")):
        result = command(*arguments)
        assert result.code == 2
        assert "was changed since the training began (it has 19 structures and had 20)" in result.err
        assert len(result.err.splitlines()) == 1
    structures[0].calc.results["energy"] += 0.1
    ase.io.write(frames, structures)
    assert "other structures or labels are in it" in command("eval", "run").err
    result = command("eval", "run", frames, "--fit-offsets")
    assert result.code == 0
    assert "the compositions leave the energies of single elements open" in result.err


def test_a_training_that_was_moved_is_evaluated_on_given_data(command, config, frames):
    assert command("train", config, "-q").code == 0
    Path("elsewhere/deep").mkdir(parents=True)
    Path("run").rename("elsewhere/deep/run")
    result = command("eval", "elsewhere/deep/run")
    assert result.code == 2
    assert "data.train of its config.yaml is not there: elsewhere/deep/run/../frames.extxyz" in result.err
    assert "give DATA" in result.err
    assert command("eval", "elsewhere/deep/run", frames).code == 0
    assert command("eval", "elsewhere/deep/run/checkpoints/epoch-4", frames).code == 0


def test_structures_instead_of_a_configuration_get_a_hint(command, frames):
    result = command("train", frames)
    assert result.code == 2
    assert f"nvalchemi init train {frames}" in result.err
    assert len(result.err.splitlines()) == 1


def test_an_empty_configuration_is_called_so(command, config):
    config.write_text("# nothing\n")
    assert f"{config}: the file is empty" in command("train", config).err


def test_a_trained_model_that_training_makes_no_better_is_kept(command, config):
    assert command("train", config, "-q").code == 0
    tuned = yaml.safe_load(CONFIG) | {
        "model": {"name": "run/model.safetensors"},
        "output": {"directory": "tuned"},
    }
    tuned["training"] |= {"learning_rate": 1.0, "schedule": "constant", "gradient_clip": None}
    Path("tuned.yaml").write_text(yaml.safe_dump(tuned))
    result = command("train", "tuned.yaml")
    assert result.code == 0, result.err
    assert "before the training: MAE energy per atom" in result.out
    assert same_weights("run/model.safetensors", "tuned/model.safetensors")


@pytest.mark.parametrize("epochs", [1, 2, 4, 7])
def test_any_number_of_epochs_can_be_trained(command, config, epochs):
    config.write_text(CONFIG.replace("epochs: 4", f"epochs: {epochs}"))
    assert command("train", config, "-q").code == 0
    assert [row["epoch"] for row in log_rows("run/log.csv")] == [str(k + 1) for k in range(epochs)]


@pytest.mark.parametrize(("precision", "dtype"), [("float64", torch.float64), ("bfloat16", torch.float32)])
def test_precision_is_that_of_the_configuration(command, config, precision, dtype):
    config.write_text(CONFIG.replace("epochs: 4", f"epochs: 1\n  precision: {precision}"))
    result = command("train", config, "-q")
    assert result.code == 0, result.err
    assert load_file("run/model.safetensors")["readout.0.weight"].dtype == dtype


def test_training_that_is_over_stays_as_it_is(command, config):
    first = command("train", config)
    again = command("train", config, "--resume")
    assert again.code == 0, again.err
    assert (
        again.out.partition("\n\n")[2] == first.out.partition("\n\n")[2]
    )  # the errors and where everything is
    assert len(log_rows("run/log.csv")) == 4
