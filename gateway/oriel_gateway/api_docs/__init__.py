"""What the public port says of itself: `/`, `/docs`, `/openapi.json` and `/v1/services`.

`published` asks the pools what they serve, beside the calls; `reading` takes from their answers what may be passed on;
`document` describes it for one tenant; `pages` answers requests from what is remembered of both.
"""
