"""Published ways to choose what a draft leaves out, one a file, for comparison on the same replay.

File, class and key are the same word. A new one is a file beside these and a line here; the contract tests in
`tests/test_selectors.py` then run on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerskip.search.selectors.admg import Admg
from layerskip.search.selectors.base import Selector, Workbench
from layerskip.search.selectors.clasp import Clasp, clasp_paths
from layerskip.search.selectors.conflayers import ConfLayers
from layerskip.search.selectors.del_exit import DelExit
from layerskip.search.selectors.draft_and_verify import DraftAndVerify
from layerskip.search.selectors.knapspec import KnapSpec
from layerskip.search.selectors.random_sets import RandomSets
from layerskip.search.selectors.uniform import Uniform

__all__ = [
    "SELECTORS",
    "Admg",
    "Clasp",
    "ConfLayers",
    "DelExit",
    "DraftAndVerify",
    "KnapSpec",
    "RandomSets",
    "Selector",
    "Uniform",
    "Workbench",
    "clasp_paths",
]

SELECTORS: Mapping[str, Callable[[], Selector]] = {
    "uniform": Uniform,
    "random_sets": RandomSets,
    "admg": Admg,
    "clasp": Clasp,
    "knapspec": KnapSpec,
    "conflayers": ConfLayers,
    "del_exit": DelExit,
    "draft_and_verify": DraftAndVerify,
}
"""By name, with published constants."""
