"""A run that is asked to stop ends behind the step under way, and can be gone on with."""

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.dynamics import NVE, DynamicsStage, FusedStage, NVTLangevin, SizeAwareSampler
from nvalchemi.dynamics.sinks import HostMemory
from nvalchemi.models.lj import LennardJonesModelWrapper


class StopAt:
    """Ask for a stop in the middle of the step of that number (the first is 1)."""

    frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

    def __init__(self, step):
        self.step = step

    def __call__(self, ctx, stage):
        if ctx.step_count == self.step - 1:
            ctx.workflow.request_stop()


def chains():
    """Six chains of 1 to 6 atoms of argon."""
    data = []
    for n in range(1, 7):
        positions = torch.zeros(n, 3, dtype=torch.float64)
        positions[:, 0] = (3.5 + 0.1 * n) * torch.arange(n)
        data.append(AtomicData(positions=positions, atomic_numbers=torch.full((n,), 18)))
    return data


def engine(**options):
    argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    return NVTLangevin(argon, 2.0, 20.0, 0.01, **options)


def test_run_ends_behind_the_step_and_the_next_run_is_not_stopped():
    batch = Batch.from_data_list(chains())
    dynamics = engine(hooks=[StopAt(4)])
    dynamics.run(batch, n_steps=10)
    assert batch.system_step.unique().tolist() == [4]
    dynamics.run(batch, n_steps=6)
    expected = Batch.from_data_list(chains())
    engine().run(expected, n_steps=10)
    assert torch.equal(batch.positions, expected.positions)


def test_stopped_run_is_saved_at_that_step_and_gone_on_with_to_the_bit():
    expected = Batch.from_data_list(chains())
    engine().run(expected, n_steps=20)
    batch = Batch.from_data_list(chains())
    engine(hooks=[StopAt(7)]).run(batch, n_steps=20, restart="run.restart", save_every=1000)
    assert batch.system_step.unique().tolist() == [7]
    again = Batch.from_data_list(chains())
    engine().run(again, n_steps=20, restart="run.restart")
    assert again.system_step.unique().tolist() == [20]
    for name in ("positions", "velocities", "forces", "energy"):
        assert torch.equal(again[name], expected[name])


@pytest.mark.parametrize("step", [7, 15, 16])  # after 15 steps the first two leave and others enter
def test_in_flight_no_structure_is_lost_or_other_than_without_the_stop(step):
    def in_flight(hooks=()):
        sink = HostMemory()
        sampler = SizeAwareSampler(chains(), max_batch_size=2)
        return engine(n_steps=15, sampler=sampler, sinks=sink, hooks=hooks), sink

    whole, expected = in_flight()
    whole.run()
    stopped, _ = in_flight([StopAt(step)])
    stopped.run(restart="run.restart", save_every=1000)
    assert stopped.step_count == step
    resumed, sink = in_flight()
    resumed.run(restart="run.restart")
    found, wanted = sink.read(), expected.read()
    assert sorted(found.system_id[:, 0].tolist()) == list(range(6))
    for i in range(6):
        a, b = (each[int((each.system_id[:, 0] == i).nonzero())] for each in (found, wanted))
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.velocities, b.velocities)


@pytest.mark.parametrize("step", [4, 10, 13])
def test_stop_holds_for_later_runs_with_the_file_and_the_program_repeated_makes_every_step(step):
    def program(batch, hooks=(), restart=None):
        dynamics = engine(hooks=hooks)
        for n_steps in (10, 30):
            dynamics.run(batch, n_steps, restart=restart, save_every=3)
        return batch.system_step.unique().tolist()

    expected, stopped, again = (Batch.from_data_list(chains()) for _ in range(3))
    program(expected)
    assert program(stopped, [StopAt(step)], "run.restart") == [step]
    assert program(again, (), "run.restart") == [40]
    assert torch.equal(again.positions, expected.positions)
    assert torch.equal(again.velocities, expected.velocities)


def test_engine_of_a_fused_stage_stops_that():
    batch = Batch.from_data_list(chains())
    argon = LennardJonesModelWrapper(epsilon=0.0104, sigma=3.40, cutoff=8.5)
    stages = [NVE(argon, 1.0, n_steps=20, hooks=[StopAt(5)]), NVE(argon, 1.0, n_steps=20)]
    fused = FusedStage(stages)
    fused.run(batch)
    assert batch.system_step.unique().tolist() == [5]
    fused.run(batch)
    assert batch.system_step.unique().tolist() == [40]


def test_request_that_no_run_has_heard_does_not_stop_the_next_one():
    class Fail(StopAt):
        def __call__(self, ctx, stage):
            if ctx.step_count == self.step - 1:
                raise RuntimeError("too hot")

    batch = Batch.from_data_list(chains())
    dynamics = engine(hooks=[StopAt(2), StopAt(5), Fail(5)])
    for _ in range(3):
        dynamics.step(batch)
    dynamics.run(batch, n_steps=1)
    assert batch.system_step.unique().tolist() == [4]
    with pytest.raises(RuntimeError, match="too hot"):
        dynamics.run(batch, n_steps=3)
    for hook in list(dynamics.hooks[:3]):
        dynamics.remove_hook(hook)
    dynamics.run(batch, n_steps=3)
    assert batch.system_step.unique().tolist() == [7]
