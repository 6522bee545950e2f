"""Where collectives start and where their results are awaited, and the memory of what they read until then."""

from opkit.compiler.ir.graph import Graph, Node, Ref, TensorType
from opkit.compiler.ir.index import index
from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.ir.program import Extern, reads, writes
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule

START = "_c10d_functional.{}.default"


def matrix(rows, columns=8):
    return TensorType("f32", (index(rows), index(columns)), (index(columns), index(1)), index(0), "cpu")


def graph(*lines, inputs=("x", "y"), outputs, rows=8):
    """A graph of lines such as "a = sin x": of matrices with as many columns as rows, but for what is gathered."""
    nodes = [Node(name, "input", (), {}, matrix(rows, rows)) for name in inputs]
    for line in lines:
        name, _, operator, *operands = line.split()
        start, *rest = {
            "gather": ("all_gather_into_tensor", 2, "0"),
            "reduce": ("all_reduce", "sum", "0"),
            "wait": ("wait_tensor",),
        }.get(operator, ("",))
        target = (
            START.format(start) if start else f"aten.{operator}.{'Tensor' if operator in ('add', 'mul') else 'default'}"
        )
        wide = operator == "gather" or (len(operands) == 1 and nodes_of(nodes)[operands[0]] == matrix(2 * rows, rows))
        nodes.append(
            Node(
                name,
                target,
                (*map(Ref, operands), *rest),
                {},
                matrix(2 * rows if wide else rows, rows),
                effect=operator == "wait",
            )
        )
    return Graph("test", tuple(nodes), tuple(map(Ref, outputs)), {})


def nodes_of(nodes):
    return {node.name: node.result for node in nodes}


def order(program):
    """The results of steps, in order."""
    return [name for step in program.steps for name in writes(step)]


def test_a_wait_comes_before_the_first_use():
    program = lower(
        graph("a = sin x", "g = gather a", "w = wait g", "p = mm x y", "q = mm p p", "r = sin w", outputs=("q", "r"))
    )
    assert order(program) == ["a", "g", "p", "q", "w", "r"]
    assert reads(program.steps[4]) == ["g", "a"], "nothing overwrites what is read before"


def test_a_collective_starts_when_its_input_exists_but_passes_no_wait():
    lines = ("g = gather x", "w = wait g", "p = mm x y", "u = sin w", "h = gather y", "v = wait h", "t = sin v")
    assert order(lower(graph(*lines, outputs=("p", "u", "t")))) == ["g", "p", "w", "h", "u", "v", "t"]


def test_collectives_stay_in_order():
    lines = ("p = mm x y", "g = gather p", "h = gather x", "w = wait g", "v = wait h", "u = sin w", "t = sin v")
    assert order(lower(graph(*lines, outputs=("u", "t")))) == ["p", "g", "h", "w", "u", "v", "t"]


def test_a_collective_reads_contiguous_memory():
    _, call, _ = lower(graph("a = t x", "g = gather a", "w = wait g", outputs=("w",))).steps
    assert [*call.args[0].strides] == [8, 1]


def test_a_write_to_an_input_comes_after_the_wait():
    lines = ("g = gather x", "w = wait g", "z = mul x y", "c = copy_ x z", "u = sin w")
    program = lower(graph(*lines, outputs=("u",)))
    steps = [step.target if isinstance(step, Extern) else step.buffer for step in program.steps]
    assert steps.index("opkit.wait") < steps.index("x")
    *_, copy, _ = made = schedule(program).steps
    assert "opkit.wait" in [step.target for step in made[: made.index(copy)] if isinstance(step, Extern)]
    assert copy.buffers[[argument.written for argument in copy.kernel.arguments].index(True)] == "x"


def test_waits_that_keep_much_memory_come_earlier():
    lines = (
        "a = sin x",
        "g = gather a",
        "w = wait g",
        "b = cos x",
        "h = gather b",
        "v = wait h",
        "p = mm x y",
        "q = mm p y",
    )
    outputs = ("w", "v", "q")
    assert order(lower(graph(*lines, outputs=outputs)))[-2:] == ["w", "v"]
    large = order(lower(graph(*lines, outputs=outputs, rows=3000)))  # 36 MB in each
    assert large.index("w") < large.index("p") < large.index("v")


def test_what_a_collective_reads_keeps_its_memory_until_the_wait():
    lines = ["a = exp x", "g = gather a", "w = wait g"]
    lines += [f"p{n} = mm {'x' if n == 0 else f'p{n - 1}'} y" for n in range(6)]
    made = schedule(lower(graph(*lines, "u = sin w", outputs=("p5", "u"))))
    names = [name for step in made.steps for name in (step.buffers if isinstance(step, KernelLaunch) else writes(step))]
    assert names.index("w") > names.index("p5")
    assert [name for name, place in made.places.items() if place == made.places["a"]] == ["a"]
    never = schedule(lower(graph(*lines[:2], *lines[3:], outputs=("p5", "g"))))
    assert "a" not in never.places, "nobody knows when the collective ends"
