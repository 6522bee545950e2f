"""Debug builds: what a kernel does wrong is found, in the words of its operator, its tensors and its author's lines."""

import platform
import re
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from opkit import errors
from opkit.kernels import sanitizer
from opkit.kernels.sanitizer import DebugBuffer, TensorValue

FLAGS = (
    "-g",
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-pthread",
)
WARNINGS = {"gcc": ["-Wno-use-after-free"], "clang": ["-Wno-infinite-recursion", "-Wno-unknown-pragmas"]}
FLOAT32 = 6

SOURCE = Path(__file__).with_name("sanitized.c")
NUMBERS = {
    name: number for number, name in enumerate(re.findall(r"^static int32_t call_(\w+)", SOURCE.read_text(), re.M))
}

ALSO_CLANG = (
    "correct|empty|openmp|covers_its|one_past|wild|library|local|own_memory|freed|undefined|misal|abort|null|never_ends"
)


def pytest_generate_tests(metafunc):
    if "program" in metafunc.fixturenames:
        # Where there is no clang, one skipped test says so.
        name = metafunc.function.__name__
        also = re.search(ALSO_CLANG if shutil.which("clang") else "a_correct_kernel", name)
        compilers = ["gcc", "clang"] if also else ["gcc"]
        metafunc.parametrize("program", compilers, indirect=True, scope="module")


def build(compiler, folder, flags):
    path = shutil.which(compiler)
    if path is None:
        pytest.skip(f"there is no {compiler}")
    probe, program, main = folder / "probe.c", folder / "program", folder / "main.c"
    probe.write_text("int main(void) { return 0; }")
    built = subprocess.run([path, *FLAGS, *flags, str(probe), "-o", str(program)], capture_output=True)
    if built.returncode or subprocess.run([program], capture_output=True).returncode:
        pytest.skip(f"{compiler} has no sanitizers on this machine, or lacks one of {flags}")
    main.write_text(sanitizer.main_unit())
    mapped = (f"-fdebug-prefix-map={folder}=.", "-Wall", "-Wextra", "-Werror", *flags, *WARNINGS[compiler])
    command = [path, *FLAGS, *mapped, f"-I{sanitizer._INCLUDE}", str(SOURCE), str(main), "-o", str(program)]
    subprocess.run(command, check=True, cwd=folder)
    return program


