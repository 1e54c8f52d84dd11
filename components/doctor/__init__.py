"""What a run needs, checked before it is started. Each check is a function that yields findings."""
