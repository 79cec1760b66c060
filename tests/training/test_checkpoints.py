"""Checkpoints: what is in them, that they are whole, and that training continues to the bit."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nvalchemi._tree import flatten, unflatten
from nvalchemi.data import Batch
from nvalchemi.data.datasets import InMemoryDataset
from nvalchemi.data.loader import DataLoader as OwnLoader
from nvalchemi.models.demo import DemoModel, DemoModelWrapper
from nvalchemi.training import (
    DamagedCheckpointError,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)
from nvalchemi.training.archive import newest_first, read_checkpoint
from nvalchemi.training.hooks import (
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SpikeSkipHook,
)
from nvalchemi.training.rng import random_state, set_random_state
from nvalchemi.training.spec import rebuild

Stage = TrainingStage


class Noisy(nn.Module):
    """Draws random numbers in every forward pass, so that a wrong random state shows."""

    def __init__(self):
        super().__init__()
        self.inner = DemoModelWrapper(DemoModel(hidden_dim=4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, batch):
        out = self.inner(batch)
        if self.training:
            self.calls += 1
            # Python's own generator is left out: the type checker of the tests draws from it.
            noise = 1.0 + 0.1 * torch.randn(()) + 0.01 * np.random.rand()  # noqa: NPY002
            out = {name: value * noise for name, value in out.items()}
        return out


class Die:
    """Ends the process' part of the work after a number of batches, having saved as told."""

    frequency, stage = 1, Stage.AFTER_BATCH

    def __init__(self, at, save=None):
        self.at, self.save = at, save

    def __call__(self, ctx, stage):
        if ctx.batch_count == self.at:
            if self.save is not None:
                ctx.workflow.save_checkpoint(self.save)
            raise KeyboardInterrupt


