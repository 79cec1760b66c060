"""TrainingStrategy: making, running, hooks, validation, bad input."""

import copy
import json
import math
from enum import Enum
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.hooks import HookContext, NeighborListHook, ReportingOrchestrator
from nvalchemi.models.base import ModelConfig, NeighborConfig
from nvalchemi.models.demo import DemoModelWrapper
from nvalchemi.training import (
    ConstantWeight,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    FineTuningStrategy,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    OptimizerConfig,
    StressHuberLoss,
    StressMSELoss,
    TrainContext,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)
from nvalchemi.training.hooks import (
    EarlyStoppingHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    ModulePatchHook,
    TrainableParameterHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
)

Stage = TrainingStage
SGD = OptimizerConfig(torch.optim.SGD, {"lr": 0.1})


class At:
    """Calls a function at one stage."""

    frequency = 1

    def __init__(self, stage, function, frequency=1):
        self.stage, self.function, self.frequency = stage, function, frequency

    def __call__(self, ctx, stage):
        self.function(ctx)


def module_level_loss(predictions, batch):
    return predictions["energy"].mean()


def module_level_training_fn(model, batch):
    return {"energy": 2.0 * model(batch)["energy"]}


# ---------------------------------------------------------------------- making
def test_end_is_given_by_exactly_one_of_epochs_and_steps(toys):
    for options in ({}, {"num_epochs": 1, "num_steps": 1}):
        with pytest.raises(ValidationError, match="exactly one of num_epochs and num_steps"):
            TrainingStrategy(toys.Slope(), SGD, toys.mean_energy, **options)
    for options in ({"num_epochs": 0}, {"num_steps": -1}, {"num_epochs": 1.5}, {"epochs": 3}):
        with pytest.raises((ValidationError, TypeError)):  # TypeError: by the type checker of the tests
            TrainingStrategy(toys.Slope(), SGD, toys.mean_energy, **options)


def test_models_optimizers_and_training_fn_must_fit(toys):
    two = {"teacher": toys.Slope(), "student": toys.Slope()}
    with pytest.raises(ValidationError, match="need a training_fn"):
        TrainingStrategy(two, {"student": SGD}, toys.mean_energy, num_epochs=1)
    with pytest.raises(ValidationError, match="say which of the models"):
        TrainingStrategy(two, SGD, toys.mean_energy, num_epochs=1, training_fn=module_level_training_fn)
    with pytest.raises(ValidationError, match=r"name \['pupil'\]; the models are \['student', 'teacher'\]"):
        TrainingStrategy(
            two, {"pupil": SGD}, toys.mean_energy, num_epochs=1, training_fn=module_level_training_fn
        )
    with pytest.raises(ValidationError, match="there is no model"):
        TrainingStrategy({}, {}, toys.mean_energy, num_epochs=1)
    with pytest.raises(ValidationError):
        TrainingStrategy("model", SGD, toys.mean_energy, num_epochs=1)


def test_optimizer_config_checks_arguments_when_made():
    for options in (
        {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"learning_rate": 0.1}},
        {"optimizer_cls": torch.optim.SGD, "scheduler_cls": torch.optim.lr_scheduler.StepLR},
        {"optimizer_cls": torch.optim.SGD, "scheduler_kwargs": {"step_size": 1}},
        {"optimizer_cls": torch.optim.LBFGS},
        {"optimizer_cls": int},
        {"optimizer_cls": "torch.optim.Nonsense"},
        {"optimizer_cls": torch.optim.SGD, "scheduler_metric_adapter": module_level_loss},
    ):
        with pytest.raises(ValidationError):
            OptimizerConfig(**options)


def test_optimizers_and_schedulers_of_torch_may_be_given_by_their_bare_names():
    config = OptimizerConfig("AdamW", {"lr": 0.1}, "StepLR", {"step_size": 1})
    assert config.optimizer_cls is torch.optim.AdamW
    assert config.scheduler_cls is torch.optim.lr_scheduler.StepLR
    assert OptimizerConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ValidationError, match=r"'torch\.optim\.Adamm'"):
        OptimizerConfig("Adamm")


@pytest.mark.parametrize("strategy_cls", [TrainingStrategy, FineTuningStrategy])
def test_one_hook_may_stand_for_the_list(toys, strategy_cls):
    for hook in (GradientClipHook(1.0), TrainingUpdateOrchestrator(EMAHook()), At(Stage.AFTER_BATCH, print)):
        strategy = strategy_cls(
            toys.Slope(), OptimizerConfig("SGD"), toys.mean_energy, num_epochs=1, hooks=hook
        )
        assert len(strategy.hooks) == 1
    for hooks, match in ((EMAHook, "hooks must be a list of hooks"), ([EMAHook], "EMAHook is a class")):
        with pytest.raises(TypeError, match=match):
            strategy_cls(toys.Slope(), OptimizerConfig("SGD"), toys.mean_energy, num_epochs=1, hooks=hooks)


@pytest.mark.parametrize("kind", ["name", "class", "optimizer"])
def test_optimizer_without_its_configuration_is_refused_with_what_to_write(toys, kind):
    model = toys.Slope()
    given = {"name": "SGD", "class": torch.optim.SGD, "optimizer": torch.optim.SGD(model.parameters())}[kind]
    with pytest.raises(ValidationError, match=r"give OptimizerConfig\(SGD, \{…\}\)"):
        TrainingStrategy(model, given, toys.mean_energy, num_epochs=1)


def test_loss_of_torch_is_refused_with_a_way_out(toys):
    with pytest.raises(ValidationError, match=r"torch's MSELoss.*EnergyMSELoss\(\)"):
        TrainingStrategy(toys.Slope(), OptimizerConfig("SGD"), nn.MSELoss(), num_epochs=1)


def test_optimizer_config_builds_optimizer_and_scheduler():
    kwargs = {"scheduler_cls": torch.optim.lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 3}}
    optimizer, scheduler = OptimizerConfig(torch.optim.AdamW, {"lr": 0.5}, **kwargs).build(
        [nn.Parameter(torch.ones(1))]
    )
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.AdamW, 0.5)
    assert (type(scheduler), scheduler.step_size) == (torch.optim.lr_scheduler.StepLR, 3)
    with pytest.raises(ValueError, match="no trainable parameters"):
        OptimizerConfig(torch.optim.AdamW).build([])


def test_optimizers_share_a_model_by_patterns_and_not_a_parameter():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = OptimizerConfig(torch.optim.SGD, {"lr": 1.0}, parameter_patterns=("0.*",))
    second = OptimizerConfig(torch.optim.Adam, {"lr": 2.0}, parameter_patterns=("1.*",))
    strategy = TrainingStrategy(model, [first, second], module_level_loss, num_epochs=1)
    strategy.setup()
    assert [len(o.param_groups[0]["params"]) for o in strategy.optimizers] == [2, 2]
    strategy = TrainingStrategy(model, [first, SGD], module_level_loss, num_epochs=1)
    with pytest.raises(ValueError, match=r"'0\.weight' of model 'main' is given to two optimizers"):
        strategy.setup()
    lost = OptimizerConfig(torch.optim.SGD, parameter_patterns=("nothing*",))
    with pytest.raises(ValueError, match="'nothing\\*' matches no trainable parameter"):
        TrainingStrategy(model, lost, module_level_loss, num_epochs=1).setup()


