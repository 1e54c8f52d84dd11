"""The configuration: hyper-parameters, defaults, validation and parsing."""
