"""A conversation without a screen: messages, settings, and the caches that carry them from turn to turn.

Knows chat templates and prompt reuse. Knows no terminals, and not how models are found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..chat_template import without_effect
from ..drafter_checks import largest_block
from ..errors import DFlashError
from ..generation import GenerationResponse
from ..models.target import Target
from ..prompt_files import PrefixFiles
from ..sampling_settings import SamplingSettings, parse, setting, used_of
from ..text import TextStream
from .answer_grammar import Demand, grammar_of
from .channels import Channels, Piece
from .messages import Prompt, read_messages, render_chat
from .prefix_cache import AS_THEY_ARE, CacheOptions, PrefixCache, PrefixRun, stream_from_prefix

# The version of session files. In version 1 a top_p of 0 turned the filter off.
VERSION = 2


@dataclass
class Pair:
    """Loaded models under the names that the user gave. recommended: the sampling settings that the target's files ask for."""

    name: str
    draft_name: str | None
    model: Any
    tokenizer: Any
    drafter: Any
    recommended: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_chat_template(self) -> bool:
        # A server has its own template, or works without one.
        return self.tokenizer is None or self.tokenizer.has_chat_template


@dataclass(frozen=True)
class Settings(SamplingSettings):
    """What `/set` changes: the sampling settings and the settings of a conversation. None means the default of `generate`.

    Raises:
      GenerationError: a value of another type or out of its range.
    """

    max_tokens: int = setting(1024, int, 1, None, "refused", "Most tokens of one answer; -1: no limit.", unlimited=True)
    block_size: int | None = setting(None, int, 1, None, "refused", "Tokens of a block, the last known one included.")
    thinking: bool | None = setting(None, bool, help="The chat template's enable_thinking.")

    def changed(self, name: str, text: str) -> Settings:
        """These settings with one field changed to what a user typed; 'default' resets the field.

        Raises:
          DFlashError: an unknown name, or a value out of its range.
        """
        known = {one.name: one for one in fields(self)}
        if name not in known:
            raise DFlashError(f"there is no setting {name!r}", f"The settings are {', '.join(known)}")
        value = known[name].default if text == "default" else parse(known[name], text)
        return replace(self, **{name: value})

    def check_pair(self, vocabulary: int, largest: int | None) -> None:
        """Check that a pair can do this. largest: the largest block size of its drafter; None if there is no drafter.

        Raises:
          DFlashError: a setting is out of range for the pair.
        """
        self.check_vocabulary(vocabulary)
        if largest is not None and self.block_size is not None and self.block_size > largest:
            raise DFlashError(f"block_size is {self.block_size}; it must be at most {largest} with this drafter")


def _settings(pair: Pair, given: Mapping[str, Any]) -> Settings:
    """The settings to use with a pair, given those of the user."""
    return Settings(**{**used_of(pair.recommended, given), **given})


@dataclass
class Totals:
    """What `/stats` shows, summed over the answers of a session."""

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    committed: int = 0
    lookup_rounds: int = 0
    looked_up: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "verify", "rollback", "host"), 0.0))