# ---------------------------------------------------------------------- running
def test_plain_run_equals_a_hand_written_loop_to_the_bit(toys):
    batches, loss_fn = toys.molecules(3), EnergyMSELoss() + 2.0 * ForceMSELoss()
    torch.manual_seed(0)
    model = DemoModelWrapper()
    reference = copy.deepcopy(model)
    config = OptimizerConfig(
        torch.optim.AdamW, {"lr": 0.01},
        scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR, scheduler_kwargs={"T_max": 6},
    )  # fmt: skip
    TrainingStrategy(model, config, loss_fn, num_epochs=2).run(batches)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for _ in range(2):
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(reference(batch), batch).total.backward()
            optimizer.step()
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_counters_mean_what_they_say(toys):
    seen = []

    def note(ctx):
        counts = (ctx.step_count, ctx.global_step_count, ctx.batch_count, ctx.epoch_step_count, ctx.epoch)
        seen.append((*counts, ctx.is_last_batch))

    hooks = [At(Stage.AFTER_BATCH, note), GradientAccumulationHook(2)]
    strategy = toys.slope_strategy(hooks, num_epochs=2)
    strategy.run([toys.batch_of(1.0)] * 3)
    assert seen == [
        (0, 0, 1, 0, 0, False), (1, 1, 2, 1, 0, False), (2, 2, 3, 2, 0, True),
        (2, 2, 4, 0, 1, False), (3, 3, 5, 1, 1, False), (4, 4, 6, 2, 1, True),
    ]  # fmt: skip
    assert strategy.counters() == {
        "step_count": 4, "global_step_count": 4, "batch_count": 6, "epoch_count": 2, "epoch_step_count": 2,
    }  # fmt: skip


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("stage", [Stage.AFTER_OPTIMIZER_STEP, Stage.AFTER_BATCH])
def test_frequency_counts_steps_and_each_that_is_due_is_seen_once(toys, stage, window):
    seen = []
    hook = At(stage, lambda ctx: seen.append(ctx.step_count), frequency=5)
    strategy = toys.slope_strategy([hook, GradientAccumulationHook(window)])
    strategy.run([toys.batch_of(1.0)] * 12 * window)
    assert seen == [5, 10]


def test_hook_of_every_step_sees_every_batch_and_is_told_which_made_one(toys):
    seen = []
    hook = At(Stage.AFTER_OPTIMIZER_STEP, lambda ctx: seen.append((ctx.step_count, ctx.step_made)))
    toys.slope_strategy([hook, GradientAccumulationHook(2)]).run([toys.batch_of(1.0)] * 4)
    assert seen == [(0, False), (1, True), (1, False), (2, True)]


