"""What is read from machine code is what ptxas, and the assembler of LLVM, say when they write it."""

import dataclasses
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import triton
import triton.language as tl

from opkit.errors import KernelError
from opkit.kernels.triton import binaries
from opkit.kernels.triton.compiling import CompileRequest, build, lowered

pytestmark = pytest.mark.usefixtures("triton_cache")
CUDA = ["sm_80", "sm_90", "sm_100", "sm_120"]


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < n)))


@triton.jit
def sorts(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.sort(tl.load(x + at, mask=at < n)))


@triton.jit(noinline=True)
def squared(value):
    return value * value


@triton.jit
def calls(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + squared(tl.load(x)))


REQUESTS = {
    "copy": (copy, 1024, {}),
    "spills": (copy, 4096, {"num_warps": 1, "maxnreg": 32}),
    "spills on AMD": (copy, 8192, {"num_warps": 1, "waves_per_eu": 8}),
    "total": (total, 4096, {"num_warps": 8}),
    "sorts": (sorts, 256, {"num_warps": 4}),
    "calls": (calls, 512, {}),
}
NAMES = ["copy", "spills", "total", "sorts", "calls"]
FEW = [("spills", "sm_90"), ("total", "sm_120")]


def request(name, target):
    function, block, options = REQUESTS[name if target in CUDA or name != "spills" else "spills on AMD"]
    signature = {"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return CompileRequest(function, signature, {"BLOCK": block}, frozenset({"x", "out"}), options, target)


def ptxas(text: str, target: str, folder: Path) -> str:
    """What ptxas prints with -v."""
    tool = "ptxas-blackwell" if target in ("sm_100", "sm_120") else "ptxas"
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    (folder / "kernel.ptx").write_text(text)
    flags = ["--regAllocOptLevel=2"] if not triton.__version__.startswith("3.6.") else []
    arch = target if target == "sm_80" else f"{target}a"
    command = [path, "-lineinfo", "-v", *flags, f"--gpu-name={arch}", "kernel.ptx", "-o", "kernel.cubin"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return run.stderr + run.stdout


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *FEW,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in itertools.product(NAMES, CUDA)
            if case not in FEW
        ),
    ],
)
def test_a_cubin_says_what_ptxas_says(name, target, tmp_path):
    asked = request(name, target)
    said = ptxas(lowered(asked).asm["ptx"], target, tmp_path)
    binary = build(asked)
    found = binaries.resources_of(binary)
    frames = [int(size) for size in re.findall(r"(\d+) bytes stack frame", said)]
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill stores", said))
    registers = re.search(r"Used (\d+) registers", said)
    assert registers
    assert found.registers == int(registers[1])
    if name != "calls":  # whose stack is more than each function's part of it
        assert found.spills == max(frames)
    assert (found.spills > 0) == (max(frames) > 0)
    assert (spilled > 0) == (name == "spills")
    assert found.spills >= (256 if name == "spills" else 0)
    assert found.shared == binary.shared + sum(int(size) for size in re.findall(r"(\d+) bytes smem", said))
    assert (found.shared > 0) == (name in ("total", "sorts"))
    assert (found.threads, found.target) == (binary.threads, target)


@pytest.mark.sweep(keep=["spills", "total"])
@pytest.mark.parametrize("name", NAMES)
def test_an_hsaco_says_what_its_assembly_says(name):
    asked = request(name, "gfx942")
    text = lowered(asked).asm["amdgcn"]
    binary = build(asked)
    found = binaries.resources_of(binary)

    def number(key):
        match = re.search(rf"^ +\.{key}: +(\d+)$", text, re.MULTILINE)
        assert match
        return int(match[1])

    assert found.registers == number("vgpr_count")
    assert found.spills == number("private_segment_fixed_size")
    assert found.shared == number("group_segment_fixed_size") + binary.shared
    assert found.threads == number("max_flat_workgroup_size") == binary.threads
    assert (found.shared > 0) == (name in ("total", "sorts"))
    if name != "calls":
        assert (found.spills > 0) == (name == "spills")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "sm_80", "sm_100", "sm_120"])
def test_the_sizes_of_parameters(target):
    assert binaries.parameter_sizes(build(request("copy", target))) == [8, 8, 4, 8, 8]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_what_is_no_machine_code_is_refused(target):
    binary = build(request("copy", target))
    odd = [b"", b"\x7fELF", binary.image[:200], binary.image[: len(binary.image) // 2], b"MZ" + binary.image]
    for image in odd:
        with pytest.raises(KernelError, match=f"copy: its {binary.form} for {target} cannot be read"):
            binaries.resources_of(dataclasses.replace(binary, image=image))
    with pytest.raises(KernelError, match="other: its"):
        binaries.parameter_sizes(dataclasses.replace(binary, name="other"))


def test_every_form_of_msgpack_is_read():
    items = {
        b"\x00": 0,
        b"\xff": -1,
        b"\xc0": None,
        b"\xc3": True,
        b"\xcc\xff": 255,
        b"\xcd\x01\x00": 256,
        b"\xd1\xff\xfe": -2,
        b"\xcf" + bytes(7) + b"\x07": 7,
        b"\xca\x3f\x80\x00\x00": 1.0,
        b"\xa2hi": "hi",
        b"\xd9\x02hi": "hi",
        b"\xc4\x01\x00": b"\x00",
        b"\x92\x01\x02": [1, 2],
        b"\xdc\x00\x01\xa1a": ["a"],
        b"\x81\xa1k\x90": {"k": []},
        b"\xde\x00\x01\xa1k\xc2": {"k": False},
    }
    for data, value in items.items():
        assert binaries._unpacked(b"\x00" + data, 1) == (value, 1 + len(data))


STATIC = """
.version {version}
.target {target}
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry copy(.param .u64 out)
{{
  .shared .align 4 .b8 own[512];
  .reg .b64 %rd<2>;
  .reg .b32 %r<4>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, own;
  st.shared.u32 [%r2], %r1;
  bar.sync 0;
  ld.shared.u32 %r3, [%r2+4];
  st.global.u32 [%rd1], %r3;
  ret;
}}
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_80", "sm_120"])
def test_static_shared_memory_is_counted_without_what_the_system_reserves(target, tmp_path):
    arch, version = (target, "8.3") if target == "sm_80" else (f"{target}a", "8.7" if len(target) > 5 else "8.3")
    assert "512 bytes smem" in ptxas(STATIC.format(version=version, target=arch), target, tmp_path)
    image = (tmp_path / "kernel.cubin").read_bytes()
    binary = dataclasses.replace(build(request("copy", target)), image=image, shared=64)
    assert binaries.resources_of(binary).shared == 512 + 64
