"""From the arguments of a call to everything that one decoding run needs: checked, complete, and effective.

Whatever can be wrong with a call is found here, before the model runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from layerskip.errors import InputError, SettingError, did_you_mean
from layerskip.governor.costs import CostRatios
from layerskip.noise import wrap_seed
from layerskip.plan import DraftPlan
from layerskip.row_views import RowViews
from layerskip.settings import DecodingSettings, resolve_settings
from layerskip.text import encode

__all__ = ["CallOptions", "Request", "RowView", "make_request"]

_Ids = int | Sequence[int]
RowView = Callable[[Any, int], Any]
"""What a row of the batch asks in place of a processor or criterion of the caller's."""


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `Model.generate` and `Model.stream`; transformers' names mean what they mean there.

    plan: a `DraftPlan`, the path of a plan file, or None for plain decoding. The `assistant_…` switches,
        `prompt_lookup_num_tokens` and `num_assistant_tokens` are short forms of a plan; given here they go before those
        of a generation config. Lookup may be given beside another way to draft, and is then a second source.
    governor: "measured" drafts only what is expected to gain time by what was measured during the call, "fixed" by
        given `cost_ratios` (so that the decisions can be repeated), "off" drafts as much as the plan allows.
    cost_ratios: a `layerskip.CostRatios`, for the governor "fixed".
    logits_processor: must be functions of (input_ids, scores). They are asked about drafted prefixes too, in rising
        order and more than once; one that keeps a state of its own per call would see tokens that are rejected later.
        Of a batch they are asked row by row, or about some rows at once; those of transformers that hold something for
        each row see every row in its place.
    seed: row `r` of a batch uses ``seed + r``, or ``seed[r]``; None draws one from torch's global generator. Under
        "maximal" the text of a seed depends on what is drafted, and with the governor "measured" that depends on
        clocks: for texts that repeat use "invariant", or another governor.
    acceptance_rule: "maximal" accepts most; "invariant" gives for a seed the same text whatever the plan, and decides
        in any case where trees are verified.
    prefill_chunk_size: prompts are read so many tokens (of each row) at a time, 1,024 if nothing is said, so that what
        a pass needs beside the cache does not grow with the prompt; None: in one pass.
    output_scores, output_logits: keep the target's scores and logits of each new token (`GenerationResult.scores`,
        `logits`): four bytes an id, a row and a token.
    pass_width: run every pass over exactly this many tokens, plain steps too, so that even in bfloat16 the output does
        not depend on the draft to the last bit. It costs what a pass that wide costs; at least
        ``plan.num_draft_tokens + 1``. Compare only calls with the same width.
    cuda_graphs: None records rounds as CUDA graphs where that can be done, False never. True also runs rounds of the
        same fixed shapes where nothing can be recorded, as on a CPU (slower; for tests). ``stats.execution`` says what
        was done, and why not.
    compile: run passes as programs that `torch.compile`'s inductor makes of them. The first pass of each shape is held
        up by compiling it (a minute or two on a CPU, ``stats.recording_s``), and each program keeps a copy of the
        weights it reads; later calls use it again (`Model.compiled`). Shapes differ by rows, by passes over one token
        or over a whole draft, by what a draft leaves out, and by the text's length with `max_new_tokens`: up to 512
        tokens, 1,024, and so on. What cannot be compiled is run as it is; ``stats.execution`` says why.
    """

    input_ids: Any
    attention_mask: Any
    plan: DraftPlan | str | os.PathLike[str] | None
    assistant_early_exit: int | None
    assistant_model: Any
    prompt_lookup_num_tokens: int | None
    num_assistant_tokens: int | None
    assistant_confidence_threshold: float | None
    governor: str | None
    cost_ratios: CostRatios | None
    generation_config: GenerationConfig | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: StoppingCriteriaList | None
    seed: int | Sequence[int] | None
    acceptance_rule: str | None
    pass_width: int | None
    cuda_graphs: bool | None
    compile: bool | None
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    suppress_tokens: list[int] | None
    eos_token_id: _Ids | None
    pad_token_id: int | None
    stop_strings: str | Sequence[str] | None
    max_time: float | None
    num_return_sequences: int | None
    prefill_chunk_size: int | None
    output_scores: bool | None
    output_logits: bool | None


_LIMITS = {"num_assistant_tokens": "num_draft_tokens", "assistant_confidence_threshold": "confidence_threshold"}
_LOOKUP = "prompt_lookup_num_tokens"
_SWITCHES = ("assistant_early_exit", "assistant_model", _LOOKUP, *_LIMITS)
# In the order in which errors name them.
_WAYS = dict.fromkeys(("plan", "assistant_early_exit", "assistant_model"))
GOVERNORS = ("measured", "fixed", "off")


@dataclass(frozen=True)
class Request:
    """One checked call.

    Attributes:
        prompts: token ids, one list a row.
        seeds: one a row.
        caller_processors, caller_criteria: transformers' objects that the caller brought.
        row_view: for those among them that are not the same for every row; None: all are.
        given_prompts: the prompts as a tensor, padding included, if they came as one.
        governor, cost_ratios, cuda_graphs, compile: see `CallOptions`.
        pass_width: see `Engine`.
    """

    prompts: list[list[int]]
    settings: DecodingSettings
    plan: DraftPlan | None
    acceptance_rule: str
    seeds: list[int]
    caller_processors: LogitsProcessorList
    caller_criteria: StoppingCriteriaList
    governor: str = "off"
    cost_ratios: CostRatios = CostRatios()
    pass_width: int | None = None
    cuda_graphs: bool | None = None
    compile: bool = False
    given_prompts: Tensor | None = None
    row_view: RowView | None = None

    def padded_prompts(self, pad_token_id: int) -> Tensor:
        """What stands left of the outputs: the prompts as they came, or padded on the left: (batch, length), int64."""
        if self.given_prompts is not None:
            return self.given_prompts
        longest = max(len(prompt) for prompt in self.prompts)
        return torch.tensor([[pad_token_id] * (longest - len(prompt)) + prompt for prompt in self.prompts])

    def effective_settings(self) -> dict[str, Any]:
        """For the result: every control as it acted."""
        return {
            **self.settings.to_dict(),
            "acceptance_rule": self.acceptance_rule,
            "seed": self.seeds,
            "governor": self.governor if self.plan is not None else None,
            "cost_ratios": asdict(self.cost_ratios) if self.plan is not None and self.governor == "fixed" else None,
            "pass_width": self.pass_width,
        }


def make_request(
    inputs: Any,
    options: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    checkpoint_config: GenerationConfig,
    vocab_size: int,
    max_positions: int,
) -> Request:
    """Check a call and bring it into one form.

    Args:
        options: `CallOptions`, and possibly names that do not exist.
        checkpoint_config: the checkpoint's own generation config.
        vocab_size, max_positions: of the model.

    Raises:
        LayerSkipError: one of its kinds, for whatever is wrong with the call.
    """
    given = dict(options)
    input_ids, attention_mask = given.pop("input_ids", None), given.pop("attention_mask", None)
    if (inputs is None) == (input_ids is None):
        got = "no prompt" if inputs is None else "both inputs and input_ids"
        raise InputError(f"got {got}; expected one of inputs and input_ids.")
    config, seed = given.pop("generation_config", None), given.pop("seed", None)
    processors, criteria = given.pop("logits_processor", None), given.pop("stopping_criteria", None)
    acceptance_rule, pass_width = given.pop("acceptance_rule", None), given.pop("pass_width", None)
    cuda_graphs, compiled = given.pop("cuda_graphs", None), given.pop("compile", None)
    governor, cost_ratios = given.pop("governor", None), given.pop("cost_ratios", None)
    drafting = {name: given.pop(name) for name in ("plan", *_SWITCHES) if name in given}
    settings = resolve_settings(checkpoint_config, config, given, (*CallOptions.__annotations__, "streamer"))
    plan = _effective_plan(drafting, (config, checkpoint_config))
    _check_pass_width(pass_width, plan, max_positions)
    _check_governor(governor, cost_ratios, plan)
    if not isinstance(cuda_graphs, bool | None):
        raise SettingError(f"got cuda_graphs={cuda_graphs!r}; expected True, False, or None where it can be done.")
    if not isinstance(compiled, bool | None):
        raise SettingError(f"got compile={compiled!r}; expected True or False.")
    inputs, copies = input_ids if inputs is None else inputs, settings.num_return_sequences
    prompts = encode(inputs, tokenizer, attention_mask)
    _check_ids(settings, vocab_size)
    _check_prompts(prompts, settings, vocab_size, max_positions)
    prompts = [prompt for prompt in prompts for _ in range(copies)]
    own_processors, own_criteria = _listed("logits_processor", processors), _listed("stopping_criteria", criteria)
    views = RowViews([torch.tensor([prompt]) for prompt in prompts], list(map(len, prompts)))
    return Request(
        prompts=prompts,
        settings=settings,
        plan=plan,
        acceptance_rule="maximal" if acceptance_rule is None else acceptance_rule,
        seeds=_row_seeds(seed, len(prompts)),
        caller_processors=LogitsProcessorList(own_processors),
        caller_criteria=StoppingCriteriaList(own_criteria),
        governor=governor or "measured",
        cost_ratios=cost_ratios or CostRatios(),
        pass_width=pass_width,
        cuda_graphs=cuda_graphs,
        compile=bool(compiled),
        given_prompts=_as_given(inputs, copies),
        row_view=views if views.are_needed([*own_processors, *own_criteria]) else None,
    )


def _as_given(inputs: Any, copies: int) -> Tensor | None:
    """Token ids that came as a tensor, repeated as the rows are: (batch, length), int64 on the CPU."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor):
        return None
    return (ids if ids.dim() == 2 else ids.unsqueeze(0)).to("cpu", torch.int64).repeat_interleave(copies, dim=0)


