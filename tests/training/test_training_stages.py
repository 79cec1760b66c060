"""The loop drawn in the docstring of TrainingStage is the loop that runs."""

import re

from nvalchemi.training import TrainingStage, ValidationConfig

ORDER = [
    "SETUP", "BEFORE_TRAINING", "BEFORE_EPOCH", "BEFORE_BATCH", "BEFORE_FORWARD", "AFTER_FORWARD", "BEFORE_LOSS",
    "AFTER_LOSS", "BEFORE_BACKWARD", "DO_BACKWARD", "AFTER_BACKWARD", "BEFORE_OPTIMIZER_STEP", "DO_OPTIMIZER_STEP",
    "AFTER_OPTIMIZER_STEP", "AFTER_BATCH", "AFTER_EPOCH", "AFTER_TRAINING", "AFTER_VALIDATION",
]  # fmt: skip


class Recorder:
    """Notes every stage; at the slots it does what it replaces."""

    frequency, stage = 1, None

    def __init__(self):
        self.seen = []

    def _runs_on_stage(self, stage):
        return True

    def __call__(self, ctx, stage):
        self.seen.append(stage.name)
        if stage is TrainingStage.DO_BACKWARD:
            ctx.loss.backward()
        if stage is TrainingStage.DO_OPTIMIZER_STEP:
            for optimizer in ctx.optimizers:
                optimizer.step()


def drawn():
    drawing = TrainingStage.__doc__.split("::", 1)[1].split("``DO_BACKWARD``", 1)[0]
    return re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\bSETUP\b", drawing)


def test_stages_are_those_of_the_contract_in_that_order():
    assert [stage.name for stage in TrainingStage] == ORDER


def test_drawn_order_is_the_order_run_with_validation_by_epoch_and_by_step(toys):
    by_step, by_epoch = Recorder(), Recorder()
    data = [toys.batch_of(1.0)]
    toys.slope_strategy([by_epoch], validation_config=ValidationConfig(validation_data=data)).run(data)
    toys.slope_strategy(
        [by_step], validation_config=ValidationConfig(validation_data=data, every_n_steps=1)
    ).run(data)
    both = drawn()
    first, second = (i for i, name in enumerate(both) if name == "AFTER_VALIDATION")
    assert by_step.seen == both[:second] + both[second + 1 :]
    assert by_epoch.seen == both[:first] + both[first + 1 :]


def test_every_batch_and_epoch_goes_through_the_same_stages(toys):
    recorder = Recorder()
    toys.slope_strategy([recorder], num_epochs=2).run([toys.batch_of(1.0), toys.batch_of(2.0)])
    batch = ORDER[ORDER.index("BEFORE_BATCH") : ORDER.index("AFTER_BATCH") + 1]
    epoch = ["BEFORE_EPOCH", *batch, *batch, "AFTER_EPOCH"]
    assert recorder.seen == ["SETUP", "BEFORE_TRAINING", *epoch, *epoch, "AFTER_TRAINING"]


def test_training_that_ends_by_steps_inside_an_epoch_leaves_it_open(toys):
    recorder = Recorder()
    strategy = toys.slope_strategy([recorder], num_epochs=None, num_steps=1)
    strategy.run([toys.batch_of(1.0), toys.batch_of(2.0)])
    assert "AFTER_EPOCH" not in recorder.seen
    assert (strategy.step_count, strategy.epoch_count, strategy.position.batches) == (1, 0, 1)
