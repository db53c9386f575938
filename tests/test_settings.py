"""Decoding settings: each takes effect as in transformers or is refused by name; nothing that is given is ignored."""

import copy
import json
import math

import pytest
import torch
from transformers import GenerationConfig

from layerskip import DraftPlan, SettingError, UnknownSettingError, wrap
from layerskip.settings import NAMES, resolve_settings
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

NOTHING = GenerationConfig()


def resolve(own: GenerationConfig | None = NOTHING, config: GenerationConfig | None = None, **given):
    return resolve_settings(own, config, given)


class TestPrecedence:
    """transformers' defaults < the checkpoint's config < a given config < the call; None in the call switches off."""

    def test_defaults_are_transformers(self, llama):
        """Nothing given: greedy, 20 new tokens, the checkpoint's own EOS."""
        with pytest.warns(UserWarning, match="max_length"):
            own = llama.generate(prompt(), attention_mask=torch.ones_like(prompt()))
        assert torch.equal(wrap(llama).generate(prompt()).sequences, own)
        assert own.shape[1] == 9 + 20

    def test_each_source_overrides_the_one_before(self):
        own = GenerationConfig(repetition_penalty=1.1, top_k=11, top_p=0.1, eos_token_id=1)
        config = GenerationConfig(top_k=22, top_p=0.2)
        settings = resolve(own, config, do_sample=True, top_p=0.3)
        assert (settings.repetition_penalty, settings.top_k, settings.top_p) == (1.1, 22, 0.3)
        assert settings.eos_token_id == (1,)
        assert settings.min_p is None

    @pytest.mark.parametrize("name", NAMES)
    def test_none_in_the_call_switches_off(self, name):
        """Every control can be switched off, whatever the configs say."""
        on = {
            "max_new_tokens": 3, "max_length": 30, "min_new_tokens": 2, "min_length": 3, "do_sample": True,
            "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "epsilon_cutoff": 0.1,
            "eta_cutoff": 0.1, "repetition_penalty": 2.0, "no_repeat_ngram_size": 2, "bad_words_ids": [[3]],
            "suppress_tokens": [3], "eos_token_id": 2, "pad_token_id": 0, "stop_strings": ["a"], "max_time": 1.0,
            "num_return_sequences": 2, "prefill_chunk_size": 8, "output_scores": True, "output_logits": True,
        }  # fmt: skip
        assert set(on) == set(NAMES)
        off = {
            "max_new_tokens": 20,
            "do_sample": False,
            "eos_token_id": (),
            "stop_strings": (),
            "num_return_sequences": 1,
            "output_scores": False,
            "output_logits": False,
        }
        own = GenerationConfig()
        setattr(own, name, on[name])
        assert getattr(resolve(own), name) != off.get(name)
        assert getattr(resolve(own, **{name: None}), name) == off.get(name)
        assert getattr(resolve(None, own, **{name: None}), name) == off.get(name)

    def test_none_in_the_call_is_accepted_by_generate(self, llama):
        result = wrap(llama).generate(prompt(), **dict.fromkeys(NAMES))
        assert torch.equal(result.sequences, transformers_greedy(llama, prompt(), max_new_tokens=20))

    def test_none_in_a_config_is_no_statement(self):
        own = GenerationConfig(repetition_penalty=1.1)
        assert resolve(own, GenerationConfig(repetition_penalty=None)).repetition_penalty == 1.1

    @pytest.mark.parametrize("pair", [("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")])
    def test_a_length_replaces_the_other_kind_of_a_weaker_source(self, pair):
        """Two ways to say one thing: who speaks last is heard. Catches a given length that has no effect."""
        for first, second in (pair, pair[::-1]):
            weaker, stronger = GenerationConfig(**{first: 5}), GenerationConfig(**{second: 7})
            by_call = {second: 7}
            for settings in (resolve(weaker, stronger), resolve(weaker, **by_call), resolve(None, weaker, **by_call)):
                assert (getattr(settings, first), getattr(settings, second)) == (None, 7)

    def test_the_models_own_config_is_used(self):
        model = copy.deepcopy(tiny_model("llama"))
        model.generation_config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.5, eos_token_id=24)
        own = model.generate(prompt(), attention_mask=torch.ones_like(prompt()), pad_token_id=0)
        assert torch.equal(wrap(model).generate(prompt()).sequences, own)

    def test_configs_are_not_changed(self, llama):
        """Catches settings written back into an object that the caller or the model still uses."""
        config = GenerationConfig(top_k=5, max_length=30, eos_token_id=7, bad_words_ids=[[3]])
        own, given = copy.deepcopy(llama.generation_config.to_dict()), copy.deepcopy(config.to_dict())
        wrap(llama).generate(
            prompt(), generation_config=config, max_new_tokens=3, do_sample=True, top_k=None, eos_token_id=[3],
            bad_words_ids=[[4]],
        )  # fmt: skip
        assert llama.generation_config.to_dict() == own
        assert config.to_dict() == given

    def test_a_config_given_to_the_call_acts_as_in_transformers(self):
        model = agreeing_model("llama")
        config = GenerationConfig(max_new_tokens=12, no_repeat_ngram_size=2, suppress_tokens=[34], eos_token_id=None)
        own = model.generate(
            prompt(), attention_mask=torch.ones_like(prompt()), generation_config=copy.deepcopy(config), pad_token_id=0,
            do_sample=False,
        )  # fmt: skip
        result = wrap(model).generate(prompt(), generation_config=config, plan=DraftPlan.exit(3), eos_token_id=None)
        assert torch.equal(result.sequences, own)


