"""Training jobs through Run:ai's command line."""
