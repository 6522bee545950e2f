"""opkit.attention: layouts, mistakes, kernels by name, transforms, compilers, and the operator's contract."""

import json
import subprocess
import sys

import pytest
import torch

import opkit
from opkit import _core
from opkit.attn import api, program
from opkit.attn.operator import attention_operator
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, KernelError, ShapeError
from opkit.masks import ALiBi, Causal, KeyPadding, Not, RelativePosition, Segments, SlidingWindow, VarLen
from opkit.testing import contract, tensor


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch=2, heads=4, shared=2, queries=5, keys=6, d=8, d_v=3, **options):
    return (
        randn(batch, heads, queries, d, **options),
        randn(batch, shared, keys, d, **options, seed=1),
        randn(batch, shared, keys, d_v, **options, seed=2),
    )


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, Causal("bottom-right"), KeyPadding(torch.tensor([2, 6]))])
def test_batch_sequence_heads_is_the_same_transposed(mask):
    q, k, v = inputs()
    expected, expected_lse = opkit.attention(q, k, v, mask=mask, return_lse=True)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse = opkit.attention(*turned, mask=mask, layout="bshd", return_lse=True)
    assert out.shape == (2, 5, 4, 3)
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), expected)
    torch.testing.assert_close(lse, expected_lse)
    assert lse.is_contiguous()


def test_packed_sequences_are_those_of_a_batch():
    lengths, (q, k, v) = (2, 0, 3), inputs(batch=3, queries=3, keys=3)
    mask = VarLen(torch.tensor([0, 2, 2, 5])) & Causal()
    packed = [torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for x in (q, k, v)]
    out, lse = opkit.attention(*packed, mask=mask, layout="thd", return_lse=True)
    assert out.shape == (5, 4, 3)
    assert lse.shape == (4, 5)
    assert out.is_contiguous()
    at = 0
    for b, n in enumerate(lengths):
        one, one_lse = opkit.attention(*(x[b : b + 1, :, :n] for x in (q, k, v)), mask=Causal(), return_lse=True)
        torch.testing.assert_close(out[at : at + n].transpose(0, 1), one[0])
        torch.testing.assert_close(lse[:, at : at + n], one_lse[0])
        at += n


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_results_are_contiguous_and_arguments_are_not_copied(layout, monkeypatch):
    given = []
    monkeypatch.setattr(api, "_OPERATOR", lambda *call: given.append(call) or attention_operator()(*call))
    shape = (5, 4, 8) if layout == "thd" else (2, 5, 4, 8)
    q, k, v = (randn(*shape, seed=n) for n in range(3))
    assert opkit.attention(q, k, v, layout=layout).is_contiguous()
    assert [x.data_ptr() for x in given[0][:3]] == [x.data_ptr() for x in (q, k, v)]


def test_any_strides_are_as_good_as_contiguous_ones():
    q, k, v = inputs()
    expected = opkit.attention(q, k, v)
    strided = [torch.stack((x, x), -1)[..., 0] for x in (q, k, v)]
    turned = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (q, k, v)]
    for args in (strided, turned):
        out = opkit.attention(*args)
        torch.testing.assert_close(out, expected)
        assert out.is_contiguous()


def test_the_log_sum_exp_is_returned_when_asked_for():
    q, k, v = inputs(dtype=torch.bfloat16)
    out, lse = opkit.attention(q, k, v, scale=0.25, return_lse=True)
    assert torch.equal(opkit.attention(q, k, v, scale=0.25), out)
    logits = q.float() @ k.float().repeat_interleave(2, 1).mT * 0.25
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_autocast_casts_queries_keys_and_values():
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = opkit.attention(q, k.bfloat16(), v, bias=ALiBi(torch.ones(4)), return_lse=True)
        assert opkit.attention(q.double(), k.double(), v.double()).dtype == torch.float64
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    plain = opkit.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=ALiBi(torch.ones(4)))
    assert torch.equal(out, plain)


def test_a_call_writes_to_nothing():
    q, k, v = inputs()
    lengths, bias = torch.tensor([2, 3]), randn(5, 6)
    before = [x.clone() for x in (q, k, v, lengths, bias)]
    opkit.attention(q, k, v, mask=Causal() & KeyPadding(lengths), bias=bias)
    assert all(map(torch.equal, before, (q, k, v, lengths, bias)))


