"""The documentation is right: its Python blocks run and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=page_id)
def test_python_blocks_of_page_run(page, tmp_path):
    """The blocks of a page run one after another in one namespace, as a reader would type them, in a copy of
    the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        code = compile("\n" * line + block.group(1), str(page), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_local_links_of_page_resolve(page):
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
