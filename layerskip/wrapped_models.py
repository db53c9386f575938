"""Wrapped models of transformers models that somebody else owns: made once, kept as long as the owner keeps his.

Wrapping reads every module, and what a wrapped model has loaded and recorded (draft models, adapters, CUDA graphs,
compiled passes) serves its later calls.
"""

from __future__ import annotations

import copy
import threading
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from layerskip.api import Model
from layerskip.errors import UnsupportedModelError

__all__ = ["wrapped_model"]

# The one state of this process beside its settings. An entry goes with its key, unless its value holds that: a plan by
# which a model drafts for itself as a second model does, until the plan's rounds and draft model are let go.
_KEPT: WeakKeyDictionary[PreTrainedModel, Model] = WeakKeyDictionary()
_LOCK = threading.Lock()


def wrapped_model(hf_model: PreTrainedModel) -> Model:
    """The wrapped `hf_model`, made anew if modules or weights of it were replaced; several threads may ask.

    Raises:
        UnsupportedModelError: it cannot be wrapped.
    """
    with _LOCK:
        model = _KEPT.get(hf_model)
        if model is not None and not _has_changed(model):
            return model
        model = _KEPT[hf_model] = Model(_twin(hf_model))
        return model


def _has_changed(model: Model) -> bool:
    try:
        model.decoder.refuse_changes()
    except (UnsupportedModelError, AttributeError):  # the latter: a module is gone
        return True
    return False


def _twin(hf_model: PreTrainedModel) -> PreTrainedModel:
    """Another object over the same modules and weights: a value that held its key would keep it for ever.

    The twin sees modules that are replaced later, as both have the same dictionaries of modules.
    """
    twin = copy.copy(hf_model)
    for name in [name for name, value in vars(hf_model).items() if callable(value)]:
        # Bound to the model itself, and never called here. But a forward of the owner's must be seen, to be refused.
        if name != "forward" or hasattr(hf_model, "_hf_hook"):
            del vars(twin)[name]
    return twin
