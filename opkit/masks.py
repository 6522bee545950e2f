"""Masks and biases of :func:`opkit.attention`: which keys a query sees, and what is added to the logits."""

from opkit.attn.masks.algebra import And as And
from opkit.attn.masks.algebra import Dense as Dense
from opkit.attn.masks.algebra import Mask as Mask
from opkit.attn.masks.algebra import MaskFunction as MaskFunction
from opkit.attn.masks.algebra import Not as Not
from opkit.attn.masks.algebra import Or as Or
from opkit.attn.masks.algebra import VarLen as VarLen
from opkit.attn.masks.biases import ALiBi as ALiBi
from opkit.attn.masks.biases import RelativePosition as RelativePosition
from opkit.attn.masks.biases import ScoreMods as ScoreMods
from opkit.attn.masks.biases import Softcap as Softcap
from opkit.attn.masks.block_masks import Blocks as Blocks
from opkit.attn.masks.diagonals import Causal as Causal
from opkit.attn.masks.diagonals import PrefixLM as PrefixLM
from opkit.attn.masks.diagonals import SlidingWindow as SlidingWindow
from opkit.attn.masks.sequences import KeyPadding as KeyPadding
from opkit.attn.masks.sequences import Segments as Segments
