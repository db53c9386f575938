"""Search: the draft plan that pays, found on one machine or many (`find_plan`)."""

try:
    import optuna as _optuna  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('the search needs optuna: pip install "layerskip[search]"') from error

from layerskip.search.cost import CostModel
from layerskip.search.find import find_plan, load_result
from layerskip.search.result import HeldOut, Interval, SearchResult
from layerskip.search.settings import Budget, SearchSettings

__all__ = [
    "Budget",
    "CostModel",
    "HeldOut",
    "Interval",
    "SearchResult",
    "SearchSettings",
    "find_plan",
    "load_result",
]
