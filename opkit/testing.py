"""Testing operators: what a test suite asks of opkit."""

from opkit.op.triton.interpreter import Interpreter as Interpreter
from opkit.op.triton.interpreter import interpret as interpret