@pytest.mark.parametrize(("frequency", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_reports_of_accumulated_steps_come_once_each(toys, frequency, expected):
    class Steps:
        def __init__(self):
            self.seen = []

        def report(self, ctx, stage, state):
            self.seen.append(ctx.step_count)

    steps = Steps()
    hooks = [ReportingOrchestrator([steps], frequency=frequency), GradientAccumulationHook(4)]
    toys.slope_strategy(hooks).run([toys.batch_of(1.0)] * 24)
    assert steps.seen == expected


def test_gradients_are_there_by_name_from_after_backward_on(toys):
    seen = {}

    def note(ctx):
        seen["at"] = {name: gradient.item() for name, gradient in ctx.gradients.items()}

    before = At(Stage.BEFORE_BACKWARD, lambda ctx: seen.setdefault("before", ctx.gradients))
    toys.slope_strategy([before, At(Stage.AFTER_BACKWARD, note)]).run([toys.batch_of(2.0, 4.0)])
    assert seen == {"before": None, "at": {"w": 3.0}}

    models = {"a": toys.Slope(), "b": toys.Slope()}
    strategy = TrainingStrategy(
        models, {"a": SGD}, toys.mean_energy, num_epochs=1, hooks=[At(Stage.AFTER_BACKWARD, note)],
        training_fn=lambda models, batch: models["a"](batch),
    )  # fmt: skip
    strategy.run([toys.batch_of(5.0)])
    assert seen["at"] == {"a.w": 5.0}


def test_last_batch_is_known_also_from_loaders_without_length(toys):
    def stream():
        yield from [toys.batch_of(1.0)] * 3

    last = []
    strategy = toys.slope_strategy([At(Stage.BEFORE_BATCH, lambda ctx: last.append(ctx.is_last_batch))])
    strategy.run(stream())
    assert last == [False, False, True]


def test_loader_with_length_is_not_read_ahead(toys):
    events = []

    class Loader:
        def __len__(self):
            return 2

        def __iter__(self):
            for _ in range(2):
                events.append("load")
                yield toys.batch_of(1.0)

    toys.slope_strategy([At(Stage.AFTER_BATCH, lambda ctx: events.append("used"))]).run(Loader())
    assert events == ["load", "used", "load", "used"]


def test_num_steps_counts_real_steps_over_epochs(toys):
    strategy = toys.slope_strategy([MixedPrecisionHook("fp16")], num_epochs=None, num_steps=3)
    strategy.run([toys.batch_of(1.0), toys.batch_of(1e36)])  # the second overflows when it is scaled
    assert (strategy.step_count, strategy.batch_count, strategy.epoch_count) == (3, 5, 2)


def test_training_that_never_steps_ends_with_an_error(toys):
    class Never(TrainingUpdateHook):
        def __call__(self, ctx, stage, will_skip):
            return stage is not Stage.DO_OPTIMIZER_STEP, ctx.loss

    with pytest.raises(RuntimeError, match="no optimizer step ran in 21 epochs"):
        toys.slope_strategy([Never()], num_epochs=None, num_steps=1).run([toys.batch_of(1.0)])


def test_train_batch_returns_the_loss_and_changes_the_weights(toys):
    strategy = toys.slope_strategy(w=2.0)
    with strategy:
        loss = strategy.train_batch(toys.batch_of(3.0))
    assert (loss.item(), loss.requires_grad) == (6.0, False)
    assert strategy.models.w.item() == pytest.approx(1.7)
    assert (strategy.step_count, strategy.batch_count, strategy.epoch_count) == (1, 1, 0)


def test_context_shows_the_unscaled_loss_after_backward(toys):
    losses = {}
    hooks = [
        At(stage, lambda ctx, s=stage: losses.__setitem__(s, ctx.loss.item()))
        for stage in (Stage.AFTER_LOSS, Stage.AFTER_BATCH)
    ]
    toys.slope_strategy([*hooks, MixedPrecisionHook("fp16"), GradientAccumulationHook(4)]).run(
        [toys.batch_of(3.0)]
    )
    assert losses == {Stage.AFTER_LOSS: 3.0, Stage.AFTER_BATCH: 3.0}


def test_context_carries_what_hooks_need(toys):
    contexts = []
    strategy = toys.slope_strategy([At(Stage.AFTER_BATCH, contexts.append)])
    batch = toys.batch_of(1.0)
    strategy.run([batch])
    (ctx,) = contexts
    assert isinstance(ctx, TrainContext)
    assert ctx.batch is batch
    assert ctx.model is strategy.models
    assert ctx.models == {"main": strategy.models}
    assert ctx.workflow is strategy
    assert set(ctx.predictions) == {"energy"}
    assert set(ctx.losses) == {"loss"}
    assert list(ctx.optimizers) == list(strategy.optimizers)


def test_weight_schedules_follow_step_and_epoch(toys):
    totals = []
    loss_fn = EnergyMSELoss() * LinearWeight(0.0, 1.0, length=2) + ForceMSELoss() * ConstantWeight(2.0)
    hook = At(Stage.AFTER_LOSS, lambda ctx: totals.append(ctx.losses["energy_mse"].item()))
    (batch,) = toys.molecules(1)
    config = OptimizerConfig(torch.optim.SGD, {"lr": 0.0})
    TrainingStrategy(DemoModelWrapper(), config, loss_fn, num_epochs=3, hooks=[hook]).run([batch])
    assert totals[0] == 0.0
    assert totals[1] == pytest.approx(0.5 * totals[2])


def test_teacher_and_student(toys):
    teacher, student = toys.Slope(3.0), toys.Slope(0.0)

    def training_fn(models, batch):
        with torch.no_grad():
            label = models["teacher"](batch)["energy"]
        return {"energy": models["student"](batch)["energy"], "label": label}

    def loss(predictions, batch):
        return (predictions["energy"] - predictions["label"]).square().mean()

    modes = []

    def note(ctx):
        modes.append((ctx.models["teacher"].training, ctx.models["student"].training))

    strategy = TrainingStrategy(
        {"teacher": teacher, "student": student}, {"student": SGD}, loss, num_epochs=60, training_fn=training_fn,
        hooks=[At(Stage.AFTER_BATCH, note)],
    )  # fmt: skip
    strategy.run([toys.batch_of(1.0, 2.0)])
    assert student.w.item() == pytest.approx(3.0, abs=1e-3)
    assert teacher.w.item() == 3.0
    assert set(modes) == {(False, True)}


@pytest.mark.parametrize("when", ["every_n_epochs", "every_n_steps"])
def test_neighbour_list_is_built_for_training_and_validation(when):
    class Counting(DemoModelWrapper):
        def __init__(self):
            super().__init__()
            self.model_config = ModelConfig(
                autograd_outputs=frozenset({"forces"}), neighbor_config=NeighborConfig(cutoff=2.0)
            )
            self.pairs = []

        def forward(self, data):
            self.pairs.append(data.neighbor_list.shape[0])
            return super().forward(data)

    data = AtomicData(
        positions=torch.tensor([[0.0, 0, 0], [1.5, 0, 0]]), atomic_numbers=[1, 1], energy=[[0.0]]
    )
    batch = Batch.from_data_list([data, data])
    model = Counting()
    strategy = TrainingStrategy(
        model,
        SGD,
        EnergyMSELoss(),
        num_epochs=1,
        validation_config=ValidationConfig([Batch.from_data_list([data])], **{when: 1}),
    )
    strategy.run([batch])
    assert model.pairs == [4, 2]
    assert sum(isinstance(hook, NeighborListHook) for hook in strategy.hooks) == 1
    assert TrainingStrategy(Counting(), SGD, EnergyMSELoss(), num_epochs=1, auto_neighbors=False).hooks == ()


class Pairs(DemoModelWrapper):
    """Counts the pairs it is given."""

    def __init__(self, cutoff, **options):
        super().__init__()
        self.model_config = ModelConfig(
            autograd_outputs=frozenset({"forces"}), neighbor_config=NeighborConfig(cutoff=cutoff, **options)
        )
        self.pairs = 0

    def forward(self, data):
        self.pairs = data.neighbor_list.shape[0]
        return super().forward(data)


def both(models, batch):
    for model in models.values():
        predictions = model(batch)
    return predictions


@pytest.mark.parametrize("cutoffs", [(4.0, 2.0), (2.0, 4.0)])
def test_models_of_different_cutoffs_share_a_list_that_serves_both(cutoffs):
    data = AtomicData(
        positions=torch.tensor([[0.0, 0, 0], [1.5, 0, 0], [3.0, 0, 0]]),
        atomic_numbers=[1] * 3,
        energy=[[0.0]],
    )
    models = {"teacher": Pairs(cutoffs[0]), "student": Pairs(cutoffs[1])}
    strategy = TrainingStrategy(models, {"student": SGD}, EnergyMSELoss(), num_epochs=1, training_fn=both)
    strategy.run([Batch.from_data_list([data])])
    assert [model.pairs for model in models.values()] == [6, 6]


def test_half_and_full_lists_of_one_format_are_refused(toys):
    models = {"teacher": Pairs(2.0, half_list=True), "student": Pairs(2.0)}
    strategy = TrainingStrategy(models, {"student": SGD}, EnergyMSELoss(), num_epochs=1, training_fn=both)
    with pytest.raises(ValueError, match="half"):
        strategy.run(toys.molecules(1))


# ---------------------------------------------------------------------- hooks
def test_bare_update_hooks_are_folded_into_one_orchestrator_at_the_place_of_the_first(toys):
    a, b = At(Stage.AFTER_BATCH, lambda ctx: None), At(Stage.AFTER_BATCH, lambda ctx: None)
    strategy = toys.slope_strategy([a, EMAHook(), b, GradientClipHook(1.0)])
    strategy.register_hook(MixedPrecisionHook("bf16"))
    assert [type(hook) for hook in strategy.hooks] == [At, TrainingUpdateOrchestrator, At]
    assert [type(hook) for hook in strategy.update_hooks()] == [MixedPrecisionHook, GradientClipHook, EMAHook]


def test_bare_hooks_join_an_orchestrator_that_is_given(toys):
    given = TrainingUpdateOrchestrator(EMAHook())
    for order in (
        [GradientClipHook(1.0), given],
        [TrainingUpdateOrchestrator(EMAHook()), GradientClipHook(1.0)],
    ):
        strategy = toys.slope_strategy(order)
        assert [type(hook) for hook in strategy.update_hooks()] == [GradientClipHook, EMAHook]
        assert len(strategy.hooks) == 1


def test_update_hook_is_registered_once_and_without_a_stage(toys):
    hook = GradientClipHook(1.0)
    strategy = toys.slope_strategy([hook])
    with pytest.raises(ValueError, match="registered already"):
        strategy.register_hook(hook)
    with pytest.raises(ValueError, match="give no stage"):
        strategy.register_hook(GradientClipHook(1.0), Stage.AFTER_BATCH)
    assert list(strategy.update_hooks()) == [hook]


def test_inference_model_is_the_average_once_there_is_one(toys):
    average = EMAHook(decay=0.5)
    strategy = toys.slope_strategy([average])
    assert strategy.inference_models() == {"main": strategy.models}
    strategy.run([toys.batch_of(1.0)] * 2)
    assert strategy.inference_models() == {"main": average.get_averaged_model()}
    assert strategy.inference_models()["main"].w.item() == pytest.approx(0.85)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_one_device_may_stand_for_the_list(toys, device):
    assert toys.slope_strategy(devices=device).devices == [torch.device("cpu")]


def test_class_of_a_loss_is_refused(toys):
    with pytest.raises(ValidationError, match=r"give an object of it: EnergyMSELoss\(\)"):
        TrainingStrategy(toys.Slope(), SGD, EnergyMSELoss, num_epochs=1)


def test_plateau_scheduler_without_validation_is_warned_of(toys):
    config = OptimizerConfig(torch.optim.SGD, {"lr": 0.1}, torch.optim.lr_scheduler.ReduceLROnPlateau)
    strategy = TrainingStrategy(toys.Slope(), config, toys.mean_energy, num_epochs=1)
    with pytest.warns(UserWarning, match="validation_config"):
        strategy.run([toys.batch_of(1.0)])


def test_two_orchestrators_are_a_value_error(toys):
    with pytest.raises(ValueError, match="compose them with"):
        toys.slope_strategy(
            [TrainingUpdateOrchestrator(EMAHook()), TrainingUpdateOrchestrator(GradientClipHook(1.0))]
        )


class Claim:
    frequency = 1

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, ctx, stage):
        if stage is Stage.DO_BACKWARD:
            (2.0 * ctx.loss).backward()
        else:
            for optimizer in ctx.optimizers:
                optimizer.step()


class OtherClaim(Claim):
    pass


@pytest.mark.parametrize("slot", [Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP])
def test_second_claim_on_a_slot_is_a_value_error_that_names_both(toys, slot):
    strategy = toys.slope_strategy([Claim(slot)])
    with pytest.raises(
        ValueError, match=f"OtherClaim cannot claim {slot.name}: Claim has claimed it already"
    ):
        strategy.register_hook(OtherClaim(slot))
    with pytest.raises(ValueError, match=f"TrainingUpdateOrchestrator cannot claim {slot.name}: Claim"):
        strategy.register_hook(EMAHook())
    with pytest.raises(ValueError, match=f"Claim cannot claim {slot.name}: TrainingUpdateOrchestrator"):
        toys.slope_strategy([EMAHook(), Claim(slot)])
    assert [type(hook) for hook in strategy.hooks] == [Claim]
    strategy.remove_hook(strategy.hooks[0])
    strategy.register_hook(OtherClaim(slot))


def test_claim_must_run_at_every_step(toys):
    claim = Claim(Stage.DO_BACKWARD)
    claim.frequency = 2
    with pytest.raises(ValueError, match="frequency 1"):
        toys.slope_strategy([claim])


@pytest.mark.parametrize(("slot", "expected"), [(Stage.DO_BACKWARD, 0.8), (Stage.DO_OPTIMIZER_STEP, 0.9)])
def test_claim_replaces_its_part_of_the_loop_only(toys, slot, expected):
    strategy = toys.slope_strategy([Claim(slot)])
    strategy.run([toys.batch_of(1.0)])
    assert strategy.models.w.item() == pytest.approx(expected)
    assert strategy.step_count == 1


def test_stage_of_another_engine_is_refused(toys):
    class Other(Enum):
        NOW = 1

    with pytest.raises(TypeError, match="TrainingStage"):
        toys.slope_strategy([At(Other.NOW, print)])


def test_hooks_are_opened_and_closed_around_a_run_and_by_the_context_manager(toys):
    log = []

    class Resource(At):
        def __enter__(self):
            log.append("open")
            return self

        def __exit__(self, *error):
            log.append("close")

    strategy = toys.slope_strategy([Resource(Stage.AFTER_BATCH, lambda ctx: log.append("batch"))])
    strategy.run([toys.batch_of(1.0)])
    assert log == ["open", "batch", "close"]
    log.clear()
    with strategy:
        strategy.train_batch(toys.batch_of(1.0))
        strategy.train_batch(toys.batch_of(1.0))
    assert log == ["open", "batch", "batch", "close"]


def test_hook_registered_late_is_still_set_up(toys):
    called = []
    strategy = toys.slope_strategy()
    strategy.setup()
    strategy.register_hook(At(Stage.SETUP, lambda ctx: called.append("hook")))
    strategy.register_hook(EMAHook("main"))
    with pytest.raises(ValueError, match="'other'"):
        strategy.register_hook(EMAHook("other"))
    assert called == ["hook"]


def test_stage_agnostic_hook_works(toys):
    class Any:
        frequency, stage, batches = 1, None, 0

        def _runs_on_stage(self, stage):
            return stage.name == "AFTER_BATCH"

        def __call__(self, ctx, stage):
            assert isinstance(ctx, HookContext)
            self.batches += 1

    hook = Any()
    toys.slope_strategy([hook]).run([toys.batch_of(1.0)] * 2)
    assert hook.batches == 2


# ---------------------------------------------------------------------- schedulers
def test_step_schedulers_advance_per_real_step(toys):
    config = OptimizerConfig(
        torch.optim.SGD, {"lr": 1.0},
        scheduler_cls=torch.optim.lr_scheduler.StepLR, scheduler_kwargs={"step_size": 1, "gamma": 0.5},
    )  # fmt: skip
    strategy = TrainingStrategy(
        toys.Slope(), config, toys.mean_energy, num_epochs=1, hooks=[GradientAccumulationHook(2)]
    )
    strategy.run([toys.batch_of(1.0)] * 5)
    assert strategy.lr_schedulers[0].get_last_lr() == [0.125]


def test_plateau_scheduler_advances_at_validation_by_its_adapter(toys):
    config = OptimizerConfig(
        torch.optim.SGD, {"lr": 1.0},
        scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau, scheduler_kwargs={"patience": 0, "factor": 0.1},
        scheduler_metric_adapter=lambda validation: -validation["loss"],
    )  # fmt: skip
    strategy = TrainingStrategy(
        toys.Slope(), config, toys.mean_energy, num_epochs=2,
        validation_config=ValidationConfig(validation_data=[toys.batch_of(1.0)]),
    )  # fmt: skip
    strategy.run([toys.batch_of(1.0)] * 3)
    assert strategy.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)


