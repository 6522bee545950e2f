"""Masks and biases of :func:`opkit.attention`: which keys a query sees, and what is added to the logits."""

from opkit.attn.biases import ALiBi as ALiBi
from opkit.attn.biases import RelativePosition as RelativePosition
from opkit.attn.block_masks import Blocks as Blocks
from opkit.attn.diagonals import Causal as Causal
from opkit.attn.diagonals import PrefixLM as PrefixLM
from opkit.attn.diagonals import SlidingWindow as SlidingWindow
from opkit.attn.masks import And as And
from opkit.attn.masks import Dense as Dense
from opkit.attn.masks import KeyPadding as KeyPadding
from opkit.attn.masks import Mask as Mask
from opkit.attn.masks import Not as Not
from opkit.attn.masks import Or as Or
from opkit.attn.masks import Segments as Segments
from opkit.attn.masks import VarLen as VarLen
from opkit.attn.score_mods import ScoreMods as ScoreMods
from opkit.attn.score_mods import Softcap as Softcap
