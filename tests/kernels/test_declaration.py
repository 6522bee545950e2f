"""Declarations found in C, C++ and CUDA source."""

from __future__ import annotations

import re

import pytest

from opkit.errors import DeclarationError
from opkit.kernels.cc import scanner
from opkit.kernels.cc.declaration import functions, parse

PARAMETERS = [
    ("const T* x", ("x", "T", 1, True), "const T*"),
    ("T const* x", ("x", "T", 1, True), "const T*"),
    ("T *x", ("x", "T", 1, False), "T*"),
    ("T* const x", ("x", "T", 1, False), "T*"),
    ("const T* restrict x", ("x", "T", 1, True), "const T*"),
    ("const T* __restrict__ x", ("x", "T", 1, True), "const T*"),
    ("const T *__restrict x", ("x", "T", 1, True), "const T*"),
    ("T x[]", ("x", "T", 1, False), "T*"),
    ("const T x[n]", ("x", "T", 1, True), "const T*"),
    ("const T x[16]", ("x", "T", 1, True), "const T*"),
    ("T x[restrict static 4]", ("x", "T", 1, False), "T*"),
    ("T* const* xs", ("xs", "T", 2, False), "T* const*"),
    ("const T* const* xs", ("xs", "T", 2, True), "const T* const*"),
    ("const T *const xs[]", ("xs", "T", 2, True), "const T* const*"),
    ("T** xs", ("xs", "T", 2, False), "T**"),
    ("float eps", ("eps", "float", 0, False), "float"),
    ("const float eps", ("eps", "float", 0, True), "float"),
    ("int64_t n", ("n", "int64_t", 0, False), "int64_t"),
    ("std::int64_t n", ("n", "int64_t", 0, False), "int64_t"),
    ("std::size_t n", ("n", "size_t", 0, False), "size_t"),
    ("unsigned long int n", ("n", "unsigned long", 0, False), "unsigned long"),
    ("unsigned n", ("n", "unsigned int", 0, False), "unsigned int"),
    ("signed n", ("n", "int", 0, False), "int"),
    ("long int unsigned n", ("n", "unsigned long", 0, False), "unsigned long"),
    ("long long n", ("n", "long long", 0, False), "long long"),
    ("signed char* x", ("x", "signed char", 1, False), "signed char*"),
    ("const char* mode", ("mode", "char", 1, True), "const char*"),
    ("bool flag", ("flag", "bool", 0, False), "bool"),
    ("_Bool flag", ("flag", "_Bool", 0, False), "_Bool"),
    ("float _Complex* z", ("z", "float _Complex", 1, False), "float _Complex*"),
    ("double complex* z", ("z", "double _Complex", 1, False), "double _Complex*"),
    ("const std::complex<float>* z", ("z", "std::complex<float>", 1, True), "const std::complex<float>*"),
    ("const opk_tensor* x", ("x", "opk_tensor", 1, True), "const opk_tensor*"),
    ("const struct opk_tensor* x", ("x", "opk_tensor", 1, True), "const opk_tensor*"),
    ("const opk_tensor_of(T)* x", ("x", "opk_tensor", 1, True), "const opk_tensor*"),
    ("cudaStream_t stream", ("stream", "cudaStream_t", 0, False), "cudaStream_t"),
    ("void* stream", ("stream", "void", 1, False), "void*"),
    ("const enum CBLAS_ORDER order", ("order", "enum CBLAS_ORDER", 0, True), "enum CBLAS_ORDER"),
    ("OPENBLAS_CONST blasint n", ("n", "blasint", 0, True), "blasint"),
    ("const __half *x", ("x", "__half", 1, True), "const __half*"),
    ("T* x __attribute__((aligned(64)))", ("x", "T", 1, False), "T*"),
    ("/* in, ) */ const T* x // the input\n", ("x", "T", 1, True), "const T*"),
]


def test_a_parameter_of_any_form_is_read():
    for text, expected, spelling in PARAMETERS:
        (parameter,) = parse(f"void f({text}) {{}}").parameters
        assert (parameter.name, parameter.type, parameter.pointer, parameter.const) == expected, text
        assert parameter.spelling == spelling, text


def test_the_type_of_an_opk_tensors_elements_is_kept():
    (parameter,) = parse("void f(const opk_tensor_of(T)* x) {}").parameters
    assert (parameter.element, parameter.text) == ("T", "const opk_tensor_of(T)* x")


