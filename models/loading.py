"""Load a checkpoint as a model and, if it has one, its tokenizer: exactly what is stored, or an error.

The architecture is looked up before weights are read or downloaded, and weights that are missing are never replaced by
random ones. It does not know how files are found (`checkpoint_files.py`) or how the model is run (`decoder.py`).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from layerskip.errors import CheckpointError, SettingError, UnsupportedModelError, did_you_mean
from layerskip.models.checkpoint_files import (
    COPY_AGAIN,
    Source,
    check_gguf,
    explained,
    locate,
    one_line,
    read_json_config,
    some,
    weight_files,
)
from layerskip.models.families import family_of

__all__ = ["Device", "DeviceMap", "load_checkpoint", "parse_dtype", "quiet", "read_config"]

Device = str | int | torch.device
DeviceMap = Device | Mapping[str, Device]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
}
SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")  # values of device_map that are no device
_PROCESS_WIDE = threading.RLock()  # held in `quiet`


def load_checkpoint(
    checkpoint: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: Device | None = None,
    device_map: DeviceMap | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickled_weights: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return the model, in evaluation mode and without gradients, and its tokenizer (None where there is none).

    Args:
        checkpoint: a folder with ``config.json`` and safetensors weights, a ``.gguf`` file, or a hub id such as
            ``"Qwen/Qwen3-0.6B"``.
        dtype: of the weights, by name or as a torch.dtype; ``"auto"`` keeps the checkpoint's (float32 for GGUF).
        device: where the whole model goes; None leaves it on the CPU.
        device_map: spreads the model over devices as in transformers; instead of `device`.
        gguf_file: name of a GGUF file in the folder or repository; its weights are unpacked to `dtype`.
        revision: branch, tag or commit of a hub repository.
        trust_remote_code: run Python code that comes with the checkpoint.
        allow_pickled_weights: read ``pytorch_model.bin``, the old format, where there are no safetensors.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged, or in a form that is refused.
        UnsupportedModelError: its architecture has no row in `families.FAMILIES`, or its dtype is no plain float.
        SettingError: an argument that cannot take effect here.
    """
    options: dict[str, Any] = {"dtype": parse_dtype(dtype), "device_map": _placement(device, device_map)}
    source = locate(checkpoint, gguf_file, revision, with_code=trust_remote_code)
    options["config"] = config = read_config(source, trust_remote_code)
    has_tokenizer = check_gguf(source.gguf) if source.gguf else source.has_tokenizer()
    tokenizer = _load_tokenizer(source, trust_remote_code) if has_tokenizer else None
    if source.gguf:
        model = _load_gguf(source, source.gguf, options)
    else:
        quantised = getattr(config, "quantization_config", None) is not None
        files = weight_files(source, allow_pickled=allow_pickled_weights, quantised=quantised)
        options |= {"use_safetensors": files[0].suffix == ".safetensors", "trust_remote_code": trust_remote_code}
        model = _from_pretrained(AutoModelForCausalLM, source.folder, source, options)
    return _finish(model, source, device), tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars in the block; the caller's own settings are back after it.

    One thread at a time is inside, others wait: these settings are the whole process's, and so are torch's default
    dtype and initialisers, which transformers changes while it loads. Restored out of turn, they would stay changed.
    """
    with _PROCESS_WIDE, _silenced():
        yield


@contextmanager
def _silenced() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    # The first versions of transformers 5 have no such hook; their bars stay.
    set_hook = getattr(transformers_logging, "set_tqdm_hook", lambda hook: None)
    previous_hook = set_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        set_hook(previous_hook)


def parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the torch.dtype that `dtype` names, or ``"auto"``.

    Raises:
        SettingError: it is neither "auto" nor a plain float of 16 bits or more.
    """
    if dtype == "auto" or dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise SettingError(
        f"got dtype={dtype!r}; expected 'auto', one of {', '.join(DTYPES)}, or the torch.dtype of one of these."
        + did_you_mean(str(dtype), DTYPES)
    )


def _placement(device: Device | None, device_map: DeviceMap | None) -> DeviceMap | None:
    """Check both, and return the device_map that puts weights there directly (without accelerate: None)."""
    if device is not None and device_map is not None:
        raise SettingError(
            f"got device={device!r} and device_map={device_map!r}; expected one of them. Drop the other."
        )
    if device_map is not None and not find_spec("accelerate"):
        raise SettingError(f"got device_map={device_map!r}, which needs accelerate: pip install accelerate")
    for each in device_map.values() if isinstance(device_map, Mapping) else (device, device_map):
        if each is not None and each not in SPREADS:
            _check_device(each)
    return {"": device} if device is not None and find_spec("accelerate") else device_map


def _check_device(device: Device) -> None:
    if str(device) in ("meta", "disk"):
        raise SettingError(
            f"got device {str(device)!r}, which cannot be used: every pass needs all weights. Expected one of those "
            f"that torch finds here: {', '.join(_usable_devices())}. If they have no room, choose a smaller dtype or a "
            "quantised checkpoint."
        )
    try:
        _refuse_mps(torch.device(device))
        torch.zeros(1, device=device).item()  # .item(), because device "meta" takes everything else
    except (RuntimeError, AssertionError, TypeError) as error:
        raise SettingError(
            f"got device {device!r}, which cannot be used: {one_line(error)} "
            f"Expected one of those that torch finds here: {', '.join(_usable_devices())}."
        ) from error


def _refuse_mps(device: torch.device) -> None:
    if device.type == "mps":
        raise SettingError(
            f"got device {str(device)!r}, which has no float64, and drafts are accepted by probabilities in float64. "
            f"Expected one of {', '.join(_usable_devices())}."
        )


def _usable_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "mps":
        return ["cpu"]
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count()))]


