"""MixedPrecisionHook: every sentence of its page, and the cases that go wrong elsewhere."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel, ValidationError

from nvalchemi.hooks import TrainContext
from nvalchemi.models.demo import DemoModelWrapper
from nvalchemi.training import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import (
    GradientAccumulationHook,
    MixedPrecisionHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
)

Stage = TrainingStage


OVERFLOWS = 1e36  # a finite loss whose gradient, scaled, is beyond float32


def autocast_state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


class Look(TrainingUpdateHook):
    """Notes the autocast state at every stage that update hooks see."""

    priority = 25

    def __init__(self):
        self.seen = {}

    def __call__(self, ctx, stage, will_skip):
        self.seen[stage] = torch.is_autocast_enabled("cpu")
        return True, ctx.loss


class VetoBatches(TrainingUpdateHook):
    """Vetoes the steps of some batches, after everything else."""

    priority = 90

    def __init__(self, *batches):
        self.batches = batches

    def __call__(self, ctx, stage, will_skip):
        return not (stage is Stage.DO_OPTIMIZER_STEP and ctx.batch_count in self.batches), ctx.loss


# ---------------------------------------------------------------------- the field
def test_examples_of_the_page():
    assert MixedPrecisionHook(precision=torch.bfloat16).precision is torch.bfloat16
    assert MixedPrecisionHook(precision="float16").precision is torch.float16
    assert MixedPrecisionHook(precision="bf16").precision is torch.bfloat16


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(t, t) for t in (torch.float32, torch.bfloat16, torch.float16)]
    + [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
    + [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_precision_is_a_dtype_or_its_name_or_shorthand(given, dtype):
    hook = MixedPrecisionHook(given)
    assert isinstance(hook, BaseModel)
    assert hook.precision is dtype
    assert hook.model_dump() == {"precision": str(dtype).removeprefix("torch.")}
    assert MixedPrecisionHook.model_validate_json(hook.model_dump_json()) == hook


@pytest.mark.parametrize("given", [torch.float64, torch.int32, "float64", "half", 16, None])
def test_any_other_precision_is_a_validation_error(given):
    with pytest.raises(ValidationError, match="precision"):
        MixedPrecisionHook(precision=given)


@pytest.mark.parametrize("fields", [{}, {"precision": "fp16", "device": "cpu"}])
def test_precision_and_nothing_else_must_be_given(fields):
    for make in (MixedPrecisionHook, MixedPrecisionHook.model_validate):
        with pytest.raises(ValidationError):
            make(**fields) if make is MixedPrecisionHook else make(fields)


def test_two_are_refused_also_when_they_are_one_object():
    hook = MixedPrecisionHook("fp16")
    for other in (MixedPrecisionHook("bf16"), hook):
        with pytest.raises(ValueError, match="MixedPrecisionHook"):
            hook + other


def test_registered_alone_it_is_wrapped_in_an_orchestrator(toys):
    hook = MixedPrecisionHook("bf16")
    strategy = toys.slope_strategy([hook])
    assert [type(h) for h in strategy.hooks] == [TrainingUpdateOrchestrator]
    assert list(strategy.hooks[0].iter_hooks()) == [hook]
    with pytest.raises(ValueError, match="mixed precision"):
        strategy.register_hook(MixedPrecisionHook("fp16"))


# ---------------------------------------------------------------------- the region
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_forward_and_loss_are_inside_the_region_and_backward_is_not(toys, precision):
    inside = {}

    class Model(toys.Slope):
        def forward(self, batch):
            inside["forward"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            energy = super().forward(batch)["energy"]
            energy.register_hook(lambda g: inside.update(backward=torch.is_autocast_enabled("cpu")))
            return {"energy": energy}

    def loss(predictions, batch):
        inside["loss"] = torch.is_autocast_enabled("cpu")
        return predictions["energy"].mean()

    look, hook = Look(), MixedPrecisionHook(precision)
    strategy = TrainingStrategy(
        Model(), OptimizerConfig(torch.optim.SGD, {"lr": 0.1}), loss, num_epochs=1, hooks=[hook, look]
    )
    strategy.run([toys.batch_of(1.0)])
    assert inside == {"forward": (True, hook.precision), "loss": True, "backward": False}
    assert look.seen[Stage.DO_BACKWARD] is False
    assert look.seen[Stage.DO_OPTIMIZER_STEP] is False


def test_region_is_on_the_first_device_of_the_workflow():
    hook = MixedPrecisionHook("bf16")
    ctx = TrainContext(batch=None, workflow=SimpleNamespace(devices=[torch.device("cpu"), "meta"]))
    hook(ctx, Stage.BEFORE_BATCH, False)
    assert autocast_state()[:2] == (True, torch.bfloat16)
    hook.close()


def test_float32_makes_neither_region_nor_scaler():
    weight = torch.nn.Parameter(torch.tensor(1.0))
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([weight], lr=0.1)])
    hook, before = MixedPrecisionHook("fp32"), autocast_state()
    for stage in (Stage.BEFORE_BATCH, Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP):
        ctx.loss = weight * 1.0
        assert hook(ctx, stage, False) == (True, ctx.loss)
        assert autocast_state() == before
    assert ctx.grad_scaler is None
    assert hook.state_dict() == {"scaler": None}


def test_bfloat16_has_no_scaler_and_float16_keeps_one(toys):
    scalers = []

    class Note:
        frequency, stage = 1, Stage.AFTER_BATCH

        def __call__(self, ctx, stage):
            scalers.append(ctx.grad_scaler)

    for precision in ("bf16", "fp16"):
        toys.slope_strategy([MixedPrecisionHook(precision), Note()]).run([toys.batch_of(1), toys.batch_of(1)])
    assert scalers[:2] == [None, None]
    assert isinstance(scalers[2], torch.amp.GradScaler)
    assert scalers[2] is scalers[3]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("opened", [False, True])
def test_region_is_left_when_a_batch_raises(toys, precision, opened):
    class Broken(toys.Slope):
        def forward(self, batch):
            raise RuntimeError("bad batch")

    before = autocast_state()
    strategy = toys.slope_strategy([MixedPrecisionHook(precision)], model=Broken())
    if opened:
        with strategy:
            with pytest.raises(RuntimeError, match="bad batch"):
                strategy.train_batch(toys.batch_of(1.0))
            assert autocast_state() == before
    else:
        with pytest.raises(RuntimeError, match="bad batch"):
            strategy.run([toys.batch_of(1.0)])
    assert autocast_state() == before


def test_region_is_left_by_an_orchestrator_used_as_context_manager():
    before = autocast_state()
    update = TrainingUpdateOrchestrator(MixedPrecisionHook("bf16"))

    def fail_inside():
        with update:
            update(TrainContext(batch=None), Stage.BEFORE_BATCH)
            assert autocast_state() != before
            raise RuntimeError("bad batch")

    with pytest.raises(RuntimeError, match="bad batch"):
        fail_inside()
    assert autocast_state() == before


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_inference_autocast(precision, dtype):
    before = autocast_state()
    with MixedPrecisionHook(precision).inference_autocast(torch.device("cpu")):
        assert (torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None) == dtype
    assert autocast_state() == before


# ---------------------------------------------------------------------- the scaler
def test_float16_on_the_cpu_warns_of_nothing_and_takes_the_path_through_the_scaler(toys):
    calls = []

    class Spy(TrainingUpdateHook):
        priority = 21

        def __call__(self, ctx, stage, will_skip):
            if stage is Stage.DO_BACKWARD:
                calls.append(("loss", ctx.loss.item()))
            if stage is Stage.DO_OPTIMIZER_STEP:
                calls.append(("gradient", ctx.model.w.grad.item()))
            return True, ctx.loss

    strategy = toys.slope_strategy([MixedPrecisionHook("fp16"), Spy()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run([toys.batch_of(1.0)])
    assert calls == [("loss", 65536.0), ("gradient", 1.0)]
    assert strategy.models.w.item() == pytest.approx(0.9)


def test_overflow_counts_as_a_skipped_step_and_a_good_step_after_it_does_not():
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    update = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16"))
    skipped = []
    for factor in (1e38, 1.0):
        ctx = TrainContext(batch=None, optimizers=[optimizer])
        update(ctx, Stage.BEFORE_BATCH)
        ctx.loss = factor * weight
        for stage in (Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP):
            update(ctx, stage)
        skipped.append(update.optimizer_step_skipped)
    assert skipped == [True, False]


def test_step_with_infinite_gradients_is_skipped_and_counts_nowhere(toys):
    scheduler = {
        "scheduler_cls": torch.optim.lr_scheduler.StepLR,
        "scheduler_kwargs": {"step_size": 1, "gamma": 0.5},
    }
    model = toys.Slope()
    strategy = TrainingStrategy(
        model, OptimizerConfig(torch.optim.SGD, {"lr": 0.1}, **scheduler), toys.mean_energy,
        num_epochs=1, hooks=[MixedPrecisionHook("fp16")],
    )  # fmt: skip
    strategy.run([toys.batch_of(OVERFLOWS), toys.batch_of(1.0)])
    assert model.w.item() == pytest.approx(0.9)
    assert (strategy.step_count, strategy.batch_count) == (1, 2)
    assert strategy.lr_schedulers[0].get_last_lr() == [0.05]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_is_an_error_under_float16_too(toys, bad):
    strategy = TrainingStrategy(
        DemoModelWrapper(), OptimizerConfig("Adam"), EnergyMSELoss() + ForceMSELoss(), num_epochs=1,
        hooks=[MixedPrecisionHook("fp16")],
    )  # fmt: skip
    good, batch = toys.molecules(2)
    batch.energy[1] = bad
    before = {name: tensor.clone() for name, tensor in strategy.models.state_dict().items()}
    with pytest.raises(ValueError, match=r"energy_mse: graph 1 \(the label 'energy' is not finite\)"):
        strategy.run([batch, good])
    assert all(torch.equal(before[name], tensor) for name, tensor in strategy.models.state_dict().items())
    assert strategy.step_count == 0


def test_overflow_during_accumulation_of_the_window_skips_that_window_only(toys):
    strategy = toys.slope_strategy([MixedPrecisionHook("fp16"), GradientAccumulationHook(2)])
    strategy.run([toys.batch_of(x) for x in (1.0, OVERFLOWS, 1.0, 3.0)])
    assert strategy.models.w.item() == pytest.approx(1.0 - 0.1 * 2.0)


def test_accumulation_2_with_3_batches_reaches_the_end_of_the_epoch(toys):
    strategy = toys.slope_strategy([MixedPrecisionHook("fp16"), GradientAccumulationHook(2)], num_epochs=2)
    strategy.run([toys.batch_of(x) for x in (1.0, 3.0, 5.0)])
    assert strategy.step_count == 4
    assert strategy.models.w.item() == pytest.approx(1.0 - 2 * 0.1 * (2.0 + 5.0))


def test_a_later_hook_vetoes_batch_1(toys):
    weights = []

    class Note:
        frequency, stage = 1, Stage.AFTER_BATCH

        def __call__(self, ctx, stage):
            weights.append(ctx.model.w.item())

    toys.slope_strategy([MixedPrecisionHook("fp16"), VetoBatches(0), Note()]).run([toys.batch_of(1.0)] * 3)
    assert weights == pytest.approx([1.0, 0.9, 0.8])


def test_a_later_hook_vetoes_by_hand_without_the_stage_after_the_step():
    weight = torch.nn.Parameter(torch.tensor(1.0))
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([weight], lr=0.1)])
    update = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16"), VetoBatches(0))
    weights = []
    for ctx.batch_count in range(3):
        update(ctx, Stage.BEFORE_BATCH)
        ctx.loss = weight * 1.0
        update(ctx, Stage.DO_BACKWARD)
        update(ctx, Stage.DO_OPTIMIZER_STEP)
        weights.append(weight.item())
    assert weights == pytest.approx([1.0, 0.9, 0.8])


def test_all_optimizers_are_unscaled_in_order():
    order = []
    parameters = [torch.nn.Parameter(torch.tensor(1.0)) for _ in range(3)]
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in parameters]
    ctx = TrainContext(batch=None, optimizers=optimizers)
    update = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16"))
    update(ctx, Stage.BEFORE_BATCH)
    unscale = ctx.grad_scaler.unscale_
    ctx.grad_scaler.unscale_ = lambda optimizer: (order.append(optimizer), unscale(optimizer))
    ctx.loss = sum(parameters)
    update(ctx, Stage.DO_BACKWARD)
    update(ctx, Stage.DO_OPTIMIZER_STEP)
    assert [id(o) for o in order] == [id(o) for o in optimizers]
    assert [p.item() for p in parameters] == pytest.approx([0.9] * 3)


def test_state_of_the_scaler_goes_through_a_checkpoint(toys):
    def train(strategy, xs):
        for x in xs:
            strategy.train_batch(toys.batch_of(x))

    xs = [1.0, OVERFLOWS, 1.0, OVERFLOWS, 1.0]
    whole = toys.slope_strategy([MixedPrecisionHook("fp16")])
    train(whole, xs)
    first = toys.slope_strategy([MixedPrecisionHook("fp16")])
    train(first, xs[:2])
    first.save_checkpoint("checkpoint")
    second = toys.slope_strategy([MixedPrecisionHook("fp16")])
    second.restore_checkpoint("checkpoint")
    train(second, xs[2:])
    state = next(second.update_hooks()).state_dict()["scaler"]
    assert state == next(whole.update_hooks()).state_dict()["scaler"]
    assert (state["scale"], state["_growth_tracker"]) == (65536.0 / 4, 1)


# ---------------------------------------------------------------------- physics
def test_forces_by_autograd_inside_bfloat16_come_out_in_float32_within_5_percent(toys):
    torch.manual_seed(0)
    model, (batch,) = DemoModelWrapper(), toys.molecules(1, size=20)
    exact = model(batch)["forces"]
    with MixedPrecisionHook("bf16").inference_autocast("cpu"):
        half = model(batch)["forces"]
    assert half.dtype == torch.float32
    assert (half - exact).norm() / exact.norm() < 0.05
    assert not torch.equal(half, exact)


def test_float32_mode_is_bit_equal_to_no_hook(toys):
    results = []
    for hooks in ([], [MixedPrecisionHook("fp32")]):
        torch.manual_seed(0)
        model = DemoModelWrapper()
        loss = EnergyMSELoss() + ForceMSELoss()
        TrainingStrategy(model, OptimizerConfig(torch.optim.Adam), loss, num_epochs=2, hooks=hooks).run(
            toys.molecules()
        )
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_sum_of_squares_of_half_precision_inputs_does_not_overflow(toys):
    """64 squared residuals of 40 sum to 102,400, more than float16 holds; their mean is 1600."""
    batch = toys.molecules(1, size=64)[0]
    batch.energy = torch.zeros(64, 1)
    loss = EnergyMSELoss()({"energy": torch.full((64, 1), 40.0, dtype=torch.float16)}, batch)
    assert loss.total.item() == 1600.0
