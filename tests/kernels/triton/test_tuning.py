"""Which configuration is chosen: measured once, never in a capture, and never fatally."""

import dataclasses
import os
import subprocess
import time

import pytest
import torch
from tuned import BEST, BUCKET, CONFIGS, DEVICE, RMS, Timer, decide, never

from opkit.errors import CompileError, DeclarationError, KernelError, TuningWarning
from opkit.kernels.tuning import observation, records, skipping, tuning
from opkit.kernels.tuning.record_format import Tried

pytestmark = pytest.mark.usefixtures("settings")


# ---- once ------------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_remembered():
    timer = Timer()
    choice = decide(timer)
    assert (choice.config, choice.source, choice.ms, choice.slowest_ms) == (BEST, "tuned", 0.25, 0.75)
    assert choice.settled
    assert timer.calls == [64, 128, 256]
    assert decide(never) == choice
    tuning.forget()
    again = decide(never)
    assert (again.config, again.source, again.ms) == (BEST, "record", 0.25)
    assert tuning.choose(RMS, CONFIGS, DEVICE, BUCKET, never, False) is BEST


def test_each_bucket_device_and_kernel_is_measured():
    decide(Timer())
    for changes in (
        {"bucket": "bf16 | d=2048"},
        {"identity": dataclasses.replace(RMS, hash="new")},
        {"identity": dataclasses.replace(RMS, kernel="_bwd")},
    ):
        assert decide(Timer(), **changes).source == "tuned"


def test_one_configuration_is_not_measured():
    assert decide(never, configs=CONFIGS[:1]).source == "only"
    assert decide(never, configs=[CONFIGS[0]] * 3).source == "only"


def test_no_configuration():
    with pytest.raises(DeclarationError, match=r"demo::rms_norm \(kernel _fwd\): it has no configuration"):
        decide(never, configs=[])


def test_a_kernel_that_changed_is_measured_without_a_word():
    decide(Timer())
    tuning.forget()
    assert decide(Timer(), identity=dataclasses.replace(RMS, hash="new")).source == "tuned"


def test_a_pruned_call_uses_what_was_measured_and_adds_to_it():
    decide(Timer(), configs=CONFIGS[:2])
    assert decide(Timer(), configs=CONFIGS[1:]).source == "tuned"
    tuning.forget()
    assert decide(never).source == "record"
    assert decide(never, configs=[CONFIGS[2], CONFIGS[0]]).config is CONFIGS[0]


# ---- failures --------------------------------------------------------------------------------------------------------


class OutOfResources(Exception):
    """Named as Triton's."""


class CompileTimeAssertionFailure(Exception):
    """Named as Triton's."""


def caused(by):
    error = CompileError("demo::rms_norm cannot be compiled")
    error.__cause__ = by
    return error


def test_want_of_resources_skips_a_configuration():
    for number, (error, reason) in enumerate((
        (OutOfResources("shared memory"), "out of resources: shared memory"),
        (torch.OutOfMemoryError("tried to allocate\n64 GiB"), "out of memory: tried to allocate 64 GiB"),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), "out of memory: CUDA_ERROR_OUT_OF_MEMORY"),
        (RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), "out of resources: CUDA_ERROR"),
        (RuntimeError("hipErrorOutOfMemory"), "out of memory: hip"),
        (caused(CompileTimeAssertionFailure("BLOCK")), "a static_assert of the kernel failed: BLOCK"),
        (caused(OutOfResources("registers")), "out of resources: registers"),
        (skipping.Unfit("no such layout"), "unfit: no such layout"),
    )):  # fmt: skip
        bucket = f"bf16 | d={2**number}"
        choice = decide(Timer(_128=error), bucket=bucket)
        assert choice.config is CONFIGS[0], reason
        assert choice.ms_of(BEST) is None, reason
        tuning.forget()
        skipped = [each.skipped for each in decide(never, bucket=bucket).tried if each.ms is None]
        assert len(skipped) == 1, reason
        assert skipped[0].startswith(reason)


