"""The tokenizer of any checkpoint, as mlx-lm's TokenizerWrapper.

Knows where tokenizer files lie and where end-of-sequence ids are written. Knows no weights. If a model never stops, most
often one of its EOS ids is missing: they are in the tokenizer, in config.json and in generation_config.json, as an integer or a
list, and one file rarely has them all.
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_mlx.checkpoint import Checkpoint, inspect_checkpoint
from dflash_mlx.errors import CheckpointError, ConfigError, one_line

from .config_values import TEXT_CONFIG_KEYS
from .configs import normalise_config

_LFS = b"version https://git-lfs"
# files that a tokenizer and generation need; never code, never weights
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "chat_template.json", "chat_template.jinja", "generation_config.json", "[!.]*.tiktoken",
    "tokenizer.*.model", "additional_chat_templates/[!.]*.jinja",
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
      ConfigError: a config.json that transformers refuses.
    """
    checkpoint = inspect_checkpoint(path_or_repo, revision=revision)
    # explicit, since with None transformers asks on the terminal whether to run the checkpoint's code
    settings = {**(tokenizer_config or {}), "trust_remote_code": trust_remote_code}
    if checkpoint.kind == "gguf":
        from .gguf.source import read_gguf

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
        warnings.warn(". ".join(_without_files(source)), stacklevel=2)
        return _ids_only(source, eos_ids(config, generation_config))
    try:
        return load(
            directory,
            _processors_template(directory) | settings,
            eos_token_ids=eos_ids(config, generation_config) or None,
            defaults=_tokenizer_defaults(config),
        )
    except Exception as error:  # noqa: BLE001 - tokenizers raises a bare Exception on damaged files; the text goes to the user
        text = one_line(error)
        if "trust_remote_code" in text:
            raise CheckpointError(
                f"the tokenizer in {source} brings its own code, which is not run",
                "Pass trust_remote_code=True (--trust-remote-code) if you trust it",
            ) from error
        if _blames_config(error, directory):
            raise ConfigError(
                f"transformers, which reads config.json for the tokenizer, does not accept the one in {source}: {text}",
                "Take config.json from the original repository of the model",
            ) from error
        raise CheckpointError(
            f"transformers cannot load the tokenizer in {source}: {text}", "Download its files again"
        ) from error


def _processors_template(directory: Path) -> dict[str, str]:
    """The chat template as a setting, where only the file of a multimodal model's processor holds one; {} elsewhere.

    transformers' tokenizers do not read that file, so that a target would get messages without its template.
    """
    file, own = directory / "chat_template.json", directory / "tokenizer_config.json"
    if not file.is_file() or (directory / "chat_template.jinja").exists():
        return {}
    if own.is_file() and json.loads(own.read_bytes()).get("chat_template") is not None:
        return {}
    held = json.loads(file.read_bytes())
    template = held.get("chat_template") if isinstance(held, dict) else None
    return {"chat_template": template} if isinstance(template, str) else {}


def _blames_config(error: Exception, directory: Path) -> bool:
    """Whether reading config.json alone raises the same error as the tokenizer did."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as alone:  # noqa: BLE001 - compared with what the tokenizer raised
        return str(alone) == str(error)
    return False


def _without_files(source: str) -> tuple[str, str]:
    return (
        f"{source} has no tokenizer files (tokenizer.json or tokenizer.model): token ids only, no text",
        "Download them from the model's repository into the directory",
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
        # the wrapper takes this for transformers' own attribute, that is, no chat template
        apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

        def encode(self, *args, **kwargs):
            raise CheckpointError(*_without_files(source))

        def decode(self, *args, **kwargs) -> str:
            return ""

        def get_vocab(self) -> dict:
            return {}

    return TokenizerWrapper(IdsOnly(), NoText, eos_token_ids=ids)


def tokenizer_files(directory: Path) -> list[Path]:
    """The files among `TOKENIZER_FILES` that hold a vocabulary; empty when there is no tokenizer."""
    return [file for pattern in TOKENIZER_FILES[:3] + ("vocab.*", "[!.]*.tiktoken") for file in directory.glob(pattern)]


def copy_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy the tokenizer and generation settings of a checkpoint, or rebuild them from a GGUF header.

    Raises:
      CheckpointError: a file is a Git-LFS pointer or no JSON.
    """
    if checkpoint.kind == "gguf":
        from .gguf.source import read_gguf

        read_gguf(checkpoint.path).write_tokenizer(directory)
        return
    for pattern in TOKENIZER_FILES:
        for file in checkpoint.path.glob(pattern):
            copy = directory / file.relative_to(checkpoint.path)
            _require_whole(file, f"{checkpoint.source}/{file.relative_to(checkpoint.path)}")
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    if template := _processors_template(directory):
        # For other programs, which read it there.
        (directory / "chat_template.jinja").write_text(template["chat_template"], encoding="utf-8")


def _require_whole(file: Path, where: str) -> None:
    if not file.is_file():
        raise CheckpointError(f"{where} is no ordinary file", "Download the tokenizer's files again")
    with file.open("rb") as handle:
        if handle.read(len(_LFS)) == _LFS:
            raise CheckpointError(
                f"{where} is a Git-LFS pointer, not the file itself", "Run `git lfs pull`, or download the file again"
            )
    if file.suffix == ".json":
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{where} is no valid JSON: {error}", "Download the file again") from error


def check_tokenizer(directory: Path, source: str) -> str | None:
    """Load the tokenizer of a converted directory once, running no code of its own.

    Returns: a sentence for the user if it cannot be tested here whether it works, else None.
    Raises:
      CheckpointError: the files are damaged, or no tokenizer that transformers has.
    """
    if not tokenizer_files(directory):
        return "no tokenizer files in the source: the converted model takes and gives token ids only"
    config = json.loads((directory / "config.json").read_text())
    try:
        _load(directory, source, config, {}, {"trust_remote_code": False})
    except CheckpointError as error:
        if isinstance(error.__cause__, ImportError):
            return f"the tokenizer was copied but not tried: {one_line(error.__cause__)}"
        settings = directory / "tokenizer_config.json"
        if settings.exists() and '"auto_map"' in settings.read_text():
            return "the tokenizer brings its own code, which was neither run nor copied: its files were copied but not tried"
        raise
    return None


def _tokenizer_defaults(config: Mapping) -> dict | None:
    """Settings that a family's mlx-lm module has for checkpoints that lack them."""
    import sys

    try:
        module = sys.modules[f"mlx_lm.models.{normalise_config(dict(config)).family}"]
    except ConfigError:
        return None
    return getattr(module, "TOKENIZER_DEFAULTS", None)
