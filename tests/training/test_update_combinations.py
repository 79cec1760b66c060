"""Every combination of the update hooks gives, bit for bit, what a loop written by hand in plain PyTorch gives."""

import copy
import itertools
import statistics
from contextlib import nullcontext

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi.models.demo import DemoModelWrapper
from nvalchemi.training import EnergyMSELoss, ForceMSELoss, OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    SpikeSkipHook,
)

EPOCHS, WINDOW, MAX_NORM, DECAY = 3, 2, 0.5, 0.9
SPIKE = {"loss_factor": 1.2, "grad_norm_factor": 1.5, "min_history": 2, "window": 4}
LOSS = EnergyMSELoss() + 3.0 * ForceMSELoss()
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def start():
    torch.manual_seed(1)
    return DemoModelWrapper()


def by_hand(batches, accumulate, precision, clip, spike, average):
    """Weights (and averaged weights) after each batch."""
    model, window = start(), WINDOW if accumulate else 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dtype = DTYPES.get(precision)
    scaler = torch.amp.GradScaler("cpu") if precision == "fp16" else None
    averaged = None
    losses, norms = [], []
    history = []
    for _ in range(EPOCHS):
        model.train()
        for first in range(0, len(batches), window):
            group = batches[first : first + window]
            optimizer.zero_grad()
            group_losses = []
            for batch in group:
                with torch.autocast("cpu", dtype) if dtype else nullcontext():
                    loss = LOSS(model(batch), batch).total
                group_losses.append(loss.item())
                loss = loss / len(group)
                if scaler:
                    loss = scaler.scale(loss)
                loss.backward()
                if batch is not group[-1]:
                    history.append(snapshot(model, averaged))
            run = True
            if scaler:
                scaler.unscale_(optimizer)
            parameters = list(model.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            finite = all(g.isfinite().all() for g in gradients)
            norm = torch.nn.utils.get_total_norm(gradients).item()
            if clip and finite:
                torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            if spike and not (scaler and not finite):
                loss_value = statistics.fmean(group_losses)
                run = not (
                    len(losses) >= SPIKE["min_history"]
                    and (
                        loss_value > SPIKE["loss_factor"] * statistics.median(losses)
                        or norm > SPIKE["grad_norm_factor"] * statistics.median(norms)
                    )
                )
                if run:
                    losses, norms = (
                        [*losses, loss_value][-SPIKE["window"] :],
                        [*norms, norm][-SPIKE["window"] :],
                    )
            if run and scaler:
                scaler.step(optimizer)
            elif run:
                optimizer.step()
            if scaler:
                scaler.update()
            run = run and finite
            if run:
                scheduler.step()
            if run and average:
                if averaged is None:
                    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
                averaged.update_parameters(model)
            history.append(snapshot(model, averaged))
    return history, scheduler.get_last_lr()


def snapshot(model, averaged):
    average = None if averaged is None else copy.deepcopy(averaged.module.state_dict())
    return copy.deepcopy(model.state_dict()), average


class Record:
    frequency, stage = 1, TrainingStage.AFTER_BATCH

    def __init__(self, ema):
        self.ema, self.history = ema, []

    def __call__(self, ctx, stage):
        ready = self.ema is not None and self.ema.num_updates
        average = copy.deepcopy(self.ema.get_averaged_model().state_dict()) if ready else None
        self.history.append((copy.deepcopy(ctx.model.state_dict()), average))


def with_hooks(batches, accumulate, precision, clip, spike, average):
    ema = EMAHook(decay=DECAY) if average else None
    record = Record(ema)
    hooks = [record, ema]
    if spike:
        hooks.append(SpikeSkipHook(**SPIKE))
    if clip:
        hooks.append(GradientClipHook(MAX_NORM))
    if precision is not None:
        hooks.append(MixedPrecisionHook(precision))
    if accumulate:
        hooks.append(GradientAccumulationHook(WINDOW))
    scheduler = {"scheduler_cls": torch.optim.lr_scheduler.ExponentialLR, "scheduler_kwargs": {"gamma": 0.9}}
    config = OptimizerConfig(torch.optim.Adam, {"lr": 0.01}, **scheduler)
    strategy = TrainingStrategy(
        start(), config, LOSS, num_epochs=EPOCHS, hooks=[h for h in hooks if h is not None]
    )
    strategy.run(batches)
    return record.history, strategy.lr_schedulers[0].get_last_lr()


def differs(a, b):
    if (a is None) != (b is None):
        return True
    return a is not None and any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("precision", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("accumulate", "clip", "spike", "average"), list(itertools.product([False, True], repeat=4))
)
def test_combination_equals_hand_written_loop_step_by_step(toys, accumulate, precision, clip, spike, average):
    batches = toys.molecules(n_batches=5, size=3)
    options = (accumulate, precision, clip, spike, average)
    expected, expected_lr = by_hand(batches, *options)
    found, lr = with_hooks(batches, *options)
    assert len(found) == len(expected) == EPOCHS * len(batches)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert not differs(ours[0], theirs[0]), f"weights differ after batch {number}"
        assert not differs(ours[1], theirs[1]), f"averaged weights differ after batch {number}"
    assert lr == expected_lr


def test_the_spikes_and_overflows_that_the_combinations_are_meant_to_meet_do_occur(toys):
    """Otherwise the test above would not test them."""
    batches = toys.molecules(n_batches=5, size=3)
    spike = SpikeSkipHook(**SPIKE)
    strategy = TrainingStrategy(
        start(), OptimizerConfig(torch.optim.Adam, {"lr": 0.01}), LOSS, num_epochs=EPOCHS, hooks=[spike]
    )
    strategy.run(batches)
    assert 0 < spike.n_skipped < strategy.batch_count
    strategy = TrainingStrategy(
        start(),
        OptimizerConfig(torch.optim.Adam, {"lr": 0.01}),
        LOSS,
        num_epochs=EPOCHS,
        hooks=[MixedPrecisionHook("fp16")],
    )
    strategy.run(batches)
    assert 0 < strategy.step_count < strategy.batch_count
