"""`custom_generate`: transformers' own `generate` returns what it returns without it, and what it drops is refused."""

import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MaxTimeCriteria,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TextStreamer,
    TopPLogitsWarper,
    pipeline,
)

import layerskip
from layerskip import DraftPlan, InputError, PlanMismatchError, SettingError, UnsupportedModelError, wrapped_models
from layerskip.in_transformers import CustomGenerateOutput
from layerskip.wrapped_models import wrapped_model
from tests.chi_square import chi_square_p_value
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model
from tests.toy_tokenizer import character_tokenizer

OURS = {"custom_generate": layerskip.custom_generate}
PLANS = {
    "exit": DraftPlan.exit(2),
    "all": DraftPlan.skip(num_draft_tokens=5),
    "lookup": DraftPlan.lookup(),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def padded(lengths=(9, 4, 7)) -> dict[str, torch.Tensor]:
    """A batch as a tokenizer pads it, on the left."""
    longest = max(lengths)
    rows = [prompt(length, seed=length)[0] for length in lengths]
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.tensor([0] * (longest - length) + [1] * length) for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


def one(length: int = 9) -> dict[str, torch.Tensor]:
    return {"input_ids": prompt(length), "attention_mask": torch.ones(1, length, dtype=torch.int64)}


def compare(inputs, plan=None, model: PreTrainedModel | None = None, **options) -> torch.Tensor:
    """The output with and without, which must be the same."""
    model = agreeing_model("llama") if model is None else model
    if not options.keys() & {"max_length", "max_new_tokens", "generation_config"}:
        options["max_new_tokens"] = 16
    options = {"do_sample": False, **options}
    drafting = {} if plan is None else {"plan": plan, "governor": "off"}
    ours, theirs = model.generate(**inputs, **options, **OURS, **drafting), model.generate(**inputs, **options)
    assert torch.equal(ours, theirs)
    assert ours.dtype == theirs.dtype and ours.device == theirs.device
    return ours


class TestEqualsGenerate:
    @pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
    def test_greedy(self, family):
        for plan in (None, *PLANS.values()):
            compare(one(), plan, agreeing_model(family), eos_token_id=None)

    @every_plan
    @pytest.mark.parametrize("inputs", [padded(), padded((3, 9)), padded((5, 5))], ids=["three", "two", "equal"])
    def test_a_batch_that_is_padded_on_the_left(self, inputs, plan):
        compare(inputs, plan, eos_token_id=None)

    @every_plan
    @pytest.mark.parametrize("pad", [0, None], ids=["pad", "no pad"])
    @pytest.mark.parametrize("eos", [[2], list(range(3, 61, 7)), 5], ids=["one", "many", "an int"])
    def test_ends_of_text(self, plan, eos, pad):
        """Rows end at different times; without a pad id transformers pads with the first end of text."""
        model = copy.deepcopy(agreeing_model("llama"))
        model.generation_config.pad_token_id = None  # a call cannot unset what the checkpoint sets
        compare(padded(), plan, model, eos_token_id=eos, pad_token_id=pad)

    def test_a_pad_id_that_ends_texts(self):
        compare(padded(), DraftPlan.exit(2), eos_token_id=list(range(3, 61, 7)), pad_token_id=3)

    @pytest.mark.parametrize("length", [{"max_length": 14}, {"max_new_tokens": 1}, {"max_new_tokens": 30}])
    def test_lengths_count_as_transformers_counts_them(self, length):
        compare(padded(), DraftPlan.exit(2), **length, eos_token_id=None)

    def test_several_sequences_for_each_prompt(self):
        inputs = padded()
        options = {"num_return_sequences": 2, "do_sample": True, "top_k": 1, "max_new_tokens": 12}
        output = compare(inputs, DraftPlan.exit(2), **options)
        assert output.shape[0] == 6

    def test_a_padded_single_row_and_holes(self):
        inputs = padded((9, 5))
        compare({name: value[1:] for name, value in inputs.items()}, DraftPlan.exit(2), eos_token_id=None)
        inputs["attention_mask"][0, 4] = 0
        compare(inputs, DraftPlan.exit(2), eos_token_id=None)

    @pytest.mark.parametrize(
        "controls",
        [
            {"repetition_penalty": 1.8},
            {"no_repeat_ngram_size": 2},
            {"encoder_repetition_penalty": 0.4},
            {"encoder_no_repeat_ngram_size": 1},
            {"min_length": 20, "eos_token_id": list(range(3, 61, 3))},
            {"min_new_tokens": 7, "eos_token_id": list(range(3, 61, 3))},
            {"forced_eos_token_id": 11},
            {"suppress_tokens": list(range(3, 40, 2)), "begin_suppress_tokens": list(range(20, 50))},
            {"sequence_bias": [[[7], 9.0], [[7, 8], 9.0]]},
            {"bad_words_ids": [[each] for each in range(3, 30)]},
            {"exponential_decay_length_penalty": (2, 2.5), "eos_token_id": [5]},
            {"renormalize_logits": True, "remove_invalid_values": True},
            {"prefix_allowed_tokens_fn": lambda row, ids: [3 + (7 * row + len(ids)) % 50, 4 + row]},
        ],
        ids=lambda controls: next(iter(controls)),
    )
    def test_every_processor_that_generate_makes(self, controls):
        """In a padded batch it counts padding, and may hold something for each row."""
        plain = agreeing_model("llama").generate(**padded(), max_new_tokens=16, do_sample=False)
        changed = compare(padded(), DraftPlan.exit(2), **controls)
        if "renormalize_logits" not in controls:
            assert not torch.equal(changed, plain), "the control does nothing here"
        compare(padded((6, 6)), DraftPlan.skip(num_draft_tokens=5), **controls)
        compare(one(), DraftPlan.lookup(), **controls)

    def test_rows_of_a_prompt_share_its_number(self):
        """With several sequences for each prompt, the caller's function is told the prompt's number."""
        allow = lambda row, ids: [3 + row, 30 + len(ids) % 9]  # noqa: E731
        options = {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
        compare(padded((6, 6)), DraftPlan.exit(2), prefix_allowed_tokens_fn=allow, **options)

    def test_the_callers_processors_and_criteria(self):
        """They see the padded text, as in transformers; a custom one takes the place of generate's own."""

        class Odd(LogitsProcessor):
            def __call__(self, input_ids, scores):
                return scores if input_ids.shape[1] % 2 else scores.flip(-1)

        class Sum(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return input_ids.sum(dim=-1) % 11 == 0

        options = {"logits_processor": [Odd(), RepetitionPenaltyLogitsProcessor(1.3)], "repetition_penalty": 2.0}
        for inputs in (padded((9, 9)), one()):
            compare(inputs, DraftPlan.exit(2), **options, stopping_criteria=[MaxTimeCriteria(60)])
        output = compare(one(), DraftPlan.exit(2), stopping_criteria=[Sum()], max_new_tokens=60, eos_token_id=None)
        assert output.shape[1] < 69
        compare(padded(), DraftPlan.exit(2), logits_processor=[Odd()], stopping_criteria=[Sum()], eos_token_id=[5])

    def test_a_generation_config(self):
        config = GenerationConfig(max_new_tokens=12, repetition_penalty=1.7, eos_token_id=[5, 9], pad_token_id=0)
        compare(padded(), DraftPlan.exit(2), generation_config=config)

    def test_what_changes_no_token(self):
        compare(one(), DraftPlan.exit(2), use_cache=True, synced_gpus=False, prefill_chunk_size=4)
        compare(one(), DraftPlan.exit(2), cache_implementation="static")

    def test_no_prompt_is_the_bos_token(self):
        compare({}, DraftPlan.exit(2), bos_token_id=1)
        assert compare({}, DraftPlan.exit(2), bos_token_id=1, forced_bos_token_id=11)[0, 1] == 11


class TestSampling:
    def test_is_distributed_as_generate_samples(self):
        """Pairs of tokens behind one prompt against transformers' own distribution; the seed is fixed."""
        model, controls = agreeing_model("llama"), {"temperature": 1.5, "top_k": 4, "repetition_penalty": 1.2}
        torch.manual_seed(0)
        rows = model.generate(
            **one(), do_sample=True, max_new_tokens=2, num_return_sequences=1500, eos_token_id=None, **controls,
            **OURS, plan=DraftPlan.exit(3), governor="off",
        )[:, -2:]  # fmt: skip
        probs = torch.zeros(61, 61, dtype=torch.float64)
        for token, probability in enumerate(self.own_distribution(model, prompt(), controls)):
            if probability > 0:
                text = torch.cat((prompt(), torch.tensor([[token]])), dim=1)
                probs[token] = probability * self.own_distribution(model, text, controls)
        counts = torch.bincount(rows[:, 0] * 61 + rows[:, 1], minlength=61 * 61).view(61, 61)
        assert (probs > 0).sum() == 16
        assert chi_square_p_value(counts, probs) > 1e-3

    @staticmethod
    def own_distribution(model, ids, controls) -> torch.Tensor:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=1, eos_token_id=None,
            output_scores=True, return_dict_in_generate=True, **controls,
        )  # fmt: skip
        return output.scores[0][0].double().softmax(-1)

    def test_seeds(self):
        call = functools.partial(
            agreeing_model("llama").generate, **padded(), do_sample=True, max_new_tokens=12, **OURS,
            acceptance_rule="invariant", eos_token_id=None,
        )  # fmt: skip
        for plan in PLANS.values():
            assert torch.equal(call(seed=3, plan=plan, governor="off"), call(seed=3))
        assert not torch.equal(call(seed=3), call(seed=4))
        torch.manual_seed(5)
        again = call()
        torch.manual_seed(5)
        assert torch.equal(call(), again)

    def test_warpers_become_settings(self):
        """As processors they would be unknown code."""
        result = self.result(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, typical_p=0.8, epsilon_cutoff=0.01)
        controls = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8}
        assert result.settings.items() >= (controls | {"epsilon_cutoff": 0.01, "do_sample": True}).items()
        assert self.result(top_k=None, temperature=2.0).settings["top_k"] in (0, 50)  # as the version defaults
        last = self.result(logits_processor=[TopPLogitsWarper(0.4, min_tokens_to_keep=3)], top_k=5).settings
        assert (last["top_p"], last["top_k"]) == (1.0, 5)

    @staticmethod
    def result(**options):
        return agreeing_model("llama").generate(
            **one(), do_sample=True, max_new_tokens=3, return_dict_in_generate=True, **options, **OURS
        ).result  # fmt: skip


class TestOutput:
    def test_a_dictionary(self):
        options = {"max_new_tokens": 16, "return_dict_in_generate": True, "eos_token_id": None}
        output = agreeing_model("llama").generate(**padded(), **options, **OURS, plan=DraftPlan.exit(2), governor="off")
        assert isinstance(output, CustomGenerateOutput)
        assert torch.equal(output.sequences, agreeing_model("llama").generate(**padded(), **options).sequences)
        assert output.result.plan == DraftPlan.exit(2)
        assert output.result.stats.accepted > 0
        assert output.result.finish_reasons == ["length"] * 3

    @pytest.mark.parametrize("given", [("output_scores",), ("output_logits",), ("output_scores", "output_logits")])
    def test_scores_are_those_of_the_model_inside_accepted_drafts_too(self, given):
        options = {"max_new_tokens": 12, "return_dict_in_generate": True, "eos_token_id": None}
        options |= dict.fromkeys(given, True) | {"repetition_penalty": 1.3}
        theirs = agreeing_model("llama").generate(**padded(), **options)
        ours = agreeing_model("llama").generate(**padded(), **options, **OURS, plan=DraftPlan.exit(2), governor="off")
        for name in ("scores", "logits"):
            assert (getattr(ours, name) is None) == (getattr(theirs, name) is None) == (f"output_{name}" not in given)
            for one_step, other in zip(getattr(ours, name) or (), getattr(theirs, name) or (), strict=True):
                torch.testing.assert_close(one_step, other.to(one_step.dtype), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("switches", "plan"),
        [
            ({"prompt_lookup_num_tokens": 4}, DraftPlan.lookup(4)),
            ({"assistant_early_exit": 2}, DraftPlan.exit(2)),
            ({"assistant_early_exit": 2, "num_assistant_tokens": 3}, DraftPlan.exit(2, num_draft_tokens=3)),
            ({"assistant_early_exit": 2, "assistant_confidence_threshold": 0.25},
             DraftPlan.exit(2, confidence_threshold=0.25)),
            ({}, None),
        ],
    )  # fmt: skip
    def test_transformers_own_switches(self, switches, plan):
        output = agreeing_model("llama").generate(
            **one(), max_new_tokens=5, return_dict_in_generate=True, **switches, **OURS
        )
        assert output.result.plan == plan

    def test_a_streamer_that_is_bound(self, capsys):
        tokenizer = character_tokenizer()
        bound = functools.partial(layerskip.custom_generate, streamer=TextStreamer(tokenizer, skip_prompt=True))
        output = agreeing_model("llama").generate(**one(), max_new_tokens=9, custom_generate=bound, eos_token_id=None)
        assert capsys.readouterr().out == tokenizer.decode(output[0, 9:]) + "\n"

    def test_stop_strings_with_a_bound_tokenizer(self):
        tokenizer = character_tokenizer()
        own = agreeing_model("llama").generate(**one(), max_new_tokens=20, eos_token_id=None)
        string, options = tokenizer.decode(own[0, 14:16]), {"max_new_tokens": 20, "eos_token_id": None}
        theirs = agreeing_model("llama").generate(**one(), stop_strings=string, tokenizer=tokenizer, **options)
        bound = {"custom_generate": functools.partial(layerskip.custom_generate, tokenizer=tokenizer)}
        criterion = StopStringCriteria(tokenizer, [string])
        for plan in PLANS.values():
            drafting = {"plan": plan, "governor": "off"}
            ours = agreeing_model("llama").generate(**one(), stop_strings=[string], **options, **drafting, **bound)
            assert torch.equal(ours, theirs)
            compare(one(), plan, stopping_criteria=[criterion], max_new_tokens=20, eos_token_id=None)


class Recorder(TextStreamer):
    def put(self, value):
        pass


class TestRefused:
    """Before the model runs, with the way to do it."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"streamer": Recorder(character_tokenizer())}, r"got a streamer, .*partial\(layerskip.custom"),
            ({"assistant_model": tiny_model("llama")}, r"got an assistant_model, .*plan=layerskip.DraftPlan.model"),
            ({"synced_gpus": True}, "got synced_gpus=True, .*transformers' own generate"),
            ({"stop_strings": "ab", "tokenizer": character_tokenizer()}, "got stop_strings='ab'.*tokenizer=tok"),
            ({"num_beams": 3}, r"generation mode beam_search \(num_beams=3.*leave out custom_generate"),
            ({"num_beams": 2, "do_sample": True}, "generation mode beam_sample"),
            ({"guidance_scale": 2.0}, "UnbatchedClassifierFree.*keeps a state"),
            ({"return_dict_in_generate": True, "output_hidden_states": True}, "got output_hidden_states, which"),
            ({"past_key_values": DynamicCache()}, "got a cache of the caller's.*Leave it out"),
            ({"position_ids": torch.arange(3, 12)[None]}, "got position_ids .* counted from 0"),
            ({"governor": "off"}, "got governor='off' without anything that drafts"),
            ({"assistant_early_exit": 9}, "exit"),
        ],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:.*past_key_values.*")
    def test_what_the_route_drops_or_the_runtime_does_not_do(self, options, message):
        with pytest.raises((SettingError, InputError, PlanMismatchError), match=message):
            agreeing_model("llama").generate(**one(), max_new_tokens=4, **options, **OURS)

    def test_embeddings(self):
        with pytest.raises(InputError, match="inputs_embeds"):
            agreeing_model("llama").generate(
                inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64), input_ids=prompt(3), max_new_tokens=4, **OURS
            )

    def test_a_plan_for_another_model(self):
        plan = DraftPlan.exit(2, target=layerskip.wrap(tiny_model("llama")).identity)
        with pytest.raises(PlanMismatchError):
            agreeing_model("llama").generate(**one(), max_new_tokens=4, plan=plan, **OURS)

    def test_a_misspelt_argument_is_refused_by_transformers(self):
        with pytest.raises(ValueError, match="plann"):
            agreeing_model("llama").generate(**one(), max_new_tokens=4, plann=DraftPlan.exit(2), **OURS)

    def test_a_streamer_through_a_function_around_it(self):
        around = lambda *args, **kwargs: layerskip.custom_generate(*args, **kwargs)  # noqa: E731
        options = {"max_new_tokens": 4, "streamer": Recorder(character_tokenizer())}
        with pytest.raises(SettingError, match="got a streamer"):
            agreeing_model("llama").generate(**one(), **options, custom_generate=around)

    def test_a_replaced_forward(self):
        model = copy.deepcopy(tiny_model("llama"))
        model.forward = functools.partial(model.forward)
        with pytest.raises(UnsupportedModelError, match="replaced forward"):
            model.generate(**one(), max_new_tokens=4, **OURS)


class TestWrappedModels:
    def test_one_model_is_wrapped_once(self):
        model = copy.deepcopy(tiny_model("llama"))
        before = dict(vars(model))
        compare(one(), DraftPlan.exit(2), model)
        first = wrapped_model(model)
        compare(one(), DraftPlan.exit(2), model)
        assert wrapped_model(model) is first
        assert vars(model) == before, "something was put on the caller's model"

    def test_it_is_let_go_with_the_model(self):
        """Nobody's weights are kept by having been used once: a cache that holds its keys by its values would."""
        model = copy.deepcopy(tiny_model("llama"))
        compare(one(), DraftPlan.exit(2), model)
        weight, kept = weakref.ref(model.lm_head.weight), len(wrapped_models._KEPT)
        del model
        gc.collect()
        assert weight() is None
        assert len(wrapped_models._KEPT) < kept

    @pytest.mark.parametrize("change", ["cast", "replaced", "written", "hooked"])
    def test_a_model_that_has_changed_is_wrapped_anew(self, change):
        model = copy.deepcopy(agreeing_model("llama"))
        before = compare(one(), DraftPlan.exit(2), model, eos_token_id=None)
        projection = model.model.layers[0].mlp.down_proj
        if change == "cast":
            model.float()
        elif change == "replaced":
            model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False, dtype=torch.float64)
        elif change == "written":
            with torch.no_grad():
                projection.weight.neg_()
        else:
            projection.register_forward_hook(lambda module, args, output: -output)
        after = compare(one(), DraftPlan.exit(2), model, eos_token_id=None)
        assert torch.equal(before, after) == (change == "cast")

    def test_it_may_be_prepared(self):
        """For copies of the weights; a change to them makes it a plain one again, and acts."""
        model = copy.deepcopy(agreeing_model("llama"))
        assert wrapped_model(model).prepare().fused == 8
        compare(padded(), DraftPlan.exit(2), model)
        assert wrapped_model(model).preparation.fused == 8
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.neg_()
        compare(padded(), DraftPlan.exit(2), model)
        assert wrapped_model(model).preparation.fused == 0

    def test_a_checkpoints_own_settings_are_read_at_each_call(self):
        model = copy.deepcopy(agreeing_model("llama"))
        lengths = []
        for length in (14, 18):
            model.generation_config.max_length = length
            lengths.append(compare(one(), DraftPlan.exit(2), model, max_new_tokens=None, eos_token_id=None).shape[1])
        assert lengths == [14, 18]

    def test_threads_share_it(self):
        """Each with another plan, from the very first call on."""
        model = copy.deepcopy(agreeing_model("llama"))
        own = model.generate(**padded(), max_new_tokens=16, eos_token_id=None)
        barrier, outputs, models = threading.Barrier(4), [], set()

        def decode(options):
            barrier.wait()
            models.add(id(wrapped_model(model)))
            outputs.append(model.generate(**padded(), max_new_tokens=16, eos_token_id=None, **options, **OURS))

        calls = [{}, *({"plan": plan, "governor": "off"} for plan in PLANS.values())]
        threads = [threading.Thread(target=decode, args=(options,)) for options in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(models) == 1
        assert len(outputs) == 4 and all(torch.equal(output, own) for output in outputs)


class TestPipeline:
    """transformers' text-generation pipeline hands what it does not know on to `generate`."""

    @pytest.mark.parametrize("texts", ["Hello", ["Hello", "A longer text"]], ids=["one", "a batch"])
    def test_the_same_text(self, texts):
        pipe = pipeline("text-generation", model=agreeing_model("llama"), tokenizer=character_tokenizer())
        options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
        ours = pipe(texts, **options, **OURS, plan=DraftPlan.exit(2))
        assert ours == pipe(texts, **options)
        bound = pipeline(
            "text-generation", model=agreeing_model("llama"), tokenizer=character_tokenizer(), **OURS,
            plan=DraftPlan.exit(2),
        )  # fmt: skip
        assert bound(texts, **options) == ours

    def test_stop_sequences_need_a_bound_tokenizer(self):
        tokenizer = character_tokenizer()
        pipe = pipeline("text-generation", model=agreeing_model("llama"), tokenizer=tokenizer)
        with pytest.raises(SettingError, match="tokenizer=tokenizer"):
            pipe("Hello", stop_sequence="a", max_new_tokens=5, **OURS)
        bound = functools.partial(layerskip.custom_generate, tokenizer=tokenizer)
        options = {"stop_sequence": "a", "max_new_tokens": 40, "do_sample": False}
        assert pipe("Hello", custom_generate=bound, **options) == pipe("Hello", **options)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
class TestPeft:
    @pytest.fixture
    def peft_model(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
        torch.manual_seed(0)
        return peft.get_peft_model(copy.deepcopy(agreeing_model("llama")), config).double().eval()

    @every_plan
    def test_unmerged(self, peft_model, plan):
        adapted = compare(one(), plan, peft_model, eos_token_id=None)
        assert not torch.equal(adapted, compare(one(), plan, eos_token_id=None))
        with peft_model.disable_adapter():
            assert torch.equal(compare(one(), plan, peft_model, eos_token_id=None),
                               compare(one(), plan, eos_token_id=None))  # fmt: skip

    def test_merged_after_a_call(self, peft_model):
        """The base model is the same object: it has to be wrapped anew."""
        before = compare(one(), DraftPlan.exit(2), peft_model, eos_token_id=None)
        peft_model.merge_adapter()
        assert torch.equal(compare(one(), DraftPlan.exit(2), peft_model, eos_token_id=None), before)
        peft_model.unmerge_adapter()
        merged = peft_model.merge_and_unload()
        assert torch.equal(compare(one(), DraftPlan.exit(2), merged, eos_token_id=None), before)

    def test_wrapping_one_says_what_to_pass(self, peft_model):
        with pytest.raises(UnsupportedModelError, match=r"got a PeftModel.*get_base_model\(\)"):
            layerskip.wrap(peft_model)
        base = layerskip.wrap(peft_model.get_base_model())
        result = base.generate(prompt(), plan=DraftPlan.exit(2), max_new_tokens=16, eos_token_id=None)
        assert torch.equal(result.sequences, peft_model.generate(**one(), max_new_tokens=16, eos_token_id=None))

    def test_learned_prompts_are_refused(self):
        peft = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        model = peft.get_peft_model(copy.deepcopy(agreeing_model("llama")), config).double().eval()
        with pytest.raises(InputError, match="learned prompts"):
            model.generate(**one(), max_new_tokens=4, **OURS)
