"""The detector: backbone, pyramid, heads, anchors, loss and postprocessing."""
