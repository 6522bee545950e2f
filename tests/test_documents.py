"""Every Python block of the README and docs/ runs, and every opkit command that is cheap enough to run.

The blocks of a page run in order in one process, at the line numbers that they have in the page. Blocks whose fence
reads ```` ```python my_ops.py ```` are saved under that name, together, and imported where they stand. A text block after a
Python block is what that block prints, in the pages of ``SHOWING``. Most pages in folders of docs/ are exhaustive.
"""

import dataclasses
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import fresh_process
import pytest

from opkit import config, errors

ROOT = Path(__file__).parents[1]
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
WARNINGS = [option for each in PYTEST["filterwarnings"] for option in ("-W", each)]
SHOWING = [f"docs/{name}.md" for name in ("compiler", "libraries", "models", "optimize", "runtime")]
_LONG = (
    "compiler",
    "distributed",
    "jax",
    "layers",
    "libraries",
    "optimize",
    "triton",
)  # pages whose blocks take seconds
KEPT = [name for name in DOCUMENTS if name.count("/") < 2 and Path(name).stem not in _LONG] + [
    "docs/migrate/torch_library.md",
    "docs/tutorials/c_kernel.md",
]
_END = "\0"
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_CHEAP = ("doctor", "list", "describe", "--help")
_LIMIT = 960  # seconds for the blocks of one page; on a slow processor, next to another test, the README once took 261
pytestmark = pytest.mark.timeout(_LIMIT + 20)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file name after it, its lines, and the number of the first of them."""

    language: str
    file: str | None
    first_line: int
    lines: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened = (number, fence["info"].strip())
            continue
        language, _, file = opened[1].partition(" ")
        found.append(Block(language, file.strip() or None, opened[0] + 2, tuple(lines[opened[0] + 1 : number])))
        opened = None
    assert opened is None, f"the block opened on line {opened[0] + 1} is not closed"
    return found


def script(text: str) -> str:
    """Return the Python blocks of a page that belong to no file; a file's names are imported where its blocks are."""
    found = [block for block in blocks(text) if block.language == "python"]
    return _placed(text, [(block, block.lines if block.file is None else _imported(block.file)) for block in found])


def _imported(file: str) -> tuple[str, ...]:
    return (f"from {Path(file).stem} import *",)


def _placed(text: str, placed: Iterable[tuple[Block, Sequence[str]]]) -> str:
    """Return lines where their blocks are, with every other line blank, so that line numbers agree."""
    lines = [""] * len(text.splitlines())
    for block, content in placed:
        lines[block.first_line - 1 : block.first_line - 1 + len(content)] = content
    return "\n".join(lines) + "\n"


def commands(text: str) -> list[list[str]]:
    """Return the opkit commands in a page's shell blocks, except those that install, train or test."""
    lines = [line for block in blocks(text) if block.language in ("bash", "console", "sh") for line in block.lines]
    parts = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [part for part in parts if len(part) > 1 and part[0] == "opkit" and part[1] in _CHEAP]


def save(text: str, folder: Path) -> None:
    found = [block for block in blocks(text) if block.file is not None]
    for file in {block.file for block in found}:
        parts = [(block, block.lines) for block in found if block.file == file]
        (folder / file).write_text(_placed(text, parts), encoding="utf-8")


def expected_outputs(text: str) -> list[tuple[int, str]]:
    """Return each text block after a Python block, with the number of Python blocks before that one."""
    found = [block for block in blocks(text) if block.language in ("python", "text")]
    pairs = [(n, found[n].lines) for n in range(1, len(found)) if found[n].language == "text"]
    return [(sum(b.language == "python" for b in found[: n - 1]), "\n".join(lines)) for n, lines in pairs]


def script_with_marks(text: str) -> str:
    """Return the script of a page, which prints a mark where each block's output ends."""
    lines = script(text).splitlines()
    for block in blocks(text):
        if block.language == "python":
            lines[block.first_line - 1 + len(block.lines)] = f"print({_END!r})"
    return "\n".join(lines) + "\n"


@pytest.mark.sweep(keep=KEPT)
@pytest.mark.parametrize("name", [name for name, text in DOCUMENTS.items() if script(text).strip()])
def test_python_blocks_run(name, tmp_path):
    text = DOCUMENTS[name]
    program = tmp_path / f"{Path(name).stem.lower()}_blocks.py"
    program.write_text(script_with_marks(text) if name in SHOWING else script(text), encoding="utf-8")
    save(text, tmp_path)
    done = fresh_process.run([*WARNINGS, program.name], cwd=tmp_path, timeout=_LIMIT)
    printed = done.stdout.split(_END)
    for block, expected in expected_outputs(text) if name in SHOWING else []:
        assert printed[block].strip("\n") == expected


def test_commands_run(tmp_path):
    found = [(name, command) for name, text in DOCUMENTS.items() for command in commands(text)]
    assert found
    for name, (_, *arguments) in found:
        folder = tmp_path / Path(name).stem
        folder.mkdir(exist_ok=True)
        save(DOCUMENTS[name], folder)
        fresh_process.run(["-m", "opkit", *arguments], cwd=folder)


def test_links_lead_somewhere():
    folders = ("docs", "benchmarks", "cpp_ext", "examples", "opkit", "tests")
    pages = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    broken = [
        f"{path}: {target}"
        for path in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not broken


def test_files_that_pages_name_exist():
    """A page names files and folders by their path from the root, in backticks."""
    path = re.compile(r"`((?:opkit|cpp_ext|tests|examples|benchmarks|docs)/[\w./]*)`")
    pages = [*PATHS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    named = [(page.name, name) for page in pages for name in path.findall(page.read_text(encoding="utf-8"))]
    assert [each for each in named if not (ROOT / each[1]).exists()] == []


def test_settings_are_those_of_the_configuration():
    rows = re.findall(r"^\| `(OPKIT_\w+)` \| (?:`([^`]*)`)?", DOCUMENTS["docs/settings.md"], re.MULTILINE)
    source = Path(config.__file__).read_text(encoding="utf-8")
    assert {name for name, _ in rows} == set(re.findall(r'"(OPKIT_\w+)"', source))
    for name, default in rows:
        if default.isdigit():  # the page's defaults are those of an empty environment
            assert config.read({name: default}) == config.read({}), name


def test_every_setting_has_a_row():
    fields = {field.name for field in dataclasses.fields(config.Settings)} - {"verify_all", "tune_all"}  # =all
    assert {
        name.removeprefix("OPKIT_").lower()
        for name in re.findall(r"^\| `(OPKIT_\w+)`", DOCUMENTS["docs/settings.md"], re.M)
    } == fields


def test_errors_that_the_answers_name_exist():
    headings = re.findall(r"^### (.*)$", DOCUMENTS["docs/faq.md"], re.MULTILINE)
    named = {name for heading in headings for name in re.findall(r"\w+(?:Error|Warning)", heading)}
    assert len(named) >= 20
    assert {name for name in named if not hasattr(errors, name)} == set()


def test_pages_of_results_are_those_of_the_report():
    """``python -m benchmarks.report`` writes them again."""
    pages = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))["pages"]()
    assert pages
    assert [path for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []


def test_no_drawing_is_long():
    drawings = [path for folder in ("docs", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.svg")]
    assert not [path for path in drawings if len(path.read_text(encoding="utf-8").splitlines()) > 200]


def test_blocks_keep_their_line_numbers():
    text = "one\n```python\nx = 1\n```\n\n```bash\n$ opkit doctor  # a remark\npip install .\n```\n"
    assert [block.first_line for block in blocks(text)] == [3, 7]
    assert script(text).splitlines()[2] == "x = 1"
    assert commands(text) == [["opkit", "doctor"]]


def test_blocks_of_one_file_are_saved_together(tmp_path):
    text = "```python my.py\nx = 1\n```\n\n```python\nprint(x)\n```\n```python my.py\ny = x\n```\n"
    save(text, tmp_path)
    assert (tmp_path / "my.py").read_text(encoding="utf-8").splitlines() == ["", "x = 1", *[""] * 6, "y = x", ""]
    assert [line for line in script(text).splitlines() if line] == ["from my import *", "print(x)", "from my import *"]
