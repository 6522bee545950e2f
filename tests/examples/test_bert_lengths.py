"""examples/bert_lengths.py: it asserts that nothing is compiled again, and that padded and packed requests agree."""

import bert_lengths
import pytest
import torch


@pytest.mark.parametrize(
    ("backends", "dtype", "limit"),
    [
        ("opkit", "float32", 1e-5),
        pytest.param("opkit", "bfloat16", 2e-2, marks=pytest.mark.exhaustive),
        pytest.param("inductor,opkit", "float32", 1e-5, marks=pytest.mark.exhaustive),
    ],
)
def test_requests(backends, dtype, limit, capsys):
    torch._dynamo.reset()
    rows = bert_lengths.main([f"--backends={backends}", f"--dtype={dtype}", "--threads=1"])
    names = ["eager, padded", "inductor, padded", "opkit, padded", "opkit, packed"]
    assert [row.name for row in rows] == [name for name in names if "inductor" in backends or "inductor" not in name]
    assert max(row.error for row in rows) < limit
    assert "| opkit, packed |" in capsys.readouterr().out


def test_a_batch_in_both_forms():
    (first, *_) = bert_lengths.batches(bert_lengths.SIZES["tiny"], "cpu")
    assert torch.equal(first.padded.flatten()[first.where], first.packed)
    assert first.bounds.diff().tolist() == first.lengths.tolist()
    assert int(first.padded.count_nonzero()) == len(first.packed)
