"""What a binary is for, as text, and which calls it serves."""

import dataclasses
import json

import triton
import triton.language as tl

from opkit.kernels.aot_package import TritonBinary
from opkit.kernels.triton import specialisation, targets
from opkit.kernels.triton.binaries import Binary, Param
from opkit.kernels.triton.compiling import CompileRequest
from opkit.kernels.triton.specialisation import form_of, relaxed, serves, specificity


@triton.jit
def rows(x, out, x_stride_m1, d: "tl.int64", k, flag, BLOCK: tl.constexpr, ONE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at * x_stride_m1, mask=at < d + k) * ONE, mask=at < d)


CALL = CompileRequest(
    rows,
    {
        "x": "*bf16", "out": "*bf16", "x_stride_m1": "constexpr", "d": "i64", "k": "i32", "flag": "constexpr",
        "BLOCK": "constexpr", "ONE": "constexpr",
    },
    {"x_stride_m1": 1, "flag": None, "BLOCK": 128, "ONE": 1},
    frozenset({"x", "out", "k"}),
    {"num_warps": 4},
)  # fmt: skip


def changed(form, **changes):
    merged = {
        name: {**getattr(form, name), **value} if isinstance(value, dict) else value for name, value in changes.items()
    }
    return dataclasses.replace(form, **merged)


def test_what_is_told_less():
    sizes, general = relaxed(CALL)
    assert sizes.divisible == {"x", "out"}
    assert sizes.constexprs == CALL.constexprs
    assert general.divisible == frozenset()
    assert general.signature["x_stride_m1"] == "i32"
    assert general.constexprs == {"flag": None, "BLOCK": 128, "ONE": 1}  # those that the author calls constants stay


def test_integers_of_64_bits_stay_so():
    assert relaxed(dataclasses.replace(CALL, wide=True))[-1].signature["x_stride_m1"] == "i64"


def test_nothing_is_made_twice():
    general = relaxed(CALL)[-1]
    assert relaxed(general) == []
    aligned = dataclasses.replace(general, divisible=frozenset({"x"}))
    assert len(relaxed(aligned)) == 1


def test_each_serves_those_that_are_told_more():
    listed = [form_of(each) for each in (CALL, *relaxed(CALL))]
    for i, built in enumerate(listed):
        for j, wanted in enumerate(listed):
            assert serves(built, wanted) == (i >= j)
    assert [max(listed, key=lambda built: specificity(built, listed[0]))] == listed[:1]


def test_other_calls_are_not_served():
    general = form_of(relaxed(CALL)[-1])
    assert serves(general, form_of(CALL))
    for changes in (
        {"source": "another"},
        {"target": "sm_100"},
        {"wide": True},
        {"offsets": True},
        {"options": {"num_warps": "8"}},
        {"options": {"num_stages": "2"}},
        {"signature": {"x": "*fp32"}},
        {"signature": {"k": "i64"}},
        {"signature": {"k": "u1"}},
        {"constexprs": {"BLOCK": "int 256"}},
        {"constexprs": {"BLOCK": "float 128"}},
        {"constexprs": {"flag": "int 1"}},
        {"constexprs": {"x_stride_m1": "int 2"}},
        {"constexprs": {"x_stride_m1": "bool True"}},
    ):
        assert not serves(general, changed(form_of(CALL), **changes)), changes


def test_none_is_no_pointer():
    given = changed(form_of(relaxed(CALL)[-1]), signature={"flag": "*fp32"})
    assert not serves(given, form_of(CALL))


def test_the_same_architecture_comes_first():
    old, new = (changed(form_of(CALL), target=target) for target in ("sm_80", "sm_86"))
    general = changed(form_of(relaxed(CALL)[-1]), target="sm_86")
    assert specificity(general, new) > specificity(old, new)


def test_which_architectures_run_a_binary():
    for built, device, runs in (
        ("sm_80", "sm_89", True),
        ("sm_89", "sm_80", False),
        ("sm_75", "sm_80", False),
        ("sm_90", "sm_90", True),
        ("sm_100", "sm_103", False),
        ("sm_120", "sm_121", False),
        ("gfx942", "gfx942", True),
        ("gfx942", "gfx950", False),
        ("sm_90", "gfx942", False),
    ):
        assert targets.runs(built, device) == runs, (built, device)


def test_a_form_is_the_same_in_each_process_and_place():
    assert form_of(CALL).source == specialisation.source_of(rows)
    text = json.dumps(dataclasses.asdict(form_of(CALL)))
    assert "0x" not in text
    assert str(form_of(CALL)) == (
        "x: *bf16, out: *bf16, d: i64, k: i32, x_stride_m1=1, flag=None, BLOCK=128, ONE=1, num_warps=4"
    )


BINARY = Binary(
    b"image", "cubin", "rows", 128, 0, (1, 1, 1), False, False, 0, 1, 0, 1, (Param("ptr", "x"), Param("map", "y", 0)),
    ({"name": "y", "block": [64, 64], "swizzle": 3},), "sm_90",
)  # fmt: skip


def entry():
    return TritonBinary("demo::odd name", "rows", "3.7", form_of(CALL), BINARY.to_json()).placed(b"image")


def test_an_entry_survives_json():
    assert TritonBinary.from_json(json.loads(json.dumps(entry().to_json()))) == entry()
    assert Binary.from_json(entry().launch, b"image") == BINARY
    assert entry().file.startswith("triton/demo.odd_name.rows.sm_90.")
    assert entry().size == 5


def test_names_that_lead_elsewhere_are_refused():
    for file in ("rows.cubin", "triton/../rows.cubin", "triton/rows.so", "/triton/rows.cubin", ""):
        said = None
        try:
            TritonBinary.from_json({**entry().to_json(), "file": file})
        except ValueError as error:
            said = str(error)
        assert "is not the name of a binary" in str(said), file
