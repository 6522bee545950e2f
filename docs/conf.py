"""Settings of the documentation site: ``sphinx-build -W -c docs . build/docs``, from the root of the repository.

The root of the repository is the source folder, so that a link between pages, to a result or to an example means the same on
the site and where Markdown is read as files. A linked program is a page, which shows its source.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers import Parser
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
sys.path.append(str(ROOT))  # behind the installed opkit

import charts  # noqa: E402  next to this file
import screenshots  # noqa: E402

from benchmarks import gallery_pages  # noqa: E402

gallery_pages.write(ROOT / "build" / "gallery")

PAGES = (
    "docs/**/*.md", "build/gallery/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/**/*.md", "examples/**/*.md",
    "opkit/**/README.md",
)  # fmt: skip
LANGUAGES = {".py": "python", ".h": "c", ".hpp": "cpp", ".cpp": "cpp"}


def pages() -> dict[str, Path]:
    """Return the Markdown files of the site, by their paths from the root."""
    return {path.relative_to(ROOT).as_posix(): path for each in PAGES for path in ROOT.glob(each)}


def linked_programs() -> list[str]:
    """Return the programs that pages link to, by their paths from the root."""
    found = {
        (path.parent / target).resolve()
        for path in pages().values()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    }
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.suffix in LANGUAGES and path.is_file())


class ProgramParser(Parser):
    """Makes a page of a program: its path, and its source."""

    supported = ("program",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        path = Path(document["source"])
        title = path.relative_to(ROOT).as_posix()
        section = nodes.section("", nodes.title(title, title), ids=["program"])
        section += nodes.literal_block(inputstring, inputstring, language=LANGUAGES[path.suffix])
        document += section
        document.settings.env.metadata[document.settings.env.docname]["orphan"] = ""  # links lead here, no menu does


class Screenshot(SphinxDirective):
    """``{screenshot} explain``: a picture of one of opkit's pages, taken while the site is built; nothing without Chromium."""

    required_arguments = 1
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        taken = screenshots.taken(ROOT / "build" / "screenshots")
        if not taken:
            return []
        return [
            nodes.image(
                uri=f"/build/screenshots/{self.arguments[0]}.png", alt=self.options["alt"], classes=["screenshot"]
            )
        ]


def dash_after_parameters(app: Sphinx, doctree: nodes.document) -> None:
    """Write a dash between a parameter and its text, which ``smartquotes`` would do for every pair of hyphens."""
    for text in [text for text in doctree.findall(nodes.Text) if text == " -- "]:
        text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Sphinx) -> None:
    app.add_source_parser(ProgramParser)
    app.add_directive("screenshot", Screenshot)
    app.connect("doctree-read", dash_after_parameters)


project = "opkit"
language = "en"
extensions = ["charts", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.githubpages"]
source_suffix = {".md": "markdown", **dict.fromkeys(LANGUAGES, "program")}
root_doc = "docs/index"
include_patterns = [*pages(), *linked_programs()]
exclude_patterns = [".git", ".venv", "build/[!g]*"]  # are not searched
templates_path = ["_templates"]
nitpicky = True
smartquotes = False  # they would change the dashes of commands
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|hypothesis|jaxtyping|pathlib|os|typing)\..*"),  # others' documentation
    ("py:class", r"opkit\.compiler\..*"),  # types of fields of a Builder and an Index
]

autodoc_typehints = "none"  # docstrings give shapes and dtypes; types of masks and kernels would take a page
autodoc_member_order = "bysource"

myst_enable_extensions = ["substitution"]
myst_substitutions = {"three_figures": charts.landing()}
myst_heading_anchors = 4  # as forges make them, for links such as native.md#cuda

html_theme = "furo"
html_title = "opkit"
html_additional_pages = {"index": "redirect.html"}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "a11y-high-contrast-dark"  # Furo's underlines modules as if they were links
html_copy_source = False
html_show_copyright = False
