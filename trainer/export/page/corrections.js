// A COCO set of corrected images as a zip: annotations/instances_train.json and images/.
"use strict";

const MOST_FILES = 65_000, MOST_BYTES = 4_000_000_000;  // Of a zip without its later additions.
const SAME_PLACE = 0.9;  // Intersection over union; as SAME_PLACE of trainer/data/merging.py.
const SUFFIXES = {"image/jpeg": ".jpg", "image/png": ".png", "image/webp": ".webp", "image/bmp": ".bmp",
                  "image/gif": ".gif", "image/tiff": ".tif"};
const TABLE = Uint32Array.from({length: 256}, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value >>> 0;
});

export const timestamp = () => new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-");

function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = TABLE[(sum ^ byte) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}

// Little-endian bytes of pairs of a value and its number of bytes.
function numbers(...pairs) {
  return Uint8Array.from(pairs.flatMap(([value, bytes]) =>
    Array.from({length: bytes}, (_, place) => (value >>> (8 * place)) & 255)));
}

// Stored, not compressed: images are already. Names are UTF-8 (bit 11), the date is 1980-01-01.
async function zip(files) {
  const parts = [], directory = [];
  let offset = 0, length = 0;
  for (const [name, blob] of files) {
    const label = new TextEncoder().encode(name), data = new Uint8Array(await blob.arrayBuffer());
    const common = [[20, 2], [0x800, 2], [0, 2], [0, 2], [0x21, 2], [crc32(data), 4], [data.length, 4],
                    [data.length, 4], [label.length, 2], [0, 2]];
    const head = numbers([0x04034b50, 4], ...common);
    parts.push(head, label, blob);
    directory.push(numbers([0x02014b50, 4], [20, 2], ...common, [0, 2], [0, 2], [0, 2], [0, 4], [offset, 4]), label);
    offset += head.length + label.length + data.length;
    length += 46 + label.length;
  }
  const end = numbers([0x06054b50, 4], [0, 2], [0, 2], [files.length, 2], [files.length, 2], [length, 4],
                      [offset, 4], [0, 2]);
  return new Blob([...parts, ...directory, end], {type: "application/zip"});
}

// Returns a unique name that any file system can use, with the suffix of an image.
function fileName(file, taken) {
  let name = file.name.normalize("NFC").replace(/[\\/:*?"<>|\u0000-\u001f]/g, "_").replace(/^\.+/, "_") || "image";
  if (!/\.(jpe?g|png|webp|bmp|gif|tiff?)$/i.test(name)) name += SUFFIXES[file.type] ?? ".jpg";
  const dot = name.lastIndexOf("."), stem = name.slice(0, dot).slice(-100), suffix = name.slice(dot);
  let free = stem + suffix;
  for (let number = 2; taken.has(free.toLowerCase()); number++) free = `${stem}-${number}${suffix}`;
  taken.add(free.toLowerCase());
  return free;
}

// Returns COCO's JSON of images with `width`, `height` and `boxes`. Categories keep their ids of the training data if
// these are distinct integers.
function coco(model, images, names) {
  const ids = model.classes.map(item => item.original_id);
  const kept = ids.every(Number.isInteger) && new Set(ids).size === ids.length;
  const idOf = new Map(model.classes.map((item, place) => [item.id, kept ? item.original_id : place + 1]));
  const annotations = images.flatMap((image, place) => image.boxes.map(({label, box: [x1, y1, x2, y2]}) => {
    const width = Math.round((x2 - x1) * 100) / 100, height = Math.round((y2 - y1) * 100) / 100;
    return {image_id: place + 1, category_id: idOf.get(label), bbox: [x1, y1, width, height],
            area: Math.round(width * height * 100) / 100, iscrowd: 0};
  }));
  return {
    info: {description: `corrections of ${model.name} ${model.version}, by kubedet serve`,
           date_created: new Date().toISOString()},
    images: images.map((image, place) => ({id: place + 1, file_name: names[place], width: image.width,
                                           height: image.height})),
    annotations: annotations.map((annotation, place) => ({id: place + 1, ...annotation})),
    categories: model.classes.map(item => ({id: idOf.get(item.id), name: item.name})),
  };
}

function overlap([x1, y1, x2, y2], [u1, v1, u2, v2]) {
  const width = Math.min(x2, u2) - Math.max(x1, u1), height = Math.min(y2, v2) - Math.max(y1, v1);
  const both = Math.max(width, 0) * Math.max(height, 0);
  return both / ((x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - both);
}

// Returns boxes of different classes in nearly the same place: the first such group, or none.
export function sharedPlace(boxes) {
  for (const box of boxes) {
    const others = boxes.filter(other => other.label !== box.label && overlap(box.box, other.box) >= SAME_PLACE);
    if (others.length) return [box, ...others];
  }
  return [];
}

// Returns a file to download: a COCO set of the images, each with its `boxes`.
export async function pack(model, images) {
  const bytes = images.reduce((sum, image) => sum + image.file.size, 0);
  if (images.length > MOST_FILES || bytes > MOST_BYTES)
    throw new Error("a zip can hold 65,000 images and 4 GB: check fewer images");
  const taken = new Set(), names = images.map(image => fileName(image.file, taken));
  const text = JSON.stringify(coco(model, images, names), null, 1);
  const files = [["annotations/instances_train.json", new Blob([text])],
                 ...images.map((image, place) => [`images/${names[place]}`, image.file])];
  const name = `corrections-${model.name.replace(/[^A-Za-z0-9._-]+/g, "-")}-${timestamp()}.zip`;
  return new File([await zip(files)], name, {type: "application/zip"});
}
