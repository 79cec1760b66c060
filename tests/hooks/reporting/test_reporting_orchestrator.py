"""When reports are made, to whom, and what happens when a reporter fails."""

import logging

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, DynamicsStage
from nvalchemi.dynamics.hooks import SafetyHook
from nvalchemi.dynamics.inflight import SizeAwareSampler
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.hooks import HTMLReporter, Reporter, ReportingOrchestrator
from nvalchemi.hooks.reporting.rates import Budget
from nvalchemi.hooks.reporting.structures import StructureLog


class Broken:
    def __init__(self, error=None):
        self.error, self.calls = error or OSError("disk full"), 0

    def report(self, ctx, stage, state):
        self.calls += 1
        raise self.error


class Doors:
    """Notes how it was opened and closed."""

    def __init__(self):
        self.log = []

    def __enter__(self):
        self.log.append("open")
        return self

    def report(self, ctx, stage, state):
        self.log.append(state.step)

    def __exit__(self, kind, error, traceback):
        self.log.append(kind)


def test_reports_at_the_steps_that_the_frequency_says(batch, argon, recorder):
    engine = NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([recorder], frequency=5)])
    engine.run(batch, n_steps=12)
    assert [state.step for state in recorder.states] == [1, 6, 11]
    assert set(recorder.stages) == {DynamicsStage.AFTER_STEP}
    assert [state.progress.done for state in recorder.states] == [1, 6, 11]
    assert recorder.states[-1].progress.total == 12


def test_a_run_opens_the_reporters_and_closes_them(batch, argon):
    doors = Doors()
    engine = NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([doors])])
    engine.run(batch, n_steps=2)
    engine.run(batch, n_steps=1)
    assert doors.log == ["open", 1, 2, None, "open", 3, None]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bad step")])
def test_reporters_are_told_what_ended_the_run(batch, argon, error):
    class Stop:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            raise error

    doors = Doors()
    engine = NVE(argon, dt=1.0, hooks=[Stop(), ReportingOrchestrator([doors])])
    with pytest.raises(type(error)):
        engine.run(batch, n_steps=2)
    assert doors.log == ["open", type(error)]


def test_an_error_of_a_reporter_ends_the_run_and_names_it(batch, argon):
    engine = NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([Broken()])])
    with pytest.raises(OSError, match="disk full") as caught:
        engine.run(batch, n_steps=2)
    assert "raised by reporter Broken" in caught.value.__notes__


def test_or_is_a_warning_and_the_others_go_on(batch, argon, recorder):
    broken = Broken()
    engine = NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([broken, recorder], error_policy="warn")])
    with pytest.warns(UserWarning, match="reporter Broken failed: .*disk full"):
        engine.run(batch, n_steps=2)
    assert broken.calls == len(recorder.states) == 2


def test_or_is_only_logged(batch, argon, recorder, caplog):
    engine = NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([Broken(), recorder], error_policy="ignore")])
    with caplog.at_level(logging.INFO):
        engine.run(batch, n_steps=2)
    assert len(recorder.states) == 2
    assert "reporter Broken failed" in caplog.text


def test_no_policy_holds_back_an_interrupt(batch, argon):
    orchestrator = ReportingOrchestrator([Broken(KeyboardInterrupt())], error_policy="ignore")
    with pytest.raises(KeyboardInterrupt):
        NVE(argon, dt=1.0, hooks=[orchestrator]).run(batch, n_steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"error_policy": "panic"}, "error_policy must be 'raise', 'warn' or 'ignore'"),
        ({"ranks": "all"}, "ranks must be 'zero' or 'mean'"),
        ({"stages": set()}, "stages must be a set of names"),
        ({"stages": "AFTER_STEP"}, "stages must be a set of names"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(recorder, arguments, message):
    with pytest.raises(ValueError, match=message):
        ReportingOrchestrator([recorder], **arguments)
    with pytest.raises(TypeError):
        ReportingOrchestrator([object()])


def test_a_plain_class_is_a_reporter(recorder):
    assert isinstance(recorder, Reporter)
    assert not isinstance(object(), Reporter)


def test_only_rank_zero_reports(batch, argon, recorder):
    engine = NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([recorder])])
    engine.global_rank = 1
    engine.run(batch, n_steps=2)
    assert recorder.states == []


def test_all_reports_are_made_unless_every_reporter_can_do_without(recorder):
    assert ReportingOrchestrator([recorder, HTMLReporter("a.html")])._needs_every_report
    assert ReportingOrchestrator([HTMLReporter("a.html")], ranks="mean")._needs_every_report
    assert not ReportingOrchestrator([HTMLReporter("a.html")])._needs_every_report


def test_reports_stay_at_one_percent_of_a_long_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nvalchemi.hooks.reporting.rates.time.perf_counter", lambda: now[0])
    budget, made = Budget(), 0
    budget.restart()
    for step in range(100_000):
        now[0] += 0.001  # a step
        if budget.begin(needed=False):
            now[0] += 0.001  # a report
            budget.end()
            made += 1
        assert step > 490 or made == step + 1  # a short run has all of them
    # The stride is a power of two: at most twice as long as it need be.
    assert 0.5 + 0.005 * now[0] < 0.001 * made < 0.55 + 0.01 * now[0]
    assert budget.begin(needed=True)


