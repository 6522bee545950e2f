"""What the contract hash covers."""

from __future__ import annotations

import abc
import collections
import contextvars
import dataclasses
import decimal
import functools
import operator
import re
import sys
import textwrap
import threading
import types
from pathlib import Path

import numpy as np
import torch
from torch.testing._internal.two_tensor import TwoTensor

import opkit
from opkit.op.trace.contract_hash import contract_hash

HELPER = 2.0


def helper(x):
    return x * HELPER


class Scaler:
    factor = 2

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, x):
        return x * self.factor + self.bias


def hash_of(value):
    return contract_hash([("part", value)])


def made(source, name="f", **scope):
    """The function ``name`` that ``source`` defines."""
    namespace = {"__name__": "users_module", "torch": torch, "functools": functools, **scope}
    exec(textwrap.dedent(source), namespace)
    return namespace[name]


def closure(value):
    def f(x):
        return x * value

    return f


EDITS = {
    "body": ("def f(x): return x * 2", "def f(x): return x + 2"),
    "constant": ("def f(x): return x * 2", "def f(x): return x * 3"),
    "default": ("def f(x, a=1): return x * a", "def f(x, a=2): return x * a"),
    "keyword default": ("def f(x, *, a=1): return x * a", "def f(x, *, a=2): return x * a"),
    "name of a torch function": ("def f(x): return x.sin()", "def f(x): return x.cos()"),
    "global": ("A = 1\ndef f(x): return x * A", "A = 2\ndef f(x): return x * A"),
    "global in a container": (
        "A = {'a': [1]}\ndef f(x): return x * A['a'][0]",
        "A = {'a': [2]}\ndef f(x): return x * A['a'][0]",
    ),
    "helper": ("def g(x): return x * 2\ndef f(x): return g(x)", "def g(x): return x * 3\ndef f(x): return g(x)"),
    "helper of a helper": (
        "def h(x): return x * 2\ndef g(x): return h(x)\ndef f(x): return g(x)",
        "def h(x): return x * 3\ndef g(x): return h(x)\ndef f(x): return g(x)",
    ),
    "nested function": (
        "def f(x):\n  def g(y): return y * 2\n  return g(x)",
        "def f(x):\n  def g(y): return y * 3\n  return g(x)",
    ),
    "lambda": ("f = lambda x: x * 2", "f = lambda x: x * 3"),
    "lambda in a comprehension": ("def f(x): return [y * 2 for y in x]", "def f(x): return [y * 3 for y in x]"),
    "partial": (
        "def g(x, a): return x * a\nf = functools.partial(g, a=2)",
        "def g(x, a): return x * a\nf = functools.partial(g, a=3)",
    ),
    "partial global": (
        "def g(x, a): return x * a\np = functools.partial(g, a=2)\ndef f(x): return p(x)",
        "def g(x, a): return x * a\np = functools.partial(g, a=3)\ndef f(x): return p(x)",
    ),
    "method": (
        "class C:\n  def m(self, x): return x * 2\nc = C()\ndef f(x): return c.m(x)",
        "class C:\n  def m(self, x): return x * 3\nc = C()\ndef f(x): return c.m(x)",
    ),
    "static method": (
        "class C:\n  @staticmethod\n  def m(x): return x * 2\ndef f(x): return C.m(x)",
        "class C:\n  @staticmethod\n  def m(x): return x * 3\ndef f(x): return C.m(x)",
    ),
    "inherited method": (
        "class B:\n  def m(self, x): return x * 2\nclass C(B): pass\ndef f(x): return C().m(x)",
        "class B:\n  def m(self, x): return x * 3\nclass C(B): pass\ndef f(x): return C().m(x)",
    ),
    "property": (
        "class C:\n  @property\n  def a(self): return 2\ndef f(x): return x * C().a",
        "class C:\n  @property\n  def a(self): return 3\ndef f(x): return x * C().a",
    ),
    "class attribute": ("class C:\n  a = 2\ndef f(x): return x * C.a", "class C:\n  a = 3\ndef f(x): return x * C.a"),
    "class attribute in a container": (
        "class C:\n  a = [2]\ndef f(x): return x * C.a[0]",
        "class C:\n  a = [3]\ndef f(x): return x * C.a[0]",
    ),
    "instance": (
        "class C:\n  def __init__(self, a): self.a = a\nc = C(2)\ndef f(x): return x * c.a",
        "class C:\n  def __init__(self, a): self.a = a\nc = C(3)\ndef f(x): return x * c.a",
    ),
    "slots": (
        "class C:\n  __slots__ = ('a',)\nc = C(); c.a = 2\ndef f(x): return x * c.a",
        "class C:\n  __slots__ = ('a',)\nc = C(); c.a = 3\ndef f(x): return x * c.a",
    ),
    "enum": (
        "import enum\nclass E(enum.Enum):\n  A = 2\ndef f(x): return x * E.A.value",
        "import enum\nclass E(enum.Enum):\n  A = 3\ndef f(x): return x * E.A.value",
    ),
    "decorated": (
        "def d(g):\n  @functools.wraps(g)\n  def w(x): return g(x) * 2\n  return w\n@d\ndef f(x): return x",
        "def d(g):\n  @functools.wraps(g)\n  def w(x): return g(x) * 3\n  return w\n@d\ndef f(x): return x",
    ),
    "decorated inside": (
        "def d(g):\n  @functools.wraps(g)\n  def w(x): return g(x)\n  return w\n@d\ndef f(x): return x * 2",
        "def d(g):\n  @functools.wraps(g)\n  def w(x): return g(x)\n  return w\n@d\ndef f(x): return x * 3",
    ),
    "cached": (
        "@functools.cache\ndef g(a): return a * 2\ndef f(x): return x * g(1)",
        "@functools.cache\ndef g(a): return a * 3\ndef f(x): return x * g(1)",
    ),
    "tensor": (
        "t = torch.tensor([1.0, 2.0])\ndef f(x): return x * t",
        "t = torch.tensor([1.0, 3.0])\ndef f(x): return x * t",
    ),
    "scalar tensor": ("t = torch.tensor(1)\ndef f(x): return x * t", "t = torch.tensor(2)\ndef f(x): return x * t"),
    "bool tensor": (
        "t = torch.tensor([True])\ndef f(x): return x * t",
        "t = torch.tensor([False])\ndef f(x): return x * t",
    ),
    "tensor dtype": (
        "t = torch.zeros(2)\ndef f(x): return x * t",
        "t = torch.zeros(2).double()\ndef f(x): return x * t",
    ),
    "numpy array": (
        "import numpy as np\nt = np.array([1.0, 2.0])\ndef f(x): return x * torch.from_numpy(t)",
        "import numpy as np\nt = np.array([1.0, 3.0])\ndef f(x): return x * torch.from_numpy(t)",
    ),
    "module": (
        "m = torch.nn.Linear(1, 1, bias=False); m.weight.data.fill_(2)\ndef f(x): return m(x)",
        "m = torch.nn.Linear(1, 1, bias=False); m.weight.data.fill_(3)\ndef f(x): return m(x)",
    ),
    "dtype": ("def f(x): return x.to(torch.float16)", "def f(x): return x.to(torch.bfloat16)"),
    "int and float": ("def f(x): return x * 2", "def f(x): return x * 2.0"),
    "True and 1": ("A = True\ndef f(x): return x * A", "A = 1\ndef f(x): return x * A"),
    "recursion": ("def f(x): return x if x.sum() > 1 else f(x * 2)", "def f(x): return x if x.sum() > 1 else f(x * 3)"),
    "mutual recursion": (
        "def g(x): return f(x * 2)\ndef f(x): return g(x)",
        "def g(x): return f(x * 3)\ndef f(x): return g(x)",
    ),
    "order of a dictionary's values": (
        "D = {'a': 1, 'b': 2}\ndef f(x): return x * list(D.values())[0]",
        "D = {'b': 2, 'a': 1}\ndef f(x): return x * list(D.values())[0]",
    ),
}


