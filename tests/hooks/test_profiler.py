"""Traces of the PyTorch profiler."""

import json
from enum import Enum

import pytest
import torch
from torch.profiler import ProfilerActivity, schedule

from nvalchemi.dynamics import DynamicsStage
from nvalchemi.hooks import HookContext, HookRegistryMixin, TorchProfilerHook
from nvalchemi.training import TrainingStage

QUICK = {"activities": ["cpu"], "record_shapes": False, "profile_memory": False, "with_flops": False}

seen_by_callback: list[object] = []


def remember(profiler):
    seen_by_callback.append(profiler)


class Stage(Enum):
    THINK = 0
    ACT = 1


class Engine(HookRegistryMixin):
    _stage_type = Stage

    def __init__(self, rank=0):
        self.step_count, self.rank = 0, rank

    def _build_context(self, batch):
        return HookContext(batch=batch, workflow=self, global_rank=self.rank)

    def step(self):
        self._call_hooks(Stage.THINK, None)
        torch.ones(3).cumprod(0)
        self._call_hooks(Stage.ACT, None)
        self.step_count += 1


class Fail:
    frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

    def __call__(self, ctx, stage):
        if ctx.step_count == 1:
            raise RuntimeError("blown up")


def operations(path):
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]


def test_a_run_leaves_one_trace_of_all_of_it_and_a_further_run_another(dimers, argon_dynamics, tmp_path):
    engine = argon_dynamics([TorchProfilerHook(tmp_path / "traces", **QUICK)])
    batch = dimers()
    engine.run(batch, 2)
    engine.run(batch, 1)
    files = sorted((tmp_path / "traces").rglob("*"))
    folder = tmp_path / "traces" / "rank_0"
    assert files == [folder, folder / "torch_0.pt.trace.json", folder / "torch_1.pt.trace.json"]
    assert operations(files[1]).count("aten::addcmul_") == 6  # two kicks and a drift, two steps
    assert operations(files[2]).count("aten::addcmul_") == 3


def test_schedule_counts_steps_of_the_engine_and_each_cycle_is_a_trace(dimers, argon_dynamics, tmp_path):
    hook = TorchProfilerHook(tmp_path, schedule=schedule(wait=1, warmup=1, active=2, repeat=2), **QUICK)
    argon_dynamics([hook]).run(dimers(), 9)
    files = sorted((tmp_path / "rank_0").iterdir())
    assert len(files) == 2
    assert {n for n in operations(files[0]) if n.startswith("ProfilerStep")} == {
        "ProfilerStep#2",
        "ProfilerStep#3",
    }


def test_a_crash_leaves_a_readable_trace_and_a_profiler_that_can_start_again(
    dimers, argon_dynamics, tmp_path
):
    hook = TorchProfilerHook(tmp_path, **QUICK)
    with pytest.raises(RuntimeError, match="blown up"):
        argon_dynamics([hook, Fail()]).run(dimers(), 9)
    assert "aten::addcmul_" in operations(tmp_path / "rank_0" / "torch_0.pt.trace.json")
    argon_dynamics([hook]).run(dimers(), 1)
    assert (tmp_path / "rank_0" / "torch_1.pt.trace.json").exists()


def test_an_engine_with_stages_of_its_own_that_opens_no_hooks(tmp_path):
    hook = TorchProfilerHook(tmp_path, name="think", **QUICK)
    engine = Engine(rank=3)
    engine.register_hook(hook)
    for _ in range(2):
        engine.step()
    hook.close()
    assert operations(tmp_path / "rank_3" / "think_0.pt.trace.json").count("aten::cumprod") == 2


def test_rank_in_the_file_name_instead_of_a_folder(tmp_path):
    hook = TorchProfilerHook(tmp_path, rank_subdirs=False, **QUICK)
    engine = Engine(rank=1)
    engine.register_hook(hook)
    engine.step()
    hook.close()
    assert [path.name for path in tmp_path.iterdir()] == ["torch_rank1_0.pt.trace.json"]


def test_function_called_with_the_profiler_after_the_trace_is_written(tmp_path, monkeypatch):
    seen_by_callback.clear()
    monkeypatch.setattr(
        "nvalchemi.hooks.profiler.pkgutil.resolve_name", {"here:remember": remember}.__getitem__
    )
    hook = TorchProfilerHook(tmp_path, on_trace_ready_path="here:remember", **QUICK)
    with hook:
        torch.ones(3).cumprod(0)
    (profiler,) = seen_by_callback
    assert "aten::cumprod" in [event.key for event in profiler.key_averages()]


def test_moves_on_at_the_end_of_steps_and_batches_only():
    hook = TorchProfilerHook("unused")
    assert [s.name for s in DynamicsStage if hook._runs_on_stage(s)] == ["BEFORE_STEP", "AFTER_STEP"]
    assert [s.name for s in TrainingStage if hook._runs_on_stage(s)] == ["BEFORE_BATCH", "AFTER_BATCH"]
    assert [s.name for s in Stage if hook._runs_on_stage(s)] == ["THINK", "ACT"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activities": ["gpu"]}, "unknown profiler activity 'gpu'.*CPU"),
        ({"on_trace_ready_path": "no_such_package:f"}, "no_such_package:f.*cannot be imported"),
        ({"on_trace_ready_path": "math:pi"}, "is a float, no function"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TorchProfilerHook("unused", **arguments)


def test_activities_by_name_or_member():
    hook = TorchProfilerHook("unused", activities=["cpu", ProfilerActivity.CUDA])
    assert hook._options["activities"] == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
