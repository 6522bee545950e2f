"""Testing operators: what a test suite asks of opkit."""

from opkit.contract.fills import FILLS as FILLS
from opkit.contract.layouts import LAYOUTS as LAYOUTS
from opkit.contract.plugin import contract as contract
from opkit.contract.sizes import shapes as shapes
from opkit.contract.specs import tensor as tensor
from opkit.op.triton.interpreter import Interpreter as Interpreter
from opkit.op.triton.interpreter import interpret as interpret
from opkit.op.triton.testing import CompileReport as CompileReport
from opkit.op.triton.testing import compile_for as compile_for