def test_adapter_that_asks_for_an_unknown_metric_is_told_what_there_is(toys):
    config = OptimizerConfig(
        torch.optim.SGD, {"lr": 1.0},
        scheduler_cls=torch.optim.lr_scheduler.ReduceLROnPlateau,
        scheduler_metric_adapter=lambda validation: validation["accuracy"],
    )  # fmt: skip
    strategy = TrainingStrategy(
        DemoModelWrapper(), config, EnergyMSELoss(), num_epochs=1,
        validation_config=ValidationConfig(toys.molecules(1)),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'accuracy'; validation gives .*energy_mae.*components energy_mse"):
        strategy.run(toys.molecules(1))


# ---------------------------------------------------------------------- validation
class Unlabelled:
    """A batch without labels, and whatever comes after it is an error to ask for."""

    def __iter__(self):
        yield Batch.from_data_list([AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1])])
        raise AssertionError("only the first batch is needed")


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([], ValueError, "validation_data gave no batch"),
        (
            Unlabelled(),
            ValueError,
            "validation_data: EnergyMSELoss needs the label 'energy', missing in graph 0",
        ),
        ([3], TypeError, "must give Batch, got int"),
    ],
)
def test_validation_data_that_will_not_do_are_refused_before_the_first_step(toys, data, error, words):
    strategy = TrainingStrategy(
        DemoModelWrapper(), SGD, EnergyMSELoss(), num_epochs=1, validation_config=ValidationConfig(data)
    )
    with pytest.raises(error, match=words):
        strategy.run(toys.molecules(1))
    assert strategy.batch_count == 0


