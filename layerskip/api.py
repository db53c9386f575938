"""The front door: load or wrap a checkpoint, then generate or stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip.drafters import DraftContext, Drafter, ModelDrafter, SelfDrafter
from layerskip.engine import Commit, Engine
from layerskip.errors import InputError, PlanError, PlanMismatchError, UnsupportedModelError
from layerskip.identity import ModelIdentity, identify
from layerskip.models.decoder import Decoder
from layerskip.models.loading import load_checkpoint
from layerskip.plan import DraftPlan
from layerskip.processing import make_processors
from layerskip.request import CallOptions, Request, make_request
from layerskip.result import GenerationResult
from layerskip.rules import make_rule
from layerskip.sampling import Sampler
from layerskip.state import DecodeState
from layerskip.stats import DecodeStats
from layerskip.stopping import make_stopping
from layerskip.stream import Stream

__all__ = ["Model", "load", "wrap"]


def load(checkpoint: str | os.PathLike[str], **options: Any) -> Model:
    """Load a checkpoint from a folder, a GGUF file or a hub id.

    Args:
        checkpoint: where it is.
        options: as in `layerskip.models.loading.load_checkpoint`: dtype, device, device_map, gguf_file, revision,
            trust_remote_code, allow_pickled_weights.

    Raises:
        UnsupportedModelError: the architecture is not in the table of families.
        CheckpointError: weights or tokenizer are missing, corrupt, or stored in a form that is refused.
    """
    return Model(*load_checkpoint(checkpoint, **options))


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Model:
    """Use a transformers model that is already in memory; its weights are shared and nothing of it is changed.

    Args:
        tokenizer: needed only for text.
    """
    return Model(model, tokenizer)


class Model:
    """A causal language model that can draft for itself.

    It holds no state between calls, so several threads may use it, each with its own plan.

    Attributes:
        hf_model: the transformers model whose weights are used.
        tokenizer: None when only token ids are used.
        decoder: its blocks, to be run one by one.
    """

    def __init__(self, hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Prefer `load` and `wrap`."""
        if not isinstance(hf_model, PreTrainedModel):
            raise UnsupportedModelError(
                f"got a {type(hf_model).__name__}; expected a transformers model (PreTrainedModel). "
                "For a path or hub id use layerskip.load."
            )
        self.hf_model = hf_model
        self.tokenizer = tokenizer
        self.decoder = Decoder(hf_model)
        self._draft_models: dict[Any, Model] = {}
        self._loading = threading.Lock()

    @cached_property
    def identity(self) -> ModelIdentity:
        """Architecture and fingerprint, by which plans are checked."""
        return identify(self.hf_model)

    def generate(self, inputs: Any = None, *, streamer: Any = None, **options: Unpack[CallOptions]) -> GenerationResult:
        """Decode to the end.

        Args:
            inputs: a string (tokenised as it is), chat messages, token ids (list or tensor), or a list of one kind of
                these; transformers' `input_ids` and `attention_mask` are understood as well.
            streamer: a transformers streamer; it gets the prompt, then every token as it is committed.
            options: see `layerskip.request.CallOptions`.

        Raises:
            LayerSkipError: one of its kinds, before the model has run, for whatever is wrong with the call.
        """
        request = self._request(inputs, options)
        if streamer is not None:
            _refuse_streamed_batch(request)
        engine, commits = self._engine(request), []
        if streamer is not None:
            streamer.put(torch.tensor(request.prompts))
        for commit in engine:
            commits.append(commit)
            if streamer is not None:
                streamer.put(torch.tensor([commit.token_id]))
        if streamer is not None:
            streamer.end()
        return self._result(request, engine, commits)

    def stream(self, inputs: Any = None, **options: Unpack[CallOptions]) -> Stream:
        """Decode one prompt piece by piece: iterate over the return value; then read its `result`.

        Arguments and errors as in `generate`.
        """
        if self.tokenizer is None:
            raise InputError("got no tokenizer to make text with; pass one to wrap(model, tokenizer), or use generate.")
        request = self._request(inputs, options)
        _refuse_streamed_batch(request)
        engine = self._engine(request)
        return Stream(engine, self.tokenizer, lambda commits: self._result(request, engine, commits))

    def _request(self, inputs: Any, options: Mapping[str, Any]) -> Request:
        own_config: Any = self.hf_model.generation_config
        decoder = self.decoder
        request = make_request(inputs, options, self.tokenizer, own_config, decoder.vocab_size, decoder.max_positions)
        if request.plan is not None:
            request.plan.check(self.identity)
        return request

    def _engine(self, request: Request) -> Engine:
        """Everything that one run needs, made anew: a call shares nothing with another but the weights."""
        decoder, settings, plan = self.decoder, request.settings, request.plan
        lengths = [len(prompt) for prompt in request.prompts]
        limits = [min(settings.longest(length), decoder.max_positions) for length in lengths]
        max_drafts = plan.num_draft_tokens if plan else 0
        # Room for the longest row and one pass beyond it: the last pass may draft past the end.
        cache = decoder.new_cache(len(lengths), max(limits) + (request.pass_width or max_drafts + 1))
        context = DraftContext(
            sampler=Sampler(
                make_processors(settings, request.own_processors, lengths, str(decoder.device)), settings.do_sample
            ),
            rule=make_rule(
                request.acceptance_rule, torch.tensor(request.seeds, device=decoder.device), settings.do_sample
            ),
            eos_ids=torch.tensor(settings.eos_token_id, dtype=torch.int64, device=decoder.device),
            confidence_threshold=plan.confidence_threshold if plan else 0.0,
            vocab_size=decoder.vocab_size,
        )
        return Engine(
            decoder=decoder,
            state=DecodeState(request.prompts, limits, cache, decoder.device),
            context=context,
            stopping=make_stopping(settings, request.own_criteria, self.tokenizer, lengths, decoder.max_positions),
            drafter=self._drafter(plan, context),
            max_drafts=max_drafts,
            pass_width=request.pass_width,
            stats=DecodeStats(accepted_histogram=[0] * (max_drafts + 1)),
        )

    def _drafter(self, plan: DraftPlan | None, context: DraftContext) -> Drafter | None:
        if plan is None:
            return None
        if plan.is_self_draft:
            return SelfDrafter(self.decoder, plan.path(self.decoder.num_blocks), context)
        return ModelDrafter(self._draft_model(plan.draft_model).decoder, context)

    def _draft_model(self, source: Any) -> Model:
        """The draft model that a plan names, loaded once, in this model's dtype and on its device."""
        if isinstance(source, (Model, PreTrainedModel)):
            draft = source if isinstance(source, Model) else Model(source)
        elif not isinstance(source, str):
            raise PlanError(
                f"got a draft model of type {type(source).__name__}; expected a path, a hub id, or a loaded model."
            )
        else:
            with self._loading:
                if source not in self._draft_models:
                    self._draft_models[source] = load(source, dtype=self.decoder.dtype, device=self.decoder.device)
            draft = self._draft_models[source]
        _check_vocabularies(self, draft)
        return draft

    def _result(self, request: Request, engine: Engine, commits: list[Commit]) -> GenerationResult:
        rows: list[list[Commit]] = [[] for _ in request.prompts]
        for commit in commits:
            rows[commit.row].append(commit)
        new_token_ids = [[commit.token_id for commit in row] for row in rows]
        return GenerationResult(
            sequences=_padded(request, new_token_ids).to(self.decoder.device),
            new_token_ids=new_token_ids,
            drafted=[[commit.drafted for commit in row] for row in rows],
            finish_reasons=[row[-1].finish_reason or "" for row in rows],
            stats=engine.stats,
            settings=request.effective_settings(),
            plan=request.plan,
            tokenizer=self.tokenizer,
        )


