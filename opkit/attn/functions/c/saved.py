"""C of the functions in a saved model's calls of ``opkit::attention``, with a table for the runtime without torch."""

from __future__ import annotations

from collections.abc import Iterable

from opkit.attn.calls import AttentionCall
from opkit.attn.functions.c.compiled import TEXTS, Kind
from opkit.attn.functions.c.emission import ENTRY, TABULATE
from opkit.attn.functions.c.loops import Layout
from opkit.attn.functions.expression import Function, text_words
from opkit.attn.masks.program import BIAS_FUNCTION, BIAS_OPERANDS, FUNCTION, MASK_OPERANDS, instructions
from opkit.compiler.ir.expr import Expr
from opkit.op.aot.call_code import Call

_TABLE = """\
#include <stdint.h>
struct opkit_attention_function {
    const int64_t *text; int64_t text_count;
    const int64_t *layout; int64_t words;
    const void *entry, *tabulate; int64_t bytes;
};"""


def units(calls: Iterable[Call]) -> list[str]:
    """Return the translation units: a function in each, and the table, ``SavedFunction`` of ``cpp_ext/model/functions.hpp``.

    Calls whose functions cannot be C have none; the runtime refuses them.
    """
    roots: dict[Expr, Kind] = {}
    for args, kwargs in calls:
        call = AttentionCall(*args, **kwargs)
        of_mask = [word for word in instructions(call.mask, MASK_OPERANDS) if word[0] == FUNCTION]
        of_bias = [word for word in instructions(call.bias, BIAS_OPERANDS) if word[0] == BIAS_FUNCTION]
        roots |= {Function.of(word[1:]).root: "mask" for word in of_mask}
        roots |= {Function.of(word[1:]).root: "score" for word in of_bias}
    if not roots:
        return []
    texts: list[str] = []
    declared, rows = [_TABLE], list[str]()
    for number, (root, kind) in enumerate(roots.items()):
        text, entry_bytes = TEXTS[kind](root)
        texts.append("\n".join([*(f"#define {name} {name}_{number}" for name in (ENTRY, TABULATE)), text]))
        words, layout = text_words(root), Layout.of(root)
        tabulate = f"(const void *){TABULATE}_{number}" if entry_bytes else "0"
        declared += [f"void {ENTRY}_{number}(void);", f"void {TABULATE}_{number}(void);"]
        declared += [_array(f"text_{number}", words), _array(f"layout_{number}", _described(layout))]
        row = f"text_{number}, {len(words)}, layout_{number}, {layout.count}, (const void *){ENTRY}_{number}"
        rows.append(f"    {{{row}, {tabulate}, {entry_bytes}}},")
    export = '__attribute__((visibility("default")))'
    table = [f"{export} const int64_t opkit_attention_function_count = {len(rows)};"]
    table += [f"{export} const struct opkit_attention_function opkit_attention_functions[] = {{", *rows, "};", ""]
    return [*texts, "\n".join([*declared, *table])]


def _array(name: str, words: Iterable[int]) -> str:
    return f"static const int64_t {name}[] = {{{', '.join(map(str, words))}}};"


def _described(layout: Layout) -> list[int]:
    """Return how many numbers and tensors there are, the list and place of each number, the word and rank of each tensor."""
    found = [len(layout.numbers), len(layout.tensors)]
    for name in layout.numbers:
        found += [int(name.startswith("x")), int(name[1:])]
    for name, word in layout.tensors.items():
        found += [word, layout.ranks[name]]
    return found
