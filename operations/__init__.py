"""Long-term operation, based on the records of runs. Steps never import this package."""
