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

MINUTES = "train.minutes"  # configuration key of the time limit


@dataclass(config=STRICT, frozen=True)
class DataConfig:
    """Settings of the way from a source to shards."""

    val_fraction: Fraction = 0.1
    """Share of the training images held out for validation, if the source has no validation split."""
    test_fraction: Fraction = 0.0
    """Share of the training images held out for testing, if the source has no test split. Images are chosen
    by a hash of their names."""
    max_bad_fraction: Fraction = 0.02
    """Maximum share of bad images or boxes; the step fails above it. One bad item is always allowed among ten
    or more, unless this is 0."""
    classes: list[str] = field(default_factory=list)
    """Classes to keep, in label order, by name or by the source's id (an Open Images MID). Empty keeps all
    classes."""
    max_images: Count = 0
    """Maximum number of images per split; 0 keeps all. Images are chosen by a hash of their names, so a
    larger number only adds images."""
    boxes_from: Literal["bbox", "segmentation"] = "bbox"
    """Source of the boxes in COCO JSON: bbox, or the polygons of segmentation if there are any."""
    box_format: Literal["auto", "xywh", "xyxy", "normalised"] = "auto"
    """Format of bbox in COCO JSON: [x, y, width, height] in pixels, [x1, y1, x2, y2] in pixels, or [x, y,
    width, height] as fractions of the image. auto reads xywh, but fails if the boxes almost certainly have a
    different format."""
    empty_images: Literal["auto", "keep", "drop"] = "auto"
    """What to do with images without boxes of the kept classes. auto drops them if the source does not
    annotate every object (Open Images)."""
    shard_bytes: Positive = 64 * 1024 * 1024
    """Target size of a shard, in bytes."""
    max_side: Positive = 1600
    """Maximum length of the longer side of stored images, in pixels; larger images are shrunk."""
    tile: TileSide = 0
    """Side of the tiles, in pixels, that training images are cut into when shards are written, for small
    objects in large images. Other splits are not cut, but evaluated tile by tile. 0 disables tiles. With
    tiles, images are not shrunk to max_side, and empty_images=drop removes tiles without boxes."""
    tile_overlap: Annotated[float, Field(ge=0, le=0.8)] = 0.2
    """Minimum overlap of neighboring tiles, as a share of a tile. Objects up to the size of the overlap are
    complete in at least one tile. If a tile cuts an object, parts below a quarter of its area are dropped."""
    jpeg_quality: Annotated[int, BeforeValidator(as_integer), Field(ge=1, le=100)] = 95
    """JPEG quality of images that are re-encoded when shards are written."""
    decode_check: bool = False
    """Decode every image when shards are written. This finds damage that headers do not show, but takes
    longer."""
    processes: Count = 0
    """Number of processes that write shards; 0 starts one per core."""
    threads: Positive = 64
    """Number of concurrent image downloads."""
    exclude: Uri = ""
    """File that lists images to leave out, one per line, by name in the source or by the sha256 of the image
    file. The list is part of the data's fingerprint."""
    allow_hosts: list[str] = field(default_factory=list)
    """Additional hosts that image URLs and redirects may use: host, host:port, or s3://bucket, which is read
    with the keys of this process. The source's own server and those of well-known public data sets are always
    allowed."""


