"""The compiled passes of a pair: those of its target and those of its drafter."""

from __future__ import annotations

from typing import Any

from ..kernels.exact_routes import ExactRoutes
from ..models.drafter import Drafter
from ..models.target import Target
from .compiled import model_parts
from .compiled_draft import CompiledDraft
from .compiled_verify import CompiledVerify, ExactVerify


class CompiledPair:
    """The compiled passes of a pair: an `Accelerator`.

    always: use every pass that is right, faster or not. prepares: whether passes are tried before the first answer; else from the
    second one on. drafts: the drafter's, if another pair of its has made them.
    """

    def __init__(
        self, target: Target, drafter: Drafter, always: bool, prepares: bool = True, drafts: CompiledDraft | None = None
    ):
        kind = ExactVerify if isinstance(target.routes, ExactRoutes) else CompiledVerify
        verify, new = kind(target, model_parts(target.model), always), drafts is None
        drafts = CompiledDraft(drafter, model_parts(drafter), always) if new else drafts
        self.always, self.passes, self.prepares = always, (verify, drafts), prepares
        self.verify, self.draft = verify.verify, drafts.draft
        for run in (verify, drafts) if new else (verify,):
            run.waits = not prepares

    def begin(self) -> CompiledPair:
        """Another answer begins: what had to wait for the end of the first one may start."""
        for run in self.passes:
            run.waits = False
        return self

    def holds_for(self, target: Target, drafter: Drafter, always: bool) -> bool:
        """Whether the models still hold the objects that were traced. An adapter loaded since is another array."""
        return self.drafts_for(drafter, always) is not None and _same(self.passes[0].parts, model_parts(target.model))

    def drafts_for(self, drafter: Drafter, always: bool) -> CompiledDraft | None:
        """The drafter's passes, if it still holds the objects that were traced."""
        return self.passes[1] if self.always == always and _same(self.passes[1].parts, model_parts(drafter)) else None

    def refuse(self, reason: str) -> None:
        # A pass of another answer may have been refused while this one was running.
        if not self.passes[0].refused:
            self.passes[0].refuse(reason)

    def findings(self) -> list[dict[str, Any]]:
        return [p.findings() for p in self.passes]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
