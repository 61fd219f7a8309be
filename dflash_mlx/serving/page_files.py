"""The page at `/`: its files, and the headers under which a browser runs nothing but them.

What the page does is in `page/page.js`; `page/markdown.js` shows a model's text, `page/marked.esm.js` reads it.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FILES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "markdown.js": "text/javascript",
    "marked.esm.js": "text/javascript",
    "marked.LICENSE": "text/plain",
}
# No request to another host, no script or style within the page, and none made of text: innerHTML raises.
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether an address is the page's own, which holds nothing of anybody's."""
    return path == "/" or path.startswith("/page/")


def page_file(request: Request) -> Response:
    """The page, or a file of it."""
    name = request.path_params.get("name", "index.html")
    if name not in FILES:
        raise HTTPException(404)
    data = (files(__package__) / "page" / name).read_bytes()
    return Response(data, headers=_HEADERS, media_type=FILES[name])
