# SPDX-License-Identifier: Apache-2.0
"""A table of damaged and unusual datasets: what is done to a good small one, and what must come of it.

A case either ends in a sentence (`says`: words that must be in it) or trains. Where it trains, `shows` tells which
pictures training must see, from those of the good dataset: by default the very same.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import scene
from PIL import Image

IMAGES, WIDTH, HEIGHT, POINTS = 4, 32, 24, 60
UTM = np.array([500_000.0, 4_500_000.0, 250.0])


def same(pixels: np.ndarray) -> np.ndarray:
    """The pictures of the good dataset."""
    return pixels


@dataclass(frozen=True)
class Case:
    """One dataset.

    Attributes:
        change: what is done to the good dataset, given its folder.
        says: words of the sentence that ends the run; empty: it trains.
        layout: of the good dataset. options: of the datamanager, as on the command line. data: what --data names, below
            the folder.
        shows: from a picture of the good dataset to what training sees (uint8, RGB or RGBA); None: not compared.
        off: how far a picture may be off, on average, of 255; 0 for formats without loss.
        loss: whether the first step's loss is the good dataset's: same poses, points and pictures.
        prints: words that must be printed. trained: how many images are trained on and held out together.
    """

    name: str
    change: Callable[[Path], object]
    says: tuple[str, ...] = ()
    layout: Literal["nerfstudio", "colmap", "text"] = "nerfstudio"
    options: dict[str, str] = field(default_factory=dict)
    data: str = ""
    shows: Callable[[np.ndarray], np.ndarray] | None = same
    off: float = 0
    loss: bool = False
    prints: tuple[str, ...] = ()
    trained: int = IMAGES


def write_good(root: Path, layout: str) -> scene.Scene:
    """The good dataset."""
    size = {"images": IMAGES, "width": WIDTH, "height": HEIGHT}
    if layout == "nerfstudio":
        return scene.write_nerfstudio(root, points=POINTS, **size)
    return scene.write_colmap(root, points=POINTS, binary=layout == "colmap", **size)


# ---- ways to change a dataset ----------------------------------------------------------------------------------------


def nothing(root: Path) -> None:
    """Leave it as it is."""


def both(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    """One change after the other."""

    def change(root: Path) -> None:
        for one in changes:
            one(root)

    return change


def meta(**values: object) -> Callable[[Path], None]:
    """Set entries of transforms.json; None removes one."""
    return edit(lambda m: [m.pop(k, None) if v is None else m.update({k: v}) for k, v in values.items()])


def frame(number: int, **values: object) -> Callable[[Path], None]:
    """Set entries of one frame of transforms.json; None removes one."""
    return edit(
        lambda m: [
            m["frames"][number].pop(k, None) if v is None else m["frames"][number].update({k: v})
            for k, v in values.items()
        ]
    )


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the content of transforms.json."""

    def apply(root: Path) -> None:
        file = root / "transforms.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return apply


def pose(number: int, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], None]:
    """Change the pose of a frame; in place, or by what is returned."""

    def apply(content: dict) -> None:
        matrix = np.array(content["frames"][number]["transform_matrix"], dtype=float)
        result = change(matrix)
        content["frames"][number]["transform_matrix"] = (matrix if result is None else result).tolist()

    return edit(apply)


def put(row: int, column: int, value: float) -> Callable[[np.ndarray], None]:
    """Set one entry of a pose."""

    def apply(matrix: np.ndarray) -> None:
        matrix[row, column] = value

    return apply


def cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    """Cut a file short."""

    def apply(root: Path) -> None:
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[: int(len(data) * share)])

    return apply


