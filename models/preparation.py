"""Making a decoder's linears fast: fused where they read the same input, packed where the processor gains by it.

What that costs in time and memory is part of the answer. It knows nothing of blocks or of how linears compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.errors import SettingError
from layerskip.models.huge_pages import use_huge_pages
from layerskip.models.linears import Linears, packing_obstacle

__all__ = ["Preparation", "prepare_linears"]


@dataclass(frozen=True)
class Preparation:
    """What was done to a decoder's linears, and what it cost.

    Attributes:
        packed, fused, as_they_were: groups of linears that read the same input, by what became of them.
        extra_bytes: of weights that are now held beside the model's own.
        seconds: that it took.
        packing_obstacle: why nothing was packed; None: it was, or was not wanted.
        huge_page_bytes: of weights that now lie in huge pages (`huge_pages.py`).
    """

    packed: int = 0
    fused: int = 0
    as_they_were: int = 0
    extra_bytes: int = 0
    seconds: float = 0.0
    packing_obstacle: str | None = None
    huge_page_bytes: int = 0


def prepare_linears(
    groups: Sequence[Linears], shared: Sequence[Linears], *, pack: bool | None, in_place: bool, huge_pages: bool = True
) -> Preparation:
    """Fuse and pack `groups`, and move what is ours then into huge pages.

    Args:
        shared: of `groups`, those whose weight something else reads too (a head tied to the embedding).
        pack: None packs where it can be done.
        in_place: weights are held once, in their new form, and the model's modules give theirs up; else the new form is
            a copy beside them.
        huge_pages: takes about 2 s a gigabyte.

    Raises:
        SettingError: `pack` is true and it cannot be done.
    """
    began = time.perf_counter()
    plain = [group for group in groups if group.is_plain]
    obstacles = [packing_obstacle(*_kind(group)) for group in plain] if pack is not False else []
    obstacle = next((each for each in obstacles if each is not None), None)
    if pack and (obstacle is not None or not plain):
        reason = obstacle or "no linear is an ordinary one that nobody watches"
        raise SettingError(f"got pack=True, but {reason}. Leave pack out to pack only where it can be done.")
    can_pack = {id(group) for group, each in zip(plain, obstacles, strict=False) if each is None}
    counts = {"packed": 0, "fused": 0, "as_they_were": 0}
    for group in groups:
        if id(group) in can_pack:
            group.pack(release=in_place and group not in shared)
            counts["packed"] += 1
        elif group.is_plain and len(group.modules) > 1:
            group.fuse(in_place=in_place)
            counts["fused"] += 1
        else:
            counts["as_they_were"] += 1
    ours = [group for group in groups if group.is_plain and (in_place or group.copied_bytes)]
    regions = [region for group in ours for region in group.regions()] if huge_pages else []
    return Preparation(
        **counts,
        huge_page_bytes=use_huge_pages(regions),
        extra_bytes=sum(group.copied_bytes for group in groups),
        seconds=time.perf_counter() - began,
        packing_obstacle=obstacle,
    )


def _kind(group: Linears) -> tuple[torch.dtype, torch.device]:
    weight = next(group.modules[0].parameters())
    return weight.dtype, weight.device
