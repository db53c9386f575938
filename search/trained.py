"""Trained draft paths as a search takes them: what `layerskip train` wrote, known by a digest wherever it lies.

What a study must know of a path (`TrainedPath`) is plain data, the same for all of its workers. Where the files are,
and the blocks themselves (`Trained`), is each worker's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layerskip.api import Model
from layerskip.errors import PlanError, SearchError, SettingError
from layerskip.models.adapter import TrainedPart
from layerskip.plan import DraftPlan

__all__ = ["Trained", "TrainedPath", "load_trained", "training_of", "with_adapter_beside"]

_DIGITS = 12


@dataclass(frozen=True)
class TrainedPath:
    """What there is to choose of a trained path, and by what it is told from others.

    Attributes:
        name: digest of its adapter.
        exit_layer, num_blocks, reads_state, further_states: see `AdapterSpec`.
        vocabulary_size: number of ids that it was trained to score, less than all; None: all.
        vocabulary: digest of these ids.
    """

    name: str
    exit_layer: int
    num_blocks: int = 1
    reads_state: bool = True
    vocabulary_size: int | None = None
    vocabulary: str | None = None
    further_states: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """A tuple, also where it comes from JSON."""
        object.__setattr__(self, "further_states", tuple(self.further_states))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "further_states": list(self.further_states)}


@dataclass(frozen=True)
class Trained:
    """A trained path, read.

    Attributes:
        plan: that its training wrote.
    """

    path: TrainedPath
    plan: DraftPlan
    adapter: TrainedPart

    def refuse_changes(self) -> None:
        """Make sure that the file still holds what was searched with.

        Raises:
            SearchError: it was trained further, or removed, meanwhile.
        """
        if _digest_of(Path(str(self.plan.adapter))) != self.path.name:
            raise SearchError(
                f"got other trained blocks in {self.plan.adapter} than when the search began ({self.path.name}), or "
                "none. Search with the new ones under another name (--study)."
            )

    @property
    def provenance(self) -> dict[str, Any]:
        """What a plan that was found says of it: which path, and the run that trained it."""
        kept = self.plan.provenance.get("trained")  # a plan that an earlier search has found
        training = kept.get("training", {}) if isinstance(kept, Mapping) else self.plan.provenance
        return {**self.path.to_dict(), "training": {name: each for name, each in training.items() if name != "curve"}}


def load_trained(model: Model, plans: Sequence[DraftPlan | str | os.PathLike[str]]) -> dict[str, Trained]:
    """Read trained paths for `model`, by name, in an order that is the same for all workers.

    Args:
        plans: as `layerskip train` wrote them, or where.

    Raises:
        SettingError: something else, a plan without trained blocks, or the same path twice.
        PlanError: a plan that cannot be read, or (PlanMismatchError) of another model.
        CheckpointError: its adapter is missing or damaged.
    """
    if isinstance(plans, str | os.PathLike | DraftPlan) or not isinstance(plans, Sequence):
        raise SettingError(
            f"got trained={plans!r}; expected a list of plans with trained blocks (or their paths), as `layerskip "
            "train` writes them."
        )
    found: dict[str, Trained] = {}
    for given in plans:
        if not isinstance(given, str | os.PathLike | DraftPlan):
            raise SettingError(f"got {given!r} in trained; expected a DraftPlan, or the path of one.")
        plan = given if isinstance(given, DraftPlan) else DraftPlan.load(given)
        if plan.adapter is None:
            where = "a plan" if isinstance(given, DraftPlan) else f"the plan {given}"
            raise SettingError(
                f"got {where} without trained blocks (adapter) in trained; expected what `layerskip train --recipe "
                "jump` or `--recipe adapter` writes. What else a model can leave out is searched by itself."
            )
        each = _read(model, plan)
        if each.adapter.spec.num_heads:
            raise SettingError(
                f"got the plan of {each.adapter.spec.num_heads} heads ({plan.adapter}) in trained: a search judges "
                "paths that draft one token after another, each at the same cost, as heads do not. Leave it out; the "
                "plan that its training wrote is used as it is."
            )
        if each.path.name in found:
            raise SettingError(
                f"got the same trained blocks twice, at {found[each.path.name].plan.adapter} and {plan.adapter}; "
                "expected each once. Leave one of them out."
            )
        found[each.path.name] = each
    return dict(sorted(found.items()))


def training_of(plan: DraftPlan) -> dict[str, Any] | None:
    """What a plan that was found says of the trained path that it is (`Trained.provenance`); None: it is none."""
    found = plan.provenance.get("trained")
    return dict(found) if plan.adapter is not None and isinstance(found, Mapping) else None


def with_adapter_beside(plan: DraftPlan, file: Path, name: str) -> DraftPlan:
    """`plan` ready to be saved as `file`: its adapter, if it has one outside that folder, copied into it as `name`.

    Raises:
        SearchError: the adapter is not there any more, is another one, or cannot be copied.
    """
    if plan.adapter is None:
        return plan
    folder = Path(os.path.abspath(file)).parent
    source, target, wanted = Path(os.path.abspath(plan.adapter)), folder / name, training_of(plan)
    if wanted is not None and _digest_of(source) != wanted["name"]:
        raise SearchError(
            f"got other trained blocks at {source} than those of the plan ({wanted['name']}), or none; expected the "
            "file that was searched with. Put it back there."
        )
    if source.is_relative_to(folder):
        return plan
    scratch = target.with_name(target.name + ".new")
    try:
        shutil.copyfile(source, scratch)
        os.replace(scratch, target)
    except OSError as error:
        raise SearchError(
            f"cannot copy {source} to {target}: {error.strerror or error}. Name another place."
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    return replace(plan, adapter=str(target))


def _read(model: Model, plan: DraftPlan) -> Trained:
    try:
        plan.check(model.identity)
    except PlanError as error:
        raise type(error)(f"{plan.adapter}: {error}") from error
    adapter = model.adapter(plan)
    spec, ids = adapter.spec, plan.draft_vocabulary
    if ids is not None and len(ids) == model.decoder.vocab_size:
        ids = None
    path = TrainedPath(
        _digest_of(Path(str(plan.adapter))) or "",
        spec.exit_layer,
        spec.num_blocks,
        spec.reads_state,
        None if ids is None else len(ids),
        None if ids is None else hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:_DIGITS],
        spec.further_states,
    )
    return Trained(path, replace(plan, draft_vocabulary=ids), adapter)


def _digest_of(file: Path) -> str | None:
    """Of what the file holds, the same wherever it lies; None: it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()[:_DIGITS]
    except OSError:
        return None