def test_looking_at_the_validation_data_draws_no_random_numbers(toys):
    data = toys.molecules(1)[0].to_data_list()

    def drawn(options):
        torch.manual_seed(0)
        strategy = TrainingStrategy(
            DemoModelWrapper(), SGD, EnergyMSELoss(), num_steps=1,
            hooks=[At(Stage.BEFORE_TRAINING, lambda ctx: seen.append(torch.rand(1).item()))], **options,
        )  # fmt: skip
        strategy.run(toys.molecules(1))

    seen = []
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True, collate_fn=Batch.from_data_list)
    drawn({})
    drawn({"validation_config": ValidationConfig(loader)})
    assert seen[0] == seen[1]


def test_validation_gives_loss_components_and_errors_without_asking(toys):
    train, valid = toys.molecules(2), toys.molecules(2, seed=5)
    summaries = []
    strategy = TrainingStrategy(
        DemoModelWrapper(), SGD, EnergyMSELoss() + ForceMSELoss(), num_epochs=2,
        hooks=[At(Stage.AFTER_VALIDATION, lambda ctx: summaries.append(ctx.validation))],
        validation_config=ValidationConfig(validation_data=valid),
    )  # fmt: skip
    strategy.run(train)
    assert len(summaries) == 2
    assert summaries[-1] is strategy.last_validation
    keys = {"loss", "energy_mae", "energy_rmse", "energy_per_atom_mae", "forces_mae", "forces_rmse"}
    assert keys <= set(strategy.last_validation)
    assert sum(strategy.last_validation["components"].values()) == pytest.approx(
        strategy.last_validation["loss"]
    )
    batch = Batch.from_data_list([d for b in valid for d in b.to_data_list()])
    errors = strategy.models.eval()(batch)["forces"] - batch.forces
    assert strategy.last_validation["forces_mae"] == pytest.approx(errors.abs().mean().item(), rel=1e-5)


def test_validation_mean_is_over_structures_not_batches(toys):
    config = ValidationConfig(validation_data=[toys.batch_of(1.0, 1.0, 1.0), toys.batch_of(5.0)])
    assert toys.slope_strategy(validation_config=config).validate()["loss"] == 2.0


@pytest.mark.parametrize(
    ("interval", "expected"),
    [({}, [3, 6, 9]), ({"every_n_epochs": 2}, [6]), ({"every_n_steps": 2}, [2, 4, 6, 8])],
)
def test_validation_intervals(toys, interval, expected):
    at = []
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)], **interval)
    hook = At(Stage.AFTER_VALIDATION, lambda ctx: at.append(ctx.workflow.step_count))
    toys.slope_strategy([hook], num_epochs=3, validation_config=config).run([toys.batch_of(1.0)] * 3)
    assert at == expected


def test_validation_leaves_modes_weights_and_random_numbers_alone(toys):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0))
            self.drop = nn.Dropout(0.5)
            self.frozen = nn.BatchNorm1d(1)

        def forward(self, batch):
            return {"energy": self.drop(self.w * batch["x"])}

    model = Dropping()
    config = ValidationConfig(
        validation_data=torch.utils.data.DataLoader([toys.batch_of(2.0)], batch_size=None, shuffle=True)
    )
    strategy = toys.slope_strategy(model=model, validation_config=config)
    strategy.setup()
    model.train()
    model.frozen.eval()
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    assert strategy.validate()["loss"] == 2.0
    assert torch.rand(()) == expected
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert model.w.grad is None


def test_validation_uses_the_average_as_use_ema_says(toys):
    def loss(use_ema):
        config = ValidationConfig(validation_data=[toys.batch_of(1.0)], use_ema=use_ema)
        strategy = toys.slope_strategy([EMAHook(decay=0.5)], num_epochs=2, validation_config=config)
        strategy.run([toys.batch_of(1.0)])
        return strategy.last_validation["loss"]

    assert loss("auto") == pytest.approx(0.85)
    assert loss(True) == pytest.approx(0.85)
    assert loss(False) == pytest.approx(0.8)
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)], use_ema=True)
    with pytest.raises(ValueError, match="EMAHook"):
        toys.slope_strategy(validation_config=config).validate()
    with pytest.raises(RuntimeError, match="no average"):
        toys.slope_strategy([EMAHook()], validation_config=config).validate()


def test_validation_uses_the_precision_as_use_mixed_precision_says(toys):
    seen = []

    class Model(toys.Slope):
        def forward(self, batch):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(batch)

    for use, expected in (("auto", True), (True, True), (False, False)):
        config = ValidationConfig(validation_data=[toys.batch_of(1.0)], use_mixed_precision=use)
        toys.slope_strategy([MixedPrecisionHook("bf16")], model=Model(), validation_config=config).validate()
        assert seen.pop() is expected
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)], use_mixed_precision=True)
    with pytest.raises(ValueError, match="MixedPrecisionHook"):
        toys.slope_strategy(validation_config=config).validate()


@pytest.mark.parametrize(("mode", "expected"), [("auto", True), ("enabled", True), ("disabled", False)])
def test_validation_grad_mode(toys, mode, expected):
    seen = []

    class Model(toys.Slope):
        def forward(self, batch):
            seen.append(torch.is_grad_enabled())
            return super().forward(batch)

    config = ValidationConfig(validation_data=[toys.batch_of(1.0)], grad_mode=mode)
    toys.slope_strategy(model=Model(), validation_config=config).validate()
    assert seen == [expected]


def test_validation_needs_no_gradients_when_the_model_says_so():
    class Direct(DemoModelWrapper):
        def __init__(self):
            super().__init__()
            self.model_config = ModelConfig()
            self.seen = []

        def forward(self, data):
            self.seen.append(torch.is_grad_enabled())
            return super().forward(data)

    data = AtomicData(positions=torch.zeros(1, 3), atomic_numbers=[1], energy=[[0.0]])
    model = Direct()
    config = ValidationConfig(validation_data=[Batch.from_data_list([data])])
    TrainingStrategy(model, SGD, EnergyMSELoss(), num_epochs=1, validation_config=config).validate()
    assert model.seen == [False]


def test_batch_callback_sees_every_validation_batch(toys):
    seen = []
    config = ValidationConfig(
        validation_data=[toys.batch_of(1.0), toys.batch_of(2.0)],
        batch_callback=lambda b, p: seen.append(p["energy"].item()),
    )
    toys.slope_strategy(validation_config=config).validate()
    assert seen == [1.0, 2.0]


def test_errors_per_element_and_group_on_request(toys):
    batch = toys.molecules(1)[0]
    for info in batch.info:
        info["config_type"] = "bulk"
    config = ValidationConfig(validation_data=[batch], per_element=True, group_by="config_type")
    strategy = TrainingStrategy(
        DemoModelWrapper(), SGD, EnergyMSELoss() + ForceMSELoss(), num_epochs=1, validation_config=config
    )
    summary = strategy.validate()
    assert "energy_mae/config_type=bulk" in summary
    assert any(name.startswith("forces_mae/element=") for name in summary)


def test_bad_validation_options(toys):
    for options in (
        {"validation_data": [], "every_n_steps": 1, "every_n_epochs": 1},
        {"validation_data": iter([])},
        {"validation_data": toys.batch_of(1.0)},
        {"validation_data": 3},
        {"validation_data": [], "every_n_steps": 0},
        {"validation_data": [], "use_ema": "perhaps"},
    ):
        with pytest.raises(ValidationError):
            ValidationConfig(**options)
    with pytest.raises(ValueError, match="gave no batch"):
        toys.slope_strategy(validation_config=ValidationConfig(validation_data=[])).validate()
    with pytest.raises(ValueError, match="nothing to validate on"):
        toys.slope_strategy().validate()


