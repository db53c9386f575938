"""What one call has read of a text, for the next call that goes on from there.

It is only a cache, known by the tokens that it holds: of any text that begins with the same tokens, so much need not be
read again. Whoever keeps it may change the text as he likes; what is read is always what a fresh call would read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from layerskip.models.adapter import TrainedPart
from layerskip.models.cache import KVCache
from layerskip.models.decoder import Decoder
from layerskip.reading import Reading, common_length

__all__ = ["Memory", "new_cache"]


def new_cache(decoder: Decoder, batch: int, capacity: int, adapter: TrainedPart | None) -> KVCache:
    """An empty cache, with room for what `adapter` needs; errors as in `KVCache`."""
    needs = (0, ()) if adapter is None else (adapter.spec.num_blocks, adapter.kept_states)
    return decoder.new_cache(batch, capacity, *needs)


@dataclass(frozen=True)
class Memory:
    """The text of one row as far as it was read.

    Whoever uses it gives it away: a call writes into the cache (`resume`), and leaves another behind (`settled`).

    Attributes:
        token_ids: those whose keys and values the cache holds; in a call that is running, the text as it grows.
        cache: None: nothing was read.
        readings: see `DecodeState`.
        adapter: whose entries and states the cache has room for, too.
        weights: that the model had (`Decoder.weights_state`).
    """

    token_ids: Sequence[int] = ()
    cache: KVCache | None = None
    readings: Mapping[object, Reading] = field(default_factory=dict)
    adapter: TrainedPart | None = None
    weights: Hashable = None

    def resume(self, decoder: Decoder, prompt: Sequence[int], capacity: int, adapter: TrainedPart | None) -> Memory:
        """What a call can use of it: a cache for `capacity` positions that holds as much of `prompt` as is known.

        The last token is read in any case: what follows it is not remembered. Trained blocks that have not followed
        the text from its beginning need the whole of it again, and so does a model whose weights were changed.

        Args:
            adapter: trained blocks that the call runs.

        Raises:
            DecodingError: there is no memory for the cache.
        """
        cache, weights = self.cache, decoder.weights_state()
        if cache is None or weights != self.weights or adapter not in (None, self.adapter):
            return Memory(cache=new_cache(decoder, 1, capacity, adapter), adapter=adapter, weights=weights)
        held = min(common_length(self.token_ids, prompt), len(prompt) - 1)
        cache.commit([held])
        if cache.capacity < capacity:  # doubling: a text that grows is copied a logarithmic number of times
            cache.resize(max(capacity, min(2 * cache.capacity, decoder.max_positions)))
        readings = {who: replace(each, held=[min(each.held[0], held)]) for who, each in self.readings.items()}
        return replace(self, token_ids=prompt[:held], readings=readings)

    def shared_by(self, adapter: TrainedPart | None) -> int:
        """Up to which position the cache holds what the model, and `adapter`, make of the text."""
        reads = adapter is not None and adapter.spec.num_blocks > 0  # heads have no entries of their own
        reading = self.readings.get(adapter) if reads else Reading([len(self.token_ids)])
        return 0 if reading is None else min(len(self.token_ids), *reading.held)

    def settled(self, is_whole: bool) -> Memory:
        """What is known after the call.

        Args:
            is_whole: the call went to its end.
        """
        if self.cache is None:
            return Memory()
        caches = {who: each.cache or self.cache for who, each in self.readings.items()}
        if not is_whole:
            for cache in (self.cache, *caches.values()):
                cache.wipe()
        # A reader that was interrupted may count drafts that it has read.
        readings = {
            who: replace(each, held=[min(each.held[0], caches[who].lengths[0])]) for who, each in self.readings.items()
        }
        return replace(self, token_ids=self.token_ids[: self.cache.lengths[0]], readings=readings)

    def copied(self) -> Memory:
        """The same in tensors of its own, no larger than they need be."""
        readings = {
            who: Reading(list(each.held), each.cache and each.cache.copied(max(1, *each.cache.lengths)))
            for who, each in self.readings.items()
        }
        cache = self.cache and self.cache.copied(max(1, len(self.token_ids)))
        return replace(self, cache=cache, readings=readings)
