"""Addresses → sources, by fsspec: s3://, gs://, https://, hf://, memory:// … whatever it knows."""

import datetime
import email.utils
import io
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, cast

from gpt.errors import UserError, WorkError
from gpt.text.source import Source
from gpt.text.streams import Stream, reason

_SLOW = 60.0  # seconds without a byte, after which a connection counts as lost
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")  # what file systems call it


def find(address: str) -> list[Source]:
    """The file behind an address, or the files of its folder or pattern, sorted, hidden ones skipped.

    Raises `UserError` where there is none, `WorkError` where fsspec, what it needs, or the network is missing.
    """
    try:
        files, path = _filesystem(address)
        found = dict(_infos(files, path, address))
        sources = [_source(files, path, info) for path, info in sorted(found.items())]
    except UserError:
        raise
    except Exception as error:  # of whatever library speaks the protocol
        raise told(address, error) from None
    if not sources:
        raise UserError(f"there is no file at {address}", "a folder's name, or a pattern, must lead to one")
    return sources


def _filesystem(address: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise WorkError(f"{address} needs the package fsspec", "pip install 'gpt[remote]'") from None
    options: dict[str, Any] = {}
    try:
        if address.startswith(("http://", "https://")):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SLOW, sock_read=_SLOW)
            options = {"client_kwargs": {"timeout": timeout}}  # its own ends a download after 5 minutes
        files, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = "'gpt[remote]'" if cause.name in ("aiohttp", None) else cause.name
        raise WorkError(f"{address} cannot be read yet: {reason(error)}", f"pip install {package}") from None
    except ValueError as error:
        raise UserError(f"{address}: {reason(error)}", "https://, s3://, gs://, hf:// … are read by fsspec") from None
    return files, path


def _infos(files: Any, path: str, address: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    web = address.startswith(("http://", "https://"))
    if "*" in path or "[" in path or ("?" in path and not web):
        for name, info in files.glob(path, detail=True).items():
            if info["type"] == "file":
                yield name, info
            else:
                yield from _below(files, name)
    elif web and address.endswith("/"):  # any page with links would be a folder to fsspec
        yield from _below(files, path)
    else:
        info = files.info(path)
        if info["type"] == "directory":
            yield from _below(files, path)
        else:
            yield path, info


def _below(files: Any, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, info in files.find(folder, detail=True).items():
        inside = name.removeprefix(folder).split("/")
        if info["type"] == "file" and not any(part.startswith(".") for part in inside):
            yield name, info


def _source(files: Any, path: str, info: Mapping[str, Any]) -> Source:
    address = files.unstrip_protocol(path)
    return Source(address, int(info.get("size") or 0), _time(info), partial(_open, address))


def _time(info: Mapping[str, Any]) -> int:
    """Nanoseconds, from what the file system happens to tell."""
    for key in _TIMES:
        value = info.get(key)
        try:
            if isinstance(value, str):
                iso = value[:1].isdigit()
                value = datetime.datetime.fromisoformat(value) if iso else email.utils.parsedate_to_datetime(value)
            if isinstance(value, datetime.datetime):
                value = value.timestamp()
            if isinstance(value, int | float):
                return int(value * 1e9)
        except ValueError:
            continue
    return 0


def _open(address: str) -> BinaryIO:
    try:
        files, path = _filesystem(address)
        web = address.startswith(("http://", "https://"))
        file = files.open(path, "rb", **({"block_size": 0} if web else {}))  # one request, not one for each block
    except UserError:
        raise
    except Exception as error:
        raise told(address, error) from None
    seekable = not web and file.seekable()
    return cast(BinaryIO, io.BufferedReader(Stream(file, partial(told, address), seekable=seekable)))


def told(address: str, error: Exception) -> UserError:
    """What went wrong with an address, on one line."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = getattr(cause, "status", None)
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and cause is error):
        return UserError(f"there is no {address}", "look whether the address is right")
    words = f"{status} {getattr(cause, 'message', '')}" if status else reason(cause)
    return WorkError(f"cannot read {address}: {words}", "look whether the network and the address are right")
