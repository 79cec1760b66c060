"""Accumulation, clipping, spike skipping, averaging: each hook's contract."""

import logging
import math
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from nvalchemi.data import Batch, DataLoader, InMemoryDataset, read
from nvalchemi.hooks import TrainContext
from nvalchemi.models import load_model
from nvalchemi.models.demo import DemoModelWrapper
from nvalchemi.training import (
    EnergyMAELoss,
    EnergyMSELoss,
    ForceMSELoss,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    ValidationConfig,
)
from nvalchemi.training.hooks import (
    CheckpointHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SpikeSkipHook,
    TrainableParameterHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
)

Stage = TrainingStage
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


class Veto(TrainingUpdateHook):
    priority = 90

    def __init__(self, *batches):
        self.batches = batches

    def __call__(self, ctx, stage, will_skip):
        return not (stage is Stage.DO_OPTIMIZER_STEP and ctx.batch_count in self.batches), ctx.loss


class Applied:
    """Mean gradients that were applied: differences of the weight at lr 1."""

    frequency, stage = 1, Stage.AFTER_BATCH

    def __init__(self):
        self.weights, self.gradients = [0.0], []

    def __call__(self, ctx, stage):
        w = ctx.model.w.item()
        if w != self.weights[-1]:
            self.gradients.append(self.weights[-1] - w)
            self.weights.append(w)


@pytest.mark.parametrize("steps", [True, 0, -1, 2.0, "4", None])
def test_window_is_a_whole_number_of_batches(steps):
    with pytest.raises(ValidationError, match="steps"):
        GradientAccumulationHook(steps)


def applied_gradients(toys, hook, batches, **options):
    applied = Applied()
    toys.slope_strategy([hook, applied], lr=1.0, w=0.0, **options).run(batches)
    return applied.gradients


@pytest.mark.parametrize(
    "hook",
    [
        GradientAccumulationHook(3, reduction="graphs"),
        MixedPrecisionHook("bf16"),
        GradientClipHook(1.0, per_model=True),
        GradientClipHook(max_value=0.1),
        SpikeSkipHook(loss_factor=2.0),
        EMAHook(decay=0.9, update_every=2),
    ],
    ids=lambda hook: type(hook).__name__,
)
def test_hooks_are_pydantic_models_that_can_be_dumped_and_validated(hook):
    assert isinstance(hook, BaseModel)
    assert isinstance(hook, TrainingUpdateHook)
    copy = type(hook).model_validate_json(hook.model_dump_json())
    assert copy.model_dump() == hook.model_dump()


def test_infinite_norm_type_survives_json():
    hook = GradientClipHook(1.0, norm_type=float("inf"))
    assert GradientClipHook.model_validate_json(hook.model_dump_json()) == hook


def test_arguments_may_be_given_by_position_in_the_order_of_the_contract(tmp_path):
    average = EMAHook("student", 0.9, 2, 3, False)
    assert (average.update_every, average.start_step, average.use_buffers) == (2, 3, False)
    assert CheckpointHook(tmp_path, 10).step_interval == 10
    frozen = TrainableParameterHook(["embedding*"], ["embedding.bias"])
    assert frozen.trainable_patterns == ("embedding.bias",)
    assert ValidationConfig([], every_n_steps=2).validation_data == []


def test_priorities_are_those_of_the_contract():
    hooks = (
        GradientAccumulationHook(2),
        MixedPrecisionHook("fp16"),
        GradientClipHook(1.0),
        SpikeSkipHook(),
        EMAHook(),
    )
    assert [hook.priority for hook in hooks] == [10, 20, 30, 40, 50]
    assert list(TrainingUpdateOrchestrator(*reversed(hooks)).iter_hooks()) == list(hooks)


# ---------------------------------------------------------------------- accumulation
def test_seven_batches_in_windows_of_three_apply_means_2_5_7(toys):
    batches = [toys.batch_of(x) for x in range(1, 8)]
    assert applied_gradients(toys, GradientAccumulationHook(3), batches) == [2.0, 5.0, 7.0]


def test_window_of_a_loader_without_length_is_closed_at_the_end_too(toys):
    class Stream:
        def __iter__(self):
            return (toys.batch_of(x) for x in range(1, 9))

    assert applied_gradients(toys, GradientAccumulationHook(3), Stream()) == pytest.approx([2.0, 5.0, 7.5])


