"""lm-evaluation-harness: the adapter's texts are those of the harness's own model, and it says what it drafted."""

import copy
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import StoppingCriteriaList

import layerskip
from layerskip import DraftPlan, SettingError
from tests.special_models import agreeing_model
from tests.toy_tokenizer import character_tokenizer

PLANS = {"exit": DraftPlan.exit(2), "all": DraftPlan.skip(num_draft_tokens=5), "lookup": DraftPlan.lookup()}
TEXTS = ["Hello", "A somewhat longer text", "ab", "Hello World, "]


class FakeHFLM:
    """What the adapter uses of the harness's "hf" model (0.4.13); that one adds a criterion of its own for `stop`."""

    def __init__(self, pretrained, tokenizer, batch_size=1):
        self.model, self.tokenizer = pretrained, tokenizer

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        assert stop == [], "its criterion keeps a state for a whole batch"
        return self.model.generate(
            input_ids=context, max_length=max_length, stopping_criteria=StoppingCriteriaList(), use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id, do_sample=False, **generation_kwargs,
        )  # fmt: skip

    def get_model_info(self):
        return {"model_dtype": "float64"}


@pytest.fixture
def adapter_on(monkeypatch):
    """Imports the adapter on what stands in for the harness, and forgets it again."""

    def make(hflm):
        names = {
            "lm_eval": {}, "lm_eval.__main__": {"cli_evaluate": None}, "lm_eval.api": {}, "lm_eval.models": {},
            "lm_eval.api.registry": {"register_model": lambda name: lambda model: model},
            "lm_eval.models.huggingface": {"HFLM": hflm},
        }  # fmt: skip
        for name, content in names.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "layerskip.lm_eval", raising=False)
        adapter = importlib.import_module("layerskip.lm_eval").LayerSkipLM
        del layerskip.lm_eval, sys.modules["layerskip.lm_eval"]
        return adapter

    return make


class TestWithAFakeHarness:
    @staticmethod
    def decode(model, stop):
        inputs = model.tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
        return model._model_generate(
            context=inputs["input_ids"], attention_mask=inputs["attention_mask"], stop=stop,
            max_length=inputs["input_ids"].shape[1] + 24,
        )[:, inputs["input_ids"].shape[1] :]  # fmt: skip

    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    def test_the_same_texts_up_to_a_stop(self, adapter_on, plan):
        tokenizer = character_tokenizer()
        theirs = self.decode(FakeHFLM(agreeing_model("llama"), tokenizer), [])
        model = adapter_on(FakeHFLM)(agreeing_model("llama"), tokenizer, plan=plan, governor="off", batch_size=4)
        assert torch.equal(self.decode(model, []), theirs)
        stop = [tokenizer.decode(theirs[row, 6 + row : 8 + row]) for row in range(2)]
        stopped = self.decode(model, stop)
        for ours, whole in zip(tokenizer.batch_decode(stopped), tokenizer.batch_decode(theirs), strict=True):
            cut = min((whole.find(each) for each in stop if each in whole), default=len(whole))
            assert ours[:cut] == whole[:cut]
        assert (stopped[:2, 8:] == tokenizer.pad_token_id).any(), "no row ended before the others"

    def test_what_was_drafted_stands_beside_the_scores(self, adapter_on):
        model = adapter_on(FakeHFLM)(agreeing_model("llama"), character_tokenizer(), plan=PLANS["all"], governor="off")
        assert model.get_model_info()["layerskip_tokens_per_round"] is None
        for _ in range(2):
            self.decode(model, [])
        info = model.get_model_info()
        assert info["model_dtype"] == "float64" and info["layerskip_governor"] == "off"
        assert info["layerskip_accepted"] == sum(each.accepted for each in model.stats) > 0
        assert info["layerskip_tokens_per_round"] > 2

    def test_transformers_switches(self, adapter_on):
        model = adapter_on(FakeHFLM)(agreeing_model("llama"), character_tokenizer(), prompt_lookup_num_tokens=3)
        self.decode(model, [])
        assert model.stats[0].accepted_histogram[3:] and model.get_model_info()["layerskip_prompt_lookup_num_tokens"]

    def test_a_call_that_cannot_be_decoded_so(self, adapter_on):
        """Rather an error than a score that was decoded in another way."""
        model = adapter_on(FakeHFLM)(agreeing_model("llama"), character_tokenizer(), plan=PLANS["exit"])
        with pytest.raises(SettingError, match="beam"):
            model._model_generate(torch.tensor([[3, 4]]), 9, [], attention_mask=torch.ones(1, 2), num_beams=2)


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "layerskip.lm_eval", raising=False)
    with pytest.raises(ImportError, match=r'got no lm-evaluation-harness .*pip install "layerskip\[lm-eval\]"'):
        importlib.import_module("layerskip.lm_eval")


@pytest.mark.filterwarnings("ignore")  # of the harness and what it brings along
class TestWithTheHarness:
    @pytest.fixture
    def models(self):
        """Makes its "hf" model and ours on one checkpoint."""
        pytest.importorskip("lm_eval.models.huggingface", reason="the extra lm-eval is not installed")
        from lm_eval.models.huggingface import HFLM

        from layerskip.lm_eval import LayerSkipLM

        def make(batch_size, **drafting):
            shared = {"pretrained": copy.deepcopy(agreeing_model("llama")), "tokenizer": character_tokenizer()}
            return HFLM(**shared, batch_size=batch_size), LayerSkipLM(**shared, batch_size=batch_size, **drafting)

        return make

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    def test_generation_and_likelihood(self, models, plan, batch_size):
        theirs, ours = models(batch_size, plan=plan, governor="off")
        instances = [SimpleNamespace(args=(text, {"until": ["e", "ab"], "max_gen_toks": 24})) for text in TEXTS]
        texts = ours.generate_until(instances, disable_tqdm=True)
        assert texts == theirs.generate_until(instances, disable_tqdm=True)
        assert sum(each.accepted for each in ours.stats) > 0
        pairs = [SimpleNamespace(args=(text, " and more")) for text in TEXTS]
        likelihoods = (model.loglikelihood(pairs, disable_tqdm=True) for model in (ours, theirs))
        assert next(likelihoods) == next(likelihoods)

    def test_a_task_scores_the_same(self, models, tmp_path):
        """Through the harness's own evaluation, on a task of the test's own."""
        pytest.importorskip("datasets")
        lm_eval = pytest.importorskip("lm_eval")
        theirs, ours = models(2, plan=PLANS["all"], governor="off")
        answer = theirs.generate_until([SimpleNamespace(args=(TEXTS[0], {"until": ["\n"], "max_gen_toks": 8}))])[0]
        data = tmp_path / "data.jsonl"
        data.write_text("".join(f'{{"text": "{text}", "answer": "{answer}"}}\n' for text in TEXTS))
        task = {
            "task": "toy", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{text}}",
            "doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match"}],
        }  # fmt: skip
        scores = [
            lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0)["results"]["toy"]
            for model in (ours, theirs)
        ]
        assert scores[0] == scores[1]
        assert 0 < scores[0]["exact_match,none"] < 1
        assert ours.get_model_info()["layerskip_accepted"] > 0