class TestEffect:
    """Each control changes what it should (that the changed text is transformers' own: test_lossless, test_sampled)."""

    def text(self, **settings):
        return wrap(agreeing_model("llama")).generate(
            prompt(), **{"max_new_tokens": 12, "eos_token_id": None, **settings}
        )

    @pytest.mark.parametrize(
        "control",
        [
            {"repetition_penalty": 2.0},
            {"no_repeat_ngram_size": 1},
            {"bad_words_ids": [[34]]},
            {"suppress_tokens": [34]},
            {"suppress_tokens": torch.tensor([34])},
            {"eos_token_id": 34},
            {"stop_strings": "F"},
            {"max_time": 1e-9},
            {"max_new_tokens": 3},
            {"max_length": 11, "max_new_tokens": None},
        ],
    )
    def test_in_greedy_decoding(self, control):
        """The text begins with the token 34, the character F."""
        model = wrap(agreeing_model("llama"), character_tokenizer())
        plain = self.text()
        assert model.tokenizer.decode(plain.new_token_ids[0][:1]) == "F"
        options = {"max_new_tokens": 12, "eos_token_id": None, **control}
        assert model.generate(prompt(), **options).new_token_ids != plain.new_token_ids

    @pytest.mark.parametrize(
        "control",
        [
            {"temperature": 0.1},
            {"temperature": 4.0},
            {"top_k": 1},
            {"top_p": 0.1},
            {"min_p": 0.9},
            {"typical_p": 0.1},
            {"epsilon_cutoff": 0.3},
            {"eta_cutoff": 0.9},
        ],
    )
    def test_in_sampling(self, control):
        plain = {"do_sample": True, "seed": 3, "top_k": 0, "acceptance_rule": "invariant", "max_new_tokens": 40}
        assert (
            self.text(
                **plain,
            ).new_token_ids
            != self.text(**{**plain, **control}).new_token_ids
        )

    def test_top_k_is_50_unless_told_otherwise(self):
        """transformers' default acts on sampling."""
        assert resolve().top_k == 50

    def test_max_time_ends_with_the_token_that_is_done(self):
        result = self.text(max_time=1e-9)
        assert (result.finish_reasons, result.stats.new_tokens) == (["max_time"], 1)

    def test_min_new_tokens_keeps_an_eos_away(self):
        eos = self.text().new_token_ids[0][0]
        assert self.text(eos_token_id=eos, min_new_tokens=5).stats.new_tokens > 5

    def test_effective_settings_stand_in_the_result(self):
        """All controls, as they acted, in a form that can be written down."""
        result = self.text(
            do_sample=True, temperature=0.5, seed=9, eos_token_id=7, acceptance_rule="invariant", pass_width=6,
            plan=DraftPlan.exit(2), num_assistant_tokens=3,
        )  # fmt: skip
        assert set(NAMES) <= set(result.settings)
        assert result.settings["temperature"] == 0.5
        assert result.settings["eos_token_id"] == (7,)
        assert result.settings["top_k"] == 50
        assert (result.settings["seed"], result.settings["acceptance_rule"]) == ([9], "invariant")
        assert result.settings["pass_width"] == 6
        assert result.plan == DraftPlan.exit(2, num_draft_tokens=3)
        json.dumps(result.settings)


