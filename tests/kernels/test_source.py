"""Generated units: compiled, loaded, described as they should be, and called."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

from opkit.errors import DeclarationError
from opkit.kernels.binding import bind
from opkit.kernels.cc.boilerplate import SOURCES
from opkit.kernels.cc.declaration import parse
from opkit.kernels.cc.dtypes import DTYPES
from opkit.kernels.cc.source import INCLUDE, generate
from opkit.kernels.facts import Argument, Facts, Output, Shape

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("g++")), reason="no gcc and g++")
COMPILERS = [{"c": "gcc", "c++": "g++"}] + ([{"c": "clang", "c++": "clang++"}] if shutil.which("clang++") else [])
FAMILIES = pytest.mark.parametrize("compilers", COMPILERS, ids=lambda chosen: chosen["c"])


class Value(ctypes.Union):
    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double))


FAIL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p)
BODY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, BODY, ctypes.c_void_p)
COUNT = ctypes.CFUNCTYPE(ctypes.c_int32)
BOXED = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32)
CALL = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(Value), ctypes.POINTER(ctypes.c_char_p))


def structure(title, /, **fields):
    return type(title, (ctypes.Structure,), {"_fields_": list(fields.items())})


I32, TEXT, POINTER = ctypes.c_int32, ctypes.c_char_p, ctypes.POINTER
Runtime = structure(
    "Runtime", version=I32, fail=FAIL, parallel=PARALLEL, count=COUNT, index=COUNT, boxed=BOXED, execute=ctypes.c_void_p
)
ShapeRow = structure("ShapeRow", before=I32, variadic=I32, after=I32, dims=POINTER(I32))
ArgumentRow = structure("ArgumentRow", name=TEXT, kind=I32, optional=I32, written=I32, shape=POINTER(ShapeRow))
OutputRow = structure("OutputRow", name=TEXT, alias=I32)
Parameter = structure("Parameter", name=TEXT, source=I32, argument=I32, detail=I32, dtype=I32, constant=Value)
InstanceRow = structure("InstanceRow", dtypes=POINTER(I32), call=CALL)
COUNTS = ("argument_count", "output_count", "parameter_count", "size_count", "variable_count", "instance_count")
Kernel = structure(
    "Kernel", version=I32, operator=TEXT, name=TEXT, schema=TEXT, cuda=I32, **dict.fromkeys(COUNTS, I32),
    arguments=POINTER(ArgumentRow), outputs=POINTER(OutputRow), parameters=POINTER(Parameter), sizes=POINTER(TEXT),
    instances=POINTER(InstanceRow), state=ctypes.c_void_p,
)  # fmt: skip


class Loaded:
    """A built kernel in this process, with a runtime that writes down what it is told."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.failures, self.boxed = [], []
        self.runtime = Runtime(
            1, FAIL(lambda *told: self.failures.append(told)), PARALLEL(lambda a, b, grain, body, context: body(a, b, context)),
            COUNT(lambda: 4), COUNT(lambda: 2), BOXED(lambda *told: self.boxed.append(told[1:])), None,
        )  # fmt: skip
        self.library.opk_init(ctypes.byref(self.runtime))
        self.library.opk_describe.restype = POINTER(Kernel)
        self.kernel = self.library.opk_describe().contents

    def call(self, number, *values):
        """The code that instance ``number`` returns, and the text."""
        packed = (Value * max(1, len(values)))()
        for slot, value in zip(packed, values, strict=False):
            member = "f" if isinstance(value, float) else "i" if isinstance(value, int) else "p"
            setattr(slot, member, value.ctypes.data if isinstance(value, np.ndarray) else value)
        text = ctypes.c_char_p()
        return self.kernel.instances[number].call(packed, ctypes.byref(text)), text.value


def units(text, facts, dtypes=None, name=None, bound=(), **options):
    dtypes = dtypes or {}
    found = bind(parse(text, name), facts, tuple(dtypes), dict(bound), "kern", cuda=options.get("cuda", False))
    return generate(found, text, dtypes, options.pop("kernel_name", "kern"), **options)


