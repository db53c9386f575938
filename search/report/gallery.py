"""Which pictures a report has, what each is called and says, and what stands there when there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerskip.search.cost import CostModel
from layerskip.search.report.drawing import Drawing, draw
from layerskip.search.report.layers import draw_heat, draw_path
from layerskip.search.report.plots import draw_front, draw_history, draw_offsets, draw_predictions
from layerskip.search.report.telling import chosen, counted, is_known, is_start, num_layers, percent, ranked, times
from layerskip.search.result import Interval, SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "Picture", "hang"]

PICTURES = ("draft-layers", "layer-importance", "acceptance-and-cost", "history", "acceptance-by-offset", "speed-ups")


@dataclass(frozen=True)
class Picture:
    """A picture of the report.

    Attributes:
        name: of its files.
        caption: what to see in it, or why there is none.
    """

    name: str
    title: str
    caption: str
    drawing: Drawing | None


def hang(result: SearchResult) -> dict[str, Picture]:
    """All pictures by name, drawn."""
    makers: Sequence[Callable[[SearchResult], Picture]] = (_path, _importance, _front, _history, _offsets, _speedups)
    return dict(zip(PICTURES, (make(result) for make in makers), strict=True))


def _picture(
    name: str, title: str, caption: str, alternative: str, otherwise: str, make: Callable[[], Figure | None]
) -> Picture:
    drawing = draw(name, alternative, make)
    return Picture(name, title, caption if drawing else otherwise, drawing)


def _path(result: SearchResult) -> Picture:
    draft, layers = chosen(result), num_layers(result)
    skipped = f"{len(draft.skip_attention)} attentions and {len(draft.skip_mlp)} MLPs are left out"
    end = "no exit" if draft.exit_layer is None else f"an exit after {counted(draft.exit_layer, 'layer')}"
    if draft.trained is not None:
        end += ", behind which trained blocks run"
    return _picture(
        "draft-layers",
        "The chosen draft, layer by layer",
        "Every layer is an attention and an MLP. A draft goes through them from left to right; then "
        f"{'' if draft.trained is None else 'the trained blocks, '}the final norm and the scoring of the vocabulary "
        "follow. The check runs all of them.",
        f"The model's {layers} layers in two rows, attention and MLP: {skipped}, {end}.",
        "",
        lambda: draw_path(draft, layers),
    )


def _importance(result: SearchResult) -> Picture:
    measured = _measured(result.single_retention)
    if measured:
        least = min(
            (value, name, layer) for name, row in measured.items() for layer, value in enumerate(row) if value >= 0
        )
        return _picture(
            "layer-importance",
            "What each sub-block is worth",
            "Left out alone, how often is the draft's next token still the model's own, in per cent? The darker, the "
            "more harm; what is bright can be spared. Leaving out several at once does more harm than each alone.",
            f"Heat map by layer. Most harm: {least[1]} of layer {least[2]}, {percent(least[0])} kept without it.",
            "",
            lambda: draw_heat(measured, chosen(result), "drafts kept with this sub-block alone left out"),
        )
    complete = [each for each in ranked(result.trials) if each.candidate.trained is None]
    best = complete[: math.ceil(len(complete) / 10)]
    layers = num_layers(result)
    skipped = [trial.candidate.skipped(layers) for trial in best]
    shares = {
        name: [sum(layer in each[row] for each in skipped) / max(1, len(best)) for layer in range(layers)]
        for row, name in enumerate(("attention", "mlp"))
    }
    return _picture(
        "layer-importance",
        "What the best candidates leave out",
        "Single sub-blocks were not measured in this search. Instead: by how many of the best tenth of the candidates "
        f"({len(best)}) each is left out, in per cent. The brighter, the more of them do without it.",
        f"Heat map by layer: how often the best {len(best)} candidates leave out each sub-block.",
        "Single sub-blocks were not measured, and no candidate was tried to the end.",
        lambda: draw_heat(shares, chosen(result), "best candidates that leave it out") if best else None,
    )


def _measured(retention: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Retention by sub-block, NaN where it was not tried (such a layer has zeros); empty if it was tried nowhere."""
    rows = {name: retention[name] for name in ("attention", "mlp") if retention.get(name)}
    tried = {layer for row in rows.values() for layer, value in enumerate(row) if value and math.isfinite(value)}
    found = {
        name: [min(1.0, max(0.0, value)) if layer in tried else math.nan for layer, value in enumerate(row)]
        for name, row in rows.items()
    }
    return found if tried else {}


