"""A process whose kernels are in the cache imports no compiler for its first call; what is read of kernels is what Triton has."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import opkit.attn
import opkit.attn.gpu
from opkit.kernels.triton import specialisation
from opkit.kernels.triton.named import Named
from opkit.op.triton.kernel import is_gluon, location, module_of, name_of, parameters_of

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "first_call.py"
DRIVER = ROOT / "tests" / "kernels" / "fake_driver.c"


def named():
    """The kernels that modules of the host name."""
    walked = pkgutil.walk_packages(opkit.attn.__path__, "opkit.attn.")
    modules = [importlib.import_module(each.name) for each in walked if ".device" not in each.name]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, Named)}
    return sorted(found, key=lambda each: (each.module, each.name))


KERNELS = named()


def test_there_are_kernels_of_each_kind():
    assert {each.name for each in KERNELS} >= {
        "attention_forward", "attention_of_keys", "attention_of_bias", "attention_forward_paged", "merge_parts", "tile_lists",
        "tile_states", "hopper_backward", "hopper_backward_begin", "hopper_backward_end", "decode",
        "merge", "append", "mla",
    }  # fmt: skip


READ = {
    "its signature": specialisation.parameters, "its parameters": parameters_of, "its language": is_gluon,
    "where it is": location, "its name": name_of, "its module": module_of,
}  # fmt: skip


def test_what_is_read_of_a_kernel_is_what_triton_has():
    for kernel in KERNELS:
        assert kernel.header is not None, kernel.name
        function = kernel.loaded()
        for what, read in READ.items():
            assert read(kernel) == read(function), f"{what}, of {kernel.name}"
        assert name_of(kernel) == function.fn.__name__
        assert module_of(kernel) == function.fn.__module__


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libfake.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-pthread", "-DCUDA"]
    subprocess.run(["gcc", *flags, str(DRIVER), "-o", str(path)], check=True)
    return str(path)


@pytest.mark.exhaustive  # tests/kernels/triton/test_named.py has one without attention
@pytest.mark.parametrize("case", ["decode", "portable", "backward", "portable_backward"])
def test_a_process_that_finds_its_kernels_does_not_import_triton(case, library, tmp_path):
    caches = {
        "OPKIT_CACHE_DIR": str(tmp_path / "opkit"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "OPKIT_VERIFY": "1",
    }
    environment = {**os.environ, **caches}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), "--child", case, library]
    runs = [
        json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(2)
    ]
    assert [each["triton"] for each in runs] == [True, False]
    assert runs[0]["launches"] == runs[1]["launches"] > 0
    assert runs[1]["imported"] == []
    assert os.listdir(tmp_path / "opkit" / "triton" / "named")
