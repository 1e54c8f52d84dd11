"""Operation over months: lineage, retention, costs, notifications, drift and tuning.

These read the records of runs. The steps of a run never import this package.
"""
