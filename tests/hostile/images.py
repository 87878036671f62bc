"""Hostile images.  Each line gives the bytes of the images of a request."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from tests.hostile.case import cases


def photo(kind: str = "PNG", size: tuple[int, int] = (64, 48), mode: str = "RGB", **options: Any) -> bytes:
    """Encode an image of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def _chunk(kind: bytes, body: bytes = b"", *, crc: int | None = None, length: int | None = None) -> bytes:
    checked = zlib.crc32(kind + body) if crc is None else crc
    return struct.pack(">I", len(body) if length is None else length) + kind + body + struct.pack(">I", checked)


def _png(
    width: int = 8,
    height: int = 8,
    *,
    depth: int = 8,
    colour: int = 2,
    interlace: int = 0,
    rows: bytes | None = None,
    before: bytes = b"",
    after: bytes = b"",
    idat: bytes | None = None,
) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))
    if idat is None:
        channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 3)
        row = bytes(1 + (width * channels * depth + 7) // 8)
        idat = _chunk(b"IDAT", zlib.compress(row * height if rows is None else rows))
    return b"\x89PNG\r\n\x1a\n" + header + before + idat + after + _chunk(b"IEND")


def bomb(width: int = 7000, height: int = 7000) -> bytes:
    """A PNG of 49 million pixels in 150 kB."""
    compressor = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    data = b"".join([*(compressor.compress(row) for _ in range(height)), compressor.flush()])
    return _png(width, height, idat=_chunk(b"IDAT", data))


def _text_bomb() -> bytes:
    return _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000), 9))


def _profile_bomb() -> bytes:
    return _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(50_000_000), 9))


def _segment(marker: int, body: bytes = b"", *, length: int | None = None) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2 if length is None else length) + body


def _jpeg(**options: Any) -> bytes:
    return photo("JPEG", **options)


def _size(data: bytes, width: int, height: int) -> bytes:
    """Change the size in the header of a JPEG image."""
    place = next(data.index(bytes([0xFF, marker])) for marker in (0xC0, 0xC2) if bytes([0xFF, marker]) in data)
    return data[: place + 5] + struct.pack(">HH", height, width) + data[place + 9 :]


def _without(data: bytes, marker: int) -> bytes:
    """Remove the segments with a marker from a JPEG image."""
    while (place := data.find(bytes([0xFF, marker]))) >= 0:
        length = struct.unpack(">H", data[place + 2 : place + 4])[0]
        data = data[:place] + data[place + 2 + length :]
    return data


def _inserted(data: bytes, segments: bytes) -> bytes:
    return data[:2] + segments + data[2:]


def _scans(count: int) -> bytes:
    """A progressive JPEG of 3 million grey pixels with its last scan repeated."""
    buffer = io.BytesIO()
    Image.new("L", (2000, 1500), 99).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * count + data[-2:]


def _exif(*entries: bytes, next_directory: int = 0) -> bytes:
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", next_directory)
    return _segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0" + directory)


def _entry(tag: int, kind: int, count: int, value: int) -> bytes:
    return struct.pack("<HHII", tag, kind, count, value)


def _bmp(width: int, height: int, *, bits: int = 24, packing: int = 0, body: bytes = b"", offset: int = 54) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, packing, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(body), 0, 0, offset) + header + body


