"""The optimiser's loop: schedule, accumulation, curve, checkpoints, and resuming as if nothing had happened.

It knows nothing of what is trained or how a loss comes about. Which data a step uses must follow from its number alone;
then a run that was killed and resumed ends with the same weights, bit by bit, as one that was not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerskip.errors import CheckpointError, SettingError
from layerskip.interrupts import held_interrupts
from layerskip.training.folder import CHECKPOINT

__all__ = ["Point", "Schedule", "optimise", "rows_of_step", "thinned"]

_FORMAT = 1
_MOST_POINTS = 200
_SAVED = {"parameters", "optimizer", "step", "curve", "seconds", "total", "count"}

Point = dict[str, Any]
"""Figures of one moment of a training, by name."""


def rows_of_step(step: int, rows: int, a_step: int, seed: int) -> Tensor:
    """Which of `rows` a step reads, `a_step` of them, (a_step,), int64: by its number alone.

    Each epoch has an order of its own; its last rows, too few for a step, are left out.
    """
    epoch, index = divmod(step, rows // a_step)
    order = np.random.default_rng((seed, epoch)).permutation(rows)
    return torch.from_numpy(order[index * a_step : (index + 1) * a_step])


def thinned(curve: list[Point]) -> list[Point]:
    """At most `_MOST_POINTS` of a curve, evenly, with the first and the last: what a plan holds must stay small."""
    if len(curve) <= _MOST_POINTS:
        return curve
    return [curve[index] for index in np.linspace(0, len(curve) - 1, _MOST_POINTS).round().astype(int).tolist()]


@dataclass(frozen=True)
class Schedule:
    """How many steps, how large, and when they are looked at.

    Attributes:
        steps: of the optimiser.
        learning_rate: the highest; reached after `warmup_share` of the steps, then a cosine down to a twentieth of it.
        weight_decay: AdamW's, on matrices only.
        clip_norm: of the gradient.
        evaluate_every, checkpoint_every: steps.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup_share: float = 0.02
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    evaluate_every: int = 100
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: a value out of range.
        """
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise SettingError(f"got {name}={getattr(self, name)!r}; expected an integer from 1.")
        for name, most in (("learning_rate", 1.0), ("clip_norm", math.inf), ("weight_decay", 1.0), ("warmup_share", 1)):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_positive = is_number and (value > 0 or (value == 0 and name not in ("learning_rate", "clip_norm")))
            if not is_positive or not value <= most:
                least = "above 0, at most" if name in ("learning_rate", "clip_norm") else "from 0 to"
                raise SettingError(f"got {name}={value!r}; expected a number {least} {most}.")

    def learning_rate_at(self, step: int) -> float:
        """Of the step of this number, from 0."""
        warmup = max(1, round(self.warmup_share * self.steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        share = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def optimise(
    modules: nn.Module,
    losses_of: Callable[[int], Iterator[Tensor]],
    schedule: Schedule,
    folder: Path,
    made_for: Mapping[str, Any],
    *,
    evaluate: Callable[[], Point],
    resume: bool = False,
    before_saving: Callable[[], None] = lambda: None,
    progress: Callable[[int, Point | None], None] = lambda step, point: None,
) -> list[Point]:
    """Train what of `modules` asks for gradients.

    Args:
        losses_of: the losses of a step, by its number, one at a time; their gradients are added up.
        folder: holds the checkpoint.
        made_for: what the run depends on, as JSON values; a checkpoint made for something else is refused.
        evaluate: figures for the curve.
        resume: go on from the checkpoint, if there is one.
        before_saving: called before each checkpoint.
        progress: is told the number of steps done, and the newest point of the curve when it is new.

    Returns:
        The curve: points with "step", "seconds", "loss" (mean since the point before) and what `evaluate` gave.

    Raises:
        SettingError: `resume` is false and there is a checkpoint, or it was made for something else.
        CheckpointError: it is damaged, or cannot be written.
        KeyboardInterrupt: after a checkpoint was written.
    """
    parameters = {name: each for name, each in modules.named_parameters() if each.requires_grad}
    groups = [
        {"params": [each for each in parameters.values() if each.dim() >= 2], "weight_decay": schedule.weight_decay},
        {"params": [each for each in parameters.values() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95))
    file = folder / CHECKPOINT
    step, curve, seconds, total, count = 0, list[Point](), 0.0, 0.0, 0
    if (saved := _load(file, made_for, resume)) is not None:
        with _readable(file):
            step, curve, seconds, total, count = _taken_up(saved, parameters, optimizer, schedule.steps)
        saved = None  # as large as all that is trained, three times
    began = time.perf_counter() - seconds

    def save() -> None:
        before_saving()
        _save(file, {
            "format": _FORMAT, "made_for": dict(made_for), "parameters": parameters, "curve": curve, "step": step,
            "optimizer": optimizer.state_dict(), "seconds": time.perf_counter() - began, "total": total, "count": count,
        })  # fmt: skip

    progress(step, curve[-1] if curve else None)
    with held_interrupts() as interrupts:
        while step < schedule.steps and not interrupts.count:
            loss = _take_step(optimizer, losses_of(step), schedule, step)
            step, total, count = step + 1, total + loss, count + 1
            point = None
            if step % schedule.evaluate_every == 0 or step == schedule.steps:
                point = {"step": step, "seconds": time.perf_counter() - began, "loss": total / count, **evaluate()}
                curve, total, count = [*curve, point], 0.0, 0
            if step % schedule.checkpoint_every == 0 or step == schedule.steps:
                save()
            progress(step, point)
        if interrupts.count and step < schedule.steps:
            save()
    if step < schedule.steps:  # by a handler that raised nothing
        raise KeyboardInterrupt
    return curve


def _take_step(optimizer: torch.optim.Optimizer, losses: Iterator[Tensor], schedule: Schedule, step: int) -> float:
    """One step on the sum of `losses`, which is returned."""
    for group in optimizer.param_groups:
        group["lr"] = schedule.learning_rate_at(step)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    if not math.isfinite(total):
        raise SettingError(
            f"got a loss of {total} at step {step + 1}; expected a number. The last checkpoint is from before. Lower "
            "the learning rate, or use precision='float32'."
        )
    nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], schedule.clip_norm)
    optimizer.step()
    return total


def _load(file: Path, made_for: Mapping[str, Any], resume: bool) -> dict[str, Any] | None:
    if not file.exists():
        return None
    if not resume:
        raise SettingError(
            f"got the folder {file.parent}, which holds a run that has begun. Resume it (--resume), or name another."
        )
    with _readable(file):
        saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        before = dict(saved["made_for"])
        if saved["format"] != _FORMAT or not _SAVED <= saved.keys():
            raise ValueError(f"format {saved['format']!r}, with {', '.join(sorted(saved))}")
    for name in sorted({*before, *made_for}):
        if before.get(name) != made_for.get(name):
            raise SettingError(
                f"got {name}={made_for.get(name)!r} for a run that was begun with {before.get(name)!r} "
                f"({file.parent}). Resume it as it was begun, or name another folder."
            )
    return saved


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Whatever a reader makes of a damaged checkpoint becomes a CheckpointError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"cannot read the checkpoint {file}, which is damaged ({reason:.300}). Remove it, and begin anew."
        ) from error


def _taken_up(
    saved: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, steps: int
) -> tuple[int, list[Point], float, float, int]:
    """Put what was `saved` where it was; step, curve, seconds, total and count (ValueError: it is not whole)."""
    step, curve, seconds, total, count = (saved[name] for name in ("step", "curve", "seconds", "total", "count"))
    if type(step) is not int or not 0 <= step <= steps or type(count) is not int or not 0 <= count <= step:
        raise ValueError(f"step {step!r} of {steps}, {count!r} of them since the curve's last point")
    if not math.isfinite(seconds + total) or [each["step"] for each in curve[-1:]] != [step - count] * (step > count):
        raise ValueError(f"a curve of {len(curve)} points at step {step}, after {seconds!r} seconds")
    shapes = {name: each.shape for name, each in parameters.items()}
    if {name: each.shape for name, each in saved["parameters"].items()} != shapes:
        raise ValueError("parameters of other names or shapes than those that are trained")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved["parameters"][name])
    optimizer.load_state_dict(saved["optimizer"])
    for parameter in parameters.values():
        state = optimizer.state[parameter]
        if step and any(state[name].shape != parameter.shape for name in ("exp_avg", "exp_avg_sq")):
            raise ValueError("a state of the optimiser of another shape than its parameter")
    return step, curve, float(seconds), float(total), count


def _save(file: Path, content: dict[str, Any]) -> None:
    scratch = file.with_suffix(".new")
    try:
        torch.save(content, scratch)
        os.replace(scratch, file)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or f"it did not become whole ({error})"
        before = "; the one from before is as it was, to resume from" if file.exists() else ", and begin again"
        raise CheckpointError(f"cannot write the checkpoint {file}: {reason}. Make room{before}.") from error
