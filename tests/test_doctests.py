"""Every module can be imported, and the examples in its docstrings print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import opkit

ROOT = Path(opkit.__file__).parent
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
ROOMS = {}
for path in sorted(ROOT.rglob("*.py")):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    if parts[-1] not in ("__main__", "_core"):
        ROOMS.setdefault(parts[1] if len(parts) > 2 else "opkit", []).append(".".join(parts).removesuffix(".__init__"))


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings(room):
    for name in ROOMS[room]:
        module = importlib.import_module(name)
        if ">>>" in Path(module.__file__).read_text():  # doctest takes long to find that there is none
            result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
            assert result.failed == 0, f"the failing example of {name} is printed above"


@pytest.mark.parametrize("page", ["lowering", "testing"])
def test_pages_of_the_reference(page):
    result = doctest.testfile(str(REFERENCE / f"{page}.md"), module_relative=False)
    assert result.attempted
    assert result.failed == 0, "the failing example is printed above"
