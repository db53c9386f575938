"""What can be swept: rows of data that say which condition of a run a value changes, and what is worth seeing beside.

A further quantity is a field of `Setup` that runs already obey, and a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.arm_rows import ArmRow, Settings
from experiments.arms import GREEDY
from layerskip.errors import SettingError

__all__ = ["KINDS", "Beside", "Kind", "Setup", "expected_turn_s", "settings_of", "values_of"]

# What a row of `ARMS` calls the number of drafts a round, by whoever decodes, and what must be said beside it.
_LENGTHS: Mapping[str, dict[str, Any]] = {
    "num_draft_tokens": {},
    "lookup_tokens": {},
    "num_assistant_tokens": {"num_assistant_tokens_schedule": "constant"},
    "prompt_lookup_num_tokens": {},
    "cycle_length": {},
    "gamma": {},
}


@dataclass(frozen=True)
class Setup:
    """The conditions of a run that can be swept.

    Attributes:
        batch: rows that are decoded at once.
        context: tokens of each prompt; None: as many as it has.
        temperature: 0: greedily.
        drafts: a round, at most; None: as the plan, or whoever else drafts, says.
    """

    batch: int = 1
    context: int | None = None
    temperature: float = 0.0
    drafts: int | None = None

    @property
    def decoding(self) -> Settings:
        """Sampler settings."""
        return GREEDY if self.temperature == 0 else {"do_sample": True, "temperature": self.temperature}


@dataclass(frozen=True)
class Beside:
    """What is drawn beside the speed-ups.

    Attributes:
        figure: its name among an arm's figures at a value.
        theory: that of what theory says of it, a line without points; None: nothing.
        title: of the axis.
        logarithmic: the axis.
    """

    figure: str
    theory: str | None
    title: str
    logarithmic: bool = False


@dataclass(frozen=True)
class Kind:
    """A quantity to sweep.

    Attributes:
        field: of `Setup`.
        axis: its name and unit.
        defaults: values, ascending.
        lowest, highest: that can be asked for.
        beside: what is drawn beside the speed-ups.
        whole: values are integers.
        logarithmic: the axis, to the base 2.
        grows: a call takes longer, the larger the value.
        governor: of our arms, which nothing else can be chosen for; None: as the options say.
    """

    field: str
    axis: str
    defaults: tuple[float, ...]
    lowest: float
    highest: float
    beside: Beside
    whole: bool = True
    logarithmic: bool = False
    grows: bool = False
    governor: str | None = None


_RATE = Beside("tokens_per_s", None, "tokens per second, all rows", logarithmic=True)

KINDS: Mapping[str, Kind] = {
    "batch": Kind(
        "batch", "rows decoded at once", (1, 2, 4, 8, 16, 32, 64, 128), 1, 1024, _RATE, logarithmic=True, grows=True
    ),
    "context": Kind(
        "context", "tokens of the prompt", (128, 256, 512, 1024, 2048, 4096, 8192), 8, 2**20, _RATE, logarithmic=True,
        grows=True,
    ),
    "temperature": Kind(
        "temperature", "temperature (0: greedy)", (0.0, 0.3, 0.7, 1.0, 1.2), 0, 10,
        Beside("acceptance", "overlap", "first drafts accepted (dotted: 1 - TVD)"), whole=False,
    ),
    "drafts": Kind(
        "drafts", "drafts a round, at most", (1, 2, 3, 4, 5, 6, 7, 8), 1, 32,
        Beside("tokens_per_round", "tau", "tokens per round (dotted: tau)"), governor="off",
    ),
}  # fmt: skip


def values_of(name: str, text: str | None) -> list[float]:
    """The values that `text` lists, separated by commas, ascending and each once; None: those usual for the kind.

    Raises:
        SettingError: one is no number of the kind's, or out of range.
    """
    kind = KINDS[name]
    if text is None:
        return list(kind.defaults)
    values: set[float] = set()
    for word in text.split(","):
        try:
            value = int(word) if kind.whole else float(word)
        except ValueError:
            value = float("nan")
        if not kind.lowest <= value <= kind.highest:
            what = "integers" if kind.whole else "numbers"
            raise SettingError(
                f"got --values with {word.strip()!r} for a sweep of {name}; expected {what} from {kind.lowest:g} to "
                f"{kind.highest:g}, such as {','.join(f'{each:g}' for each in kind.defaults[:3])}."
            )
        values.add(value)
    return sorted(values)


def settings_of(row: ArmRow, drafts: int | None) -> Settings:
    """The arm's own settings, so that it drafts `drafts` tokens a round; empty: it knows no such number.

    Args:
        drafts: None: the first of its grid, as it is.
    """
    default = row.grid[0]
    if drafts is None:
        return default
    known = [name for name in _LENGTHS if any(name in settings for settings in row.grid)]
    found: dict[str, Any] = {}
    for name in known:
        found |= {name: drafts, **_LENGTHS[name]}
    return {**default, **found} if found else {}


def expected_turn_s(kind: Kind, done: Sequence[tuple[float, float]], value: float) -> float | None:
    """About how long a turn at `value` will take, from those at smaller values; None: there is nothing to tell from.

    Along the straight line through the last two; from one, in proportion; never less than the last one took.

    Args:
        done: values, ascending, and the seconds of one turn of all arms there.
    """
    if not done:
        return None
    last, last_s = done[-1]
    if not kind.grows:
        return last_s
    before, before_s = done[-2] if len(done) > 1 else (0.0, 0.0)
    return max(last_s, last_s + (last_s - before_s) / (last - before) * (value - last))
