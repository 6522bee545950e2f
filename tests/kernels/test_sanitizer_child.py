"""The file of a debug build's call, and the headline of a sanitizer's report."""

import numpy as np
import pytest

from opkit import errors
from opkit.kernels import sanitizer, sanitizer_child
from opkit.kernels.sanitizer import DebugBuffer, TensorValue
from opkit.kernels.sanitizer_child import ChildExit, MemoryBlock, explain

PROGRAM = "/cache/a b/program"
OUT, X = MemoryBlock("'out'", 0x619000001800, 40), MemoryBlock("'x'", 0x619000003000, 0)


def frame(function, file="<null>", line=0, module=PROGRAM):
    mark = sanitizer_child._MARK
    return mark.join(("", "0", module, function, file, str(line), ""))


STACK = [
    frame("k", "./my kernel.py", 12),
    frame("call", "gen.c", 90),
    frame("run", "/x/debug_main.c", 7),
    frame("main"),
]


def report(*lines, status=99, nulls=(), blocks=(OUT, X), late=None):
    return explain(ChildExit(PROGRAM, status, late, "\n".join(lines)), blocks, nulls)


def overflow(address, *lines, kind="heap-buffer-overflow"):
    header = f"==77==ERROR: AddressSanitizer: {kind} on address {address} at pc 0x619000001804 bp 0x7ffe sp 0x7ff8"
    return report(
        "=" * 60, header, f"READ of size 32 at {address} thread T0", *lines, "SUMMARY: what follows is not read"
    )


def test_a_compilers_header_is_not_the_authors_line():
    load = frame("_mm256_loadu_ps", "/usr/lib/gcc/x86_64-linux-gnu/12/include/avxintrin.h", 900)
    vector = frame("std::vector<float>::at", "/opt/gcc/include/c++/14/bits/stl_vector.h", 3)
    headline, lines = overflow("0x619000001828", load, vector, *STACK)
    assert headline.endswith("at 0 bytes past the end of 'out', which has 40 bytes, at my kernel.py:12 in k.")
    assert [line.strip() for line in lines[2:]] == [
        "/opt/gcc/include/c++/14/bits/stl_vector.h:3 in std::vector<float>::at",
        "my kernel.py:12 in k",
        "gen.c:90 in call",
    ]


def test_the_nearest_tensor():
    for address, place in (
        ("0x6190000017fc", "at 4 bytes before the start of 'out', which has 40 bytes"),
        ("0x619000001827", "at byte 39 of 'out'"),
        ("0x619000002fff", "at 1 byte before the start of 'x', which has 0 bytes"),
        ("0x619000003004", "at 4 bytes past the end of 'x'"),
        ("0x619000103000", "; the nearest tensor: 1048576 bytes past the end of 'x'"),
    ):
        assert place in overflow(address, *STACK, kind="use-after-poison")[0], address


def test_addresses_that_are_no_tensors():
    region = "0x619000001830 is located 4 bytes to the left of 12-byte region [0x619000001834,0x619000001840)"
    for headline, _ in (
        overflow("0x619000001830", *STACK, region),
        overflow("0x619000001830", *STACK, kind="stack-buffer-overflow"),
        overflow("0x719000001830", *STACK),
        report(
            "==1==ERROR: AddressSanitizer: ABRT on unknown address 0x619000001800 (pc 0x1 bp 0x2 sp 0x3 T0)", *STACK
        ),
    ):
        assert "'" not in headline


def test_an_address_that_is_not_known():
    hint = "==77==Hint: this fault was caused by a dereference of a high value address (see register values below)."
    header = "==77==ERROR: AddressSanitizer: SEGV on unknown address (pc 0x5 bp 0x6 sp 0x7 T0)"
    headline, lines = report(
        header, "==77==The signal is caused by a READ memory access.", hint, *STACK, nulls=["'bias'"]
    )
    assert headline == "crashed (SIGSEGV): a read, at my kernel.py:12 in k."
    assert lines[0] == "ERROR: AddressSanitizer: SEGV on unknown address"
    assert lines[1] == "The signal is caused by a READ memory access."


