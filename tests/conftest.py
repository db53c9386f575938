import importlib
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from tests.tiny_models import FAMILY_NAMES, tiny_model

# Two threads on tensors this small are many times slower than one when the machine is busy.
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(params=FAMILY_NAMES)
def family_model(request):
    """A tiny random float64 model of each family; treat it as read-only."""
    return tiny_model(request.param)


@pytest.fixture
def llama():
    """A tiny random float64 Llama; treat it as read-only."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def reference_checkpoint():
    """The folder of the real SmolLM2-135M-Instruct; fetched once per machine. For tests marked `smollm2` only."""
    from layerskip.models.reference import smollm2_path

    return smollm2_path()


@pytest.fixture
def module_of(monkeypatch):
    """A module of experiments/, imported here; the root is off the path where the package is installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    return lambda name: importlib.import_module(f"experiments.{name}")


@pytest.fixture
def extra_arm(module_of, monkeypatch):
    """Put an arm into the comparison's table whose calls do what a function says before they decode plainly."""

    def put(before, name="extra", grid=({},)):
        rows, arms = module_of("compare_arms"), module_of("arms")

        def make(shop, name, settings):
            plain = arms.our_arm(name, shop.model, None)

            def call(prompts, new_tokens):
                before(prompts, new_tokens)
                return plain.call(prompts, new_tokens)

            return arms.Arm(name, call, {"plan": None})

        monkeypatch.setitem(rows.ARMS, name, module_of("arm_rows").ArmRow("of the test", make, grid))

    return put
