"""torch's own database of custom operators, with the decorator replaced: ``opcheck``, gradients and vmap on its samples.

The database registers its operators when it is imported, so it is imported in a process of its own.
"""

import fresh_process
import pytest

_SCRIPT = """
import warnings

import torch

import opkit

torch.library.custom_op = opkit.custom_op
warnings.simplefilter("ignore", FutureWarning)  # the database itself uses names that torch has deprecated
from torch.testing._internal.custom_op_db import custom_op_db

for entry in custom_op_db:
    for sample in entry.sample_inputs("cpu", torch.float64, requires_grad=entry.supports_autograd):
        args = [sample.input, *sample.args]
        torch.library.opcheck(entry.op, args, sample.kwargs)
        if not entry.supports_autograd or any(isinstance(arg, (list, tuple)) for arg in args):
            continue
        function = lambda *values: entry.op(*values, **sample.kwargs)
        assert torch.autograd.gradcheck(function, args), entry.name
        if entry.supports_gradgrad:
            assert torch.autograd.gradgradcheck(function, args), entry.name
        value = sample.input.detach()
        rest = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args[1:]]
        mapped = torch.vmap(lambda x: function(x, *rest))(torch.stack([value, value]))
        first = torch.utils._pytree.tree_map(lambda t: t[0], mapped)
        torch.testing.assert_close(first, function(value, *rest), check_stride=False)
    print(entry.name)
operators = [op for op in torch._library.custom_ops.OPDEFS.values() if op._namespace == "_torch_testing"]
assert operators and all(isinstance(op, opkit.CustomOp) for op in operators)
"""


@pytest.mark.exhaustive
def test_the_database_under_opkit() -> None:
    done = fresh_process.run(["-c", _SCRIPT])
    assert len(done.stdout.splitlines()) >= 10
