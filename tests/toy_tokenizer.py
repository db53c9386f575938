"""Tiny tokenizers made in memory: one with a token per character, one with a token per byte."""

import functools
import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import VOCAB_SIZE

_SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2, as in the tiny models
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@functools.cache
def character_tokenizer(size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """One token per character: letters, space, and as much punctuation as `size` ids leave room for.

    Its ids are those of the tiny models, all of them by default.
    """
    characters = [*string.ascii_letters, *" \n:.,!"][: size - len(_SPECIAL)]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _finished(tokenizer)


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that a character beyond ASCII takes several; 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


@functools.cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, each with the space before it, which the first word of a text loses when decoded."""
    words = ["▁" + first + second for first in "bdfgklmn" for second in ("a", "e", "i", "o", "u", "al", "en")]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *words, "▁.", "▁,"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    pad, bos, eos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, chat_template=_CHAT_TEMPLATE
    )
