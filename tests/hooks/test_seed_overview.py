"""The overview of hooks, sentence by sentence."""

import dataclasses
from enum import Enum
from typing import Any

import pytest
import torch

import nvalchemi.dynamics.hooks
import nvalchemi.hooks
from nvalchemi.data import Batch
from nvalchemi.hooks import DynamicsContext, Hook, HookContext, HookRegistryMixin, WrapPeriodicHook
from nvalchemi.models.base import BaseModelMixin

IMPORTS = """
from nvalchemi.hooks import (
    BiasedPotentialHook,
    DynamicsContext,
    Hook,
    HookContext,
    HookRegistryMixin,
    NeighborListHook,
    WrapPeriodicHook,
)
from nvalchemi.dynamics.base import DynamicsStage
from nvalchemi.dynamics.hooks import (
    EnergyDriftMonitorHook,
    LoggingHook,
    MaxForceClampHook,
    NaNDetectorHook,
    SnapshotHook,
    StageTimingHook,
    TorchProfilerHook,
)
"""


class Stage(Enum):
    AFTER_POST_UPDATE = 0
    REPORT = 1


class Recorder:
    def __init__(self, stage, frequency=1):
        self.stage, self.frequency = stage, frequency
        self.contexts: list[HookContext] = []

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        self.contexts.append(ctx)


@pytest.fixture
def names():
    namespace: dict[str, Any] = {}
    exec(IMPORTS, namespace)
    return namespace


def test_every_import_line_works(names):
    assert names["StageTimingHook"] is nvalchemi.hooks.StageTimingHook
    assert names["TorchProfilerHook"] is nvalchemi.hooks.TorchProfilerHook


@pytest.mark.parametrize("module", [nvalchemi.hooks, nvalchemi.dynamics.hooks])
def test_what_a_module_offers_it_has(module):
    assert not set(module.__all__) - set(vars(module))


def test_hooks_fire_at_specific_points_of_each_step(names, dimers, argon_dynamics):
    stages = [s for s in names["DynamicsStage"] if "ON_" not in s.name]
    hooks = [Recorder(stage) for stage in stages]
    argon_dynamics(hooks).run(dimers(), 3)
    assert [[ctx.step_count for ctx in hook.contexts] for hook in hooks] == [[0, 1, 2]] * 8


def test_hooks_modify_batch_state_without_changing_the_engine(names, dimers, argon_dynamics):
    def push(batch):
        forces = torch.zeros_like(batch.forces)
        forces[:, 1] = 0.1
        return torch.zeros_like(batch.energy), forces

    batch = dimers()
    argon_dynamics([names["BiasedPotentialHook"](push)]).run(batch, 3)
    assert (batch.positions[:, 1] > 0).all()


def test_the_same_protocol_works_for_dynamics_and_custom_pipelines(dimers, argon_dynamics):
    """A custom engine passes HookContext or a context of its own; the very same hook object runs in both."""

    @dataclasses.dataclass(kw_only=True)
    class PipelineContext(HookContext):
        progress: float = 0.0

    class Pipeline(HookRegistryMixin):
        _stage_type, step_count = Stage, 0

        def __init__(self, context):
            self.context = context

        def _build_context(self, batch):
            return self.context(batch=batch, workflow=self)

        def step(self, batch):
            for stage in Stage:
                self._call_hooks(stage, batch)

    batch = dimers()
    batch.cell = 5 * torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    batch.pbc = torch.ones(2, 3, dtype=torch.bool)
    batch.positions[0, 0] = 6.0
    for context in (HookContext, PipelineContext):
        engine, recorder = Pipeline(context), Recorder(Stage.REPORT)
        engine.register_hook(WrapPeriodicHook())
        engine.register_hook(recorder)
        engine.step(batch)
        assert type(recorder.contexts[0]) is context
        assert recorder.contexts[0].workflow is engine
    assert batch.positions[0, 0] == 1.0
    argon_dynamics([WrapPeriodicHook()])


def test_any_object_with_these_attributes_satisfies_the_protocol(names):
    class Plain:
        frequency: int = 1
        stage: Enum | None = None

        def __call__(self, ctx: HookContext, stage: Enum) -> None: ...

    assert isinstance(Plain(), Hook)
    assert not isinstance(object(), Hook)


def test_a_hook_fires_when_the_step_is_a_multiple_of_its_frequency_so_all_at_step_0(
    names, dimers, argon_dynamics
):
    hooks = [Recorder(names["DynamicsStage"].AFTER_STEP, frequency) for frequency in (1, 2, 5)]
    argon_dynamics(hooks).run(dimers(), 7)
    steps = [[ctx.step_count for ctx in hook.contexts] for hook in hooks]
    assert steps == [[0, 1, 2, 3, 4, 5, 6], [0, 2, 4, 6], [0, 5]]


def test_on_admission_fires_once_per_admission_whatever_the_frequency(names, dimers, argon_dynamics):
    hook = Recorder(names["DynamicsStage"].ON_ADMISSION, frequency=1000)
    engine = argon_dynamics([hook])
    engine.run(dimers(), 3)
    engine.run(dimers(), 3)
    assert [ctx.step_count for ctx in hook.contexts] == [0, 3]


@pytest.mark.parametrize(
    ("context", "fields"),
    [
        (HookContext, {"batch": ..., "model": None, "global_rank": 0, "workflow": None}),
        (
            DynamicsContext,
            {
                "batch": ...,
                "model": None,
                "global_rank": 0,
                "workflow": None,
                "step_count": 0,
                "converged_mask": None,
                "active_graph_mask": None,
                "graduated_mask": None,
            },
        ),
    ],
)
def test_contexts_are_keyword_only_dataclasses_with_these_fields_and_defaults(context, fields):
    given = {
        f.name: ... if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(context)
    }
    assert given | fields == given
    with pytest.raises(TypeError):
        context(None)


def test_a_dynamics_engine_passes_its_batch_model_rank_itself_and_the_step(names, dimers, argon_dynamics):
    hook = Recorder(names["DynamicsStage"].AFTER_COMPUTE)
    engine, batch = argon_dynamics([hook]), dimers()
    engine.run(batch, 2)
    ctx = hook.contexts[1]
    assert isinstance(ctx, DynamicsContext)
    assert isinstance(ctx.model, BaseModelMixin)
    assert isinstance(ctx.batch, Batch)
    assert (ctx.batch, ctx.model, ctx.workflow) == (batch, engine.model, engine)
    assert (ctx.global_rank, ctx.step_count, ctx.active_graph_mask) == (0, 1, None)


def test_graduated_mask_is_there_at_on_graduate_only(names, dimers, argon_dynamics):
    stages = names["DynamicsStage"]

    class Retire(Recorder):
        def __call__(self, ctx, stage):
            if ctx.step_count == 1:
                ctx.batch.status[0] = 1

    hooks = [Retire(stages.AFTER_COMPUTE), *(Recorder(stage) for stage in stages)]
    argon_dynamics(hooks).run(dimers(), 3)
    masks = {h.stage.name: [c.graduated_mask for c in h.contexts] for h in hooks[1:]}
    (graduated,) = masks.pop("ON_GRADUATE")
    assert graduated.tolist() == [True, False]
    assert all(mask is None for name in masks for mask in masks[name])
