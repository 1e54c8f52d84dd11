"""Scores detections: COCO metrics, comparison with a baseline, the gate."""
