"""`dflash-mlx chat` and `dflash-mlx serve`: their options, checked before a model is loaded."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

from ..serving.interrupt import insistent
from . import inputs, over_ranks
from .live import live
from .options import (
    MEMORY,
    OUTPUT,
    AdapterPath,
    BlockSize,
    ChatTemplateArgs,
    DraftBitsOption,
    DraftModel,
    DtypeOption,
    LastTap,
    MaxTokens,
    Model,
    Pipeline,
    Revision,
    System,
    Thinking,
    TrustRemoteCode,
    cache_options,
    checked_max_tokens,
    flag,
    has_no_drafter,
    mlx_lm_names,
    option,
    refuse,
    refuse_lonely_drafter,
    refuse_lonely_kv_options,
    sampling_options,
    thinking_args,
)
from .output import only_ours_on_stdout, say
from .server_options import API_KEY, PREFILL_SHARE, SERVER, server_options


def _refuse_vain_batch(server: dict[str, Any], exact: bool, model: str | None, draft_model: str | None) -> None:
    max_batch = server["max_batch"]
    if server["prefill_share"] != PREFILL_SHARE and (max_batch == 1 or exact or has_no_drafter(model, draft_model)):
        why = "requests run together only with a drafter, without --exact and with more than --max-batch 1"
        raise refuse("--prefill-share", f"it has no effect here: {why}")
    if (max_batch or 1) == 1:
        return
    if has_no_drafter(model, draft_model):
        raise refuse("--max-batch", "it needs a drafter: requests run together with one only")
    if exact:
        raise refuse("--exact", "it cannot honour --max-batch, whose passes hold rows of several requests; give one of the two")


def _refuse_lonely_key(api_key: str | None) -> None:
    if api_key is not None and api_key != os.environ.get(API_KEY):
        raise refuse("--api-key", "it has no effect without --url")


def _refuse_with_url(url: str | None, own: dict[str, Any]) -> None:
    """Usage errors of options of models that run here, where a server answers."""
    for name, value in own.items():
        if url is not None and value not in (None, False):
            raise refuse(flag(name), "it needs a model that runs here; with --url the server's answers")


def _cache_options(given: dict[str, int | None]) -> tuple[Any, Callable[[Any], Any]]:
    """How caches are held, and what is asked of them for `inputs.load_pair`; says from where --kv-bits begins."""
    refuse_lonely_kv_options(given)
    from ..serving.prefix_cache import CacheOptions

    held = CacheOptions(**given)
    if held.kv_bits:
        say(f"--kv-bits {held.kv_bits} begins at row {held.start} of a conversation; shorter ones are held as they are.")
        # Which each answer to a short one would say again.
        warnings.filterwarnings("ignore", message="kv_bits=.* had no effect")
    return held, lambda tokenizer: inputs.run_size(inputs.CONTEXT, given)


def _refuse_lonely_directory(directory: str | None, limit_gb: float, kept_gb: float | None = None) -> None:
    if directory is None and limit_gb != DIRECTORY_GB:
        raise refuse("--prompt-cache-dir-gb", "it has no effect without --prompt-cache-dir")
    if directory is not None and kept_gb == 0:
        raise refuse("--prompt-cache-dir", "it has no effect with --prompt-cache-gb 0, which keeps no prompts")


def _refuse_vain_prompt_limits(size: int, kept_gb: float | None, pipeline: bool) -> None:
    if kept_gb == 0 and size != KEPT_PROMPTS:
        raise refuse("--prompt-cache-size", "it has no effect with --prompt-cache-gb 0, which keeps no prompts")
    if pipeline and kept_gb:
        why = "with --pipeline a prompt has another size on each machine; use --prompt-cache-size"
        raise refuse("--prompt-cache-gb", why)


PromptCacheSize = Annotated[
    int,
    option(MEMORY, min=1, help="How many earlier prompts to keep in memory, so that they need not be read again."),
]
PromptCacheGb = Annotated[
    float | None,
    option(MEMORY, min=0, help="Maximum memory for earlier prompts, in GB (1e9 bytes); 0 keeps none."),
]
PromptCacheDir = Annotated[
    str | None,
    option(MEMORY, help="Also save earlier prompts in this directory, one file each, in mlx-lm's format."),
]
PromptCacheDirGb = Annotated[
    float,
    option(MEMORY, min=0.001, help="Maximum size of that directory, in GB; the least recently used file is deleted first."),
]
DIRECTORY_GB, KEPT_PROMPTS = 20.0, 10
Session = Annotated[
    str | None,
    option(OUTPUT, help="Load and save the conversation under this name; 'last' continues the last chat."),
]
Plain = Annotated[bool, option(OUTPUT, "--plain", help="Print answers as plain text instead of rendered Markdown.")]
Url = Annotated[
    str | None,
    option(
        SERVER,
        help="Chat with this server (dflash-mlx serve or any OpenAI-compatible one). --model is then the model's name there.",
    ),
]
ServerKey = Annotated[str | None, option(SERVER, envvar=API_KEY, help="API key for that server.")]


@mlx_lm_names
@sampling_options()
@cache_options
def chat(
    model: Model = None,
    adapter_path: AdapterPath = None,
    dtype: DtypeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    system: System = None,
    thinking: Thinking = None,
    sampling: Any = None,
    draft_model: DraftModel = None,
    draft_bits: DraftBitsOption = None,
    last_tap: LastTap = None,
    block_size: BlockSize = None,
    caches: Any = None,
    max_tokens: MaxTokens = None,
    session: Session = None,
    plain: Plain = False,
    prompt_cache_dir: PromptCacheDir = None,
    prompt_cache_dir_gb: PromptCacheDirGb = DIRECTORY_GB,
    url: Url = None,
    api_key: ServerKey = None,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands."""
    own = {"adapter_path": adapter_path, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    own |= {"draft_model": draft_model, "draft_bits": draft_bits, "last_tap": last_tap, "block_size": block_size}
    own |= {**caches, "prompt_cache_dir": prompt_cache_dir}
    _refuse_with_url(url, own)
    refuse_lonely_drafter(model, draft_model, draft_bits, last_tap, block_size)
    _refuse_lonely_directory(prompt_cache_dir, prompt_cache_dir_gb)
    checked_max_tokens(max_tokens)
    # Seconds of imports, in the sight of the user.
    with live("Starting", printed_after=2), insistent():
        held, size = _cache_options(caches)
        from ..serving.chat import Chat
        from ..serving.conversation import Conversation
        from ..serving.sessions import read_session, session_path

    given = {**sampling, "max_tokens": max_tokens, "block_size": block_size, "thinking": thinking}
    given = {name: value for name, value in given.items() if value is not None}
    # A file that cannot be continued is found before the models are loaded.
    state = read_session(session) if session and session_path(session).exists() else None
    if state and model is None and url in (None, state.get("url")):
        model, draft_model, url = state["model"], draft_model or state["draft_model"], state.get("url")
        _refuse_with_url(url, own)
    load = _loader(model, adapter_path, last_tap, (dtype, draft_bits, revision, trust_remote_code, size))

    def change(name: str | None, drafter: str | None) -> Any:
        pair = load(name, drafter)
        inputs.use_recommended(pair.name, pair.recommended, conversation.given, pair.drafter)
        return pair

    if url is not None:
        conversation, change = _remote(url, api_key, model, given, system)
    else:
        _refuse_lonely_key(api_key)
        files = _directory(prompt_cache_dir, prompt_cache_dir_gb)
        conversation = Conversation(load(model, draft_model), given, system, held, files)
    if state:
        conversation.restore(state, given)
        conversation.system = system or conversation.system
    pair = conversation.pair
    inputs.use_recommended(pair.name, pair.recommended, conversation.given, pair.drafter)
    kept = session or ("last" if sys.stdin.isatty() else None)
    _run_chat(Chat(conversation, change, given=given, session=kept, resumed=state, plain=plain), conversation, plain)


def _loader(model: str | None, adapter_path: str | None, last_tap: str | None, how: tuple) -> Callable[..., Any]:
    """A function that loads a chat's pair by the names of target and drafter. how: the other arguments of `inputs.load_pair`."""
    from ..serving.conversation import Pair

    pairs: list[tuple[str | None, str | None]] = []

    def load(name: str | None, drafter: str | None) -> Pair:
        # Trained for the first model; /model may name another.
        over = adapter_path if name == model else None
        if adapter_path and not over:
            say(f"--adapter-path belongs to {model}: {name} runs without it.")
        # Said of the drafter that the chat begins with, likewise.
        pairs.append((name, drafter))
        if last_tap and pairs[-1] != pairs[0]:
            say("--last-tap belongs to the first drafter: this one's last tap is its packer's.")
        with only_ours_on_stdout():
            pair = Pair(*inputs.load_pair(name, drafter, *how, over, last_tap if pairs[-1] == pairs[0] else None))
        pair.recommended = inputs.recommended_sampling(pair.name, how[2], pair.model)
        return pair

    return load


def _remote(url: str, key: str | None, model: str | None, given: dict[str, Any], system: str | None) -> tuple[Any, Any]:
    """A conversation that a server answers, and what /model does there."""
    from ..serving.remote import Remote, RemoteConversation

    remote = Remote(url, key)
    return RemoteConversation(remote, remote.pair(model), given, system), lambda name, drafter: remote.pair(name)


def _directory(path: str | None, limit_gb: float) -> Any:
    """The prefixes that a chat keeps in a directory; None without one. It is found out before models are loaded."""
    if path is None:
        return None
    from ..prompt_files import PrefixFiles

    return PrefixFiles(path, int(limit_gb * 1e9))


def _run_chat(room: Any, conversation: Any, plain: bool) -> None:
    if plain and not room.drawing:
        say("--plain has no effect here: Markdown is drawn in a terminal only.")
    try:
        room.run()
    finally:
        with live("Keeping what was computed"):
            conversation.keep()
    if room.failed and not room.interactive:
        raise SystemExit(1)


@mlx_lm_names
@sampling_options()
@cache_options
@server_options
def serve(
    model: Model = None,
    adapter_path: AdapterPath = None,
    dtype: DtypeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    thinking: Thinking = None,
    chat_template_args: ChatTemplateArgs = None,
    sampling: Any = None,
    draft_model: DraftModel = None,
    pipeline: Pipeline = False,
    draft_bits: DraftBitsOption = None,
    last_tap: LastTap = None,
    block_size: BlockSize = None,
    caches: Any = None,
    prompt_cache_size: PromptCacheSize = KEPT_PROMPTS,
    prompt_cache_gb: PromptCacheGb = None,
    prompt_cache_dir: PromptCacheDir = None,
    prompt_cache_dir_gb: PromptCacheDirGb = DIRECTORY_GB,
    server: Any = None,
    max_tokens: MaxTokens = 512,
) -> None:
    """Run a server with OpenAI's and Anthropic's APIs and a page to chat at.

    Sampling options and --max-tokens are defaults for requests that do not set their own.
    """
    refuse_lonely_drafter(model, draft_model, draft_bits, last_tap, block_size)
    checked_max_tokens(max_tokens)
    _refuse_vain_batch(server, caches["exact"], model, draft_model)
    _refuse_lonely_directory(prompt_cache_dir, prompt_cache_dir_gb, prompt_cache_gb)
    _refuse_vain_prompt_limits(prompt_cache_size, prompt_cache_gb, pipeline)
    names = {"adapter_path": adapter_path, "prompt_cache_dir": prompt_cache_dir, "exact": caches["exact"]}
    ranks = over_ranks.begin(pipeline, draft_model, model, **names, unload_after=server["unload_after_s"])
    variables = thinking_args(thinking, chat_template_args)
    with live("Starting"), insistent():
        held, size = _cache_options(caches)
        from ..sampling_settings import SamplingSettings
        from ..serving.server import Options
        from ..serving.server import serve as run

    options = Options(
        **server,
        max_tokens=max_tokens,
        sampling=SamplingSettings(**sampling),
        block_size=block_size,
        chat_template_args=variables,
        caches=held,
        prompt_cache_size=prompt_cache_size,
        prompt_cache_bytes=int(prompt_cache_gb * 1e9) if prompt_cache_gb is not None else None,
        prompt_cache_dir=prompt_cache_dir,
        prompt_cache_dir_bytes=int(prompt_cache_dir_gb * 1e9),
    )

    def open_pair() -> tuple[str, str | None, Any, Any, Any]:
        how = (dtype, draft_bits, revision, trust_remote_code, size, adapter_path, last_tap, pipeline)
        pair = inputs.load_pair(model, draft_model, *how)
        inputs.say_unread_template_args(pair[3], variables, thinking)
        name, _, lm, _, drafter = pair
        options.recommended = inputs.use_recommended(name, inputs.recommended_sampling(name, revision, lm), sampling, drafter)
        return pair

    with only_ours_on_stdout():
        over_ranks.serve(run, options, open_pair, ranks)
