"""TrainingUpdateHook and TrainingUpdateOrchestrator: every sentence of their pages, without a strategy around them."""

import doctest

import pytest
import torch

from nvalchemi.hooks import Hook, TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training._steps import steps_made
from nvalchemi.training.hooks import (
    GradientClipHook,
    MixedPrecisionHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
)

Stage = TrainingStage
CLAIMED = {Stage.BEFORE_BATCH, Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP}


class Probe(TrainingUpdateHook):
    """Returns what it is told to and notes what it was given."""

    def __init__(self, name="probe", priority=50, answers=None, factor=None, key=None, log=None):
        self.name, self.priority, self.answers, self.factor = name, priority, answers or {}, factor
        self._exclusive_update_key = key
        self.log = [] if log is None else log

    def __call__(self, ctx, stage, will_skip):
        self.log.append((self.name, stage, will_skip))
        loss = ctx.loss if self.factor is None or stage is not Stage.DO_BACKWARD else ctx.loss * self.factor
        return self.answers.get(stage, True), loss


class ClosingProbe(Probe):
    def close(self):
        self.log.append((self.name, "close"))


class EnteringProbe(Probe):
    def __enter__(self):
        self.log.append((self.name, "enter"))
        return self

    def __exit__(self, *error):
        self.log.append((self.name, "exit"))


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.tensor(1.0))


@pytest.fixture
def ctx(weight):
    return TrainContext(batch=None, optimizers=[torch.optim.SGD([weight], lr=0.1)])


def step(update, ctx, loss):
    """One batch of a loop of one's own."""
    update(ctx, Stage.BEFORE_BATCH)
    ctx.loss = loss
    for stage in (Stage.DO_BACKWARD, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP):
        update(ctx, stage)


# ---------------------------------------------------------------------- the hook
def test_example_of_the_hook_page_runs_as_it_stands():
    example = """
>>> import torch
>>> from nvalchemi.training._stages import TrainingStage
>>> class ClipGrads(TrainingUpdateHook):
...     priority = 30
...     def __init__(self, max_norm):
...         self.max_norm = max_norm
...     def __call__(self, ctx, stage, will_skip):
...         match stage:
...             case TrainingStage.DO_OPTIMIZER_STEP:
...                 if not will_skip:
...                     for opt in ctx.optimizers:
...                         params = (p for g in opt.param_groups for p in g["params"])
...                         torch.nn.utils.clip_grad_norm_(params, self.max_norm)
...                 return True, ctx.loss
...             case _:
...                 return True, ctx.loss
"""
    namespace = {"TrainingUpdateHook": TrainingUpdateHook}
    test = doctest.DocTestParser().get_doctest(example, namespace, "seed", None, 0)
    runner = doctest.DocTestRunner()
    runner.run(test, clear_globs=False)
    assert runner.failures == 0
    weight = torch.nn.Parameter(torch.tensor(1.0))
    ctx = TrainContext(batch=None, optimizers=[torch.optim.SGD([weight], lr=0.1)])
    step(TrainingUpdateOrchestrator(test.globs["ClipGrads"](0.5)), ctx, 8.0 * weight)
    assert weight.item() == pytest.approx(0.95)


def test_defaults_are_priority_50_and_no_exclusive_key():
    hook = TrainingUpdateHook()
    assert hook.priority == 50
    assert hook._exclusive_update_key is None


def test_bare_hook_has_no_stage_and_so_is_no_standard_hook():
    assert not isinstance(Probe(), Hook)
    assert isinstance(TrainingUpdateOrchestrator(Probe()), Hook)


def test_base_class_alone_says_what_is_missing(ctx):
    with pytest.raises(NotImplementedError, match="TrainingUpdateHook does not define __call__"):
        TrainingUpdateOrchestrator(TrainingUpdateHook())(ctx, Stage.BEFORE_BATCH)


def test_plus_composes_hooks_and_orchestrators_in_any_order():
    a, b, c = Probe("a"), Probe("b"), Probe("c")
    for composed in (
        a + b + c,
        a + (b + c),
        (a + b) + c,
        TrainingUpdateOrchestrator(a) + TrainingUpdateOrchestrator(b, c),
    ):
        assert isinstance(composed, TrainingUpdateOrchestrator)
        assert list(composed.iter_hooks()) == [a, b, c]


