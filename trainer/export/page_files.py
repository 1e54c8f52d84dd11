"""The files of the local server's page: nothing of it comes from elsewhere."""

from pathlib import Path

from starlette.responses import Response

_FOLDER = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def response(name: str) -> Response:
    """Return a file of the page, which a browser asks for anew each time: the next version may be another.

    Raises:
        LookupError: there is no such file.
    """
    path = _FOLDER / name
    # One name, without a folder: the route takes no slash, and what begins with a dot has no type.
    if path.parent != _FOLDER or path.suffix not in _TYPES or not path.is_file():
        raise LookupError(f"there is no file {name!r} of the page")
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})
