"""Operation over months: lineage, retention, costs, notifications, drift, tuning. Reads records; the steps never import it."""
