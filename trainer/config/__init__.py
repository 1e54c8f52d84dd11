"""Hyper-parameters: their defaults, their checks, and how they are read from text and files."""
