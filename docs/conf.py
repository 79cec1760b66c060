"""Settings of the documentation site: ``make docs`` builds it into docs/_build/html."""

from importlib import import_module
from typing import Any

from sphinx.ext.napoleon.docstring import GoogleDocstring

import nvalchemi

project = "nvalchemi"
author = project_copyright = "the nvalchemi developers"
version = release = nvalchemi.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"nvalchemi {version}"
html_show_sourcelink = html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Markdown. Links to headings (`page.md#heading`) are checked like all others.
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Docstrings in NumPy style: types with shapes and units stand in the text, annotations in the signature.
napoleon_google_docstring = False
napoleon_use_param = napoleon_use_rtype = False
napoleon_use_ivar = True
# "What it is: more" is a sentence, not a type with its description, as napoleon reads the docstring of a property.
GoogleDocstring._parse_attribute_docstring = lambda self: type(self)(
    self._consume_to_end(), self._config
).lines()
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "no-value": True}

# A name in :class:`…`, :func:`…` must lead to its entry in the reference. Other packages have none here, nor have the
# names of types that only annotations use.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!nvalchemi).*"),
    ("py:.*", r".*\._.*|.*[a-z_]\.(Vector|Stateful|Evaluated|Annotated|Stream)"),
]

PACKAGES = (
    "nvalchemi.data",
    "nvalchemi.data.zarr",
    "nvalchemi.neighbors",
    "nvalchemi.models",
    "nvalchemi.hooks.reporting",
    "nvalchemi.hooks",
    "nvalchemi.dynamics",
    "nvalchemi.dynamics.hooks",
    "nvalchemi.training.hooks",
    "nvalchemi.training.losses",
    "nvalchemi.training",
)


def _public_names() -> dict[str, str]:
    """Where a class or function has its entry, by the module that defines it and by every package that exports it."""
    entries = {
        f"nvalchemi.data.{name}": f"nvalchemi.data.schema.{name}" for name in ("FIELDS", "FIXED", "FREE")
    }
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, type) or callable(thing):
                entry = entries.setdefault(f"{thing.__module__}.{name}", f"{package}.{name}")
                entries.setdefault(f"{package}.{name}", entry)
    return entries


def _resolve_public(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link what an annotation names by its private module to the entry of the public name."""
    if node.get("refdomain") != "py":
        return None
    target, _, member = str(node["reftarget"]), "", ""
    if target not in PUBLIC_NAMES:
        target, _, member = target.rpartition(".")
    if target not in PUBLIC_NAMES:
        return None
    entry = ".".join(filter(None, (PUBLIC_NAMES[target], member)))
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], entry, node, contnode)


def _add_table_of_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rows of the schema below its docstring."""
    if name != "nvalchemi.data.schema.FIELDS":
        return
    lines += ["", ".. list-table::", "   :header-rows: 1", ""]
    header = ("name", "level", "shape", "unit", "meaning")
    rows = [
        (f"``{f.name}``", f.level, f"``{f.describe_shape()}``", f.unit, f.doc)
        for f in thing.values()
        if f.persistent
    ]
    for row in [header, *rows]:
        lines += [f"   {' ' if k else '*'} - {cell}" for k, cell in enumerate(row)]
    lines.append("")


PUBLIC_NAMES = _public_names()


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("missing-reference", _resolve_public)
    app.connect("autodoc-process-docstring", _add_table_of_fields)
