"""The public names, and the parameters of the functions that users call. Both change only on purpose."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import opkit

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NAMES = {
    "opkit": """
        CustomOp LoadedModel aoti_compile_and_package append_kv attention batch_invariant c_kernel check checkpoint
        checkpoint_layers checkpoint_name compile_layers context_parallel cpp_kernel cuda_kernel custom_op errors
        explain export fit from_library get keep load load_ipython_extension masks merge_attention nn offload operators optimize
        paged_attention register_transformers remove restore runtime_library scan scan_layers sdpa_override
        set_sdpa_override tensor_descriptor to_jax triton_kernel use_kernel
    """,
    "opkit.testing": """
        Call Case CompileReport FILLS History Interpreter LAYOUTS TensorCase calls compile_for compile_launches
        contract interpret layouts load make_call make_tensor replay shapes sizes tensor tensors
    """,
    "opkit.masks": """
        ALiBi And Blocks Causal Dense KeyPadding Mask MaskFunction Not Or PrefixLM RelativePosition ScoreMods Segments
        SlidingWindow Softcap VarLen
    """,
    "opkit.lowering": """
        Builder DTYPES Index NoRule Scalar Tensor TensorType absolute cast cos element equal erf exp expm1 floor index
        log log1p maximum minimum number pointwise power product sin sqrt tanh where
    """,
    "opkit.nn": """
        MultiheadAttention RMSNorm SwiGLU cross_entropy register_kernels rms_norm rotary_embedding swiglu
    """,
    "opkit.runtime": """
        Array Entry Kernel Model load load_kernel set_threads
    """,
    "opkit.errors": """
        AliasError ArgumentError ArgumentTypeError BuildCacheWarning CacheError CheckpointError CompileError
        CompilerError ConfigError ContractError DeclarationError DefinitionError DemoError DeviceArgumentError
        DtypeError IndexOutOfRangeError InterpreterError KernelError KeywordTensorError ModelFileError MutationError
        MutationUnknownError NameClashError NoCompilerWarning NoKernelError OpkitError OutputError PackageError
        RedefinitionWarning ResourceError RuleError SanitizerError ShapeError StrideWarning ToolchainError
        TuningWarning UnknownOperatorError UnsupportedTorchError UntestedTorchWarning
    """,
}

WITHOUT_EXAMPLE = {
    "opkit.context_parallel": "needs several processes",
    "opkit.load_ipython_extension": "needs a shell of IPython",
    "opkit.nn.register_kernels": "needs the package kernels",
    "opkit.register_transformers": "needs transformers",
    "opkit.runtime.Kernel": "needs a package that was built",
    "opkit.runtime.load_kernel": "needs a package that was built",
    "opkit.testing.CompileReport": "is what compile_for returns, which has one",
}

RAISES_NOTHING = {
    "opkit.checkpoint_name": "returns what it gets",
    "opkit.explain": "raises what the model and torch.compile raise",
    "opkit.load_ipython_extension": "defines a magic",
    "opkit.masks.Mask": "is a base class",
    "opkit.operators": "returns a list",
    "opkit.runtime.Array": "is a result",
    "opkit.sdpa_override": "changes which function runs",
    "opkit.set_sdpa_override": "changes which function runs",
    "opkit.testing.Call": "is data",
    "opkit.testing.Case": "is data",
    "opkit.testing.History": "is data",
    "opkit.testing.TensorCase": "is data",
    "opkit.testing.make_call": "takes what make_tensor takes",
    "opkit.testing.sizes": "takes any number",
}

METHODS = """
    describe lowering name reference register_autocast register_autograd register_effect
    register_fake register_kernel register_lowering register_torch_dispatch register_vmap schema select
    set_kernel_enabled
