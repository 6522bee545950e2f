"""Arguments and calls written as text, the tensors made from them, and calls made up from annotations."""

import enum
import json
import re

import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

import opkit
from opkit.errors import ArgumentError
from opkit.op.examples import calls as example_calls
from opkit.op.examples.arguments import (
    SHORT_DTYPES,
    ExampleCall,
    TensorSpec,
    make,
    make_all,
    parse,
    parse_arguments,
    parse_call,
    read_file,
    shown,
)


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@pytest.fixture
def op(name):
    """Makes operators from functions, each in the place of the one before."""
    return lambda function: opkit.custom_op(name, mutates_args=())(function)._operator


# ---- text ------------------------------------------------------------------------------------------------------------


def test_arguments():
    for text, value in (
        ("bf16[4096, 1024]", TensorSpec(torch.bfloat16, (4096, 1024))),
        (" torch.float16 [ 8,]", TensorSpec(torch.float16, (8,))),
        ("float64[0]", TensorSpec(torch.float64, (0,))),
        ("fp32[]", TensorSpec(torch.float32, ())),
        ("fp8e4m3[4,8]:strides(1,4)", TensorSpec(torch.float8_e4m3fn, (4, 8), (1, 4))),
        ("i64[3] : strides( 0 )", TensorSpec(torch.int64, (3,), (0,))),
        ("[u8[1], bool[2]]", [TensorSpec(torch.uint8, (1,)), TensorSpec(torch.bool, (2,))]),
        ("[[1, -2], []]", [[1, -2], []]),
        ("1e-6", 1e-6),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("-inf", float("-inf")),
        ("inf", float("inf")),
        ("True", True),
        ("null", None),
        ("'a, \\'b\\''", "a, 'b'"),
        ('"bf16[1]"', "bf16[1]"),
        ("bf16", torch.bfloat16),
        ("torch.int32", torch.int32),
    ):
        found = parse(text)
        assert (found, type(found)) == (value, type(value)), text


def test_short_dtypes():
    for name, dtype in SHORT_DTYPES.items():
        assert parse(f"{name}[2]") == TensorSpec(dtype, (2,))
        assert str(TensorSpec(dtype, (2, 3), (1, 2))) == f"{name}[2, 3]:strides(1, 2)"


def complaint_about(read, text):
    """What is said of a text that cannot be read."""
    with pytest.raises(ArgumentError) as caught:
        pytest.fail(f"{text!r} was read as {read(text)!r}")
    return str(caught.value)


def test_mistakes_in_arguments():
    for text, complaint in (
        ("", "expected a value"),
        ("bf17[8]", r"'bf17' is no dtype; there are .*bf16.* and torch's own, at 'bf17\[ <--'"),
        ("load[8]", "'load' is no dtype"),
        ("bf16[8", "expected ',' or ']'"),
        ("bf16[-1]", "whole number that is not negative, found '-1'"),
        ("bf16[1.5]", "whole number that is not negative, found '1.5'"),
        ("bf16[d]", "whole number that is not negative, found 'd'"),
        ("bf16[4k]", "expected a size"),
        ("bf16[4, 4]:strides(1)", "1 strides for 2 sizes"),
        ("bf16[4]:stride(1)", r"expected strides\(...\)"),
        ("bf16[4] 5", "expected nothing more"),
        ("silu", 'a string needs quotes: "silu"'),
        ("(1, 2)", r"expected a value, found '\('"),
        ("'open", "expected a value"),
    ):
        assert re.search(complaint, complaint_about(parse, text)), text


def test_a_call():
    call = parse_call(" demo::rms_norm ( x=bf16[8192, 4096], weight = bf16[4096],eps=1e-6, mode='a)', ) ")
    assert call.operator == "demo::rms_norm"
    assert call.arguments == {
        "x": TensorSpec(torch.bfloat16, (8192, 4096)),
        "weight": TensorSpec(torch.bfloat16, (4096,)),
        "eps": 1e-6,
        "mode": "a)",
    }
    assert str(call) == "demo::rms_norm(x=bf16[8192, 4096], weight=bf16[4096], eps=1e-06, mode='a)')"
    assert parse_call(str(call)) == call
    assert parse_call("demo::nothing.out()") == ExampleCall("demo::nothing.out", {})


