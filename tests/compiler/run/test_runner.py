"""Arenas: each call has one of its own, and the next call gets it again."""

import pytest

from opkit.compiler.run import runner


@pytest.fixture(autouse=True)
def empty():
    runner.release_arenas()
    yield
    runner.release_arenas()


def test_a_block_is_used_again():
    first = runner.take_arena(1000)
    runner.give_arena(first)
    assert runner.take_arena(500) is first


def test_two_calls_at_once_have_one_each():
    first, second = runner.take_arena(10), runner.take_arena(10)
    assert first is not second
    assert first.memory.data_ptr() % 64 == second.memory.data_ptr() % 64 == 0


def test_one_that_is_too_small_is_replaced():
    first = runner.take_arena(10_000)
    runner.give_arena(first)
    second = runner.take_arena(20_000)
    assert second.size >= 20_000
    runner.give_arena(second)
    assert runner.take_arena(10) is second
