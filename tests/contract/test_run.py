"""The order of the properties, their time, and what the progress shows."""

import pytest
import small_properties as small
import torch

import opkit
from opkit.contract import run
from opkit.errors import ArgumentError
from opkit.testing import tensor

ARGS = (tensor("n"),)


def check(**how):
    return opkit.check(small.sin, **{"args": ARGS, "database": False, "max_examples": 20} | how)


def names(entries):
    return [each.property for each in entries]


def test_cheap_properties_are_asked_first_and_crashes_before_all(only):
    only(
        [small.made("a.slow", cost=1.0), small.made("b.quick"), small.made("memory.crash", cost=2.0)],
    )
    assert [prop.name for prop in run.chosen(None, ())] == ["memory.crash", "b.quick", "a.slow"]


def test_properties_are_chosen_by_name_and_by_group(only):
    assert [prop.name for prop in run.chosen(["numbers", "memory.small"], ["numbers.remarks"])] == [
        "memory.small",
        "numbers.right",
    ]
    assert run.chosen([], ()) == []
    with pytest.raises(ArgumentError, match=r"no property 'nix'. There are: memory.small, numbers.right"):
        run.chosen(["nix"], ())


def test_names_may_come_from_a_generator(only):
    assert names(check(properties=(name for name in ("numbers.right", "memory.small"))).failures) == ["memory.small"]


def test_every_property_is_in_the_report(only):
    report = check()
    assert names(report.failures) == ["memory.small"]
    assert names(report.passed) == ["numbers.right", "numbers.remarks"]
    assert names(report.skipped) == ["fake.none", "fake.neither", "vmap.cannot"]
    assert report.failures[0].args[0].shape == (5,)
    assert report.failures[0].operator == report.name == "sin"
    assert report.passed[1].remarks == ("<strides> differ",)
    assert 1 <= len(report.passed[0].examples) <= 5


def test_after_a_crash_nothing_is_called_any_more(only):
    only([small.made("memory.crash", small.sizes_over(-1)), small.made("numbers.right")])
    report = check()
    assert names(report.failures) == ["memory.crash"]
    assert report.skipped[0].reason == "a call ends the process: see memory.crash"


def test_what_is_refused_is_counted_with_its_reasons(only):
    def refuses_odd(x):
        if x.numel() % 2:
            raise ValueError(f"odd, at {x.numel() % 4}")
        return x + 1

    only([small.made("numbers.right")])
    passed = opkit.check(refuses_odd, args=ARGS, database=False).passed[0]
    assert 0 < passed.refused < passed.tried
    assert sorted(text.split(": ", 1)[1] for text in passed.refusals) == [
        "ValueError: odd, at 1",
        "ValueError: odd, at 3",
    ]


def test_an_operator_that_refuses_everything_is_not_said_to_hold(only):
    def refuses(x):
        raise ValueError("never")

    only([small.made("numbers.right")])
    report = opkit.check(refuses, args=ARGS, database=False)
    assert not report.passed
    assert report.skipped[0].reason.startswith("the operator refused every example, such as (float32[")
    assert report.skipped[0].reason.endswith("ValueError: never")


def test_a_property_that_cannot_say_whether_it_applies_is_skipped(only):
    def breaks(subject):
        raise RuntimeError("no such attribute")

    only([small.made("numbers.right", skip=breaks)])
    assert check().skipped[0].reason == "could not be checked: RuntimeError: no such attribute"


@pytest.fixture
def clock(monkeypatch):
    return small.Clock(monkeypatch)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.005])
def test_the_budget_is_kept(only, clock, seconds):
    slow = [small.made(f"numbers.slow{number}", clock.takes(seconds), cost=seconds) for number in range(8)]
    only([*slow, small.made("numbers.endless", clock.takes(0.05), cost=0.05, least=10**6)])
    report = check(budget=1.0)
    assert 0.9 < report.seconds <= 1.05
    assert len(report.passed) >= 8
    assert any(each.cut_short for each in report.passed)


def test_a_budget_is_kept_while_shrinking(only, clock):
    slow = clock.takes(0.02, small.sizes_over(1))
    only([small.made("memory.slow", slow, cost=0.02, cases=lambda s: s.spec.cases().map(grown))])
    report = check(budget=0.3)
    assert report.seconds <= 0.33
    assert names(report.failures) == ["memory.slow"]


def grown(case):
    return case.map(lambda _, each: type(each)((each.shape[0] + 2, *each.shape[1:])))


def test_what_would_not_end_in_time_is_not_begun(only, clock):
    only([small.made("compile.long", clock.takes(9), cost=9.0), small.made("numbers.right")])
    report = check(budget=2.0)
    assert names(report.passed) == ["numbers.right"]
    assert [(each.property, each.reason) for each in report.skipped] == [("compile.long", "out of time")]


def test_a_slow_operator_is_found_to_be_slow(only, clock):
    slow = clock.takes(0.1)
    only([small.made("numbers.first", slow), small.made("numbers.second", slow, cost=0.2)])
    assert check(budget=1.0, max_examples=1000).seconds <= 1.1


def test_without_a_budget_all_examples_are_tried(only):
    only([small.made("numbers.some", share=0.2), small.made("numbers.all")])
    some, every = check(max_examples=40).passed
    assert some.tried <= 8 < every.tried
    assert not every.cut_short


def test_progress_is_told(only):
    shown = []
    check(progress=lambda name, done: shown.append((name, done)))
    asked = [prop.name for prop in run.chosen(None, ()) if not prop.skip(None)]
    assert [name for name, _ in shown] == asked
    assert shown[0][1] == 0
    assert [done for _, done in shown] == sorted(done for _, done in shown)


def test_nothing_is_printed_where_there_is_no_terminal(only, capfd):
    for progress in (None, True):
        check(progress=progress)
    assert capfd.readouterr() == ("", "")


def test_an_interrupted_check_has_what_was_found(only):
    def interrupts(subject, case):
        raise KeyboardInterrupt

    only([*small.PROPERTIES, small.made("numbers.last", interrupts, cost=1.0), small.made("x.y", cost=2.0)])
    with pytest.raises(KeyboardInterrupt) as caught:
        check()
    assert isinstance(caught.value, run.Interrupted)
    assert names(caught.value.report.failures) == ["memory.small"]
    interrupted = [each.property for each in caught.value.report.skipped if each.reason == "interrupted"]
    assert interrupted == ["numbers.last", "x.y"]


def test_torch_is_left_as_it_was(only):
    def meddles(subject, case):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        torch.rand(1)

    only([small.made("behaviour.meddles", meddles)])
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    check()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