def test_mistakes_in_calls():
    for text, complaint in (
        ("rms_norm(x=bf16[8])", "is no call. Write it as in demo::rms_norm"),
        ("demo::rms_norm", "is no call"),
        ("demo::rms_norm(bf16[8])", "expected name=value"),
        ("demo::rms_norm(x=)", "expected a value"),
        ("demo::rms_norm(x=bf16[8] y=1)", "expected nothing more"),
        ("demo::rms_norm(x=1, x=2)", "gives x twice"),
    ):
        assert re.search(complaint, complaint_about(parse_call, text)), text


def test_a_dictionary_of_arguments():
    arguments = {"x": "bf16[4]", "xs": ["i8[1]", 2], "mode": "silu", "dtype": torch.int8, "n": None}
    assert parse_arguments(arguments, "here") == {
        "x": TensorSpec(torch.bfloat16, (4,)),
        "xs": [TensorSpec(torch.int8, (1,)), 2],
        "mode": "silu",
        "dtype": torch.int8,
        "n": None,
    }
    with pytest.raises(ArgumentError, match="here, x: 'bf61"):
        parse_arguments({"x": "bf61[4]"}, "here")


def test_a_file_of_calls(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"demo::a": [{"x": "fp32[8]", "eps": 0.5}, {"x": "fp32[16]"}], "demo::b": []}))
    assert [str(call) for call in read_file(path)] == ["demo::a(x=fp32[8], eps=0.5)", "demo::a(x=fp32[16])"]


def test_mistakes_in_files(tmp_path):
    path = tmp_path / "shapes.json"
    for text, complaint in (
        ("{", "cannot be read as JSON"),
        ("[]", "holds no object such as"),
        ('{"demo::a": {"x": 1}}', r"demo::a\[0\]: expected a list of objects"),
        ('{"demo::a": [{}, 5]}', r"demo::a\[1\]: expected a list of objects"),
        ('{"demo::a": [{"x": "fp32[x]"}]}', r"demo::a\[0\], x: .* found 'x'"),
    ):
        path.write_text(text)
        assert re.search(rf"shapes\.json.*{complaint}", complaint_about(read_file, path)), text
    assert "none cannot be read: No such file" in complaint_about(read_file, tmp_path / "none")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_tensors_of_every_dtype():
    for name, dtype in SHORT_DTYPES.items():
        tensor, again, other = (make(f"{name}[64, 32]", seed=seed) for seed in (0, 0, 1))
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (64, 32), True)
        tensor, again, other = (each.to(torch.float64) for each in (tensor, again, other))
        assert tensor.unique().numel() > 1, name
        assert torch.equal(tensor, again), name
        assert not torch.equal(tensor, other), name


def test_strides():
    tensor = make("fp32[8, 4]:strides(1, 8)")
    assert (tensor.shape, tensor.stride()) == ((8, 4), (1, 8))
    assert make("fp32[8, 4]:strides(0, 1)").untyped_storage().nbytes() == 16
    assert make("fp32[2, 2]:strides(100, 3)").untyped_storage().nbytes() == 104 * 4
    assert make("fp32[0, 4]:strides(9, 9)").shape == (0, 4)
    assert make("fp32[]").shape == ()


def test_integers_can_index_the_floating_tensors():
    made = make_all({"logits": "fp32[64, 10]", "target": "i64[4096]", "data": "i8[4096]", "mask": "bool[100]"})
    assert (made["target"].min(), made["target"].max()) == (0, 9)
    assert made["data"].min() < -100
    assert made["data"].max() > 100
    assert make("i64[4096]").max() == 127
    assert make_all({"x": "fp32[0]", "i": "i64[8]"})["i"].max() == 0


def test_arguments_differ_from_each_other_and_are_nested_as_given():
    made = make_all({"x": "fp32[8]", "xs": ["fp32[8]", ["fp32[8]"]], "mode": "silu"})
    assert not torch.equal(made["x"], made["xs"][0])
    assert made["xs"][1][0].shape == (8,)
    assert made["mode"] == "silu"


def test_what_cannot_be_made_is_named():
    with pytest.raises(ArgumentError, match=r"x=fp32\[\d+\] cannot be made on cpu: "):
        make_all({"x": f"fp32[{2**60}]"})


# ---- calls of operators ----------------------------------------------------------------------------------------------


def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, " d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    return x * weight * eps


