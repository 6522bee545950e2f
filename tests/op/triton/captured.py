"""A backend of torch.compile that keeps the programs that it is given, and pretends to run their Triton kernels."""

import torch
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

_LAUNCHES = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


class Target:
    """What torch asks Triton's driver for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


class Pretended(torch.fx.Interpreter):
    """Runs a program whose launches do nothing."""

    def call_function(self, target, args, kwargs):
        if target is triton_kernel_wrapper_functional:
            return {name: kwargs["kwargs"][name].clone() for name in kwargs["tensors_to_clone"]}
        return None if target is triton_kernel_wrapper_mutation else super().call_function(target, args, kwargs)


class Captured:
    """A backend of torch.compile that keeps what it is given."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.programs = []
        self.backend = aot_autograd(fw_compiler=self.keep)

    def keep(self, program, _):
        from functorch.compile import make_boxed_func

        self.programs.append(program)
        return make_boxed_func(lambda *args: Pretended(program).run(*args))

    @property
    def nodes(self):
        return [node for program in self.programs for node in program.graph.nodes if node.op == "call_function"]

    @property
    def launches(self):
        return [node for node in self.nodes if node.target in _LAUNCHES]

    def calls_of(self, op):
        overload = torch.ops
        for part in op.name.split("::"):
            overload = getattr(overload, part)
        return [node for node in self.nodes if node.target is overload.default]

    @property
    def kernels(self):
        return [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in self.launches]

    def constants(self, node):
        return {**kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"]), **node.kwargs["kwargs"]}

    def compiled(self, function, **options):
        return torch.compile(function, backend=self.backend, fullgraph=True, **options)
