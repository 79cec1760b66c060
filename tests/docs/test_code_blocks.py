"""The documentation is right: its blocks of code run and its links lead somewhere.

The blocks of a page run one after another in an empty folder, as a reader would type them:

* ``python``: all of a page in one namespace;
* ``{code-block} python`` with a ``:caption:``: the file of that name, for the blocks behind it;
* ``sh``: commands that must succeed. What a reader is shown but no test should do is a ``console`` block.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *ROOT.glob("docs/**/*.md"),
    ]
    if "_build" not in page.parts
)
BLOCK = re.compile(
    r"^```(?P<kind>python|sh|\{code-block\} python\n:caption: (?P<file>\S+)\n)\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with_code() -> list:
    """Pages with blocks to run; commands take some seconds each."""
    pages = [page for page in PAGES if BLOCK.search(page.read_text())]
    return [
        pytest.param(page, marks=[pytest.mark.slow] * ("\n```sh\n" in page.read_text())) for page in pages
    ]


@pytest.mark.parametrize("page", pages_with_code(), ids=page_id)
def test_blocks_of_page_run(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(page.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(block["code"])
        elif block["kind"] == "sh":
            run_commands(block["code"])
        else:
            line = page.read_text()[: block.start("code")].count("\n")
            exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)


def run_commands(commands: str) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_local_links_of_page_resolve(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