def test_an_edit_changes_the_hash():
    for edit, (before, after) in EDITS.items():
        assert hash_of(made(before)) == hash_of(made(before)), edit
        assert hash_of(made(before)) != hash_of(made(after)), edit


OBJECTS = {
    "numpy": lambda n: np.array([n, None], dtype=object),
    "decimal": lambda n: decimal.Decimal(n),
    "pattern": lambda n: re.compile("a" * n),
    "path": lambda n: Path("a" * n),
    "deque": lambda n: collections.deque([n]),
    "defaultdict": lambda n: collections.defaultdict(list, a=n),
    "named tuple": lambda n: collections.namedtuple("Pair", "a")(n),
    "namespace": lambda n: types.SimpleNamespace(a=n),
    "dataclass": lambda n: Configuration(n),
    "abstract": lambda n: made(f"class A(abc.ABC):\n  a = {n}", "A", abc=abc),
    "item getter": lambda n: operator.itemgetter(n),
    "size": lambda n: torch.Size([n]),
    "sparse": lambda n: torch.tensor([0, n]).to_sparse(),
    "complex": lambda n: torch.tensor([n + 1j]),
    "conjugate": lambda n: torch.tensor([n + 1j]).conj(),
    "subclass": lambda n: TwoTensor(torch.ones(1), torch.full((1,), float(n))),
    "parameter": lambda n: torch.nn.Parameter(torch.tensor([float(n)])),
}


@dataclasses.dataclass
class Configuration:
    scale: float


