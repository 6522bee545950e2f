"""The built-in compiler: from a captured graph to machine code, in stages that can be read and tested one by one.

capture    torch.compile's graph, through AOTAutograd, as a ``Graph`` that needs no torch
ir         what the stages pass on: Graph, Program, Schedule, Kernel; expressions and indices; printer, verifier
lower      Graph to Program (one rule an operator), rewritten, fused and planned into a Schedule of loop nests
emit       loop nests to C
run        a Schedule and its compiled kernels as a function of tensors
"""

from opkit.compiler import artifacts as _artifacts  # noqa: F401  torch can load saved cache artifacts from now on