# ---- mistakes --------------------------------------------------------------------------------------------------------

Q, K, V = inputs()


def call(q=Q, k=K, v=V, **options):
    return lambda: opkit.attention(q, k, v, **options)


WRONG = (
    (call(q=3), ArgumentTypeError, r"q must be a tensor, got int: 3"),
    (call(q=Q.int()), DtypeError, r"q has dtype torch.int32, expected float32, .* Convert it with .to\(torch.float32\)"),
    (call(k=K.double()), DtypeError, r"k has dtype torch.float64, q has torch.float32. Convert it with .to\(q.dtype\)"),
    (call(v=V.to("meta")), ArgumentError, r"v is on meta, q is on cpu. Move it with .to\(q.device\)"),
    (call(q=Q[0]), ShapeError, r"q of shape \(4, 5, 8\) has 3 dimensions; the layout 'bhsd' is \(batch, heads, sequence"),
    (call(k=K[:1]), ShapeError, r"q of shape \(2, 4, 5, 8\) and k of shape \(1, 2, 6, 8\) must agree in batch: 2 and 1"),
    (call(k=K[..., :7]), ShapeError, r"q of .* and k of shape \(2, 2, 6, 7\) must agree in head size: 8 and 7"),
    (call(v=V[:, :, :5]), ShapeError, r"k of .* and v of shape \(2, 2, 5, 3\) must agree in sequence: 6 and 5"),
    (call(v=V[:, :1]), ShapeError, r"k of .* and v of shape \(2, 1, 6, 3\) must agree in heads: 2 and 1"),
    (call(q=Q[:, :3]), ShapeError, r"q has 3 heads and k 2, in the layout 'bhsd', .* a multiple of k's"),
    (call(k=K[:, :0], v=V[:, :0]), ShapeError, r"q has 4 heads and k 0"),
    (call(q=Q[..., :0], k=K[..., :0]), ShapeError, r"has heads of size 0, expected 1 or more"),
    (call(layout="sbhd"), ArgumentError, r"layout='sbhd' is unknown. There are 'bhsd': \(batch, heads, .*'thd': \(total"),
    (call(layout="thd"), ShapeError, r"q of shape \(2, 4, 5, 8\) has 4 dimensions; the layout 'thd' is \(total, heads, head"),
    (call(q=Q[0], k=K[0], v=V[0, :, :5], layout="thd"), ShapeError, r"must agree in heads: 6 and 5"),
    (call(softcap=0), ArgumentError, r"softcap=0 must be above 0, or None for no bound"),
    (call(dropout_p=1.5), ArgumentError, r"dropout_p=1.5 must be between 0 and 1"),
    (call(sinks=[1.0]), ArgumentTypeError, r"sinks must be a tensor, got list: \[1.0\]"),
    (call(sinks=torch.zeros(2)), ShapeError, r"sinks of shape \(2,\) must be \(heads,\) = \(4,\), q's heads"),
    (call(sinks=torch.zeros(4).int()), DtypeError, r"sinks has dtype torch.int32, expected a floating one"),
    (call(sinks=torch.zeros(4, device="meta")), ArgumentError, r"sinks is on meta, q is on cpu"),
    (call(bias="alibi"), ArgumentTypeError, r"a bias is a floating tensor, ALiBi, RelativePosition, or a list .* got str"),
    (call(bias=torch.ones(5, 6).bool()), DtypeError, r"bias has dtype torch.bool, expected floating"),
    (call(bias=torch.ones(6, 5)), ShapeError, r"bias of shape \(6, 5\) does not broadcast to .* = \(2, 4, 5, 6\)"),
    (call(bias=ALiBi(torch.ones(2))), ShapeError, r"ALiBi: slopes of shape \(2,\) must be \(heads,\) = \(4,\) or"),
    (call(bias=ALiBi(torch.ones(4).int())), DtypeError, r"ALiBi: slopes has dtype torch.int32, expected a floating one"),
    (
        call(bias=RelativePosition(torch.ones(2, 4, 5, 2), torch.ones(2, 4, 5, 2))), ShapeError,
        r"rel_h has 2 rows and rel_w 2 columns, that is 4 keys; there are 6",
    ),
    (
        call(bias=RelativePosition(torch.ones(2, 4, 3, 2), torch.ones(2, 4, 5, 3))), ShapeError,
        r"RelativePosition: rel_h of shape \(2, 4, 3, 2\) must be \(batch, heads, queries, n\) = \(2, 4, 5, n\)",
    ),
    (call(kernel="flash"), KernelError, r"there is no kernel named 'flash'. There are: reference"),
)  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_mistakes_are_explained(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_alibi_beside_documents_at_different_places_is_refused():
    q, k = torch.zeros(4, 2, 8), torch.zeros(5, 2, 8)
    mask = VarLen(torch.tensor([0, 2, 4]), torch.tensor([0, 3, 5]))
    with pytest.raises(ArgumentError, match="ALiBi counts distances in the packed sequences"):
        opkit.attention(q, k, k, layout="thd", mask=mask & Causal(), bias=[ALiBi(torch.ones(2))])


def test_alibi_beside_documents_at_the_same_places_counts_within_them():
    q, k, v = (randn(6, 2, 8, seed=n) for n in range(3))
    slopes = torch.tensor([0.5, 0.1])
    out = opkit.attention(q, k, v, layout="thd", mask=VarLen(torch.tensor([0, 2, 6])), bias=ALiBi(slopes))
    alone = opkit.attention(q[2:], k[2:], v[2:], layout="thd", bias=ALiBi(slopes))
    torch.testing.assert_close(out[2:], alone)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def doubling():
    """The operator with a kernel for float32 on the CPU whose results are twice the reference's, and the kernel's calls."""
    op, calls = attention_operator(), []
    before = list(op._operator.kernels.kernels)

    def kernel(*args):
        calls.append(args)
        out, lse = op.reference(*args)
        return 2 * out, lse

    op.register_kernel(
        "cpu", kernel, name="doubling", dtypes=[torch.float32], when=lambda q: q.shape[-1] % 8 == 0, priority=9
    )
    yield op, calls
    op._operator.kernels.kernels = before
    op._backend_fns.pop("cpu", None) if not before else None
    op._renew()


def test_a_kernel_is_selected_forced_and_explained(doubling):
    q, k, v = inputs()
    assert api.select(q, k, v).kernel == "doubling"
    refused = str(api.select(q.double(), k.double(), v.double(), mask=Causal()))
    assert "not doubling: the arguments have torch.float64; it takes torch.float32" in refused
    plain = opkit.attention(q, k, v, kernel="reference")
    torch.testing.assert_close(opkit.attention(q, k, v), 2 * plain)
    torch.testing.assert_close(opkit.attention(q, k, v, kernel="doubling"), 2 * plain)
    torch.testing.assert_close(
        opkit.attention(q[..., :7], k[..., :7], v), opkit.attention(q[..., :7], k[..., :7], v, kernel="reference")
    )
    with opkit.use_kernel(doubling[0], "reference"):
        torch.testing.assert_close(opkit.attention(q, k, v), plain)


@pytest.mark.parametrize("kernel", ["tiles", "decode"])
def test_a_kernel_has_the_reference_s_gradients(kernel):
    args = [randn(1, 4, 3, 8), randn(1, 2, 300, 8, seed=1), randn(1, 2, 300, 8, seed=2)]
    args = [x.requires_grad_() for x in args]
    mask, weights = Causal("bottom-right"), randn(1, 4, 3, 8, seed=3)
    out = opkit.attention(*args, mask=mask, kernel=kernel)
    exact = opkit.attention(*(x.double() for x in args), mask=mask)
    grads = [torch.autograd.grad((x * weights).sum(), args) for x in (out, exact)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_kernels_are_chosen_by_shapes():
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 300, 8)
    assert api.select(q, k, k).kernel == "decode"
    assert api.select(q, k, k, mask=Causal("bottom-right")).kernel == "decode"
    assert api.select(q, k[:, :, :200], k[:, :, :200]).kernel == "tiles"
    assert api.select(q, k, k, mask=KeyPadding(torch.tensor([2, 6]))).kernel == "tiles"
    long = [torch.zeros(1, 2, 64, 8)] * 3
    assert api.select(*long, mask=Causal()).kernel == "tiles"
    assert api.select(*(x.double() for x in long)).kernel == "reference"
    assert api.select(*long, dropout_p=0.1).kernel == "reference"


AVX512 = {"avx512", "avx512_bf16"}
DECODED = (  # rows, keys, and the instruction sets of tiles beside which these are decoded
    (16, 255, set()),
    (16, 256, {"baseline", "neon", "avx2", *AVX512, "amx"}),
    (17, 256, {"avx2", *AVX512}),
    (32, 256, {"avx2", *AVX512}),
    (33, 4095, set()),
    (33, 4096, AVX512),
    (64, 4096, AVX512),
    (65, 9000, set()),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "keys", "beside"), DECODED)
