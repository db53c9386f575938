"""The front door: load or wrap a checkpoint, then generate or stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerskip.assembly import MakeDrafter, PlannedDrafter, build_engine
from layerskip.compiled import CompiledForward
from layerskip.decoding import check_stream, check_streamer, decode, make_result
from layerskip.drafters import (
    LOOKUP_PRIORS,
    HeadsDrafter,
    LookaheadDrafter,
    LookupDrafter,
    ModelDrafter,
    SelfDrafter,
)
from layerskip.drafters.lookahead import Sizes
from layerskip.engine import Engine
from layerskip.errors import InputError, PlanError, PlanMismatchError, SettingError, UnsupportedModelError
from layerskip.governor import Source
from layerskip.governor.acceptance import MEASURED_WEIGHT
from layerskip.identity import ModelIdentity, identify
from layerskip.memory import Memory
from layerskip.models.adapter import Adapter, TrainedPart
from layerskip.models.adapter_file import load_adapter
from layerskip.models.decoder import Decoder
from layerskip.models.heads import Heads
from layerskip.models.inspection import Inspection, inspect_model
from layerskip.models.loading import Device, DeviceMap, load_checkpoint
from layerskip.models.preparation import Preparation
from layerskip.plan import DraftPlan
from layerskip.request import CallOptions, Request, make_request
from layerskip.result import GenerationResult
from layerskip.session import Session
from layerskip.static_pool import StaticPool
from layerskip.stream import Stream

__all__ = ["Model", "load", "wrap"]


def load(
    checkpoint: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: Device | None = None,
    device_map: DeviceMap | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickled_weights: bool = False,
    prepare: bool = True,
) -> Model:
    """Load a checkpoint from a folder, a GGUF file or a hub id.

    Args:
        prepare: bring the weights into the form that decodes fastest (`Model.prepare`); they are held once, in that
            form. It takes about 3 s a gigabyte on a CPU. False leaves them as transformers loaded them.

    Further arguments and errors as in `layerskip.models.loading.load_checkpoint`.
    """
    model = Model(
        *load_checkpoint(
            checkpoint,
            dtype=dtype,
            device=device,
            device_map=device_map,
            gguf_file=gguf_file,
            revision=revision,
            trust_remote_code=trust_remote_code,
            allow_pickled_weights=allow_pickled_weights,
        )
    )
    if prepare:
        model._prepare_in_place()
    return model


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Model:
    """Use a transformers model that is already in memory; its weights are shared and nothing of it is changed.

    What the model consists of now is what will run: after its modules are replaced (an adapter, a quantiser) or it is
    moved or cast, wrap it again. `Model.prepare` makes it faster, for the price of copies.

    Args:
        tokenizer: needed only for text.

    Raises:
        UnsupportedModelError: its architecture is not in the table of families, or hooks on whole layers would be
            passed by.
    """
    return Model(model, tokenizer)


class Model:
    """A causal language model that can draft for itself.

    It holds no state between calls, so several threads may use it, each with its own plan.

    Attributes:
        tokenizer: None when only token ids are used.
        decoder: its blocks, to be run one by one.
        static_pool: recordings (CUDA graphs) that are kept from call to call, with their memory; replace it by a larger
            one if more than two kinds of call alternate.
        compiled: programs of the calls with `compile=True`, kept from call to call with their copies of the weights;
            `compiled.clear()` lets them go.
    """

    def __init__(self, hf_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Prefer `load` and `wrap`."""
        if not isinstance(hf_model, PreTrainedModel):
            raise UnsupportedModelError(
                f"got a {type(hf_model).__name__}; expected a transformers model (PreTrainedModel). "
                + (
                    "Pass model.get_base_model(), which holds the LoRA layers, or merge them (merge_and_unload)."
                    if hasattr(hf_model, "get_base_model")
                    else "For a path or hub id use layerskip.load."
                )
            )
        self._hf_model = hf_model
        self.tokenizer = tokenizer
        self.decoder = Decoder(hf_model)
        self._draft_models: dict[Any, Model] = {}
        self._adapters: dict[tuple[str, int], TrainedPart] = {}
        self._loading = threading.Lock()
        self.static_pool = StaticPool()
        self.compiled = CompiledForward(self.decoder)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Architecture and fingerprint, by which plans are checked."""
        return identify(self.hf_model)

    @property
    def name(self) -> str:
        """Where the model came from: a path, a hub id, or nothing."""
        return str(self._hf_model.name_or_path)

    @property
    def hf_config(self) -> Any:
        """The checkpoint's config, to be read only."""
        return self._hf_model.config

    @cached_property
    def inspection(self) -> Inspection:
        """Sizes and parameter counts."""
        return inspect_model(self._hf_model)

    @property
    def hf_model(self) -> PreTrainedModel:
        """The transformers model whose weights are used.

        If `load` released its weights for a faster form, the first access brings them back, to be held beside it.
        """
        self.decoder.restore_weights()
        return self._hf_model

    @property
    def preparation(self) -> Preparation:
        """What `prepare` (or `load`) did to the weights, and what it cost."""
        return self.decoder.preparation

    def prepare(self, *, pack: bool | None = None, huge_pages: bool = True) -> Preparation:
        """Make decoding faster by copies of the weights: fused where they read the same input, on the CPU packed.

        On SmolLM2 in bfloat16 packing halves the time of a linear; it takes 0.15 s and as much memory as the weights.
        Call it once, while nothing is decoding; what is prepared stays as it is. After it, changes to the model's
        weights are refused, because they would not act (but for writes to a parameter's `.data`, which torch does not
        count).

        Args:
            pack: None packs where it can be done, False fuses only, True packs or raises.
            huge_pages: on Linux, move the new weights into pages of 2 MiB.

        Raises:
            SettingError: `pack` is true and packing cannot be done; the message says why.
        """
        if not isinstance(pack, bool | None):
            raise SettingError(f"got pack={pack!r}; expected True, False, or None to pack where it can be done.")
        if not isinstance(huge_pages, bool):
            raise SettingError(f"got huge_pages={huge_pages!r}; expected True or False.")
        self.static_pool.clear()  # what is recorded reads the weights as they were
        self.compiled.clear()
        self._adapters.clear()
        return self.decoder.prepare(pack=pack, huge_pages=huge_pages)

    def _prepare_in_place(self) -> None:
        """Prepare weights that nobody else has seen."""
        self.identity  # noqa: B018 - reads the weights, while they can be read
        self.decoder.prepare(in_place=True)

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
        check_streamer(streamer)
        return self.decode(self.check(inputs, **options), streamer)

    def decode(self, request: Request, streamer: Any = None) -> GenerationResult:
        """Decode a checked call to the end; `streamer` as in `generate`."""
        if streamer is not None:
            _refuse_streamed_batch(request)
        return decode(request, self.engine(request), self.tokenizer, streamer)

    def stream(self, inputs: Any = None, **options: Unpack[CallOptions]) -> Stream:
        """Decode one prompt piece by piece: iterate over the return value; then read its `result`.

        Arguments and errors as in `generate`.
        """
        tokenizer = check_stream(options, self.tokenizer)
        request = self.check(inputs, **options)
        _refuse_streamed_batch(request)
        engine = self.engine(request)
        return Stream(iter(engine), tokenizer, partial(make_result, request, engine, tokenizer))

    def check(self, inputs: Any = None, **options: Unpack[CallOptions]) -> Request:
        """Check a call without running it; arguments and errors as in `generate`, but for a draft model's own."""
        self.decoder.refuse_changes()
        own_config: Any = self._hf_model.generation_config
        named: Mapping[str, Any] = options
        decoder = self.decoder
        request = make_request(inputs, named, self.tokenizer, own_config, decoder.vocab_size, decoder.max_positions)
        if request.plan is not None:
            request.plan.check(self.identity)
        return request

    def check_plan(self, plan: DraftPlan) -> None:
        """Make sure that `plan` can be used on this model; a draft model that it names is loaded for that.

        Raises:
            PlanMismatchError: it was made for another model, or does not fit this one.
            CheckpointError: its draft model cannot be loaded.
        """
        plan.check(self.identity)
        if plan.draft_model is not None:
            self.draft_model(plan)
        if plan.adapter is not None:
            self.adapter(plan)

    def adapter(self, plan: DraftPlan) -> TrainedPart:
        """The trained blocks or heads that `plan` names, read once, in this model's dtype, prepared as its weights are.

        Raises:
            PlanMismatchError: they were trained for another model, or behind another exit.
            CheckpointError: the file cannot be read.
        """
        if self.decoder.is_spread:
            raise UnsupportedModelError(
                "got a plan with trained blocks for a model on several devices; expected one device. Load it without "
                "device_map."
            )
        path = Path(str(plan.adapter))
        key = (str(path), path.stat().st_mtime_ns if path.exists() else 0)  # it may be trained further meanwhile
        with self._loading:
            if key not in self._adapters:
                adapter = load_adapter(path, self._hf_model, self.decoder.dtype)
                if self.preparation != Preparation():
                    adapter.prepare(pack=self.preparation.packed > 0)
                self._adapters = {other: each for other, each in self._adapters.items() if other[0] != key[0]}
                self._adapters[key] = adapter
            adapter = self._adapters[key]
        if adapter.spec.exit_layer != plan.exit_layer:
            raise PlanMismatchError(
                f"got a plan with exit_layer={plan.exit_layer} and an adapter that was trained behind "
                f"{adapter.spec.exit_layer} layers; expected the same. Load the plan that was written beside it."
            )
        return adapter

    def draft_model(self, plan: DraftPlan) -> Model:
        """The draft model that `plan` names, loaded once, in this model's dtype and on its device.

        Raises:
            PlanError: it is neither a path nor a hub id nor a model, or its vocabulary or device is another.
            CheckpointError: it cannot be loaded.
        """
        source = plan.draft_model
        if not isinstance(source, (str, os.PathLike, Model, PreTrainedModel)):
            raise PlanError(
                f"got a draft model of type {type(source).__name__}; expected a path, a hub id, or a loaded model."
            )
        with self._loading:
            if source not in self._draft_models:
                if isinstance(source, Model):
                    draft = source
                elif isinstance(source, PreTrainedModel):
                    draft = Model(source)
                else:
                    draft = load(source, dtype=self.decoder.dtype, device=self.decoder.device)
                _check_draft_model(self, draft)
                self._draft_models[source] = draft
            return self._draft_models[source]

    def draft_cost(self, plan: DraftPlan) -> float:
        """Cost of a draft step in plain steps, by the parameters that each reads (`Inspection.draft_cost`)."""
        if plan.draft_model is not None:
            return self.draft_model(plan).inspection.step_parameters / self.inspection.step_parameters
        ids = None if plan.draft_vocabulary is None else len(plan.draft_vocabulary)
        trained = 0 if plan.adapter is None else self.adapter(plan).num_parameters / self.inspection.step_parameters
        return self.inspection.draft_cost(plan.path(self.decoder.num_blocks), ids) + trained

    def session(self, *, system: str | None = None, **options: Unpack[CallOptions]) -> Session:
        """Begin a conversation that keeps what it has read from call to call (`Session`).

        Args:
            system: what the system prompt says; it is read now.
            options: for all its calls, each of which may say otherwise.

        Raises:
            LayerSkipError: as `generate` does.
        """
        session = Session(self, options)
        if system is not None:
            session.read([{"role": "system", "content": system}])
        return session

    def engine(self, request: Request, memory: Memory | None = None) -> Engine:
        """An engine for a checked call, for those who want to look between two rounds; it decodes once.

        Args:
            memory: see `build_engine`.
        """
        planned = {} if request.plan is None else self._planned(request.plan)
        return build_engine(self.decoder, request, planned, self.tokenizer, self.static_pool, self.compiled, memory)

    def _planned(self, plan: DraftPlan) -> dict[str, PlannedDrafter]:
        """The drafters of `plan`; a draft model is loaded now, before any time is counted."""
        planned, measured = {}, plan.acceptance_by_offset
        # What was measured is no hope but knowledge, until the text at hand says otherwise.
        prior = (measured, MEASURED_WEIGHT) if measured else (Source.priors, Source.prior_weight)
        if plan.is_self_draft:
            path = plan.path(self.decoder.num_blocks)
            adapter, most = None if plan.adapter is None else self.adapter(plan), plan.num_draft_tokens
            if isinstance(adapter, Heads):
                make: MakeDrafter = partial(HeadsDrafter, self.decoder, adapter, vocabulary=plan.draft_vocabulary)
                most = min(most, adapter.spec.num_heads)
            else:
                assert adapter is None or isinstance(adapter, Adapter)
                make = partial(SelfDrafter, self.decoder, path, vocabulary=plan.draft_vocabulary, adapter=adapter)
            ratio = plan.draft_ratio or self.draft_cost(plan)
            kind: Any = {"is_one_step": isinstance(adapter, Heads), "reads_texts": isinstance(adapter, Adapter)}
            planned["self"] = PlannedDrafter(make, ratio, most, *prior, adapter, plan.num_siblings, **kind)
        elif plan.draft_model is not None:
            draft = self.draft_model(plan)
            draft.decoder.refuse_changes()
            make, ratio = partial(ModelDrafter, draft.decoder), self.draft_cost(plan)
            planned["model"] = PlannedDrafter(
                make, ratio, plan.num_draft_tokens, *prior, num_siblings=plan.num_siblings, reads_texts=True
            )
        if plan.lookup_tokens:  # last: it writes its drafts over those of rows that the others need not have drafted
            planned["lookup"] = PlannedDrafter(LookupDrafter, 0.0, plan.lookup_tokens, LOOKUP_PRIORS)
        if plan.lookahead_window:
            sizes = Sizes.of(plan)
            ahead = partial(LookaheadDrafter, sizes=sizes, reads=plan.lookahead_text)
            prior = (Source.priors, MEASURED_WEIGHT)  # hopes that outlast the rounds in which there are few n-grams yet
            planned["lookahead"] = PlannedDrafter(ahead, 0.0, plan.most_drafts, *prior, width=sizes.width)
        return planned


def _refuse_streamed_batch(request: Request) -> None:
    if len(request.prompts) > 1:
        raise InputError(
            f"got {len(request.prompts)} rows to stream; expected one. Stream them one by one, or use generate."
        )


def _check_draft_model(target: Model, draft: Model) -> None:
    """Token ids must mean the same in both; sizes may differ by padding if the tokenizers agree."""
    ours, theirs = target.decoder, draft.decoder
    if ours.device != theirs.device:
        raise PlanMismatchError(
            f"got a draft model on {theirs.device} for a model on {ours.device}; expected one device. Move one of them."
        )
    if target.tokenizer is not None and draft.tokenizer is not None:
        same, hint = target.tokenizer.get_vocab() == draft.tokenizer.get_vocab(), ""
    else:
        same = ours.vocab_size == theirs.vocab_size
        hint = " If they differ by padding only, wrap both with their tokenizers: layerskip.wrap(model, tokenizer)."
    if not same:
        raise PlanMismatchError(
            f"got a draft model with another vocabulary ({theirs.vocab_size:,} ids) than the model's "
            f"({ours.vocab_size:,} ids); expected the same token ids. Draft with a model of the same family.{hint}"
        )
