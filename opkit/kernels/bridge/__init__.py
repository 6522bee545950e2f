"""The bridge: C++ compiled once for each torch, with which calls of native kernels skip Python.

``bridge.cpp`` puts two kernels in front of an operator's Python ones in torch's dispatcher. They look at a call's keys
and tensors; a call that needs no gradient, mode, transform or profiler runs in C from there, and every other one goes on
to Python. It is the one part of opkit compiled against torch's headers: without it everything works, slower.

- :func:`load` returns the bridge for the running torch if the cache has it, and never builds;
- :func:`ensure_in_background` starts building it in a process of its own; :func:`build` builds it here and now;
- :func:`status` says how it stands, for ``opkit doctor``.

Nothing here imports torch: ``opkit.op.torch_private`` says where it is.
"""

from opkit.kernels.bridge.background import ensure_in_background as ensure_in_background
from opkit.kernels.bridge.building import Status as Status
from opkit.kernels.bridge.building import TorchPaths as TorchPaths
from opkit.kernels.bridge.building import build as build
from opkit.kernels.bridge.building import status as status
from opkit.kernels.bridge.library import Bridge as Bridge
from opkit.kernels.bridge.library import Installed as Installed
from opkit.kernels.bridge.library import load as load
