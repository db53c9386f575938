"""The draft plan: how a model drafts. The thing a search finds and a person passes around, as one JSON file.

A plan describes one draft path over the model's own blocks (a skip set, an exit, or both; trained blocks may end it),
or names another checkpoint that drafts; beside it or instead of it, drafts may be looked up in the text. It knows
nothing of how it is run, nor of its file's format (`plan_file.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import Any

import torch

from layerskip import plan_file
from layerskip.errors import PlanError, PlanMismatchError, did_you_mean
from layerskip.identity import ModelIdentity
from layerskip.models.decoder import Step

__all__ = ["DraftPlan"]

DEFAULT_DRAFT_TOKENS = 4
DEFAULT_LOOKUP_TOKENS = 6
_LOOKAHEAD_LEAST = {"lookahead_window": 1, "lookahead_ngram": 2, "lookahead_guesses": 1}


@dataclass(frozen=True)
class DraftPlan:
    """How to draft. Make one with `exit`, `skip`, `model`, `lookup`, `lookahead` or `load`.

    Change one with `dataclasses.replace`.

    Attributes:
        skip_attention, skip_mlp: layers whose sub-block the draft leaves out, ascending; all below `exit_layer`.
        exit_layer: number of leading layers the draft may use; None: all. 0, with an adapter: none.
        adapter: a file of trained blocks that end the path behind `exit_layer`, or, with 0, of heads that draft by
            themselves, at most one token each (`layerskip train` makes it).
        draft_model: a path or hub id (or a loaded model) that drafts instead of the model itself.
        draft_vocabulary: token ids that a self-draft scores, ascending; the others are never drafted. None: all. The
            head of a large vocabulary costs as much as several blocks; acceptance stays exact.
        num_draft_tokens: most tokens that the path, or the other model, drafts a round; 0: it drafts nothing.
        num_siblings: further tokens that are proposed beside each of these drafts, and verified in the same pass, as a
            tree; all are then ranked, not drawn (`TreeRule.rank`). It takes drafts of one token after another,
            and processors that do not look at the text; elsewhere, and in rounds of fixed shapes, chains are drafted.
            Of heads these tokens may follow one another, in a tree of as many nodes.
        lookup_tokens: most tokens a round that are copied from where the text last went on from the same words (prompt
            lookup); 0: none. With both, each round uses the source that does better.
        lookahead_window, lookahead_ngram, lookahead_guesses, lookahead_text: see `lookahead`; 0: none.
        confidence_threshold: a draft ends behind a token whose probability in the draft is below this; 0: never.
        target: the model the plan was made for; None: any that it fits.
        provenance: how it was found and measured; free-form, JSON.
    """

    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    exit_layer: int | None = None
    adapter: str | None = None
    draft_model: Any = None
    draft_vocabulary: tuple[int, ...] | None = None
    num_draft_tokens: int = DEFAULT_DRAFT_TOKENS
    num_siblings: int = 0
    lookup_tokens: int = 0
    lookahead_window: int = 0
    lookahead_ngram: int = 0
    lookahead_guesses: int = 0
    lookahead_text: bool = False
    confidence_threshold: float = 0.0
    target: ModelIdentity | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check everything that can be checked without a model.

        Raises:
            PlanError: a value of the wrong type or out of range.
        """
        self._set("skip_attention", _layers("skip_attention", self.skip_attention))
        self._set("skip_mlp", _layers("skip_mlp", self.skip_mlp))
        if self.exit_layer is not None:
            least = 1 if self.adapter is None else 0
            expected = f"a layer count from {least} to one less than the model has"
            self._set("exit_layer", _at_least(least, "exit_layer", self.exit_layer, expected))
        for name in ("num_draft_tokens", "num_siblings", "lookup_tokens", *_LOOKAHEAD_LEAST):
            self._set(name, _at_least(0, name, getattr(self, name), "an integer from 0"))
        if not isinstance(self.lookahead_text, bool):
            raise _refused("lookahead_text", self.lookahead_text, "True or False")
        if self.draft_vocabulary is not None:
            self._set("draft_vocabulary", _vocabulary(self.draft_vocabulary))
        self._set("confidence_threshold", _probability("confidence_threshold", self.confidence_threshold))
        for name in ("adapter", "draft_model"):
            if isinstance(getattr(self, name), os.PathLike):
                self._set(name, os.fspath(getattr(self, name)))
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter.strip()):
            raise _refused("adapter", self.adapter, "the path of a file, or None")
        if not isinstance(self.target, ModelIdentity | None):
            raise _refused("target", self.target, "a ModelIdentity, as layerskip.identity.identify makes it, or None")
        if not isinstance(self.provenance, Mapping):
            raise _refused("provenance", self.provenance, "a mapping")
        self._set("provenance", dict(self.provenance))
        self._check_combination()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_combination(self) -> None:
        if self.lookahead_text or any(getattr(self, name) for name in _LOOKAHEAD_LEAST):
            return self._check_lookahead()
        if self.num_draft_tokens == self.lookup_tokens == 0:
            raise PlanError(
                "got a plan with num_draft_tokens=0 and lookup_tokens=0, which drafts nothing; expected one "
                "of them to be 1 or more. For plain decoding pass plan=None."
            )
        has_path = self.skip_attention or self.skip_mlp or self.exit_layer is not None
        if self.adapter is not None and (self.exit_layer is None or self.skip_attention or self.skip_mlp):
            raise PlanError(
                "got a plan with an adapter and skipped sub-blocks or no exit; expected the exit behind which it was "
                "trained. Load the plan that was written beside it, or give exit_layer."
            )
        if self.num_draft_tokens == 0 and (has_path or self.draft_model is not None or self.draft_vocabulary):
            raise PlanError(
                "got a plan with num_draft_tokens=0, which only looks tokens up, that says how a model drafts; "
                "expected 1 or more, or none of skip_attention, skip_mlp, exit_layer, draft_model, draft_vocabulary."
            )
        if self.num_draft_tokens == 0 and self.num_siblings > 0:
            raise PlanError(
                f"got a plan with num_siblings={self.num_siblings} that only looks tokens up, one for each place; "
                "expected num_draft_tokens from 1, or no num_siblings."
            )
        if self.num_draft_tokens == 0 and self.confidence_threshold > 0:
            raise PlanError(
                "got a plan with a confidence_threshold that only looks tokens up, which has no confidence; expected "
                "num_draft_tokens from 1, or no confidence_threshold."
            )
        if self.draft_model is not None and self.draft_vocabulary is not None:
            raise PlanError(
                "got a plan with both a draft model and a draft_vocabulary, which is for self-drafts; expected one of "
                "them. Leave draft_vocabulary out."
            )
        if self.draft_model is not None and has_path:
            raise PlanError("got a plan with both a draft model and skipped layers or an exit; expected one of them.")
        for name in ("skip_attention", "skip_mlp"):
            idle = [layer for layer in getattr(self, name) if self.exit_layer is not None and layer >= self.exit_layer]
            if idle:
                raise PlanError(
                    f"got a plan with {name} {idle} and exit_layer={self.exit_layer}: the draft does not reach these "
                    f"layers, so skipping them has no effect. Expected layers below {self.exit_layer}; leave these out."
                )

    def _check_lookahead(self) -> None:
        for name, least in _LOOKAHEAD_LEAST.items():
            if getattr(self, name) < least:
                expected = f"an integer from {least} for lookahead, or none of the lookahead_… fields"
                raise _refused(name, getattr(self, name), expected)
        alone: dict[str, Any] = {"num_draft_tokens": 0}
        for name, each in self.__dataclass_fields__.items():
            is_own = name.startswith("lookahead") or name in ("target", "provenance")
            if not is_own and getattr(self, name) != (wanted := alone.get(name, each.default)):
                raise _refused(name, getattr(self, name), f"{wanted!r} beside lookahead, which drafts alone. Make it "
                               "with DraftPlan.lookahead, or leave the lookahead_… fields out")  # fmt: skip

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DraftPlan:
        """A plan with these fields, by name.

        Raises:
            PlanError: an unknown name (a near miss is suggested), or a bad value.
        """
        names = tuple(cls.__dataclass_fields__)
        for name in fields:
            if name not in names:
                raise PlanError(
                    f"got an unknown plan field {name!r}; expected {', '.join(names)}.{did_you_mean(name, names)}"
                )
        return cls(**fields)

    @classmethod
    def exit(cls, layer: int, **options: Any) -> DraftPlan:
        """Draft with the first `layer` layers, the final norm and the head (early exit)."""
        return cls.of(_joined({"exit_layer": layer}, options))

    @classmethod
    def skip(cls, attention: Iterable[int] = (), mlp: Iterable[int] = (), **options: Any) -> DraftPlan:
        """Draft without the attention of the layers `attention` and the MLP of the layers `mlp`."""
        layers = {"skip_attention": _layers("attention", attention), "skip_mlp": _layers("mlp", mlp)}
        return cls.of(_joined(layers, options))

    @classmethod
    def model(cls, draft_model: Any, **options: Any) -> DraftPlan:
        """Draft with another checkpoint of the same vocabulary: a path, a hub id, or a loaded model."""
        return cls.of(_joined({"draft_model": draft_model}, options))

    @classmethod
    def lookup(cls, lookup_tokens: int = DEFAULT_LOOKUP_TOKENS, **options: Any) -> DraftPlan:
        """Draft only by looking up what followed the same words before, up to `lookup_tokens` a round.

        To look up beside another way to draft, give that plan `lookup_tokens`.
        """
        return cls.of(_joined({"lookup_tokens": lookup_tokens, "num_draft_tokens": 0}, options))

    @classmethod
    def lookahead(
        cls, window: int = 5, ngram: int = 4, guesses: int = 5, text: bool = True, **options: Any
    ) -> DraftPlan:
        """Draft n-grams that the model said in parallel before (lookahead decoding, Fu et al., ICML 2024); alone.

        Each pass verifies up to `guesses` n-grams of `ngram` tokens that begin with the newest one, and guesses on in
        `window` places at once, by which further n-grams come about: up to ``(window + guesses) * (ngram - 1)`` tokens.

        Args:
            text: n-grams of prompt and output are guesses too.
        """
        own = {"num_draft_tokens": 0, "lookahead_window": window, "lookahead_ngram": ngram}
        return cls.of(_joined(own | {"lookahead_guesses": guesses, "lookahead_text": text}, options))

    @property
    def is_self_draft(self) -> bool:
        """Whether the model drafts for itself (beside what may be looked up)."""
        return self.draft_model is None and self.num_draft_tokens > 0

    @property
    def acceptance_by_offset(self) -> tuple[float, ...] | None:
        """Chance of each draft to be accepted if all before it were, as its search found it on texts not searched on.

        None: its provenance does not say.
        """
        found = self.provenance.get("acceptance_by_offset")
        if not isinstance(found, (list, tuple)) or not found or not all(_is_number(each, 1.0) for each in found):
            return None
        return tuple(map(float, found))

    @property
    def draft_ratio(self) -> float | None:
        """Cost of a draft step in plain steps, as its search measured it; None: its provenance does not say."""
        found = self.provenance.get("draft_ratio")
        return float(found) if found and _is_number(found, math.inf) else None

    @property
    def most_drafts(self) -> int:
        """Most tokens that a round may draft one behind the other."""
        ahead = max(self.lookahead_window + self.lookahead_ngram - 3, self.lookahead_ngram - 1)
        return max(self.num_draft_tokens, self.lookup_tokens, ahead)

    def path(self, num_layers: int) -> tuple[Step, ...]:
        """The sub-blocks that the draft runs on a model of `num_layers` layers; with an adapter it may be none.

        Raises:
            PlanMismatchError: a layer or exit that the model does not have, or nothing left to run.
        """
        last = num_layers - 1
        for name, layers in (("attention", self.skip_attention), ("mlp", self.skip_mlp)):
            beyond = [layer for layer in layers if layer > last]
            if beyond:
                raise PlanMismatchError(
                    f"got a plan that skips the {name} of layer {beyond[0]} on a model of {num_layers} layers; "
                    f"expected layers from 0 to {last}."
                )
        if self.exit_layer is not None and self.exit_layer > last:
            least = 1 if self.adapter is None else 0
            raise PlanMismatchError(
                f"got an exit at layer {self.exit_layer} on a model of {num_layers} layers; expected {least} to "
                f"{last}. (An exit at all layers is the model itself: pass plan=None.)"
            )
        end = num_layers if self.exit_layer is None else self.exit_layer
        attention, mlp = set(self.skip_attention), set(self.skip_mlp)
        steps = (Step(layer, layer not in attention, layer not in mlp) for layer in range(end))
        path = tuple(step for step in steps if step.attention or step.mlp)
        if not path and self.adapter is None:
            raise PlanMismatchError(
                f"got a plan that skips everything on a model of {num_layers} layers; keep at least one sub-block."
            )
        return path

    def check(self, identity: ModelIdentity) -> None:
        """Make sure that the plan can be used on the model described by `identity`.

        Raises:
            PlanMismatchError: it was made for another model (both values are named), or does not fit this one.
        """
        if self.target is not None:
            for name, (made_for, got) in self.target.differences(identity).items():
                raise PlanMismatchError(
                    f"got a plan made for {name} {made_for!r} on a model with {name} {got!r}. Use the plan of this "
                    "model, or drop the check with dataclasses.replace(plan, target=None) if you know that it fits."
                )
        if self.is_self_draft:
            self.path(identity.num_layers)
        if self.draft_vocabulary is not None and self.draft_vocabulary[-1] >= identity.vocab_size:
            raise PlanMismatchError(
                f"got a plan with the token id {self.draft_vocabulary[-1]} in its draft_vocabulary on a model of "
                f"{identity.vocab_size:,} ids. Make it with this model's own tokenizer."
            )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values.

        Raises:
            PlanError: the draft model is an object in memory.
        """
        return plan_file.to_dict(self)

    @classmethod
    def from_dict(cls, content: Any) -> DraftPlan:
        """Read what `to_dict` wrote, or the field's bare ``{"attention": […], "mlp": […]}`` lists.

        Raises:
            PlanError: `content` is neither.
        """
        return plan_file.from_dict(cls, content)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a draft model inside the plan's folder is named relative to it.

        Raises:
            PlanError: the draft model is in memory, or lies outside the plan's folder (plans must be movable); the
                provenance is not JSON; the file cannot be written.
        """
        plan_file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DraftPlan:
        """Read a plan file.

        Raises:
            PlanError: it is missing, too large, not JSON, not a plan, or names a draft model outside its folder.
        """
        return plan_file.load(cls, path)


