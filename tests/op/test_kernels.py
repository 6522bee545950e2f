"""Kernels: registration, selection with reasons, forcing, enabling, autotuning across processes."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import fresh_process
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import KernelError, NoKernelError, OutputError
from opkit.kernels.tuning import records

Vector = Float[Tensor, "*batch n"]


def fresh(name: str, **options: Any) -> Any:
    def doubled(x: Vector, k: float = 1.0, flag: bool = False) -> Vector:
        return x * 2 * k

    return opkit.custom_op(f"kernels::{name}", doubled, **options)


def marked(value: float) -> Any:
    """A kernel whose results show which kernel ran."""
    return lambda x, k=1.0, flag=False: torch.full_like(x, value)


def test_priority_then_recency_then_the_reference() -> None:
    op = fresh("order")
    x = torch.ones(3)
    assert op.select(x).kernel == "reference"
    op.register_kernel("cpu", marked(1), name="first", priority=1)
    op.register_kernel("cpu", marked(2), name="second", priority=1)
    op.register_kernel("cpu", marked(3), name="third", priority=0, when=lambda x: True)
    op.register_kernel("cpu", marked(4), name="plain")
    assert op.select(x).kernel == "second"
    assert op(x)[0].item() == 2
    assert op.select(x).refused == {
        "first": "second is preferred",
        "third": "second is preferred",
        "plain": "second is preferred",
        "reference": "second is preferred",
    }
    assert str(op.select(x)).startswith("kernels::order: second\n  not first: second is preferred")


def test_reasons() -> None:
    op = fresh("reasons")
    op.register_kernel("cuda", marked(1), name="gpu")
    op.register_kernel("cpu", marked(2), name="half", dtypes=[torch.bfloat16, torch.float16])
    op.register_kernel("cpu", marked(3), name="small", when=lambda x: x.shape[-1] <= 4)
    op.register_kernel("cpu", marked(4), name="scaled", when=lambda k, flag: k > 2 and flag)
    chosen = op.select(torch.ones(8))
    assert chosen.kernel == "reference"
    assert chosen.refused["gpu"] == "it runs on cuda, the arguments are on cpu"
    assert chosen.refused["half"] == "the arguments have torch.float32; it takes torch.bfloat16, torch.float16"
    assert chosen.refused["small"].startswith("its condition")
    assert op.select(torch.ones(4)).kernel == "small"
    assert op.select(torch.ones(8), 3.0, True).kernel == "scaled"
    assert op.select(torch.ones(8, dtype=torch.float16)).kernel == "half"


@pytest.mark.parametrize("path", ["op", "torch.ops"])
def test_conditions_on_sizes_strides_and_scalars_are_asked_for_every_kind_of_call(path: str) -> None:
    op = fresh(f"conditions_{path.replace('.', '_')}")
    call = op if path == "op" else getattr(torch.ops.kernels, op.name.split("::")[1])
    op.register_kernel("cpu", marked(1), name="contiguous", when=lambda x: x.is_contiguous())
    op.register_kernel("cpu", marked(2), name="big", when=lambda k: k > 5, priority=1)
    x = torch.ones(2, 3)
    for _ in range(5):  # long enough for the guards of the fast path to be installed and changed
        assert call(x)[0, 0].item() == 1
        assert call(x.t())[0, 0].item() == 2  # the reference: 1 * 2
        assert call(x, 6.0)[0, 0].item() == 2
        assert call(x, 5.0)[0, 0].item() == 1


def test_dtypes_choose() -> None:
    op = fresh("dtypes")
    op.register_kernel("cpu", marked(7), dtypes=[torch.float64])
    for _ in range(4):
        assert op(torch.ones(2)).tolist() == [2, 2]
        assert op(torch.ones(2, dtype=torch.float64)).tolist() == [7, 7]


def test_a_plain_kernel_replaces_the_plain_kernel_of_its_device() -> None:
    op = fresh("replaced")
    op.register_kernel("cpu")(marked(1))
    assert op(torch.ones(1)).item() == 1
    op.register_kernel("cpu")(marked(5))
    assert op(torch.ones(1)).item() == 5
    assert len(op.describe().kernels) == 1


def test_bad_registrations_change_nothing() -> None:
    op = fresh("bad")
    op.register_kernel("cpu", marked(9), name="taken", priority=1)
    for arguments, keywords, message in (
        (("toaster", marked(1)), {}, "not a device type"),
        (("cpu", 3), {}, "must be callable"),
        (("cpu", marked(1)), {"when": lambda y: True}, "takes y; the operator has x, k, flag"),
        (("cpu", marked(1)), {"when": 3}, "must be a function"),
        (("cpu", marked(1)), {"name": "taken"}, "there is a kernel named 'taken' already"),
        (("cpu", marked(1)), {"name": "reference"}, "there is a kernel named 'reference' already"),
    ):
        with pytest.raises(KernelError, match=message):
            pytest.fail(f"{arguments}, {keywords} register {op.register_kernel(*arguments, **keywords)}")
        assert [k.name for k in op.describe().kernels] == ["taken"], (arguments, keywords)
        assert op(torch.ones(1)).item() == 9


def test_use_kernel() -> None:
    op = fresh("forced")
    op.register_kernel("cpu", marked(1), name="one", priority=1)
    op.register_kernel("cpu", marked(2), name="two")
    op.register_kernel("cuda", marked(3), name="three")
    x = torch.ones(2)
    for _ in range(4):
        assert op(x)[0].item() == 1
        with opkit.use_kernel(op, "two"):
            assert op(x)[0].item() == 2
            assert torch.ops.kernels.forced(x)[0].item() == 2
            assert op.select(x).refused["one"] == "two is forced by opkit.use_kernel"
            with opkit.use_kernel(op, "reference"):
                assert op(x * 5)[0].item() == 10
            assert op(x)[0].item() == 2
    with opkit.use_kernel(op, "three"), pytest.raises(KernelError, match="runs on cuda, but the arguments are on cpu"):
        op(x)
    with pytest.raises(KernelError, match=r"there is no kernel named 'four'. There are: reference, one"):
        opkit.use_kernel(op, "four").__enter__()
    with pytest.raises(KernelError, match="takes an operator made by"):
        opkit.use_kernel(torch.sin, "one").__enter__()  # type: ignore[arg-type]
    assert op(x)[0].item() == 1


def test_forcing_a_kernel_leaves_other_threads_alone() -> None:
    op = fresh("threads")
    op.register_kernel("cpu", marked(1), name="one")
    x, seen = torch.ones(2), []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        seen.extend(op(x)[0].item() for _ in range(5))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with opkit.use_kernel(op, "reference"):
        assert op(x)[0].item() == 2
        inside.set()
        assert done.wait(10)
        assert op(x)[0].item() == 2
    thread.join()
    assert seen == [1.0] * 5


def test_enabling() -> None:
    op = fresh("enabled")
    op.register_kernel("cpu", marked(5))
    x = torch.ones(1)
    for _ in range(3):
        assert op(x).item() == 5
        with op.set_kernel_enabled("cpu", enabled=False):
            assert op(x).item() == 2
            assert op.select(x).refused == {"cpu_kernel": "kernels for cpu are disabled"}
    assert op.describe().kernels[0].enabled


def test_a_reference_limited_to_a_device() -> None:
    op = fresh("limited", device_types="cuda")
    with pytest.raises(NoKernelError, match=r"limited does not have a kernel registered for cpu|CPU"):
        op(torch.ones(1))
    op.register_kernel("cpu", marked(3))
    assert op(torch.ones(1)).item() == 3
    assert torch.ops.kernels.limited(torch.ones(1)).item() == 3


# ---- autotuning ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, settings: Any) -> Path:
    settings(cache_dir=tmp_path)
    return tmp_path


def slow(seconds: float, value: float) -> Any:
    def kernel(x: Tensor, k: float = 1.0, flag: bool = False) -> Tensor:
        if seconds:  # a sleep of nothing still gives the processor away
            time.sleep(seconds)
        return torch.full_like(x, value)

    return kernel


def test_autotuning_picks_the_faster_once_a_bucket_and_remembers(cache: Path) -> None:
    op = fresh("tuned")
    op.register_kernel("cpu", slow(0.003, 1), name="slow", autotune=True)
    op.register_kernel("cpu", slow(0.0, 2), name="quick", autotune=True)
    assert op(torch.ones(100))[0].item() == 2
    (file,) = (cache / "triton_tuning").glob("*.json")
    (record,) = json.loads(file.read_text())["records"]
    assert [entry["config"]["constexprs"] for entry in record["entries"]] == [{"kernel": "quick"}]
    assert (cache / "triton_tuning").stat().st_mode & 0o777 == 0o700
    before = file.stat().st_mtime_ns
    assert op(torch.ones(101))[0].item() == 2  # the same bucket: as recorded
    assert file.stat().st_mtime_ns == before
    assert op(torch.ones(200))[0].item() == 2
    assert file.stat().st_mtime_ns > before
    assert "quick was measured to be faster" in op.select(torch.ones(200)).refused["slow"]


@pytest.mark.parametrize("damage", ["{", "[]", '{"key": 3}', "\x00\xff"])
def test_a_damaged_record_is_timed_again(cache: Path, damage: str) -> None:
    op = fresh(f"damaged_{abs(hash(damage))}")
    path = records.file_of(op.name, "(kernels)")
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    op.register_kernel("cpu", slow(0.002, 1), name="slow", autotune=True)
    op.register_kernel("cpu", slow(0.0, 2), name="quick", autotune=True)
    with pytest.warns(opkit.errors.TuningWarning, match="it is measured again"):
        assert op(torch.ones(4))[0].item() == 2
    assert json.loads(path.read_text())["records"]


def test_an_edited_kernel_is_timed_afresh(cache: Path) -> None:
    for first, second, fastest in ((0.002, 0.0, "two"), (0.0, 0.002, "one")):
        op = fresh("edited")
        op.register_kernel("cpu", slow(first, 1), name="one", autotune=True)
        op.register_kernel("cpu", slow(second, 2), name="two", autotune=True)
        assert op.select(torch.ones(4)).kernel == fastest
        opkit.remove(op.name)


_TUNED = """
import time, torch, opkit
from torch import Tensor
@opkit.custom_op("tuned_across::op", mutates_args=())
def op(x: Tensor) -> Tensor:
    return x * 2
