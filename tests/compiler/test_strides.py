"""Strides of compiled graphs' results are eager's, also where the graph itself goes by them."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("fresh")


def elements_of_memory(x, m):
    """What lies so many places apart in the memory of results: channels last, transposed, sliced, and of copies."""
    rolled, doubled = torch.roll(x, -1, 0), x * 2
    found = [
        torch.as_strided(y, (5, 10), (4, 1)) for y in (rolled, torch.roll(x, (1, 2), (0, 1)), doubled, x.softmax(1))
    ]
    found += [
        torch.as_strided(doubled.permute(0, 2, 3, 1), (10,), (3,), 1),
        torch.as_strided_scatter(doubled, m, (4, 6), (6, 1), 2),
    ]
    found.append(torch.as_strided((m * 2).split(2)[1], (2, 6), (6, 1), 3))
    return *found, torch.as_strided((m * 2).t(), (3, 4), (2, 3), 1), torch.as_strided((m * 2)[1:, ::2], (3, 2), (2, 3))


def parts_and_repeats(z, m):
    """Results that are parts of complex numbers, every other element, or one element many times."""
    repeated = torch.zeros(1).expand(5), torch.arange(3)[:, None].expand(3, 4), (m * 2)[:, :1].expand(4, 6)
    return *repeated, (z * z.conj()).real, (z * 2).imag, torch.view_as_real((z * 2).t())[..., 1], (m * 3)[:, ::2]


X = torch.arange(100.0).reshape(2, 5, 2, 5).to(memory_format=torch.channels_last)
M, Z = torch.randn(4, 6), torch.randn(6, 5, dtype=torch.complex64)


@pytest.mark.parametrize(("function", "inputs"), [(elements_of_memory, (X, M)), (parts_and_repeats, (Z, M))])
def test_strides_and_elements_are_those_of_eager(function, inputs):
    compiled = torch.compile(function, backend="opkit", options={"strict": True})
    for found, expected in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(found, expected, check_stride=True)
        assert found.storage_offset() == expected.storage_offset()