def _effective_plan(given: Mapping[str, Any], configs: Sequence[GenerationConfig | None]) -> DraftPlan | None:
    """The plan that the call names (in full or by transformers' switches), else a generation config's, strongest first.

    `plan=None` (or a switch given as None) in the call is an answer too: nothing drafts, whatever a config says.
    """
    of_configs = ({name: getattr(config, name, None) for name in _SWITCHES} for config in configs)
    sources = [given, *({name: value for name, value in each.items() if value is not None} for each in of_configs)]
    # The limits of a source weaker than the plan's do not touch it.
    rank = next((rank for rank, source in enumerate(sources) if source.keys() & {*_WAYS, _LOOKUP}), len(sources))
    plan = _named_plan(sources[rank]) if rank < len(sources) else None
    limits: dict[str, Any] = {}
    for source in reversed(sources[: rank + 1]):
        limits |= {field: source[name] for name, field in _LIMITS.items() if source.get(name) is not None}
    # A config may hold such limits for those who draft; in the call they would silently do nothing.
    idle = [name for name in _LIMITS if given.get(name) is not None]
    if idle and (plan is None or plan.num_draft_tokens == 0):
        raise SettingError(
            f"got {', '.join(idle)} without anything that drafts by a model; pass plan= or assistant_early_exit= too"
            + (f" (lookup is limited by {_LOOKUP})." if plan is not None else ".")
        )
    return replace(plan, **limits) if plan is not None and plan.num_draft_tokens else plan


