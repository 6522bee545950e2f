"""Make a wheel of a package that ``opkit build`` has compiled: by the project's own build backend, under pip."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from pathlib import Path

from opkit.errors import PackageError

_PROJECT = "pyproject.toml"
_SETUPTOOLS = "setuptools.build_meta"


def project_of(folder: Path) -> Path:
    """Return the folder of the project that a package belongs to: the nearest above with a pyproject.toml.

    Raises:
        PackageError: there is none, or the package is a single file.
    """
    found = next((above for above in folder.absolute().parents if (above / _PROJECT).is_file()), None)
    if found is None or folder.name != "_opkit":
        raise PackageError(
            f"--wheel: {folder.parent} belongs to no project, as no folder above it has a {_PROJECT}, or it is no package but "
            "a single file. `opkit new` writes a project to copy from."
        )
    return found


def build(folder: Path, output: Path, native: bool) -> Path:
    """Make a wheel of the project of a package; nothing is downloaded.

    Args:
        folder: ``_opkit`` in the package's folder, with what was compiled.
        output: the folder to write the wheel to.
        native: whether libraries are in it, so that it is for this platform alone.

    Raises:
        PackageError: there is no project, its build backend fails, or it makes a wheel without the files in ``folder``, with
            others, or for other platforms.
    """
    project = project_of(folder)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    try:
        with tempfile.TemporaryDirectory(prefix="opkit-wheel-") as scratch:
            made = _made(project, Path(scratch), platform if native else "")
            _check(made, folder, project, platform if native else "")
            output.mkdir(parents=True, exist_ok=True)
            path = output / made.name
            path.write_bytes(made.read_bytes())
    except OSError as error:
        raise PackageError(f"--wheel: {output} cannot be written to: {error.strerror or error}") from error
    return path


def _made(project: Path, scratch: Path, platform: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(scratch)]
    if platform and _backend(project) == _SETUPTOOLS:
        command.append(f"--config-settings=--build-option=--plat-name={platform}")
    done = subprocess.run([*command, str(project)], capture_output=True, text=True)
    made = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(made) != 1:
        raise PackageError(
            f"--wheel: the build backend of {project} made no wheel. It runs in this environment, which needs pip and what "
            f"build-system.requires lists.\n\n{done.stdout}{done.stderr}"
        )
    return made[0]


def _backend(project: Path) -> str:
    try:
        with (project / _PROJECT).open("rb") as file:
            return str(tomllib.load(file).get("build-system", {}).get("build-backend", _SETUPTOOLS))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PackageError(f"--wheel: {project / _PROJECT} cannot be read: {error}") from error


def _check(made: Path, folder: Path, project: Path, platform: str) -> None:
    """Raise unless a wheel has exactly the files of ``folder``, and is for this platform if it must be."""
    inside = f"{folder.parent.name}/{folder.name}/"
    with zipfile.ZipFile(made) as archive:
        packed = {name.rpartition(inside)[2] for name in archive.namelist() if inside in name and name[-1] != "/"}
    built = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if missing := sorted(built - packed):
        raise PackageError(
            f"--wheel: the project {project} leaves {len(missing)} of the {len(built)} files in {folder} out of its wheel, such "
            f"as {missing[0]}. Add them to its package data; for setuptools: package-data = {{{folder.parent.name} = "
            '["_opkit/**/*"]} below [tool.setuptools].'
        )
    if extra := sorted(packed - built):
        raise PackageError(
            f"--wheel: {made.name} has {len(extra)} files of an earlier build, such as {extra[0]}. Remove {project / 'build'}."
        )
    if platform and made.name.endswith("-none-any.whl"):
        raise PackageError(
            f"--wheel: {made.name} has libraries for {platform}, but its tag says that it is for all platforms, and opkit knows "
            f"the setting for it of {_SETUPTOOLS} alone, not of {_backend(project)}. Build the wheel with that, then run: "
            f"python -m wheel tags --platform-tag {platform} --remove {made.name}"
        )