"""

PARAMETERS = {
    "custom_op": "name fn mutates_args device_types schema tags opaque reference inline autocast",
    "check": "op args kwargs reference max_examples seed properties exclude budget device database progress",
    "c_kernel": "source dtypes name flags bind libraries isa debug elementwise",
    "cpp_kernel": "source dtypes name flags bind sources include_dirs library_dirs libraries isa debug elementwise",
    "cuda_kernel": "source dtypes name flags bind sources include_dirs library_dirs libraries",
    "triton_kernel": "function grid outputs bind configs prune reset_to_zero pre_hook targets examples values",
    "from_library": "name library declaration reference bind preamble returns dtypes variants parallel flags options",
    "attention": "q k v mask bias query key output scale softcap sinks dropout_p descales return_lse layout kernel",
    "paged_attention": (
        "q k_pages v_pages page_table lengths cu_seqlens_q causal window scale softcap sinks k_scale v_scale mask bias "
        "return_lse kernel"
    ),
    "append_kv": "k v k_pages v_pages page_table lengths_before cu_seqlens k_scale v_scale",
    "merge_attention": "parts mesh",
    "explain": "model args kwargs",
    "checkpoint": "function policy",
    "checkpoint_layers": "model policy",
    "checkpoint_name": "x name",
    "compile_layers": "model backend options",
    "fit": "model budget args policies options",
    "keep": "names",
    "offload": "policy",
    "optimize": "model compile verbose",
    "restore": "model",
    "scan_layers": "layers x shared policy options",
    "use_kernel": "op name",
    "get": "name",
    "remove": "name",
    "runtime_library": "",
    "scan": "fn init xs length reverse policy",
    "sdpa_override": "",
    "set_sdpa_override": "enabled",
    "to_jax": "function",
    "tensor_descriptor": "tensor block shape layout padding",
    "register_transformers": "name",
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module):
    found = importlib.import_module(module)
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    documented = re.findall(r"^\.\. (?:auto\w+|data):: ([\w.]+)", text, re.MULTILINE)
    assert len(documented) == len(set(documented))
    public = {f"{module}.{name}" for module, names in NAMES.items() for name in names.split()} - set(NAMES)
    assert public - set(documented) == set()


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_has_a_docstring(module):
    found = [(name, getattr(importlib.import_module(module), name)) for name in NAMES[module].split()]
    assert [name for name, value in found if not isinstance(value, dict) and not inspect.getdoc(value)] == []


def test_every_public_name_has_an_example():
    """In its docstring or in a Python block of the reference; errors, and what rules are made of, have one for all."""
    pages = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    shown = set(re.findall(r"\w+", "".join(re.findall(r"^```python$(.*?)^```$", pages, re.MULTILINE | re.DOTALL))))
    missing = {
        f"{module}.{name}"
        for module in NAMES.keys() - {"opkit.errors", "opkit.lowering"}
        for name in set(NAMES[module].split()) - shown
        if f"{module}.{name}" not in NAMES
        if ">>>" not in (inspect.getdoc(getattr(importlib.import_module(module), name)) or "")
    }
    assert missing - {"opkit.testing.FILLS", "opkit.testing.LAYOUTS"} == WITHOUT_EXAMPLE.keys()


def documented():
    """The functions and classes of the reference with what it says of each, that of a class's methods too."""
    for module in NAMES.keys() - {"opkit.errors", "opkit.lowering"}:
        for name in NAMES[module].split():
            value = getattr(importlib.import_module(module), name)
            if callable(value):
                shown = [value, *(vars(value).values() if inspect.isclass(value) else ())]
                yield f"{module}.{name}", value, "\n".join(inspect.getdoc(each) or "" for each in shown)


def test_every_public_name_says_what_it_raises():
    """Of errors and of what rules are made of, which raise NoRule, the pages say it for all."""
    assert {name for name, _, text in documented() if "Raises:" not in text} == RAISES_NOTHING.keys()


def test_tensors_have_shapes_or_dtypes():
    """Whatever takes tensors or returns them says of which shapes or dtypes, or that it takes any."""
    described = re.compile(r"shape|dtype|\([\w*]+( \+ 1)?,[^()]*\)")
    taking = [(name, text) for name, value, text in documented() if re.search(r"\bTensor\b", signature(value))]
    assert len(taking) > 20
    assert [name for name, text in taking if not described.search(text.partition(">>>")[0])] == []


def signature(value):
    """The parameters and the result as annotated: of a class, those of ``__init__``, or else of ``forward``."""
    forward = getattr(value, "forward", None)
    return " ".join(str(inspect.signature(each)) for each in (value, forward) if callable(each))


@pytest.mark.parametrize("module", ["opkit", "opkit.errors"])
def test_what_a_module_offers_is_listed(module):
    """A name that type checkers see, and users, is public on purpose, exists at run time, and is in the reference."""
    found = importlib.import_module(module)
    source = Path(found.__file__).read_text(encoding="utf-8")
    offered = set(re.findall(r"import \w+ as ([a-z]\w*|[A-Z]\w*)$|^class (\w+)", source, re.MULTILINE))
    names = {name for pair in offered for name in pair if name and not name.startswith("_")}
    assert names == set(NAMES[module].split())


def test_methods_of_operators():
    assert set(METHODS.split()) <= set(dir(opkit.CustomOp))


@pytest.mark.parametrize("function", PARAMETERS)
def test_parameters(function):
    assert list(inspect.signature(getattr(opkit, function)).parameters) == PARAMETERS[function].split()
