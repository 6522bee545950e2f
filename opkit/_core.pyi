"""The compiled core (``cpp_ext/``). It holds no torch code, so one build serves every torch release."""

def cpu_features() -> dict[str, bool]:
    """Which instruction sets this processor has and its operating system lets a program use, by name."""

class Registration:
    """A kernel's place in torch's dispatcher."""

    def remove(self) -> None:
        """Take the kernel out of the dispatcher again."""

class KernelLibrary:
    """A compiled kernel in its shared library."""

    def __init__(self, path: str) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def operator_name(self) -> str: ...
    @property
    def instance_count(self) -> int: ...
    def register(self, op: str, key: str, with_layout: bool) -> Registration: ...
    def add_program(self, words: list[int]) -> None: ...

def runtime_address() -> int:
    """The address of the functions that every kernel is given (opk_runtime in opkit.h)."""
