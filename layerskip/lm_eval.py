"""lm-evaluation-harness on a draft plan: generation tasks decode speculatively, and their scores must stay the same.

    python -m layerskip.lm_eval --model layerskip --model_args pretrained=PATH,plan=plan.json --tasks gsm8k

It is in the package, because the harness finds a model by an import. Everything but the decoding is the harness's own
"hf" model: how it tokenises, truncates, batches, cuts at stop strings, and all that it scores without generating. So a
score that differs from that of ``--model hf`` is a difference in what was decoded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from layerskip.in_transformers import custom_generate
from layerskip.stats import DecodeStats

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(
        f'got no lm-evaluation-harness ({error}); expected lm_eval 0.4.13 or newer: pip install "layerskip[lm-eval]"'
    ) from error

__all__ = ["LayerSkipLM"]


@register_model("layerskip")
class LayerSkipLM(HFLM):
    """The harness's "hf" model, decoding by `custom_generate`.

    Attributes:
        stats: of every batch that was decoded.
    """

    def __init__(
        self,
        *args: Any,
        plan: Any = None,
        assistant_early_exit: int | None = None,
        prompt_lookup_num_tokens: int | None = None,
        governor: str | None = None,
        acceptance_rule: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        """`args` and `kwargs` as for the "hf" model; the others as in `Model.generate`, and no plan decodes plainly."""
        super().__init__(*args, **kwargs)
        drafting = {"plan": plan, "governor": governor, "acceptance_rule": acceptance_rule, "seed": seed}
        switches = {
            "assistant_early_exit": assistant_early_exit,
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        }
        self._drafting = {name: value for name, value in drafting.items() if value is not None}
        self._switches = {name: value for name, value in switches.items() if value is not None}
        self.stats: list[DecodeStats] = []

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        """Token ids (batch, length), as the "hf" model's.

        Its own criterion for stop strings keeps a state for a whole batch and ends all rows together. Here each row
        ends with its first stop string, behind which the harness cuts the text anyway.
        """
        decode = partial(custom_generate, stop_strings=stop or None, tokenizer=self.tokenizer, **self._drafting)
        output: Any = super()._model_generate(
            context, max_length, [], custom_generate=decode, return_dict_in_generate=True,
            **self._switches, **generation_kwargs,
        )  # fmt: skip
        self.stats.append(output.result.stats)
        return output.sequences

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside the scores, with what drafting came to."""
        rounds, tokens = sum(each.rounds for each in self.stats), sum(each.round_tokens for each in self.stats)
        settings = {name: str(value) for name, value in (self._drafting | self._switches).items()}
        return {
            **super().get_model_info(),
            **{f"layerskip_{name}": value for name, value in settings.items()},
            "layerskip_drafted": sum(each.proposed for each in self.stats),
            "layerskip_accepted": sum(each.accepted for each in self.stats),
            "layerskip_tokens_per_round": tokens / rounds if rounds else None,
        }


if __name__ == "__main__":
    cli_evaluate()
