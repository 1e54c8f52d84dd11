"""Addresses of objects, and signed requests that read or write one, as the client makes them."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from minio import Minio
from minio.signer import sign_v4_s3
from minio.time import to_amz_date

NOTHING = hashlib.sha256().hexdigest()
"""Hash of the body that a request to read does not have."""

UNSIGNED = "UNSIGNED-PAYLOAD"
"""Stands for a body's hash where the connection keeps it from being changed."""


def signed(
    store: Minio,
    method: str,
    bucket: str,
    key: str,
    headers: dict[str, str],
    *,
    query: dict[str, Any] | None = None,
    sha256: str = NOTHING,
) -> tuple[str, dict[str, str]]:
    """Return where a request goes, and its headers with their signature.

    Args:
        store: knows the endpoint, the bucket's region and the keys; without keys nothing is signed.
        method: GET or PUT.
        bucket: its name.
        key: as it stands, not encoded.
        headers: all that the request has but `Host`.
        query: what follows the address.
        sha256: of the body.
    """
    region = store._get_region(bucket)
    url = store._base_url.build(
        method=method, region=region, bucket_name=bucket, object_name=key, query_params=query
    )
    keys = store._provider.retrieve() if store._provider else None
    if keys is None:
        return url.geturl(), headers
    now = datetime.now(UTC)
    told: dict[str, Any] = {
        **headers,
        "Host": url.netloc,
        "x-amz-content-sha256": sha256,
        "x-amz-date": to_amz_date(now),
    }
    if keys.session_token:
        told["x-amz-security-token"] = keys.session_token
    made: dict[str, Any] = sign_v4_s3(
        method=method, url=url, region=region, headers=told, credentials=keys, content_sha256=sha256, date=now
    )
    return url.geturl(), made
