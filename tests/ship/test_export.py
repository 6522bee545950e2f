"""Models that were exported and loaded again give the results of their modules."""

import collections
import gc
import os
import subprocess
import sys
import textwrap

import fresh_process
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import opkit
from opkit.errors import ArgumentError, CompileError, ModelFileError
from opkit.masks import Causal
from opkit.ship import processors

Dim = torch.export.Dim


def reloaded(model, args=(), kwargs=None, *, path, **options):
    opkit.export(model, args, kwargs, path=path / "model.opk", **options)
    return opkit.load(path / "model.opk")


def run_alone(script, folder):
    """Run a script in a process that knows none of the operators of this one."""
    environment = {**os.environ, "OPKIT_CACHE_DIR": str(folder / "cache")}
    return fresh_process.run(["-c", textwrap.dedent(script)], environment, check=False)


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.norm(self.up(x))))


class Convolutions(nn.Module):
    """Batch norm after convolutions of all kinds, a product, and nothing; ReLU and a sum after it."""

    def __init__(self):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.grouped, self.grouped_norm = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8, affine=False)
        self.wide, self.wide_norm = nn.ConvTranspose2d(8, 6, 3, stride=2), nn.BatchNorm2d(6)
        self.alone, self.linear, self.linear_norm = nn.BatchNorm2d(6), nn.Linear(6, 5), nn.BatchNorm1d(5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1)
                module.running_var.uniform_(0.5, 2)
                if module.affine:
                    nn.init.uniform_(module.weight, 0.5, 2)
                    nn.init.uniform_(module.bias, -1, 1)

    def forward(self, x):
        y = F.relu(self.first_norm(self.first(x)))
        y = F.relu(y + self.grouped_norm(self.grouped(y)))
        z = self.alone(F.max_pool2d(self.wide_norm(self.wide(y)), 2))
        return self.linear_norm(self.linear(z.mean((2, 3)))), z.flatten(1)


@pytest.mark.parametrize("freeze", [True, False])
def test_sizes_that_change(tmp_path, freeze):
    model = Mlp().eval()
    loaded = reloaded(
        model, (torch.randn(3, 4),), path=tmp_path, dynamic_shapes=({0: Dim("batch", max=64)},), freeze=freeze
    )
    for x in (torch.randn(5, 4), torch.randn(64, 4), torch.randn(4, 7).t(), torch.randn(6, 4, requires_grad=True)):
        torch.testing.assert_close(loaded(x), model(x).detach())
        assert not loaded(x).requires_grad


@pytest.mark.parametrize("sizes", [(2, 3, 8, 8), (1, 3, 13, 9)])
def test_batch_norm_is_folded(tmp_path, sizes):
    model, x = Convolutions().eval(), torch.randn(sizes)
    loaded = reloaded(model, (x,), path=tmp_path)
    expected = Convolutions().eval()
    expected.load_state_dict(model.state_dict())
    for found, wanted in zip(loaded(x), expected.double()(x.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


class Arguments(nn.Module):
    def forward(self, x, options, scale=2, *, other=None):
        doubled = x * scale if other is None else x * scale + other["bias"]
        return {"sum": doubled.sum(), "pair": (x, options[0] + 1)}, Point(doubled, 3), None


Point = collections.namedtuple("Point", "x y")


def test_structures(tmp_path):
    x, y = torch.randn(3), torch.randn(2)
    kwargs = {"scale": 3, "other": {"bias": torch.ones(3)}}
    loaded = reloaded(Arguments(), (x, [y]), kwargs, path=tmp_path)
    named, point, nothing = loaded(x, [y], other=kwargs["other"], scale=3)
    torch.testing.assert_close(named["sum"], (3 * x + 1).sum())
    torch.testing.assert_close(named["pair"], (x, y + 1))
    torch.testing.assert_close(point.x, 3 * x + 1)
    assert (point.y, nothing) == (3, None)


@pytest.fixture(scope="module")
def up_to_64_rows(tmp_path_factory):
    shapes = ({0: Dim("batch", max=64)},)
    return reloaded(Mlp().eval(), (torch.randn(3, 4),), path=tmp_path_factory.mktemp("model"), dynamic_shapes=shapes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m(torch.ones(65, 4)), "the size 65.*from 0 to 64|the size 65.*from 2 to 64"),
        (lambda m, x: m(torch.ones(3, 5)), r"float32\[3, 5\] on cpu, and the model takes float32\[.*, 4\]"),
        (lambda m, x: m(x.double()), r"float64\[3, 4\]"),
        (lambda m, x: m([[1.0]]), "is a list"),
        (lambda m, x: m(x, x), "2 values"),
        (lambda m, x: m(y=x), "0 values|'y'"),
    ],
)
def test_arguments_that_do_not_fit(up_to_64_rows, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(up_to_64_rows, torch.randn(3, 4))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, row, at, out):
        self.calls += 1
        self.cache.index_copy_(0, at, row)
        out.mul_(2)
        return self.cache.sum(0) + self.calls


