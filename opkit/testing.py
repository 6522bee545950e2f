"""The public names for tests of operators."""

from opkit.contract.calls.cases import Call as Call
from opkit.contract.calls.cases import Case as Case
from opkit.contract.calls.cases import TensorCase as TensorCase
from opkit.contract.calls.fills import FILLS as FILLS
from opkit.contract.calls.histories import History as History
from opkit.contract.calls.layouts import LAYOUTS as LAYOUTS
from opkit.contract.calls.sizes import shapes as shapes
from opkit.contract.calls.sizes import sizes as sizes
from opkit.contract.calls.specs import tensor as tensor
from opkit.contract.plugin import contract as contract
from opkit.contract.report.replaying import load as load
from opkit.contract.report.replaying import replay as replay
from opkit.contract.strategies import calls as calls
from opkit.contract.strategies import layouts as layouts
from opkit.contract.strategies import make_call as make_call
from opkit.contract.strategies import make_tensor as make_tensor
from opkit.contract.strategies import tensors as tensors
from opkit.op.triton.interpreter import Interpreter as Interpreter
from opkit.op.triton.interpreter import interpret as interpret
from opkit.op.triton.testing import CompileReport as CompileReport
from opkit.op.triton.testing import compile_for as compile_for
from opkit.op.triton.testing import compile_launches as compile_launches
