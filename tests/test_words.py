"""Words that the code does not use: a PyTorch engineer would not search for them, and the field has its own."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("opkit", "cpp_ext", "docs", "benchmarks", "examples")
SUFFIXES = {".py", ".pyi", ".md", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}

WRITE_INSTEAD = {
    "told": "reported, passed",
    "announces?|announced": "publish",
    "undisturbed": "no_active_modes",
    "found_or": "get_or_create",
    "pristine": "fresh process",
    "mend(?:s|ed)?": "repair, recompute",
    "surroundings": "constants, environment",
    "reckoned": "computed",
    "beside": "next to, in addition to, compared with",
    "wholes|spreads": "flattened lists",
    "heads_inside": "out_is_bshd",
}
FORBIDDEN = re.compile(rf"(?<![a-z])({'|'.join(WRITE_INSTEAD)})(?![a-z])", re.IGNORECASE)


def test_forbidden_words():
    texts = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in [*texts, *ROOT.glob("*.md")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in FORBIDDEN.findall(line)
    ]
    assert not wrong, f"{WRITE_INSTEAD}\n" + "\n".join(wrong)