def write(name: str, content: bytes | str) -> Callable[[Path], object]:
    """Replace a file."""
    return lambda root: (root / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(name: str) -> Callable[[Path], None]:
    """Remove a file or folder."""
    return lambda root: shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()


def poke(name: str, at: int, layout: str, *values: float) -> Callable[[Path], None]:
    """Overwrite numbers in a binary file."""

    def apply(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        struct.pack_into(layout, data, at, *values)
        (root / name).write_bytes(bytes(data))

    return apply


def pictures(
    change: Callable[[Image.Image], Image.Image] = lambda image: image,
    suffix: str = ".png",
    **options: object,
) -> Callable[[Path], None]:
    """Write all photographs anew, changed and in another format; names in transforms.json follow."""

    def apply(root: Path) -> None:
        for file in sorted((root / "images").iterdir()):
            with Image.open(file) as image:
                changed = change(image.convert("RGB"))
            file.unlink()
            changed.save(file.with_suffix(suffix), **options)
        if suffix != ".png" and (root / "transforms.json").exists():
            text = (root / "transforms.json").read_text()
            (root / "transforms.json").write_text(text.replace('.png"', f'{suffix}"'))

    return apply


def deep(suffix: str, **options: object) -> Callable[[Path], None]:
    """Write all photographs with 16 bits a channel."""

    def apply(root: Path) -> None:
        import cv2

        for file in sorted((root / "images").iterdir()):
            pixels = cv2.imread(str(file)).astype(np.uint16) * 257
            file.unlink()
            if options:
                import tifffile

                tifffile.imwrite(file.with_suffix(suffix), pixels[..., ::-1].transpose(2, 0, 1), **options)
            else:
                cv2.imwrite(str(file.with_suffix(suffix)), pixels)
        text = (root / "transforms.json").read_text()
        (root / "transforms.json").write_text(text.replace('.png"', f'{suffix}"'))

    return apply


def grey16(root: Path) -> None:
    """Write all photographs as 16-bit grey."""
    for file in sorted((root / "images").iterdir()):
        grey = np.asarray(Image.open(file).convert("L")).astype(np.uint16) * 257
        Image.fromarray(grey).save(file)


def luma(pixels: np.ndarray) -> np.ndarray:
    """What a grey photograph shows."""
    return np.repeat(np.asarray(Image.fromarray(pixels).convert("L"))[..., None], 3, axis=2)


def dithered(pixels: np.ndarray) -> np.ndarray:
    """What a photograph of one bit a pixel shows."""
    return np.asarray(Image.fromarray(pixels).convert("1").convert("RGB"))


def see_through(image: Image.Image) -> Image.Image:
    """The left half is transparent."""
    result = image.convert("RGBA")
    alpha = np.full((image.height, image.width), 255, np.uint8)
    alpha[:, : image.width // 2] = 0
    result.putalpha(Image.fromarray(alpha))
    return result


def turned(root: Path) -> None:
    """Photographs as a camera held upright stores them: turned, with EXIF telling so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures(lambda i: i.transpose(Image.Transpose.ROTATE_90), exif=exif)(root)


def told_upside_down(root: Path) -> None:
    """EXIF asks for half a turn, but reconstruction programs look at the pixels as stored, and so do the poses."""
    exif = Image.Exif()
    exif[0x0112] = 3
    pictures(exif=exif)(root)


def sized(root: Path) -> None:
    """Every second photograph is twice as large, with its own camera."""
    content = json.loads((root / "transforms.json").read_text())
    for entry in content["frames"][1::2]:
        file = root / entry["file_path"]
        with Image.open(file) as image:
            image.resize((2 * WIDTH, 2 * HEIGHT)).save(file)
        entry.update({k: 2 * content[k] for k in ("w", "h", "fl_x", "fl_y", "cx", "cy")})
    (root / "transforms.json").write_text(json.dumps(content))


def intrinsics_in_frames(content: dict) -> None:
    """Each frame has its own camera."""
    values = {k: content.pop(k) for k in ("w", "h", "fl_x", "fl_y", "cx", "cy", "camera_model")}
    for entry in content["frames"]:
        entry.update(values)


def angle(content: dict) -> None:
    """The field of view instead of focal lengths."""
    content["camera_angle_x"] = 2 * float(np.arctan(content["w"] / (2 * content.pop("fl_x"))))
    content.pop("fl_y")


def masks(
    paint: Callable[[np.ndarray], object], suffix: str = ".png", mode: str = "L"
) -> Callable[[Path], None]:
    """A mask for each photograph; `paint` changes an array of 255."""

    def apply(root: Path) -> None:
        (root / "masks").mkdir()
        for file in sorted((root / "images").iterdir()):
            values = np.full((HEIGHT, WIDTH), 255, np.uint8)
            paint(values)
            Image.fromarray(values).convert(mode).save(root / "masks" / (file.stem + suffix))
        if (root / "transforms.json").exists():
            edit(
                lambda m: [
                    f.update(mask_path=f"masks/{Path(f['file_path']).stem}{suffix}") for f in m["frames"]
                ]
            )(root)

    return apply


def painted(**slices: slice) -> Callable[[np.ndarray], None]:
    """Black within columns."""

    def paint(values: np.ndarray) -> None:
        values[:, slices.get("columns", slice(None))] = 0

    return paint


def cloud(change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], None]:
    """Change the seed points."""

    def apply(root: Path) -> None:
        points, colors = scene.surface_points(POINTS)
        result = change(points)
        points = points if result is None else result
        scene.write_ply(root / "sparse_pc.ply", points, colors[: len(points)])

    return apply


def point(row: int, value: float) -> Callable[[np.ndarray], None]:
    """Set a coordinate of a seed point."""

    def apply(points: np.ndarray) -> None:
        points[row, 1] = value

    return apply


def typed_cloud(text: bool, types: str, order: str = "<") -> Callable[[Path], None]:
    """The same points in another kind of .ply: text or another byte order, other types."""

    def apply(root: Path) -> None:
        from plyfile import PlyData, PlyElement

        points, colors = scene.surface_points(POINTS)
        row = [(n, types) for n in "xyz"] + [(n, "u1") for n in ("red", "green", "blue")]
        values = np.empty(len(points), dtype=row)
        for i, name in enumerate(values.dtype.names or ()):
            values[name] = points[:, i].astype(np.float32) if i < 3 else colors[:, i - 3]
        element = PlyElement.describe(values, "vertex")
        PlyData([element], text=text, byte_order=order).write(str(root / "sparse_pc.ply"))

    return apply


def georeferenced(root: Path) -> None:
    """Nerfstudio folder, poses in UTM coordinates; the points come from a COLMAP text file, in float64."""
    content = json.loads((root / "transforms.json").read_text())
    for entry in content["frames"]:
        matrix = np.array(entry["transform_matrix"])
        matrix[:3, 3] += UTM
        entry["transform_matrix"] = matrix.tolist()
    xyz, rgb = scene.surface_points(POINTS)
    del content["ply_file_path"]
    content["applied_transform"] = np.eye(4)[:3].tolist()
    (root / "sparse_pc.ply").unlink()
    folder = root / "colmap" / "sparse" / "0"
    folder.mkdir(parents=True)
    rows = [
        f"{i + 1} {p[0]!r} {p[1]!r} {p[2]!r} {c[0]} {c[1]} {c[2]} 0.5"
        for i, (p, c) in enumerate(zip((xyz.astype(np.float32) + UTM).tolist(), rgb.tolist(), strict=True))
    ]
    (folder / "points3D.txt").write_text("\n".join(rows))
    (root / "transforms.json").write_text(json.dumps(content))


def one_place(content: dict) -> None:
    """All cameras at one place."""
    for entry in content["frames"]:
        for row in range(3):
            entry["transform_matrix"][row][3] = content["frames"][0]["transform_matrix"][row][3]


def keep(count: int) -> Callable[[dict], None]:
    """The first frames only."""

    def apply(content: dict) -> None:
        del content["frames"][count:]

    return apply


def giant(root: Path) -> None:
    """A small file whose header, and camera, promise ten thousand gigapixels."""
    side = 3_000_000
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"0")), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    (root / "images" / "view_001.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    frame(1, w=side, h=side)(root)


def several(root: Path) -> None:
    """Four frames, seven things wrong with the dataset."""
    remove("images/view_000.png")(root)
    cut("images/view_001.png")(root)
    frame(2, fl_x="wide")(root)
    pose(3, put(0, 3, float("nan")))(root)
    Image.new("RGB", (8, 8)).save(root / "images" / "view_003.png")
    cloud(point(7, float("nan")))(root)
    meta(applied_scale=0)(root)


def moved(name: str) -> Callable[[Path], None]:
    """The dataset in a folder of another name, below the given one."""

    def apply(root: Path) -> None:
        inside = list(root.iterdir())
        (root / name).mkdir(parents=True)
        for path in inside:
            path.rename(root / name / path.name)

    return apply


def renamed_images(prefix: str) -> Callable[[Path], None]:
    """Photographs with other names, which sort as before."""

    def apply(root: Path) -> None:
        for file in sorted((root / "images").iterdir()):
            file.rename(file.with_name(prefix + file.name))
        text = (root / "transforms.json").read_text()
        (root / "transforms.json").write_text(text.replace("images/", f"images/{prefix}"))

    return apply


def windows(content: dict) -> None:
    """Names as written on Windows."""
    for entry in content["frames"]:
        entry["file_path"] = entry["file_path"].replace("/", "\\")


def absolute(root: Path) -> None:
    """Absolute names."""
    edit(lambda m: [f.update(file_path=str(root / f["file_path"])) for f in m["frames"]])(root)


def marked(root: Path) -> None:
    """A byte order mark, as Windows' editors write it."""
    file = root / "transforms.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def linked(root: Path) -> None:
    """The folder of photographs is a link."""
    (root / "images").rename(root / "elsewhere")
    (root / "images").symlink_to(root / "elsewhere")


def tail(root: Path) -> None:
    """Bytes behind the end of each photograph, as some cameras leave them."""
    for file in (root / "images").iterdir():
        file.write_bytes(file.read_bytes() + b"\0" * 500)


def lens(model: int, *coefficients: float) -> Callable[[Path], None]:
    """Another camera model of COLMAP, with the same focal length."""

    def apply(root: Path) -> None:
        f = 0.9 * WIDTH
        head = struct.pack("<QiiQQ", 1, 1, model, WIDTH, HEIGHT)
        values = (f, f, WIDTH / 2, HEIGHT / 2, *coefficients)
        (root / SPARSE / "cameras.bin").write_bytes(head + struct.pack(f"<{len(values)}d", *values))

    return apply


def larger_beside(root: Path) -> None:
    """Another reconstruction that holds more photographs."""
    shutil.copytree(root / SPARSE, root / "sparse" / "1")
    poke("sparse/1/images.bin", 0, "<Q", 99)(root)


def nested(root: Path) -> None:
    """Photographs in folders, as COLMAP keeps several cameras apart; the names get longer."""
    folder = root / "images" / "left"
    folder.mkdir()
    for file in sorted((root / "images").glob("*.png")):
        file.rename(folder / file.name)
    text = (root / SPARSE / "images.txt").read_text()
    (root / SPARSE / "images.txt").write_text(text.replace("view_", "left/view_"))


def halved(root: Path) -> None:
    """images.txt with one line an image."""
    file = root / SPARSE / "images.txt"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if line.endswith(".png")) + "\n")


def itself(root: Path) -> None:
    """A photograph is a link to itself."""
    (root / SECOND).unlink()
    (root / SECOND).symlink_to(Path(SECOND).name)


def apart(root: Path) -> None:
    """Each photograph in a folder of its own, all with one name."""
    content = json.loads((root / "transforms.json").read_text())
    for entry in content["frames"]:
        file = root / entry["file_path"]
        (root / file.stem).mkdir()
        file.rename(root / file.stem / "photo.png")
        entry["file_path"] = f"{file.stem}/photo.png"
    (root / "transforms.json").write_text(json.dumps(content))


def resized(width: int, height: int) -> Callable[[Path], None]:
    """Photographs of another size, and what the file says of them."""
    return both(
        pictures(lambda i: i.resize((width, height))), meta(w=width, h=height, cx=width / 2, cy=height / 2)
    )


def grown(factor: float) -> Callable[[Path], None]:
    """The same scene in another unit of length."""

    def far(content: dict) -> None:
        for entry in content["frames"]:
            for row in entry["transform_matrix"][:3]:
                row[3] *= factor

    return both(edit(far), cloud(lambda p: p * factor))


def grey_alpha16(root: Path) -> None:
    """Write all photographs as grey and alpha, 16 bits each: no library here writes them."""
    for file in sorted((root / "images").iterdir()):
        grey = np.asarray(Image.open(file).convert("L")).astype(">u2") * 257
        rows = np.stack([grey, np.full_like(grey, 65535)], axis=-1).astype(">u2")
        data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
        header = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 16, 4, 0, 0, 0)
        out = b"\x89PNG\r\n\x1a\n"
        for kind, body in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
            out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        file.write_bytes(out)


