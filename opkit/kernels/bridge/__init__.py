"""The bridge: C++ compiled once for each torch, with which calls of native kernels skip Python.

``bridge.cpp`` puts two kernels in front of an operator's Python ones in torch's dispatcher. They look at a call's keys
and tensors; a call that needs no gradient, mode, transform or profiler runs in C from there, and every other one goes on
to Python. It is the one part of opkit compiled against torch's headers: without it everything works, slower.

The bridge is built by ``opkit bridge`` only, never by a call. It saves a call 1 to 2.4 us and takes 6 to 15 s to compile,
so that a process that built it at first use would need some four million calls to earn that back; most make fewer, and a
container or CI job with an empty cache would wait for it each time. A process that could use the bridge and does not find it
says so once, in the log ``opkit.bridge``, and ``opkit doctor`` says so too. An image is built with ``RUN opkit bridge``.

- :func:`build` builds the bridge into the build cache, :func:`load` loads it from there and never builds it;
- :func:`status` says whether it is there, for ``opkit doctor``.

Nothing here imports torch: ``opkit.op.torch_private`` says where it is.
"""

from opkit.kernels.bridge.building import Status as Status
from opkit.kernels.bridge.building import TorchPaths as TorchPaths
from opkit.kernels.bridge.building import build as build
from opkit.kernels.bridge.building import status as status
from opkit.kernels.bridge.library import Bridge as Bridge
from opkit.kernels.bridge.library import Installed as Installed
from opkit.kernels.bridge.library import load as load
