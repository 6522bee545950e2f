"""A graph's C is compiled while the process goes on."""

import ctypes
import os

import pytest

from opkit import errors
from opkit.compiler.run import library

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 3)
SEGMENT = (
    'struct opkit_runtime;\n__attribute__((visibility("default"))) long long '
    "opkit_segment_0(void *const *b, const long long *s, struct opkit_runtime *r) { return 0; }"
)


def test_two_units_make_one_library():
    texts = [SEGMENT, "int other(void) { return 7; }"]
    segments = library.SegmentsBuild(texts, 1, "two units").wait()
    assert FUNCTION(segments.addresses[0])(0, 0, 0) == 0


def test_nothing_is_compiled_where_there_is_no_segment():
    assert library.SegmentsBuild([], 0, "nothing").wait() == library.LoadedSegments()


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_waited_for():
    build = library.SegmentsBuild(["this is no C"], 1, "wrong")
    for _ in range(2):
        with pytest.raises(errors.CompileError, match="wrong"):
            build.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_builds_for_itself():
    build = library.SegmentsBuild([SEGMENT], 1, "forked")
    build._process = -1  # as a child sees it
    build._path = None
    assert FUNCTION(build.wait().addresses[0])(0, 0, 0) == 0