def head_of_ply(
    count: int, body: bytes = b"", form: str = "binary_little_endian"
) -> Callable[[Path], object]:
    """A cloud that promises `count` points, with the given bytes behind its head."""
    head = f"ply\nformat {form} 1.0\nelement vertex {count}\n" + "".join(
        f"property float {n}\n" for n in "xyz"
    )
    return write("sparse_pc.ply", head.encode() + b"end_header\n" + body)


def replaced(root: Path, old: bytes, new: bytes) -> None:
    """Bytes of images.bin, and three more at its end."""
    file = root / SPARSE / "images.bin"
    file.write_bytes((file.read_bytes().replace(old, new) if old else file.read_bytes()) + b"xyz")


SPARSE = "sparse/0"
FIRST = "images/view_000.png"
SECOND = "images/view_001.png"
SKIP = {"on-bad-image": "skip"}
NAN, INF = float("nan"), float("inf")


# ---- the table -------------------------------------------------------------------------------------------------------

DAMAGED = [
    # files
    Case("no such folder", nothing, ("nowhere does not exist", "--data"), data="nowhere"),
    Case("an empty folder", lambda r: (r / "empty").mkdir(), ("is an empty folder",), data="empty"),
    Case("photographs alone", remove("transforms.json"), ("there are no cameras", "ns-process-data"), data="images"),
    Case("photographs of a capture", nothing, ("there are no cameras", "Did you mean --data"), data="images"),
    Case("a photograph as dataset", nothing, ("view_001.png is a file", "folder of a capture"), data=SECOND),
    Case("a device as dataset", lambda r: (r / "null").symlink_to("/dev/null"), ("null is a file",), data="null"),
    Case("an image is missing", remove(SECOND), (f"{SECOND} is missing", "frame 1 of transforms.json")),
    Case("all images are missing", remove("images"), ("4 problems", FIRST, "view_003.png is missing")),
    Case("all are missing, skipped", remove("images"), ("No usable image is left",), options=SKIP),
    Case("a folder for an image", both(remove(SECOND), lambda r: (r / SECOND).mkdir()), (f"{SECOND} is a folder",)),
    Case("upper case", lambda r: (r / SECOND).rename(r / "images/VIEW_001.PNG"), ("VIEW_001.PNG is there: rename",)),
    Case("an empty image", write(SECOND, b""), (SECOND, "it is empty")),
    Case("a web page for an image", write(SECOND, "<html>404</html>"), (SECOND, "not a known image format")),
    Case("an image cut short", cut(SECOND), (SECOND, "cut short", "on-bad-image skip")),
    Case("a JPEG cut short", both(pictures(suffix=".jpg"), cut("images/view_001.jpg", 0.7)), ("1.jpg", "cut short")),
    Case("an image with a flipped byte", poke(SECOND, 200, "<B", 7), (SECOND, "cannot be read")),
    Case("a smaller image", lambda r: Image.new("RGB", (16, 12)).save(r / SECOND), (f"{SECOND} is 16x12", "32x24")),
    Case("width and height exchanged", meta(w=HEIGHT, h=WIDTH), ("4 problems", "look exchanged")),
    Case("a giant image", giant, (SECOND, "3000000x3000000 pixels", "of memory to decode")),
    Case("16-bit TIFF by planes", deep(".tif", photometric="rgb", planarconfig="separate"), ("plane by plane",)),
    Case("CIE Lab", pictures(lambda i: Image.new("LAB", i.size), ".tif"), ("CIE L*a*b*", "Save it as RGB")),
    Case("a link to itself", itself, (f"{SECOND} is missing",)),
    Case("a name without end", frame(1, file_path="x" * 5000), ("xxx... is no name that a file can have", "frame 1")),
    Case("a zero in a name", frame(1, file_path="images/a\0b.png"), ("images/a\\x00b.png is missing",)),
    Case("half a character in a name", frame(1, file_path="images/\ud800.png"), ("images/\\ud800.png is missing",)),
    Case("the folder itself", frame(1, file_path=""), ("is a folder, but frame 1",)),
    # transforms.json
    Case("transforms.json cut short", cut("transforms.json"), ("transforms.json is no valid JSON",)),
    Case("transforms.json empty", write("transforms.json", ""), ("transforms.json is no valid JSON",)),
    Case("transforms.json a list", write("transforms.json", "[]"), ('no list "frames"',)),
    Case("transforms.json in UTF-16", write("transforms.json", '{"a"}'.encode("utf-16")), ("no valid JSON",)),
    Case("no frames", edit(lambda m: m["frames"].clear()), ("lists no frames",)),
    Case("frames of another kind", edit(lambda m: m.update(frames={"a": 1})), ('no list "frames"',)),
    Case("a frame that is a number", edit(lambda m: m["frames"].append(3)), ("frame 4 has no file_path",)),
    Case("a number as file name", frame(1, file_path=3), ("frame 1 has no file_path",)),
    Case("a frame twice", edit(lambda m: m["frames"].append(m["frames"][1])), ("are the same photograph",)),
    Case("no pose", frame(1, transform_matrix=None), ("frame 1", "no transform_matrix")),
    Case("a pose of 2x2", frame(1, transform_matrix=[[1, 0], [0, 1]]), ("frame 1", "no 4x4 matrix")),
    Case("NaN in a pose", pose(2, put(0, 3, NAN)), ("frame 2", "view_002.png", "NaN")),
    Case("infinity in a pose", pose(2, put(1, 1, INF)), ("frame 2", "NaN or infinite")),
    Case("a pose beyond all", pose(2, put(0, 3, 1e300)), ("frame 2", "1e+300 units")),
    Case("a transposed pose", pose(1, lambda m: m.T.copy()), ("frame 1", "may be transposed")),
    Case("a mirrored pose", pose(1, lambda m: m @ np.diag([-1.0, 1, 1, 1])), ("frame 1", "no rotation")),
    Case("a pose with a scale", pose(1, lambda m: m @ np.diag([2.0, 2, 2, 1])), ("frame 1", "orthonormal")),
    Case("no focal length", meta(fl_x=None), ("no fl_x", "3 more frames")),
    Case("a focal length of 0", meta(fl_x=0), ("focal lengths 0", "above 0")),
    Case("a focal length beyond all", meta(fl_x=1e300, fl_y=1e300), ("1e+300", "no camera has", "32x24")),
    Case("a focal length of nothing", meta(fl_x=1e-300, fl_y=1e-300), ("no camera has", "in pixels")),
    Case("a centre beyond all", meta(cx=1e30), ("1e+30", "no camera has")),
    Case("a negative focal length", meta(fl_x=-5), ("focal lengths -5", "above 0")),
    Case("a ragged pose", frame(1, transform_matrix=[[1, 2], [3]]), ("frame 1", "no 4x4 matrix")),
    Case("a pose of nothing", frame(1, transform_matrix=[[None] * 4] * 4), ("frame 1", "NaN or infinite")),
    Case("a width below 0", meta(w=-32), ("image size -32x24",)),
    Case("a width that is no number", meta(w=NAN), ("image size nanx24", "3 more frames")),
    Case("a list as width", meta(w=[1]), ("w of frame 0", "[1], not a number")),
    Case("numbers without end", write("transforms.json", '{"frames": [' + "9" * 6000 + "]}"), ("no valid JSON",)),
    Case("brackets without end", write("transforms.json", "[" * 100_000), ("no valid JSON",)),
    Case("sideways up", meta(orientation_override="sideways"), ("orientation_override is 'sideways'", "pca, up")),
    Case("nothing left by the lists", meta(test_filenames=[f"images/view_00{i}.png" for i in range(4)]), (
        "lists no image to train on",
    )),
    Case("a word as focal length", meta(fl_x="wide"), ("fl_x", "'wide', not a number")),
    Case("no width", meta(w=0), ("image size 0x24",)),
    Case("size and image missing", both(meta(w=None), remove(SECOND)), ("no w and h", SECOND)),
    Case("a panorama", meta(camera_model="EQUIRECTANGULAR"), ("EQUIRECTANGULAR", "not supported")),
    Case("absurd distortion", meta(k1=500.0), ("the distortion of frame", "cannot be undone")),
    Case("an absurd fisheye", meta(camera_model="OPENCV_FISHEYE", k1=500.0), ("k1..k4 of frame", "no fisheye")),
    Case("NaN distortion", frame(2, k1=NAN), ("frame 2", "must be finite")),
    Case("FISHEYE624 with few numbers", meta(camera_model="FISHEYE624", distortion_params=[0.1]), ("12 numbers",)),
    Case("an unknown image in a split", meta(train_filenames=["images/x.png"]), ("names images/x.png", "no frame")),
    Case("nothing to train on", meta(train_filenames=[], test_filenames=[FIRST]), ("lists no image to train on",)),
    Case("a transform without inverse", meta(applied_transform=[[0] * 4] * 3), ("applied_transform", "undone")),
    Case("a scale of 0", meta(applied_scale=0), ("applied_scale is 0",)),
    Case("seven things at once", several, (
        "7 problems", "view_000.png is missing", "view_001.png cannot be read", "'wide'", "NaN or infinite entries",
        "view_003.png is 8x8", "1 of 60 points", "applied_scale is 0",
    )),
    # masks
    Case("masks for some", both(masks(painted()), frame(2, mask_path=None)), ("3 of 4 frames have a mask_path",)),
    Case("a mask is missing", both(masks(painted()), remove("masks/view_001.png")), ("as the mask of", SECOND)),
    Case("a mask of another size", both(
        masks(painted()), lambda r: Image.new("L", (16, 12)).save(r / "masks/view_001.png")
    ), ("masks/view_001.png is 16x12", "Rescale the mask")),
    Case("a mask cut short", both(masks(painted(columns=slice(5, 9))), cut("masks/view_001.png", 0.6)), (
        "masks/view_001.png", "cut short",
    )),
    Case("a mask's name without end", edit(lambda m: [f.update(mask_path="y" * 5000) for f in m["frames"]]), (
        "4 problems", "is no name that a file can have", "as the mask of",
    )),
    # points
    Case("a cloud's name without end", meta(ply_file_path="x" * 5000), ("is missing, but transforms.json names it",)),
    Case("a folder as cloud", meta(ply_file_path="images"), ("images is missing", "ply_file_path")),
    Case("a cloud that promises too much", head_of_ply(10**12), ("sparse_pc.ply", "cut short")),
    Case("a cloud of words", head_of_ply(1, b"a b c\n", "ascii"), ("sparse_pc.ply", "malformed input")),
    Case("the cloud is missing", remove("sparse_pc.ply"), ("sparse_pc.ply is missing", "random points")),
    Case("the cloud is cut short", cut("sparse_pc.ply"), ("sparse_pc.ply", "cut short")),
    Case("the cloud is text", write("sparse_pc.ply", "hello"), ("sparse_pc.ply cannot be read as a point cloud",)),
    Case("NaN in the cloud", cloud(point(17, NAN)), ("1 of 60 points", "point 17")),
    Case("infinity in the cloud", cloud(point(3, INF)), ("1 of 60 points", "point 3 at")),
    Case("a point beyond all", cloud(point(3, 1e30)), ("1 of 60 points", "1e+30")),
    # COLMAP
    Case("COLMAP: no photographs", remove("images"), ("images does not exist", "--pipeline"), layout="colmap"),
    Case("COLMAP: no images.bin", remove(f"{SPARSE}/images.bin"), ("no images.bin",), layout="colmap"),
    Case("COLMAP: cameras cut", cut(f"{SPARSE}/cameras.bin"), ("cameras.bin is cut short",), layout="colmap"),
    Case("COLMAP: images cut", cut(f"{SPARSE}/images.bin"), ("images.bin is cut short",), layout="colmap"),
    Case("COLMAP: points cut", cut(f"{SPARSE}/points3D.bin", 0.99), ("points3D.bin is cut short",), layout="colmap"),
    Case("COLMAP: points absurd", poke(f"{SPARSE}/points3D.bin", 0, "<Q", 1 << 60), ("is cut short",), layout="colmap"),
    Case("COLMAP: no images", write(f"{SPARSE}/images.bin", bytes(8)), ("holds no images",), layout="colmap"),
    Case("COLMAP: NaN pose", poke(f"{SPARSE}/images.bin", 44, "<d", NAN), ("images.bin", "NaN"), layout="colmap"),
    Case("COLMAP: no rotation", poke(f"{SPARSE}/images.bin", 12, "<4d", 0, 0, 0, 0), ("NaN",), layout="colmap"),
    Case("COLMAP: unknown camera", poke(f"{SPARSE}/cameras.bin", 12, "<i", 99), ("model number 99",), layout="colmap"),
    Case("COLMAP: no such camera", poke(f"{SPARSE}/images.bin", 68, "<i", 5), ("camera 5", "lacks"), layout="colmap"),
    Case("COLMAP: infinite point", poke(f"{SPARSE}/points3D.bin", 16, "<d", INF), ("1 of 60 points",), layout="colmap"),
    Case("COLMAP: masks missing", nothing, ("masks/view_000.png is missing",), layout="colmap", options={
        "dataparser.masks-path": "masks",
    }),
    Case("COLMAP: bytes as name", lambda r: replaced(r, b"view_001.png", b"view_\xff\x1b1.png"), ("\\x1b1.png is missing",),
         layout="colmap"),
    Case("COLMAP: a name twice", lambda r: replaced(r, b"view_001.png", b"view_000.png"), ("same photograph",),
         layout="colmap"),
    Case("COLMAP: a list of others", lambda r: (r / "train_list.txt").write_text("a.png\n"), ("train_list.txt",),
         layout="colmap"),
    Case("COLMAP text: noise", write(f"{SPARSE}/images.txt", b"\x1b[31mred\x07\n\n"), ("\\x1b[31mred\\x07",),
         layout="text"),
    Case("COLMAP text: a line an image", halved, ("no line of 2D observations",), layout="text"),
    Case("COLMAP text: cut", cut(f"{SPARSE}/images.txt", 0.6), ("images.txt is cut short",), layout="text"),
    Case("COLMAP text: words", write(f"{SPARSE}/points3D.txt", "a b c\n"), ("points3D.txt is cut",), layout="text"),
]  # fmt: skip