class Stream:
    """A loader without length that shuffles with the global generator."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (self.batches[i] for i in torch.randperm(len(self.batches)).tolist())


class Resumable:
    """A loader that keeps its own position."""

    def __init__(self, batches):
        self.batches, self.next, self.epoch = batches, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def __iter__(self):
        order = torch.randperm(
            len(self.batches), generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        while self.next < len(order):
            self.next += 1
            yield self.batches[order[self.next - 1]]
        self.next = 0


class SizedResumable(Resumable):
    def __len__(self):
        return len(self.batches)


KINDS = ["list", "loader", "generator", "stream", "resumable", "sized resumable", "own"]


def loader_of(kind, batches):
    if kind == "list":
        return batches
    if kind == "stream":
        return Stream(batches)
    if kind == "resumable":
        return Resumable(batches)
    if kind == "own":
        structures = [data for batch in batches for data in batch.to_data_list()]
        return OwnLoader(InMemoryDataset(structures), 3, shuffle=True)
    if kind == "sized resumable":
        return SizedResumable(batches)
    structures = [data for batch in batches for data in batch.to_data_list()]
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    return DataLoader(structures, 3, shuffle=True, generator=generator, collate_fn=Batch.from_data_list)


def seed_everything():
    torch.manual_seed(11)
    np.random.seed(13)  # noqa: NPY002


def make(hooks=(), seed=True, validation=None, **options):
    if seed:
        seed_everything()
    config = OptimizerConfig(
        torch.optim.AdamW,
        {"lr": 0.01},
        scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
        scheduler_kwargs={"T_max": 20},
    )
    options.setdefault("num_epochs", 3)
    loss = EnergyMSELoss() + ForceMSELoss()
    if validation is not None:
        validation = ValidationConfig(validation_data=validation, every_n_steps=3)
    return TrainingStrategy(Noisy(), config, loss, hooks=hooks, validation_config=validation, **options)


def all_hooks():
    return [
        EMAHook(decay=0.9),
        MixedPrecisionHook("fp16"),
        GradientClipHook(1.0),
        SpikeSkipHook(loss_factor=1.5, min_history=2),
        GradientAccumulationHook(3),
    ]


def final_state(strategy):
    state = {f"model.{name}": value for name, value in strategy.models.state_dict().items()}
    for hook in strategy.update_hooks():
        if isinstance(hook, EMAHook) and hook.num_updates:
            state |= {f"ema.{name}": value for name, value in hook.get_averaged_model().state_dict().items()}
    return state


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---------------------------------------------------------------------- resuming
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 5, 7, 11])
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(toys, kind, at):
    """Batches 5 and 10 end an epoch; the windows of three batches are open at 1, 7 and 11."""
    batches, validation = toys.molecules(5), toys.molecules(2, seed=9)
    whole = make(all_hooks(), validation=validation)
    whole.run(loader_of(kind, batches))
    first = make([*all_hooks(), Die(at, save="checkpoint")], validation=validation)
    with pytest.raises(KeyboardInterrupt):
        first.run(loader_of(kind, batches))
    torch.rand(7)
    second = make(all_hooks(), seed=False, validation=validation)
    second.restore_checkpoint("checkpoint")
    torch.rand(3)
    second.run(loader_of(kind, batches))
    assert second.counters() == whole.counters()
    assert_same(final_state(second), final_state(whole))
    assert second.last_validation == whole.last_validation


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_the_end_of_an_epoch_equals_uninterrupted(toys, kind):
    batches = toys.molecules(5)
    whole = make(all_hooks())
    whole.run(loader_of(kind, batches))
    first = make([*all_hooks(), CheckpointHook("run")], num_epochs=2)
    first.run(loader_of(kind, batches))
    second = make([*all_hooks(), CheckpointHook("run")], seed=False)
    assert second.restore_checkpoint("run").name == "epoch-2"
    second.run(loader_of(kind, batches))
    assert_same(final_state(second), final_state(whole))


def test_train_3_save_resume_3_is_train_6_for_raw_and_averaged_weights(toys):
    def strategy():
        return toys.slope_strategy([EMAHook(decay=0.9)], num_epochs=None, num_steps=6)

    xs = [toys.batch_of(x) for x in (1, 2, 3, 4, 5, 6)]
    whole, first, second = strategy(), strategy(), strategy()
    whole.run(xs)
    first.num_steps = 3
    first.run(xs)
    first.save_checkpoint("checkpoint")
    second.restore_checkpoint("checkpoint")
    second.run(xs)
    assert second.step_count == 6
    assert_same(final_state(second), final_state(whole))
    assert next(second.update_hooks()).num_updates == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [1, 2])
def test_more_steps_in_the_same_process_go_on_where_it_ended(toys, kind, first):
    """An epoch of five batches is two windows: one step ends inside it, two at its end."""

    def hooks():
        return [GradientAccumulationHook(3), EMAHook(decay=0.9)]

    batches = toys.molecules(5)
    whole = make(hooks(), num_epochs=None, num_steps=5)
    whole.run(loader_of(kind, batches))
    parts = make(hooks(), num_epochs=None, num_steps=first)
    loader = loader_of(kind, batches)
    parts.run(loader)
    assert parts.step_count == first
    parts.num_steps = 5
    parts.run(loader)
    assert_same(final_state(parts), final_state(whole))


def test_averaged_model_is_there_right_after_restoring(toys):
    strategy = toys.slope_strategy([EMAHook(decay=0.9)])
    strategy.run([toys.batch_of(1.0)] * 3)
    strategy.save_checkpoint("checkpoint")
    data = [toys.batch_of(2.0)]
    other = toys.slope_strategy(
        [EMAHook(decay=0.9)], validation_config=ValidationConfig(validation_data=data)
    )
    other.restore_checkpoint("checkpoint")
    average = next(strategy.update_hooks()).get_averaged_model().w.item()
    assert next(other.update_hooks()).get_averaged_model().w.item() == average
    assert other.validate()["loss"] == pytest.approx(2 * average)


def test_plateau_scheduler_with_one_bad_epoch_left_triggers_at_the_same_epoch(toys):
    config = OptimizerConfig(
        torch.optim.SGD, {"lr": 1.0},
        scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau, scheduler_kwargs={"patience": 2, "factor": 0.1},
        scheduler_metric_adapter=constant_metric,
    )  # fmt: skip
    rates = {}

    def strategy(name, epochs):
        class Note:
            frequency, stage = 1, Stage.AFTER_EPOCH

            def __call__(self, ctx, stage):
                rates.setdefault(name, {})[ctx.epoch] = ctx.optimizers[0].param_groups[0]["lr"]

        validation = ValidationConfig(validation_data=[toys.batch_of(1.0)])
        return TrainingStrategy(
            toys.Slope(),
            config,
            toys.mean_energy,
            num_epochs=epochs,
            hooks=[Note()],
            validation_config=validation,
        )

    strategy("whole", 6).run([toys.batch_of(0.0)])
    first, second = strategy("parts", 3), strategy("parts", 6)
    first.run([toys.batch_of(0.0)])
    assert first.lr_schedulers[0].num_bad_epochs == 2
    first.save_checkpoint("checkpoint")
    second.restore_checkpoint("checkpoint")
    second.run([toys.batch_of(0.0)])
    assert rates["parts"] == rates["whole"] == pytest.approx({0: 1, 1: 1, 2: 1, 3: 0.1, 4: 0.1, 5: 0.1})


def constant_metric(validation):
    return 1.0


KILLED = """
import os, random, signal, sys
sys.path.insert(0, sys.argv[2])
from test_checkpoints import all_hooks, final_state, loader_of, make
from conftest import molecules
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import CheckpointHook
import torch


