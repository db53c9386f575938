"""The model is borrowed: after any call, one that ended in an error too, it is as it was and the next call is right."""

import copy
import gc
import signal
import threading
import weakref

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from layerskip import DraftPlan, LayerSkipError, wrap
from layerskip.models.block import Block
from layerskip.models.cache import KVCache
from tests.drafting import always
from tests.special_models import agreeing_model
from tests.tiny_models import prompt, tiny_model, transformers_greedy
from tests.toy_tokenizer import character_tokenizer

PLANS = {
    "plain": None,
    "exit": DraftPlan.exit(2),
    "skip": DraftPlan.skip([1], [2]),
    "model": DraftPlan.model(tiny_model("qwen3")),
}
OPTIONS = {"max_new_tokens": 12, "eos_token_id": None}


def snapshot(model: PreTrainedModel) -> dict:
    """Everything that a call could change, by value (and by place, for weights)."""
    return {
        "tensors": {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
            for name, module in model.named_modules()
        },
        "training": {name: module.training for name, module in model.named_modules()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "grads": {name: parameter.grad for name, parameter in model.named_parameters()},
        "logits": model(prompt(seed=4)).logits.detach().clone(),
    }


def assert_unchanged(model: PreTrainedModel, before: dict) -> None:
    after = snapshot(model)
    for name, (place, tensor) in before["tensors"].items():
        assert after["tensors"][name][0] == place, f"{name} was moved"
        assert torch.equal(after["tensors"][name][1], tensor), f"{name} was changed"
    for name, buffer in before["buffers"].items():
        assert torch.equal(after["buffers"][name], buffer), name
    assert torch.equal(after["logits"], before["logits"])
    for part in ("config", "generation_config", "attributes", "hooks", "training", "requires_grad", "grads"):
        assert after[part] == before[part], part


@pytest.fixture
def borrowed():
    """A model of this test's own, its state before, and a check that it is the same and decodes as before."""
    hf_model = copy.deepcopy(agreeing_model("llama"))
    model, before = wrap(hf_model, character_tokenizer()), snapshot(hf_model)
    own = transformers_greedy(hf_model, prompt(), max_new_tokens=12)
    yield model
    assert_unchanged(hf_model, before)
    for plan in (None, DraftPlan.exit(2)):
        assert torch.equal(model.generate(prompt(), **always(plan), **OPTIONS).sequences, own)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ["llama", "llama-dynamic-rope", "mistral-window", "qwen2", "qwen3"])
def test_after_a_call(family, plan):
    hf_model = copy.deepcopy(agreeing_model(family))
    before = snapshot(hf_model)
    wrap(hf_model).generate(prompt(), **always(plan), **OPTIONS)
    wrap(hf_model).generate(prompt(), **always(plan), do_sample=True, seed=0, **OPTIONS)
    assert_unchanged(hf_model, before)


def test_the_draft_model_too():
    draft = copy.deepcopy(tiny_model("qwen3"))
    before = snapshot(draft)
    wrap(agreeing_model("llama")).generate(prompt(), **always(DraftPlan.model(draft)), **OPTIONS)
    assert_unchanged(draft, before)


def test_a_model_in_training_mode_stays_there():
    """And its gradients and their flags too: someone may be fine-tuning it."""
    hf_model = copy.deepcopy(agreeing_model("llama")).train().requires_grad_(True)
    hf_model(prompt()).logits.sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in hf_model.named_parameters()}
    result = wrap(hf_model).generate(prompt(), **always(DraftPlan.exit(2)), **OPTIONS)
    assert not result.sequences.requires_grad
    assert hf_model.training
    for name, parameter in hf_model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, grads[name])


def test_transformers_own_generate_works_before_and_after(borrowed):
    """On the same object, which keeps no cache or setting of ours."""
    before = transformers_greedy(borrowed.hf_model, prompt(), max_new_tokens=12)
    borrowed.generate(prompt(), **always(DraftPlan.exit(2)), **OPTIONS)
    assert torch.equal(transformers_greedy(borrowed.hf_model, prompt(), max_new_tokens=12), before)


