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
