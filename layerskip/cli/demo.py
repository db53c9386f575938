"""The demonstration itself, on any model: the same prompt twice, and a table that compares the two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from layerskip.api import Model
from layerskip.cli.plan_command import describe_path
from layerskip.cli.terminal import DRAFTED, has_colours, make_console, show_stream
from layerskip.exactness import Difference, first_difference
from layerskip.plan import DraftPlan
from layerskip.result import GenerationResult
from layerskip.stats import DecodeStats

__all__ = ["run_demo"]

NOISE = 0.1  # share by which the speeds of short runs on a shared machine differ by themselves
MARKS = ("‹", "›")  # around accepted drafts, where there are no colours
RUNS, RUN_TOKENS = 3, 24  # of each, for the speeds at the end


def run_demo(model: Model, plan: DraftPlan, prompt: str, *, max_new_tokens: int, same_width: bool) -> None:
    """Answer `prompt` plainly and with `plan`, both greedily, and print the comparison.

    Args:
        same_width: run every pass of both over the same number of tokens, so that both round alike.
    """
    console = make_console()
    messages = [{"role": "user", "content": prompt}]
    width = plan.num_draft_tokens + 1 if same_width else None
    call: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pass_width": width}
    drafting_call = {**call, "plan": plan, "governor": "off"}
    model.generate(messages, **{**drafting_call, "max_new_tokens": 4})  # the first call is slower than the rest
    cost = model.draft_cost(plan)

    name = Path(model.name).name
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    console.print(f"{name}, {dtype} on {model.decoder.device}, {torch.get_num_threads()} thread(s)")
    console.print(f"prompt: {prompt}\n", soft_wrap=True)
    console.print("── plain: one pass of the model for each token")
    plain = _show(model, messages, call)
    path = describe_path(plan, model.decoder.num_blocks)
    console.print(f"── self-speculative: {path} draft {plan.num_draft_tokens} tokens a round", soft_wrap=True)
    console.print("   accepted drafts look ", _marked(console), ", the model's own tokens like this", sep="")
    drafting = _show(model, messages, drafting_call)

    difference = _compare(model, plain, drafting)
    console.print(_table(plain, drafting, difference))
    if width is not None:
        console.print(
            f"Both ran every pass over {width} tokens, so that {dtype} rounds alike and equal means to the last bit.",
            soft_wrap=True,
        )
    if difference is not None:
        console.print(_explain(difference), soft_wrap=True)
    console.print(f"\nMeasuring at full speed, {RUNS} runs of {RUN_TOKENS} tokens each …", soft_wrap=True)
    console.print(_verdict(_speeds(model, messages, plan), drafting.stats.acceptance_rate, cost), soft_wrap=True)


def _show(model: Model, messages: list[dict[str, str]], call: dict[str, Any]) -> GenerationResult:
    stream = model.stream(messages, **call)
    show_stream(stream, MARKS)
    print()
    return stream.result


def _marked(console: Console) -> Any:
    from rich.text import Text

    return Text("like this", DRAFTED) if has_colours(console) else f"{MARKS[0]}like this{MARKS[1]}"


def _compare(model: Model, plain: GenerationResult, drafting: GenerationResult) -> Difference | None:
    prompt_ids = plain.sequences[0, : plain.stats.prompt_tokens].tolist()
    return first_difference(model.hf_model, prompt_ids, plain.new_token_ids[0], drafting.new_token_ids[0])


def _table(plain: GenerationResult, drafting: GenerationResult, difference: Difference | None) -> Table:
    table = Table("", "plain", "self-speculative")
    equal = "equal" if difference is None else f"equal up to token {difference.index}"
    columns = [_column(each.stats) for each in (plain, drafting)]
    columns[1]["tokens"] += f", {equal}"
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(stats: DecodeStats) -> dict[str, str]:
    drafted = stats.proposed > 0
    by_offset = ", ".join(f"{each:.0%}" for each in stats.acceptance_by_offset)
    return {
        "tokens": str(stats.new_tokens),
        "tokens per round": f"{stats.tokens_per_round:.2f}",
        "drafts accepted": f"{stats.accepted} of {stats.proposed}, {stats.acceptance_rate:.0%}" if drafted else "–",
        "  1st, 2nd, … if those before were": by_offset if drafted else "–",
        "prompt": f"{stats.prefill_s:.2f} s",
        "drafting": f"{stats.draft_s:.2f} s" if drafted else "–",
        "passes of the whole model": f"{stats.verify_s:.2f} s",
        "everything else": f"{stats.host_s:.2f} s",
        "tokens per second, these runs": f"{stats.tokens_per_s:.1f}",
    }


def _speeds(model: Model, messages: list[dict[str, str]], plan: DraftPlan) -> dict[str, float]:
    """Tokens per second, each as fast as it can be: medians of alternating runs.

    Alternating, because whatever else the machine does comes and goes, and passes are as wide as they need be.
    """
    arms: dict[str, dict[str, Any]] = {
        "plain": {},
        "always drafting": {"plan": plan, "governor": "off"},
        "governed": {"plan": replace(plan, lookup_tokens=6)},
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(RUNS):
        call: Any = {"max_new_tokens": RUN_TOKENS, "min_new_tokens": RUN_TOKENS, "do_sample": False}
        for name, arm in arms.items():
            speeds[name].append(model.generate(messages, **call, **arm).stats.tokens_per_s)
    return {name: median(each) for name, each in speeds.items()}


def _verdict(speeds: dict[str, float], acceptance: float, cost: float) -> str:
    """The end of it, in words that a noisy measurement does not turn into a claim."""
    lines = [f"Median of {RUNS} alternating runs of {RUN_TOKENS} tokens, passes as wide as they need be:"]
    for name, speed in speeds.items():
        ratio = speed / speeds["plain"] if speeds["plain"] else 1.0
        change = f"{1 / ratio:.2f} times slower" if ratio < 1 else f"{ratio:.2f} times faster"
        same = "no difference that this short a measurement can tell" if abs(ratio - 1) < NOISE else change
        lines.append(f"  {name:<16}{speed:5.1f} tokens/s" + ("" if name == "plain" else f", {same}"))
    lines.append(
        f"A draft step reads {cost:.0%} of what a plain step reads, so drafting gains where more than {cost:.0%} of "
        f"the drafts are accepted; {acceptance:.0%} of those shown were. The governor, on by default, drafts where "
        "that is so, copies what can be looked up in the text, and else decodes plainly."
    )
    return "\n".join(lines)


def _explain(difference: Difference) -> str:
    dtype, wide = (str(each).removeprefix("torch.") for each in (difference.dtype, difference.reference_dtype))
    verdict = "a near-tie that rounding decides" if difference.is_near_tie else "NOT explained by rounding: a bug"
    return (
        f"They part at token {difference.index + 1}, {verdict}: in {wide} the two tokens' logits are "
        f"{difference.gap:.3f} apart; {dtype} moves logits there by up to {difference.logit_error:.3f} and knows them "
        f"in steps of {difference.rounding_step:g}."
    )
