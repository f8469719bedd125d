"""Definitions of services: the decorators that an author uses, and the objects made from them."""