@dataclass(config=STRICT, frozen=True)
class LoaderConfig:
    """Settings of the way from shards to batches on the device."""

    image_size: Side = 800
    """Side of the square network input that images are fitted into, in pixels; at least 96. (At 64, oneDNN's
    bf16 gradient of P7's weights is NaN.)"""
    resize: Resize = "letterbox"
    """How images are fitted into the square: letterbox keeps the aspect ratio and pads, squash stretches the
    image to the whole square. The setting is stored in the model, for inference."""
    fill: Annotated[int, BeforeValidator(as_integer), Field(ge=0, le=255)] = FILL
    """Gray value of the padding, 0 to 255."""
    workers: Positive = 4
    """Number of threads per process that read, decode and augment images."""
    prefetch: Positive = 4
    """Number of batches prepared ahead of the training step."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    flip_vertical: Fraction = 0.0
    """Probability of a vertical flip."""
    scale: Range = field(default_factory=lambda: [1.0, 1.0])
    """Range of random image sizes, relative to the square. Images larger than the square (above 1) are
    cropped."""
    scale_draw: Literal["log", "uniform"] = "log"
    """Distribution of `scale`: log (half and double size are equally likely) or uniform. For large-scale
    jitter set scale=[0.1,2.0] and uniform."""
    brightness: NonNegative = 0.0
    """Maximum relative change of brightness."""
    contrast: NonNegative = 0.0
    """Maximum relative change of contrast."""
    saturation: NonNegative = 0.0
    """Maximum relative change of saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Maximum change of the hue, as a fraction of the full circle."""
    color_probability: Fraction = 1.0
    """Probability of each change of brightness, contrast, saturation and hue."""
    channel_shuffle: Fraction = 0.0
    """Probability that the color channels of an image are permuted."""
    zoom_out: Fraction = 0.0
    """Probability of placing the image at random on a canvas with sides one to four times as long."""
    iou_crop: Fraction = 0.0
    """Probability of SSD's random crop, after zoom_out: 0.3 to 1 of each side, an aspect ratio of 0.5 to 2,
    and a random minimum IoU with a box. Boxes whose center is outside the crop are dropped. Mosaics and mixed
    images use neither zoom_out nor iou_crop."""
    mosaic: Fraction = 0.0
    """Probability of combining four images, neighbors in the order of the epoch, in one square."""
    mixup: Fraction = 0.0
    """Probability of blending in another image, with its boxes."""
    sizes: InputSides = field(default_factory=list)
    """Input sizes for multi-scale training, in pixels: up to 12 different multiples of 32. Each step draws
    one, and the first step uses the largest; repeat a size to draw it more often. Empty uses image_size."""
    plain_epochs: Count = 0
    """Number of final epochs without strong augmentation: only flips, at image_size."""
    sampling: Literal["plain", "repeat_factor", "class_balanced"] = "plain"
    """How an epoch samples images: plain reads each image once, repeat_factor repeats images with rare
    classes, class_balanced draws all classes equally often."""
    repeat_threshold: Annotated[float, Field(gt=0, le=1)] = 0.001
    """For sampling=repeat_factor: a class is rare if it occurs in a smaller share of the images."""

    @property
    def network_input(self) -> NetworkInput:
        """The network's input square, and how images are fitted into it."""
        return NetworkInput(self.image_size, self.resize, self.fill)


@dataclass(config=STRICT, frozen=True)
class ModelConfig:
    """Options that all detectors have. The options of an architecture are a subclass."""

    stride: ClassVar[int] = 1
    """The sides of the input square must be multiples of the stride, in pixels."""
    library: ClassVar[str] = ""
    """Library whose published weights fit, torchvision or transformers; empty accepts any."""

    architecture: str = architectures.DEFAULT
    """Detector family. Each family has its own options; options of another family are rejected."""
    weights: WeightsUri = ""
    """Pretrained weights of a detector or backbone, in the layout of the architecture's library:
    torchvision:NAME, hf:ORG/NAME, or a URI of a file or folder; none starts from scratch."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over all processes. Each such layer then waits for all processes twice per
    step."""
    score_threshold: Fraction = 0.05
    """Detections below this score are dropped."""
    detections_per_image: DetectionCount = 100
    """Maximum number of detections per image."""

    def options_from_weights(self, config_json: Mapping[str, Any], shapes: Shapes) -> Overrides:
        """Return the options that the weights determine, with their values, before the network is built.

        `config_json` is the content of the weights' config.json, if any; `shapes` are tensor shapes by name.
        The values replace those of the recipe; weights that contradict an override are rejected.
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
    """Time limit of the training in minutes, including validations; 0 sets no limit. If it is too short for
    all epochs, learning rate and validations follow the elapsed time. Overriding only train.epochs removes
    the limit of a recipe."""
    batch_size: Positive = 4
    """Maximum number of images per process in a forward pass."""
    global_batch: Count = 0
    """Images per optimizer step over all processes, split evenly into as many forward passes as needed. 0
    uses batch_size x processes at the start of the run."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Algorithm that updates the weights; sgd uses a momentum of 0.9."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Peak learning rate."""
    lr_batch: Count = 0
    """Global batch that lr was chosen for; lr is scaled to the actual global batch. 0 disables scaling."""
    lr_scaling: Literal["auto", "linear", "root"] = "auto"
    """How lr scales with the global batch: linearly, or with its square root. auto is linear for SGD and
    root for Adam and AdamW."""
    scale_steps: bool = False
    """Also scale settings in steps from lr_batch: twice the global batch halves warmup_steps and ema_steps
    and doubles 1 - ema_decay."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of convolutions and linear layers."""
    norm_weight_decay: NonNegative = 0.0
    """Weight decay of normalization layers. RF-DETR's backbone has none."""
    bias_weight_decay: NonNegative = 0.0
    """Weight decay of all other biases. RF-DETR's backbone has none."""
    schedule: Literal["cosine", "multistep"] = "cosine"
    """Learning rate schedule after the warm-up. The cosine ends at a hundredth of the peak."""
    milestones: list[Fraction] = field(default_factory=lambda: [16 / 26, 22 / 26])
    """When a multistep schedule drops the learning rate, as fractions of the training; empty never drops."""
    gamma: Fraction = 0.1
    """Factor of each drop of a multistep schedule."""
    warmup_steps: Count = 1000
    """Steps of warm-up; at most a tenth of the training."""
    warmup_epochs: NonNegative = 0.0
    """Epochs of warm-up, instead of warmup_steps; 0 uses warmup_steps."""
    warmup_shape: Literal["linear", "quadratic"] = "linear"
    """How the learning rate rises during the warm-up."""
    clip_norm: NonNegative = 0.0
    """Maximum norm of the gradient; 0 disables clipping."""
    precision: Precision = "bf16"
    """Precision of convolutions. bf16 becomes fp32 on a CPU or GPU without bf16 instructions."""
    compile: Literal["off", "loss", "model", "graphs"] = "loss"
    """What to compile: nothing (off), the loss, the loss and the network (model), or both with CUDA graphs
    (graphs). Compilation adds about 14 s to the first step of each process."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the moving average of the weights, which is evaluated and exported; 0 disables averaging."""
    ema_ramp: Literal["inverse", "exponential", "constant"] = "inverse"
    """How the decay grows over n steps. inverse: min(ema_decay, (1 + n) / (10 + n)); exponential: ema_decay x
    (1 - exp(-n / ema_steps)); constant: ema_decay from the start, so 0.9999 keeps the initial weights for
    thousands of steps."""
    ema_steps: Positive = 1000
    """Time constant of the exponential ramp, in steps."""
    seed: Count = 0
    """Seed of initial weights, sample order and augmentation."""
    trackers: list[Literal["mlflow", "wandb"]] = field(default_factory=list)
    """Experiment trackers, in addition to metrics.jsonl and TensorBoard. Each needs its extra and is
    configured by environment variables. MLFLOW_TRACKING_URI or MLFLOW_RUN_ID also enables MLflow."""
    log_every: Positive = 20
    """Steps between log lines."""
    validate_every: Positive = 1
    """Epochs between validations."""
    patience: Count = 0
    """Stop training after this many epochs without a better validation; 0 disables early stopping."""
    checkpoint_steps: Count = 0
    """Steps between checkpoints within an epoch; 0 saves by time only."""
    checkpoint_minutes: NonNegative = 10.0
    """Minutes between checkpoints within an epoch; 0 saves by steps only."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep, in addition to the best."""


