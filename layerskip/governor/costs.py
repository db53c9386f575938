"""What a round costs: measured as it goes, or given as ratios so that decisions can be repeated.

A verification pass costs by its width (the newest token and the drafts), a draft by its steps. "Verification" means
everything of a round but the drafting, acceptance and stopping included.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from layerskip.errors import SettingError

__all__ = ["CostRatios", "Costs", "FixedCosts", "MeasuredCosts"]

VERIFY_SLOPE = 0.02  # of a plain step for each further token, until measured; SmolLM2 on CPU: 0.01 to 0.03
_SLOPE_WEIGHT = 2  # of the slope above, in measurements of any width
_PRIOR_WEIGHT = 3  # of what the slope says of a width, in measurements of that width
# Plain steps, then wider ones, before several rows draft. The first plain one behind a long prompt may be slow: by it
# wider ones would look cheap for long, which a median of four bears. A slow wider one only delays drafts.
_FIRST_PLAIN, _FIRST_WIDER = 4, 2
_LONGEST_WITHOUT = 128  # rounds, before a plain step, or with several rows a wider one, is measured again
_LONG_WINDOW = 36  # the same of ratios, which move less: a slower machine is not to be taken for dearer passes
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

    def note_rows(self, rows: int) -> None:
        """Learn that so many rows are left."""
        ...

    def lacks_plain(self) -> bool:
        """Whether a plain step should be taken only to know its cost."""
        ...

    def lacks_wider(self) -> bool:
        """Whether a pass over two tokens should be taken only to know its cost."""
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

    def note_rows(self, rows: int) -> None:
        """Nothing."""

    def lacks_plain(self) -> bool:
        """Never."""
        return False

    def lacks_wider(self) -> bool:
        """Never."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """See `Costs.to_dict`; the unit is a plain step."""
        drafts = {source: self.draft(source) for source in self.draft_ratios}
        return {"unit": "plain steps", "draft": drafts, "verify_slope": self.ratios.verify_slope}


class MeasuredCosts:
    """Measured as it goes, in seconds.

    What a plain step takes (`scale`) moves with the machine and the text's length, and is judged by every round; what
    wider passes and drafts cost in plain steps hardly moves, and is remembered. It does move with the number of rows:
    where many are computed at once a wider pass costs by its tokens, where few are left it costs next to nothing.
    Several rows are therefore decoded plainly at first: a scale judged by wide passes, and these by that scale, would
    be believed for ever. Then passes over two tokens are measured, before a drafter has to read anything.
    """

    def __init__(self, draft_ratios: Mapping[str, float], rows: int = 1) -> None:
        """See the class.

        Args:
            draft_ratios: what a draft step costs in plain steps, until it is measured.
            rows: that are decoded at once.
        """
        self._draft_ratios = draft_ratios
        self._measured_rows, self._plain_wanted, self._wider_wanted = rows, _FIRST_PLAIN, _FIRST_WIDER
        self._forget()

    def _forget(self) -> None:
        self._scales: deque[float] = deque(maxlen=_WINDOW)
        self._scale = 1.0  # of a plain step; before anything is measured everything is in plain steps
        self._ratios: dict[int | str, deque[float]] = {}  # by width of a pass, or source of a draft
        self._slopes: deque[float] = deque(maxlen=_WINDOW)  # what each further token added to the last passes
        self._table = [1.0, 1.0]  # of the ratios by width, made anew when one was measured
        self._rounds_without_plain, self._plain_steps = 0, 0
        self._rounds_without_wider, self._wider_passes = 0, 0

    def verify(self, width: int) -> float:
        """See `Costs.verify`."""
        return self._scale * self._verify_ratio(width)

    def draft(self, source: str) -> float:
        """See `Costs.draft`."""
        measured = self._ratios.get(source)
        return self._scale * (median(measured) if measured else self._draft_ratios[source])

    def note_verify(self, width: int, seconds: float) -> None:
        """See `Costs.note_verify`."""
        if width == 1 and not self._plain_steps:  # all else was measured by a guess
            self._forget()
        known = self._ratios.get(width, ())
        if width > 1 and self._scales:
            ratio = seconds / self._scale
            self._ratios.setdefault(width, deque(maxlen=_LONG_WINDOW)).append(ratio)
            self._slopes.append((ratio - 1) / (width - 1))
            del self._table[2:]
        if width == 1 or not self._plain_steps:
            self._scales.append(seconds / self._verify_ratio(width))
        elif len(known) >= _PRIOR_WEIGHT:  # so many as say what such a pass takes
            self._scales.append(seconds / max(1.0, median(known)))
        self._scale = median(self._scales)
        self._rounds_without_plain = 0 if width == 1 else self._rounds_without_plain + 1
        self._plain_steps += width == 1
        self._rounds_without_wider = 0 if width > 1 else self._rounds_without_wider + 1
        self._wider_passes += width > 1

    def note_draft(self, source: str, steps: int, seconds: float) -> None:
        """See `Costs.note_draft`; a source without cost is not timed."""
        if self._draft_ratios[source] > 0 and self._scales:
            self._ratios.setdefault(source, deque(maxlen=_LONG_WINDOW)).append(seconds / steps / self._scale)

    def note_rows(self, rows: int) -> None:
        """See `Costs.note_rows`: what was measured with twice as many is not remembered."""
        if 2 * rows <= self._measured_rows:
            # There may be few rounds left to pay for more.
            self._measured_rows, self._plain_wanted, self._wider_wanted = rows, 2, 1
            self._forget()

    def lacks_plain(self) -> bool:
        """When it was not measured in the first rounds, or not for long: without it no loss can be noticed."""
        if self._measured_rows > 1 and self._plain_steps < self._plain_wanted:
            return True
        return self._rounds_without_plain >= (_LONGEST_WITHOUT if self._plain_steps else 3)

    def lacks_wider(self) -> bool:
        """With several rows, of which nobody knows what a further token of each costs; one row's passes hardly do."""
        is_known = self._wider_passes >= self._wider_wanted and self._rounds_without_wider < _LONGEST_WITHOUT
        return self._measured_rows > 1 and not is_known

    def to_dict(self) -> dict[str, Any]:
        """See `Costs.to_dict`; ratios are in plain steps."""
        widths = sorted(key for key in self._ratios if isinstance(key, int))
        return {
            "plain_step_s": self._scale if self._scales else None,
            "draft_ratios": {key: median(each) for key, each in self._ratios.items() if isinstance(key, str)},
            "verify_ratios": {width: self._verify_ratio(width) for width in widths},
        }

    def _verify_ratio(self, width: int) -> float:
        """Of a pass over `width` tokens: measured, the less often the more by what each further token adds to passes of
        other widths, and to begin with by the prior; no less than a plain step.

        Not always more than of a narrower one: packed linears take longer for two rows than for four.
        """
        if len(self._table) > width:
            return self._table[width]
        count = len(self._slopes)
        slope = max(0.0, median(self._slopes)) if count else 0.0
        weight = 0 if count and self._measured_rows > 1 else _SLOPE_WEIGHT
        slope = (count * slope + weight * VERIFY_SLOPE) / (count + weight)
        while len(self._table) <= width:
            own = 1 + slope * (len(self._table) - 1)
            measured = self._ratios.get(len(self._table))
            if measured:
                own = (len(measured) * median(measured) + _PRIOR_WEIGHT * own) / (len(measured) + _PRIOR_WEIGHT)
            self._table.append(max(own, 1.0))
        return self._table[width]
