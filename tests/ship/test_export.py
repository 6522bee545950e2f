"""Models that were exported and loaded again give the results of their modules."""

import collections
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit
from opkit.errors import ArgumentError, CompileError

Dim = torch.export.Dim


def reloaded(model, args=(), kwargs=None, *, path, **options):
    opkit.export(model, args, kwargs, path=path / "model.opk", **options)
    return opkit.load(path / "model.opk")


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 weights are not packed, and transposed
def test_narrow_storage(tmp_path, storage, dtype):
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 8)).eval().to(dtype)
    x = torch.randn(3, 64, dtype=dtype)
    loaded = reloaded(model, (x,), path=tmp_path, storage=storage)
    torch.testing.assert_close(loaded(x), model(x).detach(), atol=0.1, rtol=0.1)
    narrow = (tmp_path / "model.opk").stat().st_size
    reloaded(model, (x,), path=tmp_path)
    weights = sum(each.nbytes for each in model.parameters())
    assert storage == dtype or narrow < (tmp_path / "model.opk").stat().st_size - 0.35 * weights


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
