"""All hyper-parameters with their defaults: one tree of dataclasses, loaded strictly."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from trainer.config import architectures
from trainer.config.types import (
    FILL,
    STRICT,
    CocoMetric,
    Count,
    DetectionCount,
    EvaluationTile,
    ExportFormat,
    Fraction,
    InputSides,
    NetworkInput,
    NonNegative,
    Overrides,
    Positive,
    Precision,
    Range,
    Resize,
    Shapes,
    Side,
    TileSide,
    Uri,
    WeightsUri,
    as_integer,
)

MINUTES = "train.minutes"  # key of a run's time limit


@dataclass(config=STRICT, frozen=True)
class DataConfig:
    """From source to shards."""

    val_fraction: Fraction = 0.1
    """Share of the training images held out for validation, if the source has no validation split."""
    test_fraction: Fraction = 0.0
    """Share of the training images held out for the test, if the source has no test split; chosen by a hash
    of their names."""
    max_bad_fraction: Fraction = 0.02
    """Maximum share of bad images or boxes; with more, the step fails. Of ten or more one may be bad, unless
    it is 0."""
    classes: list[str] = field(default_factory=list)
    """Classes to keep, in label order, by name or by the source's id (a MID of Open Images); empty keeps
    all."""
    max_images: Count = 0
    """Maximum number of images per split, chosen by a hash of their names, so that a larger number only adds
    images; 0 keeps all."""
    boxes_from: Literal["bbox", "segmentation"] = "bbox"
    """Source of the boxes of a COCO JSON: bbox, or the polygons of the segmentation if there are any."""
    box_format: Literal["auto", "xywh", "xyxy", "normalised"] = "auto"
    """Format of bbox in a COCO JSON: [x, y, width, height] in pixels, [x1, y1, x2, y2] in pixels, or [x, y,
    width, height] as fractions of the image. auto reads xywh, and fails if the boxes almost certainly have
    another format."""
    empty_images: Literal["auto", "keep", "drop"] = "auto"
    """Images without a box of the kept classes: auto drops them if the source does not annotate every object
    (Open Images)."""
    shard_bytes: Positive = 64 * 1024 * 1024
    """Target size of a shard, in bytes."""
    max_side: Positive = 1600
    """Images with a longer side are shrunk to it when shards are written, in pixels."""
    tile: TileSide = 0
    """Side of the tiles, in pixels, that training images are cut into when shards are written, for small
    objects in large images; other splits are not cut, but evaluated tile by tile. 0 disables tiles. Images
    are then not shrunk to max_side; empty_images=drop leaves out tiles without a box."""
    tile_overlap: Annotated[float, Field(ge=0, le=0.8)] = 0.2
    """Minimum overlap of neighboring tiles, as a share of a tile: objects of at most that size are complete
    in one tile. Of an object that is cut, parts below a quarter of its area are dropped."""
    jpeg_quality: Annotated[int, BeforeValidator(as_integer), Field(ge=1, le=100)] = 95
    """JPEG quality of images that are re-encoded when shards are written."""
    decode_check: bool = False
    """Decode every image when shards are written: finds damage that headers do not show, but takes
    longer."""
    processes: Count = 0
    """Number of processes that write shards; 0 starts one per core."""
    threads: Positive = 64
    """Number of concurrent image downloads."""
    exclude: Uri = ""
    """File of images to leave out: one a line, by its name in the source or by the sha256 of its file. Its
    content is part of the data's fingerprint."""
    allow_hosts: list[str] = field(default_factory=list)
    """Allowed destinations of addresses in annotations and of redirects, besides the source's own server and
    those of well-known public data sets: host, host:port, or s3://bucket, which is read with this process'
    keys."""