def compiled(parts, folder, compilers=COMPILERS[0], flags=()):
    objects = [folder / f"{number}.o" for number in range(len(parts))]
    for part, target in zip(parts, objects, strict=True):
        source = target.with_suffix({"c": ".c", "c++": ".cpp"}[part.language])
        source.write_text(part.text)
        standard = {"c": "-std=gnu11", "c++": "-std=c++17"}[part.language]
        options = [
            standard,
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            "-fvisibility=hidden",
            "-fexceptions",
            *flags,
            "-c",
            str(source),
            "-o",
            str(target),
        ]
        done = subprocess.run([compilers[part.language], *options], capture_output=True, text=True)
        assert done.returncode == 0, f"{part.name}\n{done.stderr}"
    library = folder / "kernel.so"
    subprocess.run(["gcc", "-shared", *map(str, objects), "-o", str(library), "-lm"], check=True)
    return library


def built(text, facts, folder, *given, compilers=COMPILERS[0], **options):
    return Loaded(compiled(units(text, facts, *given, **options), folder, compilers))


X = Argument("x", "tensor", shape=Shape((), "batch", ("d",)))
UNARY = Facts("demo::f", "demo::f(Tensor x) -> Tensor", (X,), (Output("y"),))
AXPY = Facts("demo::axpy", "demo::axpy(Tensor x, float a) -> Tensor", (X, Argument("a", "float")), (Output("y"),))
SCALE = """
void scale(const T* restrict x, double a, T* restrict out, int64_t x_numel) {
    for (int64_t i = 0; i < x_numel; i++) {
        opk_acc product = x[i] * (opk_acc)a;
        out[i] = (T)product;
    }
}
"""
NUMPY = {name: np.dtype(name) for name in DTYPES if name != "bfloat16"}


@FAMILIES
def test_a_kernel_of_every_dtype_runs(tmp_path, compilers):
    loaded = built(SCALE, AXPY, tmp_path, {"T": tuple(DTYPES)}, compilers=compilers)
    assert [loaded.kernel.instances[n].dtypes[0] for n in range(15)] == [dtype.number for dtype in DTYPES.values()]
    for number, name in enumerate(DTYPES):
        x = np.array([0x3F80, 0x4000], np.uint16) if name == "bfloat16" else np.array([1, 2], NUMPY[name])
        out = np.zeros_like(x)
        assert loaded.call(number, x, 3.0, out, 2) == (0, None)
        expected = [0x4040, 0x40C0] if name == "bfloat16" else (np.array([3, 6]) if name != "bool" else [True, True])
        assert (out == expected).all(), name


HELPED = """
#include <stddef.h>
typedef struct { T value; } boxed;
#define TWICE(v) ((T)((v) + (v)))
enum { OFFSET = 1 };
T table[2] = {(T)10, (T)20};
int calls = 0;
inline static T pick(T v) { return (T)(v + table[OFFSET]); }
T helper(T v) { boxed b = {pick(v)}; calls++; return TWICE(b.value); }
void f(const T* x, T* out, size_t x_numel) { for (size_t i = 0; i < x_numel; i++) out[i] = helper(x[i]); }
"""


@FAMILIES
@pytest.mark.parametrize("language", ["c", "c++"])
def test_instances_share_no_name(tmp_path, compilers, language):
    text = (
        HELPED if language == "c" else HELPED.replace("void f(", 'extern "C" void f(').replace("<stddef.h>", "<vector>")
    )
    loaded = built(
        text, UNARY, tmp_path, {"T": ("float64", "int32", "float16")}, "f", compilers=compilers, language=language
    )
    for number, kind in enumerate((np.float64, np.int32, np.float16)):
        x, out = np.array([1, 2], kind), np.zeros(2, kind)
        loaded.call(number, x, out, 2)
        assert out.tolist() == [42, 44]


def test_only_four_names_are_exported(tmp_path):
    library = compiled(units(HELPED, UNARY, {"T": ("float32", "bfloat16")}, "f"), tmp_path)
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert names == {"opk_describe", "opk_init", "opk_boxed", "opk_boxed_with_layout"}


HEADERS = ("", "#include <math.h>\n#include <string.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <stdint.h>\n"
           "#include <float.h>\n#include <stdbool.h>\n#include <limits.h>\n#include <stddef.h>\n")  # fmt: skip
