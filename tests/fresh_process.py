"""Python programs in processes of their own that need not import torch: a server that has imported it forks them.

A process that must be a new interpreter (with another hash seed, or ``TRITON_INTERPRET`` set) is started by ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo"])


def run(
    arguments: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments (``-c program``, ``-m module`` or a file, after any ``-W``), as ``subprocess.run`` does.

    ``env`` is that of this process by default, and ``cwd`` a new folder.
    """
    return start(arguments, env, cwd).wait(check, timeout)


def start(arguments: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Child:
    """Start Python with these arguments."""
    return Child([*map(str, arguments)], os.environ if env is None else env, cwd)


class Child:
    """A running program."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], cwd: Path | None) -> None:
        self.arguments = arguments
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
        settings = (arguments, dict(env), str(cwd or self._folder.name), installed, self._files)
        self._process = _context.Process(target=_run, args=settings)
        self._process.start()

    def wait(self, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Its exit status and what it printed, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not; it is killed, with the processes that it started.
            subprocess.CalledProcessError: its exit status is not 0, and ``check`` is true.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        stdout, stderr = (file.read_text() if file.exists() else "" for file in self._files)
        self._folder.cleanup()
        if status is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout, stdout, stderr)
        done = subprocess.CompletedProcess(self.arguments, status, stdout, stderr)
        if check and status:
            print(stdout, stderr, sep="\n")
            done.check_returncode()
        return done


def _run(arguments: list[str], env: dict[str, str], cwd: str, installed: list[str], files: list[Path]) -> None:
    """Be Python with these arguments, in a child of the server."""
    os.setsid()
    for number, file in enumerate([os.devnull, *files]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    status = 1
    try:
        _interpret(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _interpret(arguments: list[str]) -> None:
    while arguments[0] == "-W":
        warnings._setoption(arguments[1])
        arguments = arguments[2:]
    if arguments[0] == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    elif arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