def test_windows_start_anew_with_each_epoch(toys):
    batches = [toys.batch_of(x) for x in (1, 3, 6)]
    assert applied_gradients(toys, GradientAccumulationHook(2), batches, num_epochs=2) == [2.0, 6.0, 2.0, 6.0]


def test_sum_leaves_the_loss_as_it_is(toys):
    batches = [toys.batch_of(x) for x in (1, 2, 4)]
    assert applied_gradients(toys, GradientAccumulationHook(2, reduction="sum"), batches) == [3.0, 4.0]


def test_graphs_weights_by_size_1_1_1_and_5_is_2(toys):
    batches = [toys.batch_of(1, 1, 1), toys.batch_of(5)]
    assert applied_gradients(toys, GradientAccumulationHook(2, reduction="graphs"), batches) == pytest.approx(
        [2.0]
    )


@pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 4, 2), (5, 1), (2,)])
def test_graphs_gives_the_gradient_of_the_one_big_batch(toys, sizes):
    torch.manual_seed(0)
    structures = toys.molecules(1, size=sum(sizes))[0].to_data_list()
    parts, start = [], 0
    for size in sizes:
        parts.append(Batch.from_data_list(structures[start : start + size]))
        start += size

    def weights(batches, hooks):
        torch.manual_seed(3)
        model = DemoModelWrapper()
        config = OptimizerConfig(torch.optim.SGD, {"lr": 0.1})
        TrainingStrategy(model, config, EnergyMSELoss(), num_epochs=1, hooks=hooks).run(batches)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    hook = GradientAccumulationHook(3, reduction="graphs")
    whole = weights([Batch.from_data_list(structures)], [])
    torch.testing.assert_close(weights(parts, [hook]), whole, rtol=1e-5, atol=1e-6)


def _labelled(toys, *labels):
    batch = toys.batch_of(*[1.0] * len(labels))
    batch.add_key("energy", torch.tensor([[float(e)] for e in labels]), level="system")
    return batch


@pytest.mark.parametrize(
    "windows",
    [
        [[1, math.nan, math.nan, math.nan], [-1, -1, -1, -1]],
        [[math.nan, math.nan], [1, -1, -1]],
        [[-1, math.nan, -1], [math.nan]],
        [[math.nan], [math.nan, math.nan]],
    ],
)
def test_graphs_counts_structures_with_a_label_only(toys, windows):
    def weight(batches, hooks):
        strategy = TrainingStrategy(
            toys.Slope(0.0),
            OptimizerConfig(torch.optim.SGD, {"lr": 1.0}),
            EnergyMAELoss(ignore_nonfinite=True),
            num_epochs=1,
            hooks=hooks,
        )
        strategy.run(batches)
        return strategy.models.w.item()

    big = weight([_labelled(toys, *(e for batch in windows for e in batch))], [])
    hook = GradientAccumulationHook(2, reduction="graphs")
    assert weight([_labelled(toys, *batch) for batch in windows], [hook]) == pytest.approx(big)


def test_graphs_warns_once_where_terms_have_labels_in_different_structures(toys):
    batches = toys.molecules(4)
    for batch in batches:
        batch.energy[0] = math.nan
    loss = EnergyMSELoss(ignore_nonfinite=True) + ForceMSELoss(ignore_nonfinite=True)
    strategy = TrainingStrategy(
        DemoModelWrapper(),
        OptimizerConfig(torch.optim.SGD, {"lr": 0.0}),
        loss,
        num_epochs=1,
        hooks=[GradientAccumulationHook(2, reduction="graphs")],
    )
    with pytest.warns(UserWarning, match="energy_mse: 2, forces_mse: 3") as record:
        strategy.run(batches)
    assert len(record) == 1


def test_gradients_are_zeroed_at_the_first_microbatch_of_a_window_only():
    weight = nn.Parameter(torch.tensor(1.0))
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([weight], lr=0.0)])
    update = TrainingUpdateOrchestrator(GradientAccumulationHook(2))
    gradients = []
    for _ in range(4):
        update(ctx, Stage.BEFORE_BATCH)
        gradients.append(None if weight.grad is None else weight.grad.item())
        ctx.loss = weight * 1.0
        update(ctx, Stage.DO_BACKWARD)
        update(ctx, Stage.DO_OPTIMIZER_STEP)
        gradients.append(update.optimizer_step_skipped)
    assert gradients == [None, True, 0.5, False, None, True, 0.5, False]