@pytest.mark.parametrize("other", [3, None, "hook"])
def test_plus_of_something_else_is_a_type_error(other):
    with pytest.raises(TypeError):
        Probe() + other
    with pytest.raises(TypeError):
        TrainingUpdateOrchestrator() + other


# ---------------------------------------------------------------------- making an orchestrator
def test_members_are_sorted_by_priority_and_ties_keep_their_order():
    hooks = [Probe("b", 50), Probe("a", 20), Probe("c", 50), Probe("first", 10)]
    assert [hook.name for hook in TrainingUpdateOrchestrator(*hooks).iter_hooks()] == ["first", "a", "b", "c"]


def test_orchestrators_are_flattened():
    inner = TrainingUpdateOrchestrator(Probe("x", 30), Probe("y", 10))
    outer = TrainingUpdateOrchestrator(Probe("z", 20), inner)
    assert [hook.name for hook in outer.iter_hooks()] == ["y", "z", "x"]


@pytest.mark.parametrize("argument", [object(), Probe, lambda ctx, stage, skip: (True, None)])
def test_argument_that_is_no_update_hook_is_a_type_error(argument):
    with pytest.raises(TypeError, match="TrainingUpdateHook"):
        TrainingUpdateOrchestrator(argument)


def test_same_exclusive_key_twice_is_a_value_error_that_names_both():
    class Other(Probe):
        pass

    with pytest.raises(ValueError, match=r"Other and Probe .*'family'"):
        TrainingUpdateOrchestrator(Probe(key="family"), Other(key="family"))
    TrainingUpdateOrchestrator(Probe(key="one"), Probe(key="two"), Probe(key=None), Probe(key=None))


def test_refused_addition_leaves_the_members_as_they_were():
    update = TrainingUpdateOrchestrator(Probe("a", key="k"))
    with pytest.raises(ValueError, match="'k'"):
        update.extend(Probe("b"), Probe("c", key="k"))
    assert [hook.name for hook in update.iter_hooks()] == ["a"]


def test_frequency_is_1_and_stage_none_and_the_four_update_stages_are_claimed():
    update = TrainingUpdateOrchestrator()
    assert update.frequency == 1
    assert update.stage is None
    assert {stage for stage in TrainingStage if update._runs_on_stage(stage)} == CLAIMED


# ---------------------------------------------------------------------- the answer of a member
@pytest.mark.parametrize("stage", sorted(CLAIMED, key=lambda s: s.name))
@pytest.mark.parametrize("answer", [None, 1, 0, "yes", torch.tensor(True)])
def test_anything_but_a_bool_is_a_type_error_naming_class_and_stage(ctx, weight, stage, answer):
    ctx.loss = weight * 1.0
    with pytest.raises(TypeError, match=rf"Probe at {stage.name}"):
        TrainingUpdateOrchestrator(Probe(answers={stage: answer}))(ctx, stage)


def test_answer_that_is_no_pair_is_a_type_error(ctx):
    class Alone(TrainingUpdateHook):
        def __call__(self, ctx, stage, will_skip):
            return True

    with pytest.raises(TypeError, match=r"Alone at BEFORE_BATCH must return \(proceed, loss\)"):
        TrainingUpdateOrchestrator(Alone())(ctx, Stage.BEFORE_BATCH)


def test_loss_may_be_none_except_at_backward(ctx, weight):
    class Nothing(TrainingUpdateHook):
        def __call__(self, ctx, stage, will_skip):
            return True, None

    update = TrainingUpdateOrchestrator(Nothing())
    for stage in (Stage.BEFORE_BATCH, Stage.DO_OPTIMIZER_STEP, Stage.AFTER_OPTIMIZER_STEP):
        update(ctx, stage)
    ctx.loss = weight * 1.0
    with pytest.raises(TypeError, match="Nothing at DO_BACKWARD must return the loss"):
        update(ctx, Stage.DO_BACKWARD)


