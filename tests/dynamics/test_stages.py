"""The loop drawn in DynamicsStage is the loop that runs."""

import re

from nvalchemi.dynamics import ConvergenceHook, DemoDynamics, DynamicsStage


class Recorder:
    frequency, stage = 1, None

    def __init__(self):
        self.log = []

    def _runs_on_stage(self, stage):
        return True

    def __call__(self, ctx, stage):
        self.log.append(stage.name)


class Traced(DemoDynamics):
    """Writes the names of its own phases into the log of the recorder."""

    log: list

    def pre_update(self, batch):
        self.log.append("pre_update")
        super().pre_update(batch)

    def compute(self, batch):
        self.log.append("compute")
        super().compute(batch)

    def post_update(self, batch):
        self.log.append("post_update")
        super().post_update(batch)


def _drawing() -> list[str]:
    words = r"^\s+((?:ON|BEFORE|AFTER)_\w+|pre_update|compute|post_update)\b"
    return re.findall(words, DynamicsStage.__doc__, flags=re.MULTILINE)


def test_order_drawn_is_the_order_run(well, atoms_in_wells):
    recorder = Recorder()
    engine = Traced(well, n_steps=1, hooks=[recorder], convergence_hook=ConvergenceHook.from_fmax(1e6))
    engine.log = recorder.log
    engine.run(atoms_in_wells())
    assert recorder.log == _drawing()
    assert set(recorder.log) > {stage.name for stage in DynamicsStage}


def test_values_ascend_in_that_order():
    drawn = [DynamicsStage[name].value for name in _drawing() if name in DynamicsStage.__members__]
    assert drawn == sorted(drawn) == list(range(-1, 10))


def test_stages_are_dictionary_keys_and_survive_pickling():
    import copy
    import pickle

    for stage in DynamicsStage:
        assert pickle.loads(pickle.dumps(stage)) is stage
        assert {stage: 1}[copy.deepcopy(stage)] == 1