LIBRARY = """
static float erff(float v) { return v; }
void exp(const T* x, T* out, int64_t x_numel) {
    bool fine = true;
    T* copy = (T*)malloc(sizeof(T) * (size_t)x_numel);
    memcpy(copy, x, sizeof(T) * (size_t)x_numel);
    if (copy == NULL || isnan(copy[0]) || !isfinite((float)x[0]) || INT32_MAX < 3 || FLT_MAX < 1) fine = false;
    out[0] = (T)(fabsf(tanhf(copy[0])) + fmaxf(-INFINITY, sqrtf((float)copy[1])) + erff(2) + (float)pow(2.0, 2.0) * fine);
    free(copy);
}
"""


@pytest.mark.sweep
@FAMILIES
@pytest.mark.parametrize("headers", HEADERS, ids=["none", "all"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_c_library_with_and_without_headers(tmp_path, compilers, headers, dtype):
    text = headers + (LIBRARY.replace("erff(", "erff_(").replace("exp(", "f(") if headers else LIBRARY)
    loaded = built(text, UNARY, tmp_path, {"T": (dtype,)}, compilers=compilers)
    out = np.zeros(1, dtype)
    loaded.call(0, np.array([0, 9], dtype), out, 2)
    assert out[0] == 3 + 2 + 4


RICH = Facts(
    'demo::"rich"\\\n', 'demo::é??/(Tensor x, ...) "->"\t', (
        X, Argument("bias", "tensor", optional=True, shape=Shape((3, None, "d"))),
        Argument("any", "tensor", written=True, shape=Shape((), "", ())), Argument("k", "int", optional=True),
        Argument("where", "ignored"), Argument("mode", "str"), Argument("pads", "ints"),
    ), (Output("y"), Output("any", alias=2)),
)  # fmt: skip
RICH_SOURCE = """int f(const T* x, const opk_tensor* bias, U* any, const int64_t* k, const char* mode, const int64_t* pads,
    int pads_len, uint32_t d, int64_t batch, int64_t x_stride_m1, float alpha, long beta, void* work,
    const opk_tensor_of(double)* y) {
    ((T*)y->data)[0] = (T)(alpha + beta + pads[pads_len - 1] + *k + (mode[0] == 'm') + (work == 0) + (bias == 0) + d);
    any[0] = 7;
    return x[0] > 0 ? 0 : 5 + (int)batch + (int)x_stride_m1;
}"""


def test_the_descriptor_says_what_was_bound(tmp_path):
    given = {"T": ("float64",), "U": ("int8", "bool")}
    constants = {"alpha": 0.25, "beta": -3, "work": None}
    loaded = built(RICH_SOURCE, RICH, tmp_path, given, bound=constants, kernel_name='k"\n')
    kernel = loaded.kernel
    assert (kernel.version, kernel.operator.decode(), kernel.name.decode()) == (1, RICH.operator, 'k"\n')
    assert (kernel.schema.decode(), kernel.cuda, kernel.state is not None) == (RICH.schema, 0, True)
    assert [getattr(kernel, name) for name in COUNTS] == [7, 2, 14, 2, 2, 2]
    rows = [kernel.arguments[n] for n in range(7)]
    assert [(row.name.decode(), row.kind, row.optional, row.written) for row in rows] == [
        ("x", 0, 0, 0), ("bias", 0, 1, 0), ("any", 0, 0, 1), ("k", 2, 1, 0), ("where", 10, 0, 0), ("mode", 5, 0, 0),
        ("pads", 7, 0, 0),
    ]  # fmt: skip
    shapes = [rows[n].shape.contents for n in range(3)]
    assert [(shape.before, shape.variadic, shape.after) for shape in shapes] == [(0, 0, 1), (3, -2, 0), (0, -1, 0)]
    assert (shapes[0].dims[0], shapes[1].dims[:3]) == (1, [-5, -1, 1])
    assert not any([rows[3].shape, shapes[2].dims])
    assert [(kernel.outputs[n].name, kernel.outputs[n].alias) for n in range(2)] == [(b"y", -1), (b"any", 2)]
    assert [kernel.sizes[n] for n in range(2)] == [b"batch", b"d"]
    slots = [kernel.parameters[n] for n in range(14)]
    assert [(SOURCES[slot.source], slot.argument, slot.detail, slot.dtype) for slot in slots] == [
        ("DATA", 0, 0, -2), ("TENSOR", 1, 0, -1), ("DATA", 2, 0, -3), ("SCALAR_POINTER", 3, 0, -1), ("STRING", 5, 0, -1),
        ("VALUES", 6, 0, -1), ("LENGTH", 6, 0, -1), ("NAMED_SIZE", 0, 1, -1), ("NAMED_SIZE", 0, 0, -1), ("STRIDE", 0, -1, -1),
        ("FLOAT_CONSTANT", 0, 0, -1), ("INT_CONSTANT", 0, 0, -1), ("INT_CONSTANT", 0, 0, -1), ("TENSOR", 7, 0, 7),
    ]  # fmt: skip
    assert (slots[10].constant.f, slots[11].constant.i, slots[12].constant.p) == (0.25, -3, None)
    assert [kernel.instances[n].dtypes[:2] for n in range(2)] == [[7, 1], [7, 11]]


def test_what_is_not_an_instance_of_a_variable(tmp_path):
    loaded = built(
        "void f(const void* x, float* out) { (void)x; *out = 3; }", UNARY, tmp_path, {"T": ("float32", "int8")}
    )
    assert (loaded.kernel.variable_count, loaded.kernel.instance_count) == (0, 1)
    fixed = "void f(const void* x, float* out) { T v = 2; (void)x; *out = (float)v; }"
    out = np.zeros(1, np.float32)
    (tmp_path / "fixed").mkdir()
    built(fixed, UNARY, tmp_path / "fixed", {"T": ("int8",)}).call(0, out, out)
    assert out[0] == 2
    with pytest.raises(DeclarationError, match="T has several dtypes, but no tensor parameter decides which"):
        units(fixed, UNARY, {"T": ("int8", "int16")})
    with pytest.raises(DeclarationError, match=r"T cannot be float99. Known dtypes: uint8"):
        units(SCALE, AXPY, {"T": ("float99",)})


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("int", [2**31 - 1, -(2**31)], [2**31, -(2**31) - 1]), ("T", [-(2**15), 2**15 - 1], [2**15]), ("bool", [0, 1, 2], []),
        ("size_t", [0, 2**63 - 1], [-1]), ("unsigned", [0, 2**32 - 1], [-1, 2**32]), ("int64_t", [-(2**63), 2**63 - 1], []),
        ("signed char", [-128, 127], [128, -129]),
    ],
)  # fmt: skip
def test_an_integer_that_does_not_fit_its_parameter_is_an_error(tmp_path, kind, good, bad):
    facts = Facts("demo::f", "", (X, Argument("k", "int")), (Output("y"),))
    text = f"void f(const T* x, {kind} k, int64_t* out) {{ (void)x; *out = (int64_t)k; }}"
    loaded = built(text, facts, tmp_path, {"T": ("int16",)})
    out = np.zeros(1, np.int64)
    for value in good:
        assert loaded.call(0, None, value, out) == (0, None)
        assert out[0] == (bool(value) if kind == "bool" else value)
    for value in bad:
        assert loaded.call(0, None, value, out) == (
            -1,
            f"k does not fit into {parse(f'void f({kind} k)').parameters[0].type}".encode(),
        )