@dataclass(config=STRICT, frozen=True)
class EvaluationConfig:
    """Scoring, and the gate before export."""

    batch_size: Positive = 8
    """Images per process in a forward pass."""
    metric: CocoMetric = "coco/AP"
    """Metric that selects the best checkpoint."""
    engine: Literal["hotcoco", "pycocotools"] = "hotcoco"
    """Library that computes the COCO metrics. Both give the same values; pycocotools is about 90 times
    slower."""
    tile: EvaluationTile = -1
    """Detect objects in tiles of this side, in pixels, with data.tile_overlap; duplicates of an object in
    neighboring tiles are merged. -1 uses data.tile of the training, 0 the whole image."""
    bootstrap: Positive = 200
    """Number of bootstrap samples for the confidence interval of the difference to the baseline."""
    split: Literal["", "train", "val", "test"] = ""
    """Split to score. Empty scores test, or val if there is no test split."""
    baseline: Uri = ""
    """URI of the evaluation, checkpoint or exported model to compare with. Empty compares with the last
    version of this model that passed the gate; none skips the comparison."""
    gate: list[str] = field(default_factory=lambda: ["coco/AP >= 0.0"])
    """Rules that must hold before a model is exported, for example `coco/AP >= 0.3`, `AP[person] >= 0.2`,
    `AP[*] >= 0.05`, or with 95 % confidence `coco/AP >= baseline - 0.01`."""


@dataclass(config=STRICT, frozen=True)
class ExportConfig:
    """The exported model and its checks."""

    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")] = ""
    """Name of the model. Versions that pass the gate are stored in `<data_root>/models/NAME`. Empty uses the
    name of the data (cards for yolo:/data/cards)."""
    other_classes: bool = False
    """Whether a version may have different classes than the previous one."""
    formats: Annotated[list[ExportFormat], Field(min_length=1)] = field(default_factory=lambda: ["onnx"])
    """Formats to write: onnx, onnx-int8 (quantized), raw (all boxes and scores, without selection)."""
    check_images: Positive = 500
    """Maximum number of validation images on which exported files are compared with the trained model."""
    min_match: Fraction = 0.98
    """Minimum share of detections that match the trained model's. For int8 files it is only reported."""
    max_ap_change: Fraction = 0.001
    """Maximum change of COCO AP in an exported file."""
    max_ap_change_int8: Fraction = 0.005
    """Maximum change of COCO AP in an int8 file."""
    calibration_images: Positive = 100
    """Number of training images for int8 calibration."""


@dataclass(config=STRICT, frozen=True)
class Config:
    """A complete configuration."""

    recipe: str = "custom"
    """Name of the recipe."""
    data: DataConfig = field(default_factory=DataConfig)
    """Settings of the way from a source to shards."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Settings of the way from shards to batches on the device."""
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
"""Sections by name, except `model`, whose class depends on the architecture."""
