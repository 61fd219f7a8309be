"""`convert`: a checkpoint of any published spelling -> an MLX directory that is right, or one sentence why not.

Knows the order of the steps: inspect, load under mlx-lm's names, cast, quantize, write to a temporary directory, load that back
and compare, record, rename. Each step has a module of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.checkpoint import Checkpoint, inspect_checkpoint
from dflash_mlx.config import DrafterConfig
from dflash_mlx.errors import ConversionError, one_line
from dflash_mlx.machine import size_text
from dflash_mlx.models.architectures import not_computed

from . import report
from .drafters import cast_tensors, quantize_tensors, read_drafter, write_out
from .finite import require_finite
from .gguf.drafter import published_names
from .gguf.drafter_out import write_drafter_gguf
from .quantize import FLOAT_DTYPES, MODES, Options, Predicate, Recipe, check_options, mixed_recipe, quantize
from .targets import LoadedTarget, quantize_to_match, read_target
from .tokenizers import check_tokenizer, copy_tokenizer
from .write import staged_directory, write_json, write_weights

_RECORD = "conversion.json"
GGUF_NAME = "drafter.gguf"


@dataclass
class Conversion:
    """What `convert` did: the directory, target or drafter, the record (also in conversion.json), and notes."""

    path: Path
    kind: str
    record: dict
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """What was written, how close it is to the source, with units, and whether that is fine: three lines."""
        kept = (".safetensors", ".gguf")
        size = sum(entry["bytes"] for name, entry in self.record["written"].items() if name.endswith(kept))
        lines = [f"Wrote {self.kind} {self.path}: {len(self.record['tensors'])} tensors, {size_text(size)}"]
        parity = self.record["parity"]
        if "not_checked" in parity:
            lines.append(f"Not compared with the source: {parity['not_checked']}.")
        elif self.kind == "target":
            lines += [
                f"Against the source, {parity['positions']} positions: max logit difference {parity['max_logit_difference']:.3g} "
                f"(of {parity['max_logit']:.3g}), mean KL {parity['mean_kl_nats']:.3g} nats, "
                f"argmax agreement {parity['argmax_agreement']:.0%}",
                _of_target(parity["mean_kl_nats"]),
            ]
        else:
            share = parity["rms_hidden_difference_share"]
            lines += [
                f"Against the source, on random features, which show more than real ones: hidden states differ by {share:.1%}",
                _of_drafter(share),
            ]
        return "\n".join(lines)


# A comparison is called fine up to these. SmolLM2-135M, which loses much for its size, in affine: 8 bits give 0.004 nats, 6 bits
# 0.05, 4 bits 0.7. Drafters in 4 bits give a share of 0.25 on such inputs, and tau stays within 0.2.
_SAME_NATS, _FINE_NATS = 0.01, 0.1
_SAME_SHARE, _FINE_SHARE = 0.01, 0.35


def _of_target(nats: float) -> str:
    """Whether a mean KL of a target is fine, in words."""
    if nats <= _SAME_NATS:
        return "That is fine: it can hardly be told from the source."
    if nats <= _FINE_NATS:
        return "That is fine: a little is lost."
    return "That is much: its text will differ. More bits (--q-bits 6 or 8) or smaller groups (--q-group-size 32) keep more."


def _of_drafter(share: float) -> str:
    if share <= _SAME_SHARE:
        return "That is fine: it drafts as the source does."
    if share <= _FINE_SHARE:
        return "That is fine: a drafter in 4 bits differs so much on such features, and drafts nearly as well."
    return "That is much: it will draft worse. More bits (--q-bits 8) keep more; the text stays the target's own."


def convert(
    hf_path: str,
    mlx_path: str = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    quant_predicate: Predicate | str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    q_mode: str = "affine",
    dequantize: bool = False,
    to: str = "mlx",
    vocab: str | None = None,
) -> Conversion:
    """Convert a target or a drafter, as `mlx_lm.convert`.

    Args:
      hf_path: a directory saved by transformers 4 or 5 or by mlx-lm, a GGUF file, or a hub repository
      mlx_path: the directory to write; its parents are made
      quantize: quantize to `q_bits` bits in groups of `q_group_size` inputs; None means the usual values of `q_mode`, as in
        mlx-lm: 4 and 64 in affine
      dtype: "float32", "bfloat16" or "float16" for everything that stays float and that the family's `cast_predicate` lets be
        cast; None or "auto" keeps the checkpoint's own types
      revision: branch, tag or commit of a hub repository
      quant_predicate: (module path, module) -> False, True or {"bits": ..., "group_size": ...}, or one of mlx-lm's recipe names
      trust_remote_code: as in mlx-lm; has no effect, because no code of a checkpoint is needed here
      force: replace an existing directory
      q_mode: "affine", "mxfp4", "nvfp4" or "mxfp8"
      dequantize: write quantized matrices as floats, in the type of their scales or in `dtype`
      to: "mlx", or "gguf": a drafter as drafter.gguf in `mlx_path`, under llama.cpp's names; `quantize` then means Q4_0, or Q8_0
        with 8 bits
      vocab: a GGUF file whose vocabulary goes into drafter.gguf: llama.cpp needs the target's there
    Returns:
      what was done; the same is written to conversion.json beside the weights.
    Raises:
      CheckpointError, ConfigError: the source is damaged, or not something that mlx-lm or this package can run
      ConversionError: options, destination or tensors do not allow it
    """
    usual = MODES.get(q_mode, MODES["affine"])
    group_size, bits = usual[0] if q_group_size is None else q_group_size, usual[1] if q_bits is None else q_bits
    dtype = None if dtype == "auto" else dtype
    check_options(bits, group_size, dtype, q_mode)
    options = Options(quantize, group_size, bits, dtype, quant_predicate, q_mode, dequantize)
    if quant_predicate is not None and not quantize:
        raise ConversionError("a quantization recipe is given and quantize (-q) is off", "Turn it on, or drop the recipe")
    if isinstance(quant_predicate, str) and q_mode != "affine":
        raise ConversionError(f"mlx-lm's recipes are for affine, and q_mode is {q_mode}", "Give one of the two")
    if quantize and dequantize:
        raise ConversionError("both quantize (-q) and dequantize are given", "Give one of the two")
    checkpoint = inspect_checkpoint(hf_path, revision=revision)
    is_drafter = checkpoint.role == "drafter"
    _check_layout(to, vocab, checkpoint, options, q_group_size)
    with staged_directory(Path(mlx_path), checkpoint, force=force) as staging:
        if to == "gguf":
            done = _drafter_to_gguf(checkpoint, staging, options, vocab)
        elif is_drafter:
            done = _convert_drafter(checkpoint, staging, options)
        else:
            done = _convert_target(checkpoint, staging, options)
        done.notes += [f"{name} was not read: {reason}" for name, reason in checkpoint.ignored.items()]
        if trust_remote_code:
            done.notes.append("trust_remote_code had no effect: converting runs no code that comes with a checkpoint")
        done.record["written"] = report.written_files(staging)
        write_json(staging / _RECORD, done.record)
    done.path = Path(mlx_path).expanduser()
    return done


def _convert_target(checkpoint: Checkpoint, staging: Path, options: Options) -> Conversion:
    loaded = read_target(checkpoint)
    require_finite(checkpoint, loaded.dropped)
    model, config = loaded.model, dict(loaded.config)
    loaded.cast(FLOAT_DTYPES[options.dtype] if options.dtype else None)
    if options.dequantize:
        model = _dequantized(model, config, checkpoint.source)
    recipe = Recipe()
    if options.quantize:
        predicate = options.predicate
        if isinstance(predicate, str):
            predicate = mixed_recipe(predicate, model, options.group_size)
        recipe = quantize(
            model, options.group_size, options.bits, predicate, getattr(model, "quant_predicate", None), options.mode
        )
        config["quantization"] = config["quantization_config"] = recipe.config
    elif "quantization" not in config:
        recipe.fates = {name: "float" for name, _ in tree_flatten(model.parameters())}
    config = _as_written(config)
    _name_dtype(config, options.dtype)
    write_json(staging / "config.json", dict(sorted(config.items())))
    weights = dict(tree_flatten(model.parameters()))
    tensors = _tensor_record(weights, recipe, config.get("quantization"))
    if checkpoint.kind == "gguf":
        _name_gguf_fates(tensors, checkpoint, loaded.fates)
    family, layout, dropped, fates, notes = loaded.target.family, loaded.layout, loaded.dropped, loaded.fates, loaded.notes
    del model, loaded
    write_weights(staging, weights, checkpoint.largest_file_bytes)
    copy_tokenizer(checkpoint, staging)
    if note := check_tokenizer(staging, checkpoint.source):
        notes.append(note)

    record = _record("target", checkpoint, tensors, recipe, config.get("quantization"), dropped, fates, notes)
    record["family"], record["layout"] = family, layout

    def source_model():
        read = read_target(checkpoint)
        if options.dtype is None:
            # as it was written
            read.cast(None)
        return _with_vocabulary(read)

    source = report.target_logits(source_model)
    written = report.target_logits(lambda: _with_vocabulary(read_target(inspect_checkpoint(staging))))
    record["parity"] = report.compare_logits(source, written) | {"reference": "the source, loaded by this package"}
    rounded = options.quantize or options.dequantize
    if not rounded and options.dtype in (None, "float32"):
        _require_equal(record["parity"])
    if not options.quantize:
        record["parity"]["cannot_prove"] = report.CANNOT_PROVE
    return Conversion(staging, "target", record, notes + _kept_notes(recipe))


def _dequantized(model: nn.Module, config: dict, source: str) -> nn.Module:
    """A model with its quantized matrices as floats, by mlx-lm's own function; `quantization` is removed from the config.

    Raises:
      ConversionError: nothing in it is quantized.
    """
    from mlx_lm.utils import dequantize_model

    if not any(hasattr(module, "scales") for _, module in model.named_modules()):
        raise _not_quantized(source)
    for name in _QUANTIZATION:
        config.pop(name, None)
    return dequantize_model(model)


def _as_written(config: dict) -> dict:
    """The part of a target's config that is written. `quantization` stands only at the top level, where mlx-lm looks first."""
    config = {k: v for k, v in config.items() if k not in _NOT_WRITTEN}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in text.items() if k not in _QUANTIZATION}
    return config