def test_tensors_that_are_written(tmp_path):
    model = Counter()
    row, at, out = torch.ones(1, 3), torch.tensor([2]), torch.ones(2)
    loaded = reloaded(model, (row, at, out.clone()), path=tmp_path)
    model.calls.zero_()
    model.cache.zero_()
    for n in range(3):
        mine, theirs = torch.ones(2), torch.ones(2)
        torch.testing.assert_close(loaded(row + n, at, mine), model(row + n, at, theirs))
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(loaded.state_dict(), dict(model.state_dict()))
    with pytest.raises(ArgumentError, match="writes to it"):
        loaded(row, at, torch.ones(4)[::2])


def test_weights_that_are_replaced(tmp_path):
    model, other, x = Mlp().eval(), Mlp().eval(), torch.randn(3, 4)
    loaded = reloaded(model, (x,), path=tmp_path, freeze=False)
    loaded.load_state_dict(other.state_dict())
    torch.testing.assert_close(loaded(x), other(x).detach())
    with pytest.raises(ArgumentError, match=r"'up.weight' is of the shape \(2, 2\)"):
        loaded.load_state_dict({"up.bias": model.up.bias, "up.weight": torch.ones(2, 2)})
    torch.testing.assert_close(loaded(x), other(x).detach())
    with pytest.raises(ArgumentError, match="freeze=False"):
        reloaded(model, (x,), path=tmp_path).load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    "storage", ["int8", *(pytest.param(d, marks=pytest.mark.exhaustive) for d in (torch.bfloat16, torch.float8_e4m3fn))]
)
def test_narrow_storage(tmp_path, storage):
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).eval(), torch.randn(3, 64)
    loaded = reloaded(model, (x,), path=tmp_path, storage=storage)
    torch.testing.assert_close(loaded(x), model(x).detach(), atol=0.1, rtol=0.1)
    narrow = (tmp_path / "model.opk").stat().st_size
    reloaded(model, (x,), path=tmp_path)
    assert narrow < 0.6 * (tmp_path / "model.opk").stat().st_size


def test_entries_share_weights(tmp_path):
    model, x = nn.Embedding(1000, 64), torch.tensor([1, 2])
    one = torch.export.export(model, (x,))
    two = torch.export.export(nn.Sequential(model, nn.Tanh()), (x,))
    path = opkit.export({"rows": one, "tanh": two}, path=tmp_path / "model.opk")
    loaded = opkit.load(path)
    torch.testing.assert_close(loaded.entries["rows"](x), model(x).detach())
    torch.testing.assert_close(loaded.entries["tanh"](x), model(x).tanh().detach())
    assert path.stat().st_size < 1.5 * model.weight.nbytes
    with pytest.raises(ArgumentError, match="'rows', 'tanh'"):
        loaded(x)


@pytest.mark.parametrize("freeze", [True, False])
def test_results_that_are_constants(tmp_path, freeze):
    class Model(nn.Module):
        def forward(self, x):
            return torch.arange(3) * 2, x

    x = torch.ones(3)
    loaded = reloaded(Model(), (x,), path=tmp_path, freeze=freeze)
    for _ in range(2):
        table, same = loaded(x)
        assert table.tolist() == [0, 2, 4]
        table.zero_()
        torch.testing.assert_close(same, x)


def test_an_entry_outlives_its_model(tmp_path):
    model, x = Convolutions().eval(), torch.randn(2, 3, 8, 8)
    entry = reloaded(model, (x,), path=tmp_path).entries[""]
    gc.collect()
    torch.testing.assert_close(entry(x), model(x), atol=1e-5, rtol=1e-5)


def test_entries_with_state(tmp_path):
    row, at, out = torch.ones(1, 3), torch.tensor([2]), torch.ones(2)
    counter = Counter()
    programs = {name: torch.export.export(counter, (row, at, out.clone())) for name in ("one", "same")}
    programs["other"] = torch.export.export(Counter(), (row, at, out.clone()))
    loaded = opkit.load(opkit.export(programs, path=tmp_path / "model.opk"))
    for name in ("one", "same", "one", "other"):
        loaded.entries[name](row, at, out)
    counts = {name: int(loaded.state_dict()[name]) for name in ("calls", "other.calls")}
    assert counts == {"calls": 3, "other.calls": 1}


