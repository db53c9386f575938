"""layerskip: one checkpoint drafts for itself, and the output is exactly its own."""