@dataclass(config=STRICT, frozen=True)
class LoaderConfig:
    """From shards to batches on the device."""

    image_size: Side = 800
    """Side of the square that images are fitted into, in pixels. At least 96: at 64 P6 is one pixel, and
    oneDNN's bf16 gradient of P7's weights is NaN."""
    resize: Resize = "letterbox"
    """How images are fitted into the square: letterbox keeps the aspect ratio and pads, squash stretches to
    the whole square. It is stored in the model and used wherever the model is."""
    fill: Annotated[int, BeforeValidator(as_integer), Field(ge=0, le=255)] = FILL
    """Gray value of the padding, 0 to 255."""
    workers: Positive = 4
    """Number of threads per process that read, decode and augment."""
    prefetch: Positive = 4
    """Batches prepared ahead of the training step."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    flip_vertical: Fraction = 0.0
    """Probability of a vertical flip."""
    scale: Range = field(default_factory=lambda: [1.0, 1.0])
    """Random size of the image relative to the square; above 1 it is cropped."""
    scale_draw: Literal["log", "uniform"] = "log"
    """Distribution of that size: log (half and double size are equally likely) or uniform. Large-scale jitter
    is scale=[0.1,2.0], uniform."""
    brightness: NonNegative = 0.0
    """Maximum relative change of brightness."""
    contrast: NonNegative = 0.0
    """Maximum relative change of contrast."""
    saturation: NonNegative = 0.0
    """Maximum relative change of saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Maximum change of the hue, as a fraction of the full circle."""
    color_probability: Fraction = 1.0
    """Probability of each of these four changes."""
    channel_shuffle: Fraction = 0.0
    """Probability that the color channels of an image are permuted."""
    zoom_out: Fraction = 0.0
    """Probability that the image is placed at random on a canvas of one to four times its sides."""
    iou_crop: Fraction = 0.0
    """Probability of SSD's crop, after zoom_out: 0.3 to 1 of each side, an aspect of 0.5 to 2, and a random
    least IoU with a box. Boxes whose center is outside are dropped. Images of mosaics and mix-up have neither
    zoom_out nor iou_crop."""
    mosaic: Fraction = 0.0
    """Probability that four images, neighbors in the epoch's order, share the square."""
    mixup: Fraction = 0.0
    """Probability that another image is blended in, with its boxes."""
    sizes: InputSides = field(default_factory=list)
    """Sides of the square, multiples of 32, at most 12 different ones: each step draws one, the first takes
    the largest; repeat a size to draw it more often. Empty is image_size."""
    plain_epochs: Count = 0
    """Number of final epochs without strong augmentation: only flips, at image_size."""
    sampling: Literal["plain", "repeat_factor", "class_balanced"] = "plain"
    """How often an epoch reads an image: once; more often if it has a rare class; or all classes equally
    often."""
    repeat_threshold: Annotated[float, Field(gt=0, le=1)] = 0.001
    """Share of images below which a class counts as rare, for sampling=repeat_factor."""

    @property
    def network_input(self) -> NetworkInput:
        """The square that the trained network sees."""
        return NetworkInput(self.image_size, self.resize, self.fill)


@dataclass(config=STRICT, frozen=True)
class ModelConfig:
    """Options that all detectors have. The options of an architecture are a subclass."""

    stride: ClassVar[int] = 1
    """The sides of the input square must be multiples of it, in pixels."""
    library: ClassVar[str] = ""
    """Library of its weights, torchvision or transformers; empty accepts any."""

    architecture: str = architectures.DEFAULT
    """Detector family. Each has its own options: those of another are refused."""
    weights: WeightsUri = ""
    """Pretrained weights of a detector or backbone, in the layout of the architecture's library:
    torchvision:NAME, hf:ORG/NAME, or a URI of a file or folder; none starts from scratch."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over all processes: each layer waits for all, twice a step."""
    score_threshold: Fraction = 0.05
    """Detections below this score are dropped."""
    detections_per_image: DetectionCount = 100
    """Maximum number of detections per image."""

    def options_from_weights(self, described: Mapping[str, Any], shapes: Shapes) -> Overrides:
        """Return the options that the weights define, with their values, before the network is built.

        `described` is the config.json beside the weights, empty without one; `shapes` are their tensors', by
        name. The values replace a recipe's; weights that contradict an option are refused.
        """
        return {}

    def unfreezing_options(self) -> Overrides:
        """Return the options that freeze weights, each with the value that trains them."""
        return {}


@dataclass(config=STRICT, frozen=True)
class TrainConfig:
    """Optimization, logging and checkpoints."""

    epochs: Positive = 26
    """Passes over the training split."""
    minutes: NonNegative = 0.0
    """Time limit of the training in minutes, with its validations. If it is too short for all epochs, the
    learning rate and the validations follow the elapsed time. 0 sets no limit; train.epochs alone removes it.
    """
    batch_size: Positive = 4
    """Maximum number of images per process in a forward pass."""
    global_batch: Count = 0
    """Images of one optimizer step over all processes, split evenly into as many forward passes as
    needed. 0 is batch_size x processes at the start of the run."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Update rule."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Peak learning rate."""
    lr_batch: Count = 0
    """Global batch that lr was chosen for: lr is scaled to the actual one. 0 disables scaling."""
    lr_scaling: Literal["auto", "linear", "root"] = "auto"
    """How lr scales with the global batch: linearly, or with its square root. auto is linear for SGD and
    root for Adam and AdamW."""
    scale_steps: bool = False
    """Scale the lengths in steps from lr_batch too: twice the images get half the warmup_steps and ema_steps
    and twice 1 - ema_decay."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of convolutions and linear layers."""
    norm_weight_decay: NonNegative = 0.0
    """Weight decay of normalization layers, except in RF-DETR's backbone (none)."""
    bias_weight_decay: NonNegative = 0.0
    """Weight decay of all other biases, with the same exception."""
    schedule: Literal["cosine", "multistep"] = "cosine"
    """Shape of the learning rate after the warm-up; the cosine ends at a hundredth of the peak."""
    milestones: list[Fraction] = field(default_factory=lambda: [16 / 26, 22 / 26])
    """Positions of the drops of a multistep schedule, as fractions of the training; empty keeps the peak."""
    gamma: Fraction = 0.1
    """Factor of each drop of a multistep schedule."""
    warmup_steps: Count = 1000
    """Steps of warm-up; at most a tenth of the training."""
    warmup_epochs: NonNegative = 0.0
    """Epochs of warm-up, instead of warmup_steps; 0 uses those."""
    warmup_shape: Literal["linear", "quadratic"] = "linear"
    """How the learning rate rises in the warm-up."""
    clip_norm: NonNegative = 0.0
    """Maximum norm of the gradient; 0 disables clipping."""
    precision: Precision = "bf16"
    """Precision of convolutions. bf16 becomes fp32 on a CPU or GPU without bf16 instructions."""
    compile: Literal["off", "loss", "model", "graphs"] = "loss"
    """What is compiled: nothing; the loss; the network too; both with CUDA graphs. The first step of a
    process then takes about 14 s."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the moving average of the weights that is evaluated; 0 disables it."""
    ema_ramp: Literal["inverse", "exponential", "constant"] = "inverse"
    """Decay after n steps: the smaller of ema_decay and (1 + n) / (10 + n), ema_decay x (1 - exp(-n /
    ema_steps)), or ema_decay. A constant decay of 0.9999 keeps the first weights for thousands of steps."""
    ema_steps: Positive = 1000
    """Steps of the exponential ramp."""
    seed: Count = 0
    """Seed of weights, order and augmentation."""
    trackers: list[Literal["mlflow", "wandb"]] = field(default_factory=list)
    """Trackers of metrics in addition to metrics.jsonl and TensorBoard (extras, configured by environment
    variables). MLflow is also on if MLFLOW_TRACKING_URI or MLFLOW_RUN_ID is set."""
    log_every: Positive = 20
    """Steps between two log lines."""
    validate_every: Positive = 1
    """Epochs between two validations."""
    patience: Count = 0
    """Epochs without a better validation after which the training ends; 0 disables early stopping."""
    checkpoint_steps: Count = 0
    """Steps between checkpoints within an epoch; 0 saves by time only."""
    checkpoint_minutes: NonNegative = 10.0
    """Minutes between checkpoints within an epoch; 0 saves by steps only."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints to keep, besides the best."""