def test_few_rows_are_decoded(isa, dtype, rows, keys, beside):
    tiles = "avx512" if isa == "amx" and dtype != torch.bfloat16 else isa
    k = torch.zeros(1, 1, keys, 8, dtype=dtype)
    for shape in ((1, 1, rows, 8), (1, rows, 1, 8)):
        found = api.select(torch.zeros(shape, dtype=dtype), k, k).kernel
        assert found == ("decode" if tiles in beside else "tiles")


def test_beside_tiles_of_amx_fewer_rows_are_decoded(monkeypatch):
    monkeypatch.setattr(_core, "isa_table", lambda: {"attention_bf16": "amx", "attention_f32": "avx512"})
    k = torch.zeros(1, 1, 256, 8)
    for rows, dtype, kernel in (
        (16, torch.bfloat16, "decode"),
        (17, torch.bfloat16, "tiles"),
        (17, torch.float32, "decode"),
    ):
        q = torch.zeros(1, 1, rows, 8, dtype=dtype)
        assert api.select(q, k.to(dtype), k.to(dtype)).kernel == kernel


def test_a_kernel_is_called_once_for_a_mapped_call(doubling):
    q, k, v = (torch.stack((x, x + 1)) for x in inputs())
    out = torch.vmap(lambda *x: opkit.attention(*x, mask=Causal()))(q, k, v)
    assert [args[0].shape for args in doubling[1]] == [(4, 4, 5, 8)]
    for n in range(2):
        torch.testing.assert_close(out[n], 2 * opkit.attention(q[n], k[n], v[n], mask=Causal(), kernel="reference"))