def test_batch_that_raises_gives_up_its_window(toys):
    hook = GradientAccumulationHook(2)
    strategy = toys.slope_strategy([hook], lr=1.0, w=0.0)
    with strategy:
        strategy.train_batch(toys.batch_of(100))
        with pytest.raises(ValueError, match="loss"):
            strategy.train_batch(toys.batch_of(math.nan))
        strategy.train_batch(toys.batch_of(1))
        strategy.train_batch(toys.batch_of(3))
    assert strategy.models.w.item() == -2.0


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 2, "reduction": "median"}, {"steps": 1.5}])
def test_accumulation_refuses_bad_options(options):
    with pytest.raises((ValidationError, TypeError)):  # TypeError: by the type checker of the tests
        GradientAccumulationHook(**options)


# ---------------------------------------------------------------------- clipping
def parameters_with_gradients(*gradients):
    parameters = [nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_two_groups_with_norms_3_and_4_are_clipped_by_their_common_norm():
    a, b = parameters_with_gradients([3.0, 0.0], [0.0, 4.0])
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)])
    hook = GradientClipHook(1.0)
    assert hook(ctx, Stage.DO_OPTIMIZER_STEP, False)[0] is True
    assert (a.grad.norm().item(), b.grad.norm().item()) == pytest.approx((0.6, 0.8), rel=1e-5)
    assert hook.last_total_norm == 5.0


def test_norm_is_common_to_several_optimizers_unless_per_model():
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    for per_model, expected in ((False, (0.6, 0.8)), (True, (1.0, 1.0))):
        a.weight.grad, b.weight.grad = torch.tensor([[3.0]]), torch.tensor([[4.0]])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
        ctx = TrainContext(batch=None, optimizers=optimizers, models={"a": a, "b": b})
        hook = GradientClipHook(1.0, per_model=per_model)
        hook(ctx, Stage.DO_OPTIMIZER_STEP, False)
        assert (a.weight.grad.item(), b.weight.grad.item()) == pytest.approx(expected, rel=1e-5)
        assert hook.last_total_norm == ({"a": 3.0, "b": 4.0} if per_model else 5.0)


def test_max_value_cuts_each_element_and_norm_type_is_honoured():
    (a,) = parameters_with_gradients([3.0, -0.5, -7.0])
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([a], lr=0.1)])
    hook = GradientClipHook(max_value=1.0, norm_type=math.inf)
    hook(ctx, Stage.DO_OPTIMIZER_STEP, False)
    assert a.grad.tolist() == [1.0, -0.5, -1.0]
    assert hook.last_total_norm == 7.0


def test_nothing_is_clipped_before_a_step_that_will_not_run():
    (a,) = parameters_with_gradients([30.0])
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([a], lr=0.1)])
    hook = GradientClipHook(1.0)
    assert hook(ctx, Stage.DO_OPTIMIZER_STEP, True)[0] is True
    assert a.grad.item() == 30.0
    assert hook.last_total_norm is None


@pytest.mark.parametrize(
    "limits", [{}, {"max_norm": 1.0, "max_value": 1.0}, {"max_norm": -1.0}, {"max_value": 0.0}]
)
def test_exactly_one_positive_limit(limits):
    with pytest.raises(ValidationError):
        GradientClipHook(**limits)


@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"max_value": 1.0}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_is_skipped_and_said_or_an_error(toys, caplog, limit, bad):
    class Bad(toys.Slope):
        """The forward pass is finite, the gradient is not."""

        def forward(self, batch):
            energy = super().forward(batch)["energy"]
            if batch["x"].item() == 2.0:
                energy.register_hook(lambda g: g * bad)
            return {"energy": energy}

    batches = [toys.batch_of(x) for x in (1.0, 2.0, 1.0)]
    strategy = toys.slope_strategy([GradientClipHook(**limit)], model=Bad())
    with caplog.at_level(logging.WARNING, "nvalchemi.training"):
        strategy.run(batches)
    assert strategy.models.w.item() == pytest.approx(0.8)
    assert strategy.step_count == 2
    assert "step left out" in caplog.text
    strategy = toys.slope_strategy([GradientClipHook(**limit, error_if_nonfinite=True)], model=Bad())
    with pytest.raises(RuntimeError, match=r"at step 1 .* is not finite"):
        strategy.run(batches)
    assert strategy.models.w.item() == pytest.approx(0.9)


