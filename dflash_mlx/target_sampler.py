"""The target's own token for each row of a block (greedy, sampled, with logits processors), and which drafts equal it.

Knows the outputs of target and drafter. Does not know rollback or the loop. `accept` has the acceptance rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .accept import accept_match
from .kernels.autotune import NotFiniteError
from .models.drafter import Drafter
from .models.target import Target, TargetOutput
from .sampling import Distribution, History, KeyedNoise, LogitsProcessor, Sampler, choose_seed, process, sample_rows
from .verify import logprobs

# Probabilities travel with ids in one int32 array, as multiples of 1 / _ONE.
_ONE = 1 << 20


def pack_drafts(drafted: mx.array, confidence: mx.array | None) -> mx.array:
    """Ids [1, N] and their probabilities [1, N], if any, in one array [N] or [2 N], so that the host waits once for both."""
    return drafted[0] if confidence is None else mx.concatenate([drafted[0], (confidence[0] * _ONE).astype(mx.int32)])


def unpack_drafts(values: list[int], n: int) -> tuple[list[int], list[float] | None]:
    """The reverse of `pack_drafts`, for n ids: ids and probabilities."""
    return values[:n], [value / _ONE for value in values[n:]] or None


@dataclass
class RoundResult:
    """The outcome of a verified block.

    drafted: the ids; the first `accepted` of them are kept; bonus: the target's own token after them.
    row_logprobs: row of the block -> its log-probabilities [V]; confidence: the drafter's, if the policy wants it.
    """

    drafted: list[int]
    accepted: int
    bonus: int
    row_logprobs: Callable[[int], mx.array]
    confidence: list[float] | None = None


class TargetSampler:
    """Chooses the target's own token in each row of a block, and compares the drafts with these tokens.

    processors: logits processors; if there are any, the host samples row by row, with one wait per row.
    history: the committed tokens, for the processors.
    needs_rows: whether greedy sampling needs the log-probabilities, not only their argmax.
    """

    def __init__(
        self, sampler: Sampler | None, processors: Sequence[LogitsProcessor], seed: int | None, prompt: Sequence[int] = ()
    ):
        self.sampler, self.processors, self.history, self.needs_rows = sampler, processors, History(prompt), False
        self.seed = choose_seed(seed) if sampler or seed is not None else 0
        self.noise = KeyedNoise(self.seed)

    def _sample(self, rows: mx.array, position: int) -> mx.array:
        """[N, V] log-probabilities to tokens [N]; position: absolute, of the first token."""
        chosen = mx.argmax(rows, axis=-1) if self.sampler is None else sample_rows(self.sampler, self.noise, position, rows)
        return chosen.astype(mx.int32)

    def draft(
        self, drafter: Drafter, target: Target, block: tuple[mx.array, mx.array, list, int, int], n: int | None, position: int
    ) -> tuple[mx.array, mx.array | None]:
        """`Drafter.draft_with_confidence` of (anchor, features, cache, start, block_size); position: the first draft's, absolute.
        With a `Distribution`, drafts are drawn with the same noise as the target's tokens, so that they match more often."""
        noise = ()
        if isinstance(self.sampler, Distribution):
            rows = self.noise.rows(position, block[-1], target.vocabulary)[:-1]  # the last is the bonus token's
            noise = (self.sampler.noised, rows[None, :n])
        return drafter.draft_with_confidence(*block, *noise, n=n, accelerator=target.accelerator)

    def enqueue(
        self,
        target: Target,
        output: TargetOutput,
        drafted: mx.array,
        drafter_states: list[Any],
        position: int,
        confidence: mx.array | None = None,
    ) -> tuple[Callable[[], mx.array] | None, Callable[[], RoundResult], bool]:
        """Enqueue the sampling of a pass's tokens and their comparison with the drafts.

        Shapes:
          - output: of N + 1 rows; drafted, confidence: [1, >= N]
        Args:
          drafter_states: arrays of the drafter's cache to evaluate as well; position: absolute, of the token that row 0 predicts.
        Returns:
          - at N = 0, a function that returns the token [1] on the device (None with processors)
          - a function that waits for the result: the round's one wait. Raises NotFiniteError if a kernel or compiled pass failed
          - whether a kernel or compiled pass ran
        """
        # The closures below hold hidden states only. Logits would keep the caches alive, because they are computed from them.
        hidden, features, compiled = output.hidden, output.features, output.compiled
        if self.processors:
            flag = target.finite_flag(hidden, compiled=compiled)
            drafts = pack_drafts(drafted, confidence)
            mx.async_eval(drafts, hidden, features, drafter_states, flag)
            n = drafted.shape[1]
            return None, lambda: self._match_rows(target, hidden, drafts, n, position, flag, compiled), bool(flag)
        token, margin, rows, block = None, None, None, drafted[:, : hidden.shape[1] - 1]
        if block.shape[1] and mx.default_device() != mx.cpu:
            # The device starts on the last layers while the host builds the rest. In plain decoding the next pass does this.
            mx.async_eval(hidden, features, drafter_states)
        if self.sampler is None and not self.needs_rows and (found := target.greedy_ids(hidden)):
            choices, margin = found
            accepted, bonus = accept_match(block, choices)
        elif block.shape[1]:
            rows = logprobs(target, hidden)
            accepted, bonus = self._accept(block, rows, position)
        else:
            rows = logprobs(target, hidden, output.logits)
            accepted, bonus = None, self._sample(rows[0], position)
        flag = target.finite_flag(hidden, margin, rows, compiled)
        if not block.shape[1]:
            token, parts = bonus, [bonus, *flag]
        else:
            parts = [pack_drafts(drafted, confidence), accepted, bonus, *flag]
        packed = mx.concatenate(parts) if len(parts) > 1 else token
        # Everything is enqueued; reading one small array is the only wait.
        mx.async_eval(packed, hidden, features, drafter_states)

        def read() -> RoundResult:
            values = packed.tolist()
            target.check([values.pop() for _ in flag], compiled)
            last = values.pop()
            n = values.pop() if block.shape[1] else 0
            ids, confidence = unpack_drafts(values, drafted.shape[1])
            return RoundResult(ids, n, last, row_logprobs, confidence)

        def row_logprobs(i: int) -> mx.array:
            # Computed again from the hidden row, so that neither the block's logits nor the caches are kept in memory.
            return logprobs(target, hidden[:, i : i + 1])[0, 0]

        return (lambda: token), read, bool(flag)

    def set_width(self, draft: Any, n: int) -> int:
        """Set a `Draft`'s width to n, or to the number of its ids if that is smaller. Returns: the width.

        A constraint may make it smaller (`constrained.ConstrainedSampler`).
        """
        draft.width = min(n, draft.row.shape[1])
        return draft.width

    def _accept(self, drafted: mx.array, rows: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Drafts [1, N] and log-probabilities [1, N + 1, V] to accepted [1] and bonus [1]."""
        return accept_match(drafted, self._sample(rows[0], position)[None])

    def _match_rows(
        self, target: Target, hidden: mx.array, drafts: mx.array, count: int, position: int, flag: list[mx.array], compiled: bool
    ) -> RoundResult:
        """With processors: sample row by row and stop at the first rejected draft. So a processor that keeps a state is called
        exactly as in plain decoding."""
        target.check([bits.item() for bits in flag], compiled)
        ids, confidence = unpack_drafts(drafts.tolist(), count)
        rows, width, n = [], hidden.shape[1] - 1, len(self.history)
        for i in range(width + 1):
            row = process(self.processors, self.history.array(), self._logits(target, hidden[:, i : i + 1])[:, 0])
            token = self._sample(row, position + i).item()
            rows.append(row[0])
            if i == width or token != ids[i]:
                break
            self.history.append(token)
        self.history.cut(n)
        return RoundResult(ids, i, token, rows.__getitem__, confidence)

    @staticmethod
    def _logits(target: Target, hidden: mx.array) -> mx.array:
        """Logits for the processors. If a kernel gave a value that is not finite, they are computed again without kernels."""
        logits = target.head(hidden)
        try:
            target.check([bits.item() for bits in target.finite_flag(hidden, logits=logits)])
        except NotFiniteError:
            logits = target.head(hidden)
        return logits