def test_a_float_is_not_cut_off_to_an_integer_t():
    with pytest.raises(DeclarationError, match="parameter 'a' is a T, here int8, and would cut a float off"):
        units("void f(const T* x, T a, T* out) {}", AXPY, {"T": ("float32", "int8")})


@pytest.mark.parametrize(("head", "result", "expected"), [
    ("int", "7", (7, None)), ("int32_t", "0", (0, None)), ("const char*", '"no"', (1, b"no")), ("const char*", "0", (0, None)),
])  # fmt: skip
def test_what_a_kernel_returns(tmp_path, head, result, expected):
    loaded = built(f"{head} f(const float* x, float* out) {{ (void)x; (void)out; return {result}; }}", UNARY, tmp_path)
    assert loaded.call(0, None, None) == expected


TALKING = """static void body(int64_t a, int64_t b, void* context) { *(int64_t*)context += b - a; }
int f(const float* x, float* out) {
    int64_t total = opk_num_threads() + opk_thread_index();
    opk_parallel_for(0, 10, 1, body, &total);
    *out = (float)total;
    if (x == NULL_) { opk_fail("no x: %s", "sorry"); return 1; }
    return 0;
}
"""


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_runtime_is_reached(tmp_path, language):
    text, out = TALKING.replace("NULL_", "0"), np.zeros(1, np.float32)
    loaded = built(text, UNARY, tmp_path, language=language, filename='a "b"\n.c', first_line=40, name="f")
    assert loaded.call(0, None, out) == (1, None)
    assert (out[0], loaded.failures) == (16, [(b'a "b"\n.c', 45, b"no x: %s")])
    loaded.library.opk_boxed(None, ctypes.c_uint64(3), ctypes.c_uint64(1))
    loaded.library.opk_boxed_with_layout(None, ctypes.c_uint64(4), ctypes.c_uint64(1))
    assert loaded.boxed == [(None, 3, 1, 0), (None, 4, 1, 1)]


