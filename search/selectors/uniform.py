"""Every second layer: where SWIFT begins (Xia et al., ICLR 2025) before it has seen anything.

The first and the last layer stay, as there. What SWIFT does from here on, proposing sets while it decodes, is left to
the search, whose start this is.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerskip.search.candidate import Candidate
from layerskip.search.selectors.base import Workbench, inner_layers, refuse_fields

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform:
    """Skips layers 1, 1 + every, … whole.

    Attributes:
        every: from 2.
    """

    every: int = 2

    def __post_init__(self) -> None:
        """Check the field."""
        refuse_fields(self, every=self.every >= 2)

    def select(self, bench: Workbench) -> list[Candidate]:
        """See `Selector`."""
        layers = inner_layers(bench.num_blocks)[:: self.every]
        return [Candidate.of(bench.num_blocks, layers, layers)]
