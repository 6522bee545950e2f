"""Settings from the environment."""

import dataclasses
from pathlib import Path

import pytest

from opkit import config, errors


def test_defaults():
    settings = config.read({})
    assert (settings.check, settings.verify, settings.tune) == (True, True, True)
    assert settings.cache_dir.name == "opkit"


@pytest.mark.parametrize("name", ["check", "verify", "tune", "batch_invariant"])
def test_switches(name):
    said = {"0": False, "off": False, "FALSE": False, "1": True, "On": True}
    assert {text: getattr(config.read({f"OPKIT_{name.upper()}": text}), name) for text in said} == said


def test_trusted_kernels_are_verified_where_that_is_asked_for():
    verified = {text: config.read({"OPKIT_VERIFY": text}) for text in ("0", "1", "all")}
    assert [settings.verify for settings in verified.values()] == [False, True, True]
    assert [settings.verify_all for settings in verified.values()] == [False, False, True]


@pytest.mark.parametrize("text", ["", "yes please", "2"])
def test_what_is_no_switch_is_refused_by_name(text):
    with pytest.raises(errors.ConfigError, match=r"OPKIT_CHECK.*Set it to 0 or 1"):
        config.read({"OPKIT_CHECK": text})


def test_cache_folder(tmp_path):
    assert config.read({"OPKIT_CACHE_DIR": str(tmp_path)}).cache_dir == Path(tmp_path)


def test_settings_are_read_once_and_do_not_change(monkeypatch):
    settings = config.get()
    monkeypatch.setenv("OPKIT_CHECK", "0" if settings.check else "1")
    assert config.get() is settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.check = False  # type: ignore[misc]
