"""The demo, made small: what it shows, what it writes, and what it refuses before it begins."""

import functools
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from opkit import demo
from opkit.demo import model
from opkit.demo.model import Size, build, generate
from opkit.errors import ArgumentError, DemoError

TINY = demo.DemoOptions(size=Size(layers=1, heads=2, width=16, hidden=32, context=16), backend="eager", sample=8)


@pytest.fixture(autouse=True)
def _no_compiled_code_from_other_tests():
    torch.compiler.reset()


def _run(steps, out, device="cpu", options=TINY):
    console = Console(file=io.StringIO(), width=100)
    report = demo.run(steps, device, out, options=options, console=console)
    return report, console.file.getvalue()


def test_losses_fall_agree_and_are_written(tmp_path):
    report, printed = _run(40, tmp_path / "made" / "here")
    assert report.eager.end < report.eager.start
    assert report.max_difference <= model.TOLERANCE
    record = json.loads(report.losses_path.read_text())
    assert record["curves"]["eager"]["losses"] == list(report.eager.losses)
    assert len(record["curves"]["compiled"]["losses"]) == 40
    assert report.plot_path.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in report.folder.iterdir()) == ["losses.json", "losses.png"]
    assert record["backend"] == "eager"
    for word in ("eager", "compiled", "tokens/s", "losses.png", report.sample[:1]):
        assert word in printed


def test_without_matplotlib_the_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report, printed = _run(1, tmp_path)
    assert [path.name for path in report.folder.iterdir()] == ["losses.json"]
    assert "pip install 'opkit[plot]'" in printed


@pytest.mark.build
def test_a_cpu_has_opkits_compiler(tmp_path):
    report, printed = _run(40, tmp_path, options=demo.DemoOptions(size=TINY.size, sample=1))
    assert report.backend == "opkit"
    assert "opkit" in printed
    assert report.max_difference <= model.TOLERANCE


def test_one_step_is_enough_and_repeats_itself(tmp_path):
    state = torch.get_rng_state()
    first, _ = _run(1, tmp_path)
    again, _ = _run(1, tmp_path)
    assert (first.eager.losses, first.sample) == (again.eager.losses, again.sample)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_number_of_steps_is_cut_short_on_a_slow_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    report, printed = _run(None, tmp_path)
    assert len(report.eager.losses) == len(report.compiled.losses) == 1
    assert "1/1" in printed


def test_steps_that_are_not_a_count_are_refused(tmp_path):
    for steps in (0, -3, 2.5, True, "9"):
        with pytest.raises(ArgumentError, match=rf"steps is {steps!r}.* at least 1"):
            _run(steps, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "", "cpu:0"])
def test_devices_that_are_not_there_are_refused(device, tmp_path):
    with pytest.raises(ArgumentError, match="This machine has: cpu"):
        _run(1, tmp_path / "out", device)
    assert not (tmp_path / "out").exists()


def test_the_default_device_is_a_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert demo._device(None) == torch.device("cuda")
    assert demo._device("cuda:1") == torch.device("cuda:1")
    assert demo._steps(None, torch.device("cuda")) > demo._steps(None, torch.device("cpu"))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ArgumentError, match=r"cannot write to out, .*Give another folder"):
            _run(1, out)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_compiler_that_fails_is_an_error_that_says_so(tmp_path):
    def broken(graph, inputs):
        raise OSError("no compiler")

    with pytest.raises(DemoError, match=r"torch\.compile did not"):
        _run(1, tmp_path, options=demo.DemoOptions(size=TINY.size, backend=broken))


def test_disagreement_is_an_error_after_the_files_are_written(tmp_path):
    def wrong(graph, inputs):
        return lambda *args: tuple(1.5 * output for output in graph(*args))

    with pytest.raises(DemoError, match="at step 1 the losses, eager and compiled, differ by 3"):
        _run(2, tmp_path, options=demo.DemoOptions(size=TINY.size, backend=wrong, sample=1))
    assert (tmp_path / "losses.png").exists()


def _curve(*losses):
    return model.Curve("eager", losses, (1.0,) * len(losses))


def test_losses_that_do_not_fall_are_an_error():
    for losses in ((2.0, 2.0), (2.0, 3.0), (5.0, float("nan"))):
        with pytest.raises(DemoError, match="the eager loss did not fall"):
            model.check_falls(_curve(*losses))


def test_losses_that_drift_apart_are_an_error():
    model.check_agree(_curve(5.0, 4.0), _curve(5.0, 4.0 + model.TOLERANCE / 2))
    with pytest.raises(DemoError, match=r"at step 2 .* differ by 0\.002, more than 0\.001"):
        model.check_agree(_curve(5.0, 4.0), _curve(5.0, 4.0 + model.TOLERANCE * 2))
    early = [4.0] * model.EARLY
    model.check_agree(_curve(*early, *[3.0, 2.0] * 100), _curve(*early, *[2.0, 3.0] * 100))
    with pytest.raises(DemoError, match=r"the mean last losses, .* differ by 0\.1, more than 0\.05"):
        model.check_agree(_curve(*early, *[3.0] * 100), _curve(*early, *[3.1] * 100))


def test_the_corpus_is_the_standard_library_in_the_order_of_names(tmp_path):
    assert len(model.read_text()) <= model.LIMIT
    assert b"import" in bytes(model.read_text(limit=10_000).tolist())
    for name, text in (("b.py", "2"), ("a.py", "1"), ("_sysconfigdata_x.py", "no"), ("c.txt", "no")):
        (tmp_path / name).write_text(text)
    assert bytes(model.read_text(tmp_path).tolist()) == b"12"


def test_a_python_without_its_sources_is_an_error(tmp_path):
    with pytest.raises(DemoError, match=r"no \.py files in .*zipped"):
        model.read_text(tmp_path / "python311.zip")


def test_batches_are_windows_of_the_text_and_repeat():
    text = torch.arange(50, dtype=torch.uint8)
    data = model.batches(text, steps=3, batch=2, length=5, seed=1)
    assert data.shape == (3, 2, 5)
    assert (data.diff() == 1).all()
    assert torch.equal(data, model.batches(text, steps=3, batch=2, length=5, seed=1))
    with pytest.raises(DemoError, match="50 bytes of text are too few for windows of 51"):
        model.batches(text, steps=1, batch=1, length=51, seed=0)


def test_the_model_has_two_million_parameters_and_sees_no_future():
    model = build(Size(), 0, torch.device("cpu"))
    assert 1.9e6 < sum(p.numel() for p in model.parameters()) < 2.1e6
    tokens = torch.arange(10).unsqueeze(0)
    later = tokens.clone()
    later[0, 6:] = 200
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :6], model(later)[:, :6])


def test_the_sample_holds_no_terminal_commands():
    assert demo._decode(b"a\tb\n\x1b[2J\x00\xff") == "a\tb\n\ufffd[2J\ufffd\ufffd"


def test_generation_has_the_length_asked_for():
    model = build(TINY.size, 0, torch.device("cpu"))
    assert len(generate(model, torch.arange(16), count=5, temperature=1.0, seed=0)) == 5


def test_the_quickstart_says_what_the_demo_does(tmp_path, monkeypatch):
    program = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "quickstart.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run", functools.partial(demo.run, 60, "cpu", options=TINY))
    program["main"]()
    assert (tmp_path / "opkit-demo" / "losses.png").exists()
