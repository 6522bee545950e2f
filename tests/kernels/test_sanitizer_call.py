"""Debug builds: what cannot be passed, and programs that do not start. None of it needs a compiler."""

import numpy as np
import pytest

from opkit import errors
from opkit.kernels import sanitizer
from opkit.kernels import sanitizer as sanitizer_call
from opkit.kernels.sanitizer import DebugBuffer, TensorValue


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
    call = sanitizer_call.DebugCall([("x", both), ("out", both), ("all", [both, None, both])])
    assert len(call) == 2  # and the list


def test_a_result_that_was_cut_short_is_not_taken_for_one():
    words = b"OPKBASE1" + bytes(16)
    assert sanitizer_call.CallResult(words[:-1], 2).addresses is None
    assert sanitizer_call.CallResult(b"", 0).addresses is None
    assert not sanitizer_call.CallResult(words, 2).done
    assert sanitizer_call.CallResult(words + b"OPKDONE1", 2).done
