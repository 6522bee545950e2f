"""Fixtures of tests of Triton kernels: settings for tuning, and packages that are built for a GPU that there is not."""

import os
import sys
from pathlib import Path

import pytest
from packing import Gpu, Package, named

from opkit.kernels import aot_loading
from opkit.kernels.triton import compiling
from opkit.kernels.tuning import tuning
from opkit.op.triton import variants


@pytest.fixture
def settings(settings, tmp_path):
    """A cache of the test's own, in what looks like a new process; ``settings(tune=...)`` sets more."""
    settings(cache_dir=tmp_path / "cache")
    tuning.forget()
    yield settings
    tuning.forget()


@pytest.fixture
def gpu(fake, monkeypatch):
    made = Gpu()
    build, opened = compiling.build, aot_loading._opened_binary

    def built(request):
        made.compiled.append(request)
        return named(build(request))

    def found(folder, chosen):
        made.found.append(chosen)
        return opened(folder, chosen)

    monkeypatch.setitem(variants.MACHINES, "cpu", made.machine(fake.driver))
    monkeypatch.setattr(compiling, "build", built)
    monkeypatch.setattr(aot_loading, "_opened_binary", found)
    return made


@pytest.fixture(scope="module")
def triton_cache():
    """What Triton compiles is kept for this run of tests, whose processes share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(Path(os.environ["OPKIT_CACHE_DIR"]) / "triton_of_tests"))
        yield


@pytest.fixture
def compiled(settings, tmp_path, monkeypatch):
    """What Triton was asked to compile; both caches are the test's own."""
    asked = []
    lowered = compiling.lowered
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton_cache"))
    monkeypatch.setattr(compiling, "lowered", lambda request: asked.append(request) or lowered(request))
    return asked


@pytest.fixture
def pack(tmp_path, settings, gpu, monkeypatch):
    settings(verify=False, bridge=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = Package(tmp_path)
    yield made
    made.forget()


@pytest.fixture
def no_compiler(pack, monkeypatch):
    """Call after building: nothing may be compiled any more."""

    def forbid():
        def refuse(*args, **options):
            raise AssertionError("Triton compiles")

        monkeypatch.setattr("triton.compiler.compiler.compile", refuse)
        monkeypatch.setattr(compiling, "build", refuse)

    return forbid
