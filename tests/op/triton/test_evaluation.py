"""Functions of named values: their order, what is kept of them, and what is said when they fail."""

import pytest

from opkit.errors import DeclarationError, KernelError
from opkit.op.triton.evaluation import TensorInfo, as_grid, evaluate, formula, ordered


def names(*functions):
    return [f.name for f in ordered([formula(name, function) for name, function in functions])]


def test_each_comes_after_those_that_it_asks_for():
    assert names(("grid", lambda BLOCK: BLOCK), ("BLOCK", lambda d, ROWS: d), ("ROWS", lambda d: d)) == [
        "ROWS",
        "BLOCK",
        "grid",
    ]


def test_what_asks_for_everything_comes_last():
    assert names(("grid", lambda meta: 1), ("late", lambda BLOCK: 1), ("BLOCK", lambda d: d)) == [
        "BLOCK",
        "late",
        "grid",
    ]
    assert names(("grid", lambda EVEN: 1), ("EVEN", lambda META: 1), ("BLOCK", lambda d: d)) == [
        "BLOCK",
        "EVEN",
        "grid",
    ]


def test_circles_are_refused():
    with pytest.raises(DeclarationError, match="the functions for a, b take each other's values"):
        names(("a", lambda b: b), ("b", lambda a: a))


def test_defaults_serve_where_a_name_means_nothing():
    assert formula("grid", lambda d, step=4: d // step, lambda name: name == "d").inputs == ("d",)
    assert formula("grid", lambda d, step=4: d // step, lambda name: True).inputs == ("d", "step")


def test_a_result_is_kept_for_its_values():
    asked = []

    def block(d):
        asked.append(d)
        return d * 2

    made = ordered([formula("BLOCK", block)])
    for d in (1, 2, 1, 2, 1):
        assert evaluate("t::f", made, {"d": d, "other": len(asked)})["BLOCK"] == 2 * d
    assert asked == [1, 2]


def test_what_has_no_hash_is_evaluated_each_time():
    made = ordered([formula("BLOCK", lambda sizes: len(sizes))])
    assert evaluate("t::f", made, {"sizes": [1, 2]})["BLOCK"] == 2


def test_a_type_error_of_the_author_is_no_reason_to_call_again():
    calls = []

    def block(d):
        calls.append(d)
        raise TypeError("mine")

    with pytest.raises(KernelError, match="TypeError: mine"):
        evaluate("t::f", [formula("BLOCK", block)], {"d": 3})
    assert calls == [3]


def test_a_key_error_of_the_author_is_the_authors():
    with pytest.raises(KernelError, match=r"the function for grid .* failed on no values: KeyError: 'ROWS'"):
        evaluate("t::f", [formula("grid", lambda meta: meta["ROWS"])], {"d": 3})


def test_a_failure_says_who_where_and_on_what():
    x = TensorInfo("float32", (2, 3), (3, 1))
    message = (
        r"t::f, kernel 'k': the function for grid \(.*test_evaluation.py:\d+\) failed on x=TensorInfo\(dtype='float32', "
        r"shape=\(2, 3\), strides=\(3, 1\)\), d=0: ZeroDivisionError"
    )
    with pytest.raises(KernelError, match=message) as caught:
        evaluate("t::f, kernel 'k'", [formula("grid", lambda x, d: x.numel // d)], {"x": x, "d": 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_functions_that_are_not_pythons_have_no_line():
    with pytest.raises(KernelError, match="the function for n failed on x='a': ValueError"):
        evaluate("t::f", [formula("n", _Parsed())], {"x": "a"})


class _Parsed:
    def __call__(self, x):
        return int(x)


def test_grids():
    given = (3, (3,), [3, 4], (3, 4, 5), 0)
    assert [as_grid("t::f", each) for each in given] == [(3, 1, 1), (3, 1, 1), (3, 4, 1), (3, 4, 5), (0, 1, 1)]
