"""What a round costs: measured as it goes, or given as ratios so that decisions can be repeated.

A verification pass costs by its width (the newest token and the drafts), a draft by its steps. "Verification" means
everything of a round but the drafting, acceptance and stopping included.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from layerskip.errors import SettingError

__all__ = ["CostRatios", "Costs", "FixedCosts", "MeasuredCosts"]

VERIFY_SLOPE = 0.02  # of a plain step for each further token, until measured; SmolLM2 on CPU: 0.01 to 0.03
_WINDOW = 9  # measurements whose median counts: long enough to outvote a hiccup, short enough to follow the machine


@dataclass(frozen=True)
class CostRatios:
    """Costs in plain steps.

    Attributes:
        draft: of one step of the drafter that runs a model; None: by the parameters that it reads.
        verify_slope: what each further token adds to a pass.
    """

    draft: float | None = None
    verify_slope: float = VERIFY_SLOPE

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: a ratio that is no finite number from 0.
        """
        for name in ("draft", "verify_slope"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (name == "draft" and value is None) and not (is_number and 0 <= value < math.inf):
                raise SettingError(f"got {name}={value!r} among the cost ratios; expected a number from 0.")


class Costs(Protocol):
    """Costs in seconds, or in any one unit."""

    def verify(self, width: int) -> float:
        """Of a pass over `width` tokens and all that follows from it."""
        ...

    def draft(self, source: str) -> float:
        """Of one step of `source`."""
        ...

    def note_verify(self, width: int, seconds: float) -> None:
        """Learn what a pass took."""
        ...

    def note_draft(self, source: str, steps: int, seconds: float) -> None:
        """Learn what drafting took."""
        ...

    def lacks_plain(self) -> bool:
        """Whether a plain step should be taken only to know its cost."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The present estimates, for statistics."""
        ...


@dataclass
class FixedCosts:
    """Given ratios; nothing is learnt."""

    ratios: CostRatios
    draft_ratios: Mapping[str, float]

    def verify(self, width: int) -> float:
        """See `Costs.verify`."""
        return 1 + self.ratios.verify_slope * (width - 1)

    def draft(self, source: str) -> float:
        """See `Costs.draft`."""
        ratio = self.draft_ratios[source]
        return ratio if self.ratios.draft is None or ratio == 0 else self.ratios.draft

    def note_verify(self, width: int, seconds: float) -> None:
        """Nothing."""

    def note_draft(self, source: str, steps: int, seconds: float) -> None:
        """Nothing."""

    def lacks_plain(self) -> bool:
        """Never."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """See `Costs.to_dict`; the unit is a plain step."""
        drafts = {source: self.draft(source) for source in self.draft_ratios}
        return {"unit": "plain steps", "draft": drafts, "verify_slope": self.ratios.verify_slope}


@dataclass
class MeasuredCosts:
    """Medians of the last measurements, in seconds.

    Attributes:
        draft_ratios: what a draft step costs in plain steps, until it is measured.
    """

    draft_ratios: Mapping[str, float]
    _verify_s: dict[int, deque[float]] = field(default_factory=dict)
    _draft_s: dict[str, deque[float]] = field(default_factory=dict)
    _rounds_without_plain: int = 0

    def verify(self, width: int) -> float:
        """See `Costs.verify`; a width that was never run is judged by the nearest that was."""
        if width in self._verify_s:
            return median(self._verify_s[width])
        if not self._verify_s:
            return 1 + VERIFY_SLOPE * (width - 1)  # no scale yet: everything is in plain steps
        nearest = min(self._verify_s, key=lambda measured: abs(measured - width))
        slope = (1 + VERIFY_SLOPE * (width - 1)) / (1 + VERIFY_SLOPE * (nearest - 1))
        return median(self._verify_s[nearest]) * slope

    def draft(self, source: str) -> float:
        """See `Costs.draft`."""
        if source in self._draft_s:
            return median(self._draft_s[source])
        return self.draft_ratios[source] * self.verify(1)

    def note_verify(self, width: int, seconds: float) -> None:
        """See `Costs.note_verify`."""
        self._verify_s.setdefault(width, deque(maxlen=_WINDOW)).append(seconds)
        self._rounds_without_plain = 0 if width == 1 else self._rounds_without_plain + 1

    def note_draft(self, source: str, steps: int, seconds: float) -> None:
        """See `Costs.note_draft`; a source without cost is not timed."""
        if self.draft_ratios[source] > 0:
            self._draft_s.setdefault(source, deque(maxlen=_WINDOW)).append(seconds / steps)

    def lacks_plain(self) -> bool:
        """When it was not measured in the first rounds, or not for long: without it no loss can be noticed."""
        return self._rounds_without_plain >= (128 if 1 in self._verify_s else 4)

    def to_dict(self) -> dict[str, Any]:
        """See `Costs.to_dict`."""
        return {
            "unit": "seconds",
            "draft": {source: self.draft(source) for source in self._draft_s},
            "verify_by_width": {width: median(times) for width, times in sorted(self._verify_s.items())},
        }
