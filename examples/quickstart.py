"""Operators written as single functions, inside a model that trains: eagerly and under torch.compile.

The four operators are in ``opkit/nn/functional.py``, the model in ``opkit/demo/model.py``. This is ``opkit demo``,
called from Python::

    python examples/quickstart.py
"""

from pathlib import Path

from opkit import demo


def main() -> None:
    """Train the model twice; the two runs must learn, and learn the same."""
    report = demo.run(out=Path("opkit-demo"))
    assert report.eager.end < report.eager.start - 0.5
    assert report.compiled.end < report.compiled.start - 0.5
    assert abs(report.eager.end - report.compiled.end) < 0.05
    assert report.plot_path.exists()


if __name__ == "__main__":
    main()