def _not_quantized(source: str) -> ConversionError:
    return ConversionError(f"nothing in {source} is quantized, so there is nothing to dequantize", "Leave --dequantize out")


def _require_equal(parity: Mapping) -> None:
    """Without rounding, the written model must compute what the source does; anything else is a fault of this package."""
    # written as `not <=`, so that NaN is refused too
    if not parity["max_logit_difference"] <= _SAME_LOGITS * parity["max_logit"]:
        raise ConversionError(
            f"the written directory's logits differ from the source's by {parity['max_logit_difference']:.3g} of "
            f"{parity['max_logit']:.3g}",
            "Nothing was written: please report this checkpoint's config.json",
        )


_SAME_LOGITS = 1e-3

# keys that a text model does not need; auto_map would make other tools run code that is not in the directory
_QUANTIZATION = ("quantization", "quantization_config")
_NOT_WRITTEN = ("vision_config", "audio_config", "auto_map", "_name_or_path")


def _with_vocabulary(loaded: LoadedTarget):
    return loaded.model, loaded.target.text["vocab_size"]


def _check_layout(to: str, vocab: str | None, checkpoint: Checkpoint, options: Options, group_size: int | None) -> None:
    if to not in ("mlx", "gguf"):
        raise ConversionError(f"to is {to!r}", "Give 'mlx' or 'gguf'")
    if to == "mlx":
        if vocab is not None:
            raise ConversionError("a vocabulary is given, and no GGUF is written", "Give to='gguf' too")
        return
    if checkpoint.role != "drafter":
        raise ConversionError(f"GGUF is written of drafters, and {checkpoint.source} is a target", "Use llama.cpp's converter")
    if group_size is not None or options.mode != "affine" or options.predicate is not None:
        raise ConversionError("GGUF's blocks have their own groups, modes and types", "Give bits alone: 8 or 4")


