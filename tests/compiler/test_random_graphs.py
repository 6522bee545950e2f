"""Random programs, compiled, give what eager torch gives; thousands of them: benchmarks/fuzz_compile.py."""

import functools
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from random_compare import EagerError, mismatch
from random_graphs import Input, Program, arguments
from random_lines import programs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of programs that are odd on purpose

few = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
examples = pytest.mark.parametrize(
    ("examples", "device"),
    [
        pytest.param(6, "cpu", id="6"),
        pytest.param(25, "cpu", id="25", marks=pytest.mark.exhaustive),
        pytest.param(5, "cuda", id="5-cuda", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


@pytest.fixture
def compiled():
    """``compiled(f)``: ``f`` with opkit's backend, which fails where it would otherwise run a graph eagerly."""
    backend = pytest.importorskip("opkit.compiler.backend", reason="opkit's backend cannot be imported")
    return functools.partial(torch.compile, backend=backend.opkit_backend, options={"strict": True})


def unlike(program, compile_, grad=False, device="cpu"):
    """What is not as in eager; programs that eager refuses are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return mismatch(program, compile_, grad, device)
        except EagerError:
            assume(False)


@pytest.mark.parametrize("grad", [False, True], ids=["results", "gradients"])
@examples
def test_programs_are_as_in_eager(compiled, examples, device, grad):
    @settings(few, max_examples=examples)
    @given(program=programs(gradients=grad))
    def as_in_eager(program):
        wrong = unlike(program, compiled, grad, device)
        assert not wrong, f"{wrong}\n{program.script('opkit', device)}"

    as_in_eager()


FOUND = {
    "an elementary function of one number": Program((Input((), "F32"),), ("v0 = t0.sin()",), ("v0",)),
    "a power of one number": Program((Input((), "F32"),), ("v0 = (t0 * t0 + 1) ** 1.5",), ("v0",)),
    "an argument that is overwritten, and then passed over again": Program(
        (Input((5,), "F32"),), ("t0.add_(t0)", "v0 = torch.softmax(t0, 0)"), ("v0",)
    ),
    "rows that are overwritten with their own softmax": Program(
        (Input((8, 5), "F32"),), ("t0.copy_(torch.softmax(t0 + t0, -1))", "v0 = t0.sum(-1)"), ("v0",)
    ),
    "rows that are overwritten with what is dear": Program(
        (Input((8, 5), "F32"),), ("t0.copy_((t0.sin() + t0.exp()).tanh())", "v0 = F.layer_norm(t0, (5,)) + t0"), ("v0",)
    ),
    "columns that are overwritten": Program(
        (Input((8, 33), "F32"),), ("t0.mul_(t0)", "v0 = torch.softmax(t0, 0) + t0"), ("v0",)
    ),
    "an argument that is overwritten between two sums": Program(
        (Input((8, 33), "F32"), Input((8, 33), "F32")),
        ("v0 = t0.mean(1)", "t0.add_(t1)", "v1 = t0.std(1) + t1.amax(1)"),
        ("v0", "v1"),
    ),
}
"""What programs like these once showed to be wrong."""

FOUND_DYNAMIC = {
    "half of a size, which a guard says is 1": Program(
        (Input((3,), "F32"),), ("v0 = torch.log_softmax(t0.narrow(0, 0, t0.shape[0] // 2).sin(), 0)",), ("v0",)
    ),
    "the last part of a size, which is 1 and is repeated": Program(
        (Input((3, 3), "F32"), Input((3, 3), "F32", seed=1)), ("v0 = t0.chunk(2, 0)[-1] * t1",), ("v0",)
    ),
}
"""The same of symbolic sizes."""


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_a_bug_once_found_stays_away(compiled, program):
    grad = not any("_(" in line for line in program.lines)  # eager refuses gradients through an argument it writes to
    assert not (wrong := unlike(program, compiled, grad)), f"{wrong}\n{program.script('opkit')}"


@pytest.mark.parametrize("program", FOUND_DYNAMIC.values(), ids=FOUND_DYNAMIC)
def test_a_bug_of_symbolic_sizes_stays_away(compiled, program):
    dynamic = functools.partial(compiled, dynamic=True)
    assert not (wrong := unlike(program, dynamic, grad=True)), f"{wrong}\n{program.script('opkit')}"


SMALL = Program(
    (Input((3, 5), "F32", "transposed"), Input((5,), "BF16")), ("v0 = (t0 + t1).sum(dim=0)", "t0.add_(1)"), ("v0", "t0")
)


def test_a_program_is_text_that_runs():
    scope = {}
    exec(SMALL.script("eager"), scope)
    expected = SMALL.function()(*arguments(SMALL))
    assert all(map(torch.equal, scope["f"](*arguments(SMALL)), expected))
    assert [t.stride() for t in scope["args"]] == [t.stride() for t in arguments(SMALL)]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda results: (results[0] * 1.1, results[1]), "beyond"),
        (lambda results: (results[0].double(), results[1]), "float64"),
        (lambda results: (results[0], results[1].clone()), "share memory"),
        (lambda results: (results[0].fill_(float("nan")), results[1]), "not finite"),
        (lambda results: (results[0], results[1].add_(1)), "beyond"),
        (lambda results: (results[0].repeat_interleave(2)[::2], results[1]), "strides (2,)"),
    ],
    ids=["wrong", "wide", "copied", "NaN", "written", "strides"],
)
def test_a_wrong_compiler_is_found(spoil, said):
    assert said in mismatch(SMALL, lambda function: lambda *args: spoil(function(*args)))


def test_a_right_compiler_may_round_otherwise():
    exact = SMALL.function(exact=True)

    def fused(t0, t1):
        rounded = exact(t0.clone().double(), t1.double())[0].to(torch.float32)
        return rounded, SMALL.function()(t0, t1)[1]

    assert mismatch(SMALL, lambda function: fused) is None
