"""What surrounds the weights of a checkpoint that was trained: its tokenizer, and the end of its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from layerskip.training.folder import STATE, writing

__all__ = ["conditions_card", "write_surroundings"]


def write_surroundings(folder: Path, generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Into `folder`, before the training, so that a disk without room is known in time (CheckpointError)."""
    with writing(folder / "generation_config.json"):
        (folder / STATE).mkdir(exist_ok=True)
        generation.save_pretrained(folder)
    if tokenizer is not None:
        with writing(folder / "tokenizer_config.json"):
            tokenizer.save_pretrained(folder)


def conditions_card(made: Mapping[str, Any]) -> str:
    """From which weights, on which texts, by which settings: the last paragraph of a ``README.md``.

    Args:
        made: a provenance with "trained_from", "steps", "texts" and "settings".
    """
    return f"""\
Trained from weights with the fingerprint `{made["trained_from"]["weights"]}`, {made["steps"]} steps on texts of
{made["texts"]["tokens"]:,} tokens with the digest `{made["texts"]["digest"]}`, with these settings:

```json
{json.dumps(made["settings"], indent=2)}
```
"""