# ---------------------------------------------------------------------- spikes
def test_loss_far_above_the_median_is_vetoed_and_not_remembered(toys):
    hook = SpikeSkipHook(loss_factor=3.0, min_history=3, window=5)
    strategy = toys.slope_strategy([hook], lr=0.0)
    strategy.run([toys.batch_of(x) for x in (1, 1, 1, 2.9, 50, 50, 3.1, 1)])
    assert hook.n_skipped == 3
    assert strategy.step_count == 5
    assert max(hook.state_dict()["losses"]) == pytest.approx(2.9)


def test_gradient_norm_far_above_the_median_is_vetoed(toys):
    hook = SpikeSkipHook(grad_norm_factor=3.0, min_history=3)
    strategy = toys.slope_strategy([hook], lr=0.0, w=0.0)
    strategy.run([toys.batch_of(x) for x in (1, 1, 1, -10, 1)])
    assert hook.n_skipped == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_vetoed_from_the_first_batch_on(toys, bad):
    hook = SpikeSkipHook()
    strategy = toys.slope_strategy([hook])
    strategy.run([toys.batch_of(bad), toys.batch_of(1.0)])
    assert hook.n_skipped == 1
    assert strategy.models.w.item() == pytest.approx(0.9)


def test_nothing_but_the_infinite_is_judged_before_min_history(toys):
    hook = SpikeSkipHook(loss_factor=2.0, min_history=4)
    toys.slope_strategy([hook], lr=0.0).run([toys.batch_of(x) for x in (1, 100, 1, 100, 300)])
    assert hook.n_skipped == 1


def test_too_many_vetoes_in_a_row_are_an_error_with_the_history(toys):
    hook = SpikeSkipHook(loss_factor=2.0, min_history=2, window=3, max_consecutive=2)
    strategy = toys.slope_strategy([hook], lr=0.0)
    with pytest.raises(RuntimeError, match=r"3 steps in a row .* loss 50; loss 60; loss 70; loss median 1"):
        strategy.run([toys.batch_of(x) for x in (1, 1, 50, 60, 70)])


def test_vetoes_that_are_not_in_a_row_are_none(toys):
    hook = SpikeSkipHook(loss_factor=2.0, min_history=2, max_consecutive=1)
    toys.slope_strategy([hook], lr=0.0).run([toys.batch_of(x) for x in (1, 1, 50, 1, 50, 1, 50, 1)])
    assert hook.n_skipped == 3


def test_overflow_of_a_scaler_is_no_spike(toys):
    hook = SpikeSkipHook(loss_factor=2.0, grad_norm_factor=2.0, max_consecutive=1)
    scaler = MixedPrecisionHook("fp16")
    strategy = toys.slope_strategy([hook, scaler])
    strategy.run([toys.batch_of(x) for x in (1.0, 1e36, 1e36, 1e36, 1.0)])
    assert hook.n_skipped == 0
    assert strategy.models.w.item() == pytest.approx(0.8)
    assert scaler.state_dict()["scaler"]["scale"] == 65536.0 / 8


def test_loss_of_a_window_is_judged_as_a_whole_and_without_scale(toys):
    hook = SpikeSkipHook(loss_factor=3.0, min_history=1)
    hooks = [hook, GradientAccumulationHook(2), MixedPrecisionHook("fp16")]
    toys.slope_strategy(hooks, lr=0.0).run([toys.batch_of(x) for x in (1, 3, 2, 4)])
    assert hook.state_dict()["losses"] == [2.0, 3.0]


def test_window_cut_short_is_judged_by_the_mean_of_its_losses(toys):
    hook = SpikeSkipHook(loss_factor=1.4, min_history=1)
    toys.slope_strategy([hook, GradientAccumulationHook(3)], lr=0.0).run(
        [toys.batch_of(x) for x in (2, 2, 2, 2, 2)]
    )
    assert hook.state_dict()["losses"] == [2.0, 2.0]


