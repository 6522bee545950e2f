"""This module saves and loads the functions of ``torch.compile(..., backend="opkit").aot_compile(...)``.

torch's container is a pickle of Dynamo's part: guards and bytecode. opkit's part in it is JSON: the calling convention of the
graphs, their plans, and their C, whose binary comes from the build cache or from the C compiler. The container has the name of
this module, which must not change: only the class that it finds there can say that another version of opkit saved a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from opkit.compiler import graph_cache
from opkit.compiler.capture import torch_private as private
from opkit.compiler.run import plan_cache
from opkit.errors import CompileError


class SavedFunction(private.SerializableCallable):
    """A compiled graph of Dynamo's that can be saved.

    Args:
        call: the function that runs it.
        recording: its compiled graphs; None for a function that was loaded.
    """

    def __init__(self, call: Callable[..., Any], recording: graph_cache.Recording | None = None) -> None:
        self.call, self.recording = call, recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedFunction) -> bytes:
        """Return the function as JSON.

        Raises:
            CompileError: the function cannot be saved; the message says why.
        """
        recording = fn.recording
        if recording is None or recording.saved is None:
            why = "it was loaded from a file itself" if recording is None else recording.refusal or "it is not compiled"
            raise CompileError(
                f"torch.compile(backend='opkit') cannot save this function: {why}. The limits are in docs/compiler.md, "
                "'Saved functions'; what was compiled runs in this process."
            )
        return json.dumps({"versions": plan_cache.versions(), "torch": torch.__version__, **recording.saved}).encode()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedFunction:
        """Return the function that was saved.

        Raises:
            CompileError: another version of torch or of opkit saved it.
        """
        content = json.loads(data)
        if content["versions"] != plan_cache.versions():
            raise CompileError(
                f"This function was saved by torch {content['torch']} and another version of opkit than this one, or by "
                f"another torch than {torch.__version__}. Compile and save it again."
            )
        return cls(graph_cache.loaded(content).function())
