"""The ways to draft, one file each, behind the protocol in `base.py`."""

from __future__ import annotations

from layerskip.drafters.base import Draft, DraftContext, Drafter, draft_chain, empty_draft
from layerskip.drafters.self_draft import SelfDrafter
from layerskip.drafters.two_model import ModelDrafter

__all__ = ["Draft", "DraftContext", "Drafter", "ModelDrafter", "SelfDrafter", "draft_chain", "empty_draft"]