FOUND = [
    ("void f(int a) {}", "f", 1),
    ("\n\nvoid\nf(int a)\n{}", "f", 3),
    ("void f(int a)", "f", 1),
    ("void f(int a);", "f", 1),
    ("void f();", "f", 1),
    ("void f(void) { }", "f", 1),
    ("void g(int a); void f(int a) { g(a); }", "f", 1),
    ("static int g(int a) { return a; }\nvoid f(int a) {}", "f", 2),
    ("inline int g(int a) { return a; }\nvoid f(int a) {}", "f", 2),
    ("int const static g(int a) { return a; }\nvoid f(int a) {}", "f", 2),
    ("__global__ void g(int a) {}\n__device__ int h(int a) { return a; }\nvoid f(int a) { g<<<1, 2>>>(a); }", "f", 3),
    ("__global__ void __launch_bounds__(128, 2) g(int a) {}\nvoid f(int a) {}", "f", 2),
    ("template <typename U>\nvoid g(U a) {}\nvoid f(int a) {}", "f", 3),
    ("template <> void g<int>(int a) {}\nvoid f(int a) {}", "f", 2),
    ("namespace { void g(int a) {} }\nnamespace x::y { void h() {} }\nvoid f(int a) {}", "f", 3),
    ("struct S { void g(int a) {} };\nvoid S::h(int a) {}\nvoid f(int a) {}", "f", 3),
    ('extern "C" void f(int a) {}\nvoid helper(int b) {}', "f", 1),
    ('void helper(int b) {}\nextern "C" {\nvoid f(int a) {}\n}', "f", 3),
    ('#ifdef __cplusplus\nextern "C" {\n#endif\nvoid f(int a) {}\n#ifdef __cplusplus\n}\n#endif', "f", 4),
    ("// void g(int a) {}\n/* void h(int a) {} */\nvoid f(int a) {}", "f", 3),
    ("#define G void g(int a) \\\n  {}\nvoid f(int a) {}", "f", 3),
    ('const char* s = "void g(int a) {}";\nvoid f(int a) {}', "f", 2),
    ("char s[] = {'{', '\"', '\\''};\nvoid f(int a) {}", "f", 2),
    ('auto s = R"x(void g(int a) { " )x";\nvoid f(int a) {}', "f", 2),
    ("long big = 1'000'000;\nvoid f(int a) {}", "f", 2),
    ("#if 0\nvoid g(int a) {\n#endif\nvoid f(int a) {}", "f", 4),
    ("#if FAST\nstatic int g(int a) {\n#else\nstatic int g(long a) {\n#endif\nreturn 1; }\nvoid f(int a) {}", "f", 7),
    ("#if 0\n#else\nvoid f(int a) {}\n#endif", "f", 3),
    ("#if FAST\n#else\nvoid f(int a) {}\n#endif", "f", 3),
    ("static T table[] = {1, 2};\nenum { A, B };\ntypedef struct { int x; } P;\nvoid f(int a) {}", "f", 4),
    ("auto g = [](int a) { return a; };\nvoid f(int a) {}", "f", 2),
    ("DEFINE(g)\nvoid f(int a) {}", "f", 2),
    ("__attribute__((noinline, target(\"avx2\"))) void f(int a) {}", "f", 1),
    ("[[gnu::hot]] void f(int a) noexcept {}", "f", 1),
    ("void f(int a) { for (;;) { if (a) { } } }\nstatic void g(void) {}", "f", 1),
    ("typedef void (*callback)(int);\nvoid f(int a) {}", "f", 2),
    ("#pragma omp declare simd\nstatic T g(T a) { return a; }\nvoid f(int a) {}", "f", 3),
    ("void f(int a) {}\n#include <math.h>\r\n", "f", 1),
]  # fmt: skip


def test_the_only_candidate_is_found():
    for source, name, line in FOUND:
        function = parse(source)
        assert (function.name, function.line) == (name, line), source


RETURNED = [
    ("void f(int a)", "void"),
    ("int f(int a)", "int"),
    ("int32_t f(int a)", "int32_t"),
    ("const char* f(int a)", "const char*"),
    ("char const * f(int a)", "const char*"),
    ("EXPORT int f(int a)", "int"),
    ("EXPORT int32_t f(int a)", "int32_t"),
    ('extern "C" __attribute__((noinline)) void f(int a)', "void"),
]


def test_return_types():
    for head, kind in RETURNED:
        assert parse(f"{head} {{}}").returns == kind, head


