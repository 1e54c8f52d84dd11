"""Pages about an evaluation and about shards: plots, tables, a gallery."""