def _drafter_to_gguf(checkpoint: Checkpoint, staging: Path, options: Options, vocab: str | None) -> Conversion:
    drafter = read_drafter(checkpoint)
    require_finite(checkpoint, drafter.dropped)
    weights = write_out(dict(drafter.raw), cast_tensors(drafter.weights, options.dtype))
    types, notes = write_drafter_gguf(
        staging / GGUF_NAME, drafter.config, weights, options.bits if options.quantize else None, vocab
    )
    tensors = {name: {"shape": list(value.shape), "dtype": types[name]} for name, value in weights.items()}
    record = _record("drafter", checkpoint, tensors, Recipe(), None, drafter.dropped, {}, drafter.notes + notes)
    record["parity"] = {"not_checked": "the file was read again, and every tensor is as written"}
    return Conversion(staging, "drafter", record, drafter.notes + notes)


def _convert_drafter(checkpoint: Checkpoint, staging: Path, options: Options) -> Conversion:
    if isinstance(options.predicate, str):
        raise ConversionError(f"the recipe {options.predicate} is for targets, and this is a drafter", "Give a Python predicate")
    drafter = read_drafter(checkpoint)
    already = "quantization" in drafter.raw
    if options.quantize and already:
        raise ConversionError(
            "the weights are quantized already", "Convert without -q to keep them, or start from the float checkpoint"
        )
    if options.dequantize and not already:
        raise _not_quantized(checkpoint.source)
    require_finite(checkpoint, drafter.dropped)
    weights = cast_tensors(drafter.weights, options.dtype)
    config = {k: v for k, v in drafter.raw.items() if k not in _NOT_WRITTEN}
    if options.dequantize:
        weights = write_out(config, weights)
    recipe = Recipe()
    if options.quantize:
        weights, recipe = quantize_tensors(weights, options.group_size, options.bits, options.predicate, options.mode)
        config["quantization"] = config["quantization_config"] = recipe.config
    elif "quantization" not in config:
        recipe.fates = dict.fromkeys(weights, "float")
    _name_dtype(config, options.dtype)
    write_json(staging / "config.json", dict(sorted(config.items())))
    tensors = _tensor_record(weights, recipe, config.get("quantization"))
    notes, dropped, parsed, raw = drafter.notes, drafter.dropped, drafter.config, drafter.raw
    names = {name: name.removeprefix("model.") for name in checkpoint.tensors}
    if checkpoint.gguf is not None:
        names = published_names(checkpoint.gguf, [])
    fates = {name: f"as {place}" for name, place in names.items() if name not in dropped}
    del drafter
    write_weights(staging, weights, checkpoint.largest_file_bytes)
    if checkpoint.gguf is None and any((checkpoint.path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        copy_tokenizer(checkpoint, staging)

    record = _record("drafter", checkpoint, tensors, recipe, config.get("quantization"), dropped, fates, notes)
    record["parity"] = _drafter_parity(checkpoint, staging, parsed, raw)
    if not options.quantize and "not_checked" not in record["parity"]:
        record["parity"]["cannot_prove"] = report.CANNOT_PROVE
    return Conversion(staging, "drafter", record, notes + _kept_notes(recipe))


def _drafter_parity(checkpoint: Checkpoint, staging: Path, config: DrafterConfig, raw: Mapping) -> dict:
    if not_computed(config):
        return {"not_checked": f"this version cannot run {config.architecture or 'such a drafter'}"}

    def fill(model, weights) -> None:
        quantize_to_match(model, weights, dict(raw), checkpoint.source)
        model.load_weights(list(weights.items()), strict=True)

    try:
        source = report.drafter_outputs(config, read_drafter(checkpoint).weights, fill)
    except ValueError as error:
        raise ConversionError(
            f"the tensors in {checkpoint.source} are not those that config.json describes: {one_line(error, None)}",
            "Use the config that came with the weights, or download both again",
        ) from error
    written = report.drafter_outputs(config, read_drafter(inspect_checkpoint(staging)).weights, fill)
    return report.compare_drafters(source, written) | {"reference": "the source, loaded by this package"}


def _name_dtype(config: dict, dtype: str | None) -> None:
    if dtype is None:
        return
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("torch_dtype", None)
            part["dtype"] = dtype


def _tensor_record(weights: Mapping[str, mx.array], recipe: Recipe, quantization: Mapping | None) -> dict:
    return {
        name: {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("mlx.core."),
            "recipe": recipe.fates.get(name) or _as_it_was(name, weights, quantization or {}),
        }
        for name, value in weights.items()
    }


def _name_gguf_fates(tensors: dict, checkpoint: Checkpoint, fates: Mapping[str, str]) -> None:
    """Record for each written tensor which tensor of the GGUF file it was, and what the reader did to it."""
    from .gguf.source import read_gguf

    own = {info.hf_name: info.name for info in read_gguf(checkpoint.path).tensor_infos if info.hf_name}
    for name, entry in tensors.items():
        source = own.get(name) or own.get(f"{name.rpartition('.')[0]}.weight")
        if source in fates:
            entry["source"] = f"{source}: {fates[source]}"


def _as_it_was(name: str, weights: Mapping[str, mx.array], quantization: Mapping) -> str:
    base = name.rpartition(".")[0]
    if f"{base}.scales" not in weights:
        return "kept as it was"
    own = next((quantization[key] for key in (base, f"model.{base}") if isinstance(quantization.get(key), Mapping)), {})
    mode, bits, group_size = ({**quantization, **own}.get(key) for key in ("mode", "bits", "group_size"))
    return f"part of a quantized matrix: {mode or 'affine'} {bits}-bit, group {group_size}"


def _record(
    kind: str,
    checkpoint: Checkpoint,
    tensors: dict,
    recipe: Recipe,
    quantization: Mapping | None,
    dropped: dict,
    fates: dict,
    notes: list[str],
) -> dict:
    return {
        "kind": kind,
        "source": report.provenance(checkpoint),
        "versions": report.versions(),
        "number_types": {
            "source": report.number_types({name: info.dtype for name, info in checkpoint.tensors.items()}),
            "written": report.number_types({name: entry["dtype"] for name, entry in tensors.items()}),
        },
        "quantization": quantization,
        "kept_float": recipe.kept_float,
        "notes": notes,
        "tensors": tensors,
        "source_tensors": fates | {name: f"dropped: {reason}" for name, reason in dropped.items()},
    }


def _kept_notes(recipe: Recipe) -> list[str]:
    return [f"{name}: {fate}" for name, fate in recipe.kept_float.items()]
