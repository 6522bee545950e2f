"""numbers: a planted defect that each property must catch, a right operator that it must pass."""

import torch

from opkit.testing import tensor


def test_a_wrong_tail_shrinks_to_its_first_size(fails):
    def wrong(x):
        return torch.where(torch.arange(x.numel()).view(x.shape) >= 64, x + 1, x)

    failure = fails("numbers.reference", wrong, args=(tensor("b n"),), reference=lambda x: x.clone())
    assert failure.args[0].shape == (1, 65)


def test_a_right_operator_holds(holds):
    holds("numbers.reference", torch.add, args=(tensor("b n"), tensor("n")), reference=torch.add)
