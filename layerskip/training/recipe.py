"""The LayerSkip recipe (Elhoushi et al., ACL 2024): training that makes a model's own early layers good drafters.

For people who may change the model: later layers are dropped now and then, and early layers learn to predict through
the shared norm and head. What comes out is an ordinary checkpoint; nothing here knows how drafts are run.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip.errors import InputError, SettingError
from layerskip.identity import identify
from layerskip.models.families import family_of, geometry_of
from layerskip.models.inspection import inspect_model
from layerskip.models.loading import quiet
from layerskip.plan import DraftPlan
from layerskip.speedup import best_draft_length
from layerskip.training.beginning import RESULTS, check_layerskip, check_types
from layerskip.training.card import conditions_card, write_surroundings
from layerskip.training.folder import STATE, held_folder, refuse_folder, writing
from layerskip.training.loop import Point, Schedule, optimise, rows_of_step, thinned
from layerskip.training.texts import TrainingTexts

__all__ = ["RecipeSettings", "dropout_rates", "layer_outputs", "loss_weights", "train_layerskip"]

_DRAFT_TOKENS = 6  # with an exit after 4 of 32 layers, the paper's


@dataclass(frozen=True)
class RecipeSettings:
    """What is trained, on how much, and how. Symbols in brackets are the paper's, section 4.1.

    Attributes:
        tokens: to train on, each time that one is read counted.
        batch_tokens: of one step of the optimiser.
        micro_rows: rows whose gradients are computed at once, which bounds the memory.
        learning_rate: the highest, see `Schedule`; LoRA takes ten times as much or more.
        max_dropout: of the last layer, when the schedule is at its end (p_max).
        dropout_schedule: "constant", for a pretrained model, or "exponential", from 0, for one from scratch (S).
        loss_scale: of the early layers' losses; 0: the last layer's only (e_scale).
        curriculum: which layers have a loss (C): "rotational", every `rotation_interval`-th (R), another one each step,
            or "gradual", one more, from the last to the first, through the first half of the training.
        lora_rank: of additions to the linears of all layers, everything else being frozen; None: all weights.
        held_out_rows: of the texts, never trained on.
        evaluate_every: steps.
        precision: of the products, "bfloat16" or "float32"; weights and optimiser are float32.
        seed: of the order of the texts, of the layers that are dropped, and of LoRA's beginning.
    """

    tokens: int = 20_000_000
    batch_tokens: int = 8192
    micro_rows: int = 4
    learning_rate: float = 5e-5
    max_dropout: float = 0.1
    dropout_schedule: str = "constant"
    loss_scale: float = 1.0
    curriculum: str = "rotational"
    rotation_interval: int = 8
    lora_rank: int | None = None
    held_out_rows: int = 16
    evaluate_every: int = 100
    precision: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check (SettingError)."""
        least = {"tokens": 1, "batch_tokens": 1, "micro_rows": 1, "rotation_interval": 1, "lora_rank": 1,
                 "held_out_rows": 1, "evaluate_every": 1, "seed": 0}  # fmt: skip
        for name, smallest in least.items():
            value = getattr(self, name)
            if (type(value) is not int or value < smallest) and (name, value) != ("lora_rank", None):
                raise SettingError(f"got {name}={value!r}; expected an integer from {smallest}.")
        Schedule(1, self.learning_rate)
        for name in ("max_dropout", "loss_scale"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise SettingError(f"got {name}={value!r}; expected a number from 0 to 1.")
        choices = {"dropout_schedule": ("constant", "exponential"), "curriculum": ("rotational", "gradual"),
                   "precision": ("bfloat16", "float32")}  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise SettingError(f"got {name}={getattr(self, name)!r}; expected {' or '.join(map(repr, known))}.")


def dropout_rates(settings: RecipeSettings, num_layers: int, step: int, steps: int) -> list[float]:
    """With which probability each layer is dropped, sample by sample: p(l, t) = S(t) D(l) p_max."""
    exponential = settings.dropout_schedule == "exponential"
    reached = 2 ** (step / max(1, steps - 1)) - 1 if exponential else 1.0  # exp(t ln 2 / (T - 1)) - 1
    return [reached * (2 ** (layer / (num_layers - 1)) - 1) * settings.max_dropout for layer in range(num_layers)]


def loss_weights(settings: RecipeSettings, num_layers: int, step: int, steps: int) -> list[float]:
    """The share of each layer's loss in that of a step: e~(t, l) = C(t, l) e(l) / sum of C(t, i) e(i); 0: it has none.

    The first layer never has one, because e(0) = 0; the last, which must not get worse, always has.
    """
    last = num_layers - 1
    scales = [settings.loss_scale * layer * (layer + 1) / 2 for layer in range(last)]
    scales.append(last + settings.loss_scale * (last - 1) * last / 2)
    if settings.curriculum == "rotational":
        active = [(layer - step) % settings.rotation_interval == 0 for layer in range(last)]
    else:
        active = [layer >= last - 2 * num_layers * step // steps for layer in range(last)]
    kept = [scale * is_active for scale, is_active in zip(scales, [*active, True], strict=True)]
    return [each / sum(kept) for each in kept]


def layer_outputs(model: PreTrainedModel, tokens: Tensor, kept: Tensor | None = None) -> list[Tensor]:
    """The states behind each layer, each (rows, row_tokens, hidden), by transformers' own layers.

    Args:
        tokens: (rows, row_tokens), int64.
        kept: (rows, layers), bool: where a layer runs; elsewhere its output is its input. None: everywhere. Nothing is
            rescaled, as in the paper. A dropped sample is computed all the same: at the usual rates a twentieth of all.
    """
    outputs: list[Tensor] = []
    family = family_of(type(model).__name__)

    def hear(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        states, more = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        if kept is not None:
            states = torch.where(kept[:, len(outputs), None, None], states, args[0])
        outputs.append(states)
        return states if more is None else (states, *more)

    handles = [layer.register_forward_hook(hear) for layer in model.get_submodule(family.layers).children()]
    try:
        model.base_model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@torch.inference_mode(False)
@torch.enable_grad()
def train_layerskip(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: TrainingTexts,
    out: str | Path,
    settings: RecipeSettings | None = None,
    *,
    resume: bool = False,
    progress: Callable[[int, int, Point | None], None] = lambda step, steps, point: None,
) -> Path:
    """Train a copy of `model` by the recipe, and write it as a checkpoint into the folder `out`, which is returned.

    Beside the weights, in the dtype of `model`, lie the tokenizer, a card (``README.md``) and the draft plan of the
    exit that promises most (``plan.json``). What resuming needs is in the folder ``training``, which may be removed.

    Args:
        texts: tokens are learnt where `is_own` is true, the others are only read.
        resume: go on with the run that was begun in `out`.
        progress: is told steps done, steps in all, and the newest point of the curve: on held-out text, by the number
            of layers that run, "perplexity" and "agreement", how often they say what all layers say.

    Raises:
        SettingError: settings out of range; a folder with another run, with a model, or in which somebody is at work;
            texts that are too few.
        InputError: texts with ids or positions that the model does not have, or with nothing to learn.
        UnsupportedModelError: the architecture is not in the table of families, weights or linears are no plain ones,
            or transformers refuses to write the generation config.
        CheckpointError: a file is damaged, or cannot be written.
    """
    settings = check_types(texts, settings, RecipeSettings)
    check_layerskip(model, out, settings, resume)
    run = _Run(model, texts, settings)
    with held_folder(out) as folder:
        refuse_folder(folder, STATE, RESULTS, resume)  # again: now nobody else can come
        write_surroundings(folder, run.model.generation_config, tokenizer)
        return _train(model, run, texts, folder, resume, progress)


def _train(
    model: PreTrainedModel,
    run: _Run,
    texts: TrainingTexts,
    folder: Path,
    resume: bool,
    progress: Callable[[int, int, Point | None], None],
) -> Path:
    settings, before = run.settings, run.evaluate()
    for weight in run.model.parameters():  # no buffers: those of rotary embeddings keep their precision
        weight.data = weight.data.float()
    run.model.requires_grad_(settings.lora_rank is None)
    merge = _add_low_rank(run.layers, settings.lora_rank, settings.seed) if settings.lora_rank else lambda: None
    curve = optimise(
        run.model, run.losses, run.schedule, folder / STATE, run.made_for, evaluate=run.evaluate, resume=resume,
        progress=lambda step, point: progress(step, run.schedule.steps, point),
    )  # fmt: skip
    merge()
    for weight, given in zip(run.model.parameters(), model.parameters(), strict=True):
        weight.data = weight.data.to(given.dtype)
    with writing(folder / "model.safetensors"), quiet():
        run.model.save_pretrained(folder)
    made = {
        "made_by": "layerskip.training.recipe", "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": asdict(settings), "trained_from": asdict(identify(model)), "steps": run.schedule.steps,
        "texts": {"rows": len(texts.tokens), "tokens": texts.num_tokens, "digest": texts.digest()},
        "seconds": curve[-1]["seconds"], "threads": torch.get_num_threads(), "before": before,
        "after": run.evaluate(), "curve": thinned(curve),  # the first in the dtype given, not in float32
    }  # fmt: skip
    plan = _plan_of_best_exit(run.model, made)
    plan.save(folder / "plan.json")
    with writing(folder / "README.md"):
        (folder / "README.md").write_text(_card(made, plan), encoding="utf-8")
    return folder


class _Run:
    """What one run works on.

    Attributes:
        settings: as given.
        model, layers: the copy, and its decoder layers. It stays in evaluation mode: dropout that its config asks for
            would draw numbers that no resuming knows.
    """

    def __init__(self, model: PreTrainedModel, texts: TrainingTexts, settings: RecipeSettings) -> None:
        family, geometry = family_of(type(model).__name__, model.config), geometry_of(model.config)
        rows, row_tokens = texts.tokens.shape
        texts.refuse_unfit(geometry.vocab_size, geometry.max_positions)
        self.settings, self._num_layers = settings, geometry.num_layers
        # Tokens (rows, row_tokens), and where the next one counts (rows, row_tokens - 1).
        self._train, self._held_out = (
            (torch.from_numpy(each.tokens).long(), torch.from_numpy(each.is_own)[:, 1:])
            for each in texts.split(settings.held_out_rows, settings.seed)
        )
        if not self._train[1].any() or not self._held_out[1].any():
            raise InputError("got rows to train on, or held-out ones, without a token to learn. Use other texts.")
        self._rows_a_step = min(max(1, settings.batch_tokens // row_tokens), rows - settings.held_out_rows)
        steps = max(1, settings.tokens // (self._rows_a_step * row_tokens))
        self.schedule = Schedule(steps, settings.learning_rate, evaluate_every=min(settings.evaluate_every, steps))
        self.made_for = asdict(replace(settings, micro_rows=1))
        self.made_for |= {"model": asdict(identify(model)), "dtype": str(model.dtype), "texts": texts.digest()}
        self._autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
        self.model = copy.deepcopy(model).eval()
        self._numbers = family.numbers(model.config)
        names = (family.layers, family.final_norm, family.head)
        self.layers, self._norm, self._head = map(self.model.get_submodule, names)

    def losses(self, step: int) -> Iterator[Tensor]:
        """Of one step, a few rows at a time; together the mean over the positions that count."""
        settings, device, of_run = self.settings, self.model.device, (self._num_layers, step, self.schedule.steps)
        rows = rows_of_step(step, len(self._train[0]), self._rows_a_step, settings.seed)
        weights = loss_weights(settings, *of_run)
        # The third number tells these draws from those of an epoch's order.
        drawn = np.random.default_rng((settings.seed, step, 1)).random((len(rows), self._num_layers))
        kept = torch.from_numpy(drawn >= dropout_rates(settings, *of_run)).to(device)
        tokens, counted = (each[rows].to(device) for each in self._train)
        for some in torch.arange(len(rows)).split(settings.micro_rows):
            with self._autocast:
                outputs = layer_outputs(self.model, tokens[some], kept[some])
                # A layer's logits are larger than all else: none are kept, backward computes them once more.
                losses = [
                    weight * checkpoint(self._scored, output, tokens[some], counted[some], use_reentrant=False)[0]
                    for weight, output in zip(weights, outputs, strict=True)
                    if weight
                ]
            yield torch.stack(losses).sum() / counted.sum().clamp(min=1)

    @torch.no_grad()
    def evaluate(self) -> Point:
        """Perplexity and agreement on the held-out rows, by the number of layers that run."""
        layers = sorted({max(1, self._num_layers * quarter // 4) for quarter in (1, 2, 3, 4)})
        loss, agreed = np.zeros((2, len(layers)))
        for row in torch.arange(len(self._held_out[0])).split(1):  # whatever the micro_rows, the figures are the same
            tokens, counted = (each[row].to(self.model.device) for each in self._held_out)
            with self._autocast:
                outputs = layer_outputs(self.model, tokens)
                scored = [self._scored(outputs[layer - 1], tokens, counted) for layer in layers]
            loss += [each.item() for each, _ in scored]
            agreed += [(said == scored[-1][1]).sum().item() for _, said in scored]
        total = int(self._held_out[1].sum())
        # JSON has neither infinity nor numbers for names.
        perplexity = {str(layer): math.exp(min(each / total, 700.0)) for layer, each in zip(layers, loss, strict=True)}
        return {"perplexity": perplexity, "agreement": dict(zip(perplexity, (agreed / total).tolist(), strict=True))}

    def _scored(self, output: Tensor, tokens: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """What the shared norm and head make of a layer's output, at the positions where the next token counts.

        Cross-entropy with the next tokens, summed, and the likeliest tokens, (positions,).
        """
        scores = self._numbers.finish(self._head(self._norm(output[:, :-1][counted])))  # (positions, vocab)
        return F.cross_entropy(scores.float(), tokens[:, 1:][counted], reduction="sum"), scores.argmax(-1)


def _add_low_rank(layers: nn.Module, rank: int, seed: int) -> Callable[[], None]:
    """Add up @ down, of low rank, to all linears of `layers` (LoRA, Hu et al., ICLR 2022, with alpha = r).

    `up` begins at 0, so that nothing changes at first. The return value merges them, and leaves nothing else behind.
    """
    linears: list[Any] = [each for each in layers.modules() if isinstance(each, nn.Linear)]
    drawn = torch.Generator().manual_seed(seed)
    for linear in linears:
        down = nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features), a=math.sqrt(5), generator=drawn)
        linear.lora_down = nn.Parameter(down.to(linear.weight.device))
        linear.lora_up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))

    def add(linear: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + F.linear(F.linear(args[0], linear.lora_down), linear.lora_up)

    handles = [linear.register_forward_hook(add) for linear in linears]

    @torch.no_grad()
    def merge() -> None:
        for linear, handle in zip(linears, handles, strict=True):
            linear.weight += linear.lora_up @ linear.lora_down
            del linear.lora_up, linear.lora_down
            handle.remove()

    return merge


def _plan_of_best_exit(model: PreTrainedModel, made: dict[str, Any]) -> DraftPlan:
    """The exit with the best predicted speed-up; where none gains, the one that comes nearest."""
    inspection, agreement = inspect_model(model), made["after"]["agreement"]

    def promise(layers: str) -> tuple[float, float]:
        cost = inspection.draft_cost(DraftPlan.exit(int(layers)).path(inspection.num_layers))
        return best_draft_length(agreement[layers], cost)[1], agreement[layers] - cost

    best = max(list(agreement)[:-1], key=promise)  # the last is no exit
    # Behind text of this kind an exit's first draft is accepted that often; of the drafts behind it, it is assumed.
    found = {"predicted_speedup": promise(best)[0], "acceptance_by_offset": [agreement[best]]}
    return DraftPlan.exit(int(best), num_draft_tokens=_DRAFT_TOKENS, target=identify(model), provenance=made | found)


def _card(made: dict[str, Any], plan: DraftPlan) -> str:
    """What was trained, on what, and what it did, for people."""
    rows = []
    for layers in made["before"]["agreement"]:
        was, now = ([made[when][name][layers] for name in ("perplexity", "agreement")] for when in ("before", "after"))
        rows.append(f"| {layers} | {was[0]:.4g} | {now[0]:.4g} | {was[1]:.1%} | {now[1]:.1%} |")
    return f"""# A LayerSkip checkpoint

{made["trained_from"]["architecture"]}, trained by the LayerSkip recipe (Elhoushi et al., ACL 2024: layer dropout and
early-exit loss) so that its first layers can draft for all. transformers reads it as any other checkpoint; layerskip
drafts on it with `plan.json`: an exit after {plan.exit_layer} layers, for a predicted speed-up of
{plan.provenance["predicted_speedup"]:.2f} (by agreement and parameters read; 1.00: no gain). On held-out rows:

| Layers run | Perplexity before | after | Agreement with all layers before | after |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

{conditions_card(made)}"""