def test_early_stopping_ends_training_and_brings_the_best_weights_back(toys):
    xs = iter([5.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)])

    def loss(predictions, batch):
        return predictions["energy"].mean() if torch.is_grad_enabled() else torch.tensor(next(xs))

    hook = EarlyStoppingHook(patience=2, restore_best=True)
    strategy = TrainingStrategy(
        toys.Slope(), SGD, loss, num_epochs=50, hooks=[hook], validation_config=config
    )
    strategy.run([toys.batch_of(1.0)])
    assert strategy.epoch_count == 4
    assert strategy.stop_reason == "loss has not fallen below 1 in 2 validations (now 3)"
    assert strategy.models.w.item() == pytest.approx(0.8)
    assert hook.best == 1.0


def test_early_stopping_names_what_it_could_watch(toys):
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)])
    with pytest.raises(ValueError, match=r"no 'accuracy'; it gives .*loss"):
        toys.slope_strategy([EarlyStoppingHook(monitor="accuracy")], validation_config=config).run(
            [toys.batch_of(1.0)]
        )


# ---------------------------------------------------------------------- fine-tuning
def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_frozen_embedding_stays_bit_equal_with_weight_decay(toys):
    model = DemoModelWrapper()
    before = parameters(model)
    config = OptimizerConfig(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5})
    hook = TrainableParameterHook(freeze_patterns=("*embedding*",))
    TrainingStrategy(model, config, EnergyMSELoss(), num_epochs=3, hooks=[hook]).run(toys.molecules(1))
    changed = {name for name, value in parameters(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "embedding" not in name}


def test_trainable_patterns_alone_freeze_the_rest_and_overrule_freezing():
    names = set(parameters(DemoModelWrapper()))
    for options, expected in (
        ({"trainable_patterns": ("*readout.2*",)}, {n for n in names if "readout.2" in n}),
        (
            {"freeze_patterns": ("*readout*",), "trainable_patterns": ("*readout.2*",)},
            {n for n in names if "readout.0" not in n},
        ),
    ):
        model = DemoModelWrapper()
        TrainingStrategy(
            model, SGD, EnergyMSELoss(), num_epochs=1, hooks=[TrainableParameterHook(**options)]
        ).setup()
        assert {name for name, p in model.named_parameters() if p.requires_grad} == expected


def test_pattern_without_match_is_named():
    hook = TrainableParameterHook(freeze_patterns=("*encoder*",))
    strategy = TrainingStrategy(DemoModelWrapper(), SGD, EnergyMSELoss(), num_epochs=1, hooks=[hook])
    with pytest.raises(
        ValueError, match=r"'\*encoder\*' matches no parameter of model 'main'; there are .*embedding"
    ):
        strategy.setup()
    with pytest.raises(ValidationError):
        TrainableParameterHook()


def test_modules_are_replaced_before_the_optimizer_is_built():
    model = DemoModelWrapper()
    hook = ModulePatchHook(
        {
            "model.readout.2": lambda old: nn.Linear(old.in_features, 1, bias=False),
            "model.readout.1": nn.Tanh(),
        }
    )
    strategy = TrainingStrategy(model, SGD, EnergyMSELoss(), num_epochs=1, hooks=[hook])
    strategy.setup()
    assert isinstance(model.model.readout[1], nn.Tanh)
    assert any(p is model.model.readout[2].weight for p in strategy.optimizers[0].param_groups[0]["params"])
    bad = ModulePatchHook({"model.decoder": nn.Identity()})
    with pytest.raises(ValueError, match=r"no module 'model\.decoder'; it has model, model\.embedding"):
        TrainingStrategy(DemoModelWrapper(), SGD, EnergyMSELoss(), num_epochs=1, hooks=[bad]).setup()


def test_fine_tuning_strategy_patches_then_freezes_then_trains(toys):
    model = DemoModelWrapper()
    strategy = FineTuningStrategy(
        model, OptimizerConfig(torch.optim.Adam, {"lr": 0.05}), EnergyMSELoss(), num_epochs=20,
        patches={"model.readout.2": lambda old: nn.Linear(old.in_features, 1)},
        trainable_patterns=["model.readout.2.*"],
        validation_config=ValidationConfig(validation_data=toys.molecules(1), every_n_epochs=19),
    )  # fmt: skip
    before = parameters(model)
    first = strategy.validate()["loss"]
    strategy.run(toys.molecules(1))
    assert strategy.last_validation["loss"] < first
    changed = {n for n, p in parameters(model).items() if not torch.equal(p, before[n])}
    assert changed == {"model.readout.2.weight", "model.readout.2.bias"}


# ---------------------------------------------------------------------- specification
def test_specification_goes_round_trip_through_json(toys):
    config = OptimizerConfig(
        torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99)},
        scheduler_cls=torch.optim.lr_scheduler.StepLR, scheduler_kwargs={"step_size": 3}, parameter_patterns=("w",),
    )  # fmt: skip
    data = [toys.batch_of(1.0)]
    strategy = TrainingStrategy(
        toys.Slope(), config, EnergyMSELoss() + 10.0 * ForceMSELoss(), num_steps=7,
        training_fn=module_level_training_fn,
        hooks=[EMAHook(decay=0.9), MixedPrecisionHook("bf16"), EarlyStoppingHook(patience=3)],
        validation_config=ValidationConfig(validation_data=data, every_n_steps=2),
    )  # fmt: skip
    spec = json.loads(json.dumps(strategy.to_spec_dict()))
    again = TrainingStrategy.from_spec_dict(spec, toys.Slope(), validation_data=data)
    assert json.loads(json.dumps(again.to_spec_dict())) == spec
    assert again.loss_fn == strategy.loss_fn
    assert again.training_fn is module_level_training_fn
    assert again.validation_config.every_n_steps == 2


def test_specification_of_several_models_and_optimizers(toys):
    models = {"a": toys.Slope(), "b": toys.Slope()}
    strategy = TrainingStrategy(
        models, {"a": [SGD], "b": SGD}, module_level_loss, num_epochs=2, training_fn=module_level_training_fn
    )
    spec = json.loads(json.dumps(strategy.to_spec_dict()))
    again = TrainingStrategy.from_spec_dict(spec, models, num_steps=5)
    assert again.optimizer_configs == strategy.optimizer_configs
    assert (again.num_epochs, again.num_steps) == (None, 5)
    assert again.loss_fn is module_level_loss


def test_what_a_specification_cannot_hold_is_said(toys):
    strategy = TrainingStrategy(toys.Slope(), SGD, lambda p, b: p["energy"].mean(), num_epochs=1)
    with pytest.raises(ValueError, match="<lambda>"):
        strategy.to_spec_dict()
    hook = At(Stage.AFTER_BATCH, print)
    config = ValidationConfig(validation_data=[toys.batch_of(1.0)])
    strategy = TrainingStrategy(
        toys.Slope(), SGD, module_level_loss, num_epochs=1, hooks=[hook], validation_config=config
    )
    spec = strategy.to_spec_dict()
    assert spec["omitted_hooks"] == ["At"]
    with pytest.warns(UserWarning, match="give") as warned:
        TrainingStrategy.from_spec_dict(spec, toys.Slope())
    assert ["validation_data" in str(w.message) for w in warned] == [True, False]
    assert "At could not be described" in str(warned[1].message)


