"""Scoring of detections: COCO metrics, the gate, the report."""
