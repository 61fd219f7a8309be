"""Which tensors are quantized, with how many bits, and why the others are not.

Knows MLX's formats and the kinds of tensors. Knows no files, and of families only what a module says about itself. The recipe
per kind of tensor:

    matrices of linear layers, embeddings, heads, stacked experts     quantized
    codebooks of a drafter's selector (lookup tables)                 quantized
    routers and gates that the family's mlx-lm class names            as that class says (mostly 8 bits)
    norms, biases, other vectors, recurrent parameters                float
    convolution kernels                                               float
    a matrix whose rows do not divide into groups                     float, listed with the reason
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.errors import ConversionError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# MLX's formats with their usual group size and bits; only affine allows others.
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
FLOAT_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

Predicate = Callable[[str, nn.Module], bool | dict]


@dataclass
class Recipe:
    """What was chosen: `config` goes into config.json; `fates` has one phrase for every parameter."""

    config: dict | None = None
    fates: dict[str, str] = field(default_factory=dict)

    def settle(self, chosen: dict[str, dict], default: dict) -> None:
        """Write `config` in mlx-lm's form: the default, then every layer that differs. Raises when nothing was chosen."""
        if not chosen:
            raise ConversionError(
                f"no matrix has rows that divide into groups of {default['group_size']}", "Use a smaller --q-group-size"
            )
        self.config = default | {path: options for path, options in chosen.items() if options != default}

    @property
    def kept_float(self) -> dict[str, str]:
        """Matrices that stay float although quantization was asked for, with the reason."""
        return {name: fate for name, fate in self.fates.items() if fate.startswith("float: ") and "input size" in fate}


@dataclass(frozen=True)
class Options:
    """The options of a conversion: as the arguments of `convert`."""

    quantize: bool
    group_size: int
    bits: int
    dtype: str | None
    predicate: Predicate | str | None
    mode: str = "affine"
    dequantize: bool = False


def check_options(q_bits: int, q_group_size: int, dtype: str | None, mode: str = "affine") -> None:
    """Raises ConversionError naming every option that MLX does not support."""
    faults = []
    if mode not in MODES:
        raise ConversionError(f"MLX has no q_mode {mode} (it has {', '.join(MODES)})", "Choose one of those listed")
    sizes, bits = (GROUP_SIZES, BITS) if mode == "affine" else ([n] for n in MODES[mode])
    where = "" if mode == "affine" else f" in {mode}"
    if q_bits not in bits:
        faults.append(f"q_bits {q_bits}{where} (it has {', '.join(map(str, bits))})")
    if q_group_size not in sizes:
        faults.append(f"q_group_size {q_group_size}{where} (it has {', '.join(map(str, sizes))})")
    if dtype is not None and dtype not in FLOAT_DTYPES:
        faults.append(f"dtype {dtype} (it has {', '.join(FLOAT_DTYPES)})")
    if faults:
        raise ConversionError(f"MLX has no {'; no '.join(faults)}", "Choose one of those listed")


def quantize(
    model: nn.Module,
    group_size: int,
    bits: int,
    predicate: Predicate | None = None,
    own_rules: Predicate | None = None,
    mode: str = "affine",
) -> Recipe:
    """Quantize a float model in place.

    Args:
      predicate: (module path, module) -> False, True or {"bits": ..., "group_size": ...}; the user's mixed recipe
      own_rules: the same from the model's class, which comes first; it can only give a layer more bits or leave it float
      mode: one of `MODES`; a dict without one means affine, as in mlx-lm
    Raises:
      ConversionError: the model is quantized already, or nothing in it can be quantized.
    """
    if any(hasattr(module, "scales") for _, module in model.named_modules()):
        raise ConversionError(
            "the weights are quantized already; float weights can be quantized",
            "Convert without -q to keep them, or start from the float checkpoint",
        )
    recipe = Recipe()
    chosen: dict[str, dict] = {}

    def predicate_for(path: str, module: nn.Module) -> bool | dict:
        fate, options = fate_of(path, module, mlx_options(group_size, bits, mode), predicate, own_rules)
        for name, _ in tree_flatten(module.parameters()):
            recipe.fates[f"{path}.{name}"] = fate if name == "weight" or not options else "float: bias"
        if options:
            chosen[path] = options
        return options or False

    # nn.quantize calls this once per leaf module; parameters outside of leaves (A_log, sinks) are added afterwards
    nn.quantize(model, group_size, bits, class_predicate=predicate_for)
    for name, value in tree_flatten(model.parameters()):
        if not name.endswith((".scales", ".biases")):
            recipe.fates.setdefault(name, f"float: {_vector_kind(name, value)}")
    recipe.settle(chosen, mlx_options(group_size, bits, mode))
    return recipe


def mlx_options(group_size: int, bits: int, mode: str) -> dict:
    """As mlx-lm writes them: affine is not named."""
    return {"group_size": group_size, "bits": bits} | ({} if mode == "affine" else {"mode": mode})


def fate_of(
    path: str, module: nn.Module, usual: dict, predicate: Predicate | None, own_rules: Predicate | None
) -> tuple[str, dict | None]:
    """What becomes of one module's matrix -> (the fate in words, quantization options or None).

    usual: the options of a matrix without special rules.
    """
    if not hasattr(module, "to_quantized"):
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            return "float: convolution kernel", None
        return f"float: {'norm' if 'norm' in path.lower() else 'not a matrix'}", None
    options = usual
    for who, rules in (("the family's class", own_rules), ("the predicate", predicate)):
        answer = rules(path, module) if rules is not None else True
        if answer is False:
            return f"float: {who} says so", None
        if not isinstance(answer, bool | dict):
            raise ConversionError(
                f"{who} gives {answer!r} for {path}; it must give False, True or a dict of bits and group_size",
                "Return one of those",
            )
        if isinstance(answer, dict):
            mode = answer.get("mode", "affine")
            size, bits = MODES.get(mode, (64, 4)) if mode != usual.get("mode", "affine") else (usual["group_size"], usual["bits"])
            options = mlx_options(answer.get("group_size", size), answer.get("bits", bits), mode)
            check_options(options["bits"], options["group_size"], None, mode)
    size = module.weight.shape[-1]
    if size % options["group_size"]:
        return f"float: input size {size} is not a multiple of group size {options['group_size']}", None
    return f"{options.get('mode', 'affine')} {options['bits']}-bit, group {options['group_size']}", options


def _vector_kind(name: str, value: mx.array) -> str:
    return "vector" if value.ndim <= 1 else "not the matrix of a layer"


def mixed_recipe(name: str, model: nn.Module, group_size: int) -> Predicate:
    """mlx-lm's named mixed recipes ("mixed_4_6", ...) as a predicate."""
    from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

    if name not in QUANT_RECIPES:
        raise ConversionError(
            f"there is no recipe {name}; mlx-lm has {', '.join(QUANT_RECIPES)}", "Take one of those, or give a Python predicate"
        )
    try:
        return mixed_quant_predicate_builder(name, model, group_size)
    except ValueError as error:
        raise ConversionError(
            f"the recipe {name} does not know this model's layers: {error}", "Give a Python predicate instead"
        ) from error