def test_compiled_gradients_of_all_lengths_are_the_reference_s():
    torch.compiler.reset()

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=Causal("bottom-right"))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((5, 6), (3, 9)):
        args = [x.requires_grad_() for x in inputs(queries=queries, keys=keys)]
        out = opkit.attention(*args, mask=Causal("bottom-right"), kernel="reference")
        found = compiled(*args)
        torch.testing.assert_close(found, out)
        weight = randn(*out.shape, seed=5)
        pairs = [torch.autograd.grad(x, args, weight) for x in (found, out)]
        torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5)


def test_the_reference_is_selected_for_what_no_kernel_takes():
    q = torch.zeros(1, 1, 2, 4, device="meta")
    assert opkit.attention(q, q, q).shape == (1, 1, 2, 4)
    assert api.select(*inputs(dtype=torch.float64)).operator == "opkit::attention"


# ---- compilers -------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """A mask made within the traced function, of tensors that are arguments."""

    def forward(self, q, k, v, lengths, slopes):
        mask = (Causal("bottom-right") & SlidingWindow(3)) | Not(KeyPadding(lengths))
        bias = [ALiBi(slopes), slopes.sum().reshape(1, 1)]
        return opkit.attention(q, k, v, mask=mask, bias=bias, sinks=slopes, softcap=5.0, return_lse=True)


class Packed(torch.nn.Module):
    """Packed sequences, with a mask made outside of what is traced."""

    def __init__(self):
        super().__init__()
        self.mask = ~Segments(torch.arange(5) % 2, torch.arange(6) % 3)

    def forward(self, q, k, v, starts, bias):
        packed = [x[0].transpose(0, 1) for x in (q, k[:, :, :5], v[:, :, :5])]
        return opkit.attention(*packed, mask=VarLen(starts) & Causal(), layout="thd"), opkit.attention(
            q, k, v, mask=self.mask
        )


