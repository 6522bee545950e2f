"""Foreign declarations, libraries on disk and expressions: what is read, found and written, without torch."""

import ctypes
import itertools
import os
import shutil

import pytest

from opkit.errors import DeclarationError, KernelError
from opkit.kernels.cc import compilation
from opkit.kernels.libraries import elementwise, elf, foreign, shared_library
from opkit.kernels.libraries.foreign import CHECKED_ARITHMETIC

# ---- declarations ----------------------------------------------------------------------------------------------------


def test_prototypes():
    for text, prototype in (
        ("double erf(double x);", "double opk_foreign(double)"),
        ("extern float hypotf(float x, float y)", "float opk_foreign(float, float)"),
        (
            "void f(enum CBLAS_ORDER order, const float *a, float *restrict c)",
            "void opk_foreign(int, const float*, float*)",
        ),
        (
            "unsigned long f(size_t n, const char* s, double x[3])",
            "unsigned long opk_foreign(size_t, const char*, double*)",
        ),
        ("int f(const gsl_vector* v, FILE* file, void (*callback)(int))", "int opk_foreign(const void*, void*, void*)"),
        ("const char* f(void)", "void* opk_foreign(void)"),
        ("double _Complex cexp(double complex z)", "double _Complex opk_foreign(double _Complex)"),
    ):
        read = foreign.parse(text)
        assert foreign.prototype(read).startswith(prototype + ' __asm__("'), text
        assert read.symbol in foreign.prototype(read), text


def test_functions_of_numbers():
    for text, numbers in (
        ("double jn(int n, double x)", True),
        ("double f(enum mode mode, double x)", True),
        ("double f(double x, int* n)", False),
        ("void f(double x)", False),
        ("double f(void)", False),
        ("double* f(double x)", False),
        ("double f(char c, double x)", False),
    ):
        assert foreign.parse(text).of_numbers is numbers, text


def test_a_type_of_the_preamble_is_left_to_the_compiler():
    with pytest.raises(DeclarationError, match="blasint is no C type"):
        foreign.parse("void f(blasint n, float* x)")
    assert foreign.parse("void f(blasint n, float* x)", "#include <cblas.h>").function.parameters[0].type == "blasint"


def test_which_parameters_are_tensors():
    read = foreign.parse("double f(int n, double x, float y)")
    assert elementwise.read(read, {}).dtypes == {"x": "float64", "y": "float32"}
    assert elementwise.read(read, {"y": 1}).dtypes == {"x": "float64"}
    assert elementwise.read(read, {"y": "a"}, ["a"]).dtypes == {"y": "float32"}


# ---- expressions -----------------------------------------------------------------------------------------------------

EXPRESSIONS = ["a + b", "a - b", "a * b", "a // b", "a % b", "-a", "min(a, b, 3)", "max(1, a)", "(a + 2) * -b", "7"]


@pytest.fixture(scope="module")
def evaluate():
    """The expressions in C: (number, a, b) -> (value, whether it went wrong)."""
    api = '__attribute__((visibility("default")))'
    cases = "".join(
        f"case {number}: *result = {foreign.parse_expression(text).c}; break;\n"
        for number, text in enumerate(EXPRESSIONS)
    )
    text = (
        f"typedef __INT64_TYPE__ int64_t;\n{CHECKED_ARITHMETIC}\n{api} int evaluate(int number, int64_t opk_a, int64_t opk_b, "
        f"int64_t* result) {{ int opk_wrong = 0; switch (number) {{ {cases} }} return opk_wrong; }}"
    )
    path = compilation.build(compilation.Request("expressions", (compilation.Unit("expressions.c", text, "c"),)))
    function = ctypes.CDLL(str(path)).evaluate

    def evaluate(number, a, b):
        result = ctypes.c_int64()
        wrong = function(number, ctypes.c_int64(a), ctypes.c_int64(b), ctypes.byref(result))
        return result.value, bool(wrong)

    return evaluate


def test_expressions_mean_what_they_mean_in_python(evaluate):
    edges = (-(2**63), -(2**62), -7, -2, -1, 0, 1, 2, 7, 2**62, 2**63 - 1)
    for (number, text), a, b in itertools.product(enumerate(EXPRESSIONS), edges, edges):
        try:
            expected = eval(text, {}, {"a": a, "b": b})
        except ZeroDivisionError:
            expected = None
        value, wrong = evaluate(number, a, b)
        if expected is None or not -(2**63) <= expected < 2**63:
            assert wrong, (text, a, b)
        elif not wrong:
            assert value == expected, (text, a, b)
        else:  # a step on the way may not fit where the result does
            assert max(abs(a), abs(b)) > 2**61, (text, a, b)


