"""Blocks of memory: one a call, and again the same for the next."""

import pytest

from opkit.compiler.run import arena


@pytest.fixture(autouse=True)
def empty():
    arena.release()
    yield
    arena.release()


def test_a_block_is_used_again():
    first = arena.take(1000)
    arena.give(first)
    assert arena.take(500) is first


def test_two_calls_at_once_have_one_each():
    first, second = arena.take(10), arena.take(10)
    assert first is not second
    assert first.memory.data_ptr() % 64 == second.memory.data_ptr() % 64 == 0


def test_one_that_is_too_small_is_replaced():
    first = arena.take(10_000)
    arena.give(first)
    second = arena.take(20_000)
    assert second.size >= 20_000
    arena.give(second)
    assert arena.take(10) is second
