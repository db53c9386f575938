"""A call is checked as a whole before the model runs: prompts in every form, switches, and what is refused."""

import copy
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

from layerskip import DraftPlan, InputError, LayerSkipError, PlanError, PlanMismatchError, SettingError, wrap
from layerskip.errors import UnknownSettingError
from layerskip.models.block import Block
from layerskip.request import make_request
from tests.naming import told
from tests.special_models import llama_with
from tests.tiny_models import VOCAB_SIZE, prompt, tiny_model
from tests.toy_tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "No"}]


def request(inputs=None, tokenizer=TOKENIZER, **options):
    return make_request(inputs, options, tokenizer, GenerationConfig(), VOCAB_SIZE, 160)


class TestPrompts:
    @pytest.mark.parametrize(
        "inputs",
        [
            [3, 4, 5],
            (3, 4, 5),
            np.array([3, 4, 5]).tolist(),
            list(np.array([3, 4, 5])),
            list(np.array([3, 4, 5], dtype=np.uint8)),
            torch.tensor([3, 4, 5]),
            torch.tensor([3, 4, 5], dtype=torch.int32),
            torch.tensor([[3, 4, 5]]),
            [[3, 4, 5]],
            [torch.tensor([3, 4, 5])],
            BatchEncoding({"input_ids": [3, 4, 5], "attention_mask": [1, 1, 1]}),
            BatchEncoding({"input_ids": torch.tensor([[0, 3, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}),
            {"input_ids": [[3, 4, 5]]},
            "abc",
            ["abc"],
            TOKENIZER("abc"),
            TOKENIZER("abc", return_tensors="pt"),
            TOKENIZER(["abc"], padding=True),
        ],
        ids=told,
    )
    def test_every_form_of_one_prompt(self, inputs):
        assert request(inputs).prompts == [[3, 4, 5]]

    @pytest.mark.parametrize(
        "inputs",
        [
            [[3, 4, 5], [6]],
            ([3, 4, 5], (6,)),
            [torch.tensor([3, 4, 5]), torch.tensor([6])],
            ["abc", "d"],
            TOKENIZER(["abc", "d"]),
            TOKENIZER(["abc", "d"], padding=True),
            TOKENIZER(["abc", "d"], padding=True, padding_side="left", return_tensors="pt"),
        ],
        ids=told,
    )
    def test_every_form_of_two_prompts(self, inputs):
        assert request(inputs).prompts == [[3, 4, 5], [6]]

    def test_input_ids_by_transformers_name(self):
        assert request(input_ids=torch.tensor([[3, 4]])).prompts == [[3, 4]]
        assert request(**TOKENIZER("ab", return_tensors="pt", return_token_type_ids=False)).prompts == [[3, 4]]

    def test_a_string_is_tokenised_as_it_is(self):
        """As transformers does; the chat template is for messages."""
        assert request("user: Hi\n").prompts == [TOKENIZER("user: Hi\n")["input_ids"]]

    def test_chat_messages_go_through_the_template(self):
        text = "user: Hi\nassistant: Yes\nuser: No\nassistant: "
        assert request(CHAT).prompts == [TOKENIZER(text)["input_ids"]]
        assert request(tuple(CHAT)).prompts == [TOKENIZER(text)["input_ids"]]

    def test_several_chats(self):
        assert request([CHAT, CHAT[:1]]).prompts == [*request(CHAT).prompts, *request(CHAT[:1]).prompts]

    @pytest.mark.parametrize(
        "inputs",
        [[], (), "", [[]], [[3], []], torch.zeros(0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long),
         torch.zeros(0, 3, dtype=torch.long), ["a", ""], {"input_ids": []}],
        ids=told,
    )  # fmt: skip
    def test_an_empty_prompt(self, inputs):
        with pytest.raises(InputError, match=r"got .*(empty prompt|without rows).*; expected at least one"):
            request(inputs)

    @pytest.mark.parametrize(
        "inputs",
        [3, 3.0, b"abc", {3, 4}, {"a": 1}, [3.0], [True, False], [None], ["a", 3], [[3], "a", 4.0], [[["a"]]],
         torch.tensor(3), torch.zeros(1, 1, 1, dtype=torch.long), torch.tensor([1.0]), torch.tensor([True]),
         [torch.tensor([[3, 4]])], object(), [{"content": "no role"}], range, iter([3])],
        ids=told,
    )  # fmt: skip
    def test_what_is_no_prompt(self, inputs):
        """The message shows what was got and lists what is possible."""
        with pytest.raises(InputError, match=r"(?s)got .* as prompt; expected a string, chat messages .*token ids"):
            request(inputs)

    def test_a_long_wrong_prompt_is_shown_in_part(self):
        with pytest.raises(InputError) as caught:
            request([0.5] * 10_000 + [[object()] * 500])
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**30])
    def test_an_id_outside_the_vocabulary(self, token):
        with pytest.raises(InputError, match=rf"got token id {token} in row 1; expected ids from 0 to 60"):
            request([[3, 4], [3, token]])

    @pytest.mark.parametrize("length", [160, 161, 5000])
    def test_a_prompt_as_long_as_the_models_positions(self, length):
        with pytest.raises(InputError, match=rf"got a prompt of {length:,} tokens .* 160 positions.*; shorten"):
            request([3] * length)

    def test_a_prompt_that_leaves_one_position(self):
        request([3] * 159)

    def test_a_prompt_longer_than_max_length(self):
        with pytest.raises(InputError, match=r"prompt of 9 tokens .*max_length=9.*counts the prompt; pass a larger"):
            request(prompt(), max_length=9)

    @pytest.mark.parametrize(
        ("both", "got"), [({}, "no prompt"), ({"inputs": [3], "input_ids": [3]}, "both inputs and input_ids")]
    )
    def test_one_prompt_and_only_one(self, both, got):
        with pytest.raises(InputError, match=f"got {got}; expected one of inputs and input_ids"):
            request(**both)


class TestWithoutTokenizer:
    @pytest.mark.parametrize("inputs", ["abc", CHAT, ["abc"], [CHAT]], ids=["string", "chat", "strings", "chats"])
    def test_text_is_refused(self, inputs):
        with pytest.raises(InputError, match=r"got text on a model without tokenizer; expected token ids. Pass a tok"):
            request(inputs, tokenizer=None)

    def test_ids_are_enough(self):
        assert request([3, 4], tokenizer=None).prompts == [[3, 4]]

    def test_a_tokenizer_without_a_chat_template(self):
        plain = copy.deepcopy(TOKENIZER)
        plain.chat_template = None
        with pytest.raises(InputError, match="no chat template; expected a string. Set one on the tokenizer"):
            request(CHAT, tokenizer=plain)

    def test_messages_that_the_template_refuses(self):
        """Many templates demand, say, that roles alternate; the message passes on what they say."""
        strict = copy.deepcopy(TOKENIZER)
        strict.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(InputError, match="got chat messages that .* chat template refuses: roles must alternate"):
            request(CHAT, tokenizer=strict)


class TestSwitches:
    """transformers' own switches for assisted decoding are short forms of a plan."""

    @pytest.mark.parametrize(
        ("switches", "plan"),
        [
            ({}, None),
            ({"plan": None, "assistant_early_exit": None, "assistant_model": None}, None),
            ({"assistant_early_exit": 2}, DraftPlan.exit(2)),
            ({"assistant_early_exit": 2, "num_assistant_tokens": 7}, DraftPlan.exit(2, num_draft_tokens=7)),
            (
                {"assistant_early_exit": 2, "assistant_confidence_threshold": 0.3},
                DraftPlan.exit(2, confidence_threshold=0.3),
            ),
            ({"assistant_model": "owner/name"}, DraftPlan.model("owner/name")),
            (
                {"assistant_model": "owner/name", "num_assistant_tokens": 2},
                DraftPlan.model("owner/name", num_draft_tokens=2),
            ),
            (
                {"plan": DraftPlan.skip([1], confidence_threshold=0.5), "num_assistant_tokens": 2},
                DraftPlan.skip([1], confidence_threshold=0.5, num_draft_tokens=2),
            ),
            ({"plan": DraftPlan.exit(2, num_draft_tokens=7), "num_assistant_tokens": None},
             DraftPlan.exit(2, num_draft_tokens=7)),
        ],
    )  # fmt: skip
    def test_in_the_call(self, switches, plan):
        assert request([3], **switches).plan == plan

    def test_a_model_in_memory(self, llama):
        for source in (llama, wrap(llama)):
            assert request([3], assistant_model=source).plan.draft_model is source

    def test_in_a_generation_config(self):
        config = GenerationConfig(assistant_early_exit=2, num_assistant_tokens=3, assistant_confidence_threshold=0.2)
        expected = DraftPlan.exit(2, num_draft_tokens=3, confidence_threshold=0.2)
        assert request([3], generation_config=config).plan == expected

    def test_the_call_overrides_a_generation_config(self):
        config = GenerationConfig(assistant_early_exit=2, num_assistant_tokens=3)
        assert request([3], generation_config=config, num_assistant_tokens=5).plan.num_draft_tokens == 5
        assert request([3], generation_config=config, assistant_early_exit=1).plan.exit_layer == 1
        assert request([3], generation_config=config, assistant_early_exit=None).plan is None

    def test_a_config_that_says_nothing_leaves_the_plan_alone(self):
        plan = DraftPlan.exit(2, num_draft_tokens=9, confidence_threshold=0.7)
        assert request([3], plan=plan, generation_config=GenerationConfig()).plan == plan

    @pytest.mark.parametrize(
        "ways",
        [
            {"plan": DraftPlan.exit(1), "assistant_early_exit": 2},
            {"plan": DraftPlan.exit(1), "assistant_model": "x"},
            {"assistant_early_exit": 2, "assistant_model": "x"},
        ],
    )
    def test_two_ways_to_say_how_to_draft(self, ways):
        with pytest.raises(SettingError, match=r"got (plan|assistant_early_exit) and assistant_\w+, .*one of them"):
            request([3], **ways)

    def test_a_plan_in_the_call_goes_before_a_config(self):
        """Its own limits too: a weaker source must not change how long a plan drafts."""
        config = GenerationConfig(assistant_early_exit=2, num_assistant_tokens=7)
        plan = DraftPlan.exit(1, num_draft_tokens=3)
        assert request([3], plan=plan, generation_config=config).plan == plan
        assert request([3], plan=None, generation_config=config).plan is None
        assert request([3], generation_config=config).plan == DraftPlan.exit(2, num_draft_tokens=7)

    @pytest.mark.parametrize("limit", [{"num_assistant_tokens": 3}, {"assistant_confidence_threshold": 0.5}])
    def test_a_limit_without_a_drafter(self, limit):
        """It would have no effect. (A config may carry it for those who draft.)"""
        with pytest.raises(
            SettingError, match=r"got \w+ without anything that drafts by a model; pass plan= or assistant_early"
        ):
            request([3], **limit)
        assert request([3], generation_config=GenerationConfig(**limit)).plan is None

    @pytest.mark.parametrize(
        "bad",
        [{"assistant_early_exit": "2"}, {"assistant_early_exit": 2, "num_assistant_tokens": 0},
         {"assistant_early_exit": 2, "assistant_confidence_threshold": 2}],
    )  # fmt: skip
    def test_a_bad_switch(self, bad):
        with pytest.raises(PlanError, match="got a plan with"):
            request([3], **bad)

    @pytest.mark.parametrize("plan", [3, {"exit": 3}, DraftPlan, ["plan.json"]], ids=told)
    def test_what_is_no_plan(self, plan):
        with pytest.raises(
            SettingError, match=r"got a plan of type \w+; expected a DraftPlan, the path of one, or None"
        ):
            request([3], plan=plan)


class TestOtherArguments:
    @pytest.mark.parametrize("width", [0, -1, 4, 5.0, True, "8"])
    def test_a_pass_width_that_does_not_hold_the_draft(self, width):
        with pytest.raises(SettingError, match=r"got pass_width=.*; expected an integer from 5 .the newest"):
            request([3], plan=DraftPlan.exit(2, num_draft_tokens=4), pass_width=width)

    @pytest.mark.parametrize("width", [1, 2, 20])
    def test_a_pass_width_for_plain_decoding(self, width):
        assert request([3], pass_width=width).pass_width == width

    @pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
    def test_a_lone_processor_or_criterion(self, name):
        """transformers takes lists; the message shows how to write one."""
        for value in (Mock(), [3], "x"):
            with pytest.raises(SettingError, match=rf"got {name}=.*; expected a list .*{name}=\["):
                request([3], **{name: value})

    def test_lists_and_none_will_do(self):
        processor = Mock()
        assert request([3], logits_processor=[processor]).caller_processors == [processor]
        assert request([3], logits_processor=None, stopping_criteria=None).caller_processors == []


class TestBeforeTheModelRuns:
    """Whatever is wrong with a call is found before the first pass, and by an error of our own."""

    BAD_CALLS = {
        "unknown name": ({"max_tokens": 3}, UnknownSettingError),
        "conflict": ({"max_new_tokens": 3, "max_length": 20}, SettingError),
        "bad value": ({"top_p": 2.0, "do_sample": True}, SettingError),
        "no new tokens": ({"max_new_tokens": 0}, SettingError),
        "unsupported": ({"num_beams": 3}, SettingError),
        "no tokenizer": ({"stop_strings": "x"}, SettingError),
        "empty": ({"inputs": []}, InputError),
        "too long": ({"inputs": [3] * 160}, InputError),
        "exit out of range": ({"plan": DraftPlan.exit(4)}, PlanMismatchError),
        "layer out of range": ({"plan": DraftPlan.skip([4])}, PlanMismatchError),
        "skips everything": ({"plan": DraftPlan.skip(range(4), range(4))}, PlanMismatchError),
        "no plan file": ({"plan": "no/such/plan.json"}, PlanError),
        "no draft model": ({"assistant_model": "./no/such/model"}, LayerSkipError),
        "draft model of a wrong type": ({"assistant_model": 3}, PlanError),
        "draft model of another vocabulary": ({"assistant_model": llama_with(vocab_size=70)}, PlanMismatchError),
        "rule": ({"acceptance_rule": "typical"}, SettingError),
        "seed": ({"seed": "x"}, SettingError),
        "pass width": ({"pass_width": 0}, SettingError),
        "mask": ({"attention_mask": [[1]]}, InputError),
        "bad words": ({"bad_words_ids": [[99]]}, SettingError),
    }

    @pytest.mark.parametrize(("options", "error"), BAD_CALLS.values(), ids=BAD_CALLS)
    def test_generate_and_stream_refuse_it(self, llama, monkeypatch, options, error):
        monkeypatch.setattr(Block, "attend", pytest.fail)
        options = {"inputs": prompt(), **options}
        with pytest.raises(error) as caught:
            wrap(llama).generate(**options)
        assert isinstance(caught.value, LayerSkipError)
        if "stop_strings" not in options:  # streaming needs a tokenizer anyway
            with pytest.raises(error):
                wrap(llama, TOKENIZER).stream(**options)


class TestDraftModelsVocabulary:
    """Token ids must mean the same in both models."""

    def test_without_tokenizers_the_sizes_decide(self, llama):
        with pytest.raises(PlanMismatchError, match=r"another vocabulary \(70 ids\) than the model's \(61 ids\)"):
            wrap(llama).generate(prompt(), assistant_model=llama_with(vocab_size=70))

    def test_tokenizers_that_differ(self, llama):
        """Sizes may agree by chance: 61 rows of embeddings both, and other letters."""
        draft = wrap(tiny_model("llama", seed=1), character_tokenizer(55))
        with pytest.raises(PlanMismatchError, match="another vocabulary.*Draft with a model of the same family"):
            wrap(llama, TOKENIZER).generate(prompt(), assistant_model=draft)