def test_triton_s_own_exceptions_are_known_by_their_names():
    from triton.compiler import errors
    from triton.runtime.errors import OutOfResources, PTXASError

    assert skipping.skip_reason(OutOfResources(9, 8, "shared memory")).startswith("out of resources")
    assert skipping.skip_reason(PTXASError("too many registers")).startswith("ptxas")
    assert issubclass(errors.CompileTimeAssertionFailure, errors.CompilationError)


def test_other_errors_name_operator_kernel_and_configuration():
    with pytest.raises(
        KernelError,
        match=r"demo::rms_norm \(kernel _fwd\): the configuration BLOCK=128, num_warps=4 failed .*: no luck",
    ) as raised:
        decide(Timer(_128=ValueError("no luck")))
    assert isinstance(raised.value.__cause__, ValueError)
    assert records.listed() == []
    assert decide(Timer()).source == "tuned"


def test_an_interruption_stays_one():
    with pytest.raises(KeyboardInterrupt):
        decide(Timer(_128=KeyboardInterrupt()))
    assert decide(Timer()).source == "tuned"


def test_all_skipped_lists_each_reason():
    timer = Timer(_64=OutOfResources("one"), _128=MemoryError("two"), _256=OutOfResources("three"))
    with pytest.raises(KernelError, match=r"(?s)none of its 3 .*BLOCK=64.*: one\n.*BLOCK=128.*two\n.*BLOCK=256.*three"):
        decide(timer)
    assert records.listed() == []


def test_too_little_memory_to_measure_is_not_fatal():
    full = Timer(_64=MemoryError("full"), _128=MemoryError("full"), _256=MemoryError("full"))
    with pytest.warns(TuningWarning, match=r"too little free memory: it runs with BLOCK=64.*opkit tune"):
        choice = decide(full)
    assert (choice.config, choice.settled) == (CONFIGS[0], False)
    assert decide(Timer()).source == "tuned"


def test_a_time_that_is_none_is_no_time():
    choice = decide(lambda each: float("nan") if each is BEST else 1.0)
    assert choice.config is CONFIGS[0]
    assert choice.tried[-1].skipped == "its time was measured as nan ms"


# ---- where nothing may be timed --------------------------------------------------------------------------------------


def test_nothing_is_measured_in_a_capture():
    with pytest.warns(TuningWarning, match=r"cannot be while a CUDA graph .* its first configuration .*opkit tune"):
        choice = decide(never, capturing=True)
    assert (choice.config, choice.source, choice.settled) == (CONFIGS[0], "first", False)
    assert decide(never, capturing=True) == choice  # and it is said once
    assert decide(Timer()).source == "tuned"
    assert decide(never, capturing=True).config is BEST


def test_a_capture_uses_the_nearest_bucket():
    decide(Timer(), bucket="bf16 | d=256")
    records.remember(RMS, DEVICE, "bf16 | d=64", [Tried(each.to_json(), 1.0) for each in CONFIGS])
    with pytest.warns(TuningWarning, match=r"the configuration for bf16 \| d=256 \(BLOCK=128, num_warps=4\)"):
        choice = decide(never, capturing=True)
    assert (choice.config, choice.source, choice.settled) == (BEST, "nearest", False)


def test_switched_off(settings):
    decide(Timer())
    settings(tune=False)
    tuning.forget()
    assert decide(never).source == "record"
    assert decide(never, bucket="bf16 | d=64").source == "nearest"
    assert decide(never, identity=dataclasses.replace(RMS, hash="new")).source == "first"


def known(bucket=BUCKET, configs=CONFIGS):
    return tuning.known(RMS, configs, DEVICE, bucket)


