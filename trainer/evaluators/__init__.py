"""Complete evaluations of models on shards: predictions, scores, gate and report."""
