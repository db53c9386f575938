"""The ways to draft, one file each, behind the protocol in `base.py`."""

from __future__ import annotations

from layerskip.draft import Draft
from layerskip.drafters.base import DraftContext, Drafter, draft_chain
from layerskip.drafters.heads import HeadsDrafter
from layerskip.drafters.lookahead import LookaheadDrafter
from layerskip.drafters.lookup import LOOKUP_PRIORS, LookupDrafter
from layerskip.drafters.self_draft import SelfDrafter
from layerskip.drafters.two_model import ModelDrafter

__all__ = [
    "LOOKUP_PRIORS",
    "Draft",
    "DraftContext",
    "Drafter",
    "HeadsDrafter",
    "LookaheadDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "SelfDrafter",
    "draft_chain",
]
