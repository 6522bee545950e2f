"""From texts to files: what is compiled, by which commands, under which key, and what is said when it goes wrong."""

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import sys

import pytest

from opkit import errors
from opkit.kernels.cc import build_plan, compilation, processes, progress, toolchain
from opkit.kernels.cc.compilation import Request, Unit, build, build_all, key

DOUBLE = '__attribute__((visibility("default"))) double twice(double x) { return 2 * x; }\n'
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


@pytest.fixture(autouse=True)
def settings(settings, tmp_path, monkeypatch):
    """A cache of the test's own; ``settings(cc="clang")`` sets more."""
    settings(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(compilation, "_verified", {})
    return settings


def make(text=DOUBLE, name="twice.c", language="c", **more):
    return Request("demo::twice", (Unit(name, text, language),), **more)


def call(path, function="twice", argument=2.0):
    found = getattr(ctypes.CDLL(str(path)), function)
    found.restype, found.argtypes = ctypes.c_double, [ctypes.c_double]
    return found(argument)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_kernel_is_built_and_runs(settings, compiler):
    settings(cc=compiler)
    path = build(make())
    assert call(path) == 4.0
    assert build(make()) == path


@pytest.mark.parametrize("compiler", COMPILERS)
def test_several_units_in_two_languages(settings, compiler):
    settings(cc=compiler, cxx={"gcc": "g++", "clang": "clang++"}[compiler])
    calls = '#include <vector>\nextern "C" double twice(double);\nextern "C" __attribute__((visibility("default")))'
    calls += "double four(double x) { std::vector<double> v(1, x); return twice(twice(v[0])); }"
    request = Request("demo::four", (Unit("twice.c", DOUBLE, "c"), Unit("four.cpp", calls, "c++")))
    assert call(build(request), "four") == 8.0


@pytest.mark.parametrize("compiler", COMPILERS)
def test_an_executable_with_sanitizers(settings, compiler):
    settings(cc=compiler)
    text = "#include <stdlib.h>\nint main(int n, char** v) { int* volatile a = malloc(4); (void)v; return a[n]; }"
    path = build(make(text, kind="executable", debug=True))
    run = subprocess.run([path], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr


def test_openmp_is_compiled_and_not_linked(settings):
    text = DOUBLE.replace("{", "{\n#pragma omp parallel for\nfor (int i = 0; i < 2; i++) {}\n")
    content = build(make(text)).read_bytes()
    assert b"GOMP_parallel" in content
    assert b"libgomp" not in content


def test_openmp_is_linked_into_an_executable(settings):
    text = "int main(void) { int n = 0;\n#pragma omp parallel num_threads(3) reduction(+: n)\nn += 1;\nreturn n; }"
    assert subprocess.run([build(make(text, kind="executable"))], check=False).returncode == 3


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
def test_openmp_with_clang_needs_no_library_of_its_own(settings):
    settings(cc="clang")
    text = DOUBLE.replace("{", "{\n#pragma omp parallel for\nfor (int i = 0; i < 2; i++) {}\n")
    path = build(make(text))
    assert b"__kmpc" not in path.read_bytes()
    assert call(path) == 4.0


@pytest.mark.build
@needs_nvcc
def test_cuda_is_compiled_by_nvcc(settings):
    settings(cuda_compiler="nvcc")
    text = '__global__ void kernel(float* x) { x[threadIdx.x] *= 2; }\nextern "C" void run(float* x) '
    text += "{ kernel<<<1, 32>>>(x); }"
    path = build(make(text, "k.cu", "cuda", flags=("-gencode", "arch=compute_90,code=sm_90"), library_dirs=("/a b",)))
    assert b"libcudart.so" not in path.read_bytes()
    assert b"/a b\0" in path.read_bytes()
    with pytest.raises(errors.CompileError, match=r'k\.cu\(2\): error: identifier "oops" is undefined'):
        build(make("\nint f() { return oops; }", "k.cu", "cuda"))


def test_nvcc_is_given_nothing_that_its_shell_would_run(settings, tmp_path):
    (tmp_path / "nvcc").touch(0o700)
    settings(nvcc=tmp_path / "nvcc")
    for place in ("flags", "include_dirs", "library_dirs", "libraries"):
        for text in ("$(touch pwned)", "`touch pwned`", '"', "a;b", "a\nb"):
            said = None
            try:
                build_plan.plan(make(name="k.cu", language="cuda", **{place: (f"-DX={text}",)}))
            except errors.ArgumentError as error:
                said = str(error)
            assert "nvcc would pass" in str(said), (place, text)


# ---- the key ---------------------------------------------------------------------------------------------------------


def test_every_part_that_decides_the_result_is_in_the_key(tmp_path, settings):
    plain = make()
    unit = plain.units[0]
    others = [
        make(text=DOUBLE + " "),
        make(name="other.c"),
        make(language="c++"),
        make(flags=("-DA",)),
        make(flags=("-D", "A")),
        make(include_dirs=(tmp_path,)),
        make(library_dirs=(tmp_path,)),
        make(libraries=("m",)),
        make(isa="baseline"),
        make(kind="executable"),
        make(debug=True),
        dataclasses.replace(plain, units=(unit, unit)),
    ]
    keys = [key(request) for request in (plain, *others)]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in keys)


def test_the_label_is_not_in_the_key():
    assert key(make()) == key(dataclasses.replace(make(), label="other::name"))


def test_the_processor_is_in_the_key_of_native_code_alone(monkeypatch):
    native, baseline = key(make(isa="native")), key(make(isa="baseline"))
    monkeypatch.setattr(build_plan, "cpu_features", lambda: ("other",))
    assert key(make(isa="native")) != native
    assert key(make(isa="baseline")) == baseline


def test_the_abi_and_the_surroundings_are_in_the_key(monkeypatch):
    before = key(make())
    monkeypatch.setenv("CPATH", "/somewhere")
    changed = key(make())
    monkeypatch.setattr(build_plan, "abi_version", lambda: 99)
    assert len({before, changed, key(make())}) == 3


def test_a_changed_compiler_changes_the_key(tmp_path, settings):
    wrapper = tmp_path / "gcc"
    wrapper.write_text('#!/bin/sh\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    settings(cc=str(wrapper))
    before = key(make())
    os.utime(wrapper, ns=(1, 1))
    assert key(make()) != before


@pytest.mark.parametrize("include", ['#include "a.h"', "  #  include <a.h>", "#define A <a.h>\n#include A"])
def test_a_header_counts_by_its_content_however_deep(tmp_path, include):
    (tmp_path / "a.h").write_text('#include "deep/b.h"\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "deep" / "c.h").write_text("#pragma once\n#define TIMES 2\n#include <a.h>\n")
    (tmp_path / "unused.txt").write_text("")
    request = make(f"{include}\n{DOUBLE.replace('2 *', 'TIMES *')}", include_dirs=(tmp_path,))
    assert call(build(request)) == 4.0
    before = key(request)
    (tmp_path / "unused.txt").write_text("more")
    os.utime(tmp_path / "deep" / "c.h", ns=(1, 1))
    assert key(request) == before
    (tmp_path / "deep" / "c.h").write_text("#define TIMES 3\n")
    assert call(build(request)) == 6.0


def test_a_library_is_linked_found_again_and_counts(tmp_path):
    folder = tmp_path / "lib, $(touch pwned)"
    folder.mkdir()
    shutil.copy(build(make()), folder / "libtwice.so")
    text = DOUBLE.replace("{ return 2 * x; }", ";") + DOUBLE.replace("twice", "four").replace(
        "2 * x", "twice(twice(x))"
    )
    request = make(text, libraries=("twice",), library_dirs=(folder,))
    assert call(build(request), "four") == 8.0
    before = key(request)
    os.utime(folder / "libtwice.so", ns=(1, 1))
    assert key(request) != before
    by_path = make(text, libraries=(str(folder / "libtwice.so"),))
    assert call(build(by_path), "four") == 8.0


# ---- errors ----------------------------------------------------------------------------------------------------------

WRONG = """#line 1 "<opkit>"
static int generated;
#line 41 "my kernel.c"
double twice(double x) {
\treturn 2 * y;
}
#line 9 "<opkit>"
int after(void) { return generated; }
"""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compile_error_shows_the_authors_line(settings, compiler):
    settings(cc=compiler)
    with pytest.raises(errors.CompileError) as raised:
        build(make(WRONG))
    message = str(raised.value)
    assert message.startswith(f"demo::twice: {compiler} refused the source.")
    assert re.search(r"my kernel\.c:42:\d+: error: .*'y'", message)
    assert "   42 |         return 2 * y;\n      |                    ^" in message
    assert "<opkit>" not in message
    assert "/tmp/" not in message.partition("To see it again:")[0]
    assert "my kernel.c:42" in vars(raised.value)["log"]


def test_the_command_of_a_failure_can_be_run_again():
    with pytest.raises(errors.CompileError) as raised:
        build(make(WRONG))
    command = vars(raised.value)["command"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "my kernel.c:42" in run.stderr


def test_an_error_in_generated_lines_alone_is_shown():
    with pytest.raises(errors.CompileError, match=r"<opkit>:9:\d+: error"):
        build(make(WRONG.replace("* y", "* x").replace("return generated", "return missing")))


def test_warnings_and_repetitions_are_left_out():
    body = '#line 5 "k.c"\nint {0}(void) {{ int unused; return nothing; }}\n'
    with pytest.raises(errors.CompileError) as raised:
        build(make(body.replace("{0}", "f").replace("{{", "{").replace("}}", "}") * 2, flags=("-Wall",)))
    assert str(raised.value).count("'nothing' undeclared") == 1
    assert "unused variable" not in str(raised.value)
    assert "unused variable" in vars(raised.value)["log"]


def test_a_misspelt_function_is_an_error_of_the_compiler():
    with pytest.raises(errors.CompileError, match="implicit declaration of function 'sinn'"):
        build(make(DOUBLE.replace("2 * x", "sinn(x)")))


def test_what_the_linker_says_is_shown():
    with pytest.raises(errors.CompileError, match=r"cannot find -l:?no_such_library"):
        build(make(libraries=("no_such_library",)))


def test_a_very_long_complaint_is_cut():
    with pytest.raises(errors.CompileError) as raised:
        build(make("\n".join(f"int f{n}(void) {{ return a{n}; }}" for n in range(100))))
    assert len(str(raised.value).splitlines()) < 46
    assert "more lines; the exception's .log has them all" in str(raised.value)


def test_an_error_in_a_header_of_the_author_is_shown(tmp_path):
    (tmp_path / "part.h").write_text("int f(void) { return nothing; }\n")
    with pytest.raises(errors.CompileError, match=r"part\.h:1:\d+: error: 'nothing'"):
        build(make('#include "part.h"\n', include_dirs=(tmp_path,)))


def test_lines_are_found_by_their_directives():
    lines = processes.source_lines([("u.c", WRONG)])
    assert lines["my kernel.c", 42] == "\treturn 2 * y;"
    assert lines["<opkit>", 1] == "static int generated;"


def test_a_request_that_cannot_be_built():
    for request, complaint in (
        (Request("demo::none", ()), "nothing to build"),
        (make(language="fortran"), "'fortran'"),
        (make(text="a\0b"), "NUL"),
        (make(flags=("-D\0",)), "NUL"),
        (make(isa="sse9"), "isa='sse9'"),
    ):
        with pytest.raises(errors.ArgumentError, match=complaint):
            build(request)


# ---- many, and how long ----------------------------------------------------------------------------------------------


def test_build_all_keeps_the_order_and_each_error():
    requests = [make(), make(WRONG), make(DOUBLE + "\n"), make(), make(language="fortran")]
    first, wrong, second, same, unknown = build_all(requests)
    assert first == same != second
    assert isinstance(wrong, errors.CompileError)
    assert isinstance(unknown, errors.ArgumentError)
    assert build_all([]) == []


def test_without_a_compiler_build_all_returns_the_errors(settings):
    settings(cc="/nonexistent")
    assert all(isinstance(each, errors.ToolchainError) for each in build_all([make(), make(WRONG)]))


def test_a_build_that_is_quick_says_nothing(capfd, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 60.0)
    build(make())
    assert capfd.readouterr().err == ""


def test_what_is_built_is_not_compiled_again(settings, tmp_path):
    wrapper = tmp_path / "gcc"
    count = f'case " $* " in *" -o "*) echo >> {tmp_path}/count;; esac\n'
    wrapper.write_text(f'#!/bin/sh\n{count}exec gcc "$@"\n')
    wrapper.chmod(0o755)
    settings(cc=str(wrapper))
    built = build(make())
    assert build(make()) == built
    compilation._verified.clear()  # as in a new process
    assert build(make()) == built
    assert (tmp_path / "count").read_text() == "\n"


def test_a_deleted_file_is_noticed_by_a_process_that_has_seen_it():
    path = build(make())
    shutil.rmtree(path.parent)
    assert build(make()) == path
    assert path.exists()


class Terminal:
    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_a_slow_build_is_told_of(monkeypatch, settings, tmp_path, terminal):
    wrapper = tmp_path / "gcc"
    wrapper.write_text('#!/bin/sh\nsleep 0.1\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    settings(cc=str(wrapper))
    monkeypatch.setattr(progress, "_DELAY", 0.05)
    monkeypatch.setattr(progress, "_INTERVAL", 0.02)
    monkeypatch.setattr(sys, "stderr", Terminal(terminal))
    build(dataclasses.replace(make(), label="demo::two\nlines"))
    build_all([make(DOUBLE + "\n"), make(DOUBLE + " ")])
    written = sys.stderr.text
    assert re.search(r"opkit: building demo::two\\nlines with gcc \.\.\. \d+\.\d s\n", written)
    assert re.search(r"opkit: built 2 of 2 kernels \.\.\. \d+\.\d s\n$", written)
    assert ("\r" in written) == terminal
    assert written.count("\n") == 2


def test_a_closed_stderr_does_no_harm(monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", -1.0)
    monkeypatch.setattr(sys, "stderr", None)
    assert build(make()).exists()


def test_the_plan_names_no_unit_and_needs_no_shell():
    plan = build_plan.plan(make(name="a b; touch c"))
    assert not any("touch" in argument for argument in plan.units[0])
    assert plan.link is None
    assert plan.compiler == toolchain.find("c")