def _refuse_streamed_batch(request: Request) -> None:
    if len(request.prompts) > 1:
        raise InputError(
            f"got {len(request.prompts)} rows to stream; expected one. Stream them one by one, or use generate."
        )


def _check_vocabularies(target: Model, draft: Model) -> None:
    """Token ids must mean the same in both; sizes may differ by padding if the tokenizers agree."""
    if target.tokenizer is not None and draft.tokenizer is not None:
        same = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
    else:
        same = target.decoder.vocab_size == draft.decoder.vocab_size
    if not same:
        raise PlanMismatchError(
            f"got a draft model with another vocabulary ({draft.decoder.vocab_size:,} ids) than the model's "
            f"({target.decoder.vocab_size:,} ids); expected the same token ids. Draft with a model of the same family."
        )


def _padded(request: Request, new_token_ids: list[list[int]]) -> Tensor:
    """Prompts padded on the left, outputs on the right, as transformers lays them out: (batch, length), int64."""
    settings = request.settings
    pad = settings.pad_token_id if settings.pad_token_id is not None else (*settings.eos_token_id, 0)[0]
    longest_prompt = max(len(prompt) for prompt in request.prompts)
    longest_output = max(len(row) for row in new_token_ids)
    return torch.tensor(
        [
            [pad] * (longest_prompt - len(prompt)) + prompt + row + [pad] * (longest_output - len(row))
            for prompt, row in zip(request.prompts, new_token_ids, strict=True)
        ]
    )
