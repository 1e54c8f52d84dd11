"""Every hyper-parameter and its default: one tree of dataclasses, loaded strictly.

The line under a field says what it means. Named whole configurations are in
`recipes.py`; nothing else holds a default.
"""

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from trainer.config import architectures
from trainer.config.types import (
    STRICT,
    CocoMetric,
    Count,
    ExportFormat,
    Fraction,
    NonNegative,
    Positive,
    Precision,
    Range,
    Side,
    Squares,
    Uri,
    WeightsUri,
    integral,
)

MINUTES = "train.minutes"
"""Key of the time that a run may take."""
QUICK_MINUTES = 4
"""What `kubedet run --quick` sets it to."""


@dataclass(config=STRICT, frozen=True)
class DataConfig:
    """From a source to shards."""

    val_fraction: Fraction = 0.1
    """Share of the training images held out where the source has no validation split."""
    test_fraction: Fraction = 0.0
    """Share of the training images held out for the test where the source has no test split. An image goes
    there or not by a hash of its name, whatever else the source holds."""
    max_bad_fraction: Fraction = 0.02
    """Share of images or boxes that may be bad before the step fails."""
    classes: list[str] = field(default_factory=list)
    """Classes to keep, in label order, by name or by the source's id (a MID of Open Images); empty
    keeps all."""
    max_images: Count = 0
    """Images of each split to keep at most, chosen by a hash of their names, so that a larger number
    only adds; 0 keeps all."""
    boxes_from: Literal["bbox", "segmentation"] = "bbox"
    """Where the boxes of a COCO JSON come from: its bbox, or the segmentation (polygons and RLE) of each
    annotation that has one."""
    box_format: Literal["auto", "xywh", "xyxy", "normalised"] = "auto"
    """How the bbox of a COCO JSON is written: [x, y, width, height] in pixels, [x1, y1, x2, y2] in pixels, or
    [x, y, width, height] as fractions of the image's width and height. auto reads xywh, and fails if the
    boxes are almost certainly written in another way."""
    merge_classes: bool = False
    """Make one class of classes whose names differ only by case, spaces or Unicode form."""
    empty_images: Literal["auto", "keep", "drop"] = "auto"
    """Images without a box of the kept classes: auto drops them where the source does not annotate
    every object (Open Images), as their content is unknown."""
    min_side: Count = 0
    """Images with a shorter side, as they are stored, are left out, in pixels; 0 keeps all."""
    min_box_side: NonNegative = 0.0
    """Boxes with a shorter side are left out, in pixels of the image as it is sharded."""
    shard_bytes: Positive = 64 * 1024 * 1024
    """Size at which a shard is closed, in bytes."""
    max_side: Positive = 1600
    """Images with a longer side are shrunk to it once, when sharded, in pixels."""
    jpeg_quality: Annotated[int, BeforeValidator(integral), Field(ge=1, le=100)] = 95
    """Quality of images that have to be written anew when sharded."""
    decode_check: bool = False
    """Decode every image when sharded, which finds damage that headers do not show, but takes longer."""
    processes: Count = 0
    """Processes that write shards; 0 is one for each core."""
    threads: Positive = 64
    """Connections that download images at the same time."""
    allow_hosts: list[str] = field(default_factory=list)
    """Where addresses in annotations, and redirects, may lead besides the public network and the source's own
    server: host, host:port, 10.0.0.0/8; s3://bucket, which is read with this process' keys."""


