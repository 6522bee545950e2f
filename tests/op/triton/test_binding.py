"""Names of parameters, and what they stand for; and what is said where they stand for nothing."""

import pytest
import triton
import triton.language as tl

import opkit
from opkit.errors import DeclarationError
from opkit.kernels.facts import Argument, Facts, Output, Shape
from opkit.op.triton.binding import bind

NORM = Facts(
    "t::norm",
    "t::norm(Tensor x, Tensor weight, float eps) -> Tensor",
    (
        Argument("x", "tensor", shape=Shape((), "batch", ("d",))),
        Argument("weight", "tensor", shape=Shape(("d",))),
        Argument("eps", "float"),
    ),
    (Output("out"),),
)
SEVERAL = Facts(
    "t::several",
    "t::several(...) -> (Tensor, Tensor(a!))",
    (
        Argument("x", "tensor", written=True),
        Argument("mask", "tensor", optional=True),
        Argument("n", "int"),
        Argument("k", "int", optional=True),
        Argument("flag", "bool"),
        Argument("mode", "str"),
        Argument("dtype", "dtype"),
        Argument("ns", "ints"),
    ),
    (Output("out0"), Output("out1", alias=0)),
)


def bound(function, facts=NORM, **options):
    return bind(opkit.triton_kernel(function, **{"grid": 1, **options}), facts)


def source_of(function, name, facts=NORM, **options):
    made = bound(function, facts, **options)
    return made.sources[made.runtime[name]]


def role_of(function, name, facts=NORM, **options):
    made = bound(function, facts, **options)
    return made.roles[made.runtime[name]]


@triton.jit
def by_name(x, weight_ptr, eps, out, d, batch, x_numel, weight_rank, x_ndim, x_size_0, x_size_m1, out_stride_m2):
    pass


# ---- names -----------------------------------------------------------------------------------------------------------


def test_what_names_stand_for():
    for name, origin, argument, detail in (
        ("x", "TENSOR", 0, 0),
        ("weight_ptr", "TENSOR", 1, 0),
        ("eps", "SCALAR", 2, 0),
        ("out", "TENSOR", 3, 0),
        ("batch", "NAMED_SIZE", 0, 0),
        ("d", "NAMED_SIZE", 0, 1),
        ("x_numel", "NUMEL", 0, 0),
        ("weight_rank", "RANK", 1, 0),
        ("x_ndim", "RANK", 0, 0),
        ("x_size_0", "SIZE", 0, 0),
        ("x_size_m1", "SIZE", 0, -1),
        ("out_stride_m2", "STRIDE", 3, -2),
    ):
        source = source_of(by_name, name)
        assert (source.origin, source.argument, source.detail) == (origin, argument, detail), name


def test_strides_that_are_told():
    assert bound(by_name).strided == {3: (-2,)}


def test_optional_scalars_texts_lists_and_dtypes():
    @triton.jit
    def kernel(x, mask, n, k, flag, mode: tl.constexpr, dtype: tl.constexpr, ns: tl.constexpr, ns_len, out0):
        pass

    made = bound(kernel, SEVERAL)
    assert made.sources[made.runtime["k"]].origin == "SCALAR_POINTER"
    assert made.sources[made.runtime["ns_len"]].origin == "LENGTH"
    assert {f.name for f in made.formulas} == {"mode", "dtype", "ns"}
    roles = {source.name: role for source, role in zip(made.sources, made.roles, strict=True)}
    assert (roles["mode"], roles["dtype"], roles["ns"]) == ("text", "exact", "ints")
    assert roles["flag"] == "bool"


def test_an_output_that_is_an_argument_is_that_argument():
    @triton.jit
    def kernel(out0, out1):
        pass

    made = bound(kernel, SEVERAL)
    assert made.sources[made.runtime["out1"]].argument == 0
    assert [made.sources[i].name for i in made.written] == ["out1"]


def test_outputs_have_other_names_too():
    @triton.jit
    def kernel(x, y, y_numel):
        pass

    made = bound(kernel, outputs=("y",))
    assert made.sources[made.runtime["y"]].argument == 3
    assert made.sources[made.runtime["y_numel"]].argument == 3


def test_an_argument_goes_before_an_output_and_a_size():
    facts = Facts("t::f", "", (Argument("out", "tensor"), Argument("n", "int")), (Output("out"),))

    @triton.jit
    def kernel(out, n, result):
        pass

    made = bound(kernel, facts, outputs=("result",))
    assert [made.sources[made.runtime[name]].argument for name in ("out", "n", "result")] == [0, 1, 2]


