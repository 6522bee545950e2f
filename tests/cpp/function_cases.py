"""The C that opkit writes of a mask and a score, for the driver: with what a call passes to it, as C++."""

from collections.abc import Sequence
from pathlib import Path

import torch

from opkit.attn import api, cpu_programs
from opkit.attn.calls import AttentionCall
from opkit.attn.functions.c.compiled import CompiledFunction
from opkit.attn.functions.c.emission import mask_text, score_text, slope_text

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 4, 2, 23, 133
NEAR = torch.tensor([40, 133])
TABLE = torch.sin(torch.arange(HEADS * (QUERIES + KEYS)) / 10.0).reshape(HEADS, -1)


def mask(b, h, i, j):
    return torch.where(i % 2 == 0, (3 * i + 5 * j + h) % 7 < 4, j < NEAR[b])


def score(s, b, h, i, j):
    return torch.where(i * j % 3 == 0, 1.5 * s, 1.5 * s + TABLE[h, i - j + KEYS])


def write(folder: Path) -> None:
    """Write three files of C, and ``function_cases.inc`` with the programs, words and tensors of a call."""
    q, k = torch.zeros(BATCH, HEADS, QUERIES, 16), torch.zeros(BATCH, KV_HEADS, KEYS, 16)
    call = AttentionCall(*api.lowered(q, k, k, mask, score, None, None, None, 0.0, "bhsd"))
    (of_mask,), (of_score,) = cpu_programs.functions_of(tuple(call.mask), tuple(call.bias))
    programs = cpu_programs.programs_of(call, True)
    entries = {}
    for name, (text, entry_bytes) in {
        "mask": mask_text(of_mask.root),
        "score": score_text(of_score.root),
        "slope": slope_text(of_score.root),
    }.items():
        (folder / f"{name}.c").write_text(
            f"#define opkit_function {name}_function\n#define opkit_tabulate {name}_tabulate\n{text}"
        )
        tabulate = f"{name}_tabulate" if entry_bytes else "nullptr"
        entries[name] = f"Code{{address_of({name}_function), address_of({tabulate}), {entry_bytes}}}"
    lines = [f'extern "C" void {name}_function(), {name}_tabulate();' for name in entries]
    lines += [
        f"const std::vector<int64_t> kMaskProgram = {_listed(programs.mask)}, kScoreProgram = {_listed(programs.bias)};"
    ]
    for name, tensors in (("Mask", call.mask_tensors), ("Score", call.bias_tensors)):
        for number, x in enumerate(tensors):
            kind = {torch.int64: "int64_t", torch.int32: "int32_t", torch.float32: "float"}[x.dtype]
            lines.append(f"const {kind} k{name}Tensor{number}[] = {_listed(x.flatten().tolist())};")
        listed = ", ".join(f"k{name}Tensor{number}" for number in range(len(tensors)))
        lines.append(f"const std::vector<const void*> k{name}Tensors = {{{listed}}};")
    lines.append(_function("Mask", entries["mask"], "Code{}", programs.mask_functions[0]))
    lines.append(_function("Score", entries["score"], entries["slope"], programs.bias_functions[0]))
    (folder / "function_cases.inc").write_text("\n".join([*lines, ""]))


def _listed(numbers: Sequence[float]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"


def _function(name: str, code: str, slope: str, of: CompiledFunction) -> str:
    places = ", ".join(f"{{{word}, {number}}}" for word, number in of.tensors)
    return f"const Function k{name}Function = {{{code}, {slope}, {_listed(of.words)}, {{{places}}}}};"