class Kill:
    frequency, stage = 1, None

    def _runs_on_stage(self, stage):
        return stage in (TrainingStage.AFTER_FORWARD, TrainingStage.AFTER_BATCH, TrainingStage.BEFORE_OPTIMIZER_STEP)

    def __call__(self, ctx, stage):
        if random.SystemRandom().random() < float(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)


validation = molecules(2, seed=9)
strategy = make([*all_hooks(), Kill(), CheckpointHook("run", step_interval=1, keep_last=3)], validation=validation)
if os.path.isdir("run"):
    try:
        strategy.restore_checkpoint("run")
    except FileNotFoundError:
        pass
strategy.run(loader_of("loader", molecules(8)))
torch.save(final_state(strategy), "final.pt")
"""


@pytest.mark.slow
def test_killed_at_random_batches_ten_times_ends_with_the_same_weights(toys):
    here = str(Path(__file__).parent)
    toys.run_script(KILLED, "0.0", here)
    expected = torch.load("final.pt", weights_only=True)
    shutil.rmtree("run")
    Path("final.pt").unlink()
    deaths = 0
    while not Path("final.pt").exists():
        chance = "0.1" if deaths < 10 else "0.0"
        result = toys.run_script(KILLED, chance, here, check=False)
        if result.returncode != 0:
            assert result.returncode == -signal.SIGKILL, result.stderr
            deaths += 1
        elif deaths < 10:
            shutil.rmtree("run")  # it got through too soon: once more from the start
            Path("final.pt").unlink()
    assert deaths >= 10
    assert_same(torch.load("final.pt", weights_only=True), expected)


SAVING = """
import sys
import torch
from pathlib import Path
from nvalchemi.training.archive import Snapshot, write_checkpoint

Path("ready").touch()
for n in range(1, 100000):
    weights = {"main": {"w": torch.full((2_000_000,), float(n))}}
    counters = {"batch_count": n, "step_count": n, "epoch_count": 0}
    write_checkpoint(Snapshot(counters, weights, {"n": n}, {}), Path("run") / f"step-{n % 3}")