# ---------------------------------------------------------------------- bad input: an error before any weight changes
def refused(strategy, loader, error, match):
    before = {name: parameters(model) for name, model in strategy.model_dict.items()}
    with pytest.raises(error, match=match):
        strategy.run(loader)
    for name, model in strategy.model_dict.items():
        assert all(torch.equal(value, before[name][key]) for key, value in parameters(model).items())
    assert strategy.step_count == 0


def demo_strategy(loss=None, model=None, **options):
    loss = EnergyMSELoss() + ForceMSELoss() if loss is None else loss
    return TrainingStrategy(
        DemoModelWrapper() if model is None else model, SGD, loss, num_epochs=1, **options
    )


def test_empty_dataloader(toys):
    refused(demo_strategy(), [], ValueError, "gave no batch in epoch 0")


def test_iterator_that_is_used_up_after_one_epoch(toys):
    strategy = toys.slope_strategy(num_epochs=2)
    with pytest.raises(ValueError, match=r"no batch in epoch 1 .an iterator can be gone through only once"):
        strategy.run(iter([toys.batch_of(1.0)]))


def test_batch_without_a_label(toys):
    (batch,) = toys.molecules(1)
    batch.remove_key("forces")
    refused(demo_strategy(), [batch], ValueError, "needs the label 'forces', missing in graph 0")


def test_model_output_missing(toys):
    model = DemoModelWrapper()
    model.set_config("active_outputs", {"energy"})
    refused(
        demo_strategy(model=model),
        toys.molecules(1),
        ValueError,
        "needs the prediction 'forces', which the model did not",
    )


def test_stress_that_a_molecule_among_crystals_prevents_is_explained():
    crystal = AtomicData(
        positions=torch.rand(2, 3), atomic_numbers=[6, 1], cell=6 * torch.eye(3), pbc=[True] * 3,
        stress=torch.zeros(1, 3, 3),
    )  # fmt: skip
    molecule = AtomicData(
        positions=torch.rand(2, 3), atomic_numbers=[6, 1], pbc=[False] * 3,
        stress=torch.full((1, 3, 3), math.nan),
    )  # fmt: skip
    loss = StressMSELoss(ignore_nonfinite=True)

    def run(*structures):
        strategy = TrainingStrategy(DemoModelWrapper(), SGD, loss, num_epochs=1)
        strategy.run([Batch.from_data_list(list(structures), missing="fill")])
        return strategy.step_count

    with pytest.raises(ValueError, match=r"needs the prediction 'stress'.*graph 1 has none: leave such"):
        run(crystal, molecule)
    # The way out that the message names.
    molecule.cell, molecule.pbc = 20 * torch.eye(3).reshape(1, 3, 3), torch.ones(1, 3, dtype=torch.bool)
    assert run(crystal, molecule) == 1


def test_loss_that_is_not_finite_names_component_and_graphs(toys):
    (batch,) = toys.molecules(1)
    batch.energy[1] = math.nan
    match = (
        r"the loss of batch 0 \(epoch 0\) is nan: energy_mse: graph 1 \(the label 'energy' is not finite\)"
    )
    refused(demo_strategy(), [batch], ValueError, match)


def test_loss_of_a_plain_function_that_is_not_finite(toys):
    refused(toys.slope_strategy(), [toys.batch_of(math.inf)], ValueError, r"is inf: \{'loss': inf\}")


def test_label_that_is_masked_does_no_harm(toys):
    (batch,) = toys.molecules(1)
    batch.energy[1] = math.nan
    strategy = demo_strategy(loss=EnergyMSELoss(ignore_nonfinite=True) + ForceMSELoss())
    strategy.run([batch])
    assert all(p.isfinite().all() for p in strategy.models.parameters())
    assert strategy.step_count == 1


def test_optimizer_without_trainable_parameters(toys):
    model = DemoModelWrapper().requires_grad_(False)
    refused(
        demo_strategy(model=model),
        toys.molecules(1),
        ValueError,
        "SGD has nothing to train: no parameter of model 'main'",
    )


def test_dtype_mismatch_of_weights_and_batch(toys):
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, batch):
            return {"energy": self.layer(batch.positions).sum().expand(batch.num_graphs, 1)}

    strategy = demo_strategy(loss=EnergyMSELoss(), model=Strict())
    batches = toys.molecules(1, dtype=torch.float64)
    refused(
        strategy,
        batches,
        TypeError,
        r"model 'main' has weights of torch.float32 and the batch is torch.float64",
    )


def test_dtype_mismatch_of_prediction_and_label(toys):
    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, batch):
            return {"energy": self.w * batch.energy.double()}

    refused(
        demo_strategy(loss=EnergyMSELoss(), model=Double()),
        toys.molecules(1),
        ValueError,
        "float64 and the label 'energy'",
    )


def test_detached_predictions(toys):
    class Detached(toys.Slope):
        def forward(self, batch):
            return {"energy": super().forward(batch)["energy"].detach()}

    refused(
        toys.slope_strategy(model=Detached()),
        [toys.batch_of(1.0)],
        ValueError,
        "does not depend on any trainable",
    )


@pytest.mark.parametrize("loss", [lambda p, b: p["energy"], lambda p, b: 1.0])
def test_loss_function_that_gives_no_scalar(toys, loss):
    strategy = TrainingStrategy(toys.Slope(), SGD, loss, num_epochs=1)
    refused(strategy, [toys.batch_of(1.0, 2.0)], TypeError, "loss_fn must give a scalar tensor")


def test_forward_pass_that_gives_no_mapping(toys):
    strategy = toys.slope_strategy(training_fn=lambda model, batch: model(batch)["energy"])
    refused(strategy, [toys.batch_of(1.0)], TypeError, "must give a mapping of names to tensors, got Tensor")


def test_batch_that_is_no_batch(toys):
    refused(
        toys.slope_strategy(), iter([torch.zeros(3)]), TypeError, "must give Batch, got Tensor|batch.Batch"
    )


def test_error_in_a_hook_is_raised_unchanged_with_a_note(toys):
    def fail(ctx):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as info:
        toys.slope_strategy([At(Stage.AFTER_LOSS, fail)]).run([toys.batch_of(1.0)])
    assert info.value.__notes__ == ["raised by hook At at stage AFTER_LOSS, step 0"]


def test_torch_loader_of_a_stream_has_no_length_and_its_last_window_is_closed(toys):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([toys.batch_of(x) for x in (1, 2, 3)])

    strategy = toys.slope_strategy([GradientAccumulationHook(2)], lr=1.0, w=0.0)
    strategy.run(torch.utils.data.DataLoader(Stream(), batch_size=None))
    assert strategy.step_count == 2
    assert strategy.models.w.item() == -1.5 - 3.0


def test_errors_are_measured_under_the_names_that_the_loss_goes_by(toys):
    data = AtomicData(positions=torch.eye(3), atomic_numbers=[6, 1, 1])
    data.add_system_property("dft_energy", torch.tensor([[-1.0]]))
    batch = Batch.from_data_list([data])
    strategy = TrainingStrategy(
        DemoModelWrapper(),
        SGD,
        EnergyMSELoss(target_key="dft_energy"),
        num_epochs=1,
        validation_config=ValidationConfig([batch]),
    )
    error = abs(strategy.models(batch)["energy"].item() + 1.0)
    assert strategy.validate()["energy_mae"] == pytest.approx(error)


