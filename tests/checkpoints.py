"""Tiny checkpoints on disk, with a tokenizer: what a person would point the command line at."""

from pathlib import Path

from tests.tiny_models import tiny_model
from tests.toy_tokenizer import character_tokenizer


def save_tiny(folder: Path, name: str = "llama", seed: int = 0) -> Path:
    """Save the float64 model of that row and the tokenizer with a token per character."""
    tiny_model(name, seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder
