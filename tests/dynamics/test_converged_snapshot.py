"""ConvergedSnapshotHook: each structure is written once, when it converges."""

import pytest
import torch

from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook, DynamicsStage
from nvalchemi.dynamics.hooks import ConvergedSnapshotHook


class Memory:
    """Sink that keeps (ids, steps, positions) of what it is given."""

    def __init__(self):
        self.written, self.closed = [], 0

    def write(self, batch, mask=None):
        chosen = batch if mask is None else batch[mask]
        for data in chosen.to_data_list():
            self.written.append((data.system_id.item(), data.system_step.item(), data.positions.clone()))

    def close(self):
        self.closed += 1


def test_structures_are_written_once_in_the_state_in_which_they_converged(well, atoms_in_wells):
    batch = atoms_in_wells(count=4, displacement=0.3)
    batch.positions[2] *= 1e-6  # converged after the first step
    sink = Memory()
    hook = ConvergedSnapshotHook(sink)
    FIRE(well, hooks=[hook], convergence_hook=ConvergenceHook.from_fmax(0.01)).run(batch, 200)
    assert sorted(i for i, *_ in sink.written) == [0, 1, 2, 3]
    steps = {i: step for i, step, _ in sink.written}
    assert steps[2] == 1
    assert steps[2] < min(steps[i] for i in (0, 1, 3))
    for i, step, positions in sink.written:
        # What converged does not move any more.
        assert torch.equal(positions, batch.positions[i : i + 1])
        assert step == batch.system_step[i].item()
    assert sink.closed == 1


def test_structures_that_do_not_converge_are_not_written(well, atoms_in_wells):
    batch = atoms_in_wells(count=2)
    batch.positions[1] *= 1e-6
    sink = Memory()
    FIRE(well, hooks=[ConvergedSnapshotHook(sink)], convergence_hook=ConvergenceHook.from_fmax(0.001)).run(
        batch, 2
    )
    assert [i for i, *_ in sink.written] == [1]


def test_another_stage_is_an_error(well, atoms_in_wells):
    engine = NVE(well, dt=1.0)
    engine.register_hook(ConvergedSnapshotHook(Memory()), stage=DynamicsStage.AFTER_STEP)
    with pytest.raises(ValueError, match="works at ON_CONVERGE only, not at AFTER_STEP"):
        engine.run(atoms_in_wells(), 1)