@pytest.fixture(scope="module")
def program(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('it\'s a "folder" & $HOME') / request.param
    folder.mkdir()
    return build(request.param, folder, ("-fopenmp",) if request.param == "gcc" else ())


@pytest.fixture
def run(program):
    def call(kernel, *values, timeout=60.0):
        return sanitizer.run(
            program,
            operator="demo::op",
            kernel=kernel,
            instance=NUMBERS[kernel],
            values=values,
            described="x: float32[10], by=2.0",
            timeout=timeout,
        )

    return call


@pytest.fixture
def refused(run):
    """The message for a call that must fail; every one names the operator, its arguments and the author's line."""

    def call(kernel, *values, line, timeout=60.0):
        with pytest.raises(errors.SanitizerError) as caught:
            run(kernel, *values, timeout=timeout)
        message = str(caught.value)
        assert message.startswith(f"demo::op: kernel '{kernel}' ")
        assert "It was called with x: float32[10], by=2.0" in message
        assert f"author.c:{line}" in message.splitlines()[0]
        return message

    return call


def out(count=4, name="out"):
    return (name, DebugBuffer(name, np.zeros(count, np.float32), writable=True, poison=True))


def given(*numbers, name="x"):
    return (name, DebugBuffer(name, np.array(numbers, np.float32)))


def floats(content):
    return np.frombuffer(content, np.float32).tolist()


# ---- calls in which nothing is wrong ----


def test_a_correct_kernel_gives_its_numbers(run):
    result = run("scale", given(1, 2, 3), out(3), ("by", 2.5), ("n", 3))
    assert (result.code, result.message) == (0, None)
    assert {name: floats(content) for name, content in result.written.items()} == {"out": [2.5, 5, 7.5]}


def test_what_the_kernel_does_not_write_is_poison(run):
    written = run("scale", given(1, 2, 3), out(3), ("by", 1.0), ("n", 1)).written["out"]
    assert floats(written)[0] == 1
    assert written[4:] == b"\xff" * 8


def test_an_argument_that_may_be_written_keeps_its_contents(run):
    both = DebugBuffer("x", np.arange(3, dtype=np.float32), writable=True)
    written = run("scale", ("x", both), ("out", both), ("by", 3.0), ("n", 2)).written
    assert floats(written["x"]) == floats(written["out"]) == [0, 3, 2]


def test_a_pointer_into_a_buffer_starts_at_its_offset(run):
    x = DebugBuffer("x", np.arange(5, dtype=np.float32), offset=8)
    assert floats(run("scale", ("x", x), out(3), ("by", 1.0), ("n", 3)).written["out"]) == [2, 3, 4]


def test_empty_tensors_pass_and_may_not_be_touched(run, refused):
    assert run("scale", given(), out(0), ("by", 1.0), ("n", 0)).written == {"out": b""}
    assert "a read of 4 bytes at 0 bytes past the end of 'x', which has 0 bytes" in refused(
        "scale", given(), out(1), ("by", 1.0), ("n", 1), line=3
    )


def strided(sizes=(2, 3), strides=(8, 1), **options):
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return TensorValue(DebugBuffer("x", np.arange(span, dtype=np.float32), **options), sizes, strides, FLOAT32)


def test_a_strided_tensor_covers_its_span_and_no_more(run, refused):
    assert floats(run("rows", ("x", strided()), out(2), ("count", 2)).written["out"]) == [0, 8]
    message = refused("rows", ("x", strided()), out(4), ("count", 3), line=3)
    assert "a read of 4 bytes at 20 bytes past the end of 'x', which has 44 bytes" in message


def test_a_tensor_with_an_offset_may_be_walked_backwards(run):
    x = TensorValue(DebugBuffer("x", np.arange(3, dtype=np.float32), offset=8), (3,), (-1,), FLOAT32)
    assert floats(run("rows", ("x", x), out(3), ("count", 3)).written["out"]) == [2, 1, 0]


def test_a_size_that_the_tensor_does_not_have_is_an_error(refused):
    message = refused("rank", ("x", strided()), line=2)
    assert "a read of 8 bytes at 0 bytes past the end of the sizes of 'x', which has 16 bytes" in message
    scalar = TensorValue(DebugBuffer("x", np.zeros(1, np.float32)), (), (), FLOAT32)
    assert "the sizes of 'x', which has 0 bytes" in refused("rank", ("x", scalar), line=2)


def test_lists_with_absent_elements(run):
    xs = [given(1, name="xs[0]")[1], None, given(3, name="xs[2]")[1]]
    outs = [out(1)[1], None, out(1)[1]]
    more = [strided(), None, TensorValue(DebugBuffer("m", np.ones(1, np.float32)), (), (), FLOAT32)]
    written = run("sums", ("xs", xs), ("outs", outs), ("more", more), ("count", 3)).written
    assert list(written) == ["outs"]
    assert [content and floats(content) for content in written["outs"]] == [[1], None, [4]]


def test_lists_that_are_empty_or_all_absent(run, refused):
    assert run("sums", ("xs", []), ("outs", []), ("more", []), ("count", 0)).written == {}
    assert run("sums", ("xs", [None]), ("outs", [None]), ("more", [None]), ("count", 1)).written == {}
    message = refused("sums", ("xs", [given(1)[1]]), ("outs", [None]), ("more", [None]), ("count", 2), line=3)
    assert "past the end of the list 'xs', which has 8 bytes" in message


def test_strings_end_in_a_nul_and_there(run, refused):
    assert run("text", ("mode", "größe"), ("further", 0)).code == 7
    assert run("text", ("mode", b""), ("further", 0)).code == 0
    assert "0 bytes past the end of the string 'mode', which has 8 bytes" in refused(
        "text", ("mode", "größe"), ("further", 1), line=4
    )


def test_whole_numbers_of_64_bits(run):
    assert run("fails", ("how", -(2**63)), ("code", -3)).code == -3
    assert run("fails", ("how", 2**64 - 1), ("code", True)).code == 1


def test_failures_that_the_kernel_reports_are_results(run):
    assert run("fails", ("how", 1), ("code", 0)).message == "n is 3, not 4 (author.c:2)"
    assert run("fails", ("how", 2), ("code", 0)).message == "a text of its own"
    result = run("fails", ("how", 0), ("code", 5))
    assert (result.code, result.message) == (5, None)


def test_parallel_for_runs_in_four_threads_or_in_one(run):
    def numbers(n, grain):
        buffer = DebugBuffer("out", np.zeros(n, np.int32), writable=True, poison=True)
        return np.frombuffer(run("parallel", ("out", buffer), ("n", n), ("grain", grain)).written["out"], np.int32)

    assert numbers(10, 1).tolist() == [4, 4, 4, 14, 14, 14, 24, 24, 24, 34]
    assert numbers(3, 100).tolist() == [4, 4, 4]
    assert numbers(0, 0).tolist() == []


def test_a_mistake_in_a_thread_is_found(refused):
    short = DebugBuffer("out", np.zeros(9, np.int32), writable=True, poison=True)
    message = refused("parallel", ("out", short), ("n", 12), ("grain", 1), line=3)
    assert "a write of 4 bytes at 0 bytes past the end of 'out'" in message


def test_openmp(run, refused):
    assert floats(run("openmp", out(100), ("n", 100)).written["out"]) == list(range(100))
    assert "past the end of 'out'" in refused("openmp", out(99), ("n", 100), line=4)


def test_ten_megabytes_come_back_whole(run):
    x = np.random.default_rng(0).standard_normal(2_621_440).astype(np.float32)
    written = run("scale", ("x", DebugBuffer("x", x)), out(x.size), ("by", 2.0), ("n", x.size)).written["out"]
    assert (np.frombuffer(written, np.float32) == 2 * x).all()


# ---- memory ----


def test_one_past_the_end_is_named(refused):
    message = refused("scale", given(1, 2, 3), out(2), ("by", 2.0), ("n", 3), line=3)
    assert "misused memory (heap-buffer-overflow): a write of 4 bytes at 0 bytes past the end of 'out'" in message
    assert "which has 8 bytes" in message
    assert "ERROR: AddressSanitizer: heap-buffer-overflow on address" in message
    assert not any(noise in message for noise in ("Shadow", "libc_start", "debug_main", "=====", "HINT"))


def test_further_off_is_named_too(refused):
    for at in (-1, -100):
        assert f"{-4 * at} bytes before the start of 'out'" in refused("before", out(), ("at", at), line=2)
    assert "584 bytes past the end of 'out'" in refused("before", out(), ("at", 150), line=2)


def test_a_read_past_the_end_is_named(refused):
    message = refused("last", given(1, 2), out(), ("n", 2), line=2)
    assert "a read of 4 bytes at 0 bytes past the end of 'x'" in message


def test_a_wild_index_is_named(refused):
    assert "crashed (SIGSEGV): a write" in refused("before", out(), ("at", 2**33), line=2)
    assert "past the end of 'out', which has 16 bytes" in refused("before", out(), ("at", 2**33), line=2)


def test_a_library_function_that_goes_too_far(refused):
    message = refused("copies", given(1, 2), out(2), ("bytes", 12), line=3)
    assert "a read of 12 bytes at 0 bytes past the end of 'x'" in message
    assert "memcpy" in message


def test_a_local_array_is_named(refused):
    message = refused("local", out(), ("n", 5), line=5)
    assert "'kept'" in message or "insufficient space" in message
    assert "'out'" not in message.splitlines()[0]


def test_the_kernels_own_memory_is_no_tensor(refused):
    message = refused("own", out(), line=4)
    assert "heap-buffer-overflow" in message or "insufficient space" in message
    assert "'out'" not in message.splitlines()[0]


def test_memory_that_was_freed(refused):
    message = refused("freed", out(), line=4)
    assert "heap-use-after-free" in message
    assert "at byte 0 of 'out'" in message
    assert "author.c:3 in freed" in message


def test_a_recursion_without_end(refused):
    message = refused("recursion", ("n", 1), line="")
    assert "stack-overflow" in message
    assert len(message.splitlines()) < 25


def test_what_may_only_be_read_is_compared(run):
    x = DebugBuffer("x", np.zeros(3, np.float32))
    with pytest.raises(
        errors.SanitizerError, match="demo::op: kernel 'before' wrote to 'x', which the operator does not"
    ):
        run("before", ("out", x), ("at", 1))
    assert x.data.tolist() == [0, 0, 0]


# ---- what C leaves undefined, and crashes ----


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("a", "b", "what", "said"),
    [
        (2**31 - 1, 1, 0, "signed integer overflow: 2147483647 + 1 cannot be represented in type 'int"),
        (1, 40, 1, "shift exponent 40 is too large for 32-bit type 'int"),
        (1, 0, 2, "division by zero"),
        (-(2**31), -1, 2, "division of -2147483648 by -1 cannot be represented"),
        (1, 0, 3, "division by zero"),
    ],
)
def test_undefined_arithmetic(refused, a, b, what, said):
    message = refused("arithmetic", ("a", a), ("b", b), ("what", what), line=what + 2)
    assert "did something undefined: " in message.replace("1 + 2147483647", "2147483647 + 1")
    assert said in message.replace("1 + 2147483647", "2147483647 + 1")


