"""The process that builds in the background: ``python child.py <request> <niceness>``.

It takes the place of the package ``opkit`` with an empty one, since the real one would import torch first.
"""

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any


def main(request: dict[str, Any], niceness: int) -> None:
    """Build as :func:`opkit.kernels.bridge.build` does; what goes wrong is in the cache's log."""
    with contextlib.suppress(OSError):
        _ = os.nice(niceness)
    package = types.ModuleType("opkit")
    package.__path__ = [request["package"]]
    sys.modules["opkit"] = package
    from opkit.kernels import bridge

    given = request["paths"]
    folders = {name: Path(given[name]) for name in ("include_dir", "library_dir")}
    _ = bridge.build(bridge.TorchPaths(**given | folders))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
