"""Addresses of objects and what signs a request for one, as the client knows them."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from minio import Minio
from minio.helpers import BaseURL, quote


@dataclass(frozen=True, slots=True)
class Keys:
    """Who signs, by AWS Signature Version 4."""

    region: str
    """Of the bucket."""
    access: str
    secret: str = field(repr=False)


def request(
    store: Minio,
    method: str,
    bucket: str,
    key: str,
    headers: dict[str, str],
    *,
    query: dict[str, Any] | None = None,
    sha256: str = "",
) -> tuple[str, dict[str, str], Keys | None]:
    """Return where a request goes, its headers, and who signs it: None for nobody.

    Args:
        store: knows the endpoint, the bucket's region and the keys.
        method: GET or PUT.
        bucket: its name.
        key: as it stands, not encoded.
        headers: of the request.
        query: what follows the address.
        sha256: of the body, with which the store compares what it gets.
    """
    region = store._get_region(bucket)
    if query:
        url: str = store._base_url.build(
            method=method, region=region, bucket_name=bucket, object_name=key, query_params=query
        ).geturl()
    else:
        url = _folder(store._base_url, region, bucket) + quote(key)
    keys = store._provider.retrieve() if store._provider else None
    if keys is None:
        return url, headers, None
    told = dict(headers)
    if sha256:
        told["x-amz-content-sha256"] = sha256
    if keys.session_token:
        told["x-amz-security-token"] = keys.session_token
    return url, told, Keys(region, keys.access_key, keys.secret_key)


@lru_cache(maxsize=64)
def _folder(base: BaseURL, region: str, bucket: str) -> str:
    """Return what the addresses of all objects of a bucket begin with."""
    return base.build(method="GET", region=region, bucket_name=bucket, object_name="_").geturl()[:-1]