def test_gradient_norm_is_judged_as_it_was_before_clipping(toys):
    hook = SpikeSkipHook(grad_norm_factor=3.0, min_history=3)
    strategy = toys.slope_strategy([hook, GradientClipHook(0.5)], lr=0.0)
    strategy.run([toys.batch_of(x) for x in (1, 1, 1, -10, 2)])
    assert hook.n_skipped == 1
    assert hook.state_dict()["norms"] == [1.0, 1.0, 1.0, 2.0]


def test_norm_of_all_gradients_is_told_also_when_models_are_clipped_apart():
    three, four = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    three.weight.grad, four.weight.grad = torch.tensor([[3.0]]), torch.tensor([[4.0]])
    ctx = TrainContext(
        batch=None,
        models={"three": three, "four": four},
        optimizers=[torch.optim.SGD([three.weight, four.weight], lr=0.1)],
    )
    GradientClipHook(1.0, per_model=True)(ctx, Stage.DO_OPTIMIZER_STEP, False)
    assert ctx.gradient_norm == pytest.approx(5.0)


def test_nan_loss_under_a_scaler_is_a_spike_and_not_an_overflow(toys):
    hook = SpikeSkipHook()
    strategy = toys.slope_strategy([hook, MixedPrecisionHook("fp16")])
    strategy.run([toys.batch_of(math.nan), toys.batch_of(1.0)])
    assert hook.n_skipped == 1
    assert strategy.step_count == 1


def test_loss_of_a_step_that_another_hook_vetoed_is_not_added_to_the_next():
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    spike = SpikeSkipHook(loss_factor=1.5, min_history=2)
    update = TrainingUpdateOrchestrator(GradientClipHook(1.0), spike)
    skipped = []
    for gradient in (1.0, 1.0, float("nan"), 1.0):
        ctx = TrainContext(batch=None, optimizers=[optimizer])
        update(ctx, Stage.BEFORE_BATCH)
        ctx.loss = weight * 1.0
        update(ctx, Stage.DO_BACKWARD)
        weight.grad.fill_(gradient)
        update(ctx, Stage.DO_OPTIMIZER_STEP)
        skipped.append(update.optimizer_step_skipped)
    assert skipped == [False, False, True, False]
    assert spike.n_skipped == 0


def test_spike_hook_refuses_bad_options():
    for options in ({"loss_factor": 0.5}, {"grad_norm_factor": 1.0}, {"min_history": 20, "window": 10}):
        with pytest.raises(ValidationError):
            SpikeSkipHook(**options)


# ---------------------------------------------------------------------- averaging
class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("count", torch.tensor(0))


def test_average_of_1_2_3_with_decay_09():
    model, hook = WithBuffer(), EMAHook(decay=0.9)
    ctx = TrainContext(batch=None, model=model, models={"main": model})
    averages = []
    for value in (1.0, 2.0, 3.0):
        model.w.data.fill_(value)
        model.mean.fill_(10 * value)
        model.count.fill_(int(value))
        hook(ctx, Stage.AFTER_OPTIMIZER_STEP, False)
        average = hook.get_averaged_model()
        averages.append(average.w.item())
        assert (average.mean.item(), average.count.item()) == (10 * value, value)
    assert averages == pytest.approx([1.0, 1.1, 1.29])
    assert hook.num_updates == 3
    assert not average.training
    assert not average.w.requires_grad


def test_buffers_stay_when_they_are_not_used():
    model, hook = WithBuffer(), EMAHook(decay=0.9, use_buffers=False)
    ctx = TrainContext(batch=None, model=model, models={"main": model})
    for value in (1.0, 2.0):
        model.mean.fill_(value)
        hook(ctx, Stage.AFTER_OPTIMIZER_STEP, False)
    assert hook.get_averaged_model().mean.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_averaged_in_float32_also_after_a_restart(dtype):
    model = torch.nn.Linear(1, 1, bias=False).to(dtype)

    def run(hook, steps):
        for _ in range(steps):
            hook(TrainContext(batch=None, models={"main": model}), Stage.AFTER_OPTIMIZER_STEP, False)

    model.weight.data.fill_(1.0)
    hook = EMAHook(decay=0.999)
    run(hook, 1)
    model.weight.data.fill_(2.0)
    run(hook, 500)
    restored = EMAHook(decay=0.999)
    restored.load_state_dict(hook.state_dict())
    restored(TrainContext(batch=None, models={"main": model}), Stage.BEFORE_BATCH, False)
    for each in (hook, restored):
        run(each, 500)
        average = each.get_averaged_model().weight
        assert average.dtype == dtype
        # One rounding to the precision of the weights, not a thousand.
        assert average.item() == pytest.approx(2 - 0.999**1000, rel=torch.finfo(dtype).eps)