EXAMPLES = (
    (Attention(), (*inputs(), torch.tensor([2, 6]), randn(4).abs())),
    (Packed(), (*inputs(), torch.tensor([0, 2, 5]), randn(5, 6))),
)
each_example = pytest.mark.parametrize(("module", "args"), EXAMPLES, ids=["masks", "packed"])


@each_example
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "opkit"])
def test_compiled_without_a_graph_break_it_gives_the_same(module, args, backend):
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*args), module(*args))


def test_compiled_gradients_are_the_eager_ones():
    torch.compiler.reset()
    module, args = EXAMPLES[0]
    args = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    wanted = [x for x in args if x.requires_grad]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(f(*args)[0].square().sum(), wanted) for f in (compiled, module)]
    torch.testing.assert_close(*found)


def test_one_graph_serves_all_lengths():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=Causal("bottom-right") & SlidingWindow(2))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for queries, keys in ((5, 6), (3, 9), (7, 7)):
        args = inputs(queries=queries, keys=keys)
        torch.testing.assert_close(compiled(*args), function(*args))
    assert len(graphs) <= 2


@each_example
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operator(module, args, strict):
    exported = torch.export.export(module, args, strict=strict)
    assert "opkit.attention.default" in {str(node.target) for node in exported.graph.nodes}
    torch.testing.assert_close(exported.module()(*args), module(*args))


@pytest.mark.xfail(
    torch.__version__ < "2.13",
    raises=torch._dynamo.exc.UserError,
    reason="torch.export of torch 2.11 and 2.12 does not see that min(8 * n, 16 * n) is 8 * n",
)
def test_an_exported_program_takes_other_lengths():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return opkit.attention(q, k, v, mask=Causal("bottom-right"), layout="bshd")

    queries, keys = torch.export.Dim("queries", min=2), torch.export.Dim("keys", min=2)
    args = tuple(x.transpose(1, 2) for x in inputs())
    exported = torch.export.export(Model(), args, dynamic_shapes=({1: queries}, {1: keys}, {1: keys}))
    others = tuple(x.transpose(1, 2) for x in inputs(queries=3, keys=11))
    torch.testing.assert_close(exported.module()(*others), Model()(*others))


def test_the_reference_can_be_forced_where_a_compiler_sees_it():
    torch.compiler.reset()
    args = inputs()

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=Causal(), kernel="reference")

    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(*args), function(*args))


# ---- the operator ----------------------------------------------------------------------------------------------------


def test_importing_opkit_leaves_attention_for_later(child_environment):
    source = (
        "import sys, json, opkit; before = [m for m in sys.modules if m.startswith(('opkit.attn', 'opkit.masks'))]; "
        "opkit.masks.Causal(); opkit.attention; print(json.dumps([before, 'opkit.attn.api' in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env=child_environment
    )
    assert json.loads(run.stdout) == [[], True]


def test_modules_with_kernels_register_them_when_the_operator_is_first_asked_for(child_environment):
    source = """
import sys, types, torch, opkit
from opkit.attn import operator
mine = types.ModuleType("mine")
mine.register = lambda op: op.register_kernel("cpu", op.reference, name="mine", dtypes=[torch.float32])
sys.modules["mine"], operator.KERNELS = mine, ("mine",)
q = torch.zeros(1, 1, 2, 4)
from opkit.attn.api import select
print(select(q, q, q).kernel, select(q.double(), q.double(), q.double()).kernel)
"""
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env=child_environment
    )
    assert run.stdout.split() == ["mine", "reference"]


def test_opkit_has_no_other_attributes():
    with pytest.raises(AttributeError, match="module 'opkit' has no attribute 'atention'"):
        opkit.atention  # noqa: B018


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_its_contract(kind):
    """The kernels take delta from the result, which is rounded to the narrow dtype: gradients that cancel show it."""
    exclude = ["compile", "gradients.dtypes"]
    report = opkit.check(attention_operator(), args=arguments(kind), max_examples=4, exclude=exclude, database=False)
    report.raise_for_failures()
    passed = {each.property for each in report.passed}
    assert not {*ASKED.split(), *WITH_INTEGERS[kind]} - passed


test_it_is_exported = contract(
    attention_operator(), args=arguments("masked"), max_examples=2, properties=["compile.export"]
)
