"""What the DETRs share: their base class, matching and losses, denoising queries, names of weights."""