# ---------------------------------------------------------------------- vetoes
@pytest.mark.parametrize("vetoing", [0, 1, 2])
def test_any_veto_keeps_the_gradients(ctx, weight, vetoing):
    weight.grad = torch.tensor(7.0)
    hooks = [Probe(str(i), answers={Stage.BEFORE_BATCH: i != vetoing}) for i in range(3)]
    TrainingUpdateOrchestrator(*hooks)(ctx, Stage.BEFORE_BATCH)
    assert weight.grad.item() == 7.0


def test_without_a_veto_gradients_are_zeroed(ctx, weight):
    weight.grad = torch.tensor(7.0)
    TrainingUpdateOrchestrator(Probe())(ctx, Stage.BEFORE_BATCH)
    assert weight.grad is None


@pytest.mark.parametrize("vetoing", [0, 1, 2])
def test_any_veto_leaves_out_optimizer_and_scheduler(ctx, weight, vetoing):
    scheduler = torch.optim.lr_scheduler.StepLR(ctx.optimizers[0], 1, gamma=0.5)
    ctx.lr_schedulers = [scheduler]
    hooks = [Probe(str(i), answers={Stage.DO_OPTIMIZER_STEP: i != vetoing}) for i in range(3)]
    update = TrainingUpdateOrchestrator(*hooks)
    step(update, ctx, weight * 1.0)
    assert update.optimizer_step_skipped is True
    assert weight.item() == 1.0
    assert scheduler.get_last_lr() == [0.1]


def test_optimizer_step_skipped_tells_of_the_most_recent_step_only(ctx, weight):
    hook = Probe()
    update = TrainingUpdateOrchestrator(hook)
    assert update.optimizer_step_skipped is False
    for veto in (True, False):
        hook.answers = {Stage.DO_OPTIMIZER_STEP: not veto}
        step(update, ctx, weight * 1.0)
        assert update.optimizer_step_skipped is veto


def test_later_hooks_are_called_after_a_veto_and_told_of_it_for_that_stage_only(ctx, weight):
    log = []
    vetoing = Probe("veto", 10, answers={Stage.BEFORE_BATCH: False, Stage.DO_OPTIMIZER_STEP: False}, log=log)
    step(
        TrainingUpdateOrchestrator(Probe("first", 5, log=log), vetoing, Probe("later", 20, log=log)),
        ctx,
        weight * 1.0,
    )
    told = {(name, stage): skip for name, stage, skip in log}
    for stage in (Stage.BEFORE_BATCH, Stage.DO_OPTIMIZER_STEP):
        assert (told["first", stage], told["veto", stage], told["later", stage]) == (False, False, True)
    for stage in (Stage.DO_BACKWARD, Stage.AFTER_OPTIMIZER_STEP):
        assert told["later", stage] is False


def test_answer_false_at_ungated_stages_has_no_effect(ctx, weight):
    log = []
    answers = {Stage.DO_BACKWARD: False, Stage.AFTER_OPTIMIZER_STEP: False}
    step(
        TrainingUpdateOrchestrator(Probe("a", answers=answers, log=log), Probe("b", log=log)),
        ctx,
        weight * 1.0,
    )
    assert weight.item() == pytest.approx(0.9)
    assert not any(skip for _, _, skip in log)


# ---------------------------------------------------------------------- the loss
def test_loss_is_threaded_in_priority_order_and_halving_and_doubling_leaves_it(ctx, weight):
    seen = []

    class Look(Probe):
        def __call__(self, ctx, stage, will_skip):
            if stage is Stage.DO_BACKWARD:
                seen.append(ctx.loss.item())
            return super().__call__(ctx, stage, will_skip)

    update = TrainingUpdateOrchestrator(Look("double", 40, factor=2.0), Look("halve", 30, factor=0.5))
    step(update, ctx, weight * 3.0)
    assert seen == [3.0, 1.5]
    assert ctx.loss.item() == 3.0
    assert weight.grad.item() == 3.0


def test_backward_runs_exactly_once(ctx, weight):
    calls = []
    loss = weight * 1.0
    loss.register_hook(lambda gradient: calls.append(gradient))
    step(TrainingUpdateOrchestrator(Probe("a"), Probe("b"), Probe("c")), ctx, loss)
    assert len(calls) == 1


