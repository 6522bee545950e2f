"""Which torch releases opkit accepts, and what it says about the others."""

import re
import subprocess
import sys
import warnings

import pytest
import torch

import opkit
from opkit import compat, errors


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(compat, "_warned", set())


def test_a_tested_torch_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("2.11.0", "2.12.1", "2.13.0+cpu", "2.14.1+cu130", "2.14.0a0+git1234", "2.14"):
            compat.warn_if_untested(version)


@pytest.mark.parametrize("version", ["2.15.0", "2.100.0", "3.0.0", "2.15.0.dev20261101+cu130"])
def test_a_newer_torch_warns_once(version):
    with pytest.warns(errors.UntestedTorchWarning, match=rf"torch {re.escape(version)} is newer than 2\.14"):
        compat.warn_if_untested(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.warn_if_untested(version)


@pytest.mark.parametrize("version", ["2.10.2", "1.13.1", "2.9"])
def test_an_older_torch_is_refused(version):
    with pytest.raises(errors.UnsupportedTorchError, match=r"needs torch 2\.11 or newer.*pip install"):
        compat.warn_if_untested(version)


@pytest.mark.parametrize("version", ["", "unknown", "v2.13"])
def test_what_is_not_a_version_is_refused(version):
    with pytest.raises(ValueError, match="not a torch version"):
        compat.release(version)


def test_the_installed_torch_is_accepted():
    assert compat.status(torch.__version__) in ("tested", "newer than tested")


def define(name):
    return opkit.custom_op(name, lambda x: x.sin(), schema="(Tensor x) -> Tensor", mutates_args=())


def test_the_first_definition_warns_where_it_stands(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(errors.UntestedTorchWarning) as caught:
        define("compat::first")
    assert caught[0].filename == __file__
    define("compat::second")
    opkit.remove("compat::first")
    opkit.remove("compat::second")


def test_a_warning_that_is_an_error_is_raised_once(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.UntestedTorchWarning):
            define("compat::raises")
        define("compat::raises")
    opkit.remove("compat::raises")


def test_no_operator_is_defined_under_an_older_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(errors.UnsupportedTorchError):
        define("compat::never")
    with pytest.raises(errors.UnknownOperatorError):
        opkit.get("compat::never")


def test_the_module_itself_imports_no_torch():
    program = (
        "import sys, types; package = types.ModuleType('opkit'); package.__path__ = sys.argv[1:]; "
        "sys.modules['opkit'] = package; import opkit.compat; assert 'torch' not in sys.modules"
    )
    folder = compat.__file__.rsplit("compat", 1)[0]
    subprocess.run([sys.executable, "-c", program, folder], check=True)
