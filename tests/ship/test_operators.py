"""Saved models that call operators of opkit's: their kernels are in the file, or the operators must be defined."""

import os
import textwrap

import fresh_process
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import opkit
from opkit.errors import CompileError
from opkit.masks import Causal


def run_alone(script, folder):
    """Run a script in a process that knows none of the operators of this one."""
    environment = {**os.environ, "OPKIT_CACHE_DIR": str(folder / "cache")}
    return fresh_process.run(["-c", textwrap.dedent(script)], environment, check=False)


def test_kernels_of_operators_are_in_the_file(tmp_path):
    @opkit.custom_op("ship::scaled")
    def scaled(x: Float[Tensor, "rows columns"], scale: float) -> Float[Tensor, "rows columns"]:
        return x * scale

    @opkit.custom_op("ship::cube")
    def cube(x: Tensor) -> Tensor:
        return x**3

    loop = "for (int64_t i = 0; i < out_numel; i++) out[i] ="
    scaled.register_kernel(
        "cpu",
        opkit.c_kernel(f"void scaled(const T* x, double scale, T* out, int64_t out_numel) {{ {loop} x[i] * scale; }}"),
    )
    cube.register_kernel(
        "cpu",
        opkit.c_kernel(
            f"void cube(const T* x, T* out, int64_t out_numel) {{ {loop} x[i] * x[i] * x[i]; }}", elementwise=True
        ),
    )

    class Model(nn.Module):
        def forward(self, x):
            return scaled(cube(x + 1), 3.0) * 2

    x = torch.randn(5, 4)
    shapes = ({0: torch.export.Dim("rows")},)
    path = opkit.export(Model(), (x,), path=tmp_path / "model.opk", dynamic_shapes=shapes)
    torch.save((x[:3], 6 * (x[:3] + 1) ** 3), tmp_path / "call.pt")
    done = run_alone(
        f"""
        import torch, opkit
        x, expected = torch.load({str(tmp_path / "call.pt")!r})
        torch.testing.assert_close(opkit.load({str(path)!r})(x), expected)
        print("done")
        """,
        tmp_path,
    )
    assert done.stdout == "done\n", done.stderr
    torch.testing.assert_close(opkit.load(path)(x), 6 * (x + 1) ** 3)


def test_files_have_kernels_of_their_own(tmp_path):
    """Two operators of one name, each with several kernels, of which its file has one."""

    class Model(nn.Module):
        def __init__(self, op):
            super().__init__()
            self.op = op

        def forward(self, x):
            return self.op(x + 1) * 2

    calls = {}
    for add, shape in ((1000, (3, 4)), (500, (3, 1, 5))):
        shifted = opkit.custom_op(
            "ship::shifted", lambda x, by=2.0: x + by, schema="(Tensor x, float by=2.0) -> Tensor"
        )
        loop = "for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] + by"
        for dtype in ("float64", "float32"):
            kernel = f"void shift(const T* x, double by, T* out, int64_t x_numel) {{ {loop} + {add}; }}"
            shifted.register_kernel("cpu", opkit.c_kernel(kernel, dtypes=[dtype]), name=dtype)
        x = torch.randn(shape)
        shapes = ({0: torch.export.Dim("rows")},)
        path = opkit.export(Model(shifted), (x,), path=tmp_path / f"{add}.opk", dynamic_shapes=shapes)
        calls[str(path)] = [(x[:n], (x[:n] + 3 + add) * 2) for n in (3, 1)]
        torch.testing.assert_close(opkit.load(path)(x), (x + 3 + add) * 2)
        opkit.remove("ship::shifted")
    torch.save(calls, tmp_path / "calls.pt")
    done = run_alone(
        f"""
        import gc, torch, opkit
        calls = torch.load({str(tmp_path / "calls.pt")!r})
        loaded = {{path: opkit.load(path) for path in calls}}
        for path in calls:
            for x, expected in calls[path]:
                torch.testing.assert_close(loaded[path](x), expected)
            del loaded[path]
            gc.collect()
        print("done")
        """,
        tmp_path,
    )
    assert done.stdout == "done\n", done.stderr