def complaint(source):
    try:
        parse(source)
    except DeclarationError as error:
        return str(error)
    return "none"


def test_other_return_types_are_refused_with_those_allowed():
    for kind in ("double", "T", "void*", "char*", "int64_t", "unsigned", "struct s"):
        said = complaint(f"\n{kind} f(int a) {{}}")
        assert re.search(r"line 2: `.*f\(int a\) \{\}`: f returns .*void, int \(0: all is well", said), (kind, said)


def test_any_return_type_where_the_caller_says_so():
    assert parse("double erf(double x);", returns=None).returns == "double"


REFUSED = [
    ("void f(int) {}", "line 1.*`int` has no name"),
    ("void f(const T*) {}", "has no name"),
    ("void f(int a,\n       blasint) {}", "line 2: `blasint.*`blasint` has no name"),
    ("void f(std::vector<int>& v) {}", "`std::vector<int>& v` cannot be read as C"),
    ("void f(int a,\n  const T& x) {}", "line 2: `const T& x"),
    ("void f(int a, ...) {}", "cannot take `...`"),
    ("static void f(int a) {}", "No function that a kernel could call"),
    ("template <class U> void f(U a) {}", "No function that a kernel could call"),
    ("", "No function"),
    ("int x = 3;", "No function"),
    ("this is no C at all", "No function"),
    (
        "void f(int a) {}\nvoid g(int a) {}",
        r"Several functions could be the kernel: f \(line 1\), g \(line 2\).*static",
    ),
    ("void f(int a); void g(int a);", "Several"),
]


def test_what_cannot_be_a_kernel():
    for source, message in REFUSED:
        said = complaint(source)
        assert re.search(message, said), (source, said)


def test_a_function_is_picked_by_name():
    source = "void f(int a) {}\nstatic int g(long b) { return 0; }\nvoid h(int);\nvoid h(int c) {}"
    assert [parse(source, name).parameters[0].name for name in "fgh"] == ["a", "b", "c"]
    with pytest.raises(DeclarationError, match=r"No function 'k' is defined at file scope. Found: f, g, h"):
        parse(source, "k")


@pytest.mark.parametrize("word", ["__global__", "__device__", "template <class U>"])
def test_a_function_that_cannot_be_called_is_refused_by_name_too(word):
    with pytest.raises(DeclarationError, match=r"line 1.*f is a .*function that calls it|line 1.*f is a template"):
        parse(f"{word} void f(int a) {{}}", "f")


def test_function_pointers_and_nested_arrays_are_read_but_no_types_of_tensors():
    function = parse("void f(void (*call)(int), int m[3][4]) {}")
    assert [parameter.type for parameter in function.parameters] == ["function", "array"]


def test_blanking_keeps_every_line_and_offset():
    source = 'int a; // one\n"two" /* three\nfour */ #define five\n#define six \\\n seven\nint b;'
    code = scanner.plain(source)
    assert len(code) == len(source)
    assert [place for place, letter in enumerate(code) if letter == "\n"] == [
        p for p, s in enumerate(source) if s == "\n"
    ]
    assert code.split() == ["int", "a;", "int", "b;"]


def test_every_function_is_listed_in_order():
    assert [function.name for function in functions("void f(); int g(int a) { return 1; }")] == ["f", "g"]


VARIABLES = [
    ("int a;", ("a",)),
    ("int a = 3, b, *c = &a;", ("a", "b", "c")),
    ("T table[2][3] = {{1, 2}, {3}};", ("table",)),
    ("const double half = 0.5;", ("half",)),
    ("struct point { int x; } origin;", ("origin",)),
    ("struct point origin = {0};", ("origin",)),
    ("static int a;", ()),
    ("extern int a;", ()),
    ("typedef int a;", ()),
    ("struct point { int x; };", ()),
    ("enum { A, B };", ()),
    ("void f(int a);", ()),
    ("using namespace std;", ()),
]


def test_variables_that_the_linker_sees():
    for source, names in VARIABLES:
        (item,) = scanner.top_level_items(scanner.plain(source))
        assert scanner.variables(item) == names, source


def test_includes_at_file_scope_with_their_linkage():
    source = '#include <a.h>\nextern "C" {\n# include "b.h"\n}\nvoid f() {\n#include "c.inc"\n}\n// #include <d.h>\n'
    assert [(source[start:end], depth) for start, end, depth in scanner.includes(source)] == [
        ("#include <a.h>", 0), ('# include "b.h"', 1),
    ]  # fmt: skip
