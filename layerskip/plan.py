"""The draft plan: how a model drafts. The thing a search finds and a person passes around, as one JSON file.

A plan describes one draft path over the model's own blocks (a skip set, an exit, or both), or names another checkpoint
that drafts. It knows nothing of how it is run.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from layerskip.errors import PlanError, PlanMismatchError, did_you_mean
from layerskip.identity import ModelIdentity
from layerskip.models.decoder import Step

__all__ = ["DraftPlan"]

_FORMAT, _VERSION = "layerskip-plan", 1
_LARGEST_FILE = 4 * 2**20  # bytes; a plan with a long provenance takes some ten thousand
DEFAULT_DRAFT_TOKENS = 4
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)  # no "..", no "~"


@dataclass(frozen=True)
class DraftPlan:
    """How to draft. Make one with `exit`, `skip`, `model` or `load`; change one with `dataclasses.replace`.

    Attributes:
        skip_attention, skip_mlp: layers whose sub-block the draft leaves out, ascending.
        exit_layer: number of leading layers the draft may use; None: all.
        draft_model: a path or hub id (or a loaded model) that drafts instead of the model itself.
        num_draft_tokens: most tokens to draft a round.
        confidence_threshold: a draft ends behind a token whose probability in the draft is below this; 0: never.
        target: the model the plan was made for; None: any that it fits.
        provenance: how it was found and measured; free-form, JSON.
    """

    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()
    exit_layer: int | None = None
    draft_model: Any = None
    num_draft_tokens: int = DEFAULT_DRAFT_TOKENS
    confidence_threshold: float = 0.0
    target: ModelIdentity | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check everything that can be checked without a model.

        Raises:
            PlanError: a value of the wrong type or out of range.
        """
        for name in ("skip_attention", "skip_mlp"):
            object.__setattr__(self, name, _layers(name, getattr(self, name)))
        _require(_is_int(self.exit_layer) or self.exit_layer is None, "exit_layer", self.exit_layer, "a layer count")
        _require(
            _is_int(self.num_draft_tokens) and self.num_draft_tokens >= 1,
            "num_draft_tokens", self.num_draft_tokens, "an integer of at least 1",
        )  # fmt: skip
        threshold = self.confidence_threshold
        _require(
            type(threshold) in (int, float) and 0 <= threshold <= 1,
            "confidence_threshold", threshold, "a probability from 0 to 1",
        )  # fmt: skip
        _require(isinstance(self.provenance, Mapping), "provenance", self.provenance, "a mapping")
        if self.draft_model is not None and (self.skip_attention or self.skip_mlp or self.exit_layer is not None):
            raise PlanError("got a plan with both a draft model and skipped layers or an exit; expected one of them.")

    @classmethod
    def exit(cls, layer: int, **options: Any) -> DraftPlan:
        """Draft with the first `layer` layers, the final norm and the head (early exit)."""
        return cls(exit_layer=layer, **_known(options))

    @classmethod
    def skip(cls, attention: Iterable[int] = (), mlp: Iterable[int] = (), **options: Any) -> DraftPlan:
        """Draft without the attention of the layers `attention` and the MLP of the layers `mlp`."""
        return cls(skip_attention=_layers("attention", attention), skip_mlp=_layers("mlp", mlp), **_known(options))

    @classmethod
    def model(cls, draft_model: Any, **options: Any) -> DraftPlan:
        """Draft with another checkpoint of the same vocabulary: a path, a hub id, or a loaded model."""
        return cls(
            draft_model=os.fspath(draft_model) if isinstance(draft_model, Path) else draft_model, **_known(options)
        )

    @property
    def is_self_draft(self) -> bool:
        """Whether the model drafts for itself."""
        return self.draft_model is None

    def path(self, num_layers: int) -> tuple[Step, ...]:
        """The sub-blocks that the draft runs on a model of `num_layers` layers.

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
        if self.exit_layer is not None and not 1 <= self.exit_layer <= last:
            raise PlanMismatchError(
                f"got an exit at layer {self.exit_layer} on a model of {num_layers} layers; expected 1 to {last}. "
                "(An exit at all layers is the model itself: pass plan=None.)"
            )
        end = num_layers if self.exit_layer is None else self.exit_layer
        attention, mlp = set(self.skip_attention), set(self.skip_mlp)
        steps = (Step(layer, layer not in attention, layer not in mlp) for layer in range(end))
        path = tuple(step for step in steps if step.attention or step.mlp)
        if not path:
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

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values.

        Raises:
            PlanError: the draft model is an object in memory.
        """
        if not isinstance(self.draft_model, (str, type(None))):
            raise PlanError(
                f"got a plan whose draft model is a loaded {type(self.draft_model).__name__}; expected its path or hub "
                "id: make the plan with DraftPlan.model('path')."
            )
        return {"format": _FORMAT, "version": _VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, content: Any) -> DraftPlan:
        """Read what `to_dict` wrote, or the field's bare ``{"attention": […], "mlp": […]}`` lists.

        Raises:
            PlanError: `content` is neither.
        """
        if not isinstance(content, dict):
            raise PlanError(f"got a {type(content).__name__}; expected a JSON object that holds a draft plan.")
        if "format" not in content and {"attention", "mlp"} & content.keys() and content.keys() <= {"attention", "mlp"}:
            return cls.skip(**content)
        if content.get("format") != _FORMAT:
            raise PlanError(
                f"got an object with format {content.get('format')!r} and the keys {sorted(content)[:8]}; expected "
                f"format {_FORMAT!r}, or bare lists under 'attention' and 'mlp'."
            )
        if content.get("version") != _VERSION:
            raise PlanError(
                f"got a plan of version {content.get('version')!r}; this layerskip reads version {_VERSION}. "
                "Install the version that wrote it, or write the plan anew."
            )
        values = {name: value for name, value in content.items() if name not in ("format", "version")}
        _known(values)
        if values.get("target") is not None:
            values["target"] = ModelIdentity.from_dict(values["target"])
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a draft model inside the plan's folder is named relative to it.

        Raises:
            PlanError: the draft model is in memory, or lies outside the plan's folder (plans must be movable); the
                provenance is not JSON; the file cannot be written.
        """
        file = Path(path)
        content = replace(self, draft_model=_portable(self.draft_model, file.parent)).to_dict()
        try:
            text = json.dumps(content, indent=2) + "\n"
        except (TypeError, ValueError) as error:
            raise PlanError(f"got a plan whose provenance cannot be written as JSON: {error}.") from error
        scratch = file.with_name(file.name + ".partial")
        try:
            scratch.write_text(text, encoding="utf-8")
            os.replace(scratch, file)
        except OSError as error:
            raise PlanError(f"cannot write the plan {file}: {error.strerror or error}. Check the path.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DraftPlan:
        """Read a plan file.

        Raises:
            PlanError: it is missing, too large, not JSON, not a plan, or names a draft model outside its folder.
        """
        file = Path(path)
        data = _read(file)
        try:
            plan = cls.from_dict(json.loads(data.decode("utf-8")))
            return replace(plan, draft_model=_resolved(plan.draft_model, file.parent))
        except PlanError as error:
            raise type(error)(f"{file}: {error}") from error
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested too deep, an endless number
            raise PlanError(f"got {file}, which is not JSON ({error}); expected a draft plan.") from error


def _read(file: Path) -> bytes:
    try:
        status = file.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_FILE:
            return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"cannot read the plan {file}: {reason}. Check the path.") from error
    if not stat.S_ISREG(status.st_mode):  # reading a device might never end
        raise PlanError(f"cannot read the plan {file}: it is not a regular file. Check the path.")
    raise PlanError(
        f"got {file}, {status.st_size:,} bytes; a plan has at most {_LARGEST_FILE:,}. Is it another kind of file?"
    )


def _known(options: dict[str, Any]) -> dict[str, Any]:
    names = tuple(DraftPlan.__dataclass_fields__)
    for name in options:
        if name not in names:
            raise PlanError(
                f"got an unknown plan field {name!r}; expected {', '.join(names)}.{did_you_mean(name, names)}"
            )
    return options


def _layers(name: str, layers: Any) -> tuple[int, ...]:
    listed = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, (str, bytes)) else (layers,)
    _require(all(_is_int(layer) and layer >= 0 for layer in listed), name, layers, "layer numbers from 0")
    return tuple(sorted(set(listed)))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise PlanError(f"got a plan with {name}={value!r}; expected {expected}.")


def _portable(draft_model: Any, folder: Path) -> Any:
    """The form in which a plan file in `folder` names the draft model."""
    if not isinstance(draft_model, str):
        return draft_model
    place = Path(draft_model).expanduser()
    if _HUB_ID.fullmatch(draft_model) and not place.exists():
        return draft_model
    inside = place.resolve()
    if not inside.is_relative_to(folder.resolve()):
        raise PlanError(
            f"got a draft model at {draft_model}, outside the plan's folder {folder}; a plan file can be moved "
            "only with what it needs beside it. Save the plan into the draft model's parent folder, or name a hub id."
        )
    return "./" + inside.relative_to(folder.resolve()).as_posix()


def _resolved(draft_model: Any, folder: Path) -> Any:
    """What a plan file means by its draft model: a hub id (``owner/name``), or a path inside its own folder."""
    if draft_model is None:
        return None
    is_name = isinstance(draft_model, str) and draft_model.strip() != ""
    _require(is_name, "draft_model", draft_model, "a path or hub id")
    if _HUB_ID.fullmatch(draft_model):
        return draft_model
    inside = (folder / draft_model).resolve()
    if Path(draft_model).is_absolute() or not inside.is_relative_to(folder.resolve()):
        raise PlanError(
            f"got a draft model at {draft_model!r}, outside the plan's folder; a plan file may only name a hub "
            "id or a folder beside it ('./name'). Pass DraftPlan.model(path) from code if you trust that path."
        )
    return str(inside)