class Conversation:
    """Messages, settings and the caches that carry them from turn to turn.

    Without a chat template a message is continued as plain text: the target sees all texts joined, and messages keep their ids.
    Args:
      given: the user's settings. For the others the recommendations of the target's files apply, unless temp is 0.
      files: where computed prompts are kept for the next chat.
    Attributes:
      url: of the server that answers (`remote`); None: models run here. demand: the constraint on answers.
    """

    url: str | None = None
    demand = Demand()
    store: PrefixCache | None = None

    def __init__(
        self,
        pair: Pair,
        given: Mapping[str, Any],
        system: str | None = None,
        caches: CacheOptions = AS_THEY_ARE,
        files: PrefixFiles | None = None,
    ):
        self.given, self.system, self.caches, self.files = dict(given), system, caches, files
        self.messages: list[dict[str, Any]] = []
        self.totals = Totals()
        self.use(pair)

    def use(self, pair: Pair) -> None:
        """Continue with other models, whose caches are empty.

        Raises:
          DFlashError: the new models cannot do what the settings ask for.
        """
        target, settings = Target(pair.model), _settings(pair, self.given)
        vocabulary, largest = target.vocabulary, largest_block(pair.drafter) if pair.drafter else None
        settings.check_pair(vocabulary, largest)
        self.caches.check(pair.model, pair.drafter, settings.block_size)
        self.keep()
        self.settings, self.pair, self.vocabulary, self.largest = settings, pair, vocabulary, largest
        # The context length that the target was made for, if its config names it.
        self.limit = target.context_length
        # The last few states: an undone or retried turn starts from one of them.
        self.store = PrefixCache(6)
        if self.files is not None:
            self.store.keep_in(self.files, pair.model, pair.drafter, pair.name, self.caches)
        self.used = self.held = 0
        self.last: GenerationResponse | None = None
        self.stopped = False

    def keep(self) -> None:
        """Write computed prompts to `files`, if there is such a place. Ctrl-C skips the rest."""
        with suppress(KeyboardInterrupt):
            while self.store is not None and self.store.write_next(quiet_s=0):
                pass

    def set(self, name: str, text: str) -> None:
        """Change one setting. If it is refused, none changes. Raises: DFlashError, as `Settings.changed` and `check_pair`."""
        value = getattr(self.settings.changed(name, text), name)
        given = {one: kept for one, kept in self.given.items() if one != name}
        if text != "default":
            given[name] = value
        settings = _settings(self.pair, given)
        settings.check_pair(self.vocabulary, self.largest)
        self.given, self.settings = given, settings

    def without_effect(self, names: Collection[str]) -> dict[str, str]:
        """The named settings that have no effect with these models, each with the reason."""
        found = self.settings.without_effect(names)
        if "thinking" in names and self.settings.thinking is not None:
            if self.raw:
                found["thinking"] = "without a chat template"
            elif without_effect(self.pair.tokenizer, ["enable_thinking"]):
                found["thinking"] = "with this chat template, which does not read enable_thinking"
        return found

    @property
    def greedy(self) -> bool:
        """Whether the same message gets the same answer again."""
        return self.settings.greedy

    @property
    def raw(self) -> bool:
        return not self.pair.has_chat_template

    def undo(self) -> str | None:
        """Take back the last message with its answer; returns the message."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def prompt(self) -> Prompt:
        """The whole conversation as token ids, and the beginnings of it that the next turn is sure to share.

        Raises:
          DFlashError: the chat template refuses the messages, or the conversation fills the context.
        """
        if self.raw:
            ids = [token for message in self.messages for token in self._raw_ids(message)]
            prompt = Prompt(ids, [(len(ids) - 1, "user")])
        else:
            messages = [{"role": "system", "content": self.system}] if self.system is not None else []
            messages += [{k: v for k, v in m.items() if k != "ids"} for m in self.messages]
            extra = {} if self.settings.thinking is None else {"enable_thinking": self.settings.thinking}
            tokenizer = self.pair.tokenizer
            prompt = render_chat(tokenizer, read_messages(messages, tokenizer), template_args=extra)
        if self.limit and len(prompt.ids) >= self.limit:
            raise DFlashError(
                f"with this message the conversation has {len(prompt.ids)} tokens; the target's context holds {self.limit}",
                "The message is taken back: write a shorter one, or /clear",
            )
        return prompt

    def _raw_ids(self, message: dict[str, Any]) -> list[int]:
        if "ids" not in message:
            first = message is self.messages[0]
            message["ids"] = list(self.pair.tokenizer.encode(message["content"], add_special_tokens=first))
        return message["ids"]

    def answer(
        self, should_stop: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> Iterator[tuple[str, str, GenerationResponse]]:
        """Yield (kind, text, response) with kind "answer" or "thinking"; the answer then joins the messages.

        If it ends early (should_stop, a closed generator, an error), the part that there is joins them, unless it is empty.
        """
        self.last, self.stopped = None, False
        prompt = self.prompt()
        channels = None if self.raw else Channels(self.pair.tokenizer, prompt.before)
        turn = self._open(prompt, should_stop, progress)
        self.held = turn.held
        texts, tokens = {"answer": "", "thinking": ""}, []

        def kept(pieces: list[Piece]) -> list[tuple[str, str]]:
            # At least one piece per token, because each carries the mark of how its token was drafted.
            said = [("thinking" if piece.kind == "reasoning" else "answer", piece.text) for piece in pieces] or [("answer", "")]
            for kind, text in said:
                texts[kind] += text
            return said

        try:
            with closing(turn.responses) as responses:
                for response in responses:
                    self.last = response
                    if not (response.finish_reason == "stop" and self.raw):
                        tokens.append(response.token)
                    pieces = channels.feed(response.text) if channels else [Piece("answer", response.text)]
                    for kind, text in kept(pieces):
                        yield kind, text, response
            if channels and self.last is not None:
                # Letters at the end that might have been the beginning of a mark.
                for kind, text in kept(channels.feed("", last=True)):
                    yield kind, text, self.last
        finally:
            self.stopped = self.last is None or self.last.finish_reason is None
            if self.last is not None:
                self._keep(texts, len(tokens), len(prompt.ids), tokens)

    def _open(self, prompt: Prompt, should_stop: Callable[[], bool], progress: Callable[[int, int], None]) -> PrefixRun:
        """The run that answers a prompt, starting from what caches hold of it."""
        settings, pair = self.settings, self.pair
        room = self.limit - len(prompt.ids) if self.limit else None
        asked = settings.max_tokens if settings.max_tokens != -1 else room
        sampler, processors = settings.make(pair.tokenizer)
        return stream_from_prefix(
            pair.model,
            pair.tokenizer,
            prompt.ids,
            self.store,
            (pair.name, pair.draft_name),
            draft_model=pair.drafter,
            shared=prompt.shared,
            should_stop=should_stop,
            prompt_progress_callback=progress,
            caches=self.caches,
            max_tokens=-1 if asked is None else asked if room is None else min(asked, room),
            sampler=sampler,
            logits_processors=processors,
            seed=settings.seed,
            block_size=settings.block_size if pair.drafter else None,
            constraint=grammar_of(self.demand, pair.tokenizer, pair.name, None if self.raw else prompt.before),
            text_stream=TextStream(pair.tokenizer, prompt.ids, after_chat_template=not self.raw),
        )

    def _keep(self, texts: dict[str, str], tokens: int, prompt_tokens: int, ids: list[int] | None = None) -> None:
        """Add an answer of this many tokens to the messages and the totals."""
        message: dict[str, Any] = {"role": "assistant", "content": texts["answer"]}
        if texts["thinking"]:
            message["reasoning_content"] = texts["thinking"].strip("\n")
            message["content"] = texts["answer"].lstrip("\n")
        if self.raw:
            message["ids"] = ids
        self.messages.append(message)
        self._count(prompt_tokens, tokens)

    def _count(self, prompt_tokens: int, tokens: int) -> None:
        self.used = prompt_tokens + tokens
        totals = self.totals
        totals.answers += 1
        totals.prompt_tokens += prompt_tokens
        totals.reused_tokens += self.held
        totals.tokens += tokens
        stats = self.last.stats if self.last else None
        if stats:
            totals.rounds += stats.n_drafting
            totals.committed += stats.n_committed
            totals.lookup_rounds += stats.sources["prompt_lookup"]["rounds"]
            totals.looked_up += stats.sources["prompt_lookup"]["accepted"]
            for name, value in stats.seconds.items():
                totals.seconds[name] += value

    def state(self) -> dict[str, Any]:
        """Plain values for a session file."""
        return {
            "version": VERSION,
            "model": self.pair.name,
            "draft_model": self.pair.draft_name,
            "system": self.system,
            "settings": asdict(self.settings),
            "given": sorted(self.given),
            "messages": self.messages,
        }

    def restore(self, state: dict[str, Any], given: dict[str, Any] | None = None) -> None:
        """Take messages, system message and settings from `state()`, except settings that are `given` here. The models stay.

        Raises:
          DFlashError: these models cannot do what the settings say; nothing has changed.
        """
        kept = {name: value for name, value in state["settings"].items() if name in state.get("given", state["settings"])}
        given = {**kept, **(given or {})}
        settings = _settings(self.pair, given)
        settings.check_pair(self.vocabulary, self.largest)
        self.system, self.settings, self.given = state["system"], settings, given
        # Ids belong to the tokenizer that made them.
        known = all(i < self.vocabulary for m in state["messages"] for i in m.get("ids", ()))
        same = state["model"] == self.pair.name and known
        self.messages = [{k: v for k, v in m.items() if same or k != "ids"} for m in state["messages"]]