def matmul(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
    return a @ b


def attention(q: Float[Tensor, "b h s d"], doubled: Float[Tensor, "2*d"], mask: Bool[Tensor, "s s"]) -> Tensor:
    return q.clone()


def plain(x: Tensor, y: str | None, n: int, mode: Mode, dtype: torch.dtype, ids: Int[Tensor, "..."]) -> Tensor:
    return x.clone()


def listed(xs: list[Tensor], rows: list[int] | None) -> Tensor:
    return xs[0].clone()


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (norm, [f"(x={dtype}[4096, 1024], weight={dtype}[1024])" for dtype in ("bf16", "fp16", "fp32")]),
        (matmul, ["(a=fp32[1024, 1024], b=fp32[1024, 1024])"]),
        (attention, [f"(q={dtype}[64, 64, 64, 64], doubled={dtype}[128], mask=bool[64, 64])"
                     for dtype in ("bf16", "fp16", "fp32")]),
        (plain, [f"(x={dtype}[4096, 1024], y=None, n=1, mode='FAST', dtype={dtype}, ids=i64[4096, 1024])"
                 for dtype in ("bf16", "fp16", "fp32")]),
        (listed, [f"(xs=[{dtype}[4096, 1024], {dtype}[4096, 1024]], rows=None)" for dtype in ("bf16", "fp16", "fp32")]),
    ],
)  # fmt: skip
def test_calls_made_up(op, function, calls):
    operator = op(function)
    assert [str(call).removeprefix(operator.name) for call in example_calls.generate(operator)] == calls


def test_calls_made_up_can_be_made(op):
    operator = op(norm)
    for call in example_calls.generate(operator):
        positional, named = example_calls.arguments_of(operator, call)
        assert [value.shape for value in positional[:2]] == [(4096, 1024), (1024,)]
        assert (positional[2], named) == (1e-6, {})


def test_what_cannot_be_made_up(op):
    def sizes(x: Tensor, pair: tuple[int, float]) -> Tensor:
        return x.clone()

    with pytest.raises(ArgumentError, match=r"no value can be made up for pair .*examples=.*--shapes"):
        example_calls.generate(op(sizes))


def test_arguments_of_a_call(op):
    def call(x: Tensor, mode: Mode, *, dtype: torch.dtype, scale: float = 2.0) -> Tensor:
        return x.clone()

    operator = op(call)
    spec = parse_call(f"{operator.name}(x=fp32[3], mode='EXACT', dtype='bf16')")
    positional, named = example_calls.arguments_of(operator, spec)
    assert (positional[0].shape, positional[1]) == ((3,), Mode.EXACT)
    assert named == {"dtype": torch.bfloat16, "scale": 2.0}
    for text, complaint in (
        ("(x=fp32[3], mode='FAST', dtype='bf61')", "dtype must be a dtype such as bf16, got 'bf61'"),
        ("(x=fp32[3], mode='QUICK', dtype=bf16)", "mode must be one of FAST, EXACT, got 'QUICK'"),
        ("(y=fp32[3], mode='FAST', dtype=bf16)", "has no argument y; it has x, mode, dtype, scale"),
        ("(x=fp32[3], modes='FAST', dtype=bf16)", "has no argument modes.*Did you mean mode"),
        ("(x=fp32[3], mode='FAST')", "dtype is missing"),
        ("(x=3, mode='FAST', dtype=bf16)", r"x must be a tensor such as"),
        ("(x=fp32[3], mode='FAST', dtype=bf16, scale=fp32[1])", "scale must be .*float.*, which is no tensor"),
    ):
        with pytest.raises(ArgumentError, match=complaint):
            example_calls.arguments_of(operator, parse_call(operator.name + text))


def test_examples_of_a_kernel(op):
    operator = op(norm)
    (call,) = example_calls.from_examples(operator, [{"x": "bf16[8, 4]", "weight": "bf16[4]"}])
    assert shown(list(call.arguments.values())) == "[bf16[8, 4], bf16[4]]"
    with pytest.raises(ArgumentError, match=r"examples\[1\], x: 'bf16\[a\]'"):
        example_calls.from_examples(operator, [{"x": "bf16[8, 4]", "weight": "bf16[4]"}, {"x": "bf16[a]"}])
    with pytest.raises(ArgumentError, match="weight is missing"):
        example_calls.from_examples(operator, [{"x": "bf16[8, 4]"}])


@pytest.mark.gpu
def test_tensors_on_a_gpu():
    made = make_all({"x": "bf16[64, 32]", "y": "fp8e4m3[8]", "i": "i32[100]", "b": "bool[8]"}, "cuda")
    assert all(value.is_cuda for value in made.values())
    assert made["i"].max() < 32
