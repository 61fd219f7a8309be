"""`dflash-mlx chat` and `dflash-mlx serve`: what both are told, checked before a model is loaded."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from . import inputs, output
from .options import (
    BlockSize,
    DraftBitsOption,
    DraftModel,
    DtypeOption,
    MaxTokens,
    Model,
    PrefillStepSize,
    Revision,
    System,
    Thinking,
    TrustRemoteCode,
    checked_max_tokens,
    refuse,
    refuse_lonely_drafter,
    sampling_options,
)
from .output import only_ours_on_stdout, say


def _refuse_lonely_block(block_size: int | None, model: str | None, draft_model: str | None) -> None:
    if block_size is not None and (draft_model == "none" or (model and not draft_model)):
        raise refuse("--block-size", "it needs a drafter")


@sampling_options()
def chat(
    model: Model = None,
    draft_model: DraftModel = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    sampling: Any = None,
    block_size: BlockSize = None,
    thinking: Thinking = None,
    session: Annotated[
        str | None, typer.Option(help="Continue and keep the session of this name; 'last' is where the last chat was left.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Answers as they are, not drawn as Markdown.")] = False,
    dtype: DtypeOption = None,
    draft_bits: DraftBitsOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk to a model: turns reuse what is computed, Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands."""
    refuse_lonely_drafter(model, draft_model, draft_bits)
    _refuse_lonely_block(block_size, model, draft_model)
    checked_max_tokens(max_tokens)
    from ..serving.chat import Chat
    from ..serving.conversation import Conversation, Pair, Settings
    from ..serving.sessions import read_session, session_path

    def load(name: str | None, drafter: str | None) -> Pair:
        with only_ours_on_stdout():
            return Pair(*inputs.load_pair(name, drafter, dtype, draft_bits, revision, trust_remote_code))

    given = {**sampling, "max_tokens": max_tokens, "block_size": block_size, "thinking": thinking}
    given = {name: value for name, value in given.items() if value is not None}
    # A file that cannot be continued is found before the models are loaded.
    state = read_session(session) if session and session_path(session).exists() else None
    if state and model is None:
        model, draft_model = state["model"], draft_model or state["draft_model"]
    conversation = Conversation(load(model, draft_model), Settings(**given), system)
    if state:
        conversation.restore(state, given)
        conversation.system = system or conversation.system
    room = Chat(
        conversation,
        load,
        output.draft_marker,
        given=given,
        session=session or ("last" if sys.stdin.isatty() else None),
        plain=plain,
    )
    if plain and not room.drawing:
        say("--plain has no effect here: Markdown is drawn in a terminal only.")
    room.run()
    if room.failed and not room.interactive:
        raise SystemExit(1)


@sampling_options()
def serve(
    model: Model = None,
    draft_model: DraftModel = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8080,
    api_key: Annotated[str | None, typer.Option(envvar="DFLASH_API_KEY", help="Key that clients must send.")] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request in MB (1e6 bytes).")] = 8.0,
    allowed_origins: Annotated[str, typer.Option(help="Web pages that may send requests, comma-separated; '*': all.")] = "",
    max_tokens: MaxTokens = 512,
    sampling: Any = None,
    block_size: BlockSize = None,
    chat_template_args: Annotated[
        str, typer.Option(help="Variables of the chat template as a JSON object, such as '{\"enable_thinking\": false}'.")
    ] = "{}",
    prefill_step_size: PrefillStepSize = 2048,
    prompt_cache_size: Annotated[
        int, typer.Option(min=1, help="How many earlier prompts are kept, so as not to read them again.")
    ] = 10,
    prompt_cache_gb: Annotated[
        float | None, typer.Option(min=0, help="Most memory that they take, in GB (1e9 bytes); 0 keeps none.")
    ] = None,
    dtype: DtypeOption = None,
    draft_bits: DraftBitsOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every request on stderr.")] = False,
) -> None:
    """Serve OpenAI's chat and text completions. Requests run one at a time in the order in which they come.

    Sampling options and --max-tokens hold for requests that do not name their own.
    """
    refuse_lonely_drafter(model, draft_model, draft_bits)
    _refuse_lonely_block(block_size, model, draft_model)
    checked_max_tokens(max_tokens)
    if api_key == "":
        raise refuse("--api-key", "it is empty; give a key, or leave it out")
    template_args = _template_args(chat_template_args)
    import logging

    from ..sampling_settings import SamplingSettings
    from ..serving.app import Options
    from ..serving.app import serve as run

    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=form)
    options = Options(
        host=host,
        port=port,
        api_key=api_key,
        max_body_bytes=int(max_body_mb * 1e6),
        allowed_origins=[origin for origin in allowed_origins.split(",") if origin],
        max_tokens=max_tokens,
        sampling=SamplingSettings(**sampling),
        block_size=block_size,
        chat_template_args=template_args,
        prefill_step_size=prefill_step_size,
        prompt_cache_size=prompt_cache_size,
        prompt_cache_bytes=int(prompt_cache_gb * 1e9) if prompt_cache_gb is not None else None,
    )

    def open_pair() -> tuple[str, str | None, Any, Any, Any]:
        pair = inputs.load_pair(model, draft_model, dtype, draft_bits, revision, trust_remote_code)
        inputs.say_unread_template_args(pair[3], template_args)
        return pair

    with only_ours_on_stdout():
        run(options, open_pair, say)


def _template_args(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise refuse("--chat-template-args", "give a JSON object")
    return value
