"""The public names for tests of operators."""

from opkit.contract.calls.cases import Call as Call
from opkit.contract.calls.cases import Case as Case
from opkit.contract.calls.cases import History as History
from opkit.contract.calls.cases import TensorCase as TensorCase
from opkit.contract.calls.specs import shapes as shapes
from opkit.contract.calls.specs import sizes as sizes
from opkit.contract.calls.specs import tensor as tensor
from opkit.contract.calls.tensors import FILLS as FILLS
from opkit.contract.calls.tensors import LAYOUTS as LAYOUTS
from opkit.contract.report.replaying import load as load
from opkit.contract.report.replaying import replay as replay
from opkit.contract.user_tests import calls as calls
from opkit.contract.user_tests import contract as contract
from opkit.contract.user_tests import layouts as layouts
from opkit.contract.user_tests import make_call as make_call
from opkit.contract.user_tests import make_tensor as make_tensor
from opkit.contract.user_tests import tensors as tensors
from opkit.op.triton.interpreter import Interpreter as Interpreter
from opkit.op.triton.interpreter import interpret as interpret
from opkit.op.triton.testing import CompileReport as CompileReport
from opkit.op.triton.testing import compile_for as compile_for
from opkit.op.triton.testing import compile_launches as compile_launches
