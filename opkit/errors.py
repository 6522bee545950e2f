"""Define every exception and warning that opkit raises; each docstring says which mistake it stands for.

All errors derive from :class:`OpkitError`. Where ``torch.library`` raises a built-in exception for the same mistake,
the opkit error derives from that built-in too, so code written against ``torch.library.custom_op`` keeps working.
"""

from __future__ import annotations


class OpkitError(Exception):
    """Base class of all opkit errors."""


class DefinitionError(OpkitError, ValueError):
    """The decorated function cannot become an operator: its name, parameters or annotations are at fault.

    >>> import opkit
    >>> try:
    ...     opkit.custom_op("no_namespace", mutates_args=())
    ... except opkit.errors.DefinitionError as error:
    ...     print(error)
    opkit.custom_op: the name 'no_namespace' has no namespace. Write it as 'my_library::no_namespace'.
    """


class NameClashError(DefinitionError):
    """The operator's name is already used by another module or library."""


class MutationError(OpkitError, RuntimeError):
    """The operator's writes differ from its ``mutates_args``, or cannot be determined."""


class MutationUnknownError(MutationError, ValueError):
    """``mutates_args`` was left out and could not be determined by tracing or from the source."""


class ShapeError(OpkitError, ValueError):
    """A tensor's shape contradicts the shape pattern of its annotation."""


class ArgumentTypeError(OpkitError, TypeError):
    """An operator was called with an argument of the wrong type."""


class DtypeError(OpkitError, TypeError):
    """A tensor's dtype contradicts its annotation."""


class AliasError(OpkitError, RuntimeError):
    """An output shares memory with an input or with another output."""


class OutputError(OpkitError, RuntimeError):
    """The reference or a kernel returned something other than its schema or its fake implementation says."""


class RuleError(OpkitError, RuntimeError):
    """A rule (fake, backward, vmap, ...) is needed, was not registered, and cannot be derived."""


class KernelError(OpkitError, RuntimeError):
    """No kernel fits a call, or a kernel's registration is at fault."""


class NoKernelError(KernelError, NotImplementedError):
    """A call is on a device for which the operator has no kernel and no body."""


class DeviceArgumentError(KernelError, ValueError):
    """An operator without tensor arguments has kernels for some device, but no argument by which to choose it."""


class DeclarationError(KernelError, ValueError):
    """A C declaration cannot be read, or one of its parameters matches nothing in the operator."""


class ModelFileError(OpkitError, ValueError):
    """A file of ``opkit.export`` is damaged, or was made for another machine, or by another version of torch or opkit."""


class ToolchainError(KernelError):
    """No compiler was found for a kernel's language, or the one named by a setting cannot be run."""


class CompileError(KernelError):
    """A compiler refused a kernel's source, or did not finish in time; the message shows the author's own lines.

    ``log`` is the compiler's output, ``command`` reproduces it.
    """

    log: str = ""
    command: tuple[str, ...] = ()


class CacheError(OpkitError, OSError):
    """The build cache cannot be used at all, and neither can a temporary folder in its place."""


class ContractError(OpkitError, AssertionError):
    """An operator breaks its contract; the message is the whole report of :func:`opkit.check`."""


class CheckpointError(OpkitError, RuntimeError):
    """A value that a layer's forward kept for its backward was written to."""


class SanitizerError(KernelError):
    """A kernel built with ``debug=True`` read or wrote memory that is not its own, or did something undefined."""


class ResourceError(KernelError):
    """A compiled kernel needs more of something than the GPU has, such as shared memory."""


class InterpreterError(KernelError):
    """A Triton kernel failed in the interpreter, or the interpreter's process did."""


class PackageError(OpkitError, RuntimeError):
    """A kernel built ahead of time is missing from its package, was changed, or was made for another opkit."""


class KeywordTensorError(DefinitionError, NotImplementedError):
    """A tensor is a keyword-only parameter, which torch.library does not support (``torch.Tag.out`` excepted)."""


class UnknownOperatorError(OpkitError, LookupError):
    """No operator of that name was defined with opkit."""


class ConfigError(OpkitError, ValueError):
    """An ``OPKIT_*`` environment variable holds a value that cannot be used."""


class UnsupportedTorchError(OpkitError, RuntimeError):
    """The installed torch is older than the oldest release that opkit runs on."""


class ArgumentError(OpkitError, ValueError):
    """A function or a command was given a value that it cannot use."""


class CompilerError(OpkitError, RuntimeError):
    """A bug in the built-in compiler: the output of one of its stages is not well formed. The message names the place."""


class IndexOutOfRangeError(OpkitError, IndexError, RuntimeError):
    """A compiled graph read an index from a tensor, and it is outside its dimension.

    Eager mode raises ``IndexError`` for some operators and ``RuntimeError`` for others; a kernel may compute several operators.
    """


class DemoError(OpkitError, RuntimeError):
    """``opkit demo`` has no text to train on, or the two runs failed to agree or to learn."""


class RedefinitionWarning(UserWarning):
    """An operator was defined a second time by the same module; the newer definition took its place."""


class UntestedTorchWarning(UserWarning):
    """The installed torch is newer than the newest release this version of opkit was tested with."""


class StrideWarning(UserWarning):
    """A kernel returned other strides than the reference; its results are being copied into the right layout."""


class BuildCacheWarning(UserWarning):
    """The build cache could not be used as it is; kernels are built into a temporary folder, or built again."""


class NoCompilerWarning(UserWarning):
    """A kernel or a graph could not be built because there is no compiler for it, on this machine or in opkit for its device.

    Another kernel runs, or the operator's reference; a graph runs in eager mode.
    """


class TuningWarning(UserWarning):
    """A Triton kernel runs with a configuration that was not measured for its shapes, or the measurements cannot be stored."""