def test_bind_gives_other_meanings():
    @triton.jit
    def kernel(input_ptr, output_ptr, count):
        pass

    made = bound(kernel, bind={"input_ptr": "x", "output_ptr": "out", "count": "x_numel"})
    assert [made.sources[made.runtime[name]].name for name in ("input_ptr", "output_ptr", "count")] == [
        "x",
        "out",
        "x_numel",
    ]


def test_what_is_given_goes_before_names():
    @triton.jit
    def kernel(x, out, d):
        pass

    made = bound(kernel, d=7)
    assert made.constants == {"d": 7, "grid": 1}
    assert "d" not in made.runtime


def test_a_default_serves_where_nothing_has_the_name():
    @triton.jit
    def kernel(x, out, other=None, d=5, BLOCK: tl.constexpr = 64):
        pass

    made = bound(kernel)
    assert made.constants == {"other": None, "BLOCK": 64, "grid": 1}
    assert made.sources[made.runtime["d"]].origin == "NAMED_SIZE"


def test_a_constexpr_of_a_size_is_known_when_compiling():
    @triton.jit
    def kernel(x, out, d: tl.constexpr):
        pass

    made = bound(kernel)
    assert "d" not in made.runtime
    assert [f.name for f in made.formulas] == ["d"]
    assert dict(zip([s.name for s in made.sources], made.roles, strict=True))["d"] == "exact"


def test_functions_and_types_of_tritons_are_values():
    @triton.jit
    def square(x):
        return x * x

    @triton.jit
    def kernel(x, out, f: tl.constexpr, t: tl.constexpr):
        pass

    assert bound(kernel, f=square, t=tl.float32).constants == {"f": square, "t": tl.float32, "grid": 1}


# ---- roles -----------------------------------------------------------------------------------------------------------


def test_what_of_each_value_decides_the_variant():
    assert [role_of(by_name, name) for name in ("x", "eps", "d", "x_size_0")] == ["tensor", "float", "int", "int"]


def test_what_a_function_asks_for_decides_by_its_value():
    options = {"grid": lambda x, d, eps: d}
    assert [role_of(by_name, name, **options) for name in ("x", "d", "eps")] == ["info", "exact", "float_exact"]
    assert role_of(by_name, "batch", **options) == "int"


def test_what_triton_is_told_not_to_specialise():
    @triton.jit(do_not_specialize=["d"], do_not_specialize_on_alignment=["batch", "x"])
    def kernel(x, out, d, batch):
        pass

    assert [role_of(kernel, name) for name in ("x", "out", "d", "batch")] == [
        "tensor_any",
        "tensor",
        "int_width",
        "int_noalign",
    ]


def test_meta_asks_for_everything():
    made = bound(by_name, grid=lambda meta: (meta["d"],))
    roles = {source.name: role for source, role in zip(made.sources, made.roles, strict=True)}
    assert roles["x"] == "info"
    assert roles["d"] == "exact"


def test_configs_are_chosen_by_shapes():
    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr):
        pass

    made = bound(kernel, configs=[{"BLOCK": 1}, {"BLOCK": 2}])
    roles = {source.name: role for source, role in zip(made.sources, made.roles, strict=True)}
    assert roles == {"x": "info", "out": "info", "weight": "info", "batch": "exact", "d": "exact"}


def test_configs_and_options_are_the_compilers():
    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr):
        pass

    made = bound(kernel, configs=[{"BLOCK": 1, "num_warps": 2}], num_stages=lambda BLOCK: 3)
    assert made.options == {"num_warps", "num_stages"}
    assert [f.name for f in made.formulas] == ["num_stages"]


def test_what_a_config_does_not_say_has_a_default():
    @triton.jit
    def kernel(x, out, BLOCK: tl.constexpr, ROWS: tl.constexpr = 4):
        pass

    made = bound(kernel, configs=[{"BLOCK": 1}, {"BLOCK": 1, "ROWS": 2}])
    assert made.constants == {"ROWS": 4, "grid": 1}