def test_programs_stay_as_they_are(tmp_path):
    class Model(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool).tril())

    q = torch.randn(1, 2, 3, 8)
    program = torch.export.export(Model(), (q,))
    before = str(program.graph)
    torch.testing.assert_close(opkit.load(opkit.export(program, path=tmp_path / "model.opk"))(q), Model()(q))
    assert str(program.graph) == before
    torch.testing.assert_close(program.module()(q), Model()(q))


def test_instruction_sets(tmp_path, monkeypatch):
    x = torch.randn(3, 4)
    model = nn.Tanh()
    path = opkit.export(model, (x,), path=tmp_path / "model.opk", isa=("baseline", "avx2", "avx512"))
    torch.testing.assert_close(opkit.load(path)(x), model(x))
    monkeypatch.setattr(processors, "features", frozenset)
    torch.testing.assert_close(opkit.load(path)(x), model(x))
    path = opkit.export(model, (x,), path=tmp_path / "model.opk", isa="avx2")
    with pytest.raises(ModelFileError, match="made for avx2, which needs abm avx2"):
        opkit.load(path)
    with pytest.raises(ArgumentError, match="isa='avx3'"):
        opkit.export(model, (x,), path=path, isa="avx3")


@pytest.mark.parametrize("storage", [None, "int8"])
def test_instruction_sets_share_weights(tmp_path, storage):
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval(), torch.randn(3, 256)
    one, three = (
        opkit.export(model, (x,), path=tmp_path / "model.opk", isa=isa, storage=storage).stat().st_size
        for isa in ("baseline", ("baseline", "avx2", "avx512"))
    )
    assert three < 1.5 * one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.2.3"}, "made by torch 1.2.3"),
        ({"opkit": "9.9"}, "made by opkit 9.9"),
        ({"machine": "riscv64"}, "made for riscv64"),
        ({"device": "cuda"}, "made for the device cuda"),
    ],
)
def test_files_for_others(tmp_path, monkeypatch, change, message):
    made_for = processors.made_for
    monkeypatch.setattr(processors, "made_for", lambda device: made_for(device) | change)
    path = opkit.export(nn.Tanh(), (torch.ones(2),), path=tmp_path / "model.opk")
    with pytest.raises(ModelFileError, match=message):
        opkit.load(path, device="cpu")


def test_a_process_without_a_compiler(tmp_path):
    model, x = Mlp().eval(), torch.randn(3, 4)
    path = opkit.export(model, (x,), path=tmp_path / "model.opk")
    torch.save((x, model(x).detach()), tmp_path / "call.pt")
    script = f"""
        import sys, torch, opkit
        x, expected = torch.load({str(tmp_path / "call.pt")!r})
        result = opkit.load({str(path)!r})(x)
        print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
        torch.testing.assert_close(result, expected)
    """
    paths, cache = os.pathsep.join(sys.path), str(tmp_path / "cache")
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": "", "OPKIT_CC": "/no/compiler", "OPKIT_CACHE_DIR": cache}
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
    assert not (tmp_path / "cache").exists()


def test_calls_under_autocast_and_without_gradients(tmp_path):
    model, x = Mlp().eval(), torch.randn(3, 4)
    loaded = reloaded(model, (x,), path=tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert loaded(x).dtype is torch.float32


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (3, (), "neither a module"),
        ({"one": nn.Tanh()}, (), "the entry 'one' is a Tanh"),
        (nn.Tanh(), torch.ones(2), r"write \(x,\)"),
    ],
)
def test_models_that_are_none(tmp_path, model, args, message):
    with pytest.raises(ArgumentError, match=message):
        opkit.export(model, args, path=tmp_path / "model.opk")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ArgumentError, match="folder that does not exist"):
        opkit.export(nn.Tanh(), (torch.ones(2),), path=tmp_path / "none" / "model.opk")


class Nonzero(nn.Module):
    def forward(self, x):
        return x.nonzero()


def test_what_cannot_be_compiled(tmp_path):
    with pytest.raises(CompileError, match="depends on the values"):
        opkit.export(Nonzero(), (torch.ones(2),), path=tmp_path / "model.opk")


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
    shapes = ({0: Dim("rows")},)
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