def read_config(source: Source, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the config of a checkpoint, and refuse what the runtime cannot run.

    Raises:
        CheckpointError: it is missing, damaged, contradicts itself, or needs the checkpoint's own code unasked.
        UnsupportedModelError: an architecture without a row, a config that asks for what its row refuses, or a stored
            dtype that is no plain float.
    """
    raw = _read_gguf_config(source.gguf) if source.gguf else read_json_config(source)
    architecture = _checked_architecture(raw, source)
    if raw.get("auto_map") and not trust_remote_code:
        raise CheckpointError(
            f"{source.name!r} comes with Python code of its own (auto_map in config.json), which is not run unasked. "
            "Read it, and pass trust_remote_code=True if you trust it."
        )
    stored = str(raw.get("dtype") or raw.get("torch_dtype") or "auto")
    if stored not in ("auto", *DTYPES):
        raise UnsupportedModelError(
            f"config.json of {source.name!r} has dtype {stored!r}; expected one of {', '.join(DTYPES)}. "
            "Use the checkpoint it was made from."
        )
    with quiet(), explained(f"use the config of {source.name!r}", "Compare it with that of the original checkpoint."):
        config: PreTrainedConfig
        if source.gguf:
            config = AutoConfig.for_model(**raw)
        else:
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    family_of(architecture, config)
    return config


def _read_gguf_config(file: Path) -> dict[str, Any]:
    with quiet(), explained(f"read the GGUF file {file}", COPY_AGAIN):
        return PreTrainedConfig.get_config_dict(file.parent, gguf_file=str(file))[0]


def _checked_architecture(raw: dict[str, Any], source: Source) -> str:
    """Refuse by its name what the runtime cannot run, else return it; a GGUF file gives the model type only."""
    model_type = str(raw.get("model_type"))
    of_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)  # None: known to the checkpoint's own code at most
    declared = raw.get("architectures") or [of_type or model_type]
    family_of(str(declared[0]))
    if of_type is not None and of_type not in declared:
        raise CheckpointError(
            f"the config of {source.name!r} contradicts itself: architectures {declared}, but model_type "
            f"{model_type!r}, which is a {of_type}. Correct the one that is wrong."
        )
    return str(declared[0])


def _from_pretrained(model_class: Any, folder: Path | None, source: Source, options: dict[str, Any]) -> Any:
    """Call `model_class.from_pretrained` and refuse a model that is not exactly what is stored."""
    with quiet(), explained(f"load the weights of {source.name!r}", COPY_AGAIN):
        model, report = model_class.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # not ignored: `_check_report` says more than the error would
            **options,
        )
    _check_report(report, source)
    return model


def _check_report(report: dict[str, Any], source: Source) -> None:
    missing, mismatched, unused = (sorted(report[f"{kind}_keys"]) for kind in ("missing", "mismatched", "unexpected"))
    if mismatched:
        name, got, expected = mismatched[0]
        raise CheckpointError(
            f"in the weights of {source.name!r}, {name} has shape {tuple(got)}; its config expects {tuple(expected)} "
            f"({len(mismatched)} such in all). Take config and weights from the same checkpoint."
        )
    if missing:
        raise CheckpointError(
            f"the weights of {source.name!r} lack what its config expects: {some(missing)}. They would be random "
            "numbers. Take config and weights from the same checkpoint."
        )
    if unused:
        warnings.warn(
            f"the weights of {source.name!r} hold what its config has no place for: {some(unused)}. The model does "
            "without; if these are layers, the config is not the one they were saved with.",
            stacklevel=4,  # the caller of `load_checkpoint`
        )


def _load_gguf(source: Source, file: Path, options: dict[str, Any]) -> Any:
    """Unpack a GGUF file into a model like any other.

    The model that transformers makes of it refuses to be saved, so a second one is built around the same tensors.
    """
    unpack = {"config": options["config"], "gguf_file": str(file), "dtype": options["dtype"]}
    if unpack["dtype"] == "auto":
        unpack["dtype"] = torch.float32
    if hasattr(transformers, "GgufConfig"):  # older versions can do nothing but unpack
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _without_gguf_bar():
        unpacked = _from_pretrained(AutoModelForCausalLM, file.parent, source, unpack)
    rebuild = {**options, "dtype": unpacked.dtype, "state_dict": unpacked.state_dict()}
    return _from_pretrained(type(unpacked), None, source, rebuild)


@contextmanager
def _without_gguf_bar() -> Iterator[None]:
    """Hide the one progress bar that the settings do not reach: transformers makes it with a tqdm of its own."""
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    with quiet():
        bar = getattr(reader, "tqdm", None)
        reader.tqdm = lambda tensors, **_: tensors
        try:
            yield
        finally:
            reader.tqdm = bar


def _load_tokenizer(source: Source, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    gguf = {"gguf_file": str(source.gguf)} if source.gguf else {}
    with quiet(), explained(f"read the tokenizer of {source.name!r}", COPY_AGAIN):
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code, **gguf)
    tokenizer.name_or_path = source.name
    return tokenizer


def _finish(model: Any, source: Source, device: Device | None) -> PreTrainedModel:
    model.eval().requires_grad_(False)
    model.name_or_path = model.config.name_or_path = source.name  # instead of a folder in the hub's cache
    if device is not None and not find_spec("accelerate"):
        model.to(device)
    for parameter in model.parameters():
        _refuse_mps(parameter.device)  # where device_map="auto" put it
    if model.dtype == torch.float64 and family_of(type(model).__name__).experts:
        model.set_experts_implementation("eager")  # the kernel that transformers prefers has no float64
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SettingError(
            "the device_map leaves weights on disk or offloads them, but every pass needs all of them. Map all modules "
            "to devices with room for them, or choose a smaller dtype."
        )
    return cast(PreTrainedModel, model)
