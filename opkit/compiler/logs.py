"""The compiler's loggers, one for each topic, which ``OPKIT_LOG`` sends to the terminal."""

from __future__ import annotations

import functools
import logging

from opkit import config
from opkit.compiler.capture import torch_private as private

_NAMES = {
    "fusion": "opkit.compiler.fusion",
    "output_code": "opkit.compiler.output_code",
    "recompiles": private.RECOMPILES_LOGGER,  # Dynamo compiles again, and knows why
}

compiler = logging.getLogger("opkit.compiler")
fusion = logging.getLogger(_NAMES["fusion"])
output_code = logging.getLogger(_NAMES["output_code"])


@functools.cache
def set_up() -> None:
    """Send the topics that the settings name to the terminal, once."""
    if "recompiles" in config.get().log:
        private.log_recompiles()
    for topic in sorted(config.get().log):
        logger = logging.getLogger(_NAMES[topic])
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[opkit:{topic}] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