def _named_plan(source: Mapping[str, Any]) -> DraftPlan | None:
    """The plan that one source names."""
    named = [name for name in _WAYS if source.get(name) is not None]
    if len(named) > 1:
        raise SettingError(f"got {' and '.join(named)}, which each say how to draft; expected one of them.")
    lookup_tokens = source.get(_LOOKUP)
    if not named:
        return DraftPlan.lookup(lookup_tokens) if lookup_tokens is not None else None
    plan = _plan_of(named[0], source[named[0]])
    return plan if lookup_tokens is None else replace(plan, lookup_tokens=lookup_tokens)


def _plan_of(way: str, value: Any) -> DraftPlan:
    if way == "assistant_early_exit":
        return DraftPlan.exit(value)
    if way == "assistant_model":
        return DraftPlan.model(value)
    plan = DraftPlan.load(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(plan, DraftPlan):
        raise SettingError(f"got a plan of type {type(plan).__name__}; expected a DraftPlan, the path of one, or None.")
    return plan


def _listed(name: str, value: Any) -> Sequence[Any]:
    if value is not None and not (isinstance(value, (list, tuple)) and all(map(callable, value))):
        raise SettingError(f"got {name}={value!r}; expected a list of transformers' objects: write {name}=[…].")
    return value or ()


def _check_pass_width(pass_width: Any, plan: DraftPlan | None, max_positions: int) -> None:
    least = 1 + (plan.most_drafts if plan else 0)
    if pass_width is not None and not (type(pass_width) is int and least <= pass_width <= max(least, max_positions)):
        raise SettingError(
            f"got pass_width={pass_width!r}; expected an integer from {least} (the newest token and the plan's draft "
            f"tokens) to the model's {max_positions:,} positions."
        )


def _check_governor(governor: Any, cost_ratios: Any, plan: DraftPlan | None) -> None:
    if governor is not None and not (isinstance(governor, str) and governor in GOVERNORS):
        raise SettingError(
            f"got governor={governor!r}; expected one of {', '.join(map(repr, GOVERNORS))}."
            f"{did_you_mean(str(governor), GOVERNORS)}"
        )
    if cost_ratios is not None and not isinstance(cost_ratios, CostRatios):
        raise SettingError(f"got cost_ratios={cost_ratios!r}; expected a layerskip.CostRatios.")
    if cost_ratios is not None and governor != "fixed":
        raise SettingError('got cost_ratios, which only the governor "fixed" uses; pass governor="fixed" too.')
    if governor is not None and plan is None:
        raise SettingError(f"got governor={governor!r} without anything that drafts; pass plan= too.")


def _check_ids(settings: DecodingSettings, vocab_size: int) -> None:
    """transformers' processors would refuse them in the middle of the call, or ignore them."""
    bad_words = [token for word in settings.bad_words_ids or [] for token in word]
    for name, ids in (("bad_words_ids", bad_words), ("suppress_tokens", settings.suppress_tokens or [])):
        if any(token >= vocab_size for token in ids):
            raise SettingError(
                f"got {name} with the token id {max(ids)}; expected ids from 0 to {vocab_size - 1}. Make them with "
                "the model's own tokenizer."
            )


def _check_prompts(
    prompts: Sequence[Sequence[int]], settings: DecodingSettings, vocab_size: int, max_positions: int
) -> None:
    for row, prompt in enumerate(prompts):
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InputError(f"got token id {wrong} in row {row}; expected ids from 0 to {vocab_size - 1}.")
        if len(prompt) >= max_positions:
            raise InputError(
                f"got a prompt of {len(prompt):,} tokens in row {row} on a model of {max_positions:,} positions, which "
                "leaves no room for a new token; shorten the prompt."
            )
        if settings.longest(len(prompt)) <= len(prompt):
            raise InputError(
                f"got a prompt of {len(prompt)} tokens in row {row} with max_length={settings.max_length}, which "
                "counts the prompt; pass a larger max_length, or max_new_tokens."
            )


def _row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """One seed a row: ``seed + row``, or as listed. Without a seed they come from torch's global generator.

    So a row decodes the same alone as in a batch, given its seed, and `torch.manual_seed` is respected.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if isinstance(seed, int) and not isinstance(seed, bool):
        return [wrap_seed(seed + row) for row in range(rows)]
    if isinstance(seed, Sequence) and len(seed) == rows and all(type(each) is int for each in seed):
        return [wrap_seed(each) for each in seed]
    raise SettingError(f"got seed={seed!r} for {rows} row(s); expected an integer, or a list of one integer a row.")
