"""The playground: one page for served and exported models."""

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files

FOLDER = files("gpt.playground")
MODEL = "<!-- model -->"  # The place of the model in an exported page.


def assemble(
    engine: Sequence[str], model: str = MODEL, worker: Sequence[str] = (), title: str = "gpt"
) -> tuple[str, str]:
    """Returns the page with inline style and scripts, and its Content-Security-Policy.

    ``engine`` lists the scripts that connect the page to its model. ``worker`` lists scripts and WebAssembly of a web
    worker; a page with a worker may not connect to anything. They are part of the page's script, so the browser checks
    them as well: it runs no script whose hash differs from the policy's. ``model`` replaces the marker `MODEL`, after
    the script. ``title`` is plain text; the page shows it until the model is ready.
    """
    style = _read("page.css")
    script = '"use strict";\n' + "".join(map(_read, (*engine, "inside.js", "origins.js", "page.js")))
    if worker:
        sources = "".join(_read(name) for name in worker if name.endswith(".js"))
        kernels = "".join(_to_base64((FOLDER / name).read_bytes()) for name in worker if name.endswith(".wasm"))
        script += f'const KERNELS = "{kernels}";\nfunction runWorker() {{\n{sources}}}\n'
    policy = {
        "default-src": "'none'", "connect-src": "'none'" if worker else "'self'", "img-src": "data:",
        "style-src": _hash(style), "script-src": _hash(script), "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    if worker:
        policy |= {"script-src": f"{_hash(script)} 'wasm-unsafe-eval'", "worker-src": "blob:"}
    else:
        policy |= {"frame-ancestors": "'none'"}  # Has no effect in a file.
    page = _read("page.html").replace("<!-- title -->", html.escape(title))
    for place, content in ((">/* style */<", f">{style}<"), (">/* script */<", f">{script}<"), (MODEL, model)):
        page = page.replace(place, content)
    return page, "; ".join(f"{name} {value}" for name, value in policy.items())


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{_to_base64(hashlib.sha256(content.encode()).digest())}'"


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