@dataclass(config=STRICT, frozen=True)
class LoaderConfig:
    """From shards to batches on the device."""

    image_size: Side = 800
    """Side of the square that images are fitted into (aspect kept, padded), in pixels. At
    least 96: at 64 P6 is one pixel, and oneDNN's bf16 gradient of P7's weights is then NaN."""
    workers: Positive = 4
    """Threads of each process that read, decode and augment."""
    decoder: Literal["cpu", "gpu"] = "cpu"
    """What decodes and resizes training images: these threads, or the GPU (experimental: nvJPEG;
    needs torchcodec), if the host has too few cores for it."""
    prefetch: Positive = 4
    """Batches that are prepared ahead of the training step."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    flip_vertical: Fraction = 0.0
    """Probability of a vertical flip."""
    scale: Range = field(default_factory=lambda: [1.0, 1.0])
    """Random size of the image relative to the square; above 1 it is cropped."""
    scale_draw: Literal["log", "uniform"] = "log"
    """How that size is drawn: half as large as often as twice as large, or evenly: large-scale
    jitter is scale=[0.1,2.0] drawn uniform."""
    brightness: NonNegative = 0.0
    """Largest relative change of brightness."""
    contrast: NonNegative = 0.0
    """Largest relative change of contrast."""
    saturation: NonNegative = 0.0
    """Largest relative change of saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest turn of the hue, as a share of the full circle."""
    mosaic: Fraction = 0.0
    """Probability that four images share the square; their order in the epoch tells which."""
    mixup: Fraction = 0.0
    """Probability that another image is blended in, with its boxes."""
    sizes: Squares = field(default_factory=list)
    """Sides of the square, multiples of 32, at most 8 different ones: a step draws one, the first
    takes the largest; one that stands twice is drawn twice as often. Empty is image_size alone."""
    plain_epochs: Count = 0
    """Last epochs without strong augmentation: only flips, at image_size."""
    sampling: Literal["plain", "repeat_factor", "class_balanced"] = "plain"
    """How often an epoch reads an image: once; more often where it has a class that is rare; or so
    that all classes are drawn alike."""
    repeat_threshold: Annotated[float, Field(gt=0, le=1)] = 0.001
    """Share of the images below which a class is rare for sampling=repeat_factor."""


@dataclass(config=STRICT, frozen=True)
class ModelConfig:
    """The detector: what all of them have in common. Each has further options of its own.

    An architecture's options are a subclass, whose class variables say what it can do
    (`trainer/config/architectures.py` lists the architectures).
    """

    stride: ClassVar[int] = 1
    """Sides of the input square are multiples of it, in pixels."""
    left_out_formats: ClassVar[tuple[str, ...]] = ()
    """Export formats that the architecture does not have."""
    library: ClassVar[str] = ""
    """Library whose weights it takes, torchvision or transformers; empty takes any."""
    published: ClassVar[str] = ""
    """What the names of torchvision's weights of this detector begin with; empty where it has none."""
    federated: ClassVar[bool] = False
    """Whether the losses can leave out classes of which nothing is known in an image."""

    architecture: str = architectures.DEFAULT
    """Kind of detector. Each has its own options: those of another are refused."""
    weights: WeightsUri = ""
    """Pretrained weights of a detector or backbone, in the layout of the library that the architecture
    comes from: torchvision:NAME, hf:ORG/NAME, or a URI of a file or folder; none starts from scratch."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over all processes: each layer waits for all, twice a step."""
    score_threshold: Fraction = 0.05
    """Detections below this score are dropped."""
    detections_per_image: Positive = 100
    """Detections that are kept for an image."""

    def misfit(self) -> str:
        """Tell why weights cannot fit, as far as their name tells; empty where they may."""
        return ""

    def freezing(self) -> dict[str, Any]:
        """Return the options that keep weights as they were loaded, each with the value that does not."""
        return {}


