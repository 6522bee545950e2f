"""Where kernels for GPUs run in tests: in Triton's interpreter, on CPU tensors, and on a GPU where there is one."""

import os

import interpreted_kernels
import listing_kernels
import pytest
import torch
from cuda_on_cpu import bits_in_torch, lists_in_torch, on_cpu, visits_in_torch
from torch.utils import _pytree as pytree

from opkit.attn import gradients
from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.hopper import backward, calls, forward_kinds, library
from opkit.attn.operator import attention_operator
from opkit.op.forcing import use_kernel
from opkit.testing import Interpreter

OPERATORS = {
    "opkit::attention": attention_operator,
    "opkit::attention_backward": gradients.backward_operator,
    "opkit::attention_bias_backward": gradients.bias_backward_operator,
}


class Interpreted:
    """Operators in the interpreter, which computes no products of bfloat16."""

    narrow = torch.float16

    def __init__(self, process):
        self.process = process

    def __call__(self, op, *args, kernel="triton"):
        return self.process(op, *args, kernel=kernel)


class OnGpu:
    """Operators on the GPU; their arguments and results are on the CPU."""

    narrow = torch.bfloat16

    def __call__(self, op, *args, kernel="triton"):
        attention_operator()  # gives the operators of gradients their kernels too
        found = OPERATORS[op]()
        there = pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), args)
        with use_kernel(found, kernel):
            return pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), found(*there))


@pytest.fixture(scope="session")
def interpreter():
    """All kernels in Triton, in its interpreter."""
    with Interpreter("interpreted_kernels", interpreted_kernels.__file__) as process:
        yield process


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """Calls an operator by name with a kernel by name."""
    return OnGpu() if request.param == "gpu" else Interpreted(request.getfixturevalue("interpreter"))


@pytest.fixture
def a_hopper(monkeypatch):
    """As if all tensors were on a GPU of compute capability 9.0, of a machine with a CUDA compiler."""
    for module in (backward, calls):
        monkeypatch.setattr(module, "on_hopper", lambda x: True)
    monkeypatch.setattr(library, "compiler_there", lambda: True)


@pytest.fixture(params=["64", "64, few keys", "64, few queries", "128", "256"])
def head(request, monkeypatch):
    """Channels of a head, for each way that the forward lays out its work; calls of tests have few queries and keys."""
    size, _, few = request.param.partition(", ")
    if few == "few keys":
        monkeypatch.setattr(forward_kinds, "is_low", lambda call, shape: False)
    elif not few:
        monkeypatch.setattr(forward_kinds, "is_low", lambda call, shape: False)
        monkeypatch.setattr(forward_kinds, "_FEW", (0, 0))
    return int(size)


@pytest.fixture(scope="module")
def machine_built(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()  # by pytest-xdist, of one process among those that build libraries together
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "machine"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, on_cpu(patch, folder) as seed:
        patch.setattr(tile_lists, "bits_of", bits_in_torch)
        yield seed


@pytest.fixture
def machine(machine_built):
    """Has kernels in CUDA C++ run on the processor. The seed of the order of events: 0, whatever tests before this one chose."""
    machine_built[0] = 0
    return machine_built


@pytest.fixture
def batch_invariance(settings):
    """The environment asks for it."""
    settings(batch_invariant=1)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def listed(machine, monkeypatch):
    """Has lists and spans of tiles built by torch, since the kernels that build them run on no processor."""
    monkeypatch.setattr(tile_lists, "lists_of", lists_in_torch)
    monkeypatch.setattr(tile_lists, "visits_of_call", visits_in_torch)
    monkeypatch.setattr(tile_lists, "spans_of", listing_kernels.spans_in_torch)
    return machine
