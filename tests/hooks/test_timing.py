"""Stage timing, with a clock that the test sets."""

import csv
import math
from enum import Enum

import pytest
import torch

from nvalchemi.dynamics import DynamicsStage
from nvalchemi.hooks import HookRegistryMixin, StageTimingHook
from nvalchemi.training import TrainingStage


class Stage(Enum):
    SET_UP = 0
    PROPOSE = 1
    ACCEPT = 2


class Clock:
    """Stands still unless told to go."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("nvalchemi.hooks.timing.perf_counter", clock)
    return clock


class Engine(HookRegistryMixin):
    """Walks through stages; the time from one to the next is given."""

    def __init__(self, clock, stage_type=Stage):
        self._stage_type = stage_type
        self.clock, self.step_count = clock, 0

    def step(self, *stages_and_seconds):
        for stage, seconds in stages_and_seconds:
            self._call_hooks(stage, None)
            self.clock.now += seconds
        self.step_count += 1


def walk(engine, seconds):
    for s in seconds:
        engine.step((Stage.PROPOSE, s), (Stage.ACCEPT, 7.0))


def test_mean_min_max_std_of_an_interval_with_the_first_step_apart(clock):
    hook = StageTimingHook(stage=Stage.PROPOSE)
    engine = Engine(clock)
    engine.register_hook(hook)
    walk(engine, [5.0, 0.1, 0.2, 0.3])
    row = hook.summary()["PROPOSE -> ACCEPT"]
    assert row["n"] == 3
    assert row["warmup"] == pytest.approx(5.0)
    assert [row[c] for c in ("total", "mean", "min", "max")] == pytest.approx([0.6, 0.2, 0.1, 0.3])
    assert row["std"] == pytest.approx(math.sqrt(2 / 300))


def test_a_stage_that_takes_a_tenth_of_a_second_is_reported_so_in_a_dynamics_run(
    clock, dimers, argon_dynamics
):
    class Slow:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            clock.now += 0.1 if ctx.step_count else 60.0

    timing = StageTimingHook()
    argon_dynamics([timing, Slow()]).run(dimers(), 5)
    summary = timing.summary()
    slow = summary.pop("AFTER_COMPUTE -> BEFORE_POST_UPDATE")
    assert (slow["n"], slow["mean"], slow["warmup"]) == (4, pytest.approx(0.1), pytest.approx(60.0))
    assert summary.pop("step")["mean"] == pytest.approx(0.1)
    assert list(summary) == [
        "BEFORE_STEP -> BEFORE_PRE_UPDATE",
        "BEFORE_PRE_UPDATE -> AFTER_PRE_UPDATE",
        "AFTER_PRE_UPDATE -> BEFORE_COMPUTE",
        "BEFORE_COMPUTE -> AFTER_COMPUTE",
        "BEFORE_POST_UPDATE -> AFTER_POST_UPDATE",
        "AFTER_POST_UPDATE -> AFTER_STEP",
    ]
    assert all(row["mean"] == row["warmup"] == 0.0 for row in summary.values())


@pytest.mark.parametrize(
    ("timing_first", "interval"), [(True, "PROPOSE -> ACCEPT"), (False, "SET_UP -> PROPOSE")]
)
def test_a_hook_counts_to_the_interval_that_its_place_among_the_hooks_says(clock, timing_first, interval):
    class Slow:
        frequency, stage = 1, Stage.PROPOSE

        def __call__(self, ctx, stage):
            clock.now += 1.0

    timing = StageTimingHook("detailed")
    engine = Engine(clock)
    for hook in [timing, Slow()] if timing_first else [Slow(), timing]:
        engine.register_hook(hook)
    for _ in range(2):
        engine.step((Stage.SET_UP, 0.0), (Stage.PROPOSE, 0.0), (Stage.ACCEPT, 0.0))
    assert [name for name, row in timing.summary().items() if row["mean"] == 1.0] == [interval]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("all", {"PROPOSE -> ACCEPT", "SET_UP -> PROPOSE", "step"}),
        ("detailed", {"PROPOSE -> ACCEPT", "SET_UP -> PROPOSE"}),
        ("step", {"step"}),
        ({Stage.SET_UP, Stage.ACCEPT}, {"SET_UP -> ACCEPT"}),
    ],
)
def test_which_intervals_are_measured(clock, chosen, names):
    hook = StageTimingHook(chosen)
    engine = Engine(clock)
    engine.register_hook(hook)
    for _ in range(2):
        engine.step((Stage.SET_UP, 1.0), (Stage.PROPOSE, 2.0), (Stage.ACCEPT, 4.0))
    assert set(hook.summary()) == names
    means = {name: row["mean"] for name, row in hook.summary().items()}
    expected = {"PROPOSE -> ACCEPT": 2, "SET_UP -> PROPOSE": 1, "step": 3, "SET_UP -> ACCEPT": 3}
    assert means == {name: expected[name] for name in names}


def test_steps_that_are_left_out_are_not_measured_as_part_of_an_interval(clock):
    hook = StageTimingHook(frequency=3, stage=Stage.PROPOSE)
    engine = Engine(clock)
    engine.register_hook(hook)
    walk(engine, [1.0, 50.0, 50.0, 2.0, 50.0, 50.0, 4.0])
    assert hook.summary()["PROPOSE -> ACCEPT"] | {"std": 0} == {
        "n": 2, "total": 6.0, "mean": 3.0, "min": 2.0, "max": 4.0, "std": 0, "warmup": 1.0
    }  # fmt: skip
    assert set(hook.summary()) == {"PROPOSE -> ACCEPT", "step"}


def test_time_between_two_runs_and_admission_belong_to_no_step(clock, dimers, argon_dynamics):
    class Between:
        frequency = 1

        def __init__(self, stage):
            self.stage = stage

        def __call__(self, ctx, stage):
            clock.now += 1000.0

    timing = StageTimingHook()
    engine = argon_dynamics([timing, Between(DynamicsStage.ON_ADMISSION)])
    for _ in range(2):
        engine.run(dimers(), 2)
        clock.now += 5000.0
    assert all(row["max"] == 0.0 for row in timing.summary().values())
    assert timing.summary()["step"]["n"] == 3


def test_training_leaves_replacement_slots_alone_and_measures_validation_within_the_batch(clock):
    hook = StageTimingHook()
    assert not hook._runs_on_stage(TrainingStage.DO_BACKWARD)
    engine = Engine(clock, TrainingStage)
    engine.register_hook(hook)
    engine._call_hooks(TrainingStage.BEFORE_EPOCH, None)
    for _ in range(2):
        engine._call_hooks(TrainingStage.BEFORE_BATCH, None)
        clock.now += 1.0
        engine._call_hooks(TrainingStage.BEFORE_OPTIMIZER_STEP, None)
        engine.step_count += 1  # as the strategy does, within the batch
        clock.now += 2.0
        engine._call_hooks(TrainingStage.AFTER_OPTIMIZER_STEP, None)
        clock.now += 4.0
        engine._call_hooks(TrainingStage.AFTER_VALIDATION, None)
        clock.now += 8.0
        engine._call_hooks(TrainingStage.AFTER_BATCH, None)
        clock.now += 100.0
    means = {name: row["mean"] for name, row in hook.summary().items()}
    assert means == {
        "BEFORE_BATCH -> BEFORE_OPTIMIZER_STEP": 1.0,
        "BEFORE_OPTIMIZER_STEP -> AFTER_OPTIMIZER_STEP": 2.0,
        "AFTER_OPTIMIZER_STEP -> AFTER_VALIDATION": 4.0,
        "AFTER_VALIDATION -> AFTER_BATCH": 8.0,
        "step": 15.0,
    }


def test_reset_makes_the_next_step_a_first_step(clock):
    hook = StageTimingHook(stage=Stage.PROPOSE)
    engine = Engine(clock)
    engine.register_hook(hook)
    walk(engine, [1.0, 2.0])
    hook.reset()
    assert hook.summary() == {}
    walk(engine, [3.0])
    assert hook.summary()["PROPOSE -> ACCEPT"]["warmup"] == 3.0


def test_csv_holds_the_summary_at_the_end_of_a_run_also_after_an_error(
    clock, dimers, argon_dynamics, tmp_path
):
    path = tmp_path / "new folder" / "times.csv"

    class Fail:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            if ctx.step_count == 3:
                raise RuntimeError("blown up")

    timing = StageTimingHook("step", log_path=path)
    with pytest.raises(RuntimeError, match="blown up"):
        argon_dynamics([timing, Fail()]).run(dimers(), 9)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["stage"], row["n"]) for row in rows] == [("step", "2")]
    assert {name: float(value) for name, value in rows[0].items() if name != "stage"} == timing.summary()[
        "step"
    ]
    assert list(path.parent.iterdir()) == [path]


def test_console_line_every_so_many_measured_steps(clock, capsys):
    engine = Engine(clock)
    engine.register_hook(StageTimingHook("step", show_console=True, console_frequency=2, stage=Stage.PROPOSE))
    walk(engine, [1.0, 2.0, 4.0, 8.0, 16.0])
    assert capsys.readouterr().out.splitlines() == [
        "mean times after 2 steps: step 2000.000 ms",
        "mean times after 4 steps: step 4666.667 ms",
    ]


def test_nvtx_ranges_are_balanced_named_after_stages_and_closed_when_a_step_is_abandoned(clock, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    hook = StageTimingHook()
    engine = Engine(clock)
    engine.register_hook(hook)
    engine.step((Stage.SET_UP, 1.0), (Stage.PROPOSE, 1.0), (Stage.ACCEPT, 1.0))
    engine.step((Stage.SET_UP, 1.0))
    hook.close()
    assert calls == ["SET_UP", "pop", "PROPOSE", "pop", "SET_UP", "pop"]


def test_events_of_a_device_are_read_later_and_give_the_same_statistics(clock, monkeypatch):
    class Event:
        waited = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def synchronize(self):
            Event.waited += 1

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    hook = StageTimingHook("step", timer_backend="cuda_event", enable_nvtx=False, stage=Stage.PROPOSE)
    engine = Engine(clock)
    engine.register_hook(hook)
    walk(engine, [5.0, 1.0, 3.0])
    assert Event.waited == 0
    row = hook.summary()["step"]
    assert (row["n"], row["mean"], row["warmup"]) == (2, pytest.approx(2.0), pytest.approx(5.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profiled_stages": "everything"}, "everything"),
        ({"profiled_stages": {Stage.PROPOSE}}, "two or more stages of one type"),
        ({"profiled_stages": {Stage.PROPOSE, TrainingStage.SETUP}}, "two or more stages of one type"),
        ({"timer_backend": "sundial"}, "timer_backend"),
        ({"timer_backend": "cuda_event"}, "needs CUDA"),
        ({"console_frequency": 0}, "console_frequency"),
    ],
)
def test_wrong_arguments(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ValueError, TypeError), match=message):  # in the tests annotations are checked first
        StageTimingHook(**arguments)
