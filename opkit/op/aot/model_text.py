"""C++ that carries compiled kernels, as text for the source that AOTInductor makes of a model.

Inductor puts a call ``aoti_torch_cpu_<name>(x, 1e-06, &out)`` where a model calls an operator. The text defines these functions:
they pass the arguments to opkit's runtime, which runs the kernel. The runtime and the kernels are shared libraries, whose bytes
are strings in the text. The first call writes them to files, loads them, and removes the files.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from opkit.kernels.facts import Argument, Facts

_HEADER = Path(__file__).parents[2] / "kernels" / "include" / "opkit.h"
_PER_LINE = 96
_ESCAPES = [chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}" for byte in range(256)]

_RUNTIME = """
{header}
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// A shared library in a file of its own, which is removed at the end.
struct opkit_file {
    char path[4096];
    opkit_file(const char* bytes, size_t size) {
        const char* folder = getenv("TMPDIR");
        snprintf(path, sizeof path, "%s/opkit-XXXXXX", folder != nullptr && *folder != 0 ? folder : "/tmp");
        const int file = mkstemp(path);
        if (file < 0) throw std::runtime_error(std::string("opkit: kernels cannot be written to ") + path);
        ssize_t written = 1;
        for (; size > 0 && written > 0; bytes += written, size -= (size_t)written) written = write(file, bytes, size);
        close(file);
        if (written > 0) return;
        unlink(path);
        throw std::runtime_error(std::string("opkit: kernels cannot be written to ") + path);
    }
    ~opkit_file() { unlink(path); }
};

struct opkit_functions {
    const opk_kernel* (*load)(const char* path, const int64_t* programs, char* error, size_t size);
    int (*call)(const opk_kernel* kernel, const opk_input* inputs, void** outputs, char* error, size_t size);
};

static const char opkit_library[] = {library};

static opkit_functions opkit_find_functions() {
    const opkit_file file(opkit_library, sizeof opkit_library - 1);
    void* library = dlopen(file.path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(std::string("opkit: the runtime cannot be loaded: ") + dlerror());
    const opkit_functions found = {reinterpret_cast<decltype(opkit_functions::load)>(dlsym(library, "opkit_load")),
                                   reinterpret_cast<decltype(opkit_functions::call)>(dlsym(library, "opkit_call"))};
    if (found.load == nullptr || found.call == nullptr) throw std::runtime_error("opkit: the runtime is an older one");
    return found;
}

static const opkit_functions& opkit_runtime() {
    static const opkit_functions found = opkit_find_functions();
    return found;
}

static const opk_kernel* opkit_load(const char* bytes, size_t size, const int64_t* programs) {
    char error[1024] = "";
    const opkit_file file(bytes, size);
    const opk_kernel* kernel = opkit_runtime().load(file.path, programs, error, sizeof error);
    if (kernel == nullptr) throw std::runtime_error(error);
    return kernel;
}

// Inductor passes null for an output that it does not use, and for that of an operator without outputs.
static void opkit_give(void* output, AtenTensorHandle* to) {
    if (to != nullptr)
        *to = static_cast<AtenTensorHandle>(output);
    else if (output != nullptr)
        aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(output));
}

