"""Imports point one way. The rooms, and which may use which, are those of ``_ROOMS``, lowest first."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opkit"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room may import its own modules and those of any room in a lower row; rooms of one row do not import each other.
_ROWS = (
    ("errors", "page"),
    ("config", "compat", "_core", "runtime"),
    ("kernels",),
    ("op",),
    ("sharding",),
    ("compiler", "contract"),
    ("attn", "jax", "lowering", "layers", "notebook", "ship"),
    ("testing", "masks"),
    ("nn",),
    ("opkit",),
    ("bench", "demo", "doctor", "tracing"),
    ("terminal",),
    ("cli_bench", "cli_check", "cli_kernels", "cli_new", "cli_packages"),
    ("cli",),
    ("__main__",),
)
_ROWS_OF = {room: row for row, rooms in enumerate(_ROWS) for room in rooms}

# What a room must not import at all, wherever the statement stands.
_NEVER = {"opkit.compiler.ir": "torch", "opkit.compiler.lower": "torch", "opkit.compiler.emit": "torch"}

# What `import opkit` must leave for later.
_SLOW = (
    "triton",
    "jax",
    "cffi",
    "pycparser",
    "hypothesis",
    "matplotlib",
    "jaxtyping",
    "typer",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The second part of a dotted name, or ``opkit`` itself: the façade."""
    return module.split(".")[1] if "." in module else module


NAMES = {name_of(path) for path in MODULES} | {"opkit._core"}


@functools.cache
def imports(path: Path) -> list[tuple[int, str, bool]]:
    """Every module that a file imports: its line, its name, and whether a run imports it (not under ``if TYPE_CHECKING:``).

    ``from package import submodule`` counts as the submodule.
    """
    found: list[tuple[int, str, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), True)]
    while waiting:
        node, runs = waiting.pop()
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, runs) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the module's whole name"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name if name in NAMES else str(node.module), runs) for name in full]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += [(each, False) for each in node.body] + [(each, runs) for each in node.orelse]
        elif not isinstance(node, ast.expr):
            waiting += [(each, runs) for each in ast.iter_child_nodes(node)]
    return found


def internal(path: Path) -> list[tuple[int, str, bool]]:
    return [each for each in imports(path) if each[1].split(".")[0] == "opkit"]


def test_rooms_import_lower_rooms_alone():
    missing = {room_of(name_of(path)) for path in MODULES} - _ROWS_OF.keys()
    assert not missing, f"{sorted(missing)} have no row in this test: put each where it belongs"
    wrong = [
        f"{path}:{line}: {room_of(name_of(path))} imports {name}"
        for path in MODULES
        for line, name, _ in internal(path)
        if room_of(name) != room_of(name_of(path)) and _ROWS_OF[room_of(name)] >= _ROWS_OF[room_of(name_of(path))]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_in_no_cycle():
    edges = {name_of(path): {name for _, name, runs in internal(path) if runs} - {name_of(path)} for path in MODULES}
    cycle = find_cycle(edges)
    assert cycle is None, " -> ".join(cycle or ())


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return None
        for target in sorted(edges.get(node, ())):
            if (cycle := visit(target, [*trail, node])) is not None:
                return cycle
        done.add(node)
        return None

    return next((cycle for node in sorted(edges) if (cycle := visit(node, [])) is not None), None)


def test_a_cycle_is_found():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}}) is None


def test_rooms_that_never_import_torch_do_not():
    wrong = [
        f"{path}:{line}: {room} imports {name}"
        for room, banned in _NEVER.items()
        for path in MODULES
        if name_of(path).startswith(room)
        for line, name, _ in imports(path)
        if name.split(".")[0] == banned
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_under_400_lines():
    assert not [path for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) >= 400]


def test_importing_opkit_leaves_slow_modules_for_later():
    program = (
        "import sys, json, opkit; alone = 'torch' in sys.modules; import torch; before = set(sys.modules); "
        "opkit.custom_op, opkit.c_kernel, opkit.triton_kernel, opkit.from_library, opkit.check, opkit.runtime_library; "
        "added = sorted(set(sys.modules) - before); import opkit.testing, opkit.nn; "
        "print(json.dumps([alone, added, 'torch._dynamo' in sys.modules]))"
    )
    command = [sys.executable, "-P", "-c", program]  # not the source tree, which has no compiled part
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    alone, added, compiler = json.loads(run.stdout)
    assert not alone, "import opkit also imports torch"
    assert "opkit.op.definition" in added
    slow = [name for name in added if any(name == heavy or name.startswith(heavy + ".") for heavy in _SLOW)]
    assert not slow, f"opkit.custom_op also imports {slow}"
    assert not compiler, "import opkit.testing, opkit.nn also imports torch._dynamo"


def test_the_command_shows_its_help_without_torch():
    program = (
        "import sys, opkit.cli; opkit.cli.app(['--help'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True)
