"""Parameters bound by name to an operator's arguments, outputs and named sizes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from opkit.errors import DeclarationError
from opkit.kernels.binding import Slot, bind
from opkit.kernels.cc.declaration import parse
from opkit.kernels.facts import Argument, Facts, Output, Shape

ARGUMENTS = (
    Argument("x", "tensor", shape=Shape((), "batch", ("d",))),
    Argument("bias", "tensor", optional=True, shape=Shape(("d", 3, None))),
    Argument("state", "tensor", written=True),
    Argument("parts", "tensors"),
    Argument("kept", "tensors", written=True),
    Argument("k", "int"),
    Argument("eps", "float"),
    Argument("flag", "bool"),
    Argument("dtype", "dtype"),
    Argument("limit", "int", optional=True),
    Argument("scale", "float", optional=True),
    Argument("causal", "bool", optional=True),
    Argument("kind", "dtype", optional=True),
    Argument("mode", "str"),
    Argument("pads", "ints"),
    Argument("weights", "floats"),
    Argument("mask", "bools"),
    Argument("device", "ignored"),
    Argument("n", "tensor"),
)
FACTS = Facts("demo::f", "demo::f(...)", ARGUMENTS, ())
NUMBER = {argument.name: number for number, argument in enumerate(ARGUMENTS)}
FIRST_OUTPUT = len(ARGUMENTS)


def with_outputs(*outputs: Output) -> Facts:
    return dataclasses.replace(FACTS, outputs=outputs)


def bound(parameters, facts=FACTS, variables=("T", "U"), **options):
    return bind(parse(f"void f({parameters}) {{}}"), facts, variables, kernel_name="kern", **options)


def slot(parameters, facts=FACTS, **options) -> Slot:
    (found,) = bound(parameters, facts, **options).slots
    return found


ARGUMENT_SLOTS = [
    ("const T* x", "DATA", "x", -2, "p"),
    ("const U* x", "DATA", "x", -2, "p"),  # the only variable that is used is the first
    ("const float* x", "DATA", "x", 6, "p"),
    ("const long* x", "DATA", "x", 4, "p"),
    ("const long long* x", "DATA", "x", 4, "p"),
    ("const unsigned char* x", "DATA", "x", 0, "p"),
    ("const signed char* x", "DATA", "x", 1, "p"),
    ("const unsigned short* x", "DATA", "x", 27, "p"),
    ("const bool* x", "DATA", "x", 11, "p"),
    ("const float _Complex* x", "DATA", "x", 9, "p"),
    ("const std::complex<double>* x", "DATA", "x", 10, "p"),
    ("const __nv_bfloat16* x", "DATA", "x", 15, "p"),
    ("const opk_half* x", "DATA", "x", 5, "p"),
    ("const void* x", "DATA", "x", -1, "p"),
    ("const T* bias", "DATA", "bias", -2, "p"),
    ("T* state", "DATA", "state", -2, "p"),
    ("const T* state", "DATA", "state", -2, "p"),
    ("const opk_tensor* x", "TENSOR", "x", -1, "p"),
    ("const opk_tensor* state", "TENSOR", "state", -1, "p"),
    ("const opk_tensor_of(T)* x", "TENSOR", "x", -2, "p"),
    ("const opk_tensor_of(int64_t)* x", "TENSOR", "x", 4, "p"),
    ("const T* const* parts", "DATA_LIST", "parts", -2, "p"),
    ("T* const* kept", "DATA_LIST", "kept", -2, "p"),
    ("const void* const* parts", "DATA_LIST", "parts", -1, "p"),
    ("const opk_tensor* parts", "TENSOR_LIST", "parts", -1, "p"),
    ("int64_t k", "SCALAR", "k", -1, "i"),
    ("int k", "SCALAR", "k", -1, "i"),
    ("unsigned char k", "SCALAR", "k", -1, "i"),
    ("double k", "SCALAR", "k", -1, "i"),
    ("T k", "SCALAR", "k", -1, "i"),
    ("float eps", "SCALAR", "eps", -1, "f"),
    ("const double eps", "SCALAR", "eps", -1, "f"),
    ("T eps", "SCALAR", "eps", -1, "f"),
    ("bool flag", "SCALAR", "flag", -1, "i"),
    ("int flag", "SCALAR", "flag", -1, "i"),
    ("int32_t dtype", "SCALAR", "dtype", -1, "i"),
    ("enum opk_dtype dtype", "SCALAR", "dtype", -1, "i"),
    ("const int64_t* limit", "SCALAR_POINTER", "limit", -1, "p"),
    ("const double* scale", "SCALAR_POINTER", "scale", -1, "p"),
    ("const bool* causal", "SCALAR_POINTER", "causal", -1, "p"),
    ("const uint8_t* causal", "SCALAR_POINTER", "causal", -1, "p"),
    ("const int32_t* kind", "SCALAR_POINTER", "kind", -1, "p"),
    ("const int64_t* k", "SCALAR_POINTER", "k", -1, "p"),
    ("const char* mode", "STRING", "mode", -1, "p"),
    ("const int64_t* pads", "VALUES", "pads", -1, "p"),
    ("const double weights[]", "VALUES", "weights", -1, "p"),
    ("const bool* mask", "VALUES", "mask", -1, "p"),
    ("const uint8_t* mask", "VALUES", "mask", -1, "p"),
    ("int64_t parts_len", "LENGTH", "parts", -1, "i"),
    ("int n_parts", "LENGTH", "parts", -1, "i"),
    ("size_t mode_length", "LENGTH", "mode", -1, "i"),
    ("unsigned pads_len", "LENGTH", "pads", -1, "i"),
    ("int64_t x_numel", "NUMEL", "x", -1, "i"),
    ("int x_rank", "RANK", "x", -1, "i"),
    ("int x_ndim", "RANK", "x", -1, "i"),
    ("const T* n", "DATA", "n", -2, "p"),
]


def test_arguments():
    for text, source, name, dtype, member in ARGUMENT_SLOTS:
        found = slot(text)
        given = (found.source, found.argument, found.dtype, found.member)
        assert given == (source, NUMBER[name], dtype, member), text


def test_sizes_and_strides():
    for text, source, detail in (
        ("x_size_0", "SIZE", 0), ("x_size_12", "SIZE", 12), ("x_size_m1", "SIZE", -1), ("x_stride_1", "STRIDE", 1),
        ("x_stride_m2", "STRIDE", -2), ("batch", "NAMED_SIZE", 0), ("d", "NAMED_SIZE", 1),
    ):  # fmt: skip
        found = slot(f"int64_t {text}")
        assert (found.source, found.detail, found.c_type, found.member) == (source, detail, "int64_t", "i"), text


def test_an_argument_wins_over_a_size_and_a_length_over_a_size():
    shaped = Argument("a", "tensor", shape=Shape(("d", "n_xs", "n")))
    facts = Facts("demo::g", "", (shaped, Argument("d", "int"), Argument("xs", "ints")), ())
    assert [each.source for each in bound("int d, int n_xs, int n", facts).slots] == ["SCALAR", "LENGTH", "NAMED_SIZE"]


ONE, TWO = with_outputs(Output("y")), with_outputs(Output("y"), Output("rstd"))
IN_PLACE = with_outputs(Output("", alias=NUMBER["state"]))


def test_outputs():
    for parameters, facts, arguments in (
        ("T* y", ONE, [FIRST_OUTPUT]),
        ("T* out", ONE, [FIRST_OUTPUT]),
        ("const opk_tensor* out", ONE, [FIRST_OUTPUT]),
        ("void* out", ONE, [FIRST_OUTPUT]),
        ("T* out0, T* out1", TWO, [FIRST_OUTPUT, FIRST_OUTPUT + 1]),
        ("T* rstd, T* y", TWO, [FIRST_OUTPUT + 1, FIRST_OUTPUT]),
        ("T* out0, T* rstd, int64_t out1_numel", TWO, [FIRST_OUTPUT, FIRST_OUTPUT + 1, FIRST_OUTPUT + 1]),
        ("T* state", IN_PLACE, [NUMBER["state"]]),
        ("T* out", IN_PLACE, [NUMBER["state"]]),
    ):
        assert [each.argument for each in bound(parameters, facts).slots] == arguments, parameters


def test_outputs_may_be_given_other_names():
    assert slot("T* z", ONE, outputs=("z",)).argument == FIRST_OUTPUT
    with pytest.raises(DeclarationError, match="outputs= has 2 names for 1"):
        bound("T* z", ONE, outputs=("z", "w"))


def test_constants_go_first():
    for text, value, source, constant, member in (
        ("int n_threads", 3, "INT_CONSTANT", 3, "i"),
        ("CBLAS_ORDER order", 101, "INT_CONSTANT", 101, "i"),
        ("enum CBLAS_ORDER order", 101, "INT_CONSTANT", 101, "i"),
        ("float beta", 0, "FLOAT_CONSTANT", 0.0, "f"),
        ("double beta", 0.5, "FLOAT_CONSTANT", 0.5, "f"),
        ("T beta", 0.5, "FLOAT_CONSTANT", 0.5, "f"),
        ("bool fast", True, "INT_CONSTANT", 1, "i"),
        ("void* workspace", None, "INT_CONSTANT", 0, "p"),
        ("int64_t eps", -5, "INT_CONSTANT", -5, "i"),
    ):
        found = slot(text, constants={text.split()[-1]: value})
        assert (found.source, found.constant, found.member) == (source, constant, member), text


def test_a_parameter_may_go_by_another_name():
    assert slot("const T* a", constants={"a": "x"}) == slot("const T* x").__class__(
        **{**dataclasses.asdict(slot("const T* x")), "name": "a"}
    )
    assert slot("int lda", constants={"lda": "d"}).detail == 1
    assert slot("int lda", constants={"lda": "x_stride_m2"}).source == "STRIDE"


def test_the_stream_of_a_cuda_kernel():
    assert slot("cudaStream_t stream", cuda=True).source == slot("void* stream", cuda=True).source == "STREAM"


def test_type_variables_that_no_tensor_tells_are_dropped():
    found = bound("const U* x, T k, const float* bias")
    assert (found.variables, [each.dtype for each in found.slots]) == (("U",), [-2, -1, 6])
    found = bound("const U* x, const T* bias, const U* n")
    assert (found.variables, [each.dtype for each in found.slots]) == (("T", "U"), [-3, -2, -3])
    assert bound("const float* x").variables == ()


def test_plain_opk_tensors_tell_the_only_variable_where_no_pointer_does():
    found = bound("const opk_tensor* x, const opk_tensor* parts, int d", variables=("T",))
    assert (found.variables, [each.dtype for each in found.slots]) == (("T",), [-2, -2, -1])
    found = bound("const opk_tensor* x, const T* bias", variables=("T",))
    assert [each.dtype for each in found.slots] == [-1, -2]
    assert bound("const opk_tensor* x", variables=()).slots[0].dtype == -1


REFUSED = [
    ("T* x", "does not write to x. Declare it const, or let the operator mutate it"),
    ("T x", "x is a tensor: take `const T[*] x` or `const opk_tensor[*] x`"),
    ("const T* const* x", "x is a tensor"),
    ("opk_tensor* x", "`const opk_tensor[*] x`"),
    ("opk_tensor x", "`const opk_tensor[*] x`"),
    ("const V* x", "V is no element type. Write one of the type variables T, U"),
    ("const char* x", "char is no element type"),
    ("const blob* x", "blob is no element type"),
    ("void (*x)(int)", "function is no element type"),
    ("const T* parts", "list of tensors: take `const T[*] const[*] parts`"),
    ("const T** parts", "list of tensors"),
    ("T* const* parts", "does not write to parts"),
    ("const T* kept", "take `T[*] const[*] kept`"),
    ("int eps", "eps is of kind float and cannot be taken as int. Take `float` or `double`"),
    ("int64_t limit", "limit is optional: take `const int64_t[*] limit`; it is NULL for None"),
    ("double scale", "scale is optional: take `const double[*] scale`"),
    ("const float* scale", "`const double[*] scale`"),
    ("double* scale", "`const double[*] scale`"),
    ("const int* limit", "`const int64_t[*] limit`"),
    ("const float* eps", "take it by value, or as `const double[*] eps`"),
    ("double flag", "flag is of kind bool and cannot be taken as double"),
    ("float dtype", "dtype is of kind dtype"),
    ("char* mode", "mode is a string: take `const char[*] mode`"),
    ("int mode", "mode is a string"),
    ("const int* pads", "pads is a list: take `const int64_t[*] pads`"),
    ("const float* weights", "weights is a list: take `const double[*] weights`"),
    ("int64_t* pads", "`const int64_t[*] pads`"),
    ("int device", "device, layout, memory format or generator"),
    ("float d", "it is a size.*`int64_t d`"),
    ("short d", "it is a size"),
    ("bool d", "it is a size"),
    ("const int64_t* d", "it is a size"),
    ("uint16_t x_numel", "it is a size"),
    ("T x_rank", "it is a size"),
    ("int8_t pads_len", "it is a size"),
    ("int64_t x_len", "'x_len' stands for nothing"),
    ("int64_t pads_numel", "'pads_numel' stands for nothing"),
    ("int64_t x_size_m", "'x_size_m' stands for nothing"),
    ("float epz", "'epz' stands for nothing.*Nearest: eps.*bind=.'epz': [.]{3}"),
    ("int64_t btch", "Nearest: batch"),
    ("void* stream", "a kernel on the CPU has no stream"),
]


def complaint(*args, **options):
    try:
        bound(*args, **options)
    except DeclarationError as error:
        return str(error)
    return "none"


def test_what_does_not_fit():
    for text, message in REFUSED:
        said = complaint(text)
        assert re.search(rf"demo::f, kernel 'kern', parameter `.*{message}", said), (text, said)


def test_constants_that_do_not_fit():
    for text, constants, message in (
        ("int a", {"b": 1}, "bind= names 'b', but f has no such parameter. It has a"),
        ("int a", {"a": 0.5}, "Give it an integer"),
        ("int a", {"a": 2**31}, "does not fit into int"),
        ("unsigned a", {"a": -1}, "does not fit into unsigned"),
        ("int64_t a", {"a": 2**63}, "does not fit into int64_t"),
        ("int a", {"a": None}, "A pointer takes None alone"),
        ("const T* a", {"a": 3}, "A pointer takes None alone"),
        ("int a", {"a": "dd"}, "'dd' stands for nothing.*Nearest: d"),
    ):
        said = complaint(text, constants=constants)
        assert re.search(message, said), (text, constants, said)


def test_outputs_that_stay_unwritten():
    for parameters, facts, message in (
        (
            "const T* x",
            ONE,
            "no parameter receives output 0 .y., which the kernel would leave unwritten. Add `T. y` or `T. out`",
        ),
        ("T* y", TWO, "no parameter receives output 1 .rstd..*Add `T. rstd` or `T. out1`"),
        ("int64_t y_numel", ONE, "no parameter receives output 0"),
        ("const T* y", ONE, "y is an output and must be written to. Declare it without const"),
        ("int stream", FACTS, "take torch's current stream as `cudaStream_t stream`"),
    ):
        said = complaint(parameters, facts, cuda=True)
        assert re.search(message, said), (parameters, said)
