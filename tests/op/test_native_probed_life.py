"""Operators with native kernels that are defined again, removed, corrected and called meanwhile: the newest word counts."""

import threading
import warnings

import pytest
import torch
from torch import Tensor

import opkit
from opkit.op.native import compiled

FILL = "void fill(const T* x, T* out, int64_t out_numel) { for (int64_t i = 0; i < out_numel; i++) out[i] = 7; }"
TIMES = (
    "void times(const T* x, T* out, int64_t x_numel) {{ for (int64_t i = 0; i < x_numel; i++) out[i] = {} * x[i]; }}"
)


pytestmark = pytest.mark.usefixtures("bridge")  # the faults show with it and without


@pytest.fixture
def define(name):
    def define(function, source=FILL):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", opkit.errors.RedefinitionWarning)
            op = opkit.custom_op(name, function, mutates_args=())
        op.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"]))
        return op

    return define


def same_shape(x: Tensor) -> Tensor:
    return torch.full_like(x, 7)


def one_dimension(x: Tensor) -> Tensor:
    return x.new_full((x.shape[0],), 7)


def test_a_corrected_fake_implementation_gives_the_sizes(name):
    @opkit.custom_op(name, mutates_args=(), opaque=True)
    def filled(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy())

    filled.register_kernel("cpu", opkit.c_kernel(FILL, dtypes=["float32"]))
    x = torch.randn(3, 4)
    for fake, shape in (
        (torch.empty_like, (3, 4)),
        (lambda x: x.new_empty(x.shape[0]), (3,)),
        (torch.empty_like, (3, 4)),
    ):
        filled.register_fake(fake)
        for _ in range(4):
            assert filled(x).shape == shape


def test_a_new_reference_beside_the_same_kernel_gives_the_sizes(define):
    one, two = torch.randn(3), torch.randn(3, 4)
    older = define(same_shape)
    for _ in range(4):
        assert older(one).shape == (3,)
        assert older(two).shape == (3, 4)
    newer = define(one_dimension)
    for _ in range(4):
        newer(one)  # verified: calls like it need no Python any more
    assert newer(two).shape == (3,)


def test_the_older_operator_does_not_take_the_newer_ones_calls(define):
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def tripled(x: Tensor) -> Tensor:
        return x * 3

    older = define(doubled, TIMES.format(2))
    for _ in range(4):
        older(torch.ones(2))
    newer = define(tripled, TIMES.format(3))
    for _ in range(4):
        assert older(torch.ones(2, 2)).sum() == 8
        assert older(torch.ones(2)).sum() == 4
        assert newer(torch.ones(2)).sum() == 6
        assert newer(torch.ones(2, 2)).sum() == 12


def test_a_removed_operator_that_was_bridged_does_not_crash(define, name):
    op = define(same_shape)
    for _ in range(4):
        op(torch.ones(2))
    assert op._operator.bridged.serving
    opkit.remove(name)
    assert op(torch.ones(2)).tolist() == [7, 7]
    again = define(same_shape)
    assert again(torch.ones(2)).tolist() == [7, 7]


def test_an_offer_waits_for_a_kernel_that_is_being_forced(define):
    op = define(same_shape)
    op(torch.ones(2))
    function = op._operator.kernels.kernels[0].function
    with op._operator.lock:
        op._operator.bridged.suspend()
        offering = threading.Thread(target=compiled.offer, args=(function,))
        offering.start()
        offering.join(0.2)
        assert not op._operator.bridged.serving
    offering.join()
    assert op._operator.bridged.serving


def test_registering_waits_for_an_offer(define):
    op = define(same_shape)
    with op._operator.lock:  # which an offer holds from its decision on
        registering = threading.Thread(target=op.register_vmap, args=(lambda info, dims, x: (x, 0),))
        registering.start()
        registering.join(0.2)
        assert registering.is_alive()
    registering.join()
