"""Drafting that depends on no clock: for tests that claim something about drafts."""

from typing import Any


def always(plan: Any) -> dict[str, Any]:
    """Call options by which `plan` drafts as much as it may, whether or not it pays; None: plain decoding.

    On tiny models it never pays, and the governor would soon decode plainly: tests would then say nothing of drafts.
    """
    return {} if plan is None else {"plan": plan, "governor": "off"}
