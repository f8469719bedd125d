"""For whoever writes a service: `oriel logic new` and `oriel logic dev`."""
