"""Training a draft path on the model's own text: an exit's last blocks, all of a path from the embedding, or heads.

The checkpoint stays as it is. At each offset of a draft (`rollout.py`) the path's distribution over the draft
vocabulary is drawn towards the model's own, by cross-entropy with soft labels, where the text is the model's answer.
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
from torch import Tensor

from layerskip.api import Model
from layerskip.draft_vocabulary import most_frequent
from layerskip.errors import InputError, SettingError
from layerskip.models.adapter import AdapterSpec, TrainedPart
from layerskip.models.adapter_file import make_adapter, save_adapter
from layerskip.plan import DraftPlan
from layerskip.speedup import best_draft_length
from layerskip.training.beginning import ADAPTER, PLAN, check_exit
from layerskip.training.folder import held_folder, refuse_folder, writing
from layerskip.training.loop import Point, Schedule, optimise, rows_of_step, thinned
from layerskip.training.rollout import rollout
from layerskip.training.teacher import Teacher
from layerskip.training.texts import TrainingTexts
from layerskip.training.writing import ends_of

__all__ = ["ExitSettings", "train_exit"]

_SIBLINGS = 4  # most tokens to verify beside each draft; SmolLM2's own choice is among so many in 0.55 of the cases
_HELD_OUT_BYTES = 10**9  # of memory, for the model's states of the texts that are judged on


@dataclass(frozen=True)
class ExitSettings:
    """What is trained, on how much, and how.

    Attributes:
        exit_layer: blocks of the model that run before the trained ones; 0: none (jump).
        num_blocks: trained blocks.
        num_heads: heads to train instead of blocks (Medusa; `models/heads.py`): with `num_blocks` 0, and as many as
            `offsets`, each of which has one. They learn apart: a `first_offset_share` is time that the others lack.
        reads_state: whether the path reads the model's final state of the position before.
        further_states: the states that it reads beside that one, by the number of blocks behind them; None: those
            behind a third and two thirds of all, if it reads the final one.
        vocabulary_size: ids that a draft may say, the most frequent of the texts; None: all.
        tokens: to train on, each time that one is read counted.
        batch_tokens: of one step of the optimiser.
        micro_rows: rows whose gradients are computed at once: with `offsets`, what bounds the memory.
        offsets: drafts that are looked ahead.
        offset_decay: weight of each offset in the loss relative to the one before.
        first_offset_share: of the steps, at the beginning, that look at the first draft only, at a third of the cost.
        learning_rate: see `Schedule`.
        held_out_rows: of the texts, never trained on.
        evaluate_every, checkpoint_every: steps.
        precision: of the products, "bfloat16" or "float32"; weights and optimiser are float32.
        kept_state_bytes: of the disk, for the model's states of all texts.
        seed: of the order of the texts.
    """

    exit_layer: int = 0
    num_blocks: int = 1
    num_heads: int = 0
    reads_state: bool = True
    further_states: tuple[int, ...] | None = None
    vocabulary_size: int | None = 8192
    tokens: int = 4_000_000
    batch_tokens: int = 2048
    micro_rows: int = 4
    offsets: int = 3
    offset_decay: float = 0.8
    first_offset_share: float = 0.5
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
        least = {"exit_layer": 0, "num_blocks": 0, "tokens": 1, "batch_tokens": 1, "micro_rows": 1, "offsets": 1,
                 "held_out_rows": 1, "evaluate_every": 1, "checkpoint_every": 1,
                 "kept_state_bytes": 0, "seed": 0, "num_heads": 0}  # fmt: skip
        for name, smallest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise SettingError(f"got {name}={value!r}; expected an integer from {smallest}.")
        if (self.num_blocks > 0) == (self.num_heads > 0) or self.num_heads not in (0, self.offsets):
            raise SettingError(
                f"got num_blocks={self.num_blocks} and num_heads={self.num_heads} for offsets={self.offsets}; expected "
                "blocks and no heads, or no blocks and one head for each offset."
            )
        for name in ("offset_decay", "first_offset_share"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
                raise SettingError(f"got {name}={value!r}; expected a number from 0 to 1.")
        if type(self.reads_state) is not bool:
            raise SettingError(f"got reads_state={self.reads_state!r}; expected True or False.")
        further = self.further_states
        if further is not None and not (isinstance(further, tuple) and all(type(each) is int for each in further)):
            raise SettingError(
                f"got further_states={further!r}; expected a tuple of numbers of blocks, such as (10, 20), or None."
            )
        if self.vocabulary_size is not None and (type(self.vocabulary_size) is not int or self.vocabulary_size < 1):
            raise SettingError(f"got vocabulary_size={self.vocabulary_size!r}; expected an integer from 1, or None.")
        Schedule(1, self.learning_rate)
        if self.precision not in ("bfloat16", "float32"):
            raise SettingError(f"got precision={self.precision!r}; expected 'bfloat16' or 'float32'.")
        if not self.exit_layer and not self.reads_state:
            raise SettingError(
                "got exit_layer=0 and reads_state=False: a path from one embedding alone knows next to nothing. "
                "Let it read the state, or run some layers."
            )

    @property
    def spec(self) -> AdapterSpec:
        """What is trained."""
        further = self.further_states or ()
        return AdapterSpec(self.exit_layer, self.num_blocks, self.reads_state, further, self.num_heads)

    def resolved(self, num_layers: int) -> ExitSettings:
        """The same with what a model of so many layers decides."""
        if self.further_states is not None:
            return self
        reads_more = self.reads_state and self.num_blocks
        thirds = {num_layers // 3, 2 * num_layers // 3} - {0} if reads_more else set()
        return replace(self, further_states=tuple(sorted(thirds)))


@torch.inference_mode(False)
@torch.enable_grad()
def train_exit(
    model: Model,
    texts: TrainingTexts,
    out: str | Path,
    settings: ExitSettings | None = None,
    *,
    begin_with: DraftPlan | None = None,
    resume: bool = False,
    progress: Callable[[int, int, Point | None], None] = lambda step, steps, point: None,
) -> DraftPlan:
    """Train a draft path for `model`, and write it: ``plan.json`` and ``adapter.safetensors`` in the folder `out`.

    Args:
        texts: rows that the model wrote (`texts.write_texts`).
        begin_with: a trained plan whose blocks are trained further, say on other texts; the `spec` of the settings is
            then that of its blocks. None: begin with the model's own last blocks.
        resume: go on with the run that was begun in `out`.
        progress: is told steps done, steps in all, and the newest point of the curve: with "agreement", how often the
            path says on held-out text what the model says, by offset, if the drafts before were the text's own tokens.

    Raises:
        SettingError: settings out of range; a folder with another run, with results of something else, or in which
            somebody is at work; texts that are too few.
        InputError: texts with ids or positions that the model does not have.
        UnsupportedModelError: a model on several devices, or with last blocks that are no plain linears.
        CheckpointError: the checkpoint is damaged, or cannot be written; there are no blocks to begin with.
        PlanMismatchError: these are of another model.
    """
    if not isinstance(texts, TrainingTexts):
        raise InputError(f"got texts of type {type(texts).__name__}; expected TrainingTexts.")
    settings = ExitSettings() if settings is None else settings
    if not isinstance(settings, ExitSettings):
        raise SettingError(f"got settings of type {type(settings).__name__}; expected ExitSettings.")
    settings, beginning = check_exit(model, out, settings, begin_with, resume, texts.tokens.shape[1])
    with held_folder(out) as folder:
        refuse_folder(folder, "", (PLAN, ADAPTER), resume)  # again: now nobody else can come
        run = _Run(model, texts, settings, folder, beginning)
        began = time.time()
        curve = optimise(
            run.adapter.modules,
            run.losses,
            run.schedule,
            folder,
            run.made_for,
            evaluate=run.evaluate,
            resume=resume,
            before_saving=run.teacher.flush,
            progress=lambda step, point: progress(step, run.schedule.steps, point),
        )
        with writing(folder / ADAPTER):
            save_adapter(run.adapter, folder / ADAPTER, torch.bfloat16)
        plan = _plan(model, run, texts, folder, began, curve, begin_with)
        plan.save(folder / PLAN)
    return plan


def _plan(
    model: Model,
    run: _Run,
    texts: TrainingTexts,
    folder: Path,
    began: float,
    curve: list[Point],
    begin_with: DraftPlan | None,
) -> DraftPlan:
    """What was trained, as a plan; `began` in seconds since 1970."""
    acceptance = curve[-1]["agreement"]
    plan = DraftPlan(
        exit_layer=run.settings.exit_layer,
        adapter=str(folder / ADAPTER),
        draft_vocabulary=run.vocabulary,
        target=model.identity,
        provenance={
            "made_by": "layerskip train",
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "settings": {**asdict(run.settings), "further_states": list(run.settings.spec.further_states)},  # for JSON
            "begun_with": None if begin_with is None else _without_curve(begin_with.provenance),
            "texts": {"rows": len(texts.tokens), "tokens": texts.num_tokens, "digest": texts.digest()},
            "seconds": curve[-1]["seconds"],
            "threads": torch.get_num_threads(),
            "curve": thinned(curve),
            "acceptance_by_offset": acceptance,
        },
    )
    # The governor drafts less where that is better, never more.
    cost, heads = model.draft_cost(plan), run.settings.num_heads
    # Heads draft all at once: one cost for any number, up to theirs.
    length, _ = best_draft_length(acceptance, 0.0, 1 + cost, heads) if heads else best_draft_length(acceptance, cost)
    return replace(plan, num_draft_tokens=max(1, length), num_siblings=_SIBLINGS)


class _Run:
    """What one run works on."""

    def __init__(
        self,
        model: Model,
        texts: TrainingTexts,
        settings: ExitSettings,
        folder: Path,
        beginning: TrainedPart | None = None,
    ) -> None:
        self.decoder, self.settings = model.decoder, settings
        vocab_size = self.decoder.vocab_size
        texts.refuse_unfit(vocab_size, self.decoder.max_positions)
        train, held_out = texts.split(settings.held_out_rows, settings.seed)
        self._train, self._held_out = _tensors(train), _tensors(held_out)
        if not self._train[1].any() or not self._held_out[1].any():
            raise SettingError(
                "got texts with none of the model's own tokens among those to train on, or those held out; expected "
                "some: nothing else is learnt or judged."
            )
        self._rows_a_step = min(max(1, settings.batch_tokens // texts.tokens.shape[1]), len(train.tokens))
        steps = max(1, settings.tokens // (self._rows_a_step * texts.tokens.shape[1]))
        self.schedule = Schedule(
            steps,
            settings.learning_rate,
            evaluate_every=settings.evaluate_every,
            checkpoint_every=settings.checkpoint_every,
        )
        size = settings.vocabulary_size
        self.vocabulary: tuple[int, ...] | None = None
        if size is not None and size < vocab_size:
            ends = [token for token in ends_of(model) if token < vocab_size]
            self.vocabulary = most_frequent(train.tokens[train.is_own].tolist(), size, vocab_size, ends)
        device = self.decoder.device
        ids = torch.tensor(self.vocabulary or range(vocab_size), device=device)
        self._head, self._bias = self.decoder.full_head.linears.dense_rows(ids)
        if settings.precision == "float32" or self._head.dtype == torch.float64:  # which autocast leaves as it is
            self._head, self._bias = self._head.float(), None if self._bias is None else self._bias.float()
        self.adapter = beginning or make_adapter(model.hf_model, settings.spec)
        self.adapter.modules.float().requires_grad_(True)
        self.adapter.read()
        source, last = (self.decoder, model.identity), self.decoder.num_blocks
        behind = sorted({settings.exit_layer, *self.adapter.kept_states, last})  # the last for the labels
        self.teacher = Teacher(*source, self._train[0], behind, folder, settings.kept_state_bytes)
        self._judge = Teacher(*source, self._held_out[0], behind, None, _HELD_OUT_BYTES)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
        self.made_for = {
            **asdict(replace(settings, micro_rows=1, kept_state_bytes=0, checkpoint_every=1)),
            "model": asdict(model.identity),
            "dtype": str(self.decoder.dtype),
            "texts": texts.digest(),
            "begun_with": None if beginning is None else _digest(beginning),
            "vocabulary": hashlib.sha256(json.dumps(self.vocabulary).encode()).hexdigest()[:16],
        }

    def losses(self, step: int) -> Iterator[Tensor]:
        """Of one step, a few rows at a time; together the mean over the positions that count.

        The first positions of a row, before which no anchor lies for the last offset, count for none.
        """
        rows = rows_of_step(step, len(self._train[0]), self._rows_a_step, self.settings.seed)
        offsets = 1 if step < self.settings.first_offset_share * self.schedule.steps else self.settings.offsets
        weights = [self.settings.offset_decay**each for each in range(offsets)]
        counts = self._train[1][rows]
        counts[:, : offsets - 1] = False
        total = max(1, int(counts.sum()))
        for some, counted in zip(*(each.split(self.settings.micro_rows) for each in (rows, counts)), strict=True):
            states = self.teacher.states(some.tolist())
            outputs, state = self._rollout(states, offsets), states[self.decoder.num_blocks]
            counted = counted.to(state.device)
            labels = self._labels(state[counted])
            losses = [
                weight * _cross_entropy(labels, self._scores(output[counted]))
                for weight, output in zip(weights, outputs, strict=True)
            ]
            yield torch.stack(losses).sum() / (total * sum(weights))

    @torch.no_grad()
    def evaluate(self) -> Point:
        """How often the path says what the model says, by offset; each where the drafts before were right."""
        right = torch.zeros(self.settings.offsets, dtype=torch.float64)
        asked = torch.zeros_like(right)
        for some in torch.arange(len(self._held_out[0])).split(self.settings.micro_rows):
            states = self._judge.states(some.tolist())
            outputs, state = self._rollout(states, self.settings.offsets), states[self.decoder.num_blocks]
            tokens, own = (each[some].to(state.device) for each in self._held_out)
            choice = _placed(own, self.decoder.logits(state[own].unsqueeze(0))[0].argmax(-1))
            counted, following = own, F.pad(tokens[:, 1:], (0, 1), value=-1)
            for offset, output in enumerate(outputs):
                draft = _placed(own, self._draft(output[own]))
                asked[offset] += counted.sum().item()
                right[offset] += (counted & (draft == choice)).sum().item()
                # The next offset counts where this draft, one position before, was the token that stands there.
                counted = F.pad((counted & (draft == following))[:, :-1], (1, 0)) & own
        found = [hits / times for hits, times in zip(right.tolist(), asked.tolist(), strict=True) if times]
        return {"agreement": [round(each, 4) for each in found]}

    def _rollout(self, states: Mapping[int, Tensor], offsets: int) -> list[Tensor]:
        with self._autocast:
            read = {behind: each.float() for behind, each in states.items()}
            return rollout(self.decoder, self.adapter, read, offsets)

    def _draft(self, output: Tensor) -> Tensor:
        chosen = self._scores(output).argmax(-1)
        return chosen if self.vocabulary is None else torch.tensor(self.vocabulary, device=chosen.device)[chosen]

    def _scores(self, output: Tensor) -> Tensor:
        """Of `output` (positions, hidden_size) for the ids of the draft vocabulary: (positions, ids)."""
        with self._autocast:
            return self.decoder.numbers.finish(F.linear(self.adapter.final_norm(output), self._head, self._bias))

    @torch.no_grad()
    def _labels(self, state: Tensor) -> Tensor:
        """The model's own distribution over the draft vocabulary, (positions, ids)."""
        normed = self.decoder.final_norm(state).to(self._head.dtype)
        return self.decoder.numbers.finish(F.linear(normed, self._head, self._bias)).float().softmax(-1)


def _digest(adapter: TrainedPart) -> str:
    """Of its weights."""
    digest = hashlib.sha256()
    for name, each in sorted(adapter.modules.state_dict().items()):
        digest.update(name.encode() + each.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _without_curve(provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in provenance.items() if name != "curve"}


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
