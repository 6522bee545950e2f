"""opkit::attention as an operator: its rules, and the contract that it keeps."""

import pytest
import torch

import opkit
from opkit.attn import gradients
from opkit.attn.masks import program
from opkit.attn.operator import attention_operator
from opkit.testing import contract, tensor


def test_all_rules_are_derived_or_given():
    described = {rule.rule: rule.origin for rule in attention_operator().describe().rules}
    assert set(described.values()) <= {"derived", "given"}


DTYPES = (torch.float32, torch.bfloat16)
KINDS = {
    "plain": ((), (), None, (), ()),
    "masked": (
        [tensor("b", torch.int32, low=0, high=8), tensor("1 2*g s 1", torch.bool)],
        [tensor("1 2*g", torch.float32), tensor("b 1 s t", DTYPES)],
        tensor("2*g", DTYPES, optional=True),
        (program.LENGTH, 0, program.DENSE, 1, program.OR, program.NOT, program.BAND, -2, 5, program.OR),
        (program.BIAS_ALIBI, 0, program.BIAS_DENSE, 1),
    ),
}


def arguments(kind):
    mask_tensors, bias_tensors, sinks, mask, bias = KINDS[kind]
    qkv = (tensor("b 2*g s d", DTYPES), tensor("b g t d", DTYPES), tensor("b g t e", DTYPES))
    return (*qkv, mask_tensors, bias_tensors, sinks, None, mask, bias, 0.5, 2.0, 0.0, kind == "masked")


ASKED = """
behaviour.arguments behaviour.concurrent behaviour.deterministic behaviour.first behaviour.global_state behaviour.history
behaviour.settings behaviour.threads behaviour.values
fake.accepts fake.aliasing fake.dtype fake.effects fake.offset fake.requires_grad fake.shapes fake.strides fake.symbolic
gradients.accepts gradients.forward gradients.incoming gradients.linear gradients.lost gradients.no_grad gradients.pure
gradients.reference gradients.saved gradients.second gradients.subsets gradients.undefined
layout.expanded layout.same_tensor layout.shared_storage layout.strides layout.views
memory.allocations memory.crash memory.guard memory.leak memory.read_only memory.red_zone memory.uninitialized
numbers.accepts numbers.dtypes numbers.empty numbers.extreme numbers.kernels numbers.reference
schema.alias schema.defaults schema.kinds schema.mutation schema.returns
transforms.autocast transforms.checkpoint transforms.functional transforms.functionalize transforms.modes transforms.vmap
"""
WITH_INTEGERS = {"plain": (), "masked": ("numbers.integers", "numbers.scalars")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_its_contract(kind):
    """The kernels take delta from the result, which is rounded to the narrow dtype: gradients that cancel show it."""
    exclude = ["compile", "gradients.dtypes"]
    report = opkit.check(attention_operator(), args=arguments(kind), max_examples=4, exclude=exclude, database=False)
    report.raise_for_failures()
    passed = {each.property for each in report.passed}
    assert not {*ASKED.split(), *WITH_INTEGERS[kind]} - passed


test_it_is_exported = pytest.mark.exhaustive(
    contract(attention_operator(), args=arguments("masked"), max_examples=2, properties=["compile.export"])
)


QUICK = {"numbers.reference", "schema.alias"}


@pytest.mark.parametrize(
    ("properties", "asked"),
    [
        ([*QUICK, "numbers.dtypes", "numbers.empty"], QUICK),
        pytest.param(
            None,
            QUICK | {"fake.shapes", "gradients.second", "gradients.reference", "layout.strides"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_gradients_of_biases_keep_their_contract(properties, asked):
    """Each call's memory is given back; the heap's own caches grew now and then by 64 bytes a call, which later calls reused."""
    rows, sums = tensor("b 2*g s e", DTYPES), tensor("b 2*g s", torch.float32)
    qkv = (tensor("b 2*g s d", DTYPES), tensor("b g t d", DTYPES), tensor("b g t e", DTYPES))
    added = [tensor("1 2*g", torch.float32), tensor("b 1 s t", DTYPES)]
    programs = ((program.LENGTH, 0), (program.BIAS_ALIBI, 0, program.BIAS_DENSE, 1))
    args = (rows, sums, *qkv, sums, [tensor("b", torch.int32, low=0, high=8)], added, *programs, 0.5, 2.0, (1, 0))
    report = opkit.check(
        gradients.bias_backward_operator(),
        args=args,
        max_examples=3,
        properties=properties,
        exclude=["compile", "memory.leak"],
        database=False,
    )
    report.raise_for_failures()
    assert not asked - {each.property for each in report.passed}


def test_numbers_of_rows_may_lack_the_batch():
    """So may those that are lengths as well, with a batch of as many sequences as rows."""
    count = 7
    ids, q = torch.tensor([0, 0, 1, 1, 1, 2, 5], dtype=torch.int32), torch.randn(count, 2, count, 4, requires_grad=True)

    def results(q, tensors, *mask):
        out, _ = attention_operator()(q, q, q, tensors, [], None, None, [*mask], [], 0.5, 0.0, 0.0, False)
        return out

    def gradient(out):
        return torch.autograd.grad(out.square().sum(), q)[0]

    for mask in (
        [program.SEGMENTS, 0, 0],
        [program.BAND_AT, 0, -1, 1],
        [program.SEGMENTS, 0, 0, program.LENGTH, 1, program.OR],
    ):
        shared = [0 if word == 1 and mask[at - 1] == program.LENGTH else word for at, word in enumerate(mask)]
        out, want = results(q, [ids], *shared), results(q, [ids[None], ids], *mask)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(gradient(out), gradient(want))
        several = torch.stack([ids, ids.flip(0)])
        for dim, given in ((None, ids.expand(2, -1)), (0, several)):
            xs = torch.stack([q, 2 * q]).detach()
            mapped = torch.vmap(lambda x, i: results(x, [i], *shared), (0, dim))  # noqa: B023 - called at once
            want = torch.stack([results(x, [i[None], i], *mask) for x, i in zip(xs, given, strict=True)])
            torch.testing.assert_close(mapped(xs, given if dim == 0 else ids), want)
