"""The site is complete: every public name has an entry, every stage is drawn, every example has its place."""

import importlib
import re
from pathlib import Path

import pytest

from nvalchemi.dynamics import DynamicsStage
from nvalchemi.training import TrainingStage

ROOT = Path(__file__).parents[2]
HOOKS = {
    "nvalchemi.hooks": [
        "BiasedPotentialHook",
        "NeighborListHook",
        "StageTimingHook",
        "TorchProfilerHook",
        "WrapPeriodicHook",
    ],
    "nvalchemi.dynamics.hooks": None,
    "nvalchemi.training.hooks": None,
    "nvalchemi.hooks.reporting": None,
}


def documented(page: str) -> list[str]:
    """Names that a page gives an entry one by one."""
    return re.findall(r"auto(?:class|function):: (\w+)", (ROOT / "docs" / page).read_text())


def test_every_hook_has_one_entry_on_the_pages_of_hooks():
    expected = {
        name for package, names in HOOKS.items() for name in names or importlib.import_module(package).__all__
    }
    entries = [
        name
        for page in ("shared", "dynamics", "training", "reporting")
        for name in documented(f"hooks/{page}.md")
    ]
    assert sorted(entries) == sorted(expected)


@pytest.mark.parametrize("package", ["hooks", "training", "models"])
def test_what_the_page_of_a_package_leaves_out_has_its_entry_elsewhere(package):
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    excluded = re.search(r"exclude-members: ((?:[\w, ]|\n {6})+)", page)[1]
    elsewhere = {
        name for path in (ROOT / "docs" / "hooks").glob("*.md") for name in documented(f"hooks/{path.name}")
    }
    for other in ("neighbors", "hooks", "training.losses"):
        elsewhere |= set(importlib.import_module(f"nvalchemi.{other}").__all__)
    assert set(re.findall(r"\w+", excluded)) <= elsewhere


@pytest.mark.parametrize(
    ("figure", "stages"), [("dynamics_loop", DynamicsStage), ("training_loop", TrainingStage)]
)
def test_drawing_has_every_stage_in_the_order_of_the_loop(figure, stages):
    drawn = re.findall(r'class="s">(\w+)<', (ROOT / "docs" / "figures" / f"{figure}.svg").read_text())
    assert drawn == [stage.name for stage in stages]


def test_gallery_shows_every_example_and_what_it_prints():
    page = (ROOT / "docs" / "gallery.md").read_text()
    scripts = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
    for script in scripts:
        assert f"](../examples/{script.name})" in page
        number = script.name[:2]
        assert f"```{{literalinclude}} gallery/{number}.txt" in page
        assert (ROOT / "docs" / "gallery" / f"{number}.txt").read_text().strip()
    assert len(scripts) == page.count("```{literalinclude}")
