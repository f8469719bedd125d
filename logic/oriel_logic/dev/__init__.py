"""Tools for authors of services: `oriel logic new`, `oriel logic dev` and `oriel logic build`."""
