"""The key of torch's compile caches: joined by the operators that are compiled, never taken from the user."""

import torch
from torch import Tensor

import opkit


def test_the_users_own_cache_tag_is_kept_and_joined() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = opkit.custom_op("identity::doubled", doubled)
    before = torch.compiler.config.cache_key_tag
    try:
        for tag in ("mine", "set later"):
            torch.compiler.config.cache_key_tag = tag
            torch._dynamo.reset()
            torch.compile(lambda x: op(x), backend="aot_eager")(torch.ones(3))
            assert torch.compiler.config.cache_key_tag.startswith(f"{tag}|opkit:")
    finally:
        torch.compiler.config.cache_key_tag = before


def test_operators_that_are_not_compiled_leave_the_key_alone() -> None:
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    before = torch.compiler.config.cache_key_tag
    op = opkit.custom_op("identity::tripled", tripled)
    op(torch.ones(2, requires_grad=True)).sum().backward()
    assert torch.compiler.config.cache_key_tag == before
