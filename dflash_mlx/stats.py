"""What a run reports: its rounds, tau, and where the time went. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Round(dict):
    """One verify round: `drafted` (all block_size - 1 ids, [] at width 0), `accepted`, `bonus`, `width`, and `source`: "drafter",
    "prompt_lookup", the name of another draft source or, where no draft was verified, "plain".

    A dict, so that it goes into JSON as it is; the five are attributes too.
    """

    def __getattr__(self, name: str):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


# An answer needs this many tokens before a gain in speed is shown.
_TIMED_TOKENS = 16
# Share of plain rounds from which drafting is said to be off.
_OFF = 0.9


@dataclass(repr=False)
class GenerationStats:
    """Filled during a run. Every response of the run holds the same object.

    rounds: one `Round` per target pass after the prompt; empty when only a summary was asked for.
    acceptance_lengths: accepted + 1 per round of width > 0, before any cut at EOS or max_tokens.
    n_rounds, n_drafting, n_committed, n_verified: rounds, those of width > 0, and over these accepted + 1 and width summed.
    widths: rounds by width, 0 being plain decoding. rule: what chose them. looked_up: those whose drafts took no drafter pass;
      confidence_cut: those whose width was cut to the drafts that the drafter was confident about.
    sources: rounds and accepted drafts by source, of rounds of width > 0.
    seconds: draft and verify (host wait for the device; split as one round in 64 measures it, see `add_passes`),
      rollback (cutting caches back), host (the rest of the time since the first token: text, stats and the caller).
    """

    block_size: int
    keep_rounds: bool = True
    rule: Any = None
    rounds: list[Round] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    n_rounds: int = 0
    n_drafting: int = 0
    n_committed: int = 0
    n_verified: int = 0
    widths: dict[int, int] = field(default_factory=dict)
    looked_up: dict[int, int] = field(default_factory=dict)
    confidence_cut: dict[int, int] = field(default_factory=dict)
    sources: dict[str, dict[str, int]] = field(
        default_factory=lambda: {name: {"rounds": 0, "accepted": 0} for name in ("drafter", "prompt_lookup")}
    )
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "verify", "rollback", "host"), 0.0))
    _timed: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _drafter_s: float = 0.0
    _passes_s: float = 0.0

    def __repr__(self) -> str:
        """One line, for who prints it: the rounds alone would fill a screen."""
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        seconds = ", ".join(f"{name} {spent:.2f} s" for name, spent in self.seconds.items())
        return f"GenerationStats(rounds: {self.n_rounds}, with drafts: {self.n_drafting}, tau: {tau}, {seconds})"

    @property
    def tau(self) -> float | None:
        """Mean of accepted + 1 over all rounds of width > 0, before any cut at EOS or max_tokens; None without one."""
        return self.n_committed / self.n_drafting if self.n_drafting else None

    @property
    def plain_tps(self) -> float | None:
        """Tokens a second of plain decoding with this target on this machine, as timed in rounds or kept; None: not known."""
        plain_s = self.rule and self.rule.plain_s
        return 1 / plain_s if plain_s else None

    @property
    def has_measured(self) -> bool:
        """Whether target and drafter were timed between the tokens of this run, which made it slower."""
        return bool(self.rule and self.rule.has_measured)

    @property
    def width_reason(self) -> str | None:
        """One sentence on the widths that the policy chose; None if the user fixed them."""
        return self.rule and self.rule.reason(self.widths, self.looked_up, self.confidence_cut)

    @property
    def is_off(self) -> bool:
        return is_off({name: getattr(self, name) for name in ("widths", "confidence_cut", "width_reason")})

    def add_round(
        self, drafted: list[int], accepted: int, bonus: int, width: int, source: str, confidence_cut: bool = False
    ) -> None:
        self.n_rounds += 1
        self.widths[width] = self.widths.get(width, 0) + 1
        if confidence_cut:
            self.confidence_cut[width] = self.confidence_cut.get(width, 0) + 1
        if width:
            self.n_drafting += 1
            self.n_committed += accepted + 1
            self.n_verified += width
            counts = self.sources.setdefault(source, {"rounds": 0, "accepted": 0})
            counts["rounds"] += 1
            counts["accepted"] += accepted
            if source != "drafter":
                self.looked_up[width] = self.looked_up.get(width, 0) + 1
        if self.keep_rounds:
            drafted, source = (drafted, source) if width else ([], "plain")
            self.rounds.append(Round(drafted=drafted, accepted=accepted, bonus=bonus, width=width, source=source))
            if width:
                self.acceptance_lengths.append(accepted + 1)

    @property
    def times_next_round(self) -> bool:
        """Whether the next round should wait for its draft separately: rounds 2, 66, 130, ... (the first one warms up)."""
        return self.n_rounds % 64 == 1

    def add_passes(self, total_s: float, draft_s: float | None, by_drafter: bool) -> None:
        """Add one round's wait; `draft_s` is its draft part in a round that was timed apart, else None.

        A second wait would leave the device idle, so most of the drafter's rounds are measured as a whole and split in the
        measured ratio.
        """
        self._passes_s += total_s
        self._drafter_s += total_s if by_drafter else 0.0
        if draft_s is not None:
            self._timed[0] += draft_s
            self._timed[1] += total_s
        share = self._timed[0] / self._timed[1] if self._timed[1] else 0.0
        self.seconds["draft"] = share * self._drafter_s
        self.seconds["verify"] = self._passes_s - self.seconds["draft"]

    def summary(self) -> dict:
        """The fields that `--json` prints, as plain values."""
        return {
            "acceptance_lengths": self.acceptance_lengths,
            "rounds": self.rounds,
            "tau": self.tau,
            "widths": dict(sorted(self.widths.items())),
            "confidence_cut": dict(sorted(self.confidence_cut.items())),
            "sources": self.sources,
            "plain_tps": self.plain_tps,
            "has_measured": self.has_measured,
            "width_reason": self.width_reason,
            "seconds": self.seconds,
        }


def is_off(summary: Mapping[str, Any]) -> bool:
    """Whether plain decoding was chosen, by what passes cost here, for nearly all of an answer. summary: as of `GenerationStats`.

    Rounds whose drafts were all cut by confidence do not count: they were drafted.
    """
    plain, cut = ({int(width): n for width, n in summary[name].items()}.get(0, 0) for name in ("widths", "confidence_cut"))
    rounds = sum(summary["widths"].values())
    return bool(rounds and summary["width_reason"] and plain - cut >= _OFF * rounds)


def gain_over_plain(tokens: int, tps: float, plain_tps: float | None) -> float | None:
    """An answer's rate over plain decoding's, as timed on this machine with this target. None if that is not known, or if the
    answer is too short.

    tps: of all tokens since the prompt was read. The first of them comes with the prompt, so its time is not in that.
    """
    return tps * (tokens - 1) / tokens / plain_tps if plain_tps and tokens >= _TIMED_TOKENS else None


def gain_text(gain: float) -> str:
    """A gain over plain decoding, for a person."""
    return f"{gain:.1f} times as fast as without drafts"


def figures_of(response: Any) -> str:
    """The lines that mlx-lm prints after a verbose answer, and a line on drafting, if there was any."""
    lines = [
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
    ]
    if (rate := tokens_a_round(response)) is not None:
        lines.append(f"Drafting: {rate:.3f} tokens a round")
    return "\n".join(lines)


def tokens_a_round(response: Any) -> float | None:
    """Mean tokens per target pass, plain passes included, without the first token. None if nothing was drafted."""
    stats = response.stats
    return (response.generation_tokens - 1) / stats.n_rounds if stats is not None and stats.tau is not None else None
