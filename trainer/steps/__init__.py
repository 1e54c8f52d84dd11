"""The five steps of a run, one typed function each: manifest in, manifest out."""