def quick(x):
    return x * 2
timed = []
def slow(x):
    timed.append(x)
    time.sleep(0.002)
    return x * 2
for kernel in (slow, quick):
    op.register_kernel("cpu", kernel, name=kernel.__name__, autotune=True)
print(op.select(torch.ones(64)).kernel, bool(timed))
"""


def test_autotuning_remembers_across_processes(tmp_path: Path) -> None:
    script = tmp_path / "tuned.py"
    script.write_text(_TUNED)
    environment = {**os.environ, "OPKIT_CACHE_DIR": str(tmp_path / "cache")}
    runs = [fresh_process.run([script], environment).stdout for _ in range(2)]
    assert [run.split() for run in runs] == [["quick", "True"], ["quick", "False"]]


def test_a_verified_guard_set_is_trusted_at_other_shapes() -> None:
    checked_shapes: list[torch.Size] = []

    def doubled(x: Vector) -> Vector:
        checked_shapes.append(x.shape)
        return x * 2

    op = opkit.custom_op("kernels::trusted", doubled)
    op.register_kernel("cpu", lambda x: x * 2)
    op(torch.ones(2, 2))
    assert checked_shapes
    checked_shapes.clear()
    for n in range(3, 9):
        assert op(torch.ones(n, n))[0, 0].item() == 2
    assert checked_shapes == []


@pytest.mark.filterwarnings("ignore:.*other strides:opkit.errors.StrideWarning")
def test_a_kernel_of_another_layout_is_put_right_at_every_shape() -> None:
    def turned(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return x.t().contiguous().t() + 0

    op = opkit.custom_op("kernels::turned", turned)
    op.register_kernel("cpu", lambda x: x.contiguous() + 0)
    for n in range(2, 6):
        for _ in range(3):
            x = torch.randn(n, 3)
            assert op(x).stride() == turned(x).stride()
            torch.testing.assert_close(op(x), x)


def test_a_replaced_kernel_is_verified_again() -> None:
    op = fresh("replaced_badly")
    op.register_kernel("cpu")(lambda x, k=1.0, flag=False: x * 2 * k)
    op(torch.ones(2))
    op.register_kernel("cpu")(lambda x, k=1.0, flag=False: (x * 2 * k).double())
    with pytest.raises(opkit.errors.OutputError, match="float64"):
        op(torch.ones(2))


def test_one_kernel_for_several_devices() -> None:
    op = fresh("several")
    op.register_kernel(("cpu", "cuda", "cpu"), marked(4), name="both", priority=1)
    assert [(k.name, k.device) for k in op.describe().kernels] == [("both", "cuda"), ("both", "cpu")]
    assert op(torch.ones(1)).item() == 4
    assert op.select(torch.ones(1)).refused == {"reference": "both is preferred"}
    with opkit.use_kernel(op, "both"):
        assert op(torch.ones(1)).item() == 4


def test_a_registration_for_several_devices_is_made_for_all_or_none() -> None:
    op = fresh("all_or_none")
    op.register_kernel("cuda", marked(1), name="taken", priority=1)
    with pytest.raises(KernelError, match=r"named 'taken' already"):
        op.register_kernel(("cpu", "cuda"), marked(2), name="taken")
    assert [(k.name, k.device) for k in op.describe().kernels] == [("taken", "cuda")]
    assert op(torch.ones(1)).item() == 2  # the reference: 1 * 2


def test_a_result_has_the_layout_that_its_own_call_gives(name):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_kernel("cpu", lambda x: (x * 2).contiguous())
    row_major, column_major = torch.randn(4, 4), torch.randn(4, 4).t()
    with pytest.warns(opkit.errors.StrideWarning):
        assert doubled(column_major).stride() == (1, 4)
    for _ in range(6):
        assert doubled(row_major).stride() == (4, 1)
        assert doubled(column_major).stride() == (1, 4)


def test_a_trusted_kernel_is_compared_with_the_reference_where_that_is_asked_for(settings: Any) -> None:
    op = fresh("believed")
    op.register_kernel("cpu", lambda x, k=1.0, flag=False: x.double(), name="wide", trusted=True)
    assert op(torch.ones(3)).dtype == torch.float64
    settings(verify="all")
    with pytest.raises(
        OutputError, match=r"the kernel wide is .* torch\.float64 .*the reference gives .* torch\.float32"
    ):
        op(torch.ones(4))


def test_first_calls_from_many_threads() -> None:
    op = fresh("late")
    op.register_kernel("cpu", marked(5.0), name="five")
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(float(op(torch.ones(3))[0]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [5.0] * 8
    op.register_kernel("cpu", marked(6.0), name="six", priority=1)
    assert float(torch.ops.kernels.late(torch.ones(3))[0]) == 6.0
    with opkit.use_kernel(op, "five"):
        assert float(op(torch.ones(3))[0]) == 5.0
    assert float(op(torch.ones(3))[0]) == 6.0
