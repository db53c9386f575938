"""Teaching a drafter to say what the model says, on text that the model wrote: all of it but what the drafter is.

The checkpoint stays as it is. At each offset of a draft the drafter's distribution over the draft vocabulary is drawn
towards the model's own, by cross-entropy with soft labels, where the text is the model's answer. A `Student` says what
learns and how it drafts: blocks that end a path (`exit.py`), or a small second model (`draft_model.py`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.api import Model
from layerskip.draft_vocabulary import most_frequent
from layerskip.errors import SettingError
from layerskip.training.loop import Point, Schedule, optimise, rows_of_step, thinned
from layerskip.training.teacher import Teacher
from layerskip.training.texts import TrainingTexts
from layerskip.training.writing import ends_of

__all__ = ["NUM_SIBLINGS", "DistillSettings", "Distillation", "Progress", "Student", "refuse_integers"]

NUM_SIBLINGS = 4  # most to verify beside each draft; SmolLM2's own choice is among so many in 0.55 of the cases
_JUDGED_OFFSETS = 3  # at least, whatever is trained for: how fast acceptance falls decides how far to draft
_HELD_OUT_BYTES = 10**9  # of memory, for the model's states of the texts that are judged on

Progress = Callable[[int, int, Point | None], None]


@dataclass(frozen=True)
class DistillSettings:
    """On how much is trained, and how, whatever drafts.

    Attributes:
        tokens: to train on, each time that one is read counted.
        batch_tokens: of one step of the optimiser.
        micro_rows: rows whose gradients are computed at once, which bounds the memory.
        learning_rate: see `Schedule`.
        held_out_rows: of the texts, never trained on.
        evaluate_every, checkpoint_every: steps.
        precision: of the products, "bfloat16" or "float32"; weights and optimiser are float32.
        kept_state_bytes: of the disk, for the model's states of all texts.
        seed: of the order of the texts.
    """

    tokens: int = 4_000_000
    batch_tokens: int = 2048
    micro_rows: int = 4
    learning_rate: float = 1e-3
    held_out_rows: int = 16
    evaluate_every: int = 100
    checkpoint_every: int = 100
    precision: str = "bfloat16"
    kept_state_bytes: int = 8 * 10**9
    seed: int = 0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            SettingError: a value out of range.
        """
        refuse_integers(
            self, tokens=1, batch_tokens=1, micro_rows=1, held_out_rows=1, evaluate_every=1, checkpoint_every=1,
            kept_state_bytes=0, seed=0,
        )  # fmt: skip
        Schedule(1, self.learning_rate)
        if self.precision not in ("bfloat16", "float32"):
            raise SettingError(f"got precision={self.precision!r}; expected 'bfloat16' or 'float32'.")


def refuse_integers(settings: Any, **least: int) -> None:
    """Make sure that these fields of `settings` are integers, each from the number given (SettingError)."""
    for name, smallest in least.items():
        value = getattr(settings, name)
        if type(value) is not int or value < smallest:
            raise SettingError(f"got {name}={value!r}; expected an integer from {smallest}.")


@dataclass(frozen=True)
class Student:
    """What learns, and how it drafts.

    Attributes:
        modules: what of them asks for gradients is trained, in float32.
        outputs: of tokens (rows, row_tokens), the model's states of them and a number of offsets: for each offset what
            the drafter puts out at every position, (rows, row_tokens, hidden_size), if the drafts before had been the
            text's own tokens.
        final_norm: what comes between that and the model's head.
        reads: the model's states that `outputs` reads, by the number of blocks behind them.
        offsets: drafts of a round that it is trained for.
        weights_at: of a step and the number of all steps: the weight of each offset in the loss.
        state_weight: see `ExitSettings`.
        most_offsets: that it can draft; None: any number.
        lag: positions at a text's beginning behind which it has nothing to read yet.
    """

    modules: nn.Module
    outputs: Callable[[Tensor, Mapping[int, Tensor], int], list[Tensor]]
    final_norm: Callable[[Tensor], Tensor]
    reads: tuple[int, ...] = ()
    offsets: int = 1
    weights_at: Callable[[int, int], list[float]] = lambda step, steps: [1.0]
    state_weight: float = 0.0
    most_offsets: int | None = None
    lag: int = 0


