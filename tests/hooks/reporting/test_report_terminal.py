"""Reports in a terminal and for TensorBoard."""

import io
import subprocess
import sys

import pytest

from nvalchemi.dynamics import FIRE, NVE, ConvergenceHook
from nvalchemi.hooks import ReportingOrchestrator, RichReporter, TensorBoardReporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(batch, argon, reporter, n_steps=3, **options):
    NVE(argon, dt=1.0, hooks=[ReportingOrchestrator([reporter], **options)]).run(batch, n_steps=n_steps)


def test_where_there_is_no_terminal_lines_are_written_now_and_then(batch, argon):
    out = io.StringIO()
    run(batch, argon, RichReporter(out, every_seconds=3600.0), n_steps=50)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("NVE step 1 of 50, energy per atom -0.0")
    assert lines[1].startswith("NVE step 50 of 50, ")
    assert "fmax 0." in lines[1]
    assert "\x1b" not in out.getvalue()


def test_every_report_is_a_line_on_request(batch, argon):
    out = io.StringIO()
    run(batch, argon, RichReporter(out, every_seconds=0.0), n_steps=3)
    assert [line.split(",")[0] for line in out.getvalue().splitlines()[:3]] == [
        f"NVE step {k} of 3" for k in (1, 2, 3)
    ]


def test_in_a_terminal_a_dashboard_stays_in_its_place(batch, argon, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    engine = FIRE(
        argon,
        dt=1.0,
        hooks=[ReportingOrchestrator([RichReporter(out)])],
        convergence_hook=ConvergenceHook.from_fmax(0.01),
    )
    engine.run(batch, n_steps=200)
    last = out.getvalue().split("\x1b[2K")[-1]
    assert "\x1b" in out.getvalue()
    assert f"step {engine.step_count} of 200" in out.getvalue()
    assert "converged fraction" in out.getvalue()
    assert "FIRE" in last or "FIRE" in out.getvalue()


def test_a_missing_library_is_named_with_its_extra():
    code = (
        "import sys; sys.modules['rich'] = None; sys.modules['rich.console'] = None\n"
        "from nvalchemi.hooks import RichReporter\n"
        "try:\n    RichReporter().__enter__()\nexcept ImportError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'nvalchemi[cli]'" in result.stdout


def test_importing_the_hooks_brings_no_library_of_a_reporter():
    code = (
        "import nvalchemi.hooks, sys; print({'rich', 'tensorboard', 'matplotlib', 'ase'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_tensorboard_gets_every_scalar_under_its_name(batch, argon, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(batch, argon, TensorBoardReporter(tmp_path / "tb"), n_steps=5, frequency=2)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {"energy", "fmax", "temperature", "dynamics/steps_per_s"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("energy")][:3] == [1, 3, 5]
    assert events.Scalars("energy")[-1].value == pytest.approx(float(batch.energy.mean()), rel=1e-6)