def test_decorators_are_read():
    @triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["d"], reset_to_zero=["out"])
    @triton.heuristics({"EVEN": lambda args: args["d"] % args["BLOCK"] == 0})
    @triton.jit
    def kernel(x, out, d, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        pass

    made = bound(kernel)
    assert [config.constexprs["BLOCK"] for config in made.kernel.configs] == [64, 128]
    assert made.kernel.reset_to_zero == ("out",)
    assert [f.name for f in made.formulas] == ["EVEN"]
    assert made.formulas[0]({"d": 128, "BLOCK": 64}) is True


# ---- mistakes --------------------------------------------------------------------------------------------------------


@triton.jit
def misnamed(x, out, numel):
    pass


@triton.jit
def blocked(x, out, BLOCK: tl.constexpr):
    pass


@triton.jit
def untaken(x, d):
    pass


@triton.jit
def weight_known(out, weight: tl.constexpr):
    pass


def test_mistakes():
    for function, options, said in (
        (
            misnamed,
            {},
            r"t::norm, kernel 'misnamed': 'numel' stands for nothing that the operator has. It could be x, weight, eps, out, "
            r"batch, d, .* Nearest: .*x_numel.* Rename the parameter, give it a value \(numel=...\), or say what it stands for: "
            r"bind=\{'numel': ...\}",
        ),
        (misnamed, {"bind": {"numel": "y_numel"}}, r"'y_numel' stands for nothing .* Nearest: x_numel"),
        (untaken, {}, r"no parameter receives the output out, which would be left unwritten. Add out"),
        (untaken, {"outputs": ("y",)}, r"no parameter receives the output y, which would be left unwritten"),
        (weight_known, {}, r"the parameter weight is a constexpr, and weight is a tensor"),
        (blocked, {"outputs": ("out", "more"), "BLOCK": 1}, r"outputs= has 2 names, and the operator has 1 outputs"),
        (blocked, {"BLOCK": lambda width: width}, r"the function for BLOCK takes 'width', which stands for nothing"),
        (blocked, {"BLOCK": 1, "grid": lambda widht: 1}, r"the function for grid takes 'widht'"),
        (blocked, {"BLOCK": lambda *sizes: 1}, r"the function for BLOCK takes \*args or \*\*kwargs"),
        (blocked, {"BLOCK": lambda **sizes: 1}, r"the function for BLOCK takes \*args or \*\*kwargs"),
        (blocked, {"BLOCK": lambda BLOCK: 1}, r"the function for BLOCK takes 'BLOCK', which stands for nothing"),
        (
            blocked,
            {"BLOCK": lambda num_warps: 1, "num_warps": lambda BLOCK: 4},
            r"the functions for num_warps, BLOCK take each other's values",
        ),
        (
            blocked,
            {"BLOCK": opkit.tensor_descriptor("y", block=(1,))},
            r"tensor_descriptor\('y'\): the tensors are x, weight",
        ),
        (
            blocked,
            {"BLOCK": opkit.tensor_descriptor("eps", block=(1,))},
            r"tensor_descriptor\('eps'\): the tensors are",
        ),
        (
            blocked,
            {"configs": [{"BLOK": 64}]},
            r"'BLOK' in .* is neither a parameter of the kernel nor a compile option",
        ),
        (
            blocked,
            {"configs": [{"BLOCK": 1}, {"num_warps": 4}]},
            r"the config num_warps=4 has no value for BLOCK, as others do. Add it",
        ),
        (
            blocked,
            {"configs": [{"BLOCK": 1}], "BLOCK": lambda x: 2},
            r"BLOCK has a value, and the config BLOCK=1 gives it another",
        ),
        (blocked, {"configs": ["BLOCK"]}, r"configs: 'BLOCK' is no configuration"),
        (blocked, {"BLOK": 64}, r"'BLOK' is neither a parameter \(x, out, BLOCK\) nor an option .* Nearest: BLOCK"),
        (blocked, {"num_warp": 4}, r"'num_warp' is neither .* Nearest: num_warps"),
        (blocked, {"bind": {"y": "x"}}, r"bind=: 'y' is neither a parameter"),
        (blocked, {"grid": "one"}, r"grid='one' is neither a number, a tuple nor a function"),
        (
            blocked,
            {"BLOCK": 1, "reset_to_zero": ("total",)},
            r"reset_to_zero names 'total'; the tensors are x, weight, out",
        ),
        (len, {}, r"takes a function decorated with @triton.jit .* got <built-in function len>"),
    ):
        with pytest.raises(DeclarationError, match=said):
            pytest.fail(f"{options} was taken, and not refused by {said!r}: {bound(function, **options)}")


def test_a_descriptors_padding():
    with pytest.raises(DeclarationError, match=r"tensor_descriptor\('x', padding='one'\): it is \"zero\" or \"nan\""):
        opkit.tensor_descriptor("x", block=(1,), padding="one")