def test_what_is_known_is_told_without_measuring():
    assert (known().config, known().source) == (CONFIGS[0], "first")
    decide(Timer())
    assert (known().config, known().source) == (BEST, "tuned")
    tuning.forget()
    assert (known().config, known().source, known().ms) == (BEST, "record", 0.25)
    similar = known("bf16 | d=4096")
    assert (similar.config, similar.source, similar.bucket) == (BEST, "nearest", BUCKET)
    assert known(configs=CONFIGS[:1]).source == "only"
    assert decide(Timer(), bucket="bf16 | d=4096").source == "tuned"  # what was told is not kept


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_said_once_and_measured_again():
    decide(Timer())
    file = records.file_of("demo::rms_norm", "_fwd")
    file.write_text('{"format": 1')
    tuning.forget()
    with pytest.warns(TuningWarning, match=r"not used, and it is measured again: .*\.json: it cannot be read as JSON"):
        assert decide(Timer()).source == "tuned"
    tuning.forget()
    assert decide(never).source == "record"


def test_a_package_is_used_and_its_stale_results_are_refused_aloud(tmp_path):
    decide(Timer())
    records.export_all(tmp_path / "tuning" / "h200.json")
    records.file_of("demo::rms_norm", "_fwd").unlink()
    tuning.forget()
    assert decide(never, folders=[tmp_path / "tuning"]).source == "record"
    with pytest.warns(TuningWarning, match=r"h200\.json: it was made for the kernel before it changed"):
        decide(Timer(), identity=dataclasses.replace(RMS, hash="new"), folders=[tmp_path / "tuning"])


def test_a_cache_that_cannot_be_written_costs_a_measurement_a_process(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "triton_tuning").write_text("in the way")
    timer = Timer()
    with pytest.warns(TuningWarning, match=r"cannot be written to .*lost when it ends.*OPKIT_CACHE_DIR") as said:
        assert decide(timer).config is BEST
    assert len(said) == 1
    assert decide(never).config is BEST
    assert len(timer.calls) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_read(tmp_path):
    decide(Timer())
    place = tmp_path / "cache" / "triton_tuning"
    place.chmod(0o500)
    tuning.forget()
    try:
        assert decide(never).source == "record"
        with pytest.warns(TuningWarning, match="cannot be written to"):
            assert decide(Timer(), bucket="bf16 | d=64").source == "tuned"
    finally:
        place.chmod(0o700)


def test_a_read_only_disk(tmp_path):
    decide(Timer())
    place = tmp_path / "cache"
    mount = ["mount", "--bind", "-o", "ro", str(place), str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a folder cannot be mounted read-only here")
    tuning.forget()
    try:
        assert decide(never).source == "record"
        with pytest.warns(TuningWarning, match="cannot be written to"):
            assert decide(Timer(), bucket="bf16 | d=64").source == "tuned"
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


# ---- in advance ------------------------------------------------------------------------------------------------------


class Launcher:
    cleared = 0

    def clear(self):
        self.cleared += 1


def test_choices_are_observed_and_launchers_cleared():
    launcher, steps = Launcher(), []
    observation.add_launcher(launcher)
    with observation.observed(report=lambda *step: steps.append(step)) as choices:
        decide(Timer())
        decide(never)
    assert [choice.source for choice in choices] == ["tuned", "tuned"]
    assert steps == [(RMS, 0, 3), (RMS, 1, 3), (RMS, 2, 3)]
    assert launcher.cleared == 1
    decide(never, bucket=BUCKET)
    assert len(choices) == 2


def test_forced_choices_are_measured_again_once():
    decide(Timer())
    timer = Timer()
    with observation.observed(force=True) as choices:
        decide(timer)
        decide(timer)
    assert timer.calls == [64, 128, 256]
    assert [choice.source for choice in choices] == ["tuned", "tuned"]


def test_forced_choices_are_not_measured_in_a_capture():
    decide(Timer())
    with observation.observed(force=True):
        assert decide(never, capturing=True).config is BEST


def test_a_long_measurement_is_shown(monkeypatch, capsys):
    monkeypatch.setattr("opkit.kernels.cc.progress._DELAY", 0.0)
    decide(lambda each: time.sleep(0.01) or 1.0)
    assert "opkit: tuning demo::rms_norm (kernel _fwd) for bf16 | d=1024: configuration 3 of 3 ... " in (
        capsys.readouterr().err
    )
