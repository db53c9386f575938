"""What an arm of the comparison is: a row of data that says how it is made, what it needs, and what can be tuned.

A new way to decode is a row more (`compare_arms.py`, `outside_arms.py`); nothing else knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

import layerskip
from experiments.arms import GREEDY, Arm
from experiments.subjects import Subject
from layerskip.errors import SettingError, UnsupportedModelError
from layerskip.models.families import geometry_of
from layerskip.models.loading import quiet

__all__ = ["ArmRow", "Preparation", "Settings", "Workshop", "name_of"]

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Preparation:
    """What had to be there before an arm's first call.

    Attributes:
        weights_bytes: beside the model's own.
        cache_bytes_per_token: likewise; None: not known.
        cost: how it was searched or trained, as its plan says; empty: nothing was.
        predicted_speedup: that its search or training promised; None: it promised none.
    """

    weights_bytes: int = 0
    cache_bytes_per_token: int | None = 0
    cost: dict[str, Any] = field(default_factory=dict)
    predicted_speedup: float | None = None


@dataclass
class Workshop:
    """All that arms are made of; what not every arm needs is loaded when the first one asks for it.

    Attributes:
        plans: by the option that names them: those of `PLAN_FILES`, and "exit".
        draft_model: a checkpoint of the same vocabulary.
        governor: of our arms that draft.
        decoding: sampler settings, of all arms.
    """

    subject: Subject
    model: layerskip.Model
    plans: Mapping[str, layerskip.DraftPlan] = field(default_factory=dict)
    draft_model: str | None = None
    governor: str = "measured"
    decoding: Settings = field(default_factory=lambda: dict(GREEDY))

    @cached_property
    def hf_model(self) -> PreTrainedModel:
        """The target as anyone would load it; every outside arm decodes with it."""
        return self.subject.load_for_transformers()

    @cached_property
    def hf_draft_model(self) -> PreTrainedModel:
        """The draft model likewise."""
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(str(self.draft_model), dtype=self.subject.dtype)
        model: PreTrainedModel = loaded.to(self.subject.device).eval()
        return model

    @property
    def hf_draft_bytes(self) -> int:
        """Of the draft model's weights, as transformers holds them."""
        return sum(each.numel() * each.element_size() for each in self.hf_draft_model.parameters())

    @property
    def hf_draft_cache_bytes(self) -> int | None:
        """Of the draft model's cache, for each token; None: its config says nothing that is known here."""
        try:
            geometry = geometry_of(self.hf_draft_model.config)
        except (AttributeError, UnsupportedModelError):
            return None
        entries = 2 * geometry.num_layers * geometry.kv_heads * geometry.head_dim
        return entries * self.subject.dtype.itemsize

    @property
    def exit_layer(self) -> int:
        """Of `--exit`."""
        return int(self.plans["exit"].exit_layer or 0)

    @property
    def has(self) -> set[str]:
        """The options that were given."""
        return {*self.plans, *(["draft-model"] if self.draft_model is not None else [])}


@dataclass(frozen=True)
class ArmRow:
    """One way to decode.

    Attributes:
        what: it is, in a few words for the report.
        make: the arm, by its name in the report and settings of the grid's kind.
        grid: settings to be tried; the first are its default.
        needs: options of which one must be given; empty: none.
        needs_greedy: it cannot sample, or not as the others do.
        is_extra: it needs a package that few have, and is compared only where it is named.
        preparation: what the arm needs beforehand.
    """

    what: str
    make: Callable[[Workshop, str, Settings], Arm]
    grid: tuple[dict[str, Any], ...] = ({},)
    needs: tuple[str, ...] = ()
    needs_greedy: bool = False
    is_extra: bool = False
    preparation: Callable[[Workshop], Preparation] = lambda shop: Preparation()

    def check(self, name: str, shop: Workshop) -> None:
        """Make sure that the row called `name` can be asked for.

        Raises:
            SettingError: an option that it needs is missing, or it cannot sample.
        """
        if self.needs and not set(self.needs) & shop.has:
            options = " or ".join(f"--{option}" for option in self.needs)
            raise SettingError(f"got the arm {name} without {options}; expected one. Give it, or leave the arm out.")
        if self.needs_greedy and shop.decoding["do_sample"]:
            raise SettingError(
                f"got the arm {name} with --temperature; it decodes greedily only. Leave one of them out."
            )


def name_of(path: str | Path | None) -> str | None:
    """A checkpoint's name without the machine's own path."""
    return None if path is None else Path(path).name