def test_a_misaligned_pointer_is_named(refused):
    message = refused("misaligned", given(1, 2), out(), line=2)
    assert "load of misaligned address" in message
    assert "at byte 1 of 'x', which has 8 bytes" in message


def test_a_null_pointer_names_what_was_absent(refused):
    message = refused("bias", ("bias", None), out(), line=2)
    assert "(NULL was passed for 'bias')" in message


def test_an_abort_says_where(refused, capfd):
    message = refused("ends", ("how", 0), line=5)
    assert "aborted (SIGABRT)" in message
    assert "abort" in message
    assert capfd.readouterr().out == "it begins\n"


def test_an_illegal_instruction_says_where(refused):
    assert "crashed on an illegal instruction (SIGILL)" in refused("ends", ("how", 3), line=8)


def test_a_kernel_that_never_ends_says_where(refused):
    assert "did not finish within 0.5 s" in refused("ends", ("how", 2), line=7, timeout=0.5)


def test_a_kernel_that_ends_the_process(run):
    with pytest.raises(errors.SanitizerError, match="demo::op: kernel 'ends' ended the process with exit status 0"):
        run("ends", ("how", 1))


# ---- around the call ----


def test_the_environment_is_not_the_parents(run, refused, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libnothing.so")
    monkeypatch.setenv("ASAN_OPTIONS", "exitcode=0:detect_leaks=1")
    monkeypatch.setenv("UBSAN_OPTIONS", "halt_on_error=0")
    assert run("scale", given(1), out(1), ("by", 1.0), ("n", 1)).code == 0
    refused("scale", given(1), out(1), ("by", 1.0), ("n", 2), line=3)
    refused("arithmetic", ("a", 1), ("b", 0), ("what", 2), line=4)


def test_temporary_folders_with_quotes_and_spaces(run, tmp_path, monkeypatch):
    folder = tmp_path / "a 'b' \"c\" $d"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert run("scale", given(1), out(1), ("by", 1.0), ("n", 1)).written == {"out": struct.pack("<f", 1)}
    assert list(folder.iterdir()) == []


def test_a_program_that_needs_fixed_addresses_is_started_with_them(program, tmp_path):
    setarch = ["setarch", platform.machine(), "--addr-no-randomize", "true"]
    if shutil.which("setarch") is None or subprocess.run(setarch, capture_output=True).returncode:
        pytest.skip("this machine does not let setarch fix a process's addresses")
    start = f'#!/bin/sh\ngrep -q 0004.... /proc/self/personality || exit 1\nexec {shlex.quote(str(program))} "$@"'
    values = [given(1), out(1), ("by", 2.0), ("n", 1)]
    path = tmp_path / "program"
    path.write_text(start)
    path.chmod(0o700)
    result = sanitizer.run(path, operator="demo::op", kernel="k", instance=0, values=values, described="")
    assert floats(result.written["out"]) == [2]