"""


def test_killed_during_a_save_the_previous_checkpoint_loads(toys):
    Path("saving.py").write_text(SAVING)
    for wait in (0.1, 0.35):
        Path("ready").unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "saving.py"])
        while not Path("ready").exists() or not newest_first(Path("run")):
            assert process.poll() is None
        time.sleep(wait)
        process.kill()
        process.wait()
        newest = newest_first(Path("run"))[0]
        snapshot = read_checkpoint(newest)
        assert snapshot.weights["main"]["w"].unique().tolist() == [snapshot.counters["batch_count"]]


# ---------------------------------------------------------------------- directories
def test_checkpoint_is_a_directory_with_weights_in_safetensors_and_a_manifest_of_checksums(toys):
    from safetensors.torch import load_file

    strategy = toys.slope_strategy()
    strategy.run([toys.batch_of(1.0)])
    strategy.save_checkpoint("here/deep/checkpoint")
    path = Path("here/deep/checkpoint")
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) | {"manifest.json"} == {file.name for file in path.iterdir()}
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())
    assert load_file(path / "model-main.safetensors")["w"].item() == strategy.models.w.item()
    assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint"]


def test_saving_again_replaces_the_whole_directory(toys):
    strategy = toys.slope_strategy(num_epochs=2)
    strategy.save_checkpoint("checkpoint")
    Path("checkpoint/extra").touch()
    strategy.run([toys.batch_of(1.0)])
    strategy.save_checkpoint("checkpoint")
    assert not Path("checkpoint/extra").exists()
    assert read_checkpoint(Path("checkpoint")).counters["step_count"] == 2
    assert os.listdir() == ["checkpoint"]


def test_failed_write_leaves_the_old_checkpoint_and_no_remains(toys, monkeypatch):
    strategy = toys.slope_strategy()
    strategy.save_checkpoint("checkpoint")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("nvalchemi.training.archive._flush", full)
    with pytest.raises(OSError, match="no space"):
        strategy.save_checkpoint("checkpoint")
    assert os.listdir() == ["checkpoint"]
    assert read_checkpoint(Path("checkpoint")).counters["step_count"] == 0


def test_epoch_10_is_newer_than_epoch_9(toys):
    strategy = toys.slope_strategy([CheckpointHook("run", async_save=False)], num_epochs=10)
    strategy.run([toys.batch_of(0.0)])
    assert [path.name for path in newest_first(Path("run"))] == [f"epoch-{n}" for n in range(10, 0, -1)]
    assert toys.slope_strategy([CheckpointHook("run")]).restore_checkpoint("run").name == "epoch-10"


def test_names_decide_between_checkpoints_of_the_same_state(toys):
    strategy = toys.slope_strategy()
    for n in (10, 9):
        strategy.save_checkpoint(f"run/epoch-{n}")
    assert strategy.restore_checkpoint("run").name == "epoch-10"


def damage_bytes(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "bit": lambda path: damage_bytes(path / "model-main.safetensors"),
    "truncated": lambda path: (path / "state.safetensors").write_bytes(b""),
    "missing": lambda path: (path / "state.json").unlink(),
    "manifest": lambda path: (path / "manifest.json").write_text("{"),
    "state": lambda path: damage_bytes(path / "state.json"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_newest_checkpoint_is_warned_of_and_the_one_before_is_taken(toys, damage):
    strategy = toys.slope_strategy([CheckpointHook("run", async_save=False)], num_epochs=3)
    strategy.run([toys.batch_of(1.0)])
    damage(Path("run/epoch-3"))
    other = toys.slope_strategy([CheckpointHook("run")], num_epochs=3)
    with pytest.warns(UserWarning, match=r"epoch-3 is damaged"):
        assert other.restore_checkpoint("run").name == "epoch-2"
    assert other.models.w.item() == pytest.approx(0.8)
    with pytest.raises(DamagedCheckpointError, match="epoch-3 is damaged"):
        other.restore_checkpoint("run/epoch-3")


def test_other_things_in_the_directory_do_no_harm(toys):
    counters = {"batch_count": 99, "step_count": 99, "epoch_count": 99}
    for name, manifest in (
        ("later", {"format": 99, "counters": counters, "files": {}}),
        ("epoch-77", {}),
        ("epoch-78", []),
    ):
        Path("checkpoints", name).mkdir(parents=True)
        Path("checkpoints", name, "manifest.json").write_text(json.dumps(manifest))
    Path("checkpoints", "step-99").mkdir()
    toys.slope_strategy([CheckpointHook("checkpoints", 1, keep_last=1)]).run([toys.batch_of(1.0)] * 2)
    left = {"later", "epoch-77", "epoch-78", "step-99", "step-2"}
    assert {path.name for path in Path("checkpoints").iterdir()} == left
    with pytest.warns(UserWarning, match="left out") as said:
        assert toys.slope_strategy().restore_checkpoint("checkpoints", strict=False).name == "step-2"
    assert any("has format 99" in str(warning.message) for warning in said)


def test_nothing_intact_and_nothing_at_all(toys):
    strategy = toys.slope_strategy()
    with pytest.raises(FileNotFoundError, match="no checkpoint in nowhere"):
        strategy.restore_checkpoint("nowhere")
    strategy.save_checkpoint("run/epoch-1")
    damage_bytes(Path("run/epoch-1/state.json"))
    with (
        pytest.warns(UserWarning, match="falling back"),
        pytest.raises(DamagedCheckpointError, match=r"no intact checkpoint in run: .*state\.json"),
    ):
        strategy.restore_checkpoint("run")


def test_loading_runs_no_code(toys, monkeypatch):
    """Neither pickle nor torch.load is touched."""
    import pickle

    strategy = make(all_hooks())
    strategy.run(toys.molecules(2))
    strategy.save_checkpoint("checkpoint")

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    make(all_hooks()).restore_checkpoint("checkpoint")


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.nn.Linear", "nowhere.Nothing", "eval"])
def test_specification_that_names_something_else_than_a_pydantic_model_is_refused(name):
    with pytest.raises(ValueError, match=name):
        rebuild({"type": name, "fields": {}})


# ---------------------------------------------------------------------- the hook
def test_saves_every_n_steps_and_every_n_epochs(toys):
    hooks = [CheckpointHook("steps", step_interval=2), CheckpointHook("epochs", epoch_interval=2)]
    toys.slope_strategy(hooks, num_epochs=4).run([toys.batch_of(1.0)] * 2)
    assert sorted(os.listdir("steps")) == ["step-2", "step-4", "step-6", "step-8"]
    assert sorted(os.listdir("epochs")) == ["epoch-2", "epoch-4"]


def test_batches_inside_a_window_save_nothing_twice(toys):
    saves = []

    class Counting(CheckpointHook):
        def _write(self, snapshot, name, scores):
            saves.append(name)
            super()._write(snapshot, name, scores)

    hooks = [GradientAccumulationHook(2), Counting("run", step_interval=1)]
    toys.slope_strategy(hooks).run([toys.batch_of(1.0)] * 4)
    assert saves == ["step-1", "step-2"]


@pytest.mark.parametrize("async_save", [False, True])
def test_keep_last_and_keep_best(toys, async_save):
    losses = iter([math.nan, 1.0, 2.0, 5.0, 4.0, 6.0])

    def loss(predictions, batch):
        return predictions["energy"].mean() if torch.is_grad_enabled() else torch.tensor(next(losses))

    hook = CheckpointHook("run", keep_last=2, keep_best=2, async_save=async_save)
    strategy = TrainingStrategy(
        toys.Slope(), OptimizerConfig(torch.optim.SGD, {"lr": 0.1}), loss, num_epochs=6, hooks=[hook],
        validation_config=ValidationConfig(validation_data=[toys.batch_of(1.0)]),
    )  # fmt: skip
    strategy.run([toys.batch_of(1.0)])
    assert sorted(os.listdir("run")) == ["epoch-2", "epoch-3", "epoch-5", "epoch-6"]
    assert hook.best_checkpoint == Path("run/epoch-2")


def test_async_save_holds_the_state_at_the_time_of_the_save(toys, monkeypatch):
    written = []
    monkeypatch.setattr(
        "nvalchemi.training.archive.write_checkpoint", lambda snapshot, path: written.append(snapshot)
    )

    class Late(CheckpointHook):
        def _submit(self, write):
            self._late = [*getattr(self, "_late", []), write]

    hook = Late("run", step_interval=1)
    toys.slope_strategy([hook]).run([toys.batch_of(1.0)] * 3)
    for write in hook._late:
        write()
    assert [s.weights["main"]["w"].item() for s in written] == pytest.approx([0.9, 0.8, 0.7])


def test_error_in_the_writing_thread_is_raised(toys):
    Path("run").write_text("a file where the directory should be")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        toys.slope_strategy([CheckpointHook("run", step_interval=1)]).run([toys.batch_of(1.0)] * 3)


def test_remains_of_an_interrupted_run_are_removed(toys):
    remains = Path("run") / (".step-1.tmp-" + "0" * 32)
    remains.mkdir(parents=True)
    toys.slope_strategy([CheckpointHook("run")]).run([toys.batch_of(1.0)])
    assert os.listdir("run") == ["epoch-1"]


def test_checkpoint_whose_replacement_was_interrupted_gets_its_name_back(toys):
    toys.slope_strategy([CheckpointHook("run")], num_epochs=2).run([toys.batch_of(1.0)])
    os.rename("run/epoch-2", "run/.epoch-2.old-" + "a" * 32)
    # The replacement that was being written, and what one that succeeded had no time to remove.
    shutil.copytree("run/epoch-1", "run/.epoch-2.tmp-" + "b" * 32)
    shutil.copytree("run/epoch-1", "run/.epoch-2.old-" + "c" * 32)
    shutil.copytree("run/epoch-1", "run/.epoch-1.old-" + "d" * 32)
    again = toys.slope_strategy([CheckpointHook("run")], num_epochs=3)
    with again:
        assert again.restore_checkpoint("run").name == "epoch-2"
    assert again.epoch_count == 2
    assert sorted(os.listdir("run")) == ["epoch-1", "epoch-2"]


def test_missing_safetensors_is_said_at_registration_with_the_extra(toys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"nvalchemi\[checkpoint\]"):
        toys.slope_strategy([CheckpointHook("run")])


# ---------------------------------------------------------------------- loading
def test_load_checkpoint_makes_the_strategy_again(toys):
    strategy = make([*all_hooks(), CheckpointHook("run", epoch_interval=1)], num_epochs=1)
    strategy.run(toys.molecules(3))
    loaded = TrainingStrategy.load_checkpoint("run", Noisy(), num_epochs=2)
    assert loaded.num_epochs == 2
    assert loaded.counters() == strategy.counters()
    assert [type(h) for h in loaded.update_hooks()] == [type(h) for h in strategy.update_hooks()]
    assert_same(final_state(loaded), final_state(strategy))


def test_what_cannot_be_described_must_be_given_at_loading(toys):
    factor = 2.0
    strategy = TrainingStrategy(
        toys.Slope(),
        OptimizerConfig(torch.optim.SGD, {"lr": 0.1}),
        lambda p, b: factor * p["energy"].mean(),
        num_epochs=1,
    )
    strategy.run([toys.batch_of(1.0)])
    strategy.save_checkpoint("checkpoint")
    config = OptimizerConfig(torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(TypeError):
        TrainingStrategy.load_checkpoint("checkpoint", toys.Slope())
    loaded = TrainingStrategy.load_checkpoint(
        "checkpoint", toys.Slope(), optimizer_configs=config, loss_fn=toys.mean_energy, num_epochs=2
    )
    assert loaded.models.w.item() == pytest.approx(0.8)


def test_other_models_optimizers_or_hooks_are_refused(toys):
    toys.slope_strategy([EMAHook()]).save_checkpoint("checkpoint")
    with pytest.raises(ValueError, match="hooks with state"):
        toys.slope_strategy([]).restore_checkpoint("checkpoint")
    with pytest.raises(ValueError, match="hooks with state"):
        toys.slope_strategy([MixedPrecisionHook("fp16")]).restore_checkpoint("checkpoint")
    with pytest.raises(RuntimeError, match="w"):
        toys.slope_strategy([EMAHook()], model=nn.Linear(1, 1)).restore_checkpoint("checkpoint")
    toys.slope_strategy([]).restore_checkpoint("checkpoint", strict=False)


def test_state_of_early_stopping_comes_back(toys):
    hook = EarlyStoppingHook(patience=2)
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)])
    strategy = toys.slope_strategy([hook], lr=0.0, num_epochs=2, validation_config=config)
    strategy.run([toys.batch_of(1.0)])
    strategy.save_checkpoint("checkpoint")
    other = toys.slope_strategy(
        [EarlyStoppingHook(patience=2)], lr=0.0, num_epochs=9, validation_config=config
    )
    other.restore_checkpoint("checkpoint")
    other.run([toys.batch_of(1.0)])
    assert other.epoch_count == 3
    assert "2 validations" in other.stop_reason


# ---------------------------------------------------------------------- random numbers
def test_all_generators_are_restored():
    state = flatten(random_state())
    first = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
    set_random_state(unflatten(json.loads(json.dumps(state[0])), state[1]))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == first  # noqa: NPY002


# ---------------------------------------------------------------------- the tree
def test_tree_keeps_what_optimizers_and_schedulers_hold():
    tree = {
        "betas": (0.9, 0.999), 0: {1: torch.arange(3), "x": [None, True, 1.5, float("inf")]},
        "milestones": Counter({3: 2}),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "half": torch.ones(2, dtype=torch.bfloat16),
        "numpy": np.float64(0.1), "$": "dollar",
    }  # fmt: skip
    encoded, tensors = flatten(tree)
    back = unflatten(json.loads(json.dumps(encoded)), tensors)
    assert torch.equal(back[0].pop(1), tree[0].pop(1))
    assert torch.equal(back.pop("half"), tree.pop("half"))
    assert back == tree
    assert isinstance(back["milestones"], Counter)


def test_tree_keeps_tensors_apart_whose_paths_are_the_same():
    tree = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3), "0": torch.tensor(4)}
    found = unflatten(*flatten(tree))
    assert [found["a.b"].item(), found["a"]["b"].item(), found[0].item(), found["0"].item()] == [1, 2, 3, 4]


class NoisyStream:
    """No length; every batch draws from torch's global generator."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for i in torch.randperm(len(self.batches)).tolist():
            batch = self.batches[i].clone()
            batch.positions.add_(0.1 * torch.randn_like(batch.positions))
            yield batch


@pytest.mark.parametrize("at", range(1, 8))
def test_stream_that_draws_random_numbers_resumes_to_the_bit_at_every_batch(toys, at):
    batches, hooks = toys.molecules(4), lambda: [GradientAccumulationHook(3)]
    whole = make(hooks(), num_epochs=2)
    whole.run(NoisyStream(batches))
    first = make([*hooks(), Die(at, save="checkpoint")], num_epochs=2)
    with pytest.raises(KeyboardInterrupt):
        first.run(NoisyStream(batches))
    second = make(hooks(), seed=False, num_epochs=2)
    second.restore_checkpoint("checkpoint")
    second.run(NoisyStream(batches))
    assert_same(final_state(second), final_state(whole))


def test_tree_says_where_something_is_that_it_cannot_hold():
    with pytest.raises(TypeError, match=r"state\.a\.0 is a object"):
        flatten({"a": [object()]})
