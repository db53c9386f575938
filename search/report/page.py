"""The report's page: the template, filled. Everything a reader's browser needs is inside."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from importlib import resources

from jinja2 import Environment, StrictUndefined

from layerskip.search.report import tables, telling
from layerskip.search.report.gallery import Picture
from layerskip.search.result import SearchResult

__all__ = ["fill_page", "page_style"]

_TEMPLATE, _STYLE = "report.html.jinja", "page.css"


def fill_page(result: SearchResult, pictures: Mapping[str, Picture]) -> str:
    """The page as HTML; every value is escaped."""
    source = _text(_TEMPLATE)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["unbroken"] = _unbroken
    return environment.from_string(source).render(
        style=page_style(),
        headline=telling.headline(result),
        pays=result.pays,
        facts=tables.facts(result),
        in_python=telling.in_python(result),
        in_shell=telling.in_shell(result),
        draft=telling.describe_draft(result),
        held_out=result.held_out,
        held_out_rows=tables.held_out_rows(result),
        pictures=pictures,
        candidates=tables.best_candidates(result),
        num_trials=len(result.trials),
        states=tables.states(result.trials),
        costs=tables.cost_rows(result.costs),
        costs_assumed=(result.costs.get("conditions") or {}).get("measured") is False,
        cost_conditions=tables.flat(result.costs.get("conditions") or {}),
        conditions=tables.flat(result.conditions),
        settings=tables.flat(result.settings),
        effort=_effort(result),
    )


def page_style() -> str:
    """The style sheet of a report's page, for light, dark and print."""
    return _text(_STYLE)


def _text(name: str) -> str:
    return resources.files("layerskip.search.report").joinpath(name).read_text(encoding="utf-8")


def _unbroken(text: str) -> str:
    """`text` escaped, its intervals kept on one line."""
    return re.sub(r"\(95[^()]*\)", r'<span class="whole">\g<0></span>', html.escape(text))


def _effort(result: SearchResult) -> list[tuple[str, str]]:
    minutes, seconds = divmod(round(result.seconds), 60)
    return [
        ("study (the search's name)", result.study or "not set"),
        ("storage (where its trials are kept)", tables.without_password(result.storage) or "not set"),
        ("candidates (trials)", f"{len(result.trials):,}: {tables.states(result.trials)}"),
        ("time taken by this worker", f"{minutes} min {seconds} s"),
        ("sub-blocks run over all texts", f"{result.block_passes:,.0f}"),
    ]