NONE = [
    "a +",
    "a / b",
    "a ** 2",
    "f(a)",
    "a.b",
    "1.5",
    "True",
    "a if b else c",
    "min()",
    "min(*a)",
    "'a'",
    "",
    "9" * 30,
]


def test_what_is_no_expression():
    for text in NONE:
        said = None
        try:
            foreign.parse_expression(text)
        except DeclarationError as error:
            said = str(error)
        assert "neither a name nor an expression" in str(said), text


# ---- libraries -------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that makes a library in a folder that is searched."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    unit = compilation.Unit(
        "empty.c", '__attribute__((visibility("default"))) int opk_test_one(void) { return 1; }', "c"
    )
    built = compilation.build(compilation.Request("empty", (unit,)))

    def make(name):
        shutil.copy(built, tmp_path / name)
        return str(tmp_path / name)

    return make


def test_libm_is_found_by_every_name():
    found = shared_library.find("m")
    assert os.path.isabs(found.path)
    assert found.folders == ()
    assert shared_library.find(os.path.basename(found.path)).path == found.path
    assert shared_library.find(found.path).path == found.path
    shared_library.check_function(found, "tgamma")


def test_the_latest_version_is_taken(library):
    library("libopktest.so.2.9")
    latest = library("libopktest.so.2.10")
    library("libopktest.so.notaversion")
    assert shared_library.find("opktest").path == latest
    unversioned = library("libopktest.so")
    assert shared_library.find("opktest").path == unversioned
    assert shared_library.find("libopktest").path == unversioned
    assert shared_library.find("libopktest.so.2.9").path.endswith("2.9")


def test_a_linker_script_is_passed_over(library, tmp_path):
    real = library("libopkscript.so.1")
    (tmp_path / "libopkscript.so").write_text("/* GNU ld script */ GROUP ( libopkscript.so.1 )")
    assert shared_library.find("opkscript").path == real
    with pytest.raises(KernelError, match="not a shared library for this machine"):
        shared_library.find(tmp_path / "libopkscript.so")


def test_a_library_of_another_machine_is_passed_over(library, tmp_path):
    path = library("libopkother.so")
    content = bytearray((tmp_path / "libopkother.so").read_bytes())
    content[18] ^= 0xFF
    (tmp_path / "libopkother.so").write_bytes(content)
    with pytest.raises(KernelError, match="no such library is installed for this machine"):
        shared_library.find("opkother")
    with pytest.raises(KernelError, match="not a shared library for this machine"):
        shared_library.find(path)


def test_folders_that_the_loader_does_not_know_are_named(library, tmp_path):
    assert shared_library.find(library("libopktest.so")).folders == (tmp_path,)
    linked = tmp_path / "links"
    linked.mkdir()
    (linked / "libopklink.so").symlink_to(tmp_path / "libopktest.so")
    assert shared_library.find(linked / "libopklink.so").folders == (linked, tmp_path)


@pytest.mark.parametrize(
    ("name", "package"),
    [("fftw3f", "libfftw3-single3"), ("libgsl.so.999", "libgsl-dev"), ("mkl_rt", "libmkl-rt"), ("sleef", "")],
)
def test_well_known_libraries_name_their_package(name, package, monkeypatch):
    monkeypatch.setattr(shared_library, "_folders", lambda: ["/nowhere"])
    monkeypatch.setattr(shared_library.ctypes.util, "find_library", lambda _: None)
    with pytest.raises(KernelError, match=f"was searched for in /nowhere.*in the package {package}"):
        shared_library.find(name)


def test_names_are_never_patterns_or_options(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    for name in ("*", "[m]", "-lm", "m;id", "$(id)", "..", "m\nc", "a" * 5000):
        with pytest.raises(KernelError, match="no such library"):
            shared_library.find(name)


def test_exported_symbols(library):
    path = library("libopktest.so")
    assert elf.exported(path) == {"opk_test_one": "function"}
    found = shared_library.find(path)
    with pytest.raises(KernelError, match=r"no function 'opk_test_two'\. It has opk_test_one"):
        shared_library.check_function(found, "opk_test_two")
    assert elf.exported(os.path.dirname(path)) is None
    assert elf.exported(__file__) is None


def test_a_damaged_library_is_no_crash(library, tmp_path):
    path = library("libopktest.so")
    content = (tmp_path / "libopktest.so").read_bytes()
    for size in (0, 10, 64, 200, len(content) // 2, len(content) - 1):
        (tmp_path / "libopktest.so").write_bytes(content[:size])
        assert elf.exported(path) in (None, {"opk_test_one": "function"}, {})


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc to see what is loaded")
def test_nothing_is_loaded_when_a_library_is_looked_at(library):
    path = library("libopktest.so")
    shared_library.check_function(shared_library.find(path), "opk_test_one")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert path not in maps.read()