def test_objects_of_many_kinds():
    for kind, make in OBJECTS.items():
        assert hash_of(closure(make(2))) == hash_of(closure(make(2))), kind
        assert hash_of(closure(make(2))) != hash_of(closure(make(3))), kind


def test_long_chains_of_objects():
    chain = None
    for _ in range(30_000):
        chain = [chain]
    assert hash_of(closure(chain)) == hash_of(closure(chain))
    assert hash_of(closure([2, chain])) != hash_of(closure([3, chain]))


def test_equal_constants_need_not_be_one_object():
    pair = (1, (2, 3))
    assert hash_of([pair, pair]) == hash_of([pair, (1, (2, int("3")))])


def test_objects_that_cannot_be_read_are_no_error():
    for value in (
        threading.Lock(),
        sys.stdout,
        iter([1]),
        (n for n in [1]),
        torch.Generator(),
        contextvars.ContextVar("v"),
        sys,
    ):
        assert hash_of(closure(value)) == hash_of(closure(value))


def test_imports_inside_a_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = set()
    for factor in (2, 3):
        (tmp_path / "imported_late.py").write_text(f"def helper(x):\n    return x * {factor}\n")
        for source in (
            "import imported_late as m\n    return m.helper(x)",
            "from imported_late import helper\n    return helper(x)",
        ):
            hashes.add(hash_of(made(f"def f(x):\n    {source}")))
    assert len(hashes) == 4


def test_comments_and_lines_do_not_matter():
    assert hash_of(made("def f(x): return x * 2")) == hash_of(
        made("\n\n# why\ndef f(x):\n    # because\n    return x * 2")
    )


def test_closures():
    assert hash_of(closure(2)) == hash_of(closure(2))
    assert hash_of(closure(2)) != hash_of(closure(3))
    assert hash_of(closure(torch.ones(2))) != hash_of(closure(torch.zeros(2)))
    assert hash_of(closure(helper)) != hash_of(closure(closure(1)))


def test_bound_methods_and_callable_objects():
    assert hash_of(Scaler(1)) == hash_of(Scaler(1))
    assert hash_of(Scaler(1)) != hash_of(Scaler(2))
    assert hash_of(Scaler(1).__call__) != hash_of(Scaler(2).__call__)


def test_sets_do_not_depend_on_their_order():
    assert hash_of(frozenset(["a", "b", "c"])) == hash_of(frozenset(["c", "b", "a"]))
    assert hash_of({"a"}) != hash_of({"b"})


def test_values_that_contain_themselves():
    value = [1]
    value.append(value)
    other = [2]
    other.append(other)
    assert hash_of(value) != hash_of(other)


def test_an_operator_that_calls_an_operator():
    def define(factor):
        inner = opkit.custom_op("thash::inner", lambda x: x * factor, schema="(Tensor x) -> Tensor")
        outer = opkit.custom_op("thash::outer", lambda x: inner(x) + 1, schema="(Tensor x) -> Tensor")
        found = outer.describe().contract_hash
        opkit.remove("thash::outer")
        opkit.remove("thash::inner")
        return found

    assert define(2) == define(2)
    assert define(2) != define(3)


def test_tensors_are_read_while_a_compiler_traces():
    hashes = []
    for factor in (2.0, 3.0, 2.0):
        table = torch.tensor([factor])
        op = opkit.custom_op("thash::table", closure(table), schema="(Tensor x) -> Tensor")
        assert torch.compile(lambda x: op(x), backend="aot_eager")(torch.ones(1)) == factor  # noqa: B023
        hashes.append(op._operator.traced_hash)
        assert hashes[-1] == op.describe().contract_hash
        opkit.remove("thash::table")
    assert hashes[0] == hashes[2] != hashes[1]


REGISTRATIONS = {
    "kernel": lambda op: op.register_kernel("cpu", lambda x: x * 2),
    "fake": lambda op: op.register_fake(torch.empty_like),
    "autograd": lambda op: op.register_autograd(lambda ctx, grad: grad * 2),
    "vmap": lambda op: op.register_vmap(lambda info, in_dims, x: (x, 0)),
    "autocast": lambda op: op.register_autocast("cpu", torch.bfloat16),
}


def test_a_registration_changes_the_hash():
    for kind, register in REGISTRATIONS.items():
        op = opkit.custom_op("thash::registered", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
        before = op.describe().contract_hash
        register(op)
        assert op.describe().contract_hash != before, kind
        opkit.remove("thash::registered")


def test_the_options_are_covered():
    found = set()
    for options in ({}, {"inline": True}, {"inline": False}, {"autocast": "low"}, {"opaque": True}):
        op = opkit.custom_op("thash::options", lambda x: x * 2, schema="(Tensor x) -> Tensor", **options)
        found.add(op.describe().contract_hash)
        opkit.remove("thash::options")
    assert len(found) == 5
