"""The operator of attention in float8, for the interpreter's process."""

from opkit.attn.float8 import attention_float8_operator

attention_float8 = attention_float8_operator()
