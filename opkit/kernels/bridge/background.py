"""Building the bridge while the program goes on, in a process that outlives it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from opkit import config
from opkit.errors import OpkitError
from opkit.kernels.bridge import building
from opkit.kernels.bridge.building import TorchPaths
from opkit.kernels.bridge.entry import Entry

_CHILD = Path(__file__).with_name("child.py")
_NICE = "10"
_NOTICE = "opkit: building the bridge to torch {} in the background (once; about 10 s)"

Done = Callable[[Path | None], object]


def ensure_in_background(paths: TorchPaths, done: Done | None = None) -> bool:
    """Start building the bridge unless it is there, failed before, is switched off or cannot be built.

    A process that another one is building for waits for it. The work is done by a process of low priority which goes on
    when this one ends.

    Args:
        paths: the torch to build for.
        done: called in a thread of its own when the build has ended, with the library, or None if it failed.

    Returns:
        Whether a build is on the way, and ``done`` will be called.
    """
    place = _place(paths)
    if place is None:
        return False
    if not place.locked():
        print(_NOTICE.format(paths.version), file=sys.stderr)
    process = _start(paths)
    threading.Thread(target=_watch, args=(process, place, done), name="opkit bridge", daemon=True).start()
    return True


def _place(paths: TorchPaths) -> Entry | None:
    if not config.get().bridge or paths.missing or not sys.executable:
        return None
    try:
        place = building.entry(paths)
        if place.found() is not None or place.failure() is not None:
            return None
        place.make()
    except (OpkitError, OSError):  # no compiler, or no cache: building in the foreground says so
        return None
    return place


def _start(paths: TorchPaths) -> subprocess.Popen[bytes]:
    request = {"paths": dataclasses.asdict(paths), "package": str(_CHILD.parents[2])}
    command = [sys.executable, "-P", str(_CHILD), json.dumps(request, default=str), _NICE]
    quiet = subprocess.DEVNULL
    environment = os.environ | _settings()
    return subprocess.Popen(
        command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True
    )


def _settings() -> dict[str, str]:
    # the child reads its settings from its environment, and finds modules where this process does
    now = config.get()
    settings = {
        "OPKIT_CACHE_DIR": str(now.cache_dir.absolute()),
        "OPKIT_BUILD_TIMEOUT": str(now.build_timeout),
        "OPKIT_BRIDGE": "1",
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path),
    }
    return settings | ({"OPKIT_CXX": now.cxx} if now.cxx else {})


def _watch(process: subprocess.Popen[bytes], place: Entry, done: Done | None) -> None:
    _ = process.wait()
    if done is not None:
        _ = done(place.found())