WRONG = "#include <stdint.h>\n\nint one;\n#include <stddef.h>\nvoid f(const T* x, T* out) {\n    oops(x);\n}\n"


@pytest.mark.sweep
@FAMILIES
@pytest.mark.parametrize(
    ("language", "dtypes"), list(itertools.product(["c", "c++"], [("float32",), ("float32", "bfloat16")]))
)
def test_errors_show_the_authors_own_lines(tmp_path, compilers, language, dtypes):
    parts = units(WRONG, UNARY, {"T": dtypes}, filename="my kernels/é.py", first_line=100, language=language)
    for part in parts[: len(dtypes)]:
        source = tmp_path / f"u.{part.language}"
        source.write_text(part.text)
        flags = ["-std=gnu11", "-Werror"] if part.language == "c" else []
        chosen = [compilers[part.language], "-x", part.language, "-fsyntax-only", *flags, str(source)]
        done = subprocess.run(chosen, capture_output=True, text=True)
        shown = "my kernels/é.py:105:" in done.stderr or "my kernels/\\303\\251.py:105:" in done.stderr
        assert done.returncode != 0
        assert shown, done.stderr


@pytest.mark.parametrize("call", ['opk_fail("%s", 3)', 'opk_fail("%d")', 'opk_fail("%d", 1, 2)'])
def test_the_format_of_a_failure_is_checked(tmp_path, call):
    with pytest.raises(AssertionError, match="format"):
        compiled(units(f"void f(const float* x, float* out) {{ (void)x; (void)out; {call}; }}", UNARY), tmp_path)


def test_the_authors_macros_do_not_reach_what_is_generated(tmp_path):
    macros = "".join(
        f"#define {name} !\n" for name in ("p", "i", "f", "v", "kernel", "stack", "values", "number", "version", "text")
    )
    loaded = built(f"{macros}void g(const float* x, float* out) {{ *out = *x; }} \\", UNARY, tmp_path)
    out = np.zeros(1, np.float32)
    assert loaded.call(0, np.ones(1, np.float32), out) == (0, None)
    assert out[0] == 1


LINKED = """#ifdef __cplusplus
extern "C" {
#endif
#include <string.h>
void f(const T* x, T* out) { declared(out, x); }
#ifdef __cplusplus
}
#endif
"""


LANGUAGES = [("c", ("bfloat16",)), ("c", ("bfloat16", "int16")), ("c++", ("bfloat16", "int16"))]


@pytest.mark.parametrize(("language", "dtypes"), LANGUAGES)
def test_includes_within_linkage_blocks_and_a_preamble(tmp_path, language, dtypes):
    preamble = "#include <math.h>\nstatic inline void declared(void* out, const void* x) { memcpy(out, x, 2); }"
    given = preamble.replace("math.h", "cstring") if language == "c++" else preamble
    loaded = built(LINKED, UNARY, tmp_path, {"T": dtypes}, language=language, preamble=given)
    x, out = np.array([5], np.int16), np.zeros(1, np.int16)
    loaded.call(len(dtypes) - 1, x, out)
    assert out[0] == 5


def test_units_are_named_after_their_dtypes():
    names = [(part.name, part.language) for part in units(SCALE, AXPY, {"T": ("float32", "bfloat16")})]
    assert names[0] == ("kern for float32", "c")
    assert names[1][0].startswith("kern for bfloat16, compiled as C++")
    assert (names[1][1], names[2]) == ("c++", ("kern, its description", "c"))
    assert (INCLUDE / "opkit.h").is_file()
