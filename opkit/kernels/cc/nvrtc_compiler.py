"""A program that compiles device code by NVRTC, as a command: it uses Python's standard library alone.

python -I nvrtc_compiler.py LIBRARY [--name=EXPRESSION ...] [--names=FILE] [OPTION ...] SOURCE -o OUTPUT

OUTPUT gets the code for ``-arch=sm_90a`` and the like (a cubin), or PTX for ``-arch=compute_90``. FILE gets the lowered name of
each expression, a C string literal and a comma a line. What NVRTC says goes to stdout. ``LIBRARY --version`` prints its version.

NVRTC's interface: https://docs.nvidia.com/cuda/nvrtc.
"""

import contextlib
import ctypes
import glob
import os
import re
import sys


class _Failed(Exception):
    """NVRTC refused something; what it says of that."""


class _Nvrtc:
    def __init__(self, path: str) -> None:
        # NVRTC looks for its second library by name, where the loader finds it or a library of that name is loaded.
        for each in sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "libnvrtc-builtins*.so*"))):
            if ".alt." not in each:
                with contextlib.suppress(OSError):
                    ctypes.CDLL(each)
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> None:
        error = self._library[f"nvrtc{function}"](*arguments)
        if error:
            raise _Failed(f"nvrtc{function}: {self._library.nvrtcGetErrorString(error).decode()}")

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}"

    def content(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        memory = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, memory)
        return memory.raw

    def lowered(self, program: ctypes.c_void_p, name: str) -> str:
        found = ctypes.c_char_p()
        self.call("GetLoweredName", program, os.fsencode(name), ctypes.byref(found))
        return (found.value or b"").decode()


def _compile(nvrtc: _Nvrtc, source: str, options: list[str], names: list[str]) -> tuple[bytes, list[str]]:
    """Return the code, and the lowered names."""
    with open(source, "rb") as file:
        text = file.read()
    program = ctypes.c_void_p()
    nvrtc.call("CreateProgram", ctypes.byref(program), text, os.fsencode(source), 0, None, None)
    for name in names:
        nvrtc.call("AddNameExpression", program, os.fsencode(name))
    given = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
    try:
        nvrtc.call("CompileProgram", program, len(options), given)
    finally:
        sys.stdout.buffer.write(nvrtc.content(program, "ProgramLog").rstrip(b"\0"))
    real = any(re.fullmatch(r"(-arch|--gpu-architecture)=sm_\w+", option) for option in options)
    return nvrtc.content(program, "CUBIN" if real else "PTX"), [nvrtc.lowered(program, name) for name in names]


def _taken(arguments: list[str], prefix: str) -> list[str]:
    """Remove the arguments that begin so; return their rests."""
    found = [each.removeprefix(prefix) for each in arguments if each.startswith(prefix)]
    arguments[:] = [each for each in arguments if not each.startswith(prefix)]
    return found


def main(library: str, *arguments: str) -> int:
    """Compile; return the exit status."""
    try:
        nvrtc = _Nvrtc(library)
        if arguments == ("--version",):
            print(nvrtc.version())
            return 0
        *options, source, _, output = arguments
        files, names = _taken(options, "--names="), _taken(options, "--name=")
        code, lowered = _compile(nvrtc, source, options, names)
    except (_Failed, OSError) as error:
        print(f"error: {error}")
        return 1
    with open(output, "wb") as file:
        file.write(code)
    for each in files:
        with open(each, "w", encoding="ascii") as file:
            file.writelines(f'"{name}",\n' for name in lowered)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
