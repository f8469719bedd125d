"""The public port's own pages: `/`, `/docs`, `/openapi.json` and `/v1/services`.

`published` fetches the descriptions of pools beside the calls; `reading` selects the parts that may be passed on;
`document` joins them for one tenant; `pages` answers requests and caches both.
"""