def test_kinds_with_more_to_say():
    overlap = (
        "==1==ERROR: AddressSanitizer: memcpy-param-overlap: memory ranges [0x619000001800,0x619000001810) and [..."
    )
    assert "(memcpy-param-overlap) at byte 0 of 'out'" in report(overlap, *STACK)[0]
    free = "==1==ERROR: AddressSanitizer: attempting double-free on 0x619000001800 in thread T0:"
    assert "(double-free) at byte 0 of 'out'" in report(free, *STACK)[0]
    bad = "==1==ERROR: AddressSanitizer: attempting free on address which was not malloc()-ed: 0x619000001808 in thread T0"
    assert "(free) at byte 8 of 'out'" in report(bad, *STACK)[0]


def test_a_fault_outside_the_authors_code_is_put_down_to_who_freed_the_memory():
    freed = ["freed by thread T0 here:", frame("free", "../libsanitizer/asan.cpp", 1, "/lib/libasan.so"), *STACK]
    allocated = [
        "previously allocated by thread T0 here:",
        frame("posix_memalign"),
        frame("allocate", "debug_main.c", 9),
    ]
    headline, lines = overflow("0x619000001800", *STACK[2:], *freed, *allocated, kind="heap-use-after-free")
    assert headline.endswith("at byte 0 of 'out', which has 40 bytes, at my kernel.py:12 in k.")
    assert "freed by thread T0 here:" in lines
    assert not any("allocated" in line or "debug_main" in line for line in lines)


def test_ends_without_a_report():
    assert report("Assertion failed", status=-11) == (
        "was ended by the signal SIGSEGV.",
        ["it printed:", "Assertion failed"],
    )
    assert report(status=0) == ("ended the process with exit status 0.", [])
    assert report(status=-9, late=2.5) == ("did not finish within 2.5 s.", [])
    assert len(report(*map(str, range(100)), status=1)[1]) == 6


def test_undefined_behaviour_and_the_pointer_that_it_is_about():
    header = "my kernel.py:12:5: runtime error: load of null pointer of type 'float'"
    assert "(NULL was passed for 'bias')" in report(header, *STACK, nulls=["'bias'"])[0]
    far = "my kernel.py:12:5: runtime error: store to misaligned address 0x619000009001 for type 'float'"
    assert report(far, *STACK)[0].endswith("for type 'float', at my kernel.py:12 in k.")


def script(folder, text):
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize("text", ["echo no libasan here >&2; exit 127", "kill -SEGV $$", None])
def test_a_program_that_does_not_start_is_no_mistake_of_the_kernel(tmp_path, text):
    path = tmp_path / "absent" if text is None else script(tmp_path, text)
    with pytest.raises(
        errors.ToolchainError, match="demo::op: kernel 'k': its debug build does not start here"
    ) as caught:
        sanitizer.run(path, operator="demo::op", kernel="k", instance=0, values=[], described="nothing")
    assert text is None or "SEGV" in text or "no libasan here" in str(caught.value)


def test_what_c_cannot_be_given_is_refused(tmp_path):
    for value in (
        object(),
        [object()],
        [1.0],
        1j,
        [DebugBuffer("a", b""), TensorValue(DebugBuffer("b", b""), (), (), 6)],
    ):
        said = None
        try:
            sanitizer.run(tmp_path, operator="demo::op", kernel="k", instance=0, values=[("x", value)], described="")
        except errors.ArgumentError as error:
            said = str(error)
        assert "'x' cannot be passed to C" in str(said), value


def test_memory_with_gaps_is_refused(tmp_path):
    gaps = DebugBuffer("x", np.zeros((4, 4))[:, ::2])
    with pytest.raises(errors.ArgumentError, match="the memory of 'x' is not contiguous"):
        sanitizer.run(tmp_path, operator="demo::op", kernel="k", instance=0, values=[("x", gaps)], described="")


def test_one_buffer_is_one_block():
    both = DebugBuffer("x", bytearray(8), writable=True)
    call = sanitizer.DebugCall([("x", both), ("out", both), ("all", [both, None, both])])
    assert len(call) == 2  # and the list


def test_a_result_that_was_cut_short_is_not_taken_for_one():
    words = b"OPKBASE1" + bytes(16)
    assert sanitizer.CallResult(words[:-1], 2).addresses is None
    assert sanitizer.CallResult(b"", 0).addresses is None
    assert not sanitizer.CallResult(words, 2).done
    assert sanitizer.CallResult(words + b"OPKDONE1", 2).done