static void opkit_run(const opk_kernel* kernel, const opk_input* inputs, void** outputs) {
    char error[1024] = "";
    if (opkit_runtime().call(kernel, inputs, outputs, error, sizeof error) != 0) throw std::runtime_error(error);
}
"""


@dataclasses.dataclass(frozen=True)
class CarriedKernel:
    """A kernel in a model.

    Attributes:
        name: of its hidden operator, of letters, digits and underscores.
        device: the device type that it runs on.
        facts: the operator's arguments and outputs.
        declared: the declared type of each argument.
        library: the kernel's shared library.
        programs: the programs of its outputs' sizes.
    """

    name: str
    device: str
    facts: Facts
    declared: tuple[str, ...]
    library: Path
    programs: tuple[tuple[int, ...], ...]


def runtime_text(library: Path) -> str:
    """Return the C++ of the runtime, to stand after ``extern``: the first declaration, then definitions."""
    header = re.sub(r"(?s)/\*.*?\*/", "", _HEADER.read_text(encoding="utf-8"))
    text = _RUNTIME.replace("{header}", header).replace("{library}", literal(library.read_bytes()))
    return _once("opkit_kernels", text)


def kernel_text(kernel: CarriedKernel) -> str:
    """Return the C++ function that runs a kernel, to stand after ``extern``."""
    arguments, outputs = kernel.facts.arguments, kernel.facts.outputs
    declared = zip(arguments, kernel.declared, strict=True)
    parameters = [_parameter(argument, kind, f"a{number}") for number, (argument, kind) in enumerate(declared)]
    results = [f"AtenTensorHandle* out{number}" for number in range(len(outputs) or 1)]
    words = [word for program in kernel.programs for word in program]
    numbers = ", ".join([*(str(word) if word > -(2**63) else "INT64_MIN" for word in words), "0"])
    lines = [
        f"static const char {kernel.name}_library[] = {literal(kernel.library.read_bytes())};",
        f"static const int64_t {kernel.name}_programs[] = {{{numbers}}};",
        f"static AOTITorchError aoti_torch_{kernel.device}_{kernel.name}({', '.join([*parameters, *results])}) {{",
        "    static const opk_kernel* const kernel =",
        f"        opkit_load({kernel.name}_library, sizeof {kernel.name}_library - 1, {kernel.name}_programs);",
        f"    opk_input inputs[{len(arguments) or 1}] = {{}};",
        f"    void* outputs[{len(outputs) or 1}] = {{}};",
        *(f"    {line}" for number, argument in enumerate(arguments) for line in _passed(argument, number)),
        "    opkit_run(kernel, inputs, outputs);",
        *(f"    opkit_give(outputs[{number}], out{number});" for number in range(len(outputs) or 1)),
        "    return AOTI_TORCH_SUCCESS;",
        "}",
    ]
    return _once(kernel.name, "\n".join(lines))


def _once(name: str, text: str) -> str:
    """Return a declaration, and definitions that count once, wherever Inductor repeats the declarations of functions."""
    return f"const char {name}_declared[];\n#ifndef {name}_defined\n#define {name}_defined\n{text}\n#endif\n"


def literal(content: bytes) -> str:
    r"""Return bytes as the lines of a C string, which ends in one more NUL.

    >>> print(literal(b'a"\x00?1'))
    <BLANKLINE>
    "a\042\000\0771"
    """
    pieces = [content[start : start + _PER_LINE] for start in range(0, len(content), _PER_LINE)] or [b""]
    return "".join('\n"' + "".join(map(_ESCAPES.__getitem__, piece)) + '"' for piece in pieces)


# ---- arguments, as Inductor passes them to functions of torch's C interface -------------------------------------------

_TYPES = {
    "tensor": "AtenTensorHandle", "tensors": "const AtenTensorHandle*", "int": "int64_t", "float": "double",
    "bool": "int32_t", "str": "const char*", "dtype": "int32_t", "ints": "const int64_t*", "floats": "const double*",
    "bools": "const int32_t*", "ignored": "int32_t",
}  # fmt: skip
_LISTS = ("tensors", "ints", "floats", "bools")


_MEMBERS = {
    "tensor": "tensor = {}", "tensors": "tensors = reinterpret_cast<void* const*>({})", "int": "i = {}", "float": "f = {}",
    "bool": "i = {}", "str": "text = {}", "dtype": "i = {}", "ints": "ints = {}", "floats": "floats = {}",
}  # fmt: skip


def _parameter(argument: Argument, declared: str, name: str) -> str:
    kind = "void*" if declared == "Generator" else _TYPES[argument.kind]
    if argument.optional and argument.kind in _LISTS:
        kind = "const void"  # of an empty list Inductor passes a pointer of its own type
    pointer = "*" if argument.optional and declared != "Generator" else ""
    counted = argument.kind in _LISTS or declared == "Device"
    return f"{kind}{pointer} {name}" + (f", int64_t {name}_count" if counted else "")


def _passed(argument: Argument, number: int) -> list[str]:
    """Return the lines that describe an argument to the runtime."""
    if argument.kind == "ignored":
        return []
    name, into = f"a{number}", f"inputs[{number}]"
    value = f"*{name}" if argument.optional else name
    if argument.optional and argument.kind in _LISTS:
        value = f"({name}_count == 0 ? nullptr : *static_cast<{_TYPES[argument.kind]} const*>({name}))"
    before: list[str] = []
    if argument.kind == "bools":
        before = [f"std::vector<uint8_t> {name}_bytes;"]
        lines = [f"{name}_bytes.assign({value}, {value} + {name}_count);", f"{into}.as.bools = {name}_bytes.data();"]
    else:
        lines = [f"{into}.as.{_MEMBERS[argument.kind].format(value)};"]
    if argument.kind in _LISTS:
        lines.append(f"{into}.count = {name}_count;")
    if argument.kind == "str":
        lines.append(f"{into}.count = static_cast<int64_t>(std::char_traits<char>::length({value}));")
    lines.append(f"{into}.present = 1;")
    if argument.optional:
        lines = [f"if ({name} != nullptr) {{", *(f"    {line}" for line in lines), "}"]
    return [*before, *lines]