def test_weights_that_are_changed_later_are_seen():
    """No weight is copied: a LoRA merge or an optimiser step acts on the next call."""
    hf_model = copy.deepcopy(agreeing_model("llama"))
    model = wrap(hf_model)
    first = model.generate(prompt(), **OPTIONS)
    with torch.no_grad():
        hf_model.lm_head.weight.copy_(hf_model.lm_head.weight.roll(1, 0))
        hf_model.model.layers[1].mlp.up_proj.weight.mul_(-1)
    second = model.generate(prompt(), **always(DraftPlan.exit(2)), **OPTIONS)
    assert second.new_token_ids != first.new_token_ids
    assert torch.equal(second.sequences, transformers_greedy(hf_model, prompt(), max_new_tokens=12))


class Fault(Exception):
    """Of the caller's own code."""


class Failing:
    """Fails at its n-th call."""

    def __init__(self, calls: int, error: BaseException) -> None:
        self.calls, self.error = calls, error

    def count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise self.error


class FailingProcessor(Failing, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.count()
        return scores


class FailingCriterion(Failing, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.count()
        return torch.tensor([False])


class FailingStreamer(Failing, BaseStreamer):
    def put(self, value):
        self.count()

    def end(self):
        self.count()


ROLES = {
    "logits_processor": lambda *how: [FailingProcessor(*how)],
    "stopping_criteria": lambda *how: [FailingCriterion(*how)],
    "streamer": FailingStreamer,
}


@pytest.mark.parametrize("error", [Fault(), KeyboardInterrupt()], ids=["fault", "interrupt"])
@pytest.mark.parametrize("calls", [0, 1, 2, 9])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("plan", ["plain", "exit"])
def test_after_a_fault_in_the_callers_own_code(borrowed, plan, role, calls, error):
    """In the prompt's pass, in a draft, in verification, at a commit: it comes out as it is, and leaves no trace."""
    with pytest.raises(type(error)):
        borrowed.generate(prompt(), **always(PLANS[plan]), **{role: ROLES[role](calls, error)}, **OPTIONS)


@pytest.mark.parametrize("passes", [0, 3, 4, 7, 11, 20])
@pytest.mark.parametrize("plan", ["plain", "exit", "model"])
def test_after_an_interruption_inside_a_block(borrowed, monkeypatch, plan, passes):
    """Ctrl-C in the middle of a pass, with a cache half written."""
    attend, left = Block.attend, iter(range(passes))

    def interrupted(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return attend(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Block, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            borrowed.generate(prompt(), **always(PLANS[plan]), **OPTIONS)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_after_a_real_ctrl_c(borrowed):
    """The signal arrives wherever the interpreter happens to be."""
    main = threading.get_ident()
    # Started in the background, as by nohup, the process ignores the signal and this would go on for ever.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.15, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            while True:
                borrowed.generate(prompt(), **always(DraftPlan.exit(2)), **OPTIONS)
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()


@pytest.mark.parametrize("pieces", [0, 1, 5])
@pytest.mark.parametrize("plan", ["plain", "exit"])
def test_after_a_stream_that_was_left(borrowed, plan, pieces):
    """Read in part and dropped: nothing has to be closed, and its memory is free at once."""
    stream = borrowed.stream(prompt(), **always(PLANS[plan]), **OPTIONS)
    for _ in range(pieces):
        next(stream)
    cache = weakref.ref(stream._make_result.args[1].state.cache)
    del stream
    assert cache() is None


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temprature": 1},
        {"plan": DraftPlan.exit(9)},
        {"plan": DraftPlan.skip(range(4), range(4))},
        {"inputs": []},
        {"inputs": [3] * 200},
        {"stop_strings": [""]},
        {"num_beams": 4},
        {"suppress_tokens": list(range(61))},
    ],
    ids=repr,
)
def test_after_an_error_of_ours(borrowed, options):
    with pytest.raises(LayerSkipError):
        borrowed.generate(**{"inputs": prompt(), "plan": DraftPlan.exit(2), **OPTIONS, **options})


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_call_leaves_no_memory_behind(borrowed, monkeypatch, plan):
    """Catches a cache that the model, a plan or a module keeps."""
    caches, init = [], KVCache.__init__

    def noted(cache, **shape):
        caches.append(weakref.ref(cache))
        init(cache, **shape)

    monkeypatch.setattr(KVCache, "__init__", noted)
    result = borrowed.generate(prompt(), **always(plan), **OPTIONS)
    gc.collect()
    assert [cache() for cache in caches] == [None] * (2 if plan and plan.draft_model else 1)
    assert result.stats.new_tokens == 12
