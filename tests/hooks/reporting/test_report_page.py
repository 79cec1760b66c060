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
    assert ["cutoff", "8.5"] in settings["Model"]
    assert ["dt", "1"] in settings["FIREVariableCell"]
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
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(", text)
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
    relax(batch, argon, path, n_steps=3, every_seconds=0.0)
    assert set(seen[:-1]) == {"running"}
    assert seen[-1] == "finished"
    assert [file.name for file in tmp_path.iterdir()] == ["r.html"]


# ---------------------------------------------------------------------- bounded memory
def test_a_curve_of_a_long_run_keeps_two_thousand_points():
    curve = Curve()
    for step in range(200_000):
        curve.add(step, {"y": 2.0 * step})
    x, y = curve.column("y")
    assert 1000 <= len(x) <= 2001
    assert (x[0], x[-1]) == (0, 199_999)
    assert y == [2 * step for step in x]
    steps = np.diff(x[:-1])
    assert (steps == steps[0]).all()


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
    assert page["title"] == "NVE"
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
    dom = browse(tmp_path / "r.html", tmp_path)
    assert dom.count("<svg") == 7
    assert "Mean absolute error" in dom
