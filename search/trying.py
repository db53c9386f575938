"""Trying a plan in earnest: real decoding of some texts by it and plainly, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from layerskip.api import Model
from layerskip.plan import DraftPlan
from layerskip.search.calibration import decoding_options
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
) -> Interval | None:
    """Tokens a second behind the prompt, drafting by `plan` ungoverned, over those of plain decoding: median of texts.

    Args:
        count: of the texts, spread evenly, at most.

    Returns:
        None: no text took a round.
    """
    chosen = [texts[index * len(texts) // min(count, len(texts))] for index in range(min(count, len(texts)))]
    options, _ = decoding_options(model, settings.sampling)
    ways: list[dict[str, Any]] = [{"plan": plan, "governor": "off"}, {"plan": None}]
    ratios = []
    # The longest one first, to warm up: what is recorded for it serves the others.
    longest = max(chosen, key=lambda each: len(each.prompt))
    for index, text in enumerate([longest, *chosen]):
        # In turn who comes first, so that neither always finds the caches as the other left them.
        stats = [
            model.generate(
                list(text.prompt), max_new_tokens=settings.new_tokens, seed=settings.seed, **options, **ways[way]
            ).stats
            for way in ((0, 1) if index % 2 else (1, 0))
        ]
        drafting, plain = stats if index % 2 else stats[::-1]
        if index and drafting.rounds and plain.rounds:
            ratios.append(drafting.tokens_per_s / plain.tokens_per_s)
        notify("decoding in earnest", index, len(chosen))
    if not ratios:
        return None
    return interval_over_texts(lambda rows: median(ratios[row] for row in rows), len(ratios))
