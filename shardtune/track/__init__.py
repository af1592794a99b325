"""Trackers: a run's figures in TensorBoard, W&B, MLflow, Trackio or CSV files, each fed from
metrics.jsonl by a process of its own, so that none can slow, stop or change a run."""