def test_layouts_of_outputs_are_the_programs(tmp_path):
    @opkit.custom_op("ship::first_and_twice", mutates_args=())
    def first_and_twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[0] + 1, x.contiguous() * 2

    source = """
        void f(const T* x, T* out0, T* out1, int64_t x_numel, int64_t out0_numel) {
            for (int64_t i = 0; i < out0_numel; i++) out0[i] = x[i] + 1;
            for (int64_t i = 0; i < x_numel; i++) out1[i] = 2 * x[i];
        }"""
    first_and_twice.register_kernel("cpu", opkit.c_kernel(source))

    class Both(nn.Module):
        def forward(self, x):
            return first_and_twice(x.t())

    class One(nn.Module):
        def forward(self, x):
            return first_and_twice(x + 1)[1] + 1

    x, shapes = torch.randn(5, 4), ({0: torch.export.Dim("rows")},)
    for model, counts in ((Both(), (5, 1, 0)), (One(), (5, 1))):
        loaded = opkit.load(opkit.export(model, (x,), path=tmp_path / "model.opk", dynamic_shapes=shapes))
        for n in counts:
            torch.testing.assert_close(loaded(x[:n]), model(x[:n]))


def test_a_choice_that_sizes_decide_is_not_in_the_file(tmp_path):
    @opkit.custom_op("ship::conditional")
    def conditional(x: Tensor) -> Tensor:
        return x + 1

    source = "void f(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] + 1; }"
    conditional.register_kernel("cpu", opkit.c_kernel(source), when=lambda x: x.shape[0] > 2)

    class Model(nn.Module):
        def forward(self, x):
            return conditional(x) * 2

    x = torch.randn(3)
    load = "import opkit; opkit.load({!r}); print('done')"
    path = opkit.export(Model(), (x,), path=tmp_path / "fixed.opk")
    assert run_alone(load.format(str(path)), tmp_path).stdout == "done\n"
    shapes = ({0: torch.export.Dim("rows")},)
    path = opkit.export(Model(), (x,), path=tmp_path / "changing.opk", dynamic_shapes=shapes)
    assert "ship::conditional, whose kernel is not in the file" in run_alone(load.format(str(path)), tmp_path).stderr


def test_operators_that_write_to_their_arguments(tmp_path):
    @opkit.custom_op("ship::add_", mutates_args=("x",))
    def add_(x: Tensor, by: float) -> None:
        x.add_(by)

    source = "void add(T* x, double by, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) x[i] += by; }"
    add_.register_kernel("cpu", opkit.c_kernel(source))

    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            add_(y, 3.0)
            return y + 1

    with pytest.raises(
        CompileError, match=r"calls ship::add_, which writes to its arguments.* Let it return a new tensor"
    ):
        opkit.export(Model(), (torch.randn(3),), path=tmp_path / "model.opk")


def test_operators_whose_kernels_are_python(tmp_path):
    @opkit.custom_op("ship::python")
    def python(x: Tensor) -> Tensor:
        return x * 2

    @python.register_kernel("cpu")
    def _(x):
        return torch.from_numpy(x.numpy() * 2)

    class Model(nn.Module):
        def forward(self, x):
            return python(x) + 1

    x = torch.randn(3)
    path = opkit.export(Model(), (x,), path=tmp_path / "model.opk")
    torch.testing.assert_close(opkit.load(path)(x), 2 * x + 1)
    done = run_alone(f"import opkit; opkit.load({str(path)!r})", tmp_path)
    assert "calls the operator ship::python, whose kernel is not in the file. Import " in done.stderr


def test_attention(tmp_path):
    class Model(nn.Module):
        def forward(self, q, k, v):
            return opkit.attention(q, k, v, mask=Causal()) + 1

    q, k, v = torch.randn(3, 2, 4, 5, 16)
    path = opkit.export(Model(), (q, k, v), path=tmp_path / "model.opk")
    torch.save(((q, k, v), Model()(q, k, v)), tmp_path / "call.pt")
    done = run_alone(
        f"""
        import torch, opkit
        args, expected = torch.load({str(tmp_path / "call.pt")!r})
        torch.testing.assert_close(opkit.load({str(path)!r})(*args), expected)
        print("done")
        """,
        tmp_path,
    )
    assert done.stdout == "done\n", done.stderr