@dataclass(config=STRICT, frozen=True)
class EvaluationConfig:
    """Scoring, and the gate before export."""

    batch_size: Positive = 8
    """Images of each process in a forward pass."""
    metric: CocoMetric = "coco/AP"
    """Metric that chooses the best checkpoint."""
    engine: Literal["hotcoco", "pycocotools"] = "hotcoco"
    """Library that computes the COCO metrics; both give the same values, pycocotools is about 90 times
    slower."""
    tile: EvaluationTile = -1
    """Side of the tiles that a large image is detected in, with data.tile_overlap, in pixels; detections of
    one object in neighboring tiles are merged. -1 is data.tile of the training, 0 the whole image."""
    bootstrap: Positive = 200
    """Samples of the confidence interval of a comparison with the baseline."""
    split: Literal["", "train", "val", "test"] = ""
    """Split to score; if empty, test, or val if there is no test."""
    baseline: Uri = ""
    """URI of the evaluation, checkpoint or exported model to compare with; empty is the last version of this
    model that passed; none compares with nothing."""
    gate: list[str] = field(default_factory=lambda: ["coco/AP >= 0.0"])
    """Rules that must hold before a model is exported: `coco/AP >= 0.3`, `AP[person] >= 0.2`, `AP[*] >=
    0.05`, or with 95 % confidence `coco/AP >= baseline - 0.01`."""


@dataclass(config=STRICT, frozen=True)
class ExportConfig:
    """The exported model and its checks."""

    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")] = ""
    """Name of the model: versions that pass are stored under `<data_root>/models/NAME`; empty is the name of
    the data (cards for yolo:/data/cards)."""
    other_classes: bool = False
    """Whether a version may have other classes than the previous one."""
    formats: Annotated[list[ExportFormat], Field(min_length=1)] = field(default_factory=lambda: ["onnx"])
    """Formats to write: onnx, onnx-int8 (quantized), raw (boxes and scores before their selection)."""
    check_images: Positive = 500
    """Maximum number of validation images on which exported files are compared with the trained model."""
    min_match: Fraction = 0.98
    """Minimum share of matching detections; only reported for int8 files."""
    max_ap_change: Fraction = 0.001
    """Maximum change of COCO AP of an exported file."""
    max_ap_change_int8: Fraction = 0.005
    """Maximum change of COCO AP of an int8 file."""
    calibration_images: Positive = 100
    """Number of training images for int8 calibration."""


@dataclass(config=STRICT, frozen=True)
class Config:
    """A whole configuration."""

    recipe: str = "custom"
    """Name of the recipe."""
    data: DataConfig = field(default_factory=DataConfig)
    """From source to shards."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """From shards to batches on the device."""
    model: ModelConfig = field(default_factory=architectures.default_options)
    """The detector, as the options of its architecture."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimization, logging and checkpoints."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Scoring and the gate."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """The exported model and its checks."""


SECTIONS = {
    "data": DataConfig,
    "loader": LoaderConfig,
    "train": TrainConfig,
    "evaluation": EvaluationConfig,
    "export": ExportConfig,
}
"""Sections of a configuration by name; that of the model depends on its architecture."""
