"""The conditions under which a figure was measured, without which it is no result."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import layerskip

__all__ = ["conditions", "program_conditions"]

_ROOT = Path(__file__).resolve().parent.parent


def conditions(model: layerskip.Model, prompts: Sequence[str]) -> dict[str, Any]:
    """Everything that a reader needs to repeat or to discount a measurement of `model` on `prompts`."""
    decoder = model.decoder
    return {
        **program_conditions(),
        "processor": _processor(),
        "device": str(decoder.device),
        "accelerator": torch.cuda.get_device_name(decoder.device) if decoder.device.type == "cuda" else None,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "architecture": decoder.architecture,
        "num_blocks": decoder.num_blocks,
        "weights": model.identity.weights,
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16],
    }


def program_conditions() -> dict[str, Any]:
    """What was run, of which state of the code: all that a figure depends on that is only computed."""
    return {
        "command": " ".join([Path(sys.executable).name, "-m", *_program()]),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "-uno") else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _program() -> list[str]:
    """The command line without the machine's own paths."""
    module = sys.modules["__main__"].__spec__
    arguments = [Path(each).name if "/" in each else each for each in sys.argv[1:]]
    return [module.name if module else Path(sys.argv[0]).name, *arguments]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:  # a borrowed machine may well have none
        return "unknown" if arguments[0] == "rev-parse" else ""
    return done.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")


def _processor() -> str:
    """The processor's model and the instructions that low-precision arithmetic depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    wanted = [
        flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()
    ]
    return f"{fields.get('model name', 'unknown')} ({', '.join(wanted)})"
