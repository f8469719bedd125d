"""Opens the client for a location. This is the only module that knows every kind of store."""

from oriel_wire.objects.client import ClientLimits, Location, ObjectClient
from oriel_wire.objects.errors import ClientUnusable

_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}


def open_client(location: Location, limits: ClientLimits | None = None) -> ObjectClient:
    """A client for the bucket of `location`; nothing is sent yet. Raises ClientUnusable."""
    limits = limits or ClientLimits()
    try:
        if location.kind == "s3":
            from oriel_wire.objects.s3 import S3Client

            return S3Client(location, limits)
        from oriel_wire.objects.obstore import open_obstore

        return open_obstore(location, limits)
    except ImportError as error:
        extra = _EXTRAS[location.kind]
        raise ClientUnusable(f"{location.kind}:// needs more packages: pip install 'oriel-serving[{extra}]'") from error