class Distillation:
    """What one run works on.

    Attributes:
        student: what learns.
        teacher: the model's states of the texts to train on.
        vocabulary: the ids that are learnt, ascending; None: all.
        schedule: of the optimiser.
        made_for: what the run depends on, as JSON values.
    """

    def __init__(
        self,
        model: Model,
        texts: TrainingTexts,
        settings: DistillSettings,
        folder: Path,
        student: Student,
        *,
        vocabulary_size: int | None = None,
        made_for: Mapping[str, Any],
    ) -> None:
        """See the class.

        Args:
            folder: for the checkpoint, and for the states of the teacher.
            vocabulary_size: learn only so many ids, the most frequent of the texts; None: all.
            made_for: what the run depends on beside the model, the texts and the settings.

        Raises:
            SettingError: texts that are too few, or none of whose tokens is the model's own.
            InputError: texts with ids or positions that the model does not have.
        """
        self.decoder, self.settings, self.student, self._folder = model.decoder, settings, student, folder
        vocab_size, row_tokens = self.decoder.vocab_size, texts.tokens.shape[1]
        texts.refuse_unfit(vocab_size, self.decoder.max_positions)
        train, held_out = texts.split(settings.held_out_rows, settings.seed)
        self._train, self._held_out = _tensors(train), _tensors(held_out)
        if not self._train[1].any() or not self._held_out[1].any():
            raise SettingError(
                "got texts with none of the model's own tokens among those to train on, or those held out; expected "
                "some: nothing else is learnt or judged."
            )
        self._rows_a_step = min(max(1, settings.batch_tokens // row_tokens), len(train.tokens))
        self.schedule = Schedule(
            max(1, settings.tokens // (self._rows_a_step * row_tokens)),
            settings.learning_rate,
            evaluate_every=settings.evaluate_every,
            checkpoint_every=settings.checkpoint_every,
        )
        self._judged_offsets = student.most_offsets or max(student.offsets, min(_JUDGED_OFFSETS, row_tokens - 1))
        self.vocabulary: tuple[int, ...] | None = None
        if vocabulary_size is not None and vocabulary_size < vocab_size:
            ends = [token for token in ends_of(model) if token < vocab_size]
            self.vocabulary = most_frequent(train.tokens[train.is_own].tolist(), vocabulary_size, vocab_size, ends)
        device = self.decoder.device
        ids = torch.tensor(self.vocabulary or range(vocab_size), device=device)
        self._head, self._bias = self.decoder.full_head.linears.dense_rows(ids)
        if settings.precision == "float32" or self._head.dtype == torch.float64:  # which autocast leaves as it is
            self._head, self._bias = self._head.float(), None if self._bias is None else self._bias.float()
        source = (self.decoder, model.identity)
        behind = sorted({*student.reads, self.decoder.num_blocks})  # the last for the labels
        self.teacher = Teacher(*source, self._train[0], behind, folder, settings.kept_state_bytes)
        self._judge = Teacher(*source, self._held_out[0], behind, None, _HELD_OUT_BYTES)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
        self._texts = {"rows": len(texts.tokens), "tokens": texts.num_tokens, "digest": texts.digest()}
        self.made_for = {
            **asdict(replace(settings, micro_rows=1, kept_state_bytes=0, checkpoint_every=1)),
            "model": asdict(model.identity),
            "dtype": str(self.decoder.dtype),
            "texts": texts.digest(),
            "vocabulary": hashlib.sha256(json.dumps(self.vocabulary).encode()).hexdigest()[:16],
            **made_for,
        }

    def train(self, resume: bool, progress: Progress) -> dict[str, Any]:
        """Train to the end of the schedule, or from where the run in the folder ended; errors as `optimise` has them.

        Returns:
            What a plan's provenance says of it: when, how long, on what, the curve, and "acceptance_by_offset".
        """
        began = time.time()
        curve = optimise(
            self.student.modules,
            self.losses,
            self.schedule,
            self._folder,
            self.made_for,
            evaluate=self.evaluate,
            resume=resume,
            before_saving=self.teacher.flush,
            progress=lambda step, point: progress(step, self.schedule.steps, point),
        )
        return {
            "made_by": "layerskip train",
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "settings": asdict(self.settings),
            "texts": self._texts,
            "seconds": curve[-1]["seconds"],
            "threads": torch.get_num_threads(),
            "curve": thinned(curve),
            "acceptance_by_offset": curve[-1]["agreement"],
        }

    def losses(self, step: int) -> Iterator[Tensor]:
        """Of one step, a few rows at a time; together the mean over the positions that count.

        The first positions of a row, before which no anchor lies for the last offset, count for none.
        """
        rows = rows_of_step(step, len(self._train[0]), self._rows_a_step, self.settings.seed)
        weights = self.student.weights_at(step, self.schedule.steps)
        tokens, counts = (each[rows] for each in self._train)
        counts[:, : self.student.lag + len(weights) - 1] = False
        total = max(1, int(counts.sum()))
        parts = (each.split(self.settings.micro_rows) for each in (rows, tokens, counts))
        for some, read, counted in zip(*parts, strict=True):
            states = self.teacher.states(some.tolist())
            outputs, state = self._outputs(read, states, len(weights)), states[self.decoder.num_blocks]
            counted = counted.to(state.device)
            labels, state = self._labels(state[counted]), state[counted]
            losses = [
                weight * self._loss(labels, state, output[counted])
                for weight, output in zip(weights, outputs, strict=True)
            ]
            yield torch.stack(losses).sum() / (total * sum(weights))

    @torch.no_grad()
    def evaluate(self) -> Point:
        """How often the drafter says what the model says, by offset; each where the drafts before were right."""
        right = torch.zeros(self._judged_offsets, dtype=torch.float64)
        asked = torch.zeros_like(right)
        for some in torch.arange(len(self._held_out[0])).split(self.settings.micro_rows):
            states = self._judge.states(some.tolist())
            state = states[self.decoder.num_blocks]
            tokens, own = (each[some].to(state.device) for each in self._held_out)
            outputs = self._outputs(tokens, states, self._judged_offsets)
            choice = _placed(own, self.decoder.logits(state[own].unsqueeze(0))[0].argmax(-1))
            counted, following = own.clone(), F.pad(tokens[:, 1:], (0, 1), value=-1)
            counted[:, : self.student.lag] = False
            for offset, output in enumerate(outputs):
                draft = _placed(own, self._draft(output[own]))
                asked[offset] += counted.sum().item()
                right[offset] += (counted & (draft == choice)).sum().item()
                # The next offset counts where this draft, one position before, was the token that stands there.
                counted = F.pad((counted & (draft == following))[:, :-1], (1, 0)) & own
        found = [hits / times for hits, times in zip(right.tolist(), asked.tolist(), strict=True) if times]
        return {"agreement": [round(each, 4) for each in found]}

    def _outputs(self, tokens: Tensor, states: Mapping[int, Tensor], offsets: int) -> list[Tensor]:
        with self._autocast:
            read = {behind: each.float() for behind, each in states.items()}
            return self.student.outputs(tokens.to(self.decoder.device), read, offsets)

    def _loss(self, labels: Tensor, state: Tensor, output: Tensor) -> Tensor:
        """Of the outputs at some positions, summed; labels (positions, ids), the others (positions, hidden_size)."""
        loss = _cross_entropy(labels, self._scores(output))
        weight = self.student.state_weight
        return loss + weight * _state_loss(state, output) if weight else loss

    def _draft(self, output: Tensor) -> Tensor:
        chosen = self._scores(output).argmax(-1)
        return chosen if self.vocabulary is None else torch.tensor(self.vocabulary, device=chosen.device)[chosen]

    def _scores(self, output: Tensor) -> Tensor:
        """Of `output` (positions, hidden_size) for the ids of the draft vocabulary: (positions, ids)."""
        with self._autocast:
            return self.decoder.numbers.finish(F.linear(self.student.final_norm(output), self._head, self._bias))

    @torch.no_grad()
    def _labels(self, state: Tensor) -> Tensor:
        """The model's own distribution over the draft vocabulary, (positions, ids)."""
        normed = self.decoder.final_norm(state).to(self._head.dtype)
        return self.decoder.numbers.finish(F.linear(normed, self._head, self._bias)).float().softmax(-1)


def _placed(own: Tensor, values: Tensor) -> Tensor:
    """`values` of the positions where `own` (rows, tokens) is true, in their places; -1 elsewhere."""
    return torch.full(own.shape, -1, dtype=values.dtype, device=values.device).masked_scatter_(own, values)


def _tensors(texts: TrainingTexts) -> tuple[Tensor, Tensor]:
    """Tokens (rows, row_tokens), int64, and where the token behind each is the model's own, bool."""
    own = torch.from_numpy(np.ascontiguousarray(texts.is_own))
    return torch.from_numpy(texts.tokens.astype(np.int64)), F.pad(own[:, 1:], (0, 1))


def _cross_entropy(labels: Tensor, scores: Tensor) -> Tensor:
    """Of soft labels, summed over positions; both (positions, ids)."""
    scores = scores.float()
    return (scores.logsumexp(-1) - (labels * scores).sum(-1)).sum()


def _state_loss(state: Tensor, output: Tensor) -> Tensor:
    """Smooth L1 between `output` and the model's `state`, both (positions, hidden_size); summed over positions.

    In units of each state's root mean square: some models' states are hundreds of times as large as others', and some
    positions' as those beside them; the norm behind them takes that out again.
    """
    state, output = state.float(), output.float()
    unit = state.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return F.smooth_l1_loss(output / unit, state / unit, reduction="none").mean(-1).sum()
