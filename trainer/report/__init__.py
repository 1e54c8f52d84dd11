"""HTML pages that report an evaluation, and the contents of shards."""
