"""Orders of the package's own hooks that cannot be meant, and those that can."""

import warnings

import pytest
import torch

from nvalchemi.dynamics import NVE, DynamicsStage
from nvalchemi.dynamics.hooks import (
    AlignCellHook,
    EnergyDriftMonitorHook,
    FreezeAtomsHook,
    LoggingHook,
    MaxForceClampHook,
    NaNDetectorHook,
    SnapshotHook,
    StageTimingHook,
    TorchProfilerHook,
)
from nvalchemi.dynamics.sinks import ExtxyzTrajectory
from nvalchemi.hooks import BiasedPotentialHook, HookOrderWarning, NeighborListHook, WrapPeriodicHook

COMPUTED, BEFORE = DynamicsStage.AFTER_COMPUTE, DynamicsStage.BEFORE_COMPUTE


def bias():
    return BiasedPotentialHook(lambda batch: (torch.zeros_like(batch.energy), torch.zeros_like(batch.forces)))


def neighbors(model):
    return NeighborListHook(model.model_config.neighbor_config)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (lambda m: MaxForceClampHook(1.0), lambda m: bias()),
        (lambda m: NaNDetectorHook(), lambda m: bias()),
        (lambda m: FreezeAtomsHook(indices=[0]), lambda m: bias()),
        (lambda m: LoggingHook(stage=COMPUTED), lambda m: bias()),
        (lambda m: SnapshotHook(ExtxyzTrajectory("t.xyz"), stage=COMPUTED), lambda m: bias()),
        (lambda m: EnergyDriftMonitorHook(1.0, stage=COMPUTED), lambda m: bias()),
        (lambda m: LoggingHook(stage=COMPUTED), lambda m: MaxForceClampHook(1.0)),
        (
            lambda m: SnapshotHook(ExtxyzTrajectory("t.xyz")),
            lambda m: WrapPeriodicHook(stage=DynamicsStage.AFTER_STEP),
        ),
        (lambda m: neighbors(m), lambda m: WrapPeriodicHook(stage=BEFORE)),
    ],
)
def test_order_that_cannot_be_meant_is_questioned_and_the_reverse_is_not(argon, earlier, later):
    first, second = earlier(argon), later(argon)
    engine = NVE(argon, dt=1.0, hooks=[first])
    names = f"{type(first).__name__} is registered before {type(second).__name__}"
    with pytest.warns(HookOrderWarning, match=names):
        engine.register_hook(second)
    NVE(argon, dt=1.0, hooks=[later(argon), earlier(argon)])


def test_all_hooks_in_the_order_of_the_loop_are_not_questioned_and_described_stage_by_stage(argon):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = NVE(
            argon,
            dt=1.0,
            hooks=[
                StageTimingHook("step"),
                TorchProfilerHook("traces"),
                AlignCellHook(),
                bias(),
                MaxForceClampHook(10.0),
                FreezeAtomsHook(indices=[0]),
                NaNDetectorHook(),
                WrapPeriodicHook(frequency=10),
                EnergyDriftMonitorHook(1.0),
                LoggingHook(frequency=100),
                SnapshotHook(ExtxyzTrajectory("t.xyz"), frequency=1000),
            ],
        )
    table = [line.split() for line in engine.describe_hooks().splitlines()[1:]]
    assert [(stage, hook, frequency) for stage, _, hook, frequency in table] == [
        ("ON_ADMISSION", "FreezeAtomsHook", "-"),
        ("BEFORE_STEP", "StageTimingHook", "1"),
        ("BEFORE_STEP", "TorchProfilerHook", "1"),
        ("BEFORE_STEP", "AlignCellHook", "1"),
        ("BEFORE_STEP", "FreezeAtomsHook", "1"),
        ("BEFORE_COMPUTE", "NeighborListHook", "1"),
        ("AFTER_COMPUTE", "BiasedPotentialHook", "1"),
        ("AFTER_COMPUTE", "MaxForceClampHook", "1"),
        ("AFTER_COMPUTE", "FreezeAtomsHook", "1"),
        ("AFTER_COMPUTE", "NaNDetectorHook", "1"),
        ("AFTER_POST_UPDATE", "WrapPeriodicHook", "10"),
        ("AFTER_STEP", "StageTimingHook", "1"),
        ("AFTER_STEP", "TorchProfilerHook", "1"),
        ("AFTER_STEP", "EnergyDriftMonitorHook", "1"),
        ("AFTER_STEP", "LoggingHook", "100"),
        ("AFTER_STEP", "SnapshotHook", "1000"),
        ("ON_GRADUATE", "LastSnapshotHook", "1"),
    ]
