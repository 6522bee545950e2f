"""Run saved models and compiled kernels without torch: on NumPy arrays, or any tensors with DLPack.

``libopkit_model.so`` does the work; C and C++ programs use it through ``include/opkit_model.h``. This package needs nothing but
Python, and is also a wheel of its own, ``opkit-runtime``, which has no dependencies. See ``docs/runtime.md``.

Example:
    >>> import opkit, opkit.runtime, numpy, tempfile, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = opkit.export(model, (torch.ones(3, 4),), path=f"{folder}/model.opk")
    ...     loaded = opkit.runtime.load(path)
    >>> result = loaded(numpy.ones((3, 4), numpy.float32))
    >>> result, numpy.from_dlpack(result).shape
    (Array(float32[3, 2]), (3, 2))
"""

from opkit.runtime.arrays import Array
from opkit.runtime.kernels import Kernel, load_kernel
from opkit.runtime.library import set_threads
from opkit.runtime.models import Entry, Model, load

__all__ = ["Array", "Entry", "Kernel", "Model", "load", "load_kernel", "set_threads"]
