"""The tokenizer of any checkpoint, as mlx-lm's TokenizerWrapper.

Knows where tokenizer files lie and where end-of-sequence ids are written. Knows no weights. A model that never stops mostly
lacks one of its EOS ids: they stand in the tokenizer, in config.json and in generation_config.json, as an integer or a list,
and one file rarely has them all.
"""

import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mlx.checkpoint import Checkpoint, inspect_checkpoint
from dflash_mlx.errors import CheckpointError, ConfigError

from .configs import TEXT_CONFIG_KEYS, normalise_config

# what a tokenizer and generation need beside the weights; never code, never weights
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "chat_template.json", "chat_template.jinja", "generation_config.json", "*.tiktoken",
    "tokenizer.*.model", "additional_chat_templates/*.jinja",
)  # fmt: skip


def load_tokenizer(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer_config: Mapping | None = None,
) -> Any:
    """Load the tokenizer that belongs to a target.

    Args:
      path_or_repo: whatever `load_target` accepts
      tokenizer_config: keywords for transformers' tokenizer beside those in its files, as in mlx-lm
    Returns:
      mlx-lm's TokenizerWrapper; its `eos_token_ids` join those of the tokenizer, config.json and generation_config.json.
    Raises:
      CheckpointError: no tokenizer files, damaged ones, or ones that need code of their own without `trust_remote_code`.
    """
    checkpoint = inspect_checkpoint(path_or_repo, revision=revision)
    # said outright: with None transformers asks on the terminal whether to run the checkpoint's code
    settings = {**(tokenizer_config or {}), "trust_remote_code": trust_remote_code}
    if checkpoint.kind == "gguf":
        from .gguf import read_gguf

        source = read_gguf(checkpoint.path)
        with tempfile.TemporaryDirectory(prefix="dflash-mlx-tokenizer-") as directory:
            source.write_tokenizer(directory)
            return _load(Path(directory), checkpoint.source, source.config, {}, settings)
    return _load(checkpoint.path, checkpoint.source, checkpoint.config, checkpoint.generation_config, settings)


def eos_ids(config: Mapping, generation_config: Mapping) -> list[int]:
    """Every EOS id that the config files name, in order of first mention; the tokenizer's own is joined by the wrapper."""
    found: list[int] = []
    inner = [config[key] for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), Mapping)]
    for source in (generation_config, config, *inner):
        value = source.get("eos_token_id")
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, int) and not isinstance(entry, bool) and entry not in found:
                found.append(entry)
    return found


def _load(directory: Path, source: str, config: Mapping, generation_config: Mapping, settings: dict) -> Any:
    from mlx_lm.tokenizer_utils import load

    if not tokenizer_files(directory):
        warnings.warn(_without_files(source), stacklevel=2)
        return _ids_only(source, eos_ids(config, generation_config))
    try:
        return load(
            directory,
            settings,
            eos_token_ids=eos_ids(config, generation_config) or None,
            defaults=_tokenizer_defaults(config),
        )
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        text = " ".join(str(error).split())[:200]
        if "trust_remote_code" in text:
            raise CheckpointError(
                f"expected a tokenizer that transformers has; the one in {source} brings its own code, which is not run. "
                "Pass trust_remote_code=True (--trust-remote-code) if you trust it."
            ) from error
        raise CheckpointError(
            f"expected a tokenizer that transformers can load from {source}; found: {text}. Download its files again."
        ) from error


def _without_files(source: str) -> str:
    return (
        f"expected tokenizer files (tokenizer.json or tokenizer.model) in {source}; found none: token ids only, no text. "
        "Download them from the model's repository into the directory."
    )


def _ids_only(source: str, ids: list[int]) -> Any:
    """A wrapper for a model without tokenizer files: ids in and out work, the text of every token is empty, encoding raises."""
    from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerBase

    class NoText(StreamingDetokenizer):
        def __init__(self, tokenizer):
            self.reset()

        def reset(self):
            self.offset, self.tokens, self.text = 0, [], ""

        def add_token(self, token):
            self.tokens.append(token)

        def finalize(self):
            pass

    class IdsOnly:
        eos_token_id = bos_token = bos_token_id = chat_template = None
        clean_up_tokenization_spaces = False
        # recognised by the wrapper as transformers' own, that is, as no chat template
        apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

        def encode(self, *args, **kwargs):
            raise CheckpointError(_without_files(source))

        def decode(self, *args, **kwargs) -> str:
            return ""

        def get_vocab(self) -> dict:
            return {}

    return TokenizerWrapper(IdsOnly(), NoText, eos_token_ids=ids)


def tokenizer_files(directory: Path) -> list[Path]:
    """The files among `TOKENIZER_FILES` that hold a vocabulary; empty when there is no tokenizer."""
    return [file for pattern in TOKENIZER_FILES[:3] + ("vocab.*", "*.tiktoken") for file in directory.glob(pattern)]


def copy_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy the tokenizer and generation settings of a checkpoint, or rebuild them from a GGUF header."""
    if checkpoint.kind == "gguf":
        from .gguf import read_gguf

        read_gguf(checkpoint.path).write_tokenizer(directory)
        return
    for pattern in TOKENIZER_FILES:
        for file in checkpoint.path.glob(pattern):
            copy = directory / file.relative_to(checkpoint.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def _tokenizer_defaults(config: Mapping) -> dict | None:
    """Settings that a family's mlx-lm module keeps for checkpoints without them."""
    import sys

    try:
        module = sys.modules[f"mlx_lm.models.{normalise_config(dict(config)).family}"]
    except ConfigError:
        return None
    return getattr(module, "TOKENIZER_DEFAULTS", None)