@dataclass(config=STRICT, frozen=True)
class TrainConfig:
    """The optimisation and its book-keeping."""

    epochs: Positive = 26
    """Passes over the training split."""
    minutes: NonNegative = 0.0
    """Minutes that a run may take from its training's start on, where it trains on the machine that starts it
    (launcher local): epochs, image size, batch and validations that nobody set are chosen for the number of
    images and the speed measured at the start. 0 takes everything as it stands."""
    batch_size: Positive = 4
    """Most images of each process in a forward pass."""
    accumulate: Positive = 1
    """Forward passes that make one optimiser step, where global_batch is 0."""
    global_batch: Count = 0
    """Images of one optimiser step over all processes, however many there are: each takes an
    even share in as many forward passes as it needs. 0 is batch_size x accumulate x processes
    at the start of the run."""
    find_batch_size: bool = False
    """Search, on a GPU, for the most images of a forward pass that fit into its memory, instead of
    batch_size. The global batch, of which batch_size is a factor where it is 0, stays."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Update rule."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Peak learning rate."""
    lr_batch: Count = 0
    """Global batch that lr was chosen for: with another one lr grows with it, for SGD like it, for
    Adam and AdamW like its root. 0 leaves lr as it is."""
    momentum: Fraction = 0.9
    """Momentum of SGD."""
    weight_decay: NonNegative = 1e-4
    """Decay of the weights of convolutions and other products."""
    norm_weight_decay: NonNegative = 0.0
    """Decay of the weights and biases of normalisations."""
    bias_weight_decay: NonNegative = 0.0
    """Decay of all other biases."""
    schedule: Literal["cosine", "multistep"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    final_lr: Fraction = 0.01
    """Where the cosine ends, relative to the peak."""
    milestones: list[Fraction] = field(default_factory=lambda: [16 / 26, 22 / 26])
    """Where a multistep schedule drops, as shares of the training; none keeps the peak."""
    gamma: Fraction = 0.1
    """Factor of each multistep drop."""
    warmup_steps: Count = 1000
    """Steps of linear warm-up; never more than a tenth of the training."""
    warmup_epochs: NonNegative = 0.0
    """Epochs of linear warm-up, instead of warmup_steps; 0 takes those."""
    negatives: Literal["all", "verified"] = "all"
    """Classes without a box that are trained as absent: all, or those that people looked for in
    the image (federated loss; Open Images with labels=all)."""
    clip_norm: NonNegative = 0.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: Precision = "bf16"
    """Arithmetic of convolutions. bf16 becomes fp32 on a CPU or GPU without bf16 instructions."""
    channels_last: bool = True
    """Keep images and weights in NHWC order."""
    compile: Literal["off", "loss", "model", "graphs"] = "loss"
    """What is compiled: nothing; the loss; the network too; that with CUDA graphs. The first
    step of a process then takes some 14 s."""
    compile_cache: bool = False
    """Keep what was compiled in the run's folder, for processes that go on there. It is code
    that they run: only where nobody else can write."""
    gradient_compression: bool = False
    """Exchange gradients in bf16: half the bytes, for networks of 100 Gbit/s and less."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the moving average of the weights that is evaluated; 0 keeps none."""
    seed: Count = 0
    """Seed of weights, order and augmentation; ranks offset it."""
    trackers: list[Literal["mlflow", "wandb"]] = field(default_factory=list)
    """Where metrics go besides metrics.jsonl and TensorBoard: MLflow, Weights & Biases (extras, set up
    by their own variables). MLflow also where MLFLOW_TRACKING_URI or MLFLOW_RUN_ID is set."""
    log_every: Positive = 20
    """Steps between two log lines."""
    validate_every: Positive = 1
    """Epochs between two validations."""
    patience: Count = 0
    """Epochs without a better validation after which the training ends early; 0 trains to the end."""
    checkpoint_steps: Count = 0
    """Steps between checkpoints inside an epoch; 0 saves by time alone."""
    checkpoint_minutes: NonNegative = 10.0
    """Minutes between checkpoints inside an epoch; 0 saves by steps alone."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept, besides the best."""
    keep_every: Count = 0
    """Keep the weights of every N-th epoch as checkpoints/epoch-NNN.pt; 0 keeps none. evaluate,
    export and weights read them."""


@dataclass(config=STRICT, frozen=True)
class EvaluationConfig:
    """Scoring, and the gate that decides on export."""

    batch_size: Positive = 8
    """Images of each process in a forward pass."""
    precision: Precision = "fp32"
    """Arithmetic of inference; fp32 scores what is exported."""
    metric: CocoMetric = "coco/AP"
    """Metric that chooses the best checkpoint."""
    engine: Literal["hotcoco", "pycocotools"] = "hotcoco"
    """Evaluator of the COCO metrics: the same numbers, the second is some 90 times slower."""
    bootstrap: Positive = 200
    """Samples behind the confidence of a comparison with the baseline."""
    predictions: Literal["parquet", "json"] = "parquet"
    """Form in which the predictions are kept; json is COCO's own results form, and larger."""
    split: Literal["", "train", "val", "test"] = ""
    """Split that is scored; empty is test, or val where there is no test."""
    run_code: bool = False
    """Whether an exported model may be scored by its model.pt2: that is a program, which can do here whatever
    you can."""
    baseline: Uri = ""
    """URI of the evaluation, checkpoint or exported model to compare with; empty is the last model
    that passed, under its name in the data root, and none compares with nothing."""
    gate: list[str] = field(default_factory=lambda: ["coco/AP >= 0.0"])
    """Rules that all must hold before a model is exported: `coco/AP >= 0.3`, `AP[person] >= 0.2`,
    `AP[*] >= 0.05`, or with 95 % confidence `coco/AP >= baseline - 0.01`."""


@dataclass(config=STRICT, frozen=True)
class ExportConfig:
    """The exported model and its check."""

    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")] = ""
    """Name of the model: versions that pass are kept under `<data_root>/models/NAME`; empty is that of the
    data (cards for yolo:/data/cards)."""
    other_classes: bool = False
    """Whether a version may have other classes than the one before it under its name."""
    opset: Annotated[int, BeforeValidator(integral), Field(ge=18)] = 18
    """ONNX operator set."""
    formats: Annotated[list[ExportFormat], Field(min_length=1)] = field(default_factory=lambda: ["onnx"])
    """Forms to write: onnx, onnx-int8 (quantised), torch-export, openvino, raw (for TensorRT)."""
    check_images: Positive = 500
    """Validation images, at most, on which every exported file must do as well as the trained model."""
    min_match: Fraction = 0.98
    """Share of the detections that must be matched; of an int8 file it is only reported."""
    max_ap_change: Fraction = 0.001
    """Largest change in COCO AP of an exported file."""
    max_ap_change_int8: Fraction = 0.005
    """The same for an int8 file."""
    calibration_images: Positive = 100
    """Training images on which int8 is calibrated."""


@dataclass(config=STRICT, frozen=True)
class Config:
    """A whole configuration. Built by a recipe, changed by overrides, written once."""

    recipe: str = "custom"
    """Name of the recipe it comes from."""
    data: DataConfig = field(default_factory=DataConfig)
    """From a source to shards."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """From shards to batches on the device."""
    model: ModelConfig = field(default_factory=architectures.default_options)
    """The detector, as the options of its architecture."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The optimisation and its book-keeping."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Scoring and the gate."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """The exported model and its check."""
