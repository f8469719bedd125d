"""The errors of an object-store client. No text contains a credential, so all of them may be shown to operators.

ObjectStoreError
├── BadStoreUrl             the text is not the URL of a bucket
├── ClientUnusable          an optional package is missing, or the environment's credentials cannot be parsed
├── StoreUnavailable        the store cannot be reached, breaks off, or denies this process
├── ObjectChanged           the object was written again or deleted since it was listed
├── ObjectRefused           the store answers, but denies this one object
└── TooManyObjects          a prefix holds more objects than the limit of the listing
"""


class ObjectStoreError(Exception):
    """Root of everything this package raises. The text is one sentence for the operator."""


class BadStoreUrl(ObjectStoreError):
    """The URL does not name a bucket, or contains something that is not allowed in it, such as a password."""


class ClientUnusable(ObjectStoreError):
    """No client can be opened: a package is missing, or the environment's credentials or endpoint cannot be parsed."""


class StoreUnavailable(ObjectStoreError):
    """The store does not answer, or denies this process. A later request may succeed."""


class ObjectChanged(ObjectStoreError):
    """The object was written again or deleted since it was listed."""


class ObjectRefused(ObjectStoreError):
    """The store answers, but denies this object: a permission or a key is missing, or the object is archived."""


class TooManyObjects(ObjectStoreError):
    """More objects lie below the prefix than the limit of the listing."""