BAD_VALUES = {
    "max_new_tokens": (0, -1, 2.5, "5", True, math.inf),
    "max_length": (0, 2.5, "5"),
    "min_new_tokens": (-1, 1.5),
    "min_length": (-1, "3"),
    "do_sample": (1, "yes"),
    "temperature": (0, 0.0, -1.0, math.inf, math.nan, "hot", True),
    "top_k": (-1, 2.5),
    "top_p": (0, 0.0, 1.1, -0.1, math.nan, "0.9"),
    "min_p": (-0.1, 1.1),
    "typical_p": (0, 1.5),
    "epsilon_cutoff": (-0.1, 1.0),
    "eta_cutoff": (-0.1, 1.0),
    "repetition_penalty": (0, -1.0, math.inf, "1.1"),
    "no_repeat_ngram_size": (-1, 1.5),
    "bad_words_ids": ([], [[]], [3], 3, [[-1]], [["a"]], [[1.5]], "bad"),
    "suppress_tokens": ([-1], ["a"], 1.5, [True]),
    "eos_token_id": (-1, 1.5, "</s>", [2, -3], True),
    "pad_token_id": (-1, "pad", 1.5),
    "stop_strings": ("", [""], [3], 5, [None]),
    "max_time": (0, -1.0, math.nan, math.inf, "1s"),
    "num_return_sequences": (0, -1, 1.5, "2"),
    "prefill_chunk_size": (0, -1, 1.5, "2"),
    "output_scores": (1, "yes"),
    "output_logits": (1, "yes"),
}