# ---------------------------------------------------------------------- structures
def relax(batch, argon, recorder, **options):
    orchestrator = ReportingOrchestrator([recorder], frequency=10)
    engine = FIRE(argon, dt=1.0, hooks=[orchestrator], convergence_hook=ConvergenceHook.from_fmax(0.01))
    engine.run(batch, **options)
    return list(orchestrator.structures)


def test_structures_are_followed_from_their_first_to_their_last_values(batch, argon, recorder):
    alone = Batch.from_data_list(batch.to_data_list())
    NVE(argon, dt=1.0).run(alone, n_steps=0)
    records = relax(batch, argon, recorder, n_steps=200)
    assert [record.status for record in records] == ["converged"] * 3
    assert [record.name for record in records] == ["argon-0", "argon-1", "argon-2"]
    assert [record.formula for record in records] == ["Ar4", "Ar8", "Ar4"]
    assert [record.steps for record in records] == batch.system_step[:, 0].tolist()
    for k, record in enumerate(records):
        assert record.before["energy"] == pytest.approx(float(alone.energy[k]))
        assert record.after["energy"] == float(batch.energy[k])
        assert record.before["fmax"] > 0.01 >= record.after["fmax"]


def test_those_that_ran_out_of_steps_have_not_converged(batch, argon, recorder):
    records = relax(batch, argon, recorder, n_steps=3)
    assert [record.status for record in records] == ["not converged"] * 3
    assert [record.steps for record in records] == [3, 3, 3]


def test_dynamics_is_done_and_goes_on(batch, argon, recorder):
    orchestrator = ReportingOrchestrator([recorder])
    engine = NVE(argon, dt=1.0, hooks=[orchestrator])
    engine.run(batch, n_steps=2)
    assert [record.status for record in orchestrator.structures] == ["done"] * 3
    engine.run(batch, n_steps=2)
    assert [record.steps for record in orchestrator.structures] == [4, 4, 4]
    assert len(orchestrator.structures) == 3


def test_in_flight_every_structure_is_accounted_for_also_those_that_fail(crystals, argon, recorder):
    structures = crystals(1, 2, 1, 2, 1, 1)
    structures[2].positions[0] = structures[2].positions[1]  # two atoms at one place
    structures[4].positions[0, 0] = torch.nan  # cannot even enter
    orchestrator = ReportingOrchestrator([recorder], frequency=7)
    engine = FIRE(
        argon,
        dt=1.0,
        n_steps=300,
        hooks=[SafetyHook(max_force=10.0), orchestrator],
        convergence_hook=ConvergenceHook.from_fmax(0.01),
        sampler=SizeAwareSampler(structures, max_atoms=12),
        sinks=HostMemory(10),
    )
    engine.run()
    records = {record.system_id: record for record in orchestrator.structures}
    assert sorted(records) == [0, 1, 2, 3, 4, 5]
    assert {i: record.status for i, record in records.items()} == {
        i: "failed" if i in (2, 4) else "converged" for i in range(6)
    }
    assert "energy is not finite" in records[2].reason
    assert "positions are not finite" in records[4].reason
    out = engine.sinks[0].read()
    energies = dict(zip(out.system_id[:, 0].tolist(), out.energy[:, 0].tolist(), strict=True))
    assert all(records[i].after["energy"] == energies[i] for i in (0, 1, 3, 5))
    assert recorder.states[-1].progress.unit == "structure"
    assert recorder.states[-1].progress.total == 6


def test_a_fused_stage_is_reported_on_as_one(batch, argon, recorder):
    relaxing = FIRE(argon, dt=1.0, convergence_hook=ConvergenceHook.from_fmax(0.02))
    moving = NVE(argon, dt=1.0, n_steps=5)
    fused = relaxing + moving
    orchestrator = ReportingOrchestrator([recorder], frequency=3)
    fused.register_hook(orchestrator)
    fused.run(batch, n_steps=200)
    assert [record.steps for record in orchestrator.structures] == batch.system_step[:, 0].tolist()
    assert {record.status for record in orchestrator.structures} == {"converged"}
    assert sum(type(hook).__name__ == "RunWatch" for hook in fused.hooks) == 1


def test_structures_that_were_finished_before_are_not_taken_for_unconverged(batch, argon, recorder):
    batch.status = torch.tensor([[0], [1], [-1]])
    records = relax(batch, argon, recorder, n_steps=2)
    assert [record.status for record in records] == ["not converged", "done", "failed"]


def test_names_given_by_the_caller_come_first(batch, argon, recorder):
    orchestrator = ReportingOrchestrator([recorder], names=["a", "b"])
    NVE(argon, dt=1.0, hooks=[orchestrator]).run(batch, n_steps=1)
    assert [record.name for record in orchestrator.structures] == ["a", "b", "argon-2"]


def test_an_empty_log_has_no_records():
    assert list(StructureLog()) == []