def _joined(own: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The fields that a constructor sets itself, and the others that it was given."""
    for name in own.keys() & options.keys():
        raise PlanError(
            f"got {name}={options[name]!r} for a plan that is made with {name}={own[name]!r}; expected one of them. "
            f"Leave {name} out."
        )
    return own | options


def _layers(name: str, layers: Any) -> tuple[int, ...]:
    expected = "layer numbers from 0"
    try:
        listed = (layers,) if isinstance(layers, bytes) else tuple(layers)
    except TypeError:  # one layer: a number, or an array without dimensions
        listed = (layers,)
    try:
        return tuple(sorted({_at_least(0, name, layer, expected) for layer in listed}))
    except PlanError as error:
        raise _refused(name, layers, expected) from error


def _at_least(least: int, name: str, value: Any, expected: str) -> int:
    """`value` as Python's own integer, be it one of numpy's; a bool is none."""
    try:
        number = index(value)
    except TypeError as error:
        raise _refused(name, value, expected) from error
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool  # of a mask, say
    if is_bool or number < least:
        raise _refused(name, value, expected)
    return number


def _vocabulary(ids: Any) -> tuple[int, ...]:
    expected = "token ids from 0, at least one"
    if isinstance(ids, (str, bytes, Mapping)):
        raise _refused("draft_vocabulary", ids, expected)
    try:
        listed = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        vocabulary = sorted({_at_least(0, "draft_vocabulary", each, expected) for each in listed})
    except (TypeError, PlanError) as error:
        raise _refused("draft_vocabulary", ids, expected) from error
    if not vocabulary:
        raise _refused("draft_vocabulary", ids, expected)
    return tuple(vocabulary)


def _probability(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise _refused(name, value, "a probability from 0 to 1")
    return float(value)


def _is_number(value: Any, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value <= most


def _refused(name: str, value: Any, expected: str) -> PlanError:
    return PlanError(f"got a plan with {name}={value!r}; expected {expected}.")
