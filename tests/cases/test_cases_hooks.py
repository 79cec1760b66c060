"""Cases from the field: hooks within a run."""

import pytest
import torch

from nvalchemi import units
from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, DynamicsStage
from nvalchemi.dynamics.hooks import EnergyDriftMonitorHook, MaxForceClampHook
from nvalchemi.hooks import BiasedPotentialHook, DynamicsContext


class Act:
    """A hook that does something and remembers when."""

    def __init__(self, stage, act=lambda ctx: None, frequency=1):
        self.stage, self.act, self.frequency = stage, act, frequency
        self.steps, self.closed_at = [], None

    def __call__(self, ctx, stage):
        self.steps.append(ctx.step_count)
        self.act(ctx)

    def close(self):
        self.closed_at = len(self.steps)


def test_frequency_three_goes_on_across_runs(argon, crystal, join):
    batch, hook = join(crystal()), Act(DynamicsStage.AFTER_STEP, frequency=3)
    engine = NVE(argon, 1.0, hooks=[hook])
    for n_steps in (4, 0, 1, 5):
        engine.run(batch, n_steps)
    assert hook.steps == [0, 3, 6, 9]


def test_hook_removed_by_an_earlier_one_of_its_stage_is_closed_and_not_called_any_more(argon, crystal, join):
    later = Act(DynamicsStage.AFTER_STEP)

    def remove(ctx):
        if ctx.step_count == 2:
            ctx.workflow.remove_hook(later)

    NVE(argon, 1.0, hooks=[Act(DynamicsStage.AFTER_STEP, remove), later]).run(join(crystal()), 5)
    assert later.steps == [0, 1]
    assert later.closed_at == 2


def test_hook_added_during_a_stage_fires_from_the_next_time_on(argon, crystal, join):
    late = Act(DynamicsStage.AFTER_STEP)

    def add(ctx):
        if ctx.step_count == 1:
            ctx.workflow.register_hook(late)

    NVE(argon, 1.0, hooks=[Act(DynamicsStage.AFTER_STEP, add)]).run(join(crystal()), 4)
    assert late.steps == [2, 3]
    assert late.closed_at == 2


def test_drift_of_a_structure_that_is_done_is_not_reported_and_that_of_an_active_one_is(argon, crystal, join):
    def disturb(graph):
        def act(ctx):
            if ctx.step_count == 2:
                ctx.batch.energy[graph] += 5.0

        batch = join(crystal(), crystal(seed=1))
        batch.status = torch.tensor([[1], [0]])
        hooks = [
            Act(DynamicsStage.AFTER_COMPUTE, act),
            EnergyDriftMonitorHook(0.5, metric="absolute", action="raise"),
        ]
        NVE(argon, 1.0, hooks=hooks).run(batch, 4)

    disturb(0)
    with pytest.raises(RuntimeError, match=r"in graphs \[1\] \(system_id \[1\]\)"):
        disturb(1)


def test_clamped_force_is_what_moves_the_atom(argon, chain, join):
    def push(batch):
        return torch.zeros_like(batch.energy), torch.tensor([[30.0, 40.0, 0.0]], dtype=torch.float64)

    batch = join(chain(1))
    NVE(argon, 2.0, hooks=[BiasedPotentialHook(push), MaxForceClampHook(5.0)]).run(batch, 1)
    impulse = batch.velocities[0] * batch.atomic_masses[0] / (2.0 * units.fs)
    torch.testing.assert_close(impulse, torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e200), (torch.float64, 10.0)]
)
def test_forces_whose_squares_overflow_are_clamped_and_not_lost(chain, join, dtype, size):
    batch = join(chain(3)).to(dtype=dtype)
    batch.forces = torch.tensor([[3 * size, 4 * size, 0], [0, 0, 0], [float("inf"), 0, 0]], dtype=dtype)
    hook = MaxForceClampHook(5.0)
    hook(DynamicsContext(batch=batch), DynamicsStage.AFTER_COMPUTE)
    torch.testing.assert_close(batch.forces[0], torch.tensor([3.0, 4.0, 0.0], dtype=dtype))
    assert not bool(batch.forces[1].any())
    assert not bool(batch.forces[2].isfinite().all())
    assert hook.num_clamped == 1


def test_structure_that_stays_active_after_it_converged_is_announced_once(argon, crystal, join):
    announced = Act(DynamicsStage.ON_CONVERGE)
    stop = ConvergenceHook.from_fmax(1.0, target_status=1)
    batch = join(crystal())
    FIRE(argon, hooks=[announced], convergence_hook=stop, exit_status=3).run(batch, 4)
    assert announced.steps == [0]
    assert batch.status.tolist() == [[1]]
    assert batch.system_step.tolist() == [[4]]


def test_error_in_a_hook_leaves_a_run_that_can_go_on(argon, crystal, join):
    def fail(ctx):
        if ctx.step_count == 2:
            raise KeyError("mine")

    batch, hook = join(crystal()), Act(DynamicsStage.BEFORE_STEP, fail)
    engine = NVE(argon, 1.0, hooks=[hook])
    with pytest.raises(KeyError, match="mine") as caught:
        engine.run(batch, 5)
    assert caught.value.__notes__ == ["raised by hook Act at stage BEFORE_STEP, step 2"]
    assert torch.is_grad_enabled()
    engine.remove_hook(hook)
    engine.run(batch, 3)
    whole = NVE(argon, 1.0).run(join(crystal()), 5)
    assert torch.equal(batch.positions, whole.positions)
