"""Request and answer bodies: signatures, schemas, and one file per kind of body.

Every reader checks a body's bounds before it allocates memory, and raises Refused for a body that it cannot read.
"""
