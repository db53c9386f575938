"""Trying a plan in earnest: real decoding of some texts by it and plainly, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from layerskip.api import Model
from layerskip.plan import DraftPlan
from layerskip.search.held_out import interval_over_texts
from layerskip.search.result import Interval
from layerskip.search.settings import SearchSettings
from layerskip.search.texts import Text

__all__ = ["measure_speedup"]


def measure_speedup(
    model: Model,
    plan: DraftPlan,
    texts: Sequence[Text],
    settings: SearchSettings,
    notify: Callable[[str, int, int], None] = lambda what, done, total: None,
    count: int = 12,
) -> Interval:
    """Tokens a second behind the prompt, drafting by `plan` ungoverned, over those of plain decoding: median of texts.

    Args:
        count: of the texts, spread evenly, at most.
    """
    chosen = [texts[index * len(texts) // min(count, len(texts))] for index in range(min(count, len(texts)))]
    options: dict[str, Any] = (
        {"do_sample": False} if settings.sampling is None else {"do_sample": True, **settings.sampling}
    )
    ratios = []
    for index, text in enumerate([chosen[0], *chosen]):  # the first one once more, to warm up
        drafting, plain = (
            model.generate(list(text.prompt), max_new_tokens=settings.new_tokens, seed=settings.seed, **options, **by)
            for by in ({"plan": plan, "governor": "off"}, {"plan": None})
        )
        if index and drafting.stats.rounds and plain.stats.rounds:
            ratios.append(drafting.stats.tokens_per_s / plain.stats.tokens_per_s)
        notify("decoding in earnest", index, len(chosen))
    return interval_over_texts(lambda rows: median(ratios[row] for row in rows), len(ratios))
