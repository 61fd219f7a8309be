"""The sampling options, each declared once: name, default, range, what 0 means, help text.

Command line, chat, server and benchmark take their sampling options from the fields of `SamplingSettings`: a field added
here appears in all four. Imports nothing heavy, because `dflash-mlx generate -h` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Integral
from typing import Any

from .errors import GenerationError

# Below this temperature a distribution is its likeliest token.
GREEDY_BELOW = 1e-5
# MLX computes in float32, where a smaller number is 0.
SMALLEST = 2.0**-126
_LARGEST = 1_000_000
_LONGEST = (1 << 31) - 1


def setting(
    default: Any,
    kind: type,
    low: float | None = None,
    high: float | None = None,
    zero: str = "",
    help: str = "",
    *,
    above: bool = False,
    unlimited: bool = False,
    off: Any = None,
    needs: str | None = None,
) -> Any:
    """A field that is checked.

    Args:
      kind: int, float or bool; low, high: the least and most that it may be. above: `low` itself is refused.
      unlimited: -1 stands for no limit. off: another value that leaves it off, as other programs write it.
      zero: what the value 0 means, for people. help: one sentence for `--help`.
      needs: name of the field without which this one has no effect.
    """
    about = {"kind": kind, "low": low, "high": high, "above": above, "unlimited": unlimited, "off": off}
    return field(default=default, metadata={**about, "zero": zero, "help": help, "needs": needs})


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is drawn. Every field is checked when the settings are made.

        settings = SamplingSettings(temp=0.7, top_p=0.9, repetition_penalty=1.1)
        settings.check_vocabulary(Target(model).vocabulary)
        sampler, logits_processors = settings.make(tokenizer)

    Raises:
      GenerationError: a value of another type or out of its range.
    """

    temp: float = setting(0.0, float, 0, _LARGEST, "greedy: always the likeliest token", "Sampling temperature.")
    top_p: float = setting(
        1.0,
        float,
        0,
        1,
        "the likeliest token alone",
        "Sample from the likeliest tokens that add up to this probability.",
        needs="temp",
    )
    top_k: int = setting(0, int, 0, _LONGEST, "off, as is -1", "Sample from the k likeliest tokens.", off=-1, needs="temp")
    min_p: float = setting(
        0.0, float, 0, 1, "off", "Minimum probability of a token, relative to the likeliest one.", needs="temp"
    )
    xtc_probability: float = setting(
        0.0, float, 0, 1, "off", "XTC sampling: how often to leave out the likeliest tokens.", needs="temp"
    )
    xtc_threshold: float = setting(
        0.1,
        float,
        0,
        0.5,
        "every token counts",
        "XTC sampling: probability from which a token counts as likely.",
        needs="xtc_probability",
    )
    repetition_penalty: float = setting(
        1.0, float, 0, _LARGEST, "refused", "Make tokens that have appeared less likely; 1 is off.", above=True
    )
    repetition_context_size: int = setting(
        20, int, 1, _LONGEST, "refused", "How many of the last tokens --repetition-penalty looks at.", needs="repetition_penalty"
    )
    presence_penalty: float = setting(
        0.0, float, -_LARGEST, _LARGEST, "off", "Subtract this from the logit of every token that has appeared."
    )
    presence_context_size: int = setting(
        20, int, 1, _LONGEST, "refused", "How many of the last tokens --presence-penalty looks at.", needs="presence_penalty"
    )
    frequency_penalty: float = setting(
        0.0, float, -_LARGEST, _LARGEST, "off", "Subtract this from a token's logit once per time it has appeared."
    )
    frequency_context_size: int = setting(
        20, int, 1, _LONGEST, "refused", "How many of the last tokens --frequency-penalty looks at.", needs="frequency_penalty"
    )
    seed: int | None = setting(
        None, int, 0, (1 << 32) - 1, "a seed as any other", "Same seed, same text, with or without a drafter.", needs="temp"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            check(one, value := getattr(self, one.name))
            if is_off(one, value):
                object.__setattr__(self, one.name, one.default)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken always: no noise is drawn."""
        return self.temp < GREEDY_BELOW or self.top_p < SMALLEST

    def check_vocabulary(self, rows: int) -> None:
        """Raises: GenerationError where mlx-lm would refuse `top_k` in the middle of a run."""
        if self.top_k >= rows:
            raise GenerationError(f"top_k is {self.top_k}; it must be below {rows}, the target's vocabulary", "Use a smaller one")

    def without_effect(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Of the `given` names those that change nothing here, each with the reason."""
        alone = "at temperature 0" if self.temp < GREEDY_BELOW else "with top_p 0" if self.greedy else None
        if self.top_k == 1 and not self.xtc_probability:
            # XTC comes before top_k, and may leave another token.
            alone = alone or "with top_k 1"
        found = {}
        for one in fields(self):
            needs = one.metadata["needs"]
            if one.name not in given or needs is None:
                continue
            if needs != "temp" and getattr(self, needs) == getattr(type(self), needs):
                found[one.name] = f"without {needs}"
            elif alone and needs in ("temp", "xtc_probability") and one.name not in alone:
                found[one.name] = alone
        return found

    def make(
        self, tokenizer: Any = None, logit_bias: Mapping[int, float] | None = None
    ) -> tuple[Callable | None, list[Callable]]:
        """A sampler and mlx-lm's logits processors for these settings.

        Args:
          tokenizer: XTC never leaves out its line break and its end tokens, as in mlx-lm's own commands.
        Returns: the sampler, None where the likeliest token is taken always: a `sampling.Distribution`, or mlx-lm's where XTC
          throws its own coin; the processors, [] where none is needed.
        """
        import mlx.core as mx
        from mlx_lm.sample_utils import make_logits_processors, make_sampler

        from .distribution import Distribution

        processors = make_logits_processors(
            dict(logit_bias) if logit_bias else None,
            None if self.repetition_penalty == 1 else self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )
        if self.greedy:
            return None, processors
        if not self.xtc_probability:
            return Distribution(self.temp, self.top_p, self.min_p, self.top_k), processors
        special = []
        if tokenizer is not None:
            special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        sampler = make_sampler(
            self.temp,
            top_p=self.top_p,
            min_p=self.min_p,
            top_k=self.top_k,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            xtc_special_tokens=special,
        )
        # float16 does not hold log-probabilities divided by a low temperature.
        return lambda logprobs: sampler(logprobs.astype(mx.float32)), processors


# What generation_config.json calls a setting.
RECOMMENDED = {"temperature": "temp"} | {
    name: name for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
}


def recommended(config: Any, vocabulary: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that a checkpoint's generation_config.json recommends, and what of it is ignored, by its key, with the reason.

    `do_sample` false is greedy, and true without a temperature is temperature 1. A value that leaves a setting off is none.
    Args:
      config: the parsed file; vocabulary: the target's.
    """
    if not isinstance(config, Mapping):
        return {}, {"generation_config.json": f"it holds {type(config).__name__}; it must be an object"}
    known, found, ignored = {one.name: one for one in fields(SamplingSettings)}, {}, {}
    values = {key: value for key in RECOMMENDED if (value := config.get(key)) is not None}
    if config.get("do_sample") is True:
        values.setdefault("temperature", 1.0)
    for key, value in values.items():
        one = known[RECOMMENDED[key]]
        if is_off(one, value):
            continue
        whole = isinstance(value, float) and value.is_integer() and one.metadata["kind"] is int
        try:
            check(one, value := int(value) if whole else value)
        except GenerationError as error:
            ignored[key] = error.problem.replace(f"{one.name} is", f"{key} is", 1)
            continue
        if one.name == "top_k" and value >= vocabulary:
            ignored[key] = f"{key} is {value}; it must be below {vocabulary}, the target's vocabulary"
        elif value != one.default:
            found[one.name] = value
    if config.get("do_sample") is False or "temp" not in found:
        found = {name: value for name, value in found.items() if known[name].metadata["needs"] != "temp" and name != "temp"}
    return found, ignored


def used_of(recommended: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of what files recommend that which the user gave no value for. Temperature 0 wants none of it: it was made for samples."""
    return {} if given.get("temp") == 0 else {name: value for name, value in recommended.items() if name not in given}


def recommended_text(settings: Mapping[str, Any]) -> str:
    """Settings in the words of the command line."""
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in settings.items())


def is_off(one: Field, value: Any) -> bool:
    """Whether a value is another program's way to leave a field off, beside its default."""
    return one.metadata["off"] is not None and type(value) in (int, float) and value == one.metadata["off"]


def check(one: Field, value: Any) -> None:
    """Whether a field made by `setting` may have this value; None where None is its default.

    Raises:
      GenerationError: names the field, the value and the range.
    """
    if value is None and one.default is None or value == -1 and one.metadata["unlimited"] or is_off(one, value):
        return
    kind, low, high, above = (one.metadata[name] for name in ("kind", "low", "high", "above"))
    if kind is bool:
        fits = isinstance(value, bool)
    else:
        least = max(low, SMALLEST) if above else low
        fits = type(value) in (int, kind) and value >= least and (high is None or value <= high)
    if not fits:
        raise GenerationError(f"{one.name} is {value!r}; it must be {wanted(one)}")


def wanted(one: Field) -> str:
    """The values that a field may have, in words: "a whole number from 0 to 10"."""
    kind, low, high, above = (one.metadata[name] for name in ("kind", "low", "high", "above"))
    if kind is bool:
        return "on, off or default"
    what = "a whole number" if kind is int else "a number"
    if one.metadata["unlimited"]:
        return f"{what} of at least {low}, or -1 for no limit"
    if high is None:
        return f"{what} of at least {low}"
    off = "" if one.metadata["off"] is None else f", or {one.metadata['off']} for off"
    return f"{what} above {low} and at most {high}" if above else f"{what} from {low} to {high}{off}"


def parse(one: Field, text: str) -> Any:
    """What a person typed for a field: its kind of value, or the text itself where it is none (`check` refuses that)."""
    if one.metadata["kind"] is bool:
        return {"on": True, "off": False, "true": True, "false": False}.get(text.lower(), text)
    try:
        return one.metadata["kind"](text)
    except ValueError:
        return text


def check_max_tokens(value: Any, name: str = "max_tokens") -> None:
    """Raises: GenerationError unless it is a positive whole number, or -1 for no limit."""
    # Also NumPy's.
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1 and value != -1:
        raise GenerationError(f"{name} is {value!r}; it must be a whole number of at least 1, or -1 for no limit")
