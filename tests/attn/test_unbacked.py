"""Attention over sizes that depend on data, in exported and compiled programs."""

import pytest
import torch
from attention_inputs import randn

import opkit
import opkit.nn
from opkit.masks import ALiBi, Causal, Dense, KeyPadding, PrefixLM, Segments, SlidingWindow, VarLen

CHOSEN = [[1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


class Program(torch.nn.Module):
    """``f`` of the rows of ``x`` that are chosen."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x, chosen):
        return self.f(x[chosen])


def lengths(x):
    return (x[:, 0, 0, 0].abs() * 4).int()


def packed(x):
    """Each row of the batch as a sequence of one token."""
    rows = x.flatten(1).unsqueeze(1)
    starts = torch.arange(x.shape[0] + 1)
    return opkit.attention(rows, rows, rows, layout="thd", mask=VarLen(starts) & Causal())


def long(x):
    rows = x[:, 0, 0].unsqueeze(0).unsqueeze(0)
    return opkit.attention(rows, rows, rows, mask=Causal("bottom-right") & SlidingWindow(1))


def paged(x):
    pages, table = torch.ones(3, 4, 2, 8), torch.zeros(1, 2, dtype=torch.int64).expand(x.shape[0], 2)
    return opkit.paged_attention(x[:, :, :2].transpose(1, 2), pages, pages, table, torch.full((x.shape[0],), 5))


attend = opkit.nn.MultiheadAttention(8, 2, batch_first=True)
functions = opkit.nn.functional
PROGRAMS = {
    "plain": lambda x: opkit.attention(x, x, x, return_lse=True)[1],
    "causal": lambda x: opkit.attention(x, x, x, mask=Causal()),
    "dense": lambda x: opkit.attention(x, x, x, mask=Dense(x @ x.mT > 0), sinks=torch.ones(4)),
    "bias": lambda x: opkit.attention(x, x, x, bias=[x @ x.mT, ALiBi(torch.ones(4))]),
    "padding": lambda x: opkit.attention(x, x, x, mask=KeyPadding(lengths(x)) | PrefixLM(lengths(x))),
    "segments": lambda x: opkit.attention(x, x, x, mask=Segments(x[:, 0, :, 0].int())),
    "shared heads": lambda x: opkit.attention(x.transpose(1, 2), *[x[:, :2].transpose(1, 2)] * 2, layout="bshd"),
    "long": long,
    "paged": paged,
    "sdpa": lambda x: functions.scaled_dot_product_attention(x, x, x, x @ x.mT),
    "flex": lambda x: functions.flex_attention(x, x, x, block_mask=Causal()),
    "modules": lambda x: attend(*[functions.rms_norm(x[:, 0], torch.ones(8))] * 3, need_weights=False)[0],
}


def check(program, f, x):
    for chosen in CHOSEN:
        rows = torch.tensor(chosen).bool()
        torch.testing.assert_close(program(x, rows), f(x[rows]))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported(name):
    x = randn(5, 4, 3, 8)
    exported = torch.export.export(Program(PROGRAMS[name]), (x, torch.tensor(CHOSEN[0]).bool()), strict=False)
    check(exported.module(), PROGRAMS[name], x)


def test_packed_sequences_exported():
    x = randn(5, 4, 3, 8)
    exported = torch.export.export(Program(packed), (x, torch.tensor(CHOSEN[0]).bool()), strict=False).module()
    for chosen in CHOSEN[:2]:
        rows = torch.tensor(chosen).bool()
        torch.testing.assert_close(exported(x, rows), packed(x[rows]))


def several(*names):
    """Of many kinds in one program."""
    return lambda x: tuple(PROGRAMS[name](x) for name in names)


FEW, MANY = several("causal", "padding", "paged"), several("causal", "bias", "padding", "paged", "modules")
BACKENDS = ["opkit", *(pytest.param(backend, marks=pytest.mark.exhaustive) for backend in ("aot_eager", "inductor"))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("programs", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)], ids=["few", "many"])
def test_compiled(backend, programs):
    x = randn(5, 4, 3, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(Program(programs), backend=backend, fullgraph=True)
        check(compiled, programs, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_gradients(backend):
    def program(x, chosen):
        count = chosen.sum().item()
        torch._check(count >= 0)
        torch._check(count <= x.shape[0])
        taken = x.narrow(0, 0, count)
        return opkit.attention(taken, taken, taken, mask=Causal())

    x = randn(5, 2, 16, 8).requires_grad_()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for chosen in map(torch.tensor, CHOSEN):
            found, expected = (torch.autograd.grad(f(x, chosen).square().sum(), x)[0] for f in (compiled, program))
            torch.testing.assert_close(found, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", sorted(PROGRAMS.keys() - {"modules"})
)  # strict export wants modules to be of the program
def test_exported_by_dynamo(name):
    x = randn(5, 4, 3, 8)
    exported = torch.export.export(Program(PROGRAMS[name]), (x, torch.tensor(CHOSEN[0]).bool()), strict=True)
    check(exported.module(), PROGRAMS[name], x)
