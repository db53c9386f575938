"""Huge pages change where memory lies, never what it holds, and are left out where there are none."""

import sys

import pytest
import torch

from layerskip.models import huge_pages
from layerskip.models.huge_pages import HUGE_PAGE, use_huge_pages

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")


@linux
def test_values_stay():
    weight = torch.randn(3 * HUGE_PAGE // 4, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    moved = use_huge_pages([(weight.data_ptr(), weight.nbytes)])
    assert moved % HUGE_PAGE == 0 and 0 <= moved <= weight.nbytes + 2 * HUGE_PAGE
    assert torch.equal(weight, before)


@linux
def test_an_address_that_is_not_mapped_is_passed_over():
    assert use_huge_pages([(2**46, HUGE_PAGE)]) == 0


def test_other_systems_do_nothing(monkeypatch):
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert use_huge_pages([(0, 10 * HUGE_PAGE)]) == 0


def test_nothing_is_asked_for_nothing():
    assert use_huge_pages([]) == use_huge_pages([(5 * HUGE_PAGE, 0)]) == 0


@pytest.mark.parametrize(
    ("regions", "pages"),
    [
        ([(10, 5)], [(0, 1)]),
        ([(HUGE_PAGE - 1, 2)], [(0, 2)]),
        ([(3 * HUGE_PAGE, 1), (0, 1)], [(0, 1), (3, 4)]),
        ([(0, HUGE_PAGE), (HUGE_PAGE, HUGE_PAGE)], [(0, 2)]),
        ([(0, 4 * HUGE_PAGE), (HUGE_PAGE, 1), (6 * HUGE_PAGE, 1)], [(0, 4), (6, 7)]),
    ],
)
def test_regions_become_whole_pages_that_do_not_overlap(regions, pages):
    assert huge_pages._merged(regions) == [(begin * HUGE_PAGE, end * HUGE_PAGE) for begin, end in pages]
