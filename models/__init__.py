"""layerskip.models: load, describe and run a decoder-only checkpoint block by block; no decoding logic."""
