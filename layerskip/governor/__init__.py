"""How much to draft in each round, from which source, or nothing: so that drafting never costs who turns it on."""

from __future__ import annotations

from layerskip.governor.costs import CostRatios, Costs, FixedCosts, MeasuredCosts
from layerskip.governor.governor import Always, Decision, Governor, Source, WorthIt

__all__ = [
    "Always",
    "CostRatios",
    "Costs",
    "Decision",
    "FixedCosts",
    "Governor",
    "MeasuredCosts",
    "Source",
    "WorthIt",
]