def _webp(*chunks: tuple[bytes, bytes], size: int | None = None) -> bytes:
    body = b"WEBP"
    for kind, data in chunks:
        body += kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def _canvas(width: int, height: int, flags: int = 0x02) -> tuple[bytes, bytes]:
    return b"VP8X", bytes([flags, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")


def _animated(frames: int, side: int) -> bytes:
    pictures = [Image.new("RGB", (side, side), (n % 256, 0, 0)) for n in range(frames)]
    buffer = io.BytesIO()
    pictures[0].save(buffer, "WEBP", save_all=True, append_images=pictures[1:], lossless=True)
    return buffer.getvalue()


def _apng() -> bytes:
    pictures = [Image.new("RGB", (16, 16), (n * 60, 0, 0)) for n in range(4)]
    buffer = io.BytesIO()
    pictures[0].save(buffer, "PNG", save_all=True, append_images=pictures[1:])
    return buffer.getvalue()


JPEG, PNG = _jpeg(), photo()
REQUESTS: dict[str, Callable[[], list[bytes]]] = {
    "request: 32 images of 49 million pixels": lambda: [bomb()] * 32,
    "request: a batch of no images": list,
    "request: 64 blobs of random bytes, a MiB each": lambda: [np.random.default_rng(0).bytes(1 << 20)] * 64,
    "request: more images than the batch": lambda: [PNG] * 65,
    "request: a damaged image in the last place": lambda: [PNG] * 7 + [PNG[:-400]],
}
REFUSED: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"this is no image",
    "HTML": lambda: b"<html><body>Not found</body></html>",
    "SVG with a reference to a file": lambda: (
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/>'
    ),
    "PostScript, which Pillow gives to a program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nquit\n",
    "GIF": lambda: photo("GIF"),
    "TIFF": lambda: photo("TIFF"),
    "PDF": lambda: b"%PDF-1.7\n1 0 obj<<>>endobj\n",
    "ICO": lambda: photo("ICO", size=(32, 32)),
    "PPM of 10**9 pixels": lambda: b"P6 100000 100000 255\n",
    "header of HEIC": lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
    "gzip of an image": lambda: b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + zlib.compress(PNG)[2:-4],
    "Base64 of an image": lambda: b"data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVQI12Ng",
    # PNG
    "PNG: 400 million pixels in the header": lambda: _png(20_000, 20_000, idat=_chunk(b"IDAT", zlib.compress(b""))),
    "PNG: width 0": lambda: _png(0, 8, idat=_chunk(b"IDAT", zlib.compress(b""))),
    "PNG: width 2**31": lambda: _png(2**31, 1, idat=_chunk(b"IDAT", zlib.compress(b""))),
    "PNG: 16-bit grey": lambda: _png(depth=16, colour=0),
    "PNG: 16-bit colour": lambda: _png(depth=16),
    "PNG: 16-bit colour and alpha": lambda: _png(depth=16, colour=6),
    "PNG: 16-bit grey and alpha": lambda: _png(depth=16, colour=4),
    "PNG: depth 3": lambda: _png(depth=3),
    "PNG: colour type 5": lambda: _png(colour=5),
    "PNG: no pixels": lambda: _png(idat=b""),
    "PNG: pixels that are no zlib": lambda: _png(idat=_chunk(b"IDAT", b"pixels")),
    "PNG: unknown filter of a row": lambda: _png(rows=(b"\x09" + bytes(24)) * 8),
    "PNG: interlaced, without the passes": lambda: _png(interlace=1, rows=b"\0"),
    "PNG: unknown interlacing": lambda: _png(interlace=7),
    "PNG: wrong checksum of the header": lambda: PNG[:29] + b"abcd" + PNG[33:],
    "PNG: chunk of 2**31 bytes": lambda: _png(before=_chunk(b"tEXt", b"a\0b", length=2**31)),
    "PNG: 100,000 texts": lambda: _png(before=_chunk(b"tEXt", b"a\0b") * 100_000),
    "PNG: 1 million empty chunks of pixels": lambda: _png(idat=_chunk(b"IDAT") * 1_000_000),
    "PNG: two headers": lambda: _png(before=_chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))),
    "PNG: cut": lambda: PNG[:-2000],
    # JPEG
    "JPEG: 65,535 × 65,535 pixels in the header": lambda: _size(JPEG, 65_535, 65_535),
    "JPEG: height 0": lambda: _size(JPEG, 64, 0),
    "JPEG: progressive, with 10,000 scans": lambda: _scans(10_000),
    "JPEG: 1 million comments": lambda: _inserted(JPEG, _segment(0xFE) * 1_000_000),
    "JPEG: 12 bits": lambda: JPEG.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "JPEG: lossless": lambda: JPEG.replace(b"\xff\xc0\x00\x11", b"\xff\xc3\x00\x11"),
    "JPEG: no tables of quantisation": lambda: _without(JPEG, 0xDB),
    "JPEG: no frame": lambda: _without(JPEG, 0xC0),
    "JPEG: two frames": lambda: _inserted(JPEG, JPEG[JPEG.index(b"\xff\xc0") : JPEG.index(b"\xff\xc0") + 19]),
    "JPEG: Huffman table with 4,080 codes": lambda: _inserted(JPEG, _segment(0xC4, b"\0" + b"\xff" * 16 + bytes(4080))),
    "JPEG: no components": lambda: JPEG.replace(b"\x03\x01\x22\x00", b"\x00\x01\x22\x00"),
    "JPEG: segment longer than the file": lambda: _inserted(JPEG, _segment(0xE0, b"", length=65_535)),
    "JPEG: only the begin": lambda: b"\xff\xd8\xff",
    "JPEG: cut": lambda: JPEG[:-600],
    # WebP
    "WebP: canvas of 16,384 × 16,384 pixels": lambda: _webp(_canvas(16_384, 16_384), (b"ANIM", bytes(6))),
    "WebP: cut": lambda: photo("WEBP")[:-500],
    "WebP: no pictures": lambda: _webp(_canvas(64, 64)),
    "WebP: file size of 4 GB": lambda: _webp((b"VP8 ", bytes(20)), size=2**32 - 1),
    "WebP: frame outside its canvas": lambda: _webp(
        _canvas(8, 8), (b"ANIM", bytes(6)), (b"ANMF", b"\xff\xff\xff" * 2 + bytes(10) + b"VP8L" + bytes(8))
    ),
    # BMP
    "BMP: height of -2**31": lambda: _bmp(8, -(2**31), body=bytes(64)),
    "BMP: 40,000 × 40,000 pixels in the header": lambda: _bmp(40_000, 40_000),
    "BMP: 7 bits a pixel": lambda: _bmp(8, 8, bits=7, body=bytes(64)),
    "BMP: unknown packing": lambda: _bmp(8, 8, packing=99, body=bytes(192)),
    "BMP: pixels beyond the end": lambda: _bmp(8, 8, body=bytes(192), offset=2**31),
    "BMP: header of 4 GB": lambda: b"BM" + bytes(12) + struct.pack("<I", 2**32 - 1) + bytes(40),
}
DECODED: dict[str, Callable[[], bytes]] = {
    "PNG: 49 million pixels": bomb,
    "PNG: a line of 49 million pixels": lambda: bomb(49_000_000, 1),
    "PNG: a single bit": lambda: _png(depth=1, colour=0),
    "PNG: alpha": lambda: photo(mode="RGBA"),
    "PNG: palette": lambda: photo(mode="P"),
    "PNG: palette type without a palette": lambda: _png(colour=3),
    "PNG: palette of 2 colours and indexes of 200": lambda: _png(
        colour=3, before=_chunk(b"PLTE", bytes(6)), rows=(b"\0" + b"\xc8" * 8) * 8
    ),
    "PNG: too few rows": lambda: _png(rows=bytes(25)),
    "PNG: 100 MB behind the last row": lambda: _png(rows=bytes(100_000_000)),
    "PNG: wrong checksum of the pixels": lambda: _png(idat=_chunk(b"IDAT", zlib.compress(bytes(200)), crc=1)),
    "PNG: text of 50 MB in 50 kB": lambda: _png(before=_text_bomb()),
    "PNG: colour profile of 50 MB in 50 kB": lambda: _png(before=_profile_bomb()),
    "PNG: critical chunk of nobody": lambda: _png(before=_chunk(b"EVIL", b"a")),
    "PNG: pixels before the header": lambda: b"\x89PNG\r\n\x1a\n" + _chunk(b"IDAT", zlib.compress(b"\0")) + _png()[8:],
    "PNG: animation with 2**31 frames": lambda: _png(before=_chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
    "PNG: animation of four frames": _apng,
    "PNG: an archive behind the image": lambda: PNG + b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + bytes(18),
    "JPEG: arithmetic coding": lambda: JPEG.replace(b"\xff\xc0\x00\x11", b"\xff\xc9\x00\x11"),
    "JPEG: no Huffman tables": lambda: _without(JPEG, 0xC4),
    "JPEG: segment of length 0": lambda: _inserted(JPEG, _segment(0xFE, b"", length=0)),
    "JPEG: restart after each block": lambda: _inserted(JPEG, _segment(0xDD, b"\0\x01")),
    "JPEG: CMYK": lambda: _jpeg(mode="CMYK"),
    "JPEG: rotated by EXIF": lambda: _inserted(JPEG, _exif(_entry(0x112, 3, 1, 6))),
    "JPEG: EXIF directories in a circle": lambda: _inserted(JPEG, _exif(_entry(0x112, 3, 1, 6), next_directory=8)),
    "JPEG: EXIF value of 4 GB": lambda: _inserted(JPEG, _exif(_entry(0x112, 2, 2**32 - 1, 8))),
    "JPEG: pictures of a camera with offsets beyond the end": lambda: _inserted(
        JPEG, _segment(0xE2, b"MPF\0II*\0\x08\0\0\0\x01\0" + _entry(0xB001, 4, 1, 2**31) + bytes(4))
    ),
    "JPEG: zeros in place of the pixels": lambda: JPEG[:-1000] + bytes(1000),
    "WebP: 200 frames": lambda: _animated(200, 64),
    "WebP: alpha that is damaged": lambda: photo("WEBP", mode="RGBA").replace(b"ALPH", b"ALPX"),
    "BMP: rows from the top": lambda: _bmp(8, -8, body=bytes(8 * 24)),
    "BMP: run-length codes that draw 36 million pixels": lambda: _bmp(
        6000, 6000, bits=8, packing=1, body=bytes(1024) + b"\xff\x01" * 24 + b"\0\x01", offset=54 + 1024
    ),
    "BMP: pixels inside the header": lambda: _bmp(8, 8, body=bytes(192), offset=2),
}
"""Images that decoders may take: unusual but valid, with damage outside the pixels of the first frame, or with damage
that Pillow tolerates, in training too: it reads missing rows as zeros, for example."""


def _alone(table: dict[str, Callable[[], bytes]]) -> dict[str, Callable[[], list[bytes]]]:
    """Return requests of a single image each."""
    return {name: lambda make=make: [make()] for name, make in table.items()}  # type: ignore[misc]


FORMATS = {"request: the same image under each format": lambda: [photo(k) for k in ("PNG", "JPEG", "WEBP", "BMP")]}
IMAGES = (
    *cases("image", {**REQUESTS, **_alone(REFUSED)}),
    *cases("image", {**FORMATS, **_alone(DECODED)}, may_be_answered=True),
)
"""The hostile images; ``make()`` returns the images of a request."""
