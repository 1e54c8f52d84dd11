"""Shared code of the DETRs: base class, matching and losses, denoising queries, weight names."""
