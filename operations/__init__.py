"""Operation over months by the records of runs, whose steps never import this package."""