def test_backward_without_a_loss_says_so(ctx):
    with pytest.raises(ValueError, match="no loss"):
        TrainingUpdateOrchestrator()(ctx, Stage.DO_BACKWARD)


# ---------------------------------------------------------------------- steps
def test_scheduler_advances_only_with_its_own_optimizer():
    a, b = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (a, b)]
    schedulers = [None, torch.optim.lr_scheduler.StepLR(optimizers[1], 1, gamma=0.5)]
    ctx = TrainContext(batch=None, optimizers=optimizers, lr_schedulers=schedulers)
    step(MixedPrecisionHook("fp16") + Probe(), ctx, a * 1.0 + b * 1.0)
    assert schedulers[1].get_last_lr() == [0.05]
    step(TrainingUpdateOrchestrator(*[MixedPrecisionHook("fp16")]), ctx, a * 1.0 + b * float("inf"))
    assert schedulers[1].get_last_lr() == [0.05]
    assert a.item() == pytest.approx(0.8)
    assert b.item() == pytest.approx(0.9)


@pytest.mark.parametrize("hooks", [[], [MixedPrecisionHook("fp16")]])
def test_optimizer_without_any_gradient_makes_no_step_in_either_precision(hooks):
    a, b = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (a, b)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
    before = [steps_made(each) for each in optimizers]
    ctx = TrainContext(batch=None, optimizers=optimizers, lr_schedulers=schedulers)
    update = TrainingUpdateOrchestrator(*hooks)
    step(update, ctx, a * 1.0)
    assert [steps_made(each) - n for each, n in zip(optimizers, before, strict=True)] == [1, 0]
    assert [each.get_last_lr() for each in schedulers] == [[0.05], [0.1]]
    assert not update.optimizer_step_skipped
    other = torch.nn.Parameter(torch.tensor(1.0))
    step(update, ctx, other * 1.0)
    assert update.optimizer_step_skipped


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_step_of_a_fused_optimizer_does_not_count_either(fused):
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ctx = TrainContext(batch=None, optimizers=[optimizer], lr_schedulers=[scheduler])
    update = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16"))
    step(update, ctx, weight * 1.0)
    after_first = weight.item()
    step(update, ctx, weight * float("nan"))
    assert weight.item() == after_first
    assert scheduler.get_last_lr() == [0.05]


# ---------------------------------------------------------------------- opening, closing, setup
def test_setup_is_passed_to_the_children(ctx):
    probe = Probe()
    TrainingUpdateOrchestrator(probe)(ctx, Stage.SETUP)
    assert probe.log == [("probe", Stage.SETUP, False)]


def test_context_manager_enters_and_exits_children_or_closes_them():
    log = []
    hooks = (EnteringProbe("e", log=log), ClosingProbe("c", log=log), Probe("p", log=log))
    with TrainingUpdateOrchestrator(*hooks):
        assert log == [("e", "enter")]
    assert log == [("e", "enter"), ("c", "close"), ("e", "exit")]


def test_child_that_cannot_be_entered_closes_those_before_it():
    log = []

    class Broken(EnteringProbe):
        def __enter__(self):
            raise OSError("no disk")

    with (
        pytest.raises(OSError, match="no disk"),
        TrainingUpdateOrchestrator(EnteringProbe("e", log=log), Broken(log=log)),
    ):
        pass
    assert log == [("e", "enter"), ("e", "exit")]


def test_close_closes_every_child_that_has_close_also_when_one_fails():
    log = []

    class Broken(Probe):
        def close(self):
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        TrainingUpdateOrchestrator(ClosingProbe("a", log=log), Broken(), ClosingProbe("b", log=log)).close()
    assert log == [("b", "close"), ("a", "close")]


def test_state_goes_from_one_orchestrator_to_an_equal_one_and_not_to_another(ctx, weight):
    update = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16"), GradientClipHook(1.0))
    step(update, ctx, weight * float("inf"))
    state = update.state_dict()
    other = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16"))
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(ValueError, match="do not match"):
        TrainingUpdateOrchestrator(GradientClipHook(1.0)).load_state_dict(state)
