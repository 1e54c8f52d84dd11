"""Code shared by all DETRs: base class, matching, losses, denoising queries, weight names."""
