"""Which token of a pass follows which: a draft that proposes several tokens for one place is a tree, not a chain.

Token 0 of a pass is the newest committed one, the root. Each further token stands one position behind its parent and
sees what its parent sees, the parent, and itself (SpecInfer, Miao et al. 2024: tree attention). A chain, where each
follows the one before it, is the simplest tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Tree"]


class Tree:
    """The shape of each row's draft.

    Attributes:
        parents: of each row, for the tokens 1, 2, … of the pass the index of the token before each.
    """

    def __init__(self, parents: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        """See the class.

        Args:
            parents: as many in each row, each smaller than the index of its child.
            device: of the tensors.
        """
        assert all(0 <= each <= index for row in parents for index, each in enumerate(row)), f"not a tree: {parents}"
        self.parents = [list(row) for row in parents]
        self._device = torch.device(device)

    def to(self, device: torch.device) -> Tree:
        """The same on another device."""
        return self if self._device == device else Tree(self.parents, device)

    @cached_property
    def before(self) -> Tensor:
        """`parents` as (batch, tokens - 1), int64."""
        return torch.tensor(self.parents, device=self._device)

    @cached_property
    def depths(self) -> Tensor:
        """How far behind the root each token stands: (batch, tokens), int64."""
        return self.sees.sum(dim=2) - 1

    @cached_property
    def sees(self) -> Tensor:
        """Whether a token's text holds another, or is it: (batch, tokens, tokens), bool."""
        batch, drafts = self.before.shape
        sees = torch.eye(drafts + 1, dtype=torch.bool, device=self._device).repeat(batch, 1, 1)
        rows = torch.arange(batch, device=self._device)
        for index in range(drafts):  # a parent's row is whole before its children's
            sees[:, index + 1] |= sees[rows, self.before[:, index]]
        return sees