def test_only_real_steps_are_averaged(toys):
    ema = EMAHook(decay=0.5)
    hooks = [ema, MixedPrecisionHook("fp16"), GradientAccumulationHook(2), Veto(3)]
    strategy = toys.slope_strategy(hooks)
    strategy.run([toys.batch_of(x) for x in (1.0, 1.0, 1.0, 1.0, 1.0, 1e36, 1.0)])
    # Windows: a step, a veto, an overflow, a step.
    assert strategy.step_count == 2
    assert ema.num_updates == 2
    assert ema.get_averaged_model().w.item() == pytest.approx(0.5 * 0.9 + 0.5 * 0.8)


def test_start_and_interval_count_real_steps(toys):
    ema = EMAHook(decay=0.0, start_step=3, update_every=2)
    seen = []

    class Note:
        frequency, stage = 1, Stage.AFTER_BATCH

        def __call__(self, ctx, stage):
            seen.append(ema.num_updates)

    toys.slope_strategy([ema, Note()]).run([toys.batch_of(1.0)] * 8)
    assert seen == [0, 0, 0, 1, 1, 2, 2, 3]


def test_average_follows_the_optimizer_of_its_own_model(toys):
    models = {"a": toys.Slope(), "b": toys.Slope()}
    ema = EMAHook("b")

    def training_fn(models, batch):
        return {"energy": models["a"](batch)["energy"]}

    TrainingStrategy(
        models,
        {key: OptimizerConfig(torch.optim.SGD, {"lr": 0.1}) for key in models},
        toys.mean_energy,
        num_epochs=1,
        training_fn=training_fn,
        hooks=[ema, MixedPrecisionHook("fp16")],
    ).run([toys.batch_of(1.0)])
    assert ema.num_updates == 0
    with pytest.raises(RuntimeError, match="no average of model 'b' yet"):
        ema.get_averaged_model()


def test_unknown_model_is_named(toys):
    with pytest.raises(ValueError, match=r"'student'; the models are \['main'\]"):
        toys.slope_strategy([EMAHook("student")]).run([toys.batch_of(1.0)])


def test_two_averages_of_one_model_are_refused_and_of_two_models_are_not():
    EMAHook("a") + EMAHook("b")
    with pytest.raises(ValueError, match="average of model 'a'"):
        EMAHook("a") + EMAHook("a", decay=0.5)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float64)])
def test_clipping_is_that_of_torch_to_the_bit_also_for_gradients_of_several_dtypes(norm_type, dtypes):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(7, dtype=dtype)) for dtype in (*dtypes, dtypes[0])]
    theirs = [torch.nn.Parameter(torch.zeros_like(p)) for p in ours]
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn_like(mine)
        other.grad = mine.grad.clone()
    hook = GradientClipHook(0.3, norm_type=norm_type)
    hook(TrainContext(batch=None, optimizers=[torch.optim.SGD(ours)]), Stage.DO_OPTIMIZER_STEP, False)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.3, norm_type)
    assert hook.last_total_norm == norm.item()
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_average_of_a_scripted_model_whose_copy_has_more_buffers():
    pytest.importorskip("sevenn")
    model = load_model("7net-0")
    data = read(EXAMPLES / "crystals.extxyz", index=":2")
    for structure in data:
        structure.add_system_property("energy", torch.zeros(1, 1))
    hook = EMAHook(decay=0.5)
    configuration = OptimizerConfig("SGD", {"lr": 1e-6})
    strategy = TrainingStrategy(model, configuration, EnergyMSELoss(), num_steps=2, hooks=[hook])
    strategy.run(DataLoader(InMemoryDataset(data), batch_size=1))
    weights = hook.state_dict()["weights"]
    model.load_state_dict(weights)
    resumed = EMAHook(decay=0.5)
    resumed.load_state_dict(hook.state_dict())
    TrainingStrategy(model, configuration, EnergyMSELoss(), num_steps=1, hooks=[resumed]).run(
        DataLoader(InMemoryDataset(data), batch_size=1)
    )
    assert resumed.num_updates == 3
