"""From a source of annotated images to shards on which to train, and from them to batches."""