def test_loader_that_is_shorter_than_it_says_is_warned_of(toys):
    class Short:
        def __len__(self):
            return 5

        def __iter__(self):
            return iter([toys.batch_of(1.0)] * 2)

    with pytest.warns(UserWarning, match="gave 2 batches instead of the 5"):
        toys.slope_strategy().run(Short())


def test_more_than_one_device_is_refused_and_repr_is_short(toys):
    with pytest.raises(ValidationError):
        toys.slope_strategy(devices=["cpu", "cpu"])
    assert repr(toys.slope_strategy([EMAHook()])) == (
        "TrainingStrategy(main: Slope, num_epochs=1, step_count=0, hooks=[TrainingUpdateOrchestrator])"
    )


# ---------------------------------------------------------------------- missing labels
def _with_missing_labels(toys, dtype=torch.float64):
    """Structures of different sizes, some without a label of energy, forces (all or a few) or stress."""
    generator = torch.Generator().manual_seed(5)
    structures = []
    for i, data in enumerate(toys.molecules(1, size=9, dtype=dtype)[0].to_data_list()):
        data.add_system_property("stress", torch.randn(1, 3, 3, generator=generator, dtype=dtype))
        if i % 2 == 0:
            data.energy.fill_(math.nan)
        if i in (1, 2, 6):
            data.forces.fill_(math.nan)
        if i == 4:
            data.forces[0, 1] = math.nan
        if i < 7:
            data.stress.fill_(math.nan)
        structures.append(data)
    return structures


class _Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, batch):
        return {key: self.w * torch.ones_like(batch[key]) for key in ("energy", "forces", "stress")}


@pytest.mark.parametrize(
    "loss",
    [
        EnergyMSELoss(per_atom=True, ignore_nonfinite=True),
        EnergyMAELoss(ignore_nonfinite=True),
        EnergyHuberLoss(ignore_nonfinite=True),
        ForceMSELoss(ignore_nonfinite=True),
        ForceMSELoss(ignore_nonfinite=True, balanced=True),
        ForceL2NormLoss(ignore_nonfinite=True),
        ForceL2NormLoss(ignore_nonfinite=True, balanced=True),
        ForceHuberLoss(ignore_nonfinite=True),
        StressMSELoss(ignore_nonfinite=True),
        StressHuberLoss(ignore_nonfinite=True),
        EnergyMSELoss(ignore_nonfinite=True)
        + LinearWeight(2.0, 4.0, length=8) * ForceMSELoss(ignore_nonfinite=True)
        + 0.0 * StressMSELoss(ignore_nonfinite=True),
    ],
    ids=lambda loss: getattr(loss, "name", "sum"),
)
@pytest.mark.parametrize("as_function", [False, True])
def test_validation_loss_is_that_of_one_big_batch_however_it_is_cut(toys, loss, as_function):
    structures = _with_missing_labels(toys)
    model, whole = _Constant(), Batch.from_data_list(structures)
    expected = loss(model(whole), whole)
    for cuts in ([0, 9], [0, 1, 3, 9], [0, 5, 6, 9], list(range(10))):
        parts = [Batch.from_data_list(structures[a:b]) for a, b in pairwise(cuts)]
        strategy = TrainingStrategy(
            model,
            OptimizerConfig(torch.optim.SGD, {"lr": 0.0}),
            (lambda predictions, batch: loss(predictions, batch)) if as_function else loss,
            num_epochs=1,
            validation_config=ValidationConfig(parts),
        )
        summary = strategy.validate()
        assert summary["loss"] == pytest.approx(expected.total.item(), rel=1e-12)
        assert summary["components"] == pytest.approx({k: v.item() for k, v in expected.components.items()})


def test_what_a_function_adds_to_the_components_counts_in_validation(toys):
    term = EnergyMAELoss()

    def with_penalty(predictions, batch):
        output = term(predictions, batch)
        output.total = output.total + 2.0
        return output

    data = toys.molecules(2)
    model, config = DemoModelWrapper(), OptimizerConfig(torch.optim.SGD, {"lr": 0.0})
    summary = TrainingStrategy(
        model, config, with_penalty, num_epochs=1, validation_config=ValidationConfig(data)
    ).validate()
    assert summary["loss"] == pytest.approx(summary["components"]["energy_mae"] + 2.0)


def test_validation_data_without_any_label_are_an_error_that_names_it(toys):
    structures = _with_missing_labels(toys)[:6]
    loss = EnergyMAELoss(ignore_nonfinite=True) + StressMSELoss(ignore_nonfinite=True)
    strategy = TrainingStrategy(
        _Constant(),
        OptimizerConfig(torch.optim.SGD, {"lr": 0.0}),
        loss,
        num_epochs=1,
        validation_config=ValidationConfig([Batch.from_data_list(structures)]),
    )
    with pytest.raises(ValueError, match="no structure of validation_data has a finite label 'stress'"):
        strategy.validate()


# ---------------------------------------------------------------------- stopping and going on
def test_a_further_run_goes_on_after_a_stop(toys):
    def stop(ctx):
        if ctx.batch_count == 3:
            ctx.workflow.request_stop("enough")

    strategy = toys.slope_strategy([At(Stage.AFTER_BATCH, stop)], num_epochs=2)
    batches = [toys.batch_of(x) for x in (1, 2, 3, 4)]
    strategy.run(batches)
    assert (strategy.step_count, strategy.stop_reason) == (3, "enough")
    strategy.run(batches)
    assert (strategy.step_count, strategy.epoch_count, strategy.stop_reason) == (8, 2, None)


def test_early_stopping_stops_a_further_run_at_the_first_validation_without_progress(toys):
    config = ValidationConfig([toys.batch_of(1.0)])
    strategy = toys.slope_strategy(
        [EarlyStoppingHook(patience=2)], lr=0.0, num_epochs=9, validation_config=config
    )
    epochs = []
    for _ in range(3):
        strategy.run([toys.batch_of(1.0)])
        epochs.append(strategy.epoch_count)
    assert epochs == [3, 4, 5]
    assert "4 validations" in strategy.stop_reason
    strategy.save_checkpoint("stopped")
    other = toys.slope_strategy(
        [EarlyStoppingHook(patience=2)], lr=0.0, num_epochs=9, validation_config=config
    )
    other.restore_checkpoint("stopped")
    other.run([toys.batch_of(1.0)])
    assert other.epoch_count == 5


@pytest.mark.parametrize(
    "options",
    [{"every_n_epochs": 0}, {"every_n_steps": 0}, {"use_ema": "yes"}, {"use_mixed_precision": "no"}],
)
def test_validation_options_that_mean_nothing_are_refused(toys, options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        ValidationConfig([toys.batch_of(1.0)], **options)


def test_loader_with_more_batches_than_it_says_is_warned_of(toys):
    class Loader(list):
        def __len__(self):
            return 2

    loader = Loader(toys.batch_of(x) for x in (1, 2, 3, 4))
    with pytest.warns(UserWarning, match="gave 4 batches instead of the 2 it said.*closed early"):
        toys.slope_strategy().run(loader)