UNUSUAL = [
    Case("as it is", nothing, loss=True),
    # files
    Case("brackets and spaces in names", both(renamed_images("[b] ü "), moved("to[/b]wn")), data="to[/b]wn", loss=True),
    Case("transforms.json itself", nothing, data="transforms.json", loss=True),
    Case("one name in several folders", apart, loss=True),
    Case("names from Windows", edit(windows), loss=True),
    Case("absolute names", absolute, loss=True),
    Case("a byte order mark", marked, loss=True),
    Case("a linked folder", linked, loss=True),
    Case("bytes behind the images", tail, loss=True),
    Case("size from the images", meta(w=None, h=None), loss=True),
    Case("a field of view", edit(angle), loss=True),
    Case("a camera for each frame", edit(intrinsics_in_frames), loss=True),
    Case("coefficients of 0", meta(k1=0, k2=0, p1=0, p2=0), loss=True),
    Case("a fisheye lens", meta(camera_model="OPENCV_FISHEYE", k1=0.01)),
    Case("two sizes", sized, shows=None),
    Case("images of one pixel", resized(1, 1), shows=None),
    Case("images of one column", resized(1, 200), shows=None),
    Case("a long focus", meta(fl_x=1e7, fl_y=1e7)),
    Case("a centre outside", meta(cx=-5000)),
    Case("millions of units", grown(1e6)),
    Case("millionths of units", grown(1e-6)),
    Case("a turned world", meta(applied_transform=[[0, 1, 0, 5], [1, 0, 0, 6], [0, 0, -1, 7]]), loss=True),
    Case("words that are numbers", meta(w="32", fl_x="28.8", applied_scale="1"), loss=True),
    Case("trained on and held out", meta(train_filenames=[FIRST, SECOND], test_filenames=[FIRST]), trained=3,
         prints=("1 images are listed to be trained on and to be held out",)),
    # formats
    Case("RGBA, opaque", pictures(lambda i: i.convert("RGBA")), loss=True),
    Case("RGBA, half transparent", pictures(see_through), shows=lambda p: np.asarray(see_through(Image.fromarray(p)))),
    Case("palette", pictures(lambda i: i.quantize(256)), off=4),
    Case("palette GIF", pictures(suffix=".gif"), off=6),
    Case("grey", pictures(lambda i: i.convert("L")), shows=luma),
    Case("grey and alpha", pictures(lambda i: i.convert("LA")), shows=luma),
    Case("one bit", pictures(lambda i: i.convert("1")), shows=dithered),
    Case("16-bit grey", grey16, shows=luma),
    Case("16-bit grey and alpha", grey_alpha16, shows=luma),
    Case("16-bit PNG", deep(".png"), loss=True),
    Case("16-bit TIFF", deep(".tiff"), loss=True),
    Case("CMYK TIFF", pictures(lambda i: i.convert("CMYK"), ".tif"), off=1),
    Case("CMYK JPEG", pictures(lambda i: i.convert("CMYK"), ".jpg", quality=100), off=5),
    Case("JPEG", pictures(suffix=".jpg", quality=100, subsampling=0), off=2),
    Case("progressive JPEG", pictures(suffix=".jpeg", quality=100, subsampling=0, progressive=True), off=2),
    Case("lossless WebP", pictures(suffix=".webp", lossless=True), loss=True),
    Case("BMP", pictures(suffix=".bmp"), loss=True),
    Case("several pages", pictures(suffix=".tif", save_all=True, append_images=[Image.new("RGB", (9, 9))]), loss=True),
    Case("EXIF: noise", pictures(suffix=".jpg", quality=100, subsampling=0, exif=b"Exif\0\0II*\0" + bytes(range(80))), off=2),
    Case("EXIF: stored turned", turned, loss=True),
    Case("EXIF: told upside down", told_upside_down, loss=True),
    # masks
    Case("masks, all white", masks(lambda v: None), loss=True),
    Case("masks, all black", masks(painted())),
    Case("masks, a part", masks(painted(columns=slice(0, 9)))),
    Case("masks of 0 and 1", masks(lambda v: np.copyto(v, 1)), loss=True),
    Case("masks in colour", masks(lambda v: None, mode="RGB"), loss=True),
    Case("masks as JPEG", masks(painted(columns=slice(0, 8)), suffix=".jpg")),
    # points
    Case("no cloud", both(remove("sparse_pc.ply"), meta(ply_file_path=None)), prints=("no seed points", "random")),
    Case("no points", cloud(lambda p: p[:0]), prints=("no seed points", "random points")),
    Case("one point", cloud(lambda p: p[:1])),
    Case("three points", cloud(lambda p: p[:3])),
    Case("all points in one place", cloud(lambda p: p * 0)),
    Case("a cloud without colours", head_of_ply(2, struct.pack("<6f", 0, 0, 0, 1, 1, 1))),
    Case("a text cloud", typed_cloud(True, "f4"), loss=True),
    Case("a double, big-endian cloud", typed_cloud(False, "f8", ">"), loss=True),
    Case("NaN in the cloud, skipped", cloud(point(17, NAN)), options=SKIP, prints=("1 of 60 seed points", "point 17")),
    # cameras
    Case("one image", edit(keep(1)), trained=1),
    Case("two images", edit(keep(2)), trained=2),
    Case("all cameras in one place", edit(one_place)),
    Case("UTM coordinates", georeferenced, loss=True),
    # left out
    Case("a missing image, skipped", remove(SECOND), options=SKIP, prints=("1 of 4 frames", "view_001"), trained=3),
    Case("a cut image, skipped", cut(SECOND), options=SKIP, prints=("1 of 4 frames", "view_001"), trained=3),
    Case("a NaN pose, skipped", pose(2, put(0, 3, NAN)), options=SKIP, prints=("view_002", "NaN"), trained=3),
    Case("a word, skipped", frame(2, fl_x="wide"), options=SKIP, prints=("'wide'", "left out"), trained=3),
    # COLMAP
    Case("COLMAP", nothing, layout="colmap", loss=True),
    Case("COLMAP, an FOV camera", lens(7, 0.2), layout="colmap", shows=None),
    Case("COLMAP, a thin prism of 0", lens(10, *[0.0] * 8), layout="colmap", shows=None),
    Case("COLMAP, a loop of links", lambda r: (r / "images" / "loop").symlink_to(".."), layout="colmap", loss=True),
    Case("COLMAP, bytes behind the end", lambda r: replaced(r, b"", b""), layout="colmap", loss=True),
    Case("COLMAP, no points", remove(f"{SPARSE}/points3D.bin"), layout="colmap", prints=("random points",)),
    Case("COLMAP, a larger one beside", larger_beside, layout="colmap", loss=True, prints=("sparse/1", "99 images")),
    Case("COLMAP, a photograph more", lambda r: shutil.copy(r / FIRST, r / "images/z.png"), layout="colmap", loss=True,
         prints=("1 of the 5 images", "no pose")),
    Case("COLMAP, masks", masks(lambda v: None), layout="colmap", options={"dataparser.masks-path": "masks"}, loss=True),
    Case("COLMAP, masks as COLMAP's", masks(lambda v: None, ".png.png"), layout="colmap", options={
        "dataparser.masks-path": "masks",
    }, loss=True),
    Case("COLMAP, a lost camera, skipped", poke(f"{SPARSE}/images.bin", 68, "<i", 5), layout="colmap", options=SKIP,
         trained=3, prints=("1 of 4 frames", "camera 5")),
    Case("COLMAP text", nothing, layout="text", loss=True),
    Case("COLMAP text, nested", nested, layout="text", loss=True),
]  # fmt: skip

CASES = [*DAMAGED, *UNUSUAL]
