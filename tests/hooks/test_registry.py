"""Registration, dispatch, opening and closing of hooks."""

from enum import Enum

import pytest

from nvalchemi.hooks import CheckpointableHook, Hook, HookContext, HookOrderWarning, HookRegistryMixin


class Stage(Enum):
    FIRST = 0
    SECOND = 1


class Other(Enum):
    ELSEWHERE = 0


class Engine(HookRegistryMixin):
    _stage_type = Stage

    def __init__(self):
        self.step_count = 0
        self.contexts = 0

    def _build_context(self, batch):
        self.contexts += 1
        return HookContext(batch=batch, workflow=self)

    def step(self):
        for stage in Stage:
            self._call_hooks(stage, None)
        self.step_count += 1


class Recorder:
    def __init__(self, log, name, frequency=1, stage=Stage.FIRST):
        self.log, self.name, self.frequency, self.stage = log, name, frequency, stage

    def __call__(self, ctx, stage):
        self.log.append((self.name, stage.name, ctx.workflow.step_count))


class Everywhere(Recorder):
    def _runs_on_stage(self, stage):
        return True


def test_frequency_three_over_ten_steps_fires_at_0_3_6_9():
    engine, log = Engine(), []
    engine.register_hook(Recorder(log, "a", frequency=3))
    for _ in range(10):
        engine.step()
    assert [step for *_, step in log] == [0, 3, 6, 9]


def test_hooks_of_one_stage_fire_in_registration_order_whatever_their_frequencies():
    engine, log = Engine(), []
    for name, frequency in [("a", 2), ("b", 1), ("c", 3), ("d", 2)]:
        engine.register_hook(Recorder(log, name, frequency))
    for _ in range(7):
        engine.step()
    at = {step: "".join(name for name, _, s in log if s == step) for step in range(7)}
    assert at == {0: "abcd", 1: "b", 2: "abd", 3: "bc", 4: "abd", 5: "b", 6: "abcd"}


def test_multi_stage_hook_fires_where_it_says_and_may_be_of_another_stage_type():
    engine, log = Engine(), []
    engine.register_hook(Everywhere(log, "a", stage=Other.ELSEWHERE))
    engine.step()
    assert log == [("a", "FIRST", 0), ("a", "SECOND", 0)]


def test_context_is_built_only_when_a_hook_is_due_and_once_per_dispatch():
    engine, log = Engine(), []
    engine.register_hook(Recorder(log, "a", frequency=5))
    engine.register_hook(Recorder(log, "b", frequency=5))
    for _ in range(10):
        engine.step()
    assert engine.contexts == 2


def test_stage_given_at_registration_is_assigned():
    engine, log = Engine(), []
    hook = Recorder(log, "a", stage=None)
    engine.register_hook(hook, stage=Stage.SECOND)
    assert hook.stage is Stage.SECOND
    engine.step()
    assert log == [("a", "SECOND", 0)]


@pytest.mark.parametrize("frequency", [0, -1, True, 1.0, "1", None])
def test_bad_frequency_is_refused_and_the_hook_left_unchanged(frequency):
    hook = Recorder([], "a", frequency, stage=None)
    engine = Engine()
    with pytest.raises(ValueError, match="frequency of Recorder"):
        engine.register_hook(hook, stage=Stage.FIRST)
    assert hook.stage is None
    assert not engine.hooks


def test_no_stage_and_wrong_stage_are_type_errors_that_name_hook_stage_and_accepted_types():
    engine = Engine()
    with pytest.raises(TypeError, match=r"Recorder has neither a stage.*Engine accepts stages of Stage"):
        engine.register_hook(Recorder([], "a", stage=None))
    hook = Recorder([], "a", stage=Stage.FIRST)
    with pytest.raises(TypeError, match=r"Other.ELSEWHERE.*Recorder.*accepts stages of Stage"):
        engine.register_hook(hook, stage=Other.ELSEWHERE)
    assert hook.stage is Stage.FIRST
    with pytest.raises(TypeError):  # in the tests the annotation is checked first
        engine.register_hook(lambda ctx, stage: None)


def test_on_register_runs_after_validation_before_storing_and_its_error_undoes_the_stage():
    class Picky(Recorder):
        def on_register(self, workflow):
            self.seen = (self.stage, len(workflow.hooks))
            if self.name == "bad":
                raise RuntimeError("no")

    engine = Engine()
    good = Picky([], "good", stage=None)
    engine.register_hook(good, Stage.FIRST)
    assert good.seen == (Stage.FIRST, 0)
    bad = Picky([], "bad", stage=None)
    with pytest.raises(RuntimeError, match="no"):
        engine.register_hook(bad, Stage.FIRST)
    assert bad.stage is None
    assert list(engine.hooks) == [good]


def test_a_hook_is_registered_once_and_removed_once():
    engine, log = Engine(), []
    hook = Recorder(log, "a")
    engine.register_hook(hook)
    with pytest.raises(ValueError, match="registered already"):
        engine.register_hook(hook)
    engine.remove_hook(hook)
    engine.step()
    assert not log
    with pytest.raises(ValueError, match="not registered"):
        engine.remove_hook(hook)


