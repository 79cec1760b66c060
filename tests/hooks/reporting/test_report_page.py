"""The page of a run: what is in it, that it is whole at any moment, and that a browser shows it."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from nvalchemi import units
from nvalchemi.data import AtomicData, Batch, read
from nvalchemi.dynamics import (
    FIRE,
    NVE,
    ConvergenceHook,
    DynamicsStage,
    FIREVariableCell,
    initialize_velocities,
)
from nvalchemi.dynamics.hooks import NaNDetectorHook
from nvalchemi.dynamics.thermo import kinetic_energy
from nvalchemi.hooks import HTMLReporter, ReportingOrchestrator
from nvalchemi.hooks.reporting.page import render, write_atomically
from nvalchemi.hooks.reporting.rates import Throttle
from nvalchemi.hooks.reporting.series import Curve, PointSample

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)> & "quoted" \u2028'


def relax(batch, argon, path, *, n_steps=300, hooks=(), **options):
    engine = FIREVariableCell(
        argon,
        dt=1.0,
        hooks=[*hooks, ReportingOrchestrator([HTMLReporter(path, **options)])],
        convergence_hook=ConvergenceHook.from_fmax(0.005),
    )
    engine.run(batch, n_steps=n_steps)
    return engine


def test_page_of_a_relaxation(batch, argon, tmp_path, page_data):
    energy = None
    alone = Batch.from_data_list(batch.to_data_list())
    NVE(argon, dt=1.0).run(alone, n_steps=0)
    energy = alone.energy[:, 0].tolist()
    relax(batch, argon, tmp_path / "r.html", title="Three crystals")
    page = page_data(tmp_path / "r.html")
    assert page["title"] == "Three crystals"
    assert page["status"]["state"] == "finished"
    table = page["structures"]
    names = [column["name"] for column in table["columns"]]
    assert names[:6] == ["#", "name", "formula", "atoms", "status", "steps"]
    assert table["counts"] == {"converged": 3}
    for k, row in enumerate(table["rows"]):
        assert row[1:5] == [
            f"argon-{k}",
            batch[k].to_atoms().get_chemical_formula("hill"),
            row[3],
            "converged",
        ]
        assert row[6] == pytest.approx(energy[k], rel=1e-6)
        assert row[7] == pytest.approx(float(batch.energy[k]), rel=1e-6)
    charts = {chart["title"]: chart for chart in page["charts"]}
    force = charts["Largest force"]
    assert force["target"] == 0.005
    assert [series["x"][0] for series in force["series"]] == [0, 0, 0]
    assert [series["y"][-1] <= 0.005 for series in force["series"]] == [True] * 3
    change = charts["Energy per atom since the start"]["series"][1]
    assert change["x"][-1] == int(batch.system_step[1])
    assert change["y"][-1] == pytest.approx(1e3 * (float(batch.energy[1]) - energy[1]) / 8, rel=1e-5)
    assert charts["Structures converged"]["series"][0]["y"][-1] == 100
    settings = {section["title"]: section["rows"] for section in page["settings"]}
    assert ["cutoff", "8.5 Å"] in settings["Model"]
    assert ["dt", "1 fs"] in settings["FIREVariableCell"]
    assert not {"RunWatch", "StageClock"} & {row[0] for row in settings["Hooks"]}
    assert "NeighborListHook" in [row[0] for row in settings["Hooks"]]
    assert ["torch", torch.__version__] in page["environment"]


def test_page_of_dynamics(batch, argon, tmp_path, page_data):
    initialize_velocities(batch, 40.0)
    engine = NVE(
        argon, dt=2.0, hooks=[ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")], frequency=2)]
    )
    engine.run(batch, n_steps=0)
    before = batch.energy[:, 0] + kinetic_energy(batch)
    engine.run(batch, n_steps=200)
    drift_of_each = 1e3 * (batch.energy[:, 0] + kinetic_energy(batch) - before) / torch.tensor([4, 8, 4])
    page = page_data(tmp_path / "r.html")
    charts = {chart["title"]: chart for chart in page["charts"]}
    assert "Largest force" not in charts
    assert "Volume" not in charts  # it is constant
    assert charts["Temperature"]["x"] == "time / ps"
    assert charts["Temperature"]["series"][0]["x"][-1] == pytest.approx(0.4)
    drift = charts["Drift of the conserved energy per atom"]["series"]
    assert [series["y"][-1] for series in drift] == pytest.approx(drift_of_each.tolist(), rel=1e-5)
    assert {row[4] for row in page["structures"]["rows"]} == {"done"}
    words = [stage["words"] for stage in page["timing"]["stages"]]
    assert "model, with hooks before the forces (neighbour list)" in words
    hooks = {hook["name"]: hook["s"] for hook in page["timing"]["hooks"]}
    assert hooks["NeighborListHook"] > 0


def test_many_structures_are_drawn_as_quantiles(crystals, argon, tmp_path, page_data):
    batch = Batch.from_data_list(crystals(*[1] * 15))
    forces = []

    class Keep:
        frequency, stage = 1, DynamicsStage.AFTER_STEP

        def __call__(self, ctx, stage):
            forces.append(torch.linalg.vector_norm(ctx.batch.forces, dim=-1).reshape(15, 4).amax(1).numpy())

    engine = FIRE(argon, dt=1.0, hooks=[Keep(), ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")])])
    engine.run(batch, n_steps=5)
    median, largest = next(
        c for c in page_data(tmp_path / "r.html")["charts"] if c["title"] == "Largest force"
    )["series"]
    assert median["y"] == pytest.approx([np.median(f) for f in forces], rel=1e-6)
    assert largest["y"] == pytest.approx([f.max() for f in forces], rel=1e-6)
    assert all(
        low <= y <= high for low, y, high in zip(median["low"], median["y"], median["high"], strict=True)
    )


# ---------------------------------------------------------------------- a run that goes on
class Interrupt:
    """Raises in one step, as Ctrl-C does."""

    frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

    def __init__(self, step):
        self.step = step

    def __call__(self, ctx, stage):
        if ctx.step_count == self.step:
            raise KeyboardInterrupt


def relax_with_restart(batch, argon, path, *hooks):
    engine = FIREVariableCell(
        argon,
        dt=1.0,
        hooks=[*hooks, ReportingOrchestrator([HTMLReporter(path)])],
        convergence_hook=ConvergenceHook.from_fmax(0.002),
    )
    engine.run(batch, n_steps=300, restart=path.with_suffix(".state"), save_every=5)
    return engine


def chart(page, title):
    return next(chart for chart in page["charts"] if chart["title"] == title)


def test_the_page_of_a_resumed_run_is_that_of_the_whole_run(
    crystals, argon, tmp_path, page_data, monkeypatch
):
    monkeypatch.setattr("nvalchemi.hooks.reporting.rates._FREE_SECONDS", math.inf)

    def batch():
        return Batch.from_data_list(crystals(1, 2, 1))

    relax_with_restart(batch(), argon, tmp_path / "whole.html")
    with pytest.raises(KeyboardInterrupt):
        relax_with_restart(batch(), argon, tmp_path / "r.html", Interrupt(23))
    relax_with_restart(batch(), argon, tmp_path / "r.html")
    page, whole = page_data(tmp_path / "r.html"), page_data(tmp_path / "whole.html")
    assert whole["status"]["remark"] == ""
    assert page["status"]["remark"].startswith("Interrupted, and went on after step 2")
    assert page["structures"]["rows"] == whole["structures"]["rows"]
    assert page["structures"]["note"] == ""
    for mine, other in zip(page["charts"], whole["charts"], strict=True):
        assert mine["title"] == other["title"]
        for a, b in zip(mine["series"], other["series"], strict=True):
            assert a["x"] == b["x"]
            assert a["y"] == pytest.approx(b["y"], rel=1e-5, abs=1e-9)


def test_a_page_that_is_newer_than_the_saved_state_goes_on_from_that(
    crystals, argon, tmp_path, page_data, monkeypatch
):
    monkeypatch.setattr("nvalchemi.hooks.reporting.rates._FREE_SECONDS", math.inf)
    with pytest.raises(KeyboardInterrupt):
        relax_with_restart(Batch.from_data_list(crystals(1, 2, 1)), argon, tmp_path / "r.html", Interrupt(12))
    state = (tmp_path / "r.state").read_bytes()
    pages = []
    for _ in range(2):  # the second time, the page shows what the state does not know yet
        (tmp_path / "r.state").write_bytes(state)
        relax_with_restart(Batch.from_data_list(crystals(1, 2, 1)), argon, tmp_path / "r.html")
        pages.append(page_data(tmp_path / "r.html"))
    assert pages[0]["structures"] == pages[1]["structures"]
    assert pages[0]["charts"] == pages[1]["charts"]


def test_a_page_of_other_structures_is_not_gone_on_with(crystals, argon, tmp_path, page_data):
    with pytest.raises(KeyboardInterrupt):
        relax_with_restart(Batch.from_data_list(crystals(1, 1)), argon, tmp_path / "r.html", Interrupt(12))
    relax(Batch.from_data_list(crystals(2, 2)), argon, tmp_path / "r.html", n_steps=30)
    relax_with_restart(Batch.from_data_list(crystals(1, 1)), argon, tmp_path / "r.html")
    page = page_data(tmp_path / "r.html")
    assert page["status"]["remark"].startswith("Goes on after step")
    assert min(series["x"][0] for series in chart(page, "Largest force")["series"]) > 5


def test_without_the_page_a_resumed_run_says_where_it_begins(crystals, argon, tmp_path, page_data):
    batch = Batch.from_data_list(crystals(1, 2, 1))
    with pytest.raises(KeyboardInterrupt):
        relax_with_restart(batch, argon, tmp_path / "r.html", Interrupt(23))
    (tmp_path / "r.html").write_text('<script type="application/json" id="data">{broken</script>')
    relax_with_restart(Batch.from_data_list(crystals(1, 2, 1)), argon, tmp_path / "r.html")
    page = page_data(tmp_path / "r.html")
    step = int(re.match(r"Goes on after step (\d+)\. No page", page["status"]["remark"])[1])
    assert 15 < step <= 23
    assert page["structures"]["note"] == f"“before” is the state after step {step}, where this run went on."
    assert [series["x"][0] for series in chart(page, "Largest force")["series"]] == [step] * 3


def test_a_run_that_begins_anew_replaces_the_page(crystals, argon, tmp_path, page_data):
    for _ in range(2):
        relax(Batch.from_data_list(crystals(1)), argon, tmp_path / "r.html", n_steps=6)
        page = page_data(tmp_path / "r.html")
        assert page["status"]["remark"] == ""
        assert page["structures"]["total"] == 1
        assert chart(page, "Largest force")["series"][0]["x"] == list(range(7))


# ---------------------------------------------------------------------- what became of it
def test_a_run_that_left_structures_behind_says_so(crystals, argon, tmp_path, page_data):
    relax(Batch.from_data_list(crystals(1, 2)), argon, tmp_path / "r.html", n_steps=3)
    status = page_data(tmp_path / "r.html")["status"]
    assert (status["state"], status["warn"]) == ("finished: 0 of 2 converged", True)
    relax(Batch.from_data_list(crystals(1, 2)), argon, tmp_path / "r.html")
    status = page_data(tmp_path / "r.html")["status"]
    assert (status["state"], status["warn"]) == ("finished", False)


def test_a_structure_that_ran_away_does_not_set_the_axis(crystals, argon, tmp_path, page_data):
    class Explode:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            if ctx.step_count >= 3:
                ctx.batch.energy[1] = -4e12 if ctx.step_count < 5 else math.nan

    batch = Batch.from_data_list(crystals(1, 2, 1))
    relax(batch, argon, tmp_path / "r.html", hooks=[Explode(), NaNDetectorHook(action="quarantine")])
    page = page_data(tmp_path / "r.html")
    assert page["status"]["state"] == "finished: 2 of 3 converged, 1 failed"
    change = chart(page, "Energy per atom since the start")
    assert [series["outside"] for series in change["series"]] == [False, True, False]
    assert min(change["series"][1]["y"]) < -1e14
    assert change["note"] == "The axis leaves out the extremes of: argon-1 (#1)."
    assert chart(page, "Largest force")["note"] == ""


def test_titles_say_what_is_done(crystals, argon, tmp_path, page_data):
    batch = Batch.from_data_list(crystals(1))
    relax(batch, argon, tmp_path / "r.html", n_steps=1)
    title = page_data(tmp_path / "r.html")["title"]
    assert title == "Relaxation of atoms and cell (FIREVariableCell), LennardJones"


def test_the_page_is_written_by_the_clock_whatever_a_first_write_took(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nvalchemi.hooks.reporting.rates.time.monotonic", lambda: now[0])
    throttle, written = Throttle(5.0), []
    for step in range(100):
        now[0] = 0.5 * step
        if throttle.is_due:
            written.append(now[0])
            began = now[0]
            now[0] += 0.4 if step == 0 else 0.02  # the first loads what it needs
            throttle.drawn(began)
    assert np.diff(written) == pytest.approx([5.0] * (len(written) - 1))
    throttle.drawn(now[0] - 1.0)
    assert throttle.interval == pytest.approx(100.0)


def test_failed_structures_tell_why(crystals, argon, tmp_path, page_data):
    structures = crystals(1, 1)
    structures[1].positions[0] = structures[1].positions[1]
    batch = Batch.from_data_list(structures)
    relax(batch, argon, tmp_path / "r.html", hooks=[NaNDetectorHook(action="quarantine")])
    table = page_data(tmp_path / "r.html")["structures"]
    assert [row[4] for row in table["rows"]] == ["converged", "failed"]
    assert table["reasons"] == ["", "step 0: energy is not finite"]


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("<b>bad</b>"), "failed")]
)
def test_the_page_is_there_after_an_error(batch, argon, tmp_path, page_data, error, state):
    class Stop:
        frequency, stage = 1, DynamicsStage.AFTER_COMPUTE

        def __call__(self, ctx, stage):
            if ctx.step_count == 4:
                raise error

    with pytest.raises(type(error)):
        relax(batch, argon, tmp_path / "r.html", hooks=[Stop()])
    page = page_data(tmp_path / "r.html")
    assert page["status"]["state"] == state
    assert ("RuntimeError: <b>bad</b>" in page["status"]["error"]) == (state == "failed")
    assert {row[4] for row in page["structures"]["rows"]} == {"stopped"}
    assert [row[5] for row in page["structures"]["rows"]] == [4, 4, 4]


def test_a_run_that_was_asked_to_stop_has_not_finished(batch, argon, tmp_path, page_data):
    class Stop:
        frequency, stage = 1, DynamicsStage.AFTER_STEP

        def __call__(self, ctx, stage):
            ctx.workflow.request_stop()

    relax(batch, argon, tmp_path / "r.html", hooks=[Stop()])
    page = page_data(tmp_path / "r.html")
    assert page["status"]["state"] == "ended: stopped before its end"
    assert page["status"]["progress"]["done"] == 1


def test_whatever_strings_and_numbers_hold_is_shown_as_text(crystals, argon, tmp_path, page_data):
    data = crystals(1)[0]
    data.info["name"] = HOSTILE
    batch = Batch.from_data_list([data])
    relax(batch, argon, tmp_path / "r.html", title=HOSTILE, n_steps=2)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page_data(tmp_path / "r.html")["structures"]["rows"][0][1] == HOSTILE

    class Tags(HTMLParser):
        def __init__(self):
            super().__init__()
            self.found = []

        def handle_starttag(self, tag, attrs):
            self.found.append(tag)

    parser = Tags()
    parser.feed(text)
    assert parser.found.count("script") == 2
    assert "img" not in parser.found


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    content = {
        "title": "t",
        "status": {"state": "running"},
        "x": [math.nan, math.inf, -math.inf, 0.1, None, "\udce9"],
    }
    write_atomically(tmp_path / "p.html", render(content))
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))["x"][:5] == [
        None,
        None,
        None,
        0.1,
        None,
    ]


def test_the_page_loads_nothing(batch, argon, tmp_path):
    relax(batch, argon, tmp_path / "r.html", n_steps=2)
    text = (tmp_path / "r.html").read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\((?!#)", text)
    assert len(text) < 200_000


def test_the_page_is_whole_whenever_somebody_looks(batch, argon, tmp_path, page_data, monkeypatch):
    path = tmp_path / "r.html"
    seen = []
    rename = os.replace

    def look(source, target):
        if path.exists():
            seen.append(
                page_data(path)["status"]["state"]
            )  # the old page, while the new one is being written
        rename(source, target)
        seen.append(page_data(path)["status"]["state"])

    monkeypatch.setattr("nvalchemi.hooks.reporting.page.os.replace", look)
    relax(batch, argon, path, every_seconds=0.0)
    assert set(seen[:-1]) == {"running"}
    assert seen[-1] == "finished"
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]


# ---------------------------------------------------------------------- bounded memory
def test_a_curve_of_a_long_run_keeps_a_thousand_points():
    curve = Curve()
    for step in range(200_000):
        curve.add(step, {"y": 2.0 * step})
    x, y = curve.column("y")
    assert 500 <= len(x) <= 1001
    assert (x[0], x[-1]) == (0, 199_999)
    assert y == [2 * step for step in x]
    steps = np.diff(x[:-1])
    assert (steps == steps[0]).all()


def test_a_curve_whose_reports_become_rarer_is_even_all_the_same():
    curve, x = Curve(), 0
    for step in range(6000):
        if step < 600 or step % 8 == 0:  # as the budget of a run leaves them
            curve.add(step, {"y": step})
    x, _ = curve.column("y")
    assert len(x) > 200
    assert set(np.diff(x[:-1])) == {8}


def test_a_curve_may_begin_with_a_longer_step():
    curve = Curve()
    steps = [0, *range(11, 3000, 10)]  # the state before the first step, and every tenth report
    for step in steps:
        curve.add(step, {"y": 1.0})
    assert curve.column("y")[0] == steps


def test_a_curve_goes_on_from_what_was_saved():
    whole, first = Curve(), Curve()
    for step in range(700):
        whole.add(step, {"y": 0.5 * step} if step % 2 else {"y": 0.5 * step, "z": 1.0})
        if step <= 460:
            first.add(step, {"y": 0.5 * step} if step % 2 else {"y": 0.5 * step, "z": 1.0})
    second = Curve.from_columns(json.loads(json.dumps(first.to_columns())), until=412)
    assert second.last_x == 412
    for step in range(413, 700):
        second.add(step, {"y": 0.5 * step} if step % 2 else {"y": 0.5 * step, "z": 1.0})
    assert second.column("y") == whole.column("y")
    assert second.column("z") == whole.column("z")


def test_the_same_step_again_replaces_its_values():
    curve = Curve()
    for x, y in ((1, 1.0), (2, 5.0), (2, 7.0)):
        curve.add(x, {"y": y})
    assert curve.column("y") == ([1, 2], [1.0, 7.0])


def test_a_sample_of_points_is_bounded_and_even():
    sample = PointSample(capacity=1000)
    rng = np.random.default_rng(1)
    everything, errors = [], []
    for _ in range(50):
        labels = rng.uniform(0, 1, 400)
        error = rng.normal(0, 0.1, 400)
        labels[0] = np.nan
        sample.add(labels, labels + error)
        everything.append(labels[1:])
        errors.append(error[1:])
    errors = np.concatenate(errors)
    assert sample.labels.size == 1000
    assert sample.count == 50 * 399
    assert sample.mae == pytest.approx(np.abs(errors).mean())
    assert sample.rmse == pytest.approx(np.sqrt((errors**2).mean()))
    assert np.histogram(sample.labels, bins=4)[0] == pytest.approx([250] * 4, abs=60)
    assert set(sample.labels) <= set(np.concatenate(everything))


def test_two_engines_report_one_after_the_other(batch, argon, tmp_path, page_data):
    report = ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")])
    FIRE(argon, dt=1.0, hooks=[report]).run(batch, n_steps=5)
    NVE(argon, dt=1.0, hooks=[report]).run(batch, n_steps=7)
    page = page_data(tmp_path / "r.html")
    assert page["title"] == "Molecular dynamics (NVE), LennardJones"
    assert len(page["structures"]["rows"]) == 6


# ---------------------------------------------------------------------- a browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")


def browse(path, tmp_path, script=""):
    """The document as Chromium has it when the page and ``script`` have run; no error may have been logged."""
    copy = tmp_path / "browsed.html"
    copy.write_text(
        path.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"),
        encoding="utf-8",
    )
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
        "--disable-component-update --disable-dev-shm-usage --enable-logging=stderr "
        "--virtual-time-budget=2000 --dump-dom"
    )
    profile = tmp_path / "profile"
    command = [
        CHROMIUM,
        *options.split(),
        f"--user-data-dir={profile}",
        "--window-size=1280,2000",
        copy.as_uri(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    return result.stdout


def shown_rows(dom):
    body = re.search(r'id="structures">.*?<tbody>(.*?)</tbody>', dom, re.DOTALL).group(1)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)]


@needs_browser
def test_a_browser_shows_a_relaxation_and_sorts_its_table(crystals, argon, tmp_path):
    structures = crystals(1, 2, 1)
    structures[0].info["name"] = HOSTILE
    relax(Batch.from_data_list(structures), argon, tmp_path / "r.html", title=HOSTILE)
    dom = browse(tmp_path / "r.html", tmp_path)
    assert dom.count("<svg") >= 4
    assert "NaN" not in dom
    assert [row[0] for row in shown_rows(dom)] == ["0", "1", "2"]
    assert "owned" not in re.search(r"<title>(.*?)</title>", dom).group(1).split("document")[0]
    assert "<img" not in dom
    click = "document.querySelectorAll('#structures th button')[3].click();"
    assert [row[3] for row in shown_rows(browse(tmp_path / "r.html", tmp_path, click))] == ["4", "4", "8"]
    assert [row[3] for row in shown_rows(browse(tmp_path / "r.html", tmp_path, 2 * click))] == ["8", "4", "4"]


@needs_browser
def test_a_browser_pages_through_a_thousand_structures(argon, tmp_path):
    generator = torch.Generator().manual_seed(0)
    structures = [
        AtomicData(
            positions=torch.tensor([[0.0, 0, 0], [3.8, 0, 0]], dtype=torch.float64)
            + 0.1 * torch.rand(2, 3, generator=generator, dtype=torch.float64),
            atomic_numbers=[18, 18],
        )
        for _ in range(1200)
    ]
    engine = FIRE(argon, dt=1.0, hooks=[ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")])])
    engine.run(Batch.from_data_list(structures), n_steps=3)
    dom = browse(
        tmp_path / "r.html", tmp_path, "document.querySelector('[aria-label=\"next page\"]').click();"
    )
    rows = shown_rows(dom)
    assert len(rows) == 50
    assert rows[0][0] == "50"
    assert "51–100 of 1,200" in dom


@needs_browser
def test_a_browser_shows_training_with_parity_plots(tmp_path):
    from pathlib import Path

    from nvalchemi.data.datasets import InMemoryDataset
    from nvalchemi.data.loader import DataLoader
    from nvalchemi.models.painn import PaiNN
    from nvalchemi.training import (
        EnergyMAELoss,
        ForceL2NormLoss,
        OptimizerConfig,
        TrainingStrategy,
        ValidationConfig,
    )

    torch.manual_seed(0)
    frames = read(Path(__file__).parents[3] / "examples" / "data" / "ethanol_small.extxyz")[:24]
    model = PaiNN(hidden_dim=8)
    model.fit_reference_energies(frames)
    strategy = TrainingStrategy(
        model,
        OptimizerConfig(torch.optim.Adam, {"lr": 1e-3}),
        EnergyMAELoss() + ForceL2NormLoss(),
        num_epochs=2,
        hooks=[ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")])],
        validation_config=ValidationConfig(DataLoader(InMemoryDataset(frames[:6]), batch_size=4)),
    )
    strategy.run(DataLoader(InMemoryDataset(frames), batch_size=4))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert page["status"]["progress"] == {"done": 12, "total": 12, "unit": "batch", "note": ""}
    energy, forces = page["parity"]
    assert (energy["count"], forces["count"]) == (6, 6 * 9 * 3)
    assert energy["x"] == pytest.approx([float(f.energy) / 9 for f in frames[:6]], rel=1e-5)
    assert forces["mae"] == pytest.approx(1e3 * strategy.last_validation["forces_mae"], rel=1e-5)
    assert energy["rmse"] == pytest.approx(1e3 * strategy.last_validation["energy_per_atom_rmse"], rel=1e-4)
    titles = [chart["title"] for chart in page["charts"]]
    assert titles == [
        "Loss",
        "Components of the loss",
        "Energy error per atom",
        "Force error",
        "Learning rate",
    ]
    assert page["title"] == "Training PaiNN"
    assert page["tiles"][0]["note"] == "of the last batch"
    settings = {section["title"]: dict(section["rows"]) for section in page["settings"]}
    assert settings["TrainingStrategy"]["loss_fn"] == "EnergyMAELoss + ForceL2NormLoss"
    dom = browse(tmp_path / "r.html", tmp_path)
    assert dom.count("<svg") == 7
    assert "Mean absolute error" in dom
    assert "Validation: prediction and reference" in dom


def train_argon(frames, path, num_epochs, *hooks, checkpoint=None):
    from nvalchemi.models.painn import PaiNN
    from nvalchemi.training import (
        EnergyMSELoss,
        ForceMSELoss,
        LinearWeight,
        OptimizerConfig,
        StressMSELoss,
        TrainingStrategy,
        ValidationConfig,
    )

    torch.manual_seed(0)
    loss = (
        EnergyMSELoss() + 10.0 * ForceMSELoss() + LinearWeight(start=0.0, end=1.0, length=5) * StressMSELoss()
    )
    strategy = TrainingStrategy(
        PaiNN(hidden_dim=8, cutoff=4.5).double(),
        OptimizerConfig(torch.optim.Adam, {"lr": 1e-3}),
        loss,
        num_epochs=num_epochs,
        hooks=[*hooks, ReportingOrchestrator([HTMLReporter(path)])],
        validation_config=ValidationConfig([Batch.from_data_list(frames)]),
    )
    if checkpoint is not None:
        strategy.restore_checkpoint(checkpoint)
    strategy.run([Batch.from_data_list(frames[:2]), Batch.from_data_list(frames[2:])])
    return strategy


@pytest.fixture
def frames(crystals, argon):
    batch = Batch.from_data_list(crystals(1, 1, 1, 1))
    NVE(argon, dt=1.0).run(batch, n_steps=0)
    labels = ("energy", "forces", "stress")
    plain = []
    for data in batch.to_data_list():
        plain.append(AtomicData(data.positions, data.atomic_numbers, cell=data.cell, pbc=data.pbc))
        for name in labels:
            getattr(plain[-1], f"add_{'node' if name == 'forces' else 'system'}_property")(name, data[name])
    return plain


def test_training_shows_stresses_and_its_loss_as_a_formula(frames, tmp_path, page_data):
    strategy = train_argon(frames, tmp_path / "r.html", 1)
    page = page_data(tmp_path / "r.html")
    stress = page["parity"][2]
    assert (stress["title"], stress["unit"], stress["count"]) == ("Stress components", "GPa", 4 * 9)
    assert stress["x"][0] == pytest.approx(float(frames[0].stress[0, 0, 0]) / units.GPa, rel=1e-5)
    assert stress["mae"] == pytest.approx(strategy.last_validation["stress_mae"] / units.GPa, rel=1e-5)
    settings = {section["title"]: dict(section["rows"]) for section in page["settings"]}
    assert settings["TrainingStrategy"]["loss_fn"] == (
        "EnergyMSELoss + 10 × ForceMSELoss + LinearWeight(start=0, end=1, length=5, delay=0, unit=step) × StressMSELoss"
    )


def test_the_page_of_a_resumed_training_goes_on(frames, tmp_path, page_data):
    first = train_argon(frames, tmp_path / "r.html", 3)
    before = page_data(tmp_path / "r.html")
    first.save_checkpoint(tmp_path / "checkpoint")
    train_argon(frames, tmp_path / "r.html", 5, checkpoint=tmp_path / "checkpoint")
    page = page_data(tmp_path / "r.html")
    assert page["status"]["remark"] == "Interrupted, and went on after step 6."
    batches, _, validation = chart(page, "Loss")["series"]
    assert batches["x"] == list(range(1, 11))
    assert batches["y"][:6] == chart(before, "Loss")["series"][0]["y"]
    assert validation["x"] == [2, 4, 6, 8, 10]
    first.save_checkpoint(tmp_path / "end")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    train_argon(frames, tmp_path / "r.html", 3, checkpoint=tmp_path / "end")  # nothing is left to do
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == text


@needs_browser
def test_the_page_of_a_killed_run_asks_what_became_of_it(batch, argon, tmp_path):
    relax(batch, argon, tmp_path / "r.html", n_steps=3)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    text = text.replace('"state":"finished: 0 of 3 converged"', '"state":"running"')
    (tmp_path / "now.html").write_text(text, encoding="utf-8")
    assert ">running</span>" in browse(tmp_path / "now.html", tmp_path)
    written = int(re.search(r'"written_unix":(\d+)', text)[1])
    old = text.replace(f'"written_unix":{written}', f'"written_unix":{written - 180}')
    (tmp_path / "old.html").write_text(old, encoding="utf-8")
    dom = browse(tmp_path / "old.html", tmp_path)
    assert re.search(r'class="badge warn"[^>]*>no news for 3 min \d\d s: stopped or killed\?<', dom)
    assert "If the process was killed, no more will come." in dom


@needs_browser
def test_a_single_point_has_one_tick(frames, tmp_path):
    train_argon(frames, tmp_path / "r.html", 1)
    dom = browse(tmp_path / "r.html", tmp_path)
    error = dom[dom.index('aria-label="Force error"') :].split("</section>")[0]
    assert re.findall(r'text-anchor="middle">([^<]*)<', error) == ["2", "step"]


def test_page_of_a_relaxation_followed_by_dynamics(batch, argon, tmp_path, page_data):
    """A minimiser has no time: what it shares with the dynamics is over steps, the rest over the time simulated."""
    relaxation = FIRE(argon, dt=1.0, convergence_hook=ConvergenceHook.from_fmax(0.005))
    stages = relaxation + NVE(argon, dt=2.0, n_steps=12)
    stages.register_hook(ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")]))
    stages.run(batch)
    charts = {chart["title"]: chart for chart in page_data(tmp_path / "r.html")["charts"]}
    change = charts["Energy per atom since the start"]
    assert change["x"] == "step"
    assert len(change["series"]) == 3
    drift = next(chart for title, chart in charts.items() if "rift" in title)
    assert drift["x"] == "time / ps"
    assert [series["y"][0] for series in drift["series"]] == [0.0] * 3
    # The first state seen of the dynamics is that after its first step, or the one handed over.
    assert all(series["x"][0] <= 0.002 and series["x"][-1] <= 0.024 for series in drift["series"])


def test_structure_without_atoms_is_on_the_page(argon, batch, tmp_path, page_data):
    empty = AtomicData(
        positions=torch.zeros(0, 3, dtype=torch.float64), atomic_numbers=torch.zeros(0, dtype=torch.int64)
    )
    cluster = AtomicData(positions=batch[0].positions, atomic_numbers=batch[0].atomic_numbers)
    engine = FIRE(argon, dt=1.0, hooks=[ReportingOrchestrator([HTMLReporter(tmp_path / "r.html")])])
    engine.run(Batch.from_data_list([cluster, empty]), n_steps=3)
    table = page_data(tmp_path / "r.html")["structures"]
    atoms = [column["name"] for column in table["columns"]].index("atoms")
    assert [row[atoms] for row in table["rows"]] == [4, 0]
