"""LoggingHook with TensorBoard."""

import pytest

from nvalchemi.dynamics import NVE
from nvalchemi.dynamics.hooks import LoggingHook


def scalars(folder):
    """Tag → list of (step, value), read as TensorBoard does."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def log(tmp_path):
    pytest.importorskip("tensorboard")
    return tmp_path / "runs" / "one"


def test_scalars_of_every_structure_and_logged_step(well, atoms_in_wells, log):
    batch = atoms_in_wells(count=2)
    NVE(well, dt=1.0, hooks=[LoggingHook("tensorboard", 2, log)]).run(batch, 5)
    found = scalars(log)
    assert {tag.split("/")[0] for tag in found} == {"time", "status", "energy", "fmax", "temperature"}
    assert [step for step, _ in found["energy/system_1"]] == [0, 2, 4]
    assert found["energy/system_1"][-1][1] == pytest.approx(batch.energy[1].item(), rel=1e-6)


def test_further_run_and_restart_repeat_no_step(well, atoms_in_wells, log):
    def engine():
        return NVE(well, dt=1.0, hooks=[LoggingHook("tensorboard", 1, log)])

    first = engine()
    batch = atoms_in_wells(count=1)
    first.run(batch, 3)
    state = first.state_dict()
    first.run(batch, 4)  # as far as a run came that was then killed
    second = engine()
    second.load_state_dict(state)
    second.run(atoms_in_wells(count=1), 3)
    assert [step for step, _ in scalars(log)["energy/system_0"]] == [0, 1, 2, 3, 4, 5]


def test_append_false_replaces_what_is_there(well, atoms_in_wells, log):
    for steps in (4, 2):
        hook = LoggingHook("tensorboard", 1, log, append=False)
        NVE(well, dt=1.0, hooks=[hook]).run(atoms_in_wells(count=1), steps)
    assert [step for step, _ in scalars(log)["fmax/system_0"]] == [0, 1]


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("nvalchemi.hooks.reporting.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"nvalchemi\[tensorboard\]"):
        LoggingHook("tensorboard")