def test_default_stage_is_chosen_by_name_in_any_engine():
    class Default(Recorder):
        default_stages = ("NOT_HERE", "SECOND")

    engine = Engine()
    hook = Default([], "a", stage=None)
    engine.register_hook(hook)
    assert hook.stage is Stage.SECOND


def test_exception_in_a_hook_keeps_its_type_and_says_hook_stage_and_step():
    class Failing(Recorder):
        def __call__(self, ctx, stage):
            raise KeyError("x")

    engine = Engine()
    engine.register_hook(Failing([], "a", frequency=2))
    engine.step_count = 4
    with pytest.raises(KeyError) as caught:
        engine.step()
    assert caught.value.__notes__ == ["raised by hook Failing at stage FIRST, step 4"]


class Opened(Recorder):
    def __enter__(self):
        self.log.append(f"open {self.name}")
        if self.name == "unopenable":
            raise OSError("cannot open")
        return self

    def __exit__(self, *exc):
        self.log.append(f"close {self.name}" + ("" if exc[0] is None else f" after {exc[0].__name__}"))
        if self.name == "unclosable":
            raise OSError("cannot close")


class Closable(Recorder):
    def close(self):
        self.log.append(f"close {self.name}")


def test_hooks_are_opened_in_order_and_closed_in_reverse():
    engine, log = Engine(), []
    for hook in (Opened(log, "a"), Closable(log, "b"), Opened(log, "c")):
        engine.register_hook(hook)
    with engine._hooks_opened(), engine._hooks_opened():
        log.append("run")
    assert log == ["open a", "open c", "run", "close c", "close b", "close a"]


def test_error_in_the_run_closes_all_hooks_and_is_not_hidden_by_an_error_while_closing():
    engine, log = Engine(), []
    for name in ("a", "unclosable", "c"):
        engine.register_hook(Opened(log, name))
    with pytest.raises(RuntimeError, match="first") as caught, engine._hooks_opened():
        raise RuntimeError("first")
    assert log[-3:] == [
        "close c after RuntimeError",
        "close unclosable after RuntimeError",
        "close a after RuntimeError",
    ]
    assert "closing hook Opened failed too: OSError('cannot close')" in caught.value.__notes__


def test_error_while_closing_is_raised_when_it_is_the_only_one_after_the_others_are_closed():
    engine, log = Engine(), []
    for name in ("a", "unclosable"):
        engine.register_hook(Opened(log, name))
    with pytest.raises(OSError, match="cannot close"), engine._hooks_opened():
        pass
    assert log[-1] == "close a"


def test_error_while_opening_closes_what_was_opened():
    engine, log = Engine(), []
    for name in ("a", "unopenable", "c"):
        engine.register_hook(Opened(log, name))
    with pytest.raises(OSError, match="cannot open"), engine._hooks_opened():
        log.append("run")
    assert log == ["open a", "open unopenable", "close a after OSError"]


def test_hooks_registered_or_removed_during_a_run_are_opened_and_closed():
    engine, log = Engine(), []
    first, second = Opened(log, "a"), Opened(log, "b")
    engine.register_hook(first)
    with engine._hooks_opened():
        engine.register_hook(second)
        engine.remove_hook(first)
        log.append("end")
    assert log == ["open a", "open b", "close a", "end", "close b"]


def test_describe_hooks_is_a_table_by_stage():
    engine = Engine()
    assert engine.describe_hooks() == "no hooks"
    engine.register_hook(Recorder([], "a", 10, Stage.SECOND))
    engine.register_hook(Everywhere([], "b"))
    lines = [line.split() for line in engine.describe_hooks().splitlines()]
    assert lines == [
        ["stage", "order", "hook", "frequency"],
        ["FIRST", "1", "Everywhere", "1"],
        ["SECOND", "1", "Recorder", "10"],
        ["SECOND", "2", "Everywhere", "1"],
    ]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("clamp", "bias"), ("check", "bias"), ("record", "bias"), ("record", "clamp"), ("neighbors", "wrap")],
)
def test_order_that_cannot_be_meant_warns_naming_both_and_registers_nothing_when_warnings_are_errors(
    earlier, later
):
    first = type("First", (Recorder,), {"order_role": earlier})([], "a")
    second = type("Second", (Recorder,), {"order_role": later})([], "b")
    engine = Engine()
    engine.register_hook(first)
    with pytest.raises(
        HookOrderWarning, match=r"First is registered before Second at FIRST.*Register Second before First"
    ):
        engine.register_hook(second)
    assert list(engine.hooks) == [first]
    engine.register_hook(second, stage=Stage.SECOND)


def test_the_right_order_does_not_warn():
    engine = Engine()
    for role in ("wrap", "neighbors", "bias", "clamp", "check", "record"):
        engine.register_hook(type("Ordered", (Recorder,), {"order_role": role})([], role))


def test_protocols_are_structural():
    class Stateful(Recorder):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    assert isinstance(Recorder([], "a"), Hook)
    assert not isinstance(object(), Hook)
    assert isinstance(Stateful([], "a"), CheckpointableHook)
    assert not isinstance(Recorder([], "a"), CheckpointableHook)
