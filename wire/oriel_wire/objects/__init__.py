"""Read-only clients of object stores: S3, Google Cloud Storage and Azure Blob Storage behind one narrow interface.

`opening.open_client` makes a client for a `client.Location`. The clients do I/O; the packages they need (aiobotocore,
obstore) are optional and are imported when a client is opened.
"""
