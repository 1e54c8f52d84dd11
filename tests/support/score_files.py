"""Scores a file of detections against a file of ground truth."""

from trainer.evaluation.coco import evaluate, read_detections, read_truth


def evaluate_files(truth_json, detections_json, engine="hotcoco"):
    """The metrics of a file of detections, by name, and those of the classes."""
    _, truth = read_truth(str(truth_json))
    result = evaluate(truth, read_detections(str(detections_json), truth), engine=engine)
    return {**result.metrics, "per_class": result.per_class}
