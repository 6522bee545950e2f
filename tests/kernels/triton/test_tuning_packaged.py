"""Where a package has tuning results, its users measure nothing: other shapes run with the result of the most similar ones."""

import logging

import pytest
from tuned import BEST, BUCKET, CONFIGS, Timer, decide, never

from opkit.kernels.tuning import observation, records, tuning

pytestmark = pytest.mark.usefixtures("settings")

OTHER = "bf16 | d=4096"
LARGEST = CONFIGS[2]


class Fastest(Timer):
    """A timer to which one block is the fastest."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def __call__(self, each):
        return super().__call__(each) if each.constexprs["BLOCK"] != self.block else 0.1


@pytest.fixture
def packaged(tmp_path):
    """A package that was tuned for d=1024 (block 128) and d=65536 (block 256); the cache is empty."""
    folder = tmp_path / "tuning"
    decide(Timer())
    decide(Fastest(256), bucket="bf16 | d=65536")
    records.export_all(folder / "opkit-build.json")
    records.file_of("demo::rms_norm", "_fwd").unlink()
    tuning.forget()
    return {"folders": [folder], "load": lambda each: None}


def test_other_shapes_run_with_the_result_of_the_most_similar_ones(packaged, caplog):
    with caplog.at_level(logging.INFO, "opkit.tuning"):
        choice = decide(never, bucket=OTHER, **packaged)
    assert (choice.config, choice.source, choice.bucket, choice.settled) == (BEST, "package", OTHER, True)
    assert "it runs with that of its package for bf16 | d=1024 (BLOCK=128, num_warps=4)" in caplog.text
    assert decide(never, bucket="bf16 | d=32768", **packaged).config is LARGEST
    assert decide(never, bucket=OTHER, **packaged) == choice
    assert records.listed() == []


def test_other_dtypes_sizes_and_kernels_are_measured(packaged):
    for bucket in ("fp16 | d=1024", "bf16 | d=1024 e=2"):
        assert decide(Timer(), bucket=bucket, **packaged).source == "tuned"


def test_a_configuration_that_cannot_run_gives_way_to_the_next(packaged):
    def load(each):
        if each is BEST:
            raise MemoryError("shared memory")

    choice = decide(never, bucket=OTHER, **packaged | {"load": load})
    assert (choice.config, choice.source) == (LARGEST, "package")
    tuning.forget()
    timer = Timer(_128=MemoryError("shared"), _256=MemoryError("shared"))
    choice = decide(timer, bucket=OTHER, **packaged | {"load": timer})
    assert (choice.config, choice.source) == (CONFIGS[0], "tuned")


def test_without_a_way_to_load_a_configuration_other_shapes_are_measured(packaged):
    assert decide(Timer(), bucket=OTHER, folders=packaged["folders"]).source == "tuned"


def test_measuring_can_be_demanded(packaged, settings):
    decide(never, bucket=OTHER, **packaged)
    with observation.observed():  # as opkit tune does
        assert decide(Timer(), bucket=OTHER, **packaged).source == "tuned"
    records.file_of("demo::rms_norm", "_fwd").unlink()
    tuning.forget()
    settings(tune="all")
    assert decide(Timer(), bucket=OTHER, **packaged).source == "tuned"
    assert decide(never, bucket=BUCKET, **packaged).source == "record"


def test_results_of_a_package_hold_for_every_triton(packaged, monkeypatch):
    monkeypatch.setattr(records, "triton_version", lambda: "99.0")
    assert decide(never, **packaged).source == "record"
    assert decide(never, bucket=OTHER, **packaged).source == "package"