class TestRefused:
    @pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD_VALUES for value in BAD_VALUES[name]])
    def test_a_bad_value(self, name, value):
        """The message says what was got, by name and value, and what is expected."""
        options = {"do_sample": True} if name != "do_sample" else {}
        with pytest.raises(SettingError, match=rf"got {name}=.*; expected ") as caught:
            resolve(**options, **{name: value})
        if not isinstance(value, (str, list)):
            assert str(value) in str(caught.value)

    def test_every_setting_has_a_bad_value_above(self):
        assert set(BAD_VALUES) == set(NAMES)

    @pytest.mark.parametrize("name", ["max_new_tokens", "top_p", "temperature", "eos_token_id"])
    def test_a_bad_value_in_a_config(self, name):
        config = GenerationConfig()
        setattr(config, name, BAD_VALUES[name][1])
        with pytest.raises(SettingError, match=f"got {name}="):
            resolve(config=config)

    def test_no_new_tokens(self, llama):
        with pytest.raises(SettingError, match="got max_new_tokens=0; expected an integer of at least 1"):
            wrap(llama).generate(prompt(), max_new_tokens=0)

    def test_temperature_0_hints_at_greedy_decoding(self):
        with pytest.raises(SettingError, match="For greedy decoding pass do_sample=False"):
            resolve(do_sample=True, temperature=0.0)

    def test_ids_beyond_the_vocabulary(self, llama):
        """transformers' processor would fail on it in the middle of the call."""
        with pytest.raises(SettingError, match=r"got bad_words_ids with the token id 61; expected ids from 0 to 60"):
            wrap(llama).generate(prompt(), bad_words_ids=[[3], [4, 61]])

    # Every field of transformers' config that would change the text, with a value that does.
    UNSUPPORTED = {
        "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "dola_layers": "high",
        "guidance_scale": 1.5, "sequence_bias": [[[3], 1.0]], "encoder_repetition_penalty": 1.2,
        "encoder_no_repeat_ngram_size": 2, "forced_bos_token_id": 3, "forced_eos_token_id": 3,
        "remove_invalid_values": True, "renormalize_logits": True, "exponential_decay_length_penalty": (3, 1.1),
        "begin_suppress_tokens": [3], "token_healing": True, "top_h": 0.4,
        "output_attentions": True, "output_hidden_states": True,
        "constraints": [1], "force_words_ids": [[3]], "low_memory": True, "speculation_type": "x", "use_mtp": True,
        "watermarking_config": {"bias": 2.0}, "assistant_ensemble_weight": 0.5, "decoder_start_token_id": 3,
    }  # fmt: skip
    # Fields that act on speed, beams or assistants: without a word in a config, where checkpoints carry them along.
    HARMLESS = {
        "assistant_confidence_threshold": 0.4, "assistant_early_exit": 2, "assistant_lookbehind": 10, "bos_token_id": 1,
        "cache_config": {}, "cache_implementation": "static", "compile_config": {}, "continuous_batching_config": {},
        "disable_compile": True, "early_stopping": True, "is_assistant": True, "length_penalty": 0.8,
        "max_cache_len": 99, "max_matching_ngram_size": 2, "num_assistant_tokens": 5,
        "num_assistant_tokens_schedule": "constant", "prompt_lookup_num_tokens": 3, "return_dict_in_generate": True,
        "target_lookbehind": 10, "transformers_version": "5", "use_cache": False,
    }  # fmt: skip

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_transformers_settings_that_are_not_supported(self, name):
        """In the call and in a config alike: by name, value, and with what to do."""
        value = self.UNSUPPORTED[name]
        config = GenerationConfig()
        setattr(config, name, value)
        for arguments in ({name: value}, {"config": config}, {"own": config}):
            with pytest.raises(SettingError, match=rf"got {name}=.* not support.*Pass {name}=None"):
                resolve(**arguments)

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_they_can_be_switched_off_by_a_stronger_source(self, name):
        """A checkpoint that comes with such a setting can be used all the same."""
        config = GenerationConfig()
        setattr(config, name, self.UNSUPPORTED[name])
        assert resolve(own=config, **{name: None}) == resolve()
        assert resolve(config=config, **{name: None}) == resolve()

    def test_every_field_of_transformers_config_is_sorted(self):
        """A field that a new transformers brings is refused, until someone has looked at it and put it in a list."""
        fields = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
        assert fields <= {*NAMES, *self.UNSUPPORTED, *self.HARMLESS}

    @pytest.mark.parametrize(
        "neutral",
        [
            {"num_beams": 1}, {"use_cache": True}, {"use_cache": False}, {"guidance_scale": 1.0},
            {"output_scores": False}, {"return_dict_in_generate": True}, {"diversity_penalty": 0.0},
            {"penalty_alpha": None}, {"renormalize_logits": False},
        ],
    )  # fmt: skip
    def test_what_changes_nothing_is_no_error(self, neutral):
        resolve(**neutral)

    @pytest.mark.parametrize("name", HARMLESS)
    def test_fields_of_other_methods_in_a_config_are_no_error(self, name):
        config = GenerationConfig()
        setattr(config, name, self.HARMLESS[name])
        assert resolve(config) == resolve(config=config) == resolve()

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("eos_token_ids", "eos_token_id"),
            ("topk", "top_k"), ("repetition_penality", "repetition_penalty"), ("stop_string", "stop_strings"),
            ("logit_processor", "logits_processor"), ("acceptance_rul", "acceptance_rule"), ("plam", "plan"),
            ("assistant_early_exits", "assistant_early_exit"), ("streamr", "streamer"), ("seeds", "seed"),
        ],
    )  # fmt: skip
    def test_an_unknown_name_with_a_suggestion(self, llama, name, meant):
        with pytest.raises(UnknownSettingError, match=rf"unknown argument '{name}'; .*Did you mean '{meant}'\?"):
            wrap(llama).generate(prompt(), **{name: 1})

    def test_an_unknown_name_without_one(self):
        with pytest.raises(UnknownSettingError) as caught:
            resolve(zzz=1)
        assert "Did you mean" not in str(caught.value)

    def test_an_unknown_name_is_a_type_error(self):
        """As Python's own for a function without such an argument."""
        with pytest.raises(TypeError):
            resolve(zzz=1)

    @pytest.mark.parametrize(
        "pair",
        [
            {"max_new_tokens": 5, "max_length": 20},
            {"min_new_tokens": 5, "min_length": 20},
        ],
    )
    def test_two_settings_that_contradict(self, pair):
        first, second = pair
        with pytest.raises(SettingError, match=rf"got {first}=5 and {second}=20, which contradict.*Pass one of them"):
            resolve(**pair)

    def test_a_minimum_above_the_maximum(self):
        with pytest.raises(SettingError, match=r"min_new_tokens=5 and max_new_tokens=3; expected minimum <= maximum"):
            resolve(min_new_tokens=5, max_new_tokens=3)

    @pytest.mark.parametrize(
        "warper",
        [
            {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9},
            {"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.1},
        ],
    )  # fmt: skip
    def test_a_sampling_control_without_sampling(self, warper):
        """It would have no effect. (Neutral values are no request, and a checkpoint's config may hold some.)"""
        (name,) = warper
        with pytest.raises(SettingError, match=rf"got {name} with do_sample=False, where .*Pass do_sample=True"):
            resolve(**warper)
        resolve(GenerationConfig(**warper))
        resolve(**warper, do_sample=True)
        resolve(temperature=1.0, top_k=50, top_p=1.0)

    def test_a_config_of_another_type(self):
        with pytest.raises(SettingError, match=r"generation_config of type dict; expected a GenerationConfig"):
            resolve(config={"top_k": 3})