def _front(result: SearchResult) -> Picture:
    sampler = result.settings.get("sampler")
    try:
        verify_ratio = CostModel.from_dict(result.costs).verify_ratio
        verify_ratio(2)
        checking = "at this machine's cost of checking"
    except (TypeError, ValueError, LookupError, ZeroDivisionError, AttributeError):
        verify_ratio, checking = (lambda width: 1.0), "if checking a draft costs one plain step"  # type: ignore[misc,assignment]
    best = result.best
    return _picture(
        "acceptance-and-cost",
        "All candidates: how often they are right, and what they cost",
        "Up and left is better: drafts that are cheap and often accepted. On the green line lie the candidates that no "
        "other one beats in both. Along a grey line the predicted speed-up is the same, "
        f"{checking} and with every token of a draft accepted equally often; a guide to the eye, as real drafts differ "
        "a little from that. Those given up early were judged on a part of the texts.",
        f"Scatter plot of {len(result.trials)} candidates, {len(result.front)} of them best trade-offs. Chosen: "
        f"{percent(best.acceptance_rate)} accepted at {times(best.draft_ratio)} plain steps a drafted token.",
        "No candidate came far enough to be judged.",
        lambda: draw_front(
            [(each, is_start(each, sampler)) for each in result.trials], result.front, best, verify_ratio
        ),
    )


def _history(result: SearchResult) -> Picture:
    sampler = result.settings.get("sampler")
    best = ranked(result.trials)[:1]
    found = f" The best, {times(best[0].speedup)}, is number {best[0].number}." if best else ""
    return _picture(
        "history",
        "How the search went",
        "Each point is a candidate, on the texts of the search. The search begins with candidates that are known to be "
        "good elsewhere and then proposes its own, learning from those before. If the orange line still rises at the "
        "end, a longer search would likely find more.",
        f"Predicted speed-up of {len(result.trials)} candidates in the order of trying.{found}",
        "No candidate came far enough to be judged.",
        lambda: draw_history([(each, is_start(each, sampler)) for each in result.trials]),
    )


def _offsets(result: SearchResult) -> Picture:
    searched = [each for each in result.best.acceptance_by_offset if math.isfinite(each)]
    fresh = [each for each in (result.held_out.acceptance_by_offset if result.held_out else ()) if is_known(each)]
    shown = "; ".join(f"token {index}: {percent(each.value)}" for index, each in enumerate(fresh, start=1))
    return _picture(
        "acceptance-by-offset",
        "How far into a draft it stays right",
        "The chance of each token of a draft to be accepted, given that all before it were. Where the two lines part, "
        "the search has fitted its own texts.",
        f"Acceptance by token of the draft. On held-out texts: {shown or 'not measured'}.",
        "Acceptance by token was not recorded.",
        lambda: draw_offsets(searched, fresh, result.plan.num_draft_tokens),
    )


def _speedups(result: SearchResult) -> Picture:
    rows: list[tuple[str, Interval, bool]] = []
    value, held_out = result.best.speedup, result.held_out
    if value is not None and math.isfinite(value):
        rows.append(("predicted,\ntexts of the search", Interval(value, value, value), False))
    fresh = held_out is not None and held_out.texts > 0
    if fresh and is_known(held_out.predicted_speedup):
        rows.append(("predicted,\nheld-out texts", held_out.predicted_speedup, False))
    measured = held_out.measured_speedup if fresh else None
    if measured is not None and is_known(measured):
        rows.append(("measured,\nheld-out texts", measured, True))
        title = "Predicted against measured speed-up"
        caption = (
            "Measured by decoding for real, with this draft and plainly in turn. If the measurement lies within "
            "the prediction's interval, the other predictions on this page can be trusted as well."
        )
    else:
        title = "Predicted speed-up: texts of the search against others"
        caption = "This is a prediction against a prediction: nothing was measured by decoding for real in this search."
    interval = "95\N{NO-BREAK SPACE}% intervals"
    caption += f" Bars are {interval}; the search's own texts have none, since the best was chosen on them."
    said = "; ".join(f"{name.replace(chr(10), ' ')}: {times(each.value)}" for name, each, _ in rows)
    return _picture("speed-ups", title, caption, said, "No speed-up is known.", lambda: draw_predictions(rows))
